package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"bulkhead/pkg/policy"
)

// parentWeight is the cpu.weight of /bulkhead.slice: the kernel's and systemd's
// default, so that all compartments together count as much as system.slice
// does. Children compete only with siblings: a heavier parent would carry its
// lowest class past sshd, the kubelet and the database outside
// (docs/decisions/parent-weight.md has the measurements).
const parentWeight = 100

// defaultPeriod is the kernel's period of cpu.max in microseconds.
const defaultPeriod = 100_000

// Value is one control file of a cgroup and what it should read.
type Value struct {
	File  string
	Value string
}

// The files that bulkhead may write, in the order in which they are written.
// cpu.idle comes before cpu.weight: the kernel refuses a weight (EINVAL) while
// a cgroup is idle, reads it as 0 then, and gives it 100 when idle ends.
var defaults = [...]Value{
	{"cpu.idle", "0"},
	{"cpu.weight", "100"},
	{"cpu.max", "max 100000"},
	{"cpu.max.burst", "0"},
	{"cpu.uclamp.min", "0.00"},
	{"cpu.uclamp.max", "max"},
	{"cpuset.cpus", ""},
	{"memory.high", "max"},
	{"memory.max", "max"},
	{"pids.max", "max"},
}

// Defaults are the kernel's values of the files that bulkhead may write, as
// far as the cgroup has them. A slice of ours has these where the policy says
// nothing else.
func Defaults(has func(file string) bool) []Value {
	var out []Value
	for _, v := range defaults {
		if has(v.File) {
			out = append(out, v)
		}
	}
	return out
}

// Values are what a policy asks for one cgroup of a feature, in the order in
// which they are to be written; nothing for what the policy leaves alone (a
// nil CPU, Memory or Pids, no quota, no limit). CPU.CPUs is a list of the node's. has tells which files the cgroup
// has: files that are missing are left out, and weight 1 stands in for
// cpu.idle (kernel 5.15).
func Values(cpu *policy.CPU, memory *policy.Memory, pids *policy.Pids, has func(file string) bool) []Value {
	var out []Value
	add := func(file, value string) {
		if has(file) {
			out = append(out, Value{file, value})
		}
	}
	if cpu != nil {
		switch {
		case cpu.Idle && has("cpu.idle"):
			add("cpu.idle", "1")
		case cpu.Idle:
			add("cpu.weight", "1")
		case cpu.Weight != 0:
			add("cpu.idle", "0")
			add("cpu.weight", strconv.FormatUint(uint64(cpu.Weight), 10))
		}
		if cpu.MaxUsec != 0 {
			period := cpu.PeriodUsec
			if period == 0 {
				period = defaultPeriod
			}
			add("cpu.max", fmt.Sprintf("%d %d", cpu.MaxUsec, period))
			// A burst belongs to its quota: without one asked for there is none.
			add("cpu.max.burst", strconv.FormatUint(cpu.BurstUsec, 10))
		}
		if cpu.UclampMin != 0 {
			add("cpu.uclamp.min", clamp(cpu.UclampMin))
		}
		if cpu.UclampMax != 0 {
			add("cpu.uclamp.max", clamp(cpu.UclampMax))
		}
		if cpu.CPUs != "" {
			add("cpuset.cpus", cpu.CPUs)
		}
	}
	if memory != nil {
		if memory.High != 0 {
			add("memory.high", strconv.FormatUint(memory.High, 10))
		}
		if memory.Max != 0 {
			add("memory.max", strconv.FormatUint(memory.Max, 10))
		}
	}
	if pids != nil {
		add("pids.max", strconv.FormatUint(pids.Max, 10))
	}
	return out
}

// clamp is a percentage as the kernel shows it.
func clamp(percent uint32) string {
	if percent == 100 {
		return "max"
	}
	return fmt.Sprintf("%d.00", percent)
}

// over returns base with the values of top in their place. A cgroup that is to
// be idle has no weight.
func over(base, top []Value) []Value {
	m := make(map[string]string, len(base)+len(top))
	for _, v := range base {
		m[v.File] = v.Value
	}
	for _, v := range top {
		m[v.File] = v.Value
	}
	return ordered(m)
}

// ordered lists values in writing order.
func ordered(m map[string]string) []Value {
	var out []Value
	for _, d := range defaults {
		if v, ok := m[d.File]; ok && !(d.File == "cpu.weight" && m["cpu.idle"] == "1") {
			out = append(out, Value{d.File, v})
		}
	}
	return out
}

// same reports whether a control file that reads got holds what was asked for.
// The kernel keeps memory limits in whole pages, rounded down.
func same(want Value, got string) bool {
	if want.Value == got {
		return true
	}
	if typeOf(want.File) != TypeMemory {
		return false
	}
	w, err1 := strconv.ParseUint(want.Value, 10, 64)
	g, err2 := strconv.ParseUint(got, 10, 64)
	page := uint64(os.Getpagesize())
	return err1 == nil && err2 == nil && g%page == 0 && w >= page && w/page == g/page
}

