package cgroup

import (
	"errors"
	"os"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"bulkhead/pkg/policy"
)

func TestValues(t *testing.T) {
	all := func(string) bool { return true }
	none := func(string) bool { return false }
	noIdle := func(f string) bool { return f != "cpu.idle" }
	for _, c := range []struct {
		name   string
		cpu    *policy.CPU
		memory *policy.Memory
		pids   *policy.Pids
		has    func(string) bool
		want   []Value
	}{
		{"nothing asked", nil, nil, nil, all, nil},
		{"weight", &policy.CPU{Weight: 10000}, nil, nil, all, []Value{{"cpu.idle", "0"}, {"cpu.weight", "10000"}}},
		{"idle has no weight", &policy.CPU{Idle: true}, nil, nil, all, []Value{{"cpu.idle", "1"}}},
		{"idle before 5.15", &policy.CPU{Idle: true}, nil, nil, noIdle, []Value{{"cpu.weight", "1"}}},
		{"weight before 5.15", &policy.CPU{Weight: 7}, nil, nil, noIdle, []Value{{"cpu.weight", "7"}}},
		{"quota", &policy.CPU{Weight: 10, MaxUsec: 150000, PeriodUsec: 100000}, nil, nil, all,
			[]Value{{"cpu.idle", "0"}, {"cpu.weight", "10"}, {"cpu.max", "150000 100000"}, {"cpu.max.burst", "0"}}},
		{"quota without period", &policy.CPU{MaxUsec: 5000}, nil, nil, all, []Value{{"cpu.max", "5000 100000"}, {"cpu.max.burst", "0"}}},
		{"burst", &policy.CPU{MaxUsec: 5000, PeriodUsec: 10000, BurstUsec: 4000}, nil, nil, all, []Value{{"cpu.max", "5000 10000"}, {"cpu.max.burst", "4000"}}},
		{"CPUs and clamps", &policy.CPU{Idle: true, CPUs: "1-3", Exclusive: true, UclampMin: 20, UclampMax: 100}, nil, nil, all,
			[]Value{{"cpu.idle", "1"}, {"cpu.uclamp.min", "20.00"}, {"cpu.uclamp.max", "max"}, {"cpuset.cpus", "1-3"}}},
		{"memory", nil, &policy.Memory{High: 2 << 30, Max: 3 << 30}, nil, all,
			[]Value{{"memory.high", "2147483648"}, {"memory.max", "3221225472"}}},
		{"pids", nil, nil, &policy.Pids{Max: 500}, all, []Value{{"pids.max", "500"}}},
		{"high only", nil, &policy.Memory{High: 4096}, nil, all, []Value{{"memory.high", "4096"}}},
		{"v1", &policy.CPU{Weight: 10, MaxUsec: 1000}, &policy.Memory{Max: 1 << 20}, nil, none, nil},
	} {
		if got := Values(c.cpu, c.memory, c.pids, c.has); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
	if got := Defaults(noIdle); len(got) != 9 || got[0] != (Value{"cpu.weight", "100"}) {
		t.Errorf("defaults %v", got)
	}
	if got := over(Defaults(all), []Value{{"cpu.idle", "1"}}); got[1].File != "cpu.max" {
		t.Errorf("an idle cgroup got a weight: %v", got)
	}
}

func TestSame(t *testing.T) {
	page := strconv.Itoa(os.Getpagesize())
	for _, c := range []struct {
		file, want, got string
		same            bool
	}{
		{"cpu.weight", "100", "100", true}, {"cpu.weight", "100", "101", false}, {"cpu.weight", "7", "0", false}, {"memory.max", "max", "max", true},
		{"memory.max", "max", "4096", false}, {"memory.max", "4096", "max", false}, {"cpu.max", "150000 100000", "150000 50000", false},
		{"memory.max", "1000001", strconv.Itoa(1000001 / os.Getpagesize() * os.Getpagesize()), true},
		{"memory.max", page + "0", page, false},
		// Only memory comes in pages.
		{"cpu.weight", strconv.Itoa(os.Getpagesize() + 1), page, false},
		{"pids.max", strconv.Itoa(os.Getpagesize() + 1), page, false},
	} {
		if same(Value{c.file, c.want}, c.got) != c.same {
			t.Errorf("same(%s, %q, %q) is %v", c.file, c.want, c.got, !c.same)
		}
	}
}

// apply is what the agent does with a plan.
func apply(t *testing.T, tree *Tree, p *policy.Plan) []Condition {
	t.Helper()
	conds, err := tree.EnsureSlices(p)
	noConditions(t, conds, err)
	all, err := tree.Walk()
	must(t, err)
	conds, err = tree.SetValues(p, Adopt(p, all, nil))
	must(t, err)
	return conds
}

var kernelDefaults = map[string]string{
	"cpu.idle": "0", "cpu.weight": "100", "cpu.max": "max 100000", "memory.high": "max", "memory.max": "max"}

// A slice with a running process reads what the policy says, through every
// change between weight, idle and nothing, and after it has left the policy.
func TestSliceValues(t *testing.T) {
	tree := cpuTree(t)
	f := func(cpu *policy.CPU, memory *policy.Memory) *policy.Plan {
		return plan(policy.Enforce, []string{"free"}, feature("chat", cpu, memory))
	}
	steps := []struct {
		plan *policy.Plan
		want map[string]string
	}{
		{f(&policy.CPU{Weight: 1234, MaxUsec: 150000, PeriodUsec: 100000}, &policy.Memory{High: 2 << 30, Max: 3<<30 + 1}),
			map[string]string{"cpu.weight": "1234", "cpu.idle": "0", "cpu.max": "150000 100000", "memory.high": "2147483648", "memory.max": "3221225472"}},
		{f(&policy.CPU{Weight: 1, MaxUsec: 20000, PeriodUsec: 50000}, nil),
			map[string]string{"cpu.weight": "1", "cpu.idle": "0", "cpu.max": "20000 50000", "memory.high": "max", "memory.max": "max"}},
		{f(&policy.CPU{Idle: true}, nil), map[string]string{"cpu.idle": "1", "cpu.max": "max 100000"}},
		{f(&policy.CPU{Weight: 10000}, nil), map[string]string{"cpu.weight": "10000", "cpu.idle": "0"}},
		{f(&policy.CPU{Idle: true}, nil), map[string]string{"cpu.idle": "1"}},
		{f(nil, nil), kernelDefaults},
		{f(&policy.CPU{Weight: 77}, nil), map[string]string{"cpu.weight": "77"}},
		{plan(policy.Enforce, nil, feature("batch", nil, nil)), kernelDefaults},
		{f(&policy.CPU{Idle: true}, &policy.Memory{Max: 1 << 30}), map[string]string{"cpu.idle": "1", "memory.max": "1073741824"}},
	}
	noConditions(t, apply(t, tree, steps[0].plan), nil)
	start(t, tree, "", "enter", tree.Dir, chat)
	for i, s := range steps {
		noConditions(t, apply(t, tree, s.plan), nil)
		wantFiles(t, tree, chat, s.want)
		wantFiles(t, tree, "/bulkhead.slice", map[string]string{"cpu.weight": "100"})
		wantFiles(t, tree, chat+"/bulkhead-chat-free.slice", map[string]string{"cpu.weight": "100"})
		if t.Failed() {
			t.Fatalf("in step %d", i)
		}
	}
	// A foreign write is put right by the next pass.
	must(t, tree.write(chat, "cpu.max", "1000 100000"))
	must(t, tree.write("/bulkhead.slice", "cpu.weight", "1"))
	noConditions(t, apply(t, tree, steps[len(steps)-1].plan), nil)
	wantFiles(t, tree, chat, map[string]string{"cpu.max": "max 100000"})
	wantFiles(t, tree, "/bulkhead.slice", map[string]string{"cpu.weight": "100"})

	// Observe touches nothing: what had been set is the kernel's own again.
	p := f(&policy.CPU{Weight: 1234}, &policy.Memory{Max: 1 << 30})
	p.Mode = policy.Observe
	must(t, os.MkdirAll(tree.path("/neighbour"), 0o755)) // keeps the controllers on
	must(t, tree.write("/neighbour", "cpu.weight", "99"))
	must(t, tree.write("/neighbour", "memory.low", "4096"))
	conds, err := tree.SetValues(p, nil)
	noConditions(t, conds, err)
	wantFiles(t, tree, "/neighbour", map[string]string{"cpu.weight": "99"})
	must(t, tree.write("/bulkhead.slice", "cgroup.subtree_control", "+cpu +memory"))
	wantFiles(t, tree, chat, kernelDefaults)
}

// What was replaced in a cgroup of somebody else's comes back: when the policy
// asks for less, when the cgroup leaves it, with observe, and with detach; also
// if the agent that replaced it is gone.
func TestAdoptedValuesGoBack(t *testing.T) {
	tree := cpuTree(t)
	must(t, tree.write("/", "cgroup.subtree_control", "+cpu +memory +pids"))
	mkdir(t, tree, "/unit")
	mkdir(t, tree, "/idler")
	original := map[string]string{"cpu.idle": "0", "cpu.weight": "321", "cpu.max": "max 50000", "memory.high": "1073741824", "memory.max": "max"}
	must(t, tree.write("/unit", "cpu.weight", "321"))
	must(t, tree.write("/unit", "cpu.max", "max 50000"))
	must(t, tree.write("/unit", "memory.high", "1073741824"))
	must(t, tree.write("/idler", "cpu.idle", "1"))
	start(t, tree, "/unit", "hold")

	match := []policy.Match{{Cgroup: "/unit"}, {Cgroup: "/idler"}}
	f := func(cpu *policy.CPU, memory *policy.Memory) *policy.Plan {
		return plan(policy.Enforce, nil, feature("chat", cpu, memory, match...))
	}
	full := f(&policy.CPU{Weight: 9000, MaxUsec: 30000, PeriodUsec: 100000}, &policy.Memory{High: 1 << 29, Max: 1 << 30})
	idle := f(&policy.CPU{Idle: true}, nil)
	observe := f(&policy.CPU{Weight: 9000}, nil)
	observe.Mode = policy.Observe
	asked := map[string]string{"cpu.idle": "0", "cpu.weight": "9000", "cpu.max": "30000 100000", "memory.high": "536870912", "memory.max": "1073741824"}

	check := func(step string, unit map[string]string, kept int) {
		t.Helper()
		wantFiles(t, tree, "/unit", unit)
		got, err := tree.originals("/unit")
		if err != nil || len(got) != kept {
			t.Errorf("%d originals on record (%v), %v, want %d", len(got), got, err, kept)
		}
		if t.Failed() {
			t.Fatalf("in step %s", step)
		}
	}
	noConditions(t, apply(t, tree, idle), nil)
	check("idle at first", map[string]string{"cpu.idle": "1", "cpu.max": "max 50000"}, 2)
	noConditions(t, apply(t, tree, f(nil, nil)), nil)
	check("never idle again", original, 0)
	noConditions(t, apply(t, tree, full), nil)
	check("all", asked, 6)
	wantFiles(t, tree, "/idler", map[string]string{"cpu.idle": "0", "cpu.weight": "9000"})
	noConditions(t, apply(t, tree, full), nil)
	check("again", asked, 6)
	noConditions(t, apply(t, tree, idle), nil)
	check("idle", map[string]string{"cpu.idle": "1", "cpu.max": "max 50000", "memory.high": "1073741824", "memory.max": "max"}, 2)
	noConditions(t, apply(t, tree, f(nil, nil)), nil)
	check("nothing", original, 0)
	wantFiles(t, tree, "/idler", map[string]string{"cpu.idle": "1"})

	noConditions(t, apply(t, tree, full), nil)
	noConditions(t, apply(t, tree, plan(policy.Enforce, nil, feature("chat", nil, nil))), nil)
	check("left the policy", original, 0)

	noConditions(t, apply(t, tree, full), nil)
	noConditions(t, apply(t, tree, idle), nil)
	noConditions(t, apply(t, tree, full), nil)
	check("idle and back", asked, 6)
	another, err := Find(tree.Dir) // the agent was killed; this is the next one
	must(t, err)
	conds, err := another.SetValues(observe, nil)
	noConditions(t, conds, err)
	check("observe", original, 0)

	noConditions(t, apply(t, tree, full), nil)
	// Killed after the record and before the write.
	must(t, tree.write("/unit", "cpu.weight", "321"))
	_, conds, err = another.Remove()
	noConditions(t, conds, err)
	check("detach", original, 0)
	wantFiles(t, tree, "/idler", map[string]string{"cpu.idle": "1"})
	for _, p := range []string{"/unit", "/idler"} {
		if attrs, err := listxattr(tree.path(p)); err != nil || len(attrs) != 0 {
			t.Errorf("%s keeps attributes %q, %v", p, attrs, err)
		}
	}
}

// A limit of processes below those that there are would let none start another: it is
// refused and told.
func TestPidsBelowUse(t *testing.T) {
	tree := cpuTree(t)
	limited := func(max uint64) []Condition {
		f := feature("chat", nil, nil)
		if max != 0 {
			f.Pids = &policy.Pids{Max: max}
		}
		return apply(t, tree, plan(policy.Enforce, nil, f))
	}
	noConditions(t, limited(0), nil)
	mkdir(t, tree, chat+"/exec-1.scope")
	for range 3 {
		start(t, tree, chat+"/exec-1.scope", "hold")
	}
	wantCondition(t, limited(2), TypePids, ReasonBelowUse, tree.path(chat), "to 2:")
	wantFiles(t, tree, chat, map[string]string{"pids.max": "max"})
	noConditions(t, limited(5000), nil)
	wantFiles(t, tree, chat, map[string]string{"pids.max": "5000"})
	noConditions(t, limited(4096), nil) // not the same, though both are one page
	wantFiles(t, tree, chat, map[string]string{"pids.max": "4096"})
	noConditions(t, limited(0), nil)
	wantFiles(t, tree, chat, map[string]string{"pids.max": "max"})
}

// A limit below present use would kill: it is refused, in a cgroup of somebody
// else's and in a slice of ours, and when an original is to be put back.
func TestMemoryBelowUse(t *testing.T) {
	const mib = 1 << 20
	tree := cpuTree(t)
	must(t, tree.write("/", "cgroup.subtree_control", "+cpu +memory +pids"))
	mkdir(t, tree, "/unit")
	f := func(max uint64) *policy.Plan {
		return plan(policy.Enforce, nil, feature("chat", nil, &policy.Memory{High: 0, Max: max}, policy.Match{Cgroup: "/unit"}))
	}
	noConditions(t, apply(t, tree, f(0)), nil)
	for _, p := range []string{"/unit", chat + "/exec-1.scope"} {
		mkdir(t, tree, p)
		c := start(t, tree, p, "alloc", strconv.Itoa(64*mib))
		limited := strings.TrimSuffix(p, "/exec-1.scope")
		wantCondition(t, apply(t, tree, f(32*mib)), TypeMemory, ReasonBelowUse, tree.path(limited), strconv.Itoa(32*mib))
		wantFiles(t, tree, limited, map[string]string{"memory.max": "max"})
		noConditions(t, apply(t, tree, f(96*mib)), nil)
		wantFiles(t, tree, limited, map[string]string{"memory.max": strconv.Itoa(96 * mib)})
		if err := c.Process.Signal(unix.Signal(0)); err != nil {
			t.Errorf("the process was killed: %v", err)
		}
		if events, err := tree.read(limited, "memory.events"); err != nil || !strings.Contains(events, "\noom_kill 0") {
			t.Errorf("%s: %q, %v", limited, events, err)
		}
		noConditions(t, apply(t, tree, f(0)), nil)
		c.end()
		// Nobody left to kill: what stays charged does not count.
		noConditions(t, apply(t, tree, f(4*mib)), nil)
		wantFiles(t, tree, limited, map[string]string{"memory.max": strconv.Itoa(4 * mib)})
		noConditions(t, apply(t, tree, f(0)), nil)
	}

	must(t, tree.write("/unit", "memory.max", strconv.Itoa(16*mib)))
	noConditions(t, apply(t, tree, f(96*mib)), nil)
	c := start(t, tree, "/unit", "alloc", strconv.Itoa(64*mib))
	wantCondition(t, apply(t, tree, f(0)), TypeMemory, ReasonBelowUse, strconv.Itoa(16*mib))
	wantFiles(t, tree, "/unit", map[string]string{"memory.max": strconv.Itoa(96 * mib)})
	c.end()
	noConditions(t, apply(t, tree, f(0)), nil)
	wantFiles(t, tree, "/unit", map[string]string{"memory.max": strconv.Itoa(16 * mib)})
}

// An adopted cgroup without the controller is told with the cure, and its
// parent is not touched.
func TestAdoptedWithoutController(t *testing.T) {
	tree := cpuTree(t)
	mkdir(t, tree, "/pods/pod")
	conds := apply(t, tree, plan(policy.Enforce, nil, feature("chat", &policy.CPU{Weight: 5}, nil, policy.Match{Cgroup: "/pods/*"})))
	wantCondition(t, conds, TypeCPU, ReasonControllerNotEnabled, tree.path("/pods/pod"), "+cpu", tree.path("/pods")+"/cgroup.subtree_control")
	wantFiles(t, tree, "/pods", map[string]string{"cgroup.subtree_control": ""})
}

// Originals live in the directory, die with it, are kept apart by root, and
// cannot be forged by whom a cgroup is delegated to.
func TestOriginals(t *testing.T) {
	tree := testTree(t)
	mkdir(t, tree, "/unit")
	must(t, tree.record("/unit", "cpu.weight", "42"))
	must(t, tree.record("/unit", "cpu.max", "max 100000"))
	got, err := tree.originals("/unit")
	want := map[string]string{"cpu.weight": "42", "cpu.max": "max 100000"}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	host, err := Find("")
	must(t, err)
	if got, err := host.originals(strings.TrimPrefix(tree.path("/unit"), host.Dir)); err != nil || len(got) != 0 {
		t.Errorf("another root reads %v, %v", got, err)
	}
	must(t, tree.forget("/unit", "cpu.max"))
	must(t, tree.forget("/unit", "cpu.max"))
	if got, err := tree.originals("/unit"); err != nil || len(got) != 1 {
		t.Errorf("%v, %v", got, err)
	}
	must(t, os.Remove(tree.path("/unit")))
	mkdir(t, tree, "/unit")
	if got, err := tree.originals("/unit"); err != nil || len(got) != 0 {
		t.Errorf("a new cgroup of that name has %v, %v", got, err)
	}

	// Delegated: the directory is the user's, the control file is not. Any
	// file of root's will do to show it.
	must(t, tree.record("/unit", "cgroup.freeze", "0"))
	must(t, os.Chown(tree.path("/unit"), 1000, 1000))
	if got, err := tree.originals("/unit"); err == nil {
		t.Errorf("a forged original was read: %v", got)
	}
	if err := tree.record("/unit", "cgroup.freeze", "1"); err == nil || !strings.Contains(err.Error(), "1000") {
		t.Errorf("kept where uid 1000 may forge it: %v", err)
	}
	_, _, conds := tree.setForeign("/unit", nil)
	wantCondition(t, conds, TypeCPU, ReasonOriginalUnsafe, tree.path("/unit"))
	wantFiles(t, tree, "/unit", map[string]string{"cgroup.freeze": "0"})
	// His own file: he could change it anyway.
	must(t, os.Chown(tree.path("/unit")+"/cgroup.freeze", 1000, 1000))
	if got, err := tree.originals("/unit"); err != nil || got["cgroup.freeze"] != "0" {
		t.Errorf("%v, %v", got, err)
	}
	must(t, os.Chmod(tree.path("/unit"), 0o775))
	if got, err := tree.originals("/unit"); err == nil {
		t.Errorf("read where a group may write: %v", got)
	}
}

// The back end reads back, and says what the kernel refused.
func TestSetReportsRefusal(t *testing.T) {
	tree := testTree(t)
	mkdir(t, tree, "/x")
	b := cgroupfs{tree}
	must(t, b.Set("/x", []Value{{"cgroup.max.depth", "7"}}))
	wantFiles(t, tree, "/x", map[string]string{"cgroup.max.depth": "7"})
	err := b.Set("/x", []Value{{"cgroup.max.depth", "many"}})
	if !errors.Is(err, unix.EINVAL) || !strings.Contains(err.Error(), "/x") || !strings.Contains(err.Error(), "many") {
		t.Errorf("%v", err)
	}
	// cgroup.kill takes the write and cannot be read.
	if err := b.Set("/x", []Value{{"cgroup.kill", "1"}}); err == nil {
		t.Error("a value that cannot be read back was taken for set")
	}
	must(t, b.Remove("/x"))
	must(t, b.Remove("/x"))
	if err := b.Set("/x", []Value{{"cgroup.max.depth", "7"}}); !gone(err) {
		t.Errorf("removed: %v", err)
	}
	mkdir(t, tree, "/y/z")
	if err := b.Remove("/y"); !errors.Is(err, ErrBusy) {
		t.Errorf("with a child: %v", err)
	}
}
