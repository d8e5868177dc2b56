package cgroup

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"bulkhead/pkg/policy"
)

// What features get of a node's CPUs, and what is told where it has not what they ask for.
func TestCPUsOnNode(t *testing.T) {
	list := func(s string) policy.CPUSet {
		set, err := policy.ParseCPUs(s)
		must(t, err)
		return set
	}
	on := func(cpus string) *policy.CPU { return &policy.CPU{Weight: 7, CPUs: cpus} }
	own := func(cpus string) *policy.CPU { return &policy.CPU{Weight: 7, CPUs: cpus, Exclusive: true} }
	for _, c := range []struct {
		name             string
		possible, usable string
		features         []*policy.CPU // a, b, c
		want             []string
		conds            []string // reason and words
	}{
		{"nothing asked", "0-3", "0-3", []*policy.CPU{on(""), nil, on("")}, []string{"", "", ""}, nil},
		{"some", "0-3", "0-3", []*policy.CPU{on("0,2"), on("not 0"), on("0-3")}, []string{"0,2", "1-3", ""}, nil},
		{"one's own", "0-3", "0-3", []*policy.CPU{own("0"), on(""), nil}, []string{"0", "1-3", ""}, nil},
		{"two that have some of their own", "0-7", "0-7", []*policy.CPU{own("0-1"), own("4"), on("not 7")}, []string{"0-1", "4", "2-3,5-6"}, nil},
		{"CPUs that may come", "0-7", "0-3", []*policy.CPU{own("0"), on(""), on("not 1")}, []string{"0", "1-7", "2-7"}, nil},
		{"some are not there", "0-1", "0-1", []*policy.CPU{on("1,6"), on(""), on("")}, []string{"1", "", ""}, []string{"CPUsNotThere feature a asks for CPU 6, it has 0-1"}},
		{"some are offline", "0-3", "0-1", []*policy.CPU{on("1-2"), on(""), on("")}, []string{"1-2", "", ""}, []string{"CPUsNotThere feature a asks for CPU 2, it has 0-1"}},
		{"none is there", "0-1", "0-1", []*policy.CPU{on("6"), on(""), on("")}, []string{"", "", ""}, []string{"CPUsNotThere feature a asks for CPU 6"}},
		{"none of one's own is there", "0-1", "0-1", []*policy.CPU{own("6"), own("0"), on("")}, []string{"1", "0", "1"}, []string{"CPUsNotThere feature a asks for CPU 6"}},
		{"one CPU, and one's own", "0", "0", []*policy.CPU{own("0"), on(""), on("not 0")}, []string{"", "", ""},
			[]string{"NoCPULeft feature b is on every CPU, 0 is a's own", "NoCPULeft feature c"}},
		{"all are somebody's", "0-1", "0-1", []*policy.CPU{own("0"), own("1"), on("")}, []string{"0", "1", ""}, []string{"NoCPULeft feature c is on every CPU, 0-1 is a's and b's own"}},
		{"all but all", "0", "0", []*policy.CPU{on("not 0"), nil, nil}, []string{"", "", ""}, nil},
	} {
		var features []policy.Feature
		for i, cpu := range c.features {
			features = append(features, feature(string(rune('a'+i)), cpu, nil))
		}
		got, conds := onNode(features, nodeCPUs{list(c.possible), list(c.usable)})
		var lists []string
		for i, f := range got {
			switch {
			case f.CPU == nil:
				lists = append(lists, "")
			default:
				lists = append(lists, f.CPU.CPUs)
			}
			if (f.CPU == nil) != (c.features[i] == nil) || f.CPU != nil && f.CPU.Weight != 7 {
				t.Errorf("%s: feature %s has CPU %+v", c.name, f.Name, f.CPU)
			}
		}
		if !slices.Equal(lists, c.want) {
			t.Errorf("%s: %q, want %q", c.name, lists, c.want)
		}
		if len(conds) != len(c.conds) {
			t.Errorf("%s: %+v, want %q", c.name, conds, c.conds)
			continue
		}
		for i, cond := range conds {
			said := cond.Reason + " " + cond.Message
			for _, words := range strings.Split(c.conds[i], ", ") {
				if !strings.Contains(said, words) {
					t.Errorf("%s: %q does not say %q", c.name, said, words)
				}
			}
		}
	}
}

