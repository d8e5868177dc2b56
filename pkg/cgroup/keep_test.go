package cgroup

import (
	"reflect"
	"strconv"
	"testing"
	"time"

	"bulkhead/pkg/policy"
)

// keeping brings a plan into force by a Keeper, as the agent does.
func keeping(t *testing.T, k *Keeper, p *policy.Plan) []Correction {
	t.Helper()
	conds, err := k.tree.EnsureSlices(p)
	noConditions(t, conds, err)
	all, err := k.tree.Walk()
	must(t, err)
	put, err := k.SetValues(p, Adopt(p, all, nil))
	must(t, err)
	return put
}

func wantPut(t *testing.T, when string, got []Correction, want ...Correction) {
	t.Helper()
	if len(got)+len(want) > 0 && !reflect.DeepEqual(got, want) {
		t.Errorf("%s: put back %+v\nwant %+v", when, got, want)
	}
}

// A value that somebody else changes is put back and told, in a slice of ours and in an adopted cgroup, and in
// no cgroup twice within ten seconds.
// A cgroup in which there was nothing to do is looked at when there is: it is adopted, or has come to have controllers.
func TestKeeperSettled(t *testing.T) {
	above := cpuTree(t)
	mkdir(t, above, "/root/unit")
	tree, err := Find(above.path("/root"))
	must(t, err)
	p := plan(policy.Enforce, nil, feature("chat", &policy.CPU{Weight: 900}, nil, policy.Match{Cgroup: "/unit"}))
	k := NewKeeper(tree)
	set := func(adopted []Adopted) {
		t.Helper()
		_, err := tree.EnsureSlices(p)
		must(t, err)
		_, err = k.SetValues(p, adopted)
		must(t, err)
	}
	set(nil) // nothing has a controller
	must(t, above.write("/", "cgroup.subtree_control", "+cpu +memory +pids"))
	must(t, above.write("/root", "cgroup.subtree_control", "+cpu +memory +pids"))
	must(t, tree.write("/unit", "cpu.weight", "321"))
	k.Again()
	set(nil)
	wantFiles(t, tree, chat, map[string]string{"cpu.weight": "900"})
	wantFiles(t, tree, "/unit", map[string]string{"cpu.weight": "321"})
	all, err := tree.Walk()
	must(t, err)
	for range 2 {
		set(Adopt(p, all, nil))
		wantFiles(t, tree, "/unit", map[string]string{"cpu.weight": "900"})
		set(nil)
		wantFiles(t, tree, "/unit", map[string]string{"cpu.weight": "321"})
	}
}

