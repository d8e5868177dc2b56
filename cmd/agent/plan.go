package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"

	"bulkhead/internal/agent"
	"bulkhead/internal/containers"
	"bulkhead/pkg/cgroup"
	"bulkhead/pkg/conn"
	"bulkhead/pkg/policy"
)

// exitChanges is plan's: there are changes.
const exitChanges = 2

// preview is the document of plan -o json.
type preview struct {
	// HashInForce is "" if nothing is in force.
	HashInForce string   `json:"policy_hash_in_force"`
	Hash        string   `json:"policy_hash"`
	Changes     []change `json:"changes"`
	// Adopt are cgroups that would join a compartment now, Release those that
	// would leave theirs.
	Adopt   []adoption `json:"adopt"`
	Release []adoption `json:"release"`
	// Move are processes that would be moved into a compartment, by what they are.
	Move []move `json:"move"`
	// Conditions are why values that the policy asks for cannot be set on this
	// node, as status has them.
	Conditions []cgroup.Condition `json:"conditions"`
}

// change is one difference, with what it means for what runs now.
type change struct {
	policy.Change
	InUse *uint32 `json:"in_use,omitempty"` // of a limit's bulkhead, now
	Note  string  `json:"note,omitempty"`
}

type adoption struct {
	Path      string `json:"path"`
	Feature   string `json:"feature"`
	Tenant    string `json:"tenant"`
	Processes int    `json:"processes"`
	// Container is RUNTIME NAME of the container whose cgroup it is, if that is why.
	Container string `json:"container,omitempty"`
}

type move struct {
	PID     int    `json:"pid"`
	Path    string `json:"path"` // the cgroup that it is in now
	Feature string `json:"feature"`
	Tenant  string `json:"tenant"`
}

func (p *preview) empty() bool { return len(p.Changes)+len(p.Adopt)+len(p.Release)+len(p.Move) == 0 }

func (a *app) planCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "plan FILE|DIR",
		Short: "show what applying a policy would change on this node",
		Long: `Compares a policy with the one in force on this node and shows every difference,
with what it means for what runs now: connections above a lower limit, memory
above a lower limit, cgroups that would be adopted, processes that would be moved.
Says which CPU and memory
values cannot be set here, and why, as status does once it is in force. Changes
nothing. Works while the agent is down; if nothing is in force, everything is
new. Needs root.

A lowered limit cuts nobody: it refuses new connections until the count has
fallen below it.

Exit codes: 0 no change, 2 changes, 1 failed.`,
		Example: `  bulkhead plan policy.yaml
  bulkhead plan policy.yaml -o json | jq '.changes[] | select(.note)'`,
		Args: onePolicy,
	}
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		next, warnings, err := agent.Load(args[0])
		a.printWarnings(warnings)
		if err != nil {
			return err
		}
		p, err := a.preview(cmd.Context(), next)
		if err != nil {
			return err
		}
		if out.json() {
			err = writeJSON(a.stdout, p)
		} else {
			err = p.table(a.stdout)
		}
		if err == nil && !p.empty() {
			return &exitError{code: exitChanges}
		}
		return err
	}
	return cmd
}

func (a *app) preview(ctx context.Context, next *policy.Plan) (*preview, error) {
	tree, where, err := a.instance()
	if err != nil {
		return nil, err
	}
	snap, err := snapshot(ctx, where)
	if errors.Is(err, conn.ErrNotLoaded) {
		snap, err = &conn.Snapshot{}, nil
	}
	if err != nil {
		return nil, err
	}
	all, err := tree.Walk()
	if err != nil {
		return nil, err
	}
	p := &preview{Hash: next.Hash, Changes: []change{}, Conditions: append([]cgroup.Condition{}, controllers(tree, next)...)}
	if snap.Plan != nil {
		p.HashInForce = snap.Plan.Hash
	}
	sockets, err := a.sockets()
	if err != nil {
		return nil, err
	}
	found, runtimes, conds := agent.FindContainers(ctx, tree, next, sockets, all)
	p.Conditions = append(p.Conditions, conds...)
	if p.Adopt, p.Release, err = adoptions(tree, snap, next, all, found); err != nil {
		return nil, err
	}
	p.Release = a.notHeard(ctx, p.Release, runtimes, next, all)
	placer := cgroup.NewPlacer(tree, next)
	placer.Containers(found)
	moves, err := placer.Preview()
	if err != nil {
		return nil, err
	}
	p.Move = []move{}
	for _, m := range moves {
		p.Move = append(p.Move, move{m.PID, m.From, m.Compartment.Feature, m.Compartment.Tenant})
	}
	p.Conditions = append(p.Conditions, placer.Conditions()...)
	before, err := conn.Existing(ctx, where, next, agent.Whereabouts(tree, next, all, found))
	if err != nil {
		return nil, err
	}
	for _, d := range policy.Diff(snap.Plan, next) {
		c := change{Change: d}
		switch d.What {
		case "limit":
			c.limit(snap, next, before)
		case "cpu":
			c.unset(p.Conditions, cgroup.TypeCPU)
			if slices.ContainsFunc(next.Features, func(f policy.Feature) bool { return f.Name == c.Name && f.CPU != nil && f.CPU.CPUs != "" }) {
				c.unset(p.Conditions, cgroup.TypeCPUSet)
			}
		case "memory":
			c.unset(p.Conditions, cgroup.TypeMemory)
			if err := c.memory(tree, next, all, found); err != nil {
				return nil, err
			}
		case "pids":
			c.unset(p.Conditions, cgroup.TypePids)
		case "feature":
			if d.Kind == policy.Removed {
				c.feature(snap)
			}
		}
		p.Changes = append(p.Changes, c)
	}
	return p, nil
}