// cpusetTree is cpuTree on a kernel that has the cpuset controller on v2 and two CPUs at
// least; the tree's root passes it on as soon as a plan asks for it.
func cpusetTree(t *testing.T) *Tree {
	t.Helper()
	host, err := Find("")
	must(t, err)
	if c, missing := host.Shortfall(cpuset); missing {
		t.Skipf("this kernel lacks: cpuset controller on cgroup v2 (%s)", c.Reason)
	}
	on, err := host.read("/", "cgroup.subtree_control")
	must(t, err)
	if !slices.Contains(strings.Fields(on), cpuset) {
		must(t, host.write("/", "cgroup.subtree_control", "+cpuset"))
		t.Cleanup(func() { must(t, host.write("/", "cgroup.subtree_control", "-cpuset")) })
	}
	tree := cpuTree(t)
	n, err := tree.nodeCPUs()
	must(t, err)
	if len(n.usable) < 2 {
		t.Skipf("this machine lacks: a second CPU (it has %s)", n.usable)
	}
	return tree
}

// A feature's own CPUs: the others are kept off them, in our slices and in cgroups that
// were adopted, what those had comes back, and the controller is turned on for nobody
// else.
func TestOwnCPUs(t *testing.T) {
	tree := cpusetTree(t)
	must(t, tree.write("/", "cgroup.subtree_control", "+cpu +cpuset +memory +pids"))
	mkdir(t, tree, "/unit")
	mkdir(t, tree, "/other")
	mkdir(t, tree, "/busy")
	start(t, tree, "/busy", "hold")
	must(t, tree.write("/unit", "cpuset.cpus", "0"))
	p := func(own, rest *policy.CPU) *policy.Plan {
		return plan(policy.Enforce, []string{"free"}, feature("chat", own, nil), feature("batch", rest, nil, policy.Match{Cgroup: "/{unit,busy}"}))
	}
	n, err := tree.nodeCPUs()
	must(t, err)
	rest := n.possible.Minus(policy.CPUSet{0}).String()

	weight := &policy.CPU{Weight: 5}
	own := p(&policy.CPU{Weight: 9000, CPUs: "0", Exclusive: true}, weight)
	noConditions(t, apply(t, tree, own), nil)
	wantFiles(t, tree, chat, map[string]string{"cpuset.cpus": "0", "cpuset.cpus.effective": "0", "cpu.weight": "9000"})
	wantFiles(t, tree, batch, map[string]string{"cpuset.cpus": rest})
	wantFiles(t, tree, "/unit", map[string]string{"cpuset.cpus": rest})
	wantFiles(t, tree, "/other", map[string]string{"cpuset.cpus": ""})
	s, err := tree.Stat(chat)
	if err != nil || s.CPU.CPUs == nil || *s.CPU.CPUs != "0" {
		t.Errorf("status of chat: %+v, %v", s.CPU, err)
	}
	// A tenant's slice has those of its feature.
	inside := start(t, tree, "", "enter", tree.Dir, batch+"/bulkhead-batch-free.slice")
	allowed, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", inside.Process.Pid))
	if left := n.usable.Minus(policy.CPUSet{0}).String(); err != nil || !strings.Contains(string(allowed), "\nCpus_allowed_list:\t"+left+"\n") {
		t.Errorf("a process of a tenant of batch may not use %s alone: %s, %v", left, allowed, err)
	}
	if s, err := tree.Stat(chat + "/bulkhead-chat-free.slice"); err != nil || s.CPU.CPUs == nil || *s.CPU.CPUs != "0" {
		t.Errorf("status of chat's tenant: %+v, %v", s.CPU, err)
	}
	start(t, tree, "/other", "hold")

	noConditions(t, apply(t, tree, p(weight, &policy.CPU{Weight: 5, CPUs: "not 0"})), nil)
	wantFiles(t, tree, chat, map[string]string{"cpuset.cpus": ""})
	wantFiles(t, tree, batch, map[string]string{"cpuset.cpus": rest})
	noConditions(t, apply(t, tree, p(weight, weight)), nil)
	// 6.1 and 6.12 leave no populated cgroup without a list.
	if now, err := tree.read(batch, "cpuset.cpus"); err != nil || now != "" && now != n.possible.String() {
		t.Errorf("batch, with processes and no CPUs asked for: %q, %v", now, err)
	}
	wantFiles(t, tree, batch, map[string]string{"cpuset.cpus.effective": n.usable.String()})
	wantFiles(t, tree, "/unit", map[string]string{"cpuset.cpus": "0"})

	// What is not there is told, and nobody is left without a CPU.
	conds := apply(t, tree, p(&policy.CPU{Weight: 5, CPUs: "8000"}, weight))
	wantCondition(t, conds, TypeCPUSet, ReasonCPUsNotThere, "feature chat", "CPU 8000", n.usable.String())
	wantFiles(t, tree, chat, map[string]string{"cpuset.cpus": ""})
	conds = apply(t, tree, p(&policy.CPU{Weight: 5, CPUs: n.usable.String(), Exclusive: true}, weight))
	wantCondition(t, conds, TypeCPUSet, ReasonNoCPULeft, "feature batch", n.usable.String())
	if c := tree.CPUConditions(p(&policy.CPU{CPUs: "8000"}, weight)); len(c) != 1 || c[0].Reason != ReasonCPUsNotThere {
		t.Errorf("seen without an agent: %+v", c)
	}

	// The cgroup above an adopted one has none of the CPUs: the kernel takes the list and
	// uses those of the one above.
	mkdir(t, tree, "/pods/pod")
	must(t, tree.write("/pods", "cgroup.subtree_control", "+cpu +cpuset"))
	must(t, tree.write("/pods", "cpuset.cpus", "0"))
	conds = apply(t, tree, plan(policy.Enforce, nil, feature("batch", &policy.CPU{Weight: 5, CPUs: "not 0"}, nil, policy.Match{Cgroup: "/pods/pod"})))
	wantCondition(t, conds, TypeCPUSet, ReasonCPUsNotThere, tree.path("/pods/pod"), "runs on CPUs 0 ")

	noConditions(t, apply(t, tree, own), nil)
	_, conds, err = tree.Remove()
	noConditions(t, conds, err)
	wantFiles(t, tree, "/unit", map[string]string{"cpuset.cpus": "0"})
	for _, p := range []string{"/unit", "/busy"} {
		if attrs, err := listxattr(tree.path(p)); err != nil || len(attrs) != 0 {
			t.Errorf("%s keeps attributes %q, %v", p, attrs, err)
		}
	}
	wantFiles(t, tree, "/busy", map[string]string{"cpuset.cpus.effective": n.usable.String()})
}

