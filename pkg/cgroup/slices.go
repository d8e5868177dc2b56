package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"

	"bulkhead/pkg/policy"
)

// The names that we give, and so the only ones that we ever remove.
var (
	slicePath = regexp.MustCompile(`^/bulkhead\.slice(/bulkhead-[a-z0-9_]+\.slice(/bulkhead-[a-z0-9_]+-[a-z0-9_]+\.slice)?)?$`)
	leafName  = regexp.MustCompile(`^exec-[0-9]+(-[0-9]+)?\.scope$`)
)

func isSlice(p string) bool { return slicePath.MatchString(p) }

// isLeaf is true of what holds processes: commands of exec, and what was moved.
func isLeaf(p string) bool {
	return isMatchLeaf(p) || leafName.MatchString(path.Base(p)) && isSlice(path.Dir(p))
}

// controllers are turned on for slices where the tree has them; cpuset, too, for a plan
// that asks for CPUs.
var controllers = []string{"cpu", "memory", "pids"}

// EnsureSlices makes the slice of every compartment, parents first, with the
// controllers that the tree offers. It writes no values, and in mode observe
// turns on no controllers: that alone would regroup the CPU. Call it before the
// plan comes into force; slices that are not used harm nobody.
//
// A slice passes controllers on only if the plan has slices in it, so a feature
// without tenants stays one group to the scheduler.
//
// The conditions name controllers that the plan asks for and cannot have.
func (t *Tree) EnsureSlices(plan *policy.Plan) ([]Condition, error) {
	var want []string
	if plan.Mode != policy.Observe {
		want = controllers
	}
	if AsksCPUs(plan) {
		want = append(slices.Clone(controllers), cpuset)
	}
	asked := map[string]bool{}
	for _, f := range plan.Features {
		asked[TypeCPU] = asked[TypeCPU] || f.CPU != nil
		asked[TypeCPUSet] = asked[TypeCPUSet] || f.CPU != nil && f.CPU.CPUs != ""
		asked[TypeMemory] = asked[TypeMemory] || f.Memory != nil
		asked[TypePids] = asked[TypePids] || f.Pids != nil
	}
	var conds []Condition
	for _, name := range want {
		if c, missing := t.Shortfall(name); missing {
			conds = append(conds, c)
		}
	}
	if m := t.Manager; m.Unreachable && want != nil {
		for _, typ := range []string{TypeCPU, TypeCPUSet, TypeMemory, TypePids} {
			conds = append(conds, shortfall(typ, ReasonSystemdUnreachable,
				"values in slices and units are lost with each systemctl daemon-reload, for up to ten seconds: %s; let the agent see the host's /run/systemd", m.Why))
		}
	}
	for _, c := range plan.Compartments {
		if c.Slice == "" {
			continue
		}
		of := want
		if c.Tenant != "" { // it has the CPUs of its feature's slice, and none of its own
			of = slices.DeleteFunc(slices.Clone(want), func(name string) bool { return name == cpuset })
		}
		cs, err := t.Backend.Ensure(c.Slice, of)
		if err != nil {
			return nil, fmt.Errorf("slice of feature %s: %w", strings.TrimSuffix(c.Feature+"/"+c.Tenant, "/"), err)
		}
		conds = append(conds, cs...)
	}
	var out []Condition
	for _, c := range Distinct(conds) {
		if asked[c.Type] {
			out = append(out, c)
		}
	}
	return out, nil
}

// Shortfall says why a controller ("cpu", "memory") cannot be used in this
// tree; false if it can.
func (t *Tree) Shortfall(controller string) (Condition, bool) {
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return shortfall(typeOf(controller), ReasonControllerNotEnabled, "%s: %v", controller, err), true
	}
	here, err := t.read("/", "cgroup.controllers")
	if err != nil {
		return shortfall(typeOf(controller), ReasonControllerNotEnabled, "%s: %v", controller, err), true
	}
	top, err := os.ReadFile(path.Join(t.Mount, "cgroup.controllers"))
	if err != nil {
		return shortfall(typeOf(controller), ReasonControllerNotEnabled, "%s: %v", controller, err), true
	}
	return whyMissing(t.Dir, controller, here, string(top), string(own))
}

// whyMissing decides from cgroup.controllers of the tree's root, that of the
// mount, and /proc/self/cgroup, which has a line "ID:NAMES:PATH" for each v1
// hierarchy (/proc/cgroups no longer tells of v2's controllers, since 6.14).
func whyMissing(dir, controller, here, top, own string) (Condition, bool) {
	has := func(list, sep string) bool {
		for _, c := range strings.Split(list, sep) {
			if strings.TrimSpace(c) == controller {
				return true
			}
		}
		return false
	}
	if has(here, " ") {
		return Condition{}, false
	}
	for _, line := range strings.Split(own, "\n") {
		if f := strings.SplitN(line, ":", 3); len(f) == 3 && f[0] != "0" && has(f[1], ",") {
			return shortfall(typeOf(controller), ReasonControllerOnV1,
				"the %s controller is on a cgroup v1 hierarchy, so slices cannot use it; boot with systemd.unified_cgroup_hierarchy=1 (connection limits work)", controller), true
		}
	}
	if has(top, " ") {
		return shortfall(typeOf(controller), ReasonControllerNotEnabled,
			"the %s controller is not passed on to %s: an ancestor's cgroup.subtree_control lacks +%s (connection limits work)", controller, dir, controller), true
	}
	return shortfall(typeOf(controller), ReasonControllerNotInKernel,
		"this kernel has no %s controller: not built in, or turned off by cgroup_disable= (connection limits work)", controller), true
}

