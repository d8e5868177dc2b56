package cgroup

import (
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"

	"bulkhead/pkg/policy"
)

func paths(t *testing.T, tree *Tree) []string {
	t.Helper()
	all, err := tree.Walk()
	must(t, err)
	var out []string
	for _, c := range all[1:] {
		out = append(out, c.Path)
	}
	return out
}

func TestWhyMissing(t *testing.T) {
	const unified = "0::/\n"
	for _, c := range []struct {
		here, top, own string
		want           string
	}{
		{"cpuset cpu memory", "cpuset cpu memory", unified, ""},
		{"cpuset", "cpuset", "2:cpuacct,cpu:/x\n0::/\n", ReasonControllerOnV1},
		{"", "", "1:cpu:/\n0::/\n", ReasonControllerOnV1},
		{"cpuset", "cpuset", "2:cpuacct:/cpu\n1:name=cpu:/\n0::/\n", ReasonControllerNotInKernel},
		{"cpuset", "cpuset cpu", unified, ReasonControllerNotEnabled},
		{"", "", unified, ReasonControllerNotInKernel},
	} {
		got, missing := whyMissing("/cg/x", "cpu", c.here, c.top, c.own)
		if got.Reason != c.want || missing != (c.want != "") {
			t.Errorf("%+v: %+v", c, got)
		}
		if missing && (got.Type != TypeCPU || got.Status != "False" || !strings.Contains(got.Message, "cpu controller")) {
			t.Errorf("%+v", got)
		}
	}
}

// On a host whose cpu controller is on v1 everything works but the values, and
// the reason is told once.
func TestHybridHost(t *testing.T) {
	tree := testTree(t)
	c, missing := tree.Shortfall("cpu")
	p := plan(policy.Enforce, []string{"free"}, feature("chat", &policy.CPU{Weight: 500, MaxUsec: 1000}, nil), feature("batch", nil, nil))
	conds, err := tree.EnsureSlices(p)
	must(t, err)
	if missing {
		wantCondition(t, conds, TypeCPU, c.Reason, "cpu controller")
	}
	want := []string{"/bulkhead.slice",
		batch, batch + "/bulkhead-batch-free.slice",
		chat, chat + "/bulkhead-chat-free.slice"}
	if got := paths(t, tree); !reflect.DeepEqual(got, want) {
		t.Errorf("slices %q\nwant %q", got, want)
	}
	if missing {
		conds, err = tree.SetValues(p, nil)
		noConditions(t, conds, err)
	}
	// Nothing is asked of CPU or memory, or the mode is observe: no condition.
	for _, p := range []*policy.Plan{
		plan(policy.Enforce, nil, feature("chat", nil, nil)),
		plan(policy.Observe, nil, feature("chat", &policy.CPU{Weight: 1}, &policy.Memory{Max: 1 << 30})),
	} {
		conds, err = tree.EnsureSlices(p)
		noConditions(t, conds, err)
	}
}

func TestPruneAndRemove(t *testing.T) {
	tree := testTree(t)
	before := plan(policy.Enforce, []string{"free"}, feature("chat", nil, nil), feature("batch", nil, nil))
	_, err := tree.EnsureSlices(before)
	must(t, err)
	// A running command, an ended one, and a cgroup that somebody else made.
	running := start(t, tree, "", "enter", tree.Dir, batch+"/bulkhead-batch-free.slice")
	mkdir(t, tree, chat+"/exec-7.scope")
	mkdir(t, tree, chat+"/bulkhead-chat-free.slice/exec-7-2.scope")
	mkdir(t, tree, chat+"/foreign")
	mkdir(t, tree, "/system.slice/exec-8.scope")

	left, err := tree.Prune(before, nil)
	if err != nil || len(left) != 0 {
		t.Errorf("left %+v, %v", left, err)
	}
	want := []string{"/bulkhead.slice",
		batch, batch + "/bulkhead-batch-free.slice", batch + "/bulkhead-batch-free.slice/" + leafOf(t, running),
		chat, chat + "/bulkhead-chat-free.slice", chat + "/foreign",
		"/system.slice", "/system.slice/exec-8.scope"}
	if got := paths(t, tree); !reflect.DeepEqual(got, want) {
		t.Errorf("after pruning leaves %q\nwant %q", got, want)
	}

	// batch leaves the policy: it drains, then it is removed.
	after := plan(policy.Enforce, nil, feature("chat", nil, nil))
	left, err = tree.Prune(after, nil)
	drain := []Left{{batch + "/bulkhead-batch-free.slice", 1}, {batch, 1}}
	if err != nil || !reflect.DeepEqual(left, drain) {
		t.Errorf("left %+v, %v, want %+v", left, err, drain)
	}
	left, conds, err := tree.Remove()
	noConditions(t, conds, err)
	drain = append([]Left{{chat, 0}}, append(drain, Left{"/bulkhead.slice", 1})...)
	if !reflect.DeepEqual(left, drain) {
		t.Errorf("left %+v, want %+v", left, drain)
	}
	running.end()
	left, err = tree.Prune(after, nil)
	want = []string{"/bulkhead.slice", chat, chat + "/foreign", "/system.slice", "/system.slice/exec-8.scope"}
	if got := paths(t, tree); err != nil || len(left) != 0 || !reflect.DeepEqual(got, want) {
		t.Errorf("left %+v, %v, tree %q\nwant %q", left, err, got, want)
	}
	must(t, os.Remove(tree.path(chat+"/foreign")))
	left, conds, err = tree.Remove()
	noConditions(t, conds, err)
	if got := paths(t, tree); len(left) != 0 || !reflect.DeepEqual(got, []string{"/system.slice", "/system.slice/exec-8.scope"}) {
		t.Errorf("left %+v, tree %q", left, got)
	}
}