func TestKeeper(t *testing.T) {
	tree := cpuTree(t)
	must(t, tree.write("/", "cgroup.subtree_control", "+cpu +memory +pids"))
	mkdir(t, tree, "/unit")
	must(t, tree.write("/unit", "cpu.weight", "321"))
	p := plan(policy.Enforce, []string{"free"},
		feature("chat", &policy.CPU{Weight: 900, MaxUsec: 150000, PeriodUsec: 100000}, &policy.Memory{High: 1 << 30}, policy.Match{Cgroup: "/unit", Tenant: "free"}),
		feature("batch", &policy.CPU{Idle: true}, nil))
	free := chat + "/bulkhead-chat-free.slice"
	k := NewKeeper(tree)
	wantPut(t, "the start", keeping(t, k, p))
	noConditions(t, k.Conditions(), nil)
	now := time.Now()
	wantPut(t, "nothing changed", k.Check(now))

	// Everything that is ours, in one go.
	spoil := func() {
		t.Helper()
		for _, w := range [][3]string{
			{"/bulkhead.slice", "cpu.weight", "5000"}, {chat, "cpu.weight", "1"}, {chat, "cpu.max", "max 100000"}, {chat, "memory.max", "1048576"},
			{free, "cpu.weight", "7"}, {batch, "cpu.idle", "0"}, {"/unit", "cpu.weight", "2"}, {"/unit", "memory.high", "max"}, {"/unit", "pids.max", "1000"},
		} {
			must(t, tree.write(w[0], w[1], w[2]))
		}
	}
	right := func() {
		t.Helper()
		wantFiles(t, tree, "/bulkhead.slice", map[string]string{"cpu.weight": "100"})
		wantFiles(t, tree, chat, map[string]string{"cpu.weight": "900", "cpu.max": "150000 100000", "memory.high": "1073741824", "memory.max": "max"})
		wantFiles(t, tree, free, map[string]string{"cpu.weight": "100"})
		wantFiles(t, tree, batch, map[string]string{"cpu.idle": "1"})
		wantFiles(t, tree, "/unit", map[string]string{"cpu.weight": "900", "memory.high": "1073741824", "pids.max": "1000"}) // which the policy leaves alone
	}
	all := []Correction{
		{Path: "/bulkhead.slice", File: "cpu.weight", Was: "5000", Now: "100"},
		{Feature: "batch", Path: batch, File: "cpu.idle", Was: "0", Now: "1"},
		{Feature: "chat", Path: chat, File: "cpu.weight", Was: "1", Now: "900"},
		{Feature: "chat", Path: chat, File: "cpu.max", Was: "max 100000", Now: "150000 100000"},
		{Feature: "chat", Path: chat, File: "memory.max", Was: "1048576", Now: "max"},
		{Feature: "chat", Tenant: "free", Path: free, File: "cpu.weight", Was: "7", Now: "100"},
		{Feature: "chat", Tenant: "free", Path: "/unit", File: "cpu.weight", Was: "2", Now: "900"},
		{Feature: "chat", Tenant: "free", Path: "/unit", File: "memory.high", Was: "max", Now: "1073741824"},
	}
	spoil()
	wantPut(t, "changed", k.Check(now), all...)
	right()
	spoil()
	wantPut(t, "changed again at once", k.Check(now.Add(5*time.Second)))
	wantFiles(t, tree, chat, map[string]string{"cpu.weight": "1"})
	wantPut(t, "ten seconds later", k.Check(now.Add(CheckEvery)), all...)
	right()
	wantPut(t, "and no more", k.Check(now.Add(2*CheckEvery)))

	// More cgroups do not make it look at those that it knows; another plan does.
	spoil()
	mkdir(t, tree, "/another")
	wantPut(t, "the same plan", keeping(t, k, p))
	wantFiles(t, tree, chat, map[string]string{"cpu.weight": "1"})
	again := *p
	wantPut(t, "another plan", keeping(t, k, &again), all...)
	right()

	// What the policy changes is nobody's change, and what it leaves goes back.
	wantPut(t, "less", keeping(t, k, plan(policy.Enforce, []string{"free"}, feature("chat", nil, nil), feature("batch", &policy.CPU{Weight: 3}, nil))))
	wantFiles(t, tree, "/unit", map[string]string{"cpu.weight": "321", "memory.high": "max"})
	must(t, tree.write("/unit", "cpu.weight", "55"))
	wantPut(t, "not ours any more", k.Check(now.Add(10*CheckEvery)))
	wantFiles(t, tree, "/unit", map[string]string{"cpu.weight": "55"})

	observe := plan(policy.Observe, []string{"free"}, feature("chat", &policy.CPU{Weight: 9}, nil))
	wantPut(t, "observe", keeping(t, k, observe))
	must(t, tree.write("/bulkhead.slice", "cpu.weight", "3"))
	wantPut(t, "observe keeps nothing", k.Check(now.Add(20*CheckEvery)))
	noConditions(t, k.Conditions(), nil)
}

