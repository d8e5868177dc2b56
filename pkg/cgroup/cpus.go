package cgroup

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"bulkhead/pkg/policy"
)

// cpuset is the controller that says which CPUs a cgroup may use. It is turned on only for
// a plan that asks for CPUs: on 6.1 (not on 6.12) turning it on takes back the affinity that
// processes below have been given by taskset and the like (docs/cpu.md).
const cpuset = "cpuset"

// AsksCPUs reports whether a plan says where features may run, and so needs cpuset.
func AsksCPUs(plan *policy.Plan) bool {
	return plan.Mode != policy.Observe && slices.ContainsFunc(plan.Features, func(f policy.Feature) bool { return f.CPU != nil && f.CPU.CPUs != "" })
}

// nodeCPUs are the CPUs that there may ever be, which is what a cpuset may name, and those
// that the tree can use now.
type nodeCPUs struct{ possible, usable policy.CPUSet }

func (t *Tree) nodeCPUs() (n nodeCPUs, err error) {
	list := func(file string) (policy.CPUSet, error) {
		text, err := os.ReadFile("/sys/devices/system/cpu/" + file)
		if err != nil {
			return nil, err
		}
		return policy.ParseCPUs(strings.TrimSpace(string(text)))
	}
	if n.possible, err = list("possible"); err != nil {
		return n, fmt.Errorf("the node's CPUs: %w", err)
	}
	// What is online, but for what ancestors and partitions of others keep.
	if text, err := t.read("/", "cpuset.cpus.effective"); err == nil && text != "" {
		n.usable, err = policy.ParseCPUs(text)
		return n, err
	}
	if n.usable, err = list("online"); err != nil {
		return n, fmt.Errorf("the node's CPUs: %w", err)
	}
	return n, nil
}

// noCPUs is the value that gives cpuset.cpus back.
func noCPUs() Value { return Value{"cpuset.cpus", ""} }

// everyCPU stands in for it where processes are: 6.1 and 6.12 (not 7.2) do not take the
// list of such a cgroup away (ENOSPC), and all CPUs mean the same.
func (t *Tree) everyCPU() (Value, error) {
	n, err := t.nodeCPUs()
	return Value{"cpuset.cpus", n.possible.String()}, err
}

// given reports whether a file that reads got is as good as back at its original.
func (t *Tree) given(original Value, got string) bool {
	if same(original, got) || original != noCPUs() {
		return same(original, got)
	}
	every, err := t.everyCPU()
	return err == nil && got == every.Value
}

// CPUConditions tells of CPUs that a plan asks for and this node does not have.
func (t *Tree) CPUConditions(plan *policy.Plan) []Condition {
	if !AsksCPUs(plan) {
		return nil
	}
	n, err := t.nodeCPUs()
	if err != nil {
		return []Condition{shortfall(TypeCPUSet, ReasonWriteFailed, "%v", err)}
	}
	_, conds := onNode(plan.Features, n)
	return conds
}

// onNode gives each feature that has CPU values the list that is to be in its cpuset.cpus,
// in CPU.CPUs; "" is the kernel's "all that the cgroup above has". A feature whose CPUs are
// not there, or all another's own, runs where it can: to run in the wrong place is less
// harm than not at all.
func onNode(features []policy.Feature, n nodeCPUs) ([]policy.Feature, []Condition) {
	var conds []Condition
	tell := func(reason, format string, args ...any) {
		conds = append(conds, shortfall(TypeCPUSet, reason, format, args...))
	}
	// own are the CPUs that are a feature's alone, by its index.
	own := make(map[int]policy.CPUSet)
	for i, f := range features {
		if f.CPU != nil && f.CPU.Exclusive {
			own[i] = f.CPU.On(n.possible).Both(n.usable)
		}
	}
	out := slices.Clone(features)
	for i, f := range features {
		if f.CPU == nil {
			continue
		}
		var others policy.CPUSet
		var whose []string
		for j := range features {
			if j != i && len(own[j]) > 0 {
				others, whose = others.Or(own[j]), append(whose, features[j].Name)
			}
		}
		asked := f.CPU.On(n.possible)
		if gone := asked.Minus(n.usable); len(gone) > 0 && f.CPU.CPUs != "" && !strings.HasPrefix(f.CPU.CPUs, "not ") {
			tell(ReasonCPUsNotThere, "feature %s asks for CPU %s, which this node does not have or not online (it has %s)", f.Name, gone, n.usable)
		}
		list := asked.Both(n.possible).Minus(others)
		if len(list.Both(n.usable)) == 0 {
			list = n.possible.Minus(others) // its own are not there
		}
		if len(list.Both(n.usable)) == 0 {
			tell(ReasonNoCPULeft, "feature %s is on every CPU: this node has only %s, and %s is %s's own", f.Name, n.usable, others, strings.Join(whose, "'s and "))
			list = n.possible
		}
		cpu := *f.CPU
		cpu.CPUs = ""
		if len(n.possible.Minus(list)) > 0 {
			cpu.CPUs = list.String()
		}
		out[i].CPU = &cpu
	}
	return out, conds
}

// elsewhere tells if a cgroup runs on other CPUs than its cpuset.cpus says. The kernel
// takes a list of which the cgroup above has nothing, and then uses what that one has.
func (t *Tree) elsewhere(p string, f *policy.Feature) []Condition {
	if f == nil || f.CPU == nil || f.CPU.CPUs == "" || !t.has(p, "cpuset.cpus.effective") {
		return nil
	}
	text, err := t.read(p, "cpuset.cpus.effective")
	if err != nil {
		return nil // gone, and else SetValues tells of what it could not read
	}
	now, err1 := policy.ParseCPUs(text)
	asked, err2 := policy.ParseCPUs(f.CPU.CPUs)
	if err1 != nil || err2 != nil || len(now.Minus(asked)) == 0 {
		return nil
	}
	return []Condition{shortfall(TypeCPUSet, ReasonCPUsNotThere, "cgroup %s runs on CPUs %s and not on %s, because the cgroup above it has none of those; give that one them too (cpuset.cpus)", t.path(p), text, f.CPU.CPUs)}
}
