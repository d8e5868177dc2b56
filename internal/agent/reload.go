package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	"bulkhead/pkg/cgroup"
	"bulkhead/pkg/conn"
	"bulkhead/pkg/policy"
)

// Load reads and compiles the policy at a path, a file or a directory, and
// refuses what this release cannot enforce. It changes nothing.
func Load(path string) (*policy.Plan, policy.Warnings, error) {
	plan, warnings, err := policy.Check(path)
	if err == nil {
		err = errors.Join(Unbuilt(plan)...)
	}
	return plan, warnings, err
}

// load is Load for the agent itself, which reads its policy again and again.
func load(path string) (*policy.Plan, policy.Warnings, error) {
	if info, err := os.Stat(path); err == nil && !info.IsDir() {
		if err := regular(path); err != nil {
			return nil, nil, fmt.Errorf("read policy: %w", err)
		}
	}
	return Load(path)
}

// Unbuilt lists what a plan asks for and the agent of this release cannot do, each a
// *policy.Error at its place.
// A part of a policy that is silently not enforced would be worse than none.
func Unbuilt(plan *policy.Plan) []error {
	var out []error
	for _, p := range plan.Providers {
		if len(p.Hosts) > 0 {
			out = append(out, p.Place.Errorf("provider %s: names are not built yet (hosts: %s): give its addresses as cidrs", p.Name, strings.Join(p.Hosts, ", ")))
		}
	}
	return out
}

// placement is which cgroups a plan puts where, at one moment.
type placement struct {
	members []conn.Member
	adopted []cgroup.Adopted
	// groups are the cgroups of all compartments: our slices, and those adopted.
	// Those that are protected are in no compartment.
	groups []cgroup.Adopted
	// found are the containers that were known.
	found cgroup.Containers
	// missing are slices of the plan that do not exist.
	missing bool
}

func place(plan *policy.Plan, all []cgroup.Cgroup, found cgroup.Containers) placement {
	p := placement{adopted: cgroup.Adopt(plan, all, found), found: found}
	byPath := make(map[string]cgroup.Cgroup, len(all))
	for _, c := range all {
		byPath[c.Path] = c
	}
	for i, c := range plan.Compartments {
		if c.Slice == "" {
			continue
		}
		slice, ok := byPath[c.Slice]
		if !ok {
			p.missing = true
			continue
		}
		p.groups = append(p.groups, cgroup.Adopted{Compartment: uint32(i), Cgroup: slice})
	}
	p.groups = append(p.groups, p.adopted...)
	protected := cgroup.Protected(plan, all)
	for _, c := range protected {
		p.members = append(p.members, conn.Member{CgroupID: c.ID, Level: c.Level, Protected: true})
	}
	// Protection wins over our own slices too (Adopt sees to the others): one
	// cgroup cannot be both.
	p.groups = slices.DeleteFunc(p.groups, func(g cgroup.Adopted) bool {
		return slices.ContainsFunc(protected, func(c cgroup.Cgroup) bool { return c.ID == g.ID })
	})
	for _, g := range p.groups {
		p.members = append(p.members, conn.Member{CgroupID: g.ID, Level: g.Level, Compartment: g.Compartment})
	}
	return p
}

// Whereabouts says who is where by a plan, of all cgroups and the containers that it names.
func Whereabouts(tree *cgroup.Tree, plan *policy.Plan, all []cgroup.Cgroup, found cgroup.Containers) conn.Whereabouts {
	return whereabouts(tree, place(plan, all, found).members, all)
}

func whereabouts(tree *cgroup.Tree, members []conn.Member, all []cgroup.Cgroup) conn.Whereabouts {
	named := make(map[uint64]conn.Member, len(members))
	for _, m := range members {
		named[m.CgroupID] = m
	}
	w := conn.Whereabouts{
		Of: func(pid uint32) (uint64, bool) {
			c, err := tree.Of(int(pid))
			return c.ID, err == nil
		},
		Members: cgroup.Inherit(all, named),
	}
	for _, c := range all {
		if _, ok := w.Members[c.ID]; !ok || c.Level == 0 {
			// Of the true root's own processes nobody is counted: kernel threads are there.
			w.Members[c.ID] = conn.Member{Protected: c.Level == 0}
		}
	}
	return w
}

// reload tries the policy as it is on disk now and says how that ended. Only
// the owner calls it.
func (a *agent) reload(ctx context.Context, trigger string) Outcome {
	before := contentHash(a.o.Policy)
	plan, warnings, err := load(a.o.Policy)
	if contentHash(a.o.Policy) == before {
		a.tried = before
	} else {
		// Which content was read is not known; the watcher will bring the next.
		a.tried = ""
	}
	if err == nil {
		err = a.commit(ctx, plan)
	}
	return a.ended(trigger, warnings, err)
}