// SetValues makes every cgroup read what the plan says: the slices of ours,
// and the cgroups that Adopt found. A feature's values go to its slice and to
// each cgroup that it, or it with a tenant, adopted (a quota holds for each,
// not for all together); a tenant's slice has the default weight. What a plan does not ask for goes back to
// the kernel's default in our slices, and to the value that was replaced in
// cgroups of others; that includes cgroups that earlier plans, or an agent
// that crashed, had adopted. In mode observe nothing is asked for, and
// controllers that were turned on for the slices are turned off.
//
// memory.max below present use is not written: the kernel would kill at once; nor is
// pids.max.
// memory.high below present use is: it slows down and reclaims, and never
// kills.
//
// One cgroup that refuses does not stop the others: it is a condition. The
// error is for a tree that cannot be read.
//
// It remembers nothing: a Keeper does, and sees what others change.
func (t *Tree) SetValues(plan *policy.Plan, adopted []Adopted) ([]Condition, error) {
	k := NewKeeper(t)
	_, err := k.SetValues(plan, adopted)
	if err != nil {
		return nil, err
	}
	return k.Conditions(), nil
}

// askedOf gives the feature whose values a cgroup gets, by path. Slices of
// tenants are not in it: they share their feature's slice in equal parts.
func askedOf(plan *policy.Plan, adopted []Adopted) map[string]*policy.Feature {
	out := make(map[string]*policy.Feature)
	if plan.Mode == policy.Observe {
		return out
	}
	byName := make(map[string]*policy.Feature, len(plan.Features))
	for i := range plan.Features {
		byName[plan.Features[i].Name] = &plan.Features[i]
	}
	for _, c := range plan.Compartments {
		if c.Slice != "" && c.Tenant == "" {
			out[c.Slice] = byName[c.Feature]
		}
	}
	for _, a := range adopted {
		if f := byName[plan.Compartments[a.Compartment].Feature]; f != nil && f.Name != policy.DefaultFeature {
			out[a.Path] = f
		}
	}
	return out
}

// setOwn sets a slice of ours and says to what, and which files could not be set; f is nil where
// the plan asks for nothing.
func (t *Tree) setOwn(p string, f *policy.Feature) (values []Value, refused []string, conds []Condition) {
	has := func(file string) bool { return t.has(p, file) }
	values = Defaults(has)
	switch {
	case p == policy.ParentSlice && has("cpu.weight"):
		values = over(values, []Value{{"cpu.weight", strconv.Itoa(parentWeight)}})
	case f != nil:
		values = over(values, Values(f.CPU, f.Memory, f.Pids, has))
		conds = t.unwritable(p, f, has, false)
	}
	refused, cs := t.set(p, values)
	conds = append(conds, cs...)
	return values, refused, append(conds, t.elsewhere(p, f)...)
}

// neverIdle has weight 1 in place of cpu.idle, for a container's cgroup: its runtime writes cpu.weight there whenever it
// is told to change anything (docker update), which the kernel refuses while the cgroup is idle (EINVAL).
func neverIdle(f *policy.Feature) *policy.Feature {
	if f.CPU == nil || !f.CPU.Idle {
		return f
	}
	cpu, g := *f.CPU, *f
	cpu.Idle, cpu.Weight = false, 1
	g.CPU = &cpu
	return &g
}

