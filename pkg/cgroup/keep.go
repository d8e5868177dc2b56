package cgroup

import (
	"maps"
	"path"
	"slices"
	"time"

	"bulkhead/pkg/policy"
)

const (
	// CheckEvery is how often Keeper.Check is to be called. No cgroup is put right twice
	// within that time, so that two who both insist do not chase each other.
	CheckEvery = 10 * time.Second
	// retryEvery is how long a value waits that could not be set, from the end of the attempt: what stands against it
	// (use above a limit, a controller that is missing) rarely ends sooner, and systemd may let us wait for seconds.
	retryEvery = time.Minute
)

// Correction is a value of ours that somebody had changed and that has been put back.
type Correction struct {
	Feature, Tenant string // whose cgroup it is; both "" for the parent slice
	Path            string // of the cgroup, below the tree's root
	File            string
	Was             string // what it read; "" if the file was gone with its controller
	Now             string // what it was put back to
}

// Keeper sets the values of a plan and keeps them: it remembers what it brought about, so that it can tell a
// change by others from a value that could never be set. It is used by one goroutine.
type Keeper struct {
	tree *Tree
	plan *policy.Plan
	// here is the plan with the CPUs that this node has, cpus what it was made for, and
	// elsewhere the conditions of that.
	here      *policy.Plan
	cpus      nodeCPUs
	elsewhere []Condition
	kept      map[string]*kept // by path
	// settled are the cgroups in which there is nothing to keep, by path: most of the tree.
	settled map[string]settled
	// restore are conditions of what could not be put back.
	restore []Condition
	// waiting are cgroups whose values wait for a runtime, with their ids.
	waiting map[string]waits
	again   bool
}

// kept is one cgroup whose values are ours.
type kept struct {
	Cgroup
	feature *policy.Feature // that is asked; nil where the plan asks for nothing
	name    policy.Compartment
	values  []Value
	// held are the files that have read as they should since the value was set.
	held  map[string]bool
	conds []Condition
	// next is when it may be put right again, and retry when what falls short is tried again.
	next, retry time.Time
}

// settled is a cgroup in which what a feature asks, or nothing, was brought about and nothing is left to keep.
type settled struct {
	id      uint64
	feature *policy.Feature
}

// Again makes the next SetValues bring about everything, as for another plan: more can be set now, say.
func (k *Keeper) Again() { k.again = true }

// NewKeeper returns one that has set nothing yet.
func NewKeeper(t *Tree) *Keeper { return &Keeper{tree: t, kept: map[string]*kept{}} }

// Conditions are the shortfalls as of the last SetValues or Check.
func (k *Keeper) Conditions() []Condition {
	var conds []Condition
	for _, p := range slices.Sorted(maps.Keys(k.kept)) {
		conds = append(conds, k.kept[p].conds...)
	}
	return Distinct(slices.Concat(k.elsewhere, conds, k.restore))
}

// onNode makes the plan with the CPUs of this node, if it asks for any: the same one again as long as
// neither has changed.
func (k *Keeper) onNode(plan *policy.Plan) error {
	if !AsksCPUs(plan) {
		k.here, k.elsewhere = plan, nil
		return nil
	}
	n, err := k.tree.nodeCPUs()
	if err != nil {
		return err
	}
	if k.plan == plan && k.cpus.possible.String() == n.possible.String() && k.cpus.usable.String() == n.usable.String() {
		return nil
	}
	here := *plan
	here.Features, k.elsewhere = onNode(plan.Features, n)
	k.here, k.cpus = &here, n
	return nil
}

// SetValues is Tree.SetValues. A plan that is another one than the last time's is brought about in every
// cgroup; with the same one, cgroups that are known already are left to Check. Those of others that a container
// runtime is still setting up wait, see Waiting. It returns what somebody had
// changed and is put back by this.
func (k *Keeper) SetValues(plan *policy.Plan, adopted []Adopted) ([]Correction, error) {
	t, again := k.tree, k.plan != plan || k.again
	all, err := t.Walk()
	if err != nil {
		return nil, err
	}
	if err := k.onNode(plan); err != nil {
		return nil, err
	}
	asked, names := askedOf(k.here, adopted), namesOf(plan, adopted)
	before := k.kept
	k.plan, k.again, k.kept = plan, false, make(map[string]*kept, len(before))
	waited, settledBefore := k.waiting, k.settled
	k.waiting, k.settled = map[string]waits{}, make(map[string]settled, len(all))
	now := time.Now()
	var put []Correction
	wanted := map[string][]Value{}
	for _, c := range all {
		f := asked[c.Path]
		if as := (settled{c.ID, f}); !again && settledBefore[c.Path] == as {
			k.settled[c.Path] = as
			continue
		}
		old, waited := before[c.Path], waited[c.Path]
		appeared := !again && (old == nil || old.ID != c.ID)
		if !isSlice(c.Path) && hasValues(f) && (appeared || waited.id == c.ID) {
			if w, waits := t.settingUp(c, waited, now); waits {
				named, rest := containerOf(path.Base(c.Path)) != "", withoutIdle(f)
				switch {
				case named:
					k.waiting[c.Path] = w
					// What was set for one of its name before stays.
					wanted[c.Path] = Values(f.CPU, f.Memory, f.Pids, func(string) bool { return true })
					continue
				case rest != nil:
					k.waiting[c.Path] = w
					f = rest
				}
			}
		}
		g := &kept{Cgroup: c, feature: f, name: names[c.Path]}
		if old := before[c.Path]; old != nil && old.ID == c.ID {
			if !again && old.feature == g.feature {
				g = old
			} else {
				g.values, g.held, g.next = old.values, old.held, old.next
			}
		}
		if g != before[c.Path] {
			fixed := k.set(g)
			if len(fixed) > 0 {
				g.next = time.Now().Add(CheckEvery)
			}
			put = append(put, fixed...)
		}
		if len(g.values) > 0 || len(g.conds) > 0 {
			k.kept[c.Path] = g
		} else {
			k.settled[c.Path] = settled{c.ID, f}
		}
		if !isSlice(c.Path) && len(g.values) > 0 {
			wanted[c.Path] = g.values
		}
	}
	k.restore = t.Backend.Restore(wanted)
	if plan.Mode == policy.Observe {
		t.Backend.Release(all)
		for _, g := range k.kept {
			g.values = nil // nothing is ours then
		}
	}
	return put, nil
}