// limit adds what holds the bulkhead now, and what will because it is connected already.
func (c *change) limit(snap *conn.Snapshot, next *policy.Plan, before map[policy.Key]uint32) {
	i := slices.IndexFunc(snap.Bulkheads, func(b conn.Bulkhead) bool { return b.Key.String() == c.Name })
	j := slices.IndexFunc(next.Bulkheads, func(b policy.Bulkhead) bool { return b.Key.String() == c.Name })
	used := uint32(0)
	if i >= 0 {
		used = snap.Bulkheads[i].InUse
	}
	if j >= 0 {
		used += before[next.Bulkheads[j].Key]
	}
	if i >= 0 || used > 0 {
		c.InUse = &used
	}
	if j < 0 || c.InUse == nil {
		return
	}
	limit := next.Bulkheads[j].Limit
	switch {
	case limit == policy.Unlimited || used < uint32(limit):
	case next.Mode == policy.Observe:
		c.Note = fmt.Sprintf("%d in use now: new connections are let through and counted as would-be refusals until below %d", used, limit)
	case limit == 0:
		c.Note = fmt.Sprintf("%d in use now: every new connection is refused, nobody is cut", used)
	default:
		c.Note = fmt.Sprintf("%d in use now: new connections are refused until below %d, nobody is cut", used, limit)
	}
}

// unset adds that a value will not be set on this node.
func (c *change) unset(conds []cgroup.Condition, typ string) {
	i := slices.IndexFunc(conds, func(k cgroup.Condition) bool { return k.Type == typ })
	if i >= 0 && c.Kind != policy.Removed {
		c.Note = fmt.Sprintf("cannot be set on this node: %s: %s", typ, conds[i].Reason)
	}
}

// memory adds which cgroups of the feature use more than the new limits.
func (c *change) memory(tree *cgroup.Tree, next *policy.Plan, all []cgroup.Cgroup, found cgroup.Containers) error {
	i := slices.IndexFunc(next.Features, func(f policy.Feature) bool { return f.Name == c.Name })
	if i < 0 || next.Features[i].Memory == nil || next.Mode == policy.Observe {
		return nil
	}
	want := next.Features[i].Memory
	paths := []string{}
	for _, k := range next.Compartments {
		if k.Feature == c.Name && k.Tenant == "" {
			paths = append(paths, k.Slice)
		}
	}
	for _, ad := range cgroup.Adopt(next, all, found) {
		if next.Compartments[ad.Compartment].Feature == c.Name {
			paths = append(paths, ad.Path)
		}
	}
	for _, path := range paths {
		stat, err := tree.Stat(path)
		if errors.Is(err, cgroup.ErrGone) || err == nil && stat.Memory.Current == nil {
			continue
		}
		if err != nil {
			return err
		}
		used := *stat.Memory.Current
		note := ""
		switch {
		case want.Max != 0 && used > want.Max:
			note = fmt.Sprintf("%s uses %s now, more than max: the limit will not be set there, as the kernel would kill at once", path, size(used))
		case want.High != 0 && used > want.High:
			note = fmt.Sprintf("%s uses %s now, more than high: it will be slowed down and reclaimed", path, size(used))
		default:
			continue
		}
		if c.Note != "" {
			c.Note += "; "
		}
		c.Note += note
	}
	return nil
}

// feature adds the connections that a removed feature still has.
func (c *change) feature(snap *conn.Snapshot) {
	n := uint32(0)
	for _, k := range snap.Connections {
		if k.Feature == c.Name {
			n++
		}
	}
	c.InUse = &n
	if n > 0 {
		c.Note = fmt.Sprintf("%d connections now: they drain; new ones of its processes count as %s", n, policy.DefaultFeature)
	}
}