// ended records the outcome of a reload, logs and publishes it.
func (a *agent) ended(trigger string, warnings policy.Warnings, err error) Outcome {
	out := Outcome{Time: time.Now(), Trigger: trigger, Generation: a.generation, Warnings: []string{}}
	for _, w := range warnings {
		out.Warnings = append(out.Warnings, w.String())
	}
	if err != nil {
		out.Error = err.Error()
		a.failures++
		a.log.Error("the policy was refused, the one before stays in force", "trigger", trigger,
			"policy", a.o.Policy, "generation", a.generation, "errors", strings.Split(out.Error, "\n"))
	} else {
		for _, w := range out.Warnings {
			a.log.Warn("policy", "warning", w)
		}
		a.log.Info("the policy is in force", "trigger", trigger, "policy", a.o.Policy,
			"generation", a.generation, "hash", a.plan.Hash, "mode", string(a.plan.Mode))
	}
	a.last = out
	a.publish()
	return out
}

// commit brings a plan into force. On an error nothing in force has changed. It is not begun any more once ctx is done.
func (a *agent) commit(ctx context.Context, plan *policy.Plan) (err error) {
	conds, err := a.tree.EnsureSlices(plan)
	defer func() {
		if err != nil {
			a.rollBackSlices()
			a.runtimes.follow(ctx, a.plan)
			a.lookedAt = time.Time{}
		}
	}()
	if err != nil {
		return err
	}
	if ctx.Err() != nil {
		return errors.New("the agent is stopping")
	}
	a.runtimes.follow(ctx, plan)
	all, err := a.tree.Walk()
	if err != nil {
		return err
	}
	p := place(plan, all, a.runtimes.find(plan, all))
	generation, err := a.kernel.Apply(plan, p.members)
	if generation == 0 {
		return err
	}

	// In force. What fails from here on is a condition: to call the reload
	// failed would be untrue.
	a.applied = nil
	if err != nil {
		a.applied = []cgroup.Condition{condition("Kernel", "CleanUpFailed", err)}
	}
	a.plansBefore = plansBefore(a.plansBefore, a.plan, len(a.back) > 0)
	a.plan, a.generation = plan, generation
	a.expireAt = time.Time{}
	a.setup, a.setupAt = conds, time.Now().Add(setupEvery)
	a.settle(p)
	a.sendBack()
	a.complain("place processes", a.procs.follow(plan, p.found))
	a.prune(nil)
	a.adopt(ctx)
	return nil
}

// mostBefore bounds how many plans are kept while something cannot go back.
const mostBefore = 16

// plansBefore are the plans by which processes may have been moved that do not belong where they are by the next: the last,
// and while something of those before it has not gone back (stays), these too, the youngest of them.
func plansBefore(before []*policy.Plan, last *policy.Plan, stays bool) []*policy.Plan {
	if !stays {
		before = nil
	}
	before = append(slices.Clone(before), last)
	return before[max(0, len(before)-mostBefore):]
}

// publishIfPlaced publishes what was done about processes and containers, if anything was.
func (a *agent) publishIfPlaced() {
	was := a.info.Load()
	now, conds := a.procs.says()
	state, adopted, containing := a.runtimes.state(a.placement.adopted)
	if was == nil || !reflect.DeepEqual(was.Processes, now) || !slices.Equal(conds, a.placing) ||
		!slices.Equal(state, was.Runtimes) || !slices.Equal(adopted, was.Containers) || !slices.Equal(containing, a.containing) {
		a.publish()
	}
}

// adopt counts the connections that are there already and that the plan names.
func (a *agent) adopt(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, reconcileLimit)
	defer cancel()
	all, err := a.tree.Walk()
	if err != nil {
		a.complain("look for connections from before", err)
		return
	}
	r, err := a.kernel.Adopt(limited, whereabouts(a.tree, a.placement.members, all))
	errs := r.Errors
	if err != nil {
		errs = append(errs, err)
	}
	a.reconcileErrors += uint64(len(errs))
	a.complain("look for connections from before", errors.Join(errs...))
	if r.Hidden != nil {
		a.log.Info("connections from before are counted only in network namespaces that can be entered", "hidden", r.Hidden.Error())
	}
	if r.Slots > 0 {
		a.log.Info("counted connections from before", "connections", r.Slots)
	}
	if r.Unplaced > 0 {
		a.log.Info("connections from before are not counted: their cgroup is not below the root, or cannot be told", "connections", r.Unplaced)
	}
}

