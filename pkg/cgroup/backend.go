package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Backend makes, changes and removes cgroups for a Tree. Paths are below the
// tree's root and start with "/". The tree calls one method at a time.
//
// Files are one implementation. On a host that systemd runs, a raw write into
// a unit's cgroup is undone by the next daemon-reload, so there the other
// names the same slices and values to systemd. Manager says which it is.
type Backend interface {
	// Ensure makes the cgroup at path, and its ancestors, if they do not exist,
	// and sees to it that the named controllers can be used in it as far as
	// the tree's root has them. It is called for every slice on every reload,
	// parents first, before anything else is done with the slice. A controller
	// that cannot be had is a Condition; the cgroup itself is an error.
	Ensure(path string, controllers []string) ([]Condition, error)

	// Set writes values, in the order given, to a cgroup that exists: a slice
	// of ours or one that a compartment adopted. Values that already hold are
	// not written. On return without an error each has been read back. The
	// originals of an adopted cgroup are on record before it is called, unless Keeps says
	// that the back end sees to them.
	Set(path string, values []Value) error

	// Keeps reports whether Set itself remembers what it replaces in this file of an
	// adopted cgroup, for Restore. Such a file need not be there before it is set.
	// With an error that is not known now, and the file must be left as it is.
	Keeps(path, file string) (bool, error)

	// Restore puts back what Set has replaced and remembers, but for what wanted still
	// names, by the path of the adopted cgroup. It is called after all has been set, and
	// finds also what an agent before this one replaced.
	Restore(wanted map[string][]Value) []Condition

	// Remove removes a cgroup of ours. It is called for children before
	// parents. One that does not exist is no error; one that has processes or
	// children stays, and the error is ErrBusy.
	Remove(path string) error

	// Enter moves the calling process into a new leaf of a slice that exists and returns
	// the leaf's path (see Tree.Enter).
	Enter(slice string) (string, error)

	// Move moves a process, all its threads, into a leaf of a slice that exists, or of a
	// unit that is delegated. The leaf is made if there is none.
	Move(leaf string, pid int) error

	// Release gives back what slices of ours hold of controllers, and at the root what was
	// turned on for them and nobody else has come to use. all is a walk of the tree. What
	// cannot be given back stays.
	Release(all []Cgroup)

	// Interrupt makes all that is waited for, and all that is asked for after it, end soon: the
	// agent stops. It may be called by any goroutine.
	Interrupt()
}

// cgroupfs is the Backend of plain files.
type cgroupfs struct{ t *Tree }

func (b cgroupfs) Ensure(p string, controllers []string) ([]Condition, error) {
	p = path.Clean("/" + p)
	if p == "/" {
		return nil, nil
	}
	var conds []Condition
	parent := "/"
	for _, name := range strings.Split(p[1:], "/") {
		c, err := b.enable(parent, controllers)
		if err != nil {
			return conds, fmt.Errorf("controllers below cgroup %s: %w", parent, err)
		}
		conds = append(conds, c...)
		parent = path.Join(parent, name)
		if err := b.mkdir(parent); err != nil {
			return conds, err
		}
	}
	return conds, nil
}

func (b cgroupfs) mkdir(p string) error {
	err := os.Mkdir(b.t.path(p), 0o755)
	cure := ""
	switch {
	case err == nil || errors.Is(err, unix.EEXIST):
		return nil
	case errors.Is(err, unix.EROFS):
		cure = fmt.Sprintf(" (mounted read-only: mount -o remount,rw %s)", b.t.Mount)
	case errors.Is(err, unix.EAGAIN):
		cure = " (cgroup.max.depth or cgroup.max.descendants of an ancestor is reached)"
	}
	return fmt.Errorf("make cgroup %s: %w%s", p, err, cure)
}

// tries bounds how often a cgroup that has processes is looked at again.
const tries = 5

// enable turns on the wanted controllers for the children of p, as far as p
// itself has them.
//
// Hazard: on a cgroup that holds processes the kernel refuses domain
// controllers (memory) with EBUSY, but takes threaded ones (cpu, pids) and
// without a word makes the cgroup `domain threaded`, after which no process can
// be moved below it (EOPNOTSUPP). Only the true root is exempt from both, and
// it is the one cgroup without a cgroup.type.
func (b cgroupfs) enable(p string, want []string) ([]Condition, error) {
	t := b.t
	missing, err := b.missing(p, want)
	if err != nil || len(missing) == 0 {
		return nil, err
	}
	if t.has(p, "cgroup.type") {
		typ, err := t.read(p, "cgroup.type")
		if err != nil {
			return nil, err
		}
		if typ != "domain" {
			return perController(missing, func(c string) Condition {
				return shortfall(typeOf(c), ReasonThreaded, "%s is not available below cgroup %s: its cgroup.type is %q", c, t.path(p), typ)
			}), nil
		}
		// A process that is passing through may be gone in a moment.
		var pids []int
		for i := 0; i < tries; i++ {
			if pids, err = t.pids(p); err != nil {
				return nil, err
			}
			if len(pids) == 0 {
				break
			}
			time.Sleep(time.Millisecond << i)
		}
		if len(pids) > 0 {
			return perController(missing, func(c string) Condition { return t.inside(p, c, pids) }), nil
		}
	}
	if p == "/" {
		if err := t.recordControllers(missing); err != nil {
			return nil, err
		}
	}
	var conds []Condition
	for _, c := range missing {
		if cond, ok := b.enableOne(p, c); !ok {
			conds = append(conds, cond)
		}
	}
	return conds, nil
}