// setForeign does for a cgroup of somebody else's what setOwn does, keeps what it replaces, and
// puts back what the plan no longer asks for. What the back end keeps is put back by it
// (Backend.Restore).
func (t *Tree) setForeign(p string, f *policy.Feature) (safe []Value, refused []string, conds []Condition) {
	kept, err := t.originals(p)
	if err != nil {
		if gone(err) {
			return nil, nil, nil
		}
		return nil, nil, []Condition{shortfall(TypeCPU, ReasonOriginalUnsafe, "%v", err)}
	}
	var want []Value
	has := func(file string) bool { return t.can(p, file) }
	if f != nil {
		if containerOf(path.Base(p)) != "" {
			f = neverIdle(f)
		}
		want = Values(f.CPU, f.Memory, f.Pids, has)
		conds = t.unwritable(p, f, has, true)
	}
	if len(want) == 0 && len(kept) == 0 {
		return nil, nil, conds
	}

	// First on record, then changed: a crash in between costs nothing.
	var unknown []Value
	for _, v := range want {
		keeps, err := t.Backend.Keeps(p, v.File)
		if err != nil {
			unknown = append(unknown, v)
			conds = append(conds, shortfall(typeOf(v.File), ReasonWriteFailed, "%s of cgroup %s is left alone: %v", v.File, t.path(p), err))
			continue
		}
		if keeps {
			safe = append(safe, v)
			// Of a release that wrote into the file.
			for _, f := range []string{v.File, pair(v.File)} {
				if _, ok := kept[f]; !ok {
					continue
				}
				if keeps, err := t.Backend.Keeps(p, f); keeps && err == nil {
					delete(kept, f)
					conds = append(conds, t.forgetOriginal(p, f)...)
				}
			}
			continue
		}
		err = t.keep(p, v.File, kept)
		switch {
		case err == nil:
			safe = append(safe, v)
		case !gone(err):
			conds = append(conds, shortfall(typeOf(v.File), ReasonOriginalUnsafe, "%s of cgroup %s is left alone: %v", v.File, t.path(p), err))
		}
	}
	back := released(kept, slices.Concat(safe, unknown))
	refused, cs := t.set(p, over(back, safe))
	conds = append(conds, cs...)
	conds = append(conds, t.elsewhere(p, f)...)
	for _, v := range back {
		// Forgotten only when it is really back.
		now, err := t.read(p, v.File)
		if err == nil && t.given(v, now) {
			conds = append(conds, t.forgetOriginal(p, v.File)...)
		}
		// An idle cgroup reads weight 0 and gets no other: nothing to put back.
		if v == (Value{"cpu.idle", "1"}) && err == nil && now == "1" {
			conds = append(conds, t.forgetOriginal(p, "cpu.weight")...)
		}
	}
	// It is still wanted, also by Restore.
	for _, v := range unknown {
		safe, refused = append(safe, v), append(refused, v.File)
	}
	return safe, refused, conds
}

// can reports whether a file of a cgroup of others can have a value: it is there, or the
// back end has a name for it and gets the controller with the value.
func (t *Tree) can(p, file string) bool {
	if t.has(p, file) || !t.has(policy.ParentSlice, file) {
		return t.has(p, file)
	}
	keeps, err := t.Backend.Keeps(p, file)
	return keeps || err != nil // which is told where it is to be set
}

func (t *Tree) forgetOriginal(p, file string) []Condition {
	if err := t.forget(p, file); err != nil && !gone(err) {
		return []Condition{shortfall(typeOf(file), ReasonWriteFailed, "%v", err)}
	}
	return nil
}

// pair gives the file whose original must be kept and put back together with
// that of file: a cgroup that leaves cpu.idle has lost its weight, and a quota is not set
// below the burst.
func pair(file string) string {
	switch file {
	case "cpu.idle":
		return "cpu.weight"
	case "cpu.weight":
		return "cpu.idle"
	case "cpu.max":
		return "cpu.max.burst"
	case "cpu.max.burst":
		return "cpu.max"
	}
	return ""
}

// keep puts the present values of a file, and of the one that goes with it, on
// record, unless there already is an original.
func (t *Tree) keep(p, file string, kept map[string]string) error {
	// cpu.weight first: once cpu.idle is written it cannot be read any more.
	for _, f := range []string{pair(file), file} {
		if _, ok := kept[f]; ok || f == "" || !t.has(p, f) {
			continue
		}
		if f != file {
			if keeps, err := t.Backend.Keeps(p, f); err != nil {
				return err
			} else if keeps {
				continue
			}
		}
		now, err := t.read(p, f)
		if err != nil {
			return err
		}
		if err := t.record(p, f, now); err != nil {
			return err
		}
		kept[f] = now
	}
	return nil
}

// released are the originals that nothing in want replaces any more.
func released(kept map[string]string, want []Value) []Value {
	held := func(file string) bool {
		return slices.ContainsFunc(want, func(v Value) bool { return v.File == file || v.File == pair(file) })
	}
	m := make(map[string]string)
	for file, v := range kept {
		if !held(file) {
			m[file] = v
		}
	}
	return ordered(m)
}

// unwritable tells of files that the policy asks for and the cgroup does not
// have. Whole controllers that our slices lack are told by EnsureSlices.
func (t *Tree) unwritable(p string, f *policy.Feature, has func(string) bool, foreign bool) []Condition {
	if !t.has(p, "cgroup.procs") {
		return nil // gone
	}
	always := map[string]string{"cpu": "cpu.weight", cpuset: "cpuset.cpus", "memory": "memory.max", "pids": "pids.max"}
	var conds []Condition
	for _, v := range Values(f.CPU, f.Memory, f.Pids, func(string) bool { return true }) {
		typ := typeOf(v.File)
		controller, _, _ := strings.Cut(v.File, ".")
		switch {
		case has(v.File) || v == Value{"cpu.max.burst", "0"}:
		case !has(always[controller]):
			if foreign {
				conds = append(conds, t.lacks(p, controller))
			}
		case v.File == "cpu.max.burst":
			conds = append(conds, shortfall(typ, ReasonControllerNotInKernel, "this kernel has no cpu.max.burst (5.14): quotas hold without a burst"))
		case strings.HasPrefix(v.File, "cpu.uclamp."):
			conds = append(conds, shortfall(typ, ReasonControllerNotInKernel, "this kernel has no %s: it was built without CONFIG_UCLAMP_TASK_GROUP", v.File))
		case v == Value{"cpu.idle", "1"}:
			conds = append(conds, shortfall(typ, ReasonIdleNotInKernel, "this kernel has no cpu.idle (5.15): weight 1 is used instead"))
		case v.File != "cpu.idle":
			conds = append(conds, shortfall(typ, ReasonControllerNotInKernel, "this kernel has no %s", v.File))
		}
	}
	return Distinct(conds)
}