// settle makes p the placement in force, values included. The kernel's members
// are already set.
func (a *agent) settle(p placement) {
	a.placement = p
	put, err := a.keeper.SetValues(a.plan, p.adopted)
	a.tellCorrected(put)
	a.values, a.unread = a.keeper.Conditions(), nil
	if err != nil { // until it is done after all, which keep sees to
		a.unread = []cgroup.Condition{condition(cgroup.TypeCPU, cgroup.ReasonWriteFailed, err)}
	}
	a.groups.Store(&groups{plan: a.plan, list: p.groups})
	a.waitPause = 0
	a.awaitRuntimes()
}

// waitSoonest is between looks at cgroups that a container runtime sets up, at first.
const waitSoonest = 20 * time.Millisecond

// awaitRuntimes has cgroups looked at again whose values wait for a container runtime.
func (a *agent) awaitRuntimes() {
	a.waitLook = nil
	if latest := a.keeper.Waiting(); latest > 0 {
		a.waitPause = min(max(waitSoonest, 2*a.waitPause), latest)
		a.waitLook = time.After(a.waitPause)
	}
}

// setWaiting sets the values of cgroups that have waited long enough.
func (a *agent) setWaiting() {
	if !a.keeper.Ready() {
		a.awaitRuntimes()
		return
	}
	a.settle(a.placement)
	a.publish()
}

// prune removes slices that left the plan and leaves whose command has ended.
func (a *agent) prune(all []cgroup.Cgroup) {
	left, err := a.tree.Prune(a.plan, all)
	a.complain("remove cgroups that are not used any more", err)
	var draining []string
	for _, l := range left {
		draining = append(draining, fmt.Sprintf("%s (processes: %d)", l.Path, l.Processes))
	}
	if text := strings.Join(draining, ", "); text != a.draining {
		a.draining = text
		if text != "" {
			a.log.Info("slices left the policy and still have processes, which are in no compartment now", "slices", text)
		}
	}
}

// rollBackSlices removes the slices of a plan that did not come into force, and
// if none is in force, the controllers that were turned on for them too.
func (a *agent) rollBackSlices() {
	var err error
	switch {
	case a.plan != nil:
		_, err = a.tree.Prune(a.plan, nil)
	case a.inherited:
		// What is in force is not known: an empty slice too many harms nobody.
	default:
		_, _, err = a.tree.Remove()
	}
	a.complain("remove the slices that were just made", err)
}

// complain logs an error of something that is tried again and again, once for
// each new text.
func (a *agent) complain(what string, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if a.complaints[what] == text {
		return
	}
	a.complaints[what] = text
	if err != nil {
		a.log.Warn("could not "+what, "error", text)
	}
}

func condition(typ, reason string, err error) cgroup.Condition {
	return cgroup.Condition{Type: typ, Status: "False", Reason: reason, Message: err.Error()}
}

// tellFullEvery is how often it is told that connections go uncounted, at most.
const tellFullEvery = 10 * time.Second

// tellFull warns of connections that found no room for a slot since it was told last.
func (a *agent) tellFull(t conn.Totals, now time.Time) {
	if t.SlotsFull <= a.full || now.Sub(a.fullTold) < tellFullEvery {
		return
	}
	a.log.Warn("connections were let through uncounted, or refused if the policy says exhausted: refuse: there was no room or no memory for their slots; bulkhead detach and a new start with a larger --max-connections make room",
		"connections", t.SlotsFull-a.full, "max_connections", t.SlotsMax)
	a.full, a.fullTold = t.SlotsFull, now
}

// repin puts back pins that somebody has removed: without them limits end with the agent,
// and no command finds what is in force.
func (a *agent) repin() {
	again, err := a.kernel.Repin()
	a.complain("pin again what somebody has removed from "+a.o.BPFFS, err)
	if again {
		a.log.Warn("somebody had removed pins; they are there again, and the limits have held meanwhile", "bpffs", a.o.BPFFS)
	}
	before := a.pins
	a.pins = nil
	if err != nil {
		a.pins = []cgroup.Condition{condition("Pins", "Missing", fmt.Errorf("limits hold only while this agent runs: %w", err))}
	}
	if !slices.Equal(before, a.pins) {
		a.publish()
	}
}

// tick is done every second: cgroups come and go, refusals happen, commands end.
func (a *agent) tick() {
	a.repin()
	refusals, err := a.reader.Refusals()
	a.complain("read refusals", err)
	for _, r := range a.told.news(refusals) {
		logRefusal(a.log, r)
	}
	totals, err := a.reader.Totals()
	a.complain("read totals", err)
	a.tellFull(totals, time.Now())
	a.expire(time.Now())
	a.complain("place processes", a.procs.tick(time.Now()))
	a.publishIfPlaced()
	// Nobody tells that the last process of a cgroup has ended: that is seen then, too.
	if a.watcher == nil || a.unwatched || time.Since(a.lookedAt) >= lookEvery {
		a.watchTree()
	}
}