// missing are the wanted controllers that p has but does not pass on.
func (b cgroupfs) missing(p string, want []string) ([]string, error) {
	if len(want) == 0 {
		return nil, nil
	}
	have, err := b.t.read(p, "cgroup.controllers")
	if err != nil {
		return nil, err
	}
	on, err := b.t.read(p, "cgroup.subtree_control")
	if err != nil {
		return nil, err
	}
	var out []string
	for _, c := range want {
		if slices.Contains(strings.Fields(have), c) && !slices.Contains(strings.Fields(on), c) {
			out = append(out, c)
		}
	}
	return out, nil
}

// enableOne turns on one controller and takes it back if that made the cgroup
// threaded, which a process that entered since the check can still cause.
func (b cgroupfs) enableOne(p, controller string) (Condition, bool) {
	t := b.t
	if err := t.write(p, "cgroup.subtree_control", "+"+controller); err != nil {
		pids, _ := t.pids(p)
		switch {
		case errors.Is(err, unix.EBUSY):
			return t.inside(p, controller, pids), false
		case errors.Is(err, unix.EINVAL) && controller == "cpu":
			return t.ungrouped(p, err), false
		}
		return shortfall(typeOf(controller), ReasonWriteFailed, "%s is not available below cgroup %s: %v", controller, t.path(p), err), false
	}
	typ, err := t.read(p, "cgroup.type")
	if p == "/" && t.Level == 0 || err == nil && typ == "domain" {
		return Condition{}, true
	}
	pids, _ := t.pids(p)
	undo := t.write(p, "cgroup.subtree_control", "-"+controller)
	cond := t.inside(p, controller, pids)
	if undo != nil {
		cond.Message += fmt.Sprintf("; it became %q and that could not be undone: %v", typ, undo)
	}
	return cond, false
}

// ungrouped is the condition of a kernel that gives the cpu controller to no cgroup with realtime
// threads (EINVAL). They are named and left where they are.
func (t *Tree) ungrouped(p string, err error) Condition {
	found := "none is seen from here"
	if in, err := t.Realtime([]string{p}); err == nil && len(in[p]) > 0 {
		found = listed(in[p])
	}
	return shortfall(TypeCPU, ReasonRealtimeThreads,
		"cpu unavailable: realtime threads below cgroup %s (%s), which this kernel (CONFIG_RT_GROUP_SCHED) does not group without a budget: %v; make them ordinary ones (chrt -o -p 0 PID) and reload, or boot with rt_group_sched=0 (6.15 and later); connection limits work", t.path(p), found, err)
}

func perController(names []string, f func(string) Condition) []Condition {
	var out []Condition
	for _, c := range names {
		out = append(out, f(c))
	}
	return out
}

// inside is the condition of an inner cgroup that holds processes.
func (t *Tree) inside(p, controller string, pids []int) Condition {
	return shortfall(typeOf(controller), ReasonProcessesInside,
		"%s is not available below cgroup %s: processes are in it (%s); move them into a child cgroup", controller, t.path(p), names(pids))
}

// names lists processes for a message: at most five, with their commands.
func names(pids []int) string {
	const most = 5
	var b strings.Builder
	for i, pid := range pids {
		if i == most {
			fmt.Fprintf(&b, " and %d more", len(pids)-most)
			break
		}
		if i > 0 {
			b.WriteString(", ")
		}
		comm, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "comm"))
		b.WriteString(strings.TrimSpace(strconv.Itoa(pid) + " " + string(comm)))
	}
	return b.String()
}

func (b cgroupfs) Set(p string, values []Value) error {
	for _, v := range values {
		now, err := b.t.read(p, v.File)
		// Somebody else may write between our writing and our reading; but not each time.
		for i := 0; i < tries && err == nil && !same(v, now); i++ {
			err = b.t.write(p, v.File, v.Value)
			if errors.Is(err, unix.ENOSPC) && v == noCPUs() {
				if v, err = b.t.everyCPU(); err == nil {
					err = b.t.write(p, v.File, v.Value)
				}
			}
			if err == nil {
				now, err = b.t.read(p, v.File)
			}
		}
		if err != nil {
			return fmt.Errorf("set %s of cgroup %s to %q: %w", v.File, p, v.Value, err)
		}
		if !same(v, now) {
			return fmt.Errorf("set %s of cgroup %s to %q: it reads %q", v.File, p, v.Value, now)
		}
	}
	return nil
}

// Keeps: originals are kept by the tree, with the cgroup.
func (b cgroupfs) Keeps(p, file string) (bool, error) { return false, nil }

// Interrupt: nothing is waited for.
func (b cgroupfs) Interrupt() {}

func (b cgroupfs) Restore(wanted map[string][]Value) []Condition { return nil }

func (b cgroupfs) Remove(p string) error {
	err := unix.Rmdir(b.t.path(p))
	switch {
	case err == nil || gone(err):
		return nil
	case errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENOTEMPTY):
		err = ErrBusy
	}
	return fmt.Errorf("remove cgroup %s: %w", p, err)
}