// lacks is the condition of an adopted cgroup without a controller. Turning it
// on there would change every sibling, which is not ours to decide.
func (t *Tree) lacks(p, controller string) Condition {
	if c, missing := t.Shortfall(controller); missing {
		return c
	}
	return shortfall(typeOf(controller), ReasonControllerNotEnabled,
		"%s is not available in adopted cgroup %s: its parent does not pass it on (echo +%s > %s/cgroup.subtree_control)", controller, t.path(p), controller, t.path(path.Dir(p)))
}

// set writes values file by file, so that one that is refused leaves the rest
// in force, and says which were.
func (t *Tree) set(p string, values []Value) (refused []string, conds []Condition) {
	for _, v := range values {
		if v.File == "memory.max" || v.File == "pids.max" {
			if c, below := t.belowUse(p, v); below {
				refused, conds = append(refused, v.File), append(conds, c)
				continue
			}
		}
		err := t.makeRoom(p, v)
		if err == nil {
			err = t.Backend.Set(p, []Value{v})
		}
		if err != nil {
			if gone(err) {
				if _, err := t.Get(p); errors.Is(err, ErrGone) {
					for _, v := range values {
						refused = append(refused, v.File)
					}
					return refused, nil
				}
			}
			reason := ReasonWriteFailed
			if u := (*unmet)(nil); errors.As(err, &u) {
				reason = u.reason
			}
			refused, conds = append(refused, v.File), append(conds, shortfall(typeOf(v.File), reason, "%v", err))
		}
	}
	return refused, conds
}

// makeRoom takes the burst away where it is above the quota that is to be set: the kernel
// refuses such a quota (EINVAL). The burst that is asked for is written after it.
func (t *Tree) makeRoom(p string, v Value) error {
	quota, _, _ := strings.Cut(v.Value, " ")
	limit, err := strconv.ParseUint(quota, 10, 64)
	if v.File != "cpu.max" || err != nil {
		return nil // no quota has room for any
	}
	if burst, err := t.readUint(p, "cpu.max.burst"); err != nil || burst <= limit {
		return nil // or there is none
	}
	return t.Backend.Set(p, []Value{{"cpu.max.burst", "0"}})
}

// belowUse reports whether a limit is below what the cgroup uses, with processes in it,
// and it had been allowed more. Of memory the kernel would kill at once; of processes it
// kills none and every fork fails, until somebody wonders why. The kernel has no way to
// check and write in one step; a cgroup that grows past the limit in between would have met
// it a moment later anyway.
func (t *Tree) belowUse(p string, v Value) (Condition, bool) {
	limit, err := strconv.ParseUint(v.Value, 10, 64)
	if err != nil {
		return Condition{}, false // "max"
	}
	now, err := t.readUint(p, v.File)
	if err == nil && now <= limit {
		return Condition{}, false // raised, or unchanged
	}
	controller, _, _ := strings.Cut(v.File, ".")
	use, err := t.readUint(p, controller+".current")
	if err != nil || use <= limit {
		return Condition{}, false
	}
	events, err := t.read(p, "cgroup.events")
	if err != nil && !errors.Is(err, fs.ErrNotExist) || strings.Contains(events, "populated 0") {
		return Condition{}, false // nobody to kill
	}
	if controller == "pids" {
		return shortfall(TypePids, ReasonBelowUse,
			"pids.max of cgroup %s is not set to %d: it has %d processes and threads now, so that none could start another; end some or raise the limit", t.path(p), limit, use), true
	}
	return shortfall(TypeMemory, ReasonBelowUse,
		"memory.max of cgroup %s is not set to %d: it uses %d now, so the kernel would kill processes at once; lower its use (memory.high slows it down) or raise the limit", t.path(p), limit, use), true
}

// readUint reads a file with one number; "max" is an error.
func (t *Tree) readUint(p, file string) (uint64, error) {
	s, err := t.read(p, file)
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(s, 10, 64)
}