// look brings into force what has become of the cgroup tree, and returns it; nil if
// it could not be read, or not be brought into force.
func (a *agent) look() []cgroup.Cgroup {
	a.lookedAt = time.Now()
	all, err := a.tree.Walk()
	a.complain("look for new cgroups", err)
	if err != nil {
		return nil
	}
	p := place(a.plan, all, a.runtimes.find(a.plan, all))
	if p.missing {
		// Somebody removed a slice of ours while it was empty.
		conds, err := a.tree.EnsureSlices(a.plan)
		a.complain("make slices again", err)
		if err != nil {
			return nil
		}
		a.setup = conds
		if all, err = a.tree.Walk(); err != nil {
			return nil
		}
		p = place(a.plan, all, a.runtimes.find(a.plan, all))
	}
	a.procs.contain(p.found)
	if !slices.Equal(p.members, a.placement.members) {
		err := a.kernel.SetMembers(p.members)
		a.complain("tell the kernel of cgroups", err)
		if err != nil {
			return nil // and try again in a second
		}
		appeared, gone := cgroup.Diff(a.placement.adopted, p.adopted)
		ended, left, moved := departed(gone, p.adopted, all)
		a.logAdopted("adopted a cgroup", appeared, p.found)
		a.logAdopted("an adopted cgroup is gone", ended, a.placement.found)
		a.logAdopted("an adopted cgroup left its compartment: nothing matches it any more", left, a.placement.found)
		a.logAdopted("an adopted cgroup left its compartment: another has it now", moved, a.placement.found)
		a.settle(p)
		a.publish()
	} else {
		a.placement.found = p.found // one may have another name that matches too
	}
	if a.litter = slices.ContainsFunc(all, func(c cgroup.Cgroup) bool { return a.unused(c) }); a.litter {
		a.tidy(all)
	}
	return all
}

// tidy removes what is not used any more.
func (a *agent) tidy(all []cgroup.Cgroup) {
	before := a.draining
	a.prune(all)
	if a.draining != before {
		a.publish()
	}
}

// expire gives back the slots of idle UDP sockets, at the moment when there can be one.
func (a *agent) expire(now time.Time) {
	if now.Before(a.expireAt) {
		return
	}
	n, next, err := a.kernel.Expire()
	a.complain("give back the slots of idle UDP sockets", err)
	a.reclaimed += uint64(n)
	// With very many sockets there can be one at any time: then to look takes a hundredth
	// of a processor, and the slots are held that much longer.
	took := time.Since(now)
	a.expireAt = now.Add(max(next, 100*took))
}

// unused reports whether a cgroup of ours is none of the plan's slices, so that
// it may be removed once it is empty.
func (a *agent) unused(c cgroup.Cgroup) bool {
	if !policy.IsOurs(c.Path) || c.Path == policy.ParentSlice {
		return false
	}
	return !slices.ContainsFunc(a.plan.Compartments, func(k policy.Compartment) bool { return k.Slice == c.Path })
}

// departed sorts cgroups that are not adopted as before by what has become of them: they do not exist any more, or
// they do and nothing matches them, or another compartment has them, maybe that of a cgroup around. The path of one may
// be another's by now: the id tells.
func departed(before, adopted []cgroup.Adopted, all []cgroup.Cgroup) (ended, left, moved []cgroup.Adopted) {
	there := make(map[uint64]bool, len(all))
	for _, c := range all {
		there[c.ID] = true
	}
	in := make(map[uint64]uint32, len(adopted))
	for _, c := range adopted {
		in[c.ID] = c.Compartment
	}
	in = cgroup.Inherit(all, in)
	for _, c := range before {
		now, ok := in[c.ID]
		switch {
		case !there[c.ID]:
			ended = append(ended, c)
		case !ok:
			left = append(left, c)
		case now != c.Compartment:
			moved = append(moved, c)
		} // else one around it has come to the same
	}
	return ended, left, moved
}

// logAdopted logs of each what its container was called when it was found last, and what it is called now.
func (a *agent) logAdopted(msg string, list []cgroup.Adopted, found cgroup.Containers) {
	if len(list) == 0 {
		return
	}
	called := a.runtimes.names()
	for _, c := range list {
		log := slog.Group("compartment")
		if int(c.Compartment) < len(a.plan.Compartments) {
			k := a.plan.Compartments[c.Compartment]
			log = slog.Group("compartment", "feature", k.Feature, "tenant", k.Tenant)
		}
		args := []any{"cgroup", c.Path, "id", c.ID, log}
		if k := found[c.ID]; k != nil {
			names := []any{"runtime", k.Runtime, "name", k.Name, "image", k.Image}
			if now, known := called[[2]string{k.Runtime, k.ID}]; known && now != k.Name {
				names = append(names, "renamed", now)
			}
			args = append(args, slog.Group("container", names...))
		}
		a.log.Info(msg, args...)
	}
}