// adoptions compares who is in which compartment with who would be.
func adoptions(tree *cgroup.Tree, snap *conn.Snapshot, next *policy.Plan, all []cgroup.Cgroup, found cgroup.Containers) (adopt, release []adoption, err error) {
	type key struct {
		path            string
		feature, tenant string
	}
	now, then := map[key]bool{}, map[key]bool{}
	if snap.Plan != nil {
		for _, m := range placed(snap, all) {
			k := snap.Plan.Compartments[m.Compartment]
			if m.cgroup.Path != k.Slice {
				now[key{m.cgroup.Path, k.Feature, k.Tenant}] = true
			}
		}
	}
	whose := map[string]string{}
	for _, ad := range cgroup.Adopt(next, all, found) {
		if c := found[ad.ID]; c != nil {
			whose[ad.Path] = c.Runtime + " " + c.Name
		}
		k := next.Compartments[ad.Compartment]
		then[key{ad.Path, k.Feature, k.Tenant}] = true
	}
	only := func(in, notIn map[key]bool) ([]adoption, error) {
		out := []adoption{}
		for k := range in {
			if notIn[k] {
				continue
			}
			n, err := tree.Processes(k.path)
			if errors.Is(err, cgroup.ErrGone) {
				continue
			}
			if err != nil {
				return nil, err
			}
			out = append(out, adoption{k.path, k.feature, k.tenant, n, whose[k.path]})
		}
		slices.SortFunc(out, func(a, b adoption) int {
			if a.Path != b.Path && a.Path < b.Path {
				return -1
			}
			return 1
		})
		return out, nil
	}
	if adopt, err = only(then, now); err != nil {
		return nil, nil, err
	}
	release, err = only(now, then)
	return adopt, release, err
}

func (p *preview) table(w io.Writer) error {
	switch {
	case p.empty():
		fmt.Fprintln(w, "no change: this policy is in force")
	case p.HashInForce == "":
		fmt.Fprintln(w, "nothing is in force: everything is new")
	}
	signs := map[policy.ChangeKind]string{policy.Added: "+", policy.Removed: "-", policy.Changed: "~"}
	for _, c := range p.Changes {
		line := signs[c.Kind] + " " + c.What
		if c.Name != "" {
			line += " " + c.Name
		}
		switch {
		case c.Kind == policy.Changed:
			line += ": " + c.Old + " -> " + c.New
		case c.Old+c.New != "":
			line += ": " + c.Old + c.New
		}
		if c.InUse != nil && c.Note == "" {
			line += fmt.Sprintf(" (%d in use now)", *c.InUse)
		}
		if _, err := fmt.Fprintln(w, line); err != nil {
			return err
		}
		if c.Note != "" {
			fmt.Fprintln(w, "    "+c.Note)
		}
	}
	for _, ad := range p.Adopt {
		who := ""
		if ad.Container != "" {
			who = "container of " + ad.Container + ", "
		}
		fmt.Fprintf(w, "+ adopt cgroup %s into %s (%s%s)\n", ad.Path, named(ad.Feature, ad.Tenant), who, plural(ad.Processes, "process"))
	}
	for _, ad := range p.Release {
		fmt.Fprintf(w, "- release cgroup %s from %s (%s)\n", ad.Path, named(ad.Feature, ad.Tenant), plural(ad.Processes, "process"))
	}
	for _, m := range p.Move {
		fmt.Fprintf(w, "+ move process %d from %s into %s\n", m.PID, m.Path, named(m.Feature, m.Tenant))
	}
	return printConditions(w, p.Conditions)
}

// notHeard takes from a list what the agent knows to be containers of runtimes that do not answer now: it keeps them.
func (a *app) notHeard(ctx context.Context, release []adoption, runtimes []containers.Runtime, next *policy.Plan, all []cgroup.Cgroup) []adoption {
	if !cgroup.AsksContainers(next) || len(release) == 0 {
		return release
	}
	info, err := a.client().Info(ctx)
	if err != nil {
		return release
	}
	kept := map[string]bool{}
	for _, k := range info.Containers {
		if slices.ContainsFunc(runtimes, func(r containers.Runtime) bool { return r.Runtime == k.Runtime && r.Answers }) {
			continue
		}
		for _, c := range all {
			kept[c.Path] = kept[c.Path] || c.ID == k.CgroupID
		}
	}
	return slices.DeleteFunc(release, func(r adoption) bool { return kept[r.Path] })
}