// namesOf are the compartments of cgroups, by path.
func namesOf(plan *policy.Plan, adopted []Adopted) map[string]policy.Compartment {
	out := make(map[string]policy.Compartment)
	for _, c := range plan.Compartments {
		if c.Slice != "" {
			out[c.Slice] = c
		}
	}
	for _, a := range adopted {
		out[a.Path] = plan.Compartments[a.Compartment]
	}
	return out
}

// set brings about the values of a cgroup, whatever they are now.
func (k *Keeper) set(g *kept) []Correction {
	before, held, was := g.values, g.held, map[string]string{}
	for _, v := range g.values {
		if now, ok := k.reads(g, v); !ok {
			was[v.File] = now
		}
	}
	var refused []string
	if isSlice(g.Path) {
		g.values, refused, g.conds = k.tree.setOwn(g.Path, g.feature)
	} else {
		g.values, refused, g.conds = k.tree.setForeign(g.Path, g.feature)
	}
	for _, v := range before {
		// A slice of ours that has lost a file is to get it back.
		if isSlice(g.Path) && held[v.File] && !slices.ContainsFunc(g.values, func(w Value) bool { return w.File == v.File }) && !k.tree.has(g.Path, v.File) {
			g.values, refused = append(g.values, v), append(refused, v.File)
		}
	}
	g.held = make(map[string]bool, len(g.values))
	var put []Correction
	for _, v := range g.values {
		same := slices.Contains(before, v) && held[v.File]
		now, changed := was[v.File]
		if slices.Contains(refused, v.File) {
			// It counts as somebody's change for as long as it cannot be put back.
			g.held[v.File] = same && changed
			continue
		}
		g.held[v.File] = true
		if same && changed {
			put = append(put, Correction{Feature: g.name.Feature, Tenant: g.name.Tenant, Path: g.Path, File: v.File, Was: now, Now: v.Value})
		}
	}
	return put
}

// Check reads every value that is ours and puts back what somebody has changed. It costs an open file each,
// and nothing else where all is as it should be. What could not be set is tried again now and then, and at once where
// the file has come to read as it should: systemd may bring about later what was asked of it.
func (k *Keeper) Check(now time.Time) []Correction {
	var put []Correction
	began, asked := time.Now(), now // it may take its time
	for _, p := range slices.Sorted(maps.Keys(k.kept)) {
		g := k.kept[p]
		now = asked.Add(time.Since(began))
		changed, lost, came := k.changed(g)
		if !((changed || came) && !now.Before(g.next) || len(g.conds) > 0 && !now.Before(g.retry)) {
			continue
		}
		if c, err := k.tree.Get(p); err != nil || c.ID != g.ID {
			continue // gone: SetValues is called for that
		}
		var conds []Condition
		if lost && isSlice(p) {
			// A controller was turned off above it.
			conds, _ = k.tree.EnsureSlices(k.plan)
		}
		fixed := k.set(g)
		put = append(put, fixed...)
		g.conds = append(conds, g.conds...)
		g.next, g.retry = asked.Add(CheckEvery), asked.Add(time.Since(began)+retryEvery)
		if changed && len(fixed) == 0 {
			g.next = g.retry // it cannot be put back
		}
	}
	return put
}

// changed reports whether values of a cgroup that had held do not now, whether a file is lost, and whether a value that
// could not be set reads as it should.
func (k *Keeper) changed(g *kept) (changed, lost, came bool) {
	for _, v := range g.values {
		_, ok := k.reads(g, v)
		switch {
		case ok && !g.held[v.File]:
			came = true
		case !ok && g.held[v.File]:
			changed, lost = true, lost || !k.tree.has(g.Path, v.File)
		}
	}
	return changed, lost, came
}

// reads gives what a file reads, and whether that is as it should be.
func (k *Keeper) reads(g *kept, v Value) (string, bool) {
	now, err := k.tree.again(g.Path, v.File)
	return now, err == nil && k.tree.given(v, now)
}