// The cpuset controller is turned on for a plan that asks for CPUs and for no other, and
// off again with it.
func TestCPUSetOnlyWhereAsked(t *testing.T) {
	tree := cpusetTree(t)
	control := func() string {
		t.Helper()
		on, err := tree.read("/", "cgroup.subtree_control")
		must(t, err)
		return on
	}
	noConditions(t, apply(t, tree, plan(policy.Enforce, nil, feature("chat", &policy.CPU{Weight: 5}, nil))), nil)
	if on := control(); strings.Contains(on, cpuset) {
		t.Errorf("turned on for a weight: %s", on)
	}
	asks := plan(policy.Enforce, nil, feature("chat", &policy.CPU{Weight: 5, CPUs: "0"}, nil))
	noConditions(t, apply(t, tree, asks), nil)
	if on := control(); !strings.Contains(on, cpuset) {
		t.Errorf("not turned on: %s", on)
	}
	asks.Mode = policy.Observe
	noConditions(t, apply(t, tree, asks), nil)
	if on := control(); on != "" {
		t.Errorf("on after observe: %s", on)
	}
}

// An adopted cgroup without the controller is told with the cure.
func TestAdoptedWithoutCPUSet(t *testing.T) {
	tree := cpusetTree(t)
	must(t, tree.write("/", "cgroup.subtree_control", "+cpu +cpuset"))
	mkdir(t, tree, "/pods/pod")
	must(t, tree.write("/pods", "cgroup.subtree_control", "+cpu"))
	conds := apply(t, tree, plan(policy.Enforce, nil, feature("chat", &policy.CPU{Weight: 5, CPUs: "0"}, nil, policy.Match{Cgroup: "/pods/*"})))
	wantCondition(t, conds, TypeCPUSet, ReasonControllerNotEnabled, tree.path("/pods/pod"), "+cpuset", tree.path("/pods")+"/cgroup.subtree_control")
}