// Left is a slice that was to be removed and stays.
type Left struct {
	Path      string // below the tree's root
	Processes int    // in it and below
}

// Prune removes the slices that the plan does not name, and everywhere the
// leaves of ended commands. What still has processes, or cgroups of somebody
// else's making, stays and is returned; it can be pruned later. all is what a Walk has
// just found, for who has that; with nil it walks itself.
func (t *Tree) Prune(plan *policy.Plan, all []Cgroup) ([]Left, error) {
	keep := map[string]bool{}
	for _, c := range plan.Compartments {
		for p := c.Slice; p != "" && p != "/"; p = path.Dir(p) {
			keep[p] = true
		}
	}
	return t.prune(keep, all)
}

func (t *Tree) prune(keep map[string]bool, all []Cgroup) (left []Left, err error) {
	if all == nil {
		if all, err = t.walk(policy.ParentSlice); err != nil {
			return nil, err
		}
	}
	for i := len(all) - 1; i >= 0; i-- { // children first
		p := all[i].Path
		if !policy.IsOurs(p) { // most of a Walk; what is asked next says so too, and takes longer
			continue
		}
		if !isLeaf(p) && (!isSlice(p) || keep[p]) {
			continue
		}
		err := t.Backend.Remove(p)
		switch {
		case err == nil:
		case !errors.Is(err, ErrBusy):
			return left, err
		case isSlice(p):
			n, err := t.Processes(p)
			if err != nil && !errors.Is(err, ErrGone) {
				return left, err
			}
			left = append(left, Left{Path: p, Processes: n})
		}
	}
	return left, nil
}

// Remove takes everything back: the originals of cgroups of others, values and
// slices of ours, and the controllers that were turned on for them. Slices that
// still have processes stay, with the kernel's default values, and are
// returned.
func (t *Tree) Remove() ([]Left, []Condition, error) {
	// The empty plan asks for nothing, exactly as observe does, and puts
	// everything back.
	conds, err := t.SetValues(&policy.Plan{Mode: policy.Observe}, nil)
	if err != nil {
		return nil, conds, err
	}
	conds = append(conds, t.SendBack(&policy.Plan{Mode: policy.Observe})...)
	left, err := t.prune(nil, nil)
	if err != nil {
		return left, conds, err
	}
	all, err := t.Walk()
	if err != nil {
		return left, conds, err
	}
	t.Backend.Release(all)
	return left, conds, nil
}

// Release turns off, children first, the controllers of our slices,
// and at the root those that we turned on and nobody else has come to use: it
// would take their values with it. What the kernel refuses (EBUSY: a cgroup
// below passes it on) stays on, as it should.
func (b cgroupfs) Release(all []Cgroup) {
	t := b.t
	for i := len(all) - 1; i >= 0; i-- {
		if p := all[i].Path; isSlice(p) {
			for _, c := range append(slices.Clone(controllers), cpuset) {
				_ = t.write(p, "cgroup.subtree_control", "-"+c)
			}
		}
	}
	var still []string
	ours := t.recordedControllers()
	for _, c := range ours {
		if t.usedByOthers(c, all) || t.write("/", "cgroup.subtree_control", "-"+c) != nil {
			still = append(still, c)
		}
	}
	if len(ours) > 0 && len(still) == 0 {
		_ = t.forget("/", controllersAttr)
	} else if len(ours) > len(still) {
		_ = t.record("/", controllersAttr, strings.Join(still, " "))
	}
}

// usedByOthers reports whether a cgroup in the root has a value of the
// controller that differs from the kernel's default.
func (t *Tree) usedByOthers(controller string, all []Cgroup) bool {
	unset := map[string]string{
		"cpu.idle": "0", "cpu.weight": "100", "cpu.max": "max 100000", "cpu.max.burst": "0",
		"cpu.uclamp.min": "0.00", "cpu.uclamp.max": "max",
		"memory.min": "0", "memory.low": "0", "memory.high": "max", "memory.max": "max",
		"memory.swap.high": "max", "memory.swap.max": "max", "memory.zswap.max": "max", "memory.oom.group": "0",
		"pids.max":    "max",
		"cpuset.cpus": "", "cpuset.mems": "", "cpuset.cpus.exclusive": "", "cpuset.cpus.partition": "member",
	}
	for _, c := range all {
		if path.Dir(c.Path) != "/" || c.Path == "/" {
			continue
		}
		for file, v := range unset {
			if !strings.HasPrefix(file, controller+".") {
				continue
			}
			if now, err := t.read(c.Path, file); err == nil && now != v {
				return true
			}
		}
	}
	return false
}