// A controller that somebody turns off takes the values with it; both come back.
func TestKeeperController(t *testing.T) {
	tree := cpuTree(t)
	k := NewKeeper(tree)
	wantPut(t, "the start", keeping(t, k, plan(policy.Enforce, nil, feature("chat", &policy.CPU{Weight: 900}, nil))))
	must(t, tree.write("/bulkhead.slice", "cgroup.subtree_control", "-cpu"))
	// What had the kernel's own value anyway has it again.
	wantPut(t, "without cpu", k.Check(time.Now()), Correction{Feature: "chat", Path: chat, File: "cpu.weight", Was: "100", Now: "900"})
	wantFiles(t, tree, chat, map[string]string{"cpu.weight": "900"})
	noConditions(t, k.Conditions(), nil)
}

// A value that cannot be set is a shortfall and nobody's change, however often it is looked at; it is set once it
// can be.
func TestKeeperBelowUse(t *testing.T) {
	const mib = 1 << 20
	tree := cpuTree(t)
	limited := func(max uint64) *policy.Plan {
		return plan(policy.Enforce, nil, feature("chat", nil, &policy.Memory{Max: max}))
	}
	k := NewKeeper(tree)
	wantPut(t, "the start", keeping(t, k, limited(0)))
	mkdir(t, tree, chat+"/exec-1.scope")
	c := start(t, tree, chat+"/exec-1.scope", "alloc", strconv.Itoa(64*mib))
	wantPut(t, "below use", keeping(t, k, limited(32*mib)))
	now := time.Now()
	for i := range 30 {
		wantPut(t, "still below use", k.Check(now.Add(time.Duration(i)*CheckEvery)))
		wantCondition(t, k.Conditions(), TypeMemory, ReasonBelowUse)
	}
	wantFiles(t, tree, chat, map[string]string{"memory.max": "max"})
	// One value of a cgroup does not keep the others from being kept.
	must(t, tree.write(chat, "cpu.weight", "5"))
	wantPut(t, "another value", k.Check(now.Add(30*CheckEvery)), Correction{Feature: "chat", Path: chat, File: "cpu.weight", Was: "5", Now: "100"})
	c.end()
	wantPut(t, "it can be set", k.Check(now.Add(40*CheckEvery)))
	wantFiles(t, tree, chat, map[string]string{"memory.max": strconv.Itoa(32 * mib)})
	noConditions(t, k.Conditions(), nil)
}

// What Check costs where nothing has changed, with the values of 200 compartments. Any control file costs the
// same, so it does not need the controllers.
func BenchmarkCheck(b *testing.B) {
	tree := testTree(b)
	k := NewKeeper(tree)
	for i := range 200 {
		g := &kept{Cgroup: mkdir(b, tree, "/f"+strconv.Itoa(i)), held: map[string]bool{"cgroup.max.depth": true}}
		for range defaults {
			g.values = append(g.values, Value{"cgroup.max.depth", "max"})
		}
		k.kept[g.Path] = g
	}
	for b.Loop() {
		if put := k.Check(time.Now()); len(put) > 0 {
			b.Fatalf("%+v", put)
		}
	}
}

// All CPUs in cpuset.cpus are none asked for: a kernel that does not take the list away has
// them there, and nobody is to put that right every ten seconds.
func TestKeeperCPUs(t *testing.T) {
	tree := cpusetTree(t)
	k := NewKeeper(tree)
	keeping(t, k, plan(policy.Enforce, nil, feature("chat", &policy.CPU{Weight: 900}, nil), feature("batch", &policy.CPU{Weight: 1, CPUs: "0"}, nil)))
	every, err := tree.everyCPU()
	must(t, err)
	must(t, tree.write(chat, "cpuset.cpus", every.Value))
	wantPut(t, "with all CPUs", k.Check(time.Now()))
	if every.Value == "0" {
		return // there is no list that means less
	}
	must(t, tree.write(chat, "cpuset.cpus", "0"))
	wantPut(t, "with one CPU", k.Check(time.Now()), Correction{Feature: "chat", Path: chat, File: "cpuset.cpus", Was: "0"})
}