// A burst comes and goes with its quota, in any order of sizes: the kernel takes neither a
// burst above the quota nor a quota below the burst.
func TestBurst(t *testing.T) {
	tree := cpuTree(t)
	must(t, tree.write("/", "cgroup.subtree_control", "+cpu +memory +pids"))
	mkdir(t, tree, "/unit")
	if !tree.has("/unit", "cpu.max.burst") {
		t.Fatal("every kernel that is tested has cpu.max.burst (5.14)")
	}
	must(t, tree.write("/unit", "cpu.max", "90000 100000"))
	must(t, tree.write("/unit", "cpu.max.burst", "80000"))
	for _, usec := range [][2]uint64{{50000, 50000}, {20000, 10000}, {200000, 150000}, {30000, 0}, {1000, 1000}, {0, 0}, {100000, 100000}} {
		cpu := &policy.CPU{Weight: 7, MaxUsec: usec[0], PeriodUsec: 100000, BurstUsec: usec[1]}
		max := fmt.Sprint(usec[0], " 100000")
		if usec[0] == 0 {
			max = "max 100000"
		}
		noConditions(t, apply(t, tree, plan(policy.Enforce, nil, feature("chat", cpu, nil, policy.Match{Cgroup: "/unit"}))), nil)
		wantFiles(t, tree, chat, map[string]string{"cpu.max": max, "cpu.max.burst": fmt.Sprint(usec[1])})
		if usec[0] != 0 {
			wantFiles(t, tree, "/unit", map[string]string{"cpu.max": max, "cpu.max.burst": fmt.Sprint(usec[1])})
		} else {
			wantFiles(t, tree, "/unit", map[string]string{"cpu.max": "90000 100000", "cpu.max.burst": "80000"})
		}
		if t.Failed() {
			t.Fatalf("at %v", usec)
		}
	}
	s, err := tree.Stat(chat)
	if err != nil || s.CPU.Max == nil || *s.CPU.Max != (Quota{100000, 100000, 100000}) {
		t.Errorf("%+v, %v", s.CPU, err)
	}
	_, conds, err := tree.Remove()
	noConditions(t, conds, err)
	wantFiles(t, tree, "/unit", map[string]string{"cpu.max": "90000 100000", "cpu.max.burst": "80000"})
}

// Clamps of utilization, where the kernel has them, and told where not.
func TestUclamp(t *testing.T) {
	tree := cpuTree(t)
	conds := apply(t, tree, plan(policy.Enforce, nil, feature("chat", &policy.CPU{Weight: 7, UclampMin: 30, UclampMax: 60}, nil)))
	if !tree.has(chat, "cpu.uclamp.min") {
		if len(conds) != 2 || conds[0].Reason != ReasonControllerNotInKernel || !strings.Contains(conds[0].Message, "CONFIG_UCLAMP_TASK_GROUP") {
			t.Errorf("conditions %+v", conds)
		}
		wantFiles(t, tree, chat, map[string]string{"cpu.weight": "7"})
		return
	}
	noConditions(t, conds, nil)
	wantFiles(t, tree, chat, map[string]string{"cpu.uclamp.min": "30.00", "cpu.uclamp.max": "60.00"})
	s, err := tree.Stat(chat)
	if err != nil || s.CPU.UclampMin != "30.00" || s.CPU.UclampMax != "60.00" {
		t.Errorf("%+v, %v", s.CPU, err)
	}
	noConditions(t, apply(t, tree, plan(policy.Enforce, nil, feature("chat", &policy.CPU{Weight: 7, UclampMax: 100}, nil))), nil)
	wantFiles(t, tree, chat, map[string]string{"cpu.uclamp.min": "0.00", "cpu.uclamp.max": "max"})
}
