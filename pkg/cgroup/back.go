package cgroup

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"bulkhead/pkg/policy"
)

// belonging says whether processes that were put into compartments by one of some plans, before, belong there by another one.
type belonging struct {
	tree   *Tree
	plan   *policy.Plan
	before []*policy.Plan // none if they are not known
	now    []item
	was    [][]item // by before
	// paths are those of cgroups by their ids.
	paths map[uint64]string
	known map[int]lineage
}

// lineage is what a process comes from by the match items of plans: the slice of the nearest of it and its
// ancestors that matches an item, "" if none does that is still there.
type lineage struct {
	now string
	was []string // by before
}

func newBelonging(t *Tree, plan *policy.Plan, before []*policy.Plan, all []Cgroup) *belonging {
	b := &belonging{tree: t, plan: plan, now: placingItems(plan), paths: make(map[uint64]string, len(all)), known: map[int]lineage{}}
	for _, p := range before {
		if p != nil {
			b.before, b.was = append(b.before, p), append(b.was, placingItems(p))
		}
	}
	for _, c := range all {
		b.paths[c.ID] = c.Path
	}
	return b
}

// placed reports whether an item of the plan puts processes into a slice.
func (b *belonging) placed(slice string) bool {
	return b.plan.Mode != policy.Observe && slices.ContainsFunc(b.now, func(it item) bool {
		return it.OfProcess() && b.plan.Compartments[it.compartment].Slice == slice
	})
}

// of is the slice into which a process belongs that was put into slice. If it was by itself, or by an ancestor that is still
// there, that it was put there, it is what that one matches now, "" for nothing: then it goes back. Else it was by one that has ended,
// of which nobody can tell what it would match now: then it stays.
func (b *belonging) of(pid int, slice string) string {
	if l := b.lineage(pid); slices.Contains(l.was, slice) {
		return l.now
	}
	return slice
}

func (b *belonging) lineage(pid int) lineage {
	if l, ok := b.known[pid]; ok || pid <= 1 {
		return l
	}
	b.known[pid] = lineage{} // parents that change meanwhile could be a circle
	pr, err := processOf(pid)
	if err != nil {
		return lineage{}
	}
	l := lineage{now: b.matches(pr, b.now, b.plan), was: make([]string, len(b.was))}
	for i, items := range b.was {
		l.was[i] = b.matches(pr, items, b.before[i])
	}
	if l.now == "" || slices.Contains(l.was, "") {
		up := b.lineage(pr.parent)
		if l.now == "" {
			l.now = up.now
		}
		for i := range up.was {
			if l.was[i] == "" {
				l.was[i] = up.was[i]
			}
		}
	}
	b.known[pid] = l
	return l
}

// matches is the slice of the first item that a process itself matches, "" for none. One that was moved is where it came
// from, as long as there is such a place; and what cannot be read may match.
func (b *belonging) matches(pr process, items []item, plan *policy.Plan) string {
	where, ok := "", false
	for _, it := range items {
		if !it.OfProcess() {
			continue
		}
		hit, err := it.matchesProcess(pr)
		if errors.Is(err, ErrGone) {
			return ""
		}
		if !hit && err == nil {
			continue
		}
		if (it.Unit != "" || it.Cgroup != "") && where == "" {
			c, err := pr.in(b.tree)
			if err != nil {
				return ""
			}
			where, ok = b.paths[originOf(c, b.tree.ID)]
		}
		if it.Unit == "" && it.Cgroup == "" || !ok || it.around(where) {
			return plan.Compartments[it.compartment].Slice
		}
	}
	return ""
}

// SendBack moves the processes that were moved into compartments and do not belong there by a plan back to where they came
// from: to the unit if it is one's, to the tree's root if that is gone. A process belongs where it, or an ancestor of it, matches; one
// of which that cannot be told, as that ancestor has ended, stays as long as the plan moves any into the compartment. before are the plans
// by which they may have been moved, none if that is not known: then it can be told of none. Those that cannot go stay, and are told. Of cgroups in
// units it removes those that nobody is in.
func (t *Tree) SendBack(plan *policy.Plan, before ...*policy.Plan) []Condition {
	all, err := t.Walk()
	if err != nil {
		return []Condition{shortfall(TypePlacement, ReasonStays, "processes that were moved are not sent back: %v", err)}
	}
	b := newBelonging(t, plan, before, all)
	var conds []Condition
	for _, c := range all {
		if !isPlace(c, t.ID) {
			continue
		}
		origin, slice := partsOf(c)
		stays := func(int) bool { return false }
		if b.placed(slice) {
			// One that belongs into another compartment is a Placer's to move.
			stays = func(pid int) bool { return b.of(pid, slice) != "" }
		}
		to, ok := b.paths[origin]
		switch {
		case ok:
		case isMatchSub(c, t.ID):
			to = path.Dir(c.Path)
		default:
			to = "/"
		}
		if err := t.moveAll(c.Path, to, stays); err != nil {
			conds = append(conds, shortfall(TypePlacement, ReasonStays, "processes of %s do not go back to cgroup %s: %v", c.Path, to, err))
		}
		if isMatchSub(c, t.ID) {
			_ = unix.Rmdir(t.path(c.Path))
		}
	}
	return conds
}

// moveAll moves all processes of a cgroup but for those that stay, though they go on forking.
func (t *Tree) moveAll(from, to string, stays func(pid int) bool) error {
	for range passes {
		pids, err := t.pids(from)
		if err != nil {
			return nil
		}
		pids = slices.DeleteFunc(pids, stays)
		if len(pids) == 0 {
			return nil
		}
		for _, pid := range pids {
			if pid == 0 {
				return errors.New("processes of another pid namespace are in it") // "0" would be ourselves
			}
			if err := t.write(to, "cgroup.procs", strconv.Itoa(pid)); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("process %s: %w", names([]int{pid}), err)
			}
		}
	}
	return errors.New("they fork faster than they can be moved")
}
