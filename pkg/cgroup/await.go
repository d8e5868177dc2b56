package cgroup

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	systemd1 "github.com/coreos/go-systemd/v22/dbus"
)

// unmet is what systemd was asked for, took, and has not brought into force.
type unmet struct {
	effect // that was waited for in vain
	cause
}

func (u *unmet) Error() string { return u.text }

// await waits until there says yes of a cgroup, or of a control file of it: systemd answers before it writes. What was
// waited for in vain a moment ago is only looked at.
func (b *systemd) await(ctx context.Context, p, file string, there func() bool) error {
	began := time.Now()
	e, why, known := b.patience.known(p, file, began)
	most, asked := b.patience.left(b.patience.effect, began), known
	controller, _, _ := strings.Cut(file, ".")
	lacks := func() bool { return file != "" && !b.t().has(p, file) }
	for !there() {
		took := time.Since(began)
		if !asked && (took >= most/10 || took >= most) {
			// What systemd itself says to come never is not waited for.
			asked = true
			if lacks() {
				why, known = b.disabled(ctx, p, controller)
			}
		}
		switch {
		case e != (effect{}):
			return &unmet{e, why}
		case known || took >= most:
			e = effect{p, file}
			if lacks() {
				e = effect{path.Dir(p), controller}
			}
			if !known {
				why = b.cause(p, file)
			}
			b.patience.inVain(e, why, took, time.Now())
			return &unmet{e, why}
		}
		select {
		case <-ctx.Done():
			return errStopping
		case <-time.After(5 * time.Millisecond):
		}
	}
	b.patience.came(p, file)
	return nil
}

// awaitValue is await for a value that was set as properties of a unit.
func (b *systemd) awaitValue(p, unit string, v Value, named []systemd1.Property, there func() bool) error {
	err := b.await(b.asking, p, v.File, there)
	u, ok := err.(*unmet)
	if !ok {
		return err
	}
	var names []string
	for _, n := range named {
		names = append(names, n.Name)
	}
	reads := "is not there"
	if now, err := b.t().read(p, v.File); err == nil {
		reads = fmt.Sprintf("reads %q", now)
	}
	return &unmet{u.effect, cause{u.reason, fmt.Sprintf("systemd has %s of %s and does not bring it into force, the file %s: %s", strings.Join(names, ", "), unit, reads, u.text)}}
}

// disabled says which unit keeps a controller from a cgroup by DisableControllers=, if one does: the cgroup's own, or one
// around it.
func (b *systemd) disabled(ctx context.Context, p, controller string) (cause, bool) {
	for at := p; ; at = path.Dir(at) {
		name, iface := "-.slice", "Slice"
		if at != "/" {
			name = strings.TrimPrefix(path.Base(at), "_")
			i := slices.IndexFunc(unitTypes[:], func(t struct{ suffix, iface string }) bool { return strings.HasSuffix(name, t.suffix) })
			if i < 0 {
				return cause{}, false
			}
			iface = unitTypes[i].iface
		}
		v, err := b.get(ctx, name, iface, "DisableControllers")
		if list, ok := v.Value().([]string); err == nil && ok && slices.Contains(list, controller) {
			return cause{ReasonControllerNotEnabled, fmt.Sprintf(
				"%s has DisableControllers=%s, which keeps the %s controller from all that is in it; take that out (systemctl cat %s says where it is) and systemctl daemon-reload, or have the policy ask for no %s values there",
				name, controller, controller, name, controller)}, true
		}
		if at == "/" {
			return cause{}, false
		}
	}
}

// cause is the likely one of a wait that has run out, with its cure.
func (b *systemd) cause(p, file string) cause {
	t := b.t()
	if file == "" {
		return cause{ReasonWriteFailed, fmt.Sprintf("systemd has not done it after %v (journalctl _PID=1)", b.patience.effect)}
	}
	if t.has(p, file) {
		return cause{ReasonWriteFailed, "another drop-in of the unit, or another program, may say otherwise (systemctl cat, systemctl show)"}
	}
	controller, _, _ := strings.Cut(file, ".")
	if c, missing := t.Shortfall(controller); missing {
		return cause{c.Reason, c.Message}
	}
	// The first on the way down that has it and does not pass it on.
	at := "/"
	for _, name := range strings.Split(strings.Trim(path.Dir(p), "/"), "/") {
		on, err := t.read(at, "cgroup.subtree_control")
		if err != nil || !slices.Contains(strings.Fields(on), controller) {
			break
		}
		at = path.Join(at, name)
	}
	if in := t.realtimeBelow(at); controller == "cpu" && len(in) > 0 {
		return cause{ReasonRealtimeThreads, fmt.Sprintf(
			"realtime threads are below cgroup %s (%s), which a kernel with CONFIG_RT_GROUP_SCHED does not group without a budget: make them ordinary ones (chrt -o -p 0 PID), or boot with rt_group_sched=0 (6.15 and later)", t.path(at), listed(in))}
	}
	return cause{ReasonControllerNotEnabled, fmt.Sprintf("cgroup %s does not pass %s on (cgroup.subtree_control); journalctl _PID=1 may say why", t.path(at), controller)}
}

// realtimeBelow are the realtime threads in the children of a cgroup and below: those that a controller would group that
// is turned on for them. Its own stay as they are.
func (t *Tree) realtimeBelow(p string) (all []Thread) {
	names, err := subdirs(t.path(p))
	if err != nil {
		return nil
	}
	var children []string
	for _, name := range names {
		children = append(children, path.Join(p, name))
	}
	in, err := t.Realtime(children)
	if err != nil {
		return nil
	}
	for _, c := range children {
		all = append(all, in[c]...)
	}
	return all
}