// Controllers reach every slice with siblings, and go again with observe.
func TestControllers(t *testing.T) {
	tree := cpuTree(t)
	p := plan(policy.Enforce, []string{"free"}, feature("chat", &policy.CPU{Weight: 500}, nil))
	conds, err := tree.EnsureSlices(p)
	noConditions(t, conds, err)
	for _, c := range []string{"/", "/bulkhead.slice", chat} {
		wantFiles(t, tree, c, map[string]string{"cgroup.subtree_control": "cpu memory pids"})
	}
	wantFiles(t, tree, chat+"/bulkhead-chat-free.slice", map[string]string{
		"cgroup.subtree_control": "", "cpu.weight": "100", "cgroup.type": "domain"})
	conds, err = tree.SetValues(p, nil)
	noConditions(t, conds, err)
	wantFiles(t, tree, chat, map[string]string{"cpu.weight": "500"})

	// A neighbour has come to use memory: that one stays on.
	mkdir(t, tree, "/neighbour")
	must(t, tree.write("/neighbour", "memory.low", "4096"))
	p.Mode = policy.Observe
	conds, err = tree.EnsureSlices(p)
	noConditions(t, conds, err)
	conds, err = tree.SetValues(p, nil)
	noConditions(t, conds, err)
	wantFiles(t, tree, "/", map[string]string{"cgroup.subtree_control": "memory"})
	wantFiles(t, tree, "/bulkhead.slice", map[string]string{"cgroup.subtree_control": ""})
	must(t, tree.write("/neighbour", "memory.low", "0"))
	left, conds, err := tree.Remove()
	noConditions(t, conds, err)
	if got := paths(t, tree); len(left) != 0 || !reflect.DeepEqual(got, []string{"/neighbour"}) {
		t.Errorf("left %+v, tree %q", left, got)
	}
	wantFiles(t, tree, "/", map[string]string{"cgroup.subtree_control": ""})
	if attrs, err := listxattr(tree.Dir); err != nil || len(attrs) != 0 {
		t.Errorf("attributes %q stay, %v", attrs, err)
	}
}

// Controllers that somebody else had turned on are not turned off.
func TestControllersOfOthersStay(t *testing.T) {
	tree := cpuTree(t)
	must(t, tree.write("/", "cgroup.subtree_control", "+cpu"))
	p := plan(policy.Enforce, nil, feature("chat", &policy.CPU{Weight: 500}, nil))
	conds, err := tree.EnsureSlices(p)
	noConditions(t, conds, err)
	_, conds, err = tree.Remove()
	noConditions(t, conds, err)
	wantFiles(t, tree, "/", map[string]string{"cgroup.subtree_control": "cpu"})
}

// A process in an inner cgroup: nothing is written, nothing turns threaded, the
// offender is named, and only its feature lacks something.
func TestProcessesInside(t *testing.T) {
	tree := cpuTree(t)
	p := plan(policy.Enforce, []string{"free"}, feature("chat", &policy.CPU{Weight: 500}, nil), feature("batch", &policy.CPU{Weight: 5}, nil))
	for _, s := range []string{"/bulkhead.slice", chat} {
		mkdir(t, tree, s)
	}
	c := start(t, tree, chat, "hold")
	conds, err := tree.EnsureSlices(p)
	must(t, err)
	wantCondition(t, conds, TypeCPU, ReasonProcessesInside, tree.path(chat), fmt.Sprint(c.Process.Pid), "move them")
	wantFiles(t, tree, chat, map[string]string{"cgroup.type": "domain", "cgroup.subtree_control": ""})
	wantFiles(t, tree, batch, map[string]string{"cgroup.type": "domain", "cgroup.subtree_control": "cpu memory pids"})
	conds, err = tree.SetValues(p, nil)
	noConditions(t, conds, err)
	wantFiles(t, tree, chat, map[string]string{"cpu.weight": "500"})
	wantFiles(t, tree, batch, map[string]string{"cpu.weight": "5"})

	// The process came between the look and the write: the kernel turns the
	// cgroup threaded without an error, and it is turned back.
	b := cgroupfs{tree}
	cond, ok := b.enableOne(chat, "cpu")
	if ok || cond.Reason != ReasonProcessesInside || strings.Contains(cond.Message, "could not be undone") {
		t.Errorf("%+v, %v", cond, ok)
	}
	cond, ok = b.enableOne(chat, "memory") // EBUSY
	if ok || cond.Reason != ReasonProcessesInside || cond.Type != TypeMemory {
		t.Errorf("%+v, %v", cond, ok)
	}
	wantFiles(t, tree, chat, map[string]string{"cgroup.type": "domain", "cgroup.subtree_control": ""})

	c.end()
	conds, err = tree.EnsureSlices(p)
	noConditions(t, conds, err)
	wantFiles(t, tree, chat, map[string]string{"cgroup.type": "domain", "cgroup.subtree_control": "cpu memory pids"})
}

// The same at the tree's root, if it is not the true root.
func TestProcessesInTheRoot(t *testing.T) {
	tree := cpuTree(t)
	start(t, tree, "/", "hold")
	conds, err := tree.EnsureSlices(plan(policy.Enforce, nil, feature("chat", &policy.CPU{Weight: 500}, nil)))
	must(t, err)
	wantCondition(t, conds, TypeCPU, ReasonProcessesInside, tree.Dir)
	wantFiles(t, tree, "/", map[string]string{"cgroup.type": "domain", "cgroup.subtree_control": ""})
}

func leafOf(t *testing.T, c *child) string {
	t.Helper()
	return fmt.Sprintf("exec-%d.scope", c.Process.Pid)
}
