package conn

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"syscall"
	"testing"

	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/policy"
)

func TestFlips(t *testing.T) {
	runAll(t,
		test{"no connect sees a mix of two plans", testNoMixOfPlans},
		test{"no connect sees a mix of two memberships", testNoMixOfMembers},
		test{"counts are kept", testCountsAreKept},
		test{"a lowered limit cuts nobody", testLoweredLimit},
		test{"a removed feature drains", testRemovedFeatureDrains},
		test{"nothing changes on an error", testFailedApply},
	)
}

// storming lets clients connect without pause while f runs, and fails if a single
// connect returned anything but want.
func storming(in *instance, cgs []kerneltest.Cgroup, addr string, want syscall.Errno, f func()) {
	in.Helper()
	const threads = 3
	var clients []*kerneltest.Client
	for _, cg := range cgs {
		c := in.start(cg)
		c.Storm(kerneltest.TCP4, addr, threads)
		clients = append(clients, c)
	}
	f()
	total := 0
	for _, c := range clients {
		for errno, n := range c.Calm() {
			if errno != want {
				in.Errorf("%d connects returned %d (%v), want only %v", n, int(errno), errno, want)
			}
			total += n
		}
	}
	if total == 0 {
		in.Error("there was no connect at all")
	}
	in.Logf("%d connects", total)
}

// Two plans that both refuse a feature at a provider, and nothing else. The provider,
// the feature, the route's place in the table and the place of the ports differ, so that
// a connect that takes anything from the other generation finds a route that lets it
// through.
func testNoMixOfPlans(in *instance) {
	const applies = 100
	one := planOf(in, `
providers:
  x: {cidrs: [127.1.0.0/16], ports: [1, 80, 300]}
  z: {cidrs: [127.2.0.0/16]}
features:
  f: {class: batch, providers: {x: {connections: 0, errno: EAGAIN}}}
  g: {class: batch}
`)
	two := planOf(in, `
providers:
  z: {cidrs: [127.2.0.0/16], ports: [7, 9, 11]}
  w: {cidrs: [127.3.0.0/16], ports: [2, 4, 6, 8]}
  x: {cidrs: [127.1.0.0/16], ports: [3, 5, 80]}
features:
  g: {class: batch}
  h: {class: batch}
  f: {class: batch, providers: {x: {connections: 0, errno: EAGAIN}}}
`)
	cg := in.Mkdir("f")
	m1, m2 := member(in, one, cg, "f", ""), member(in, two, cg, "f", "")
	in.apply(one, m1)
	before := in.snapshot()
	storming(in, []kerneltest.Cgroup{cg, in.Mkdir("f/deeper")}, "127.1.0.1:80", errnoSeen(syscall.EAGAIN), func() {
		for i := range applies {
			if i%2 == 0 {
				in.apply(two, m2)
			} else {
				in.apply(one, m1)
			}
		}
	})
	s := in.snapshot()
	if s.Generation != before.Generation+applies {
		in.Errorf("generation %d after %d applies from %d", s.Generation, applies, before.Generation)
	}
	for _, tr := range s.Traffic {
		if tr.Connections != 0 {
			in.Errorf("%d connects passed: %+v", tr.Connections, tr)
		}
	}
	for _, b := range s.Bulkheads {
		if b.Accepted != 0 || b.Peak != 0 {
			in.Errorf("%s accepted %d", b.Key, b.Accepted)
		}
	}
}

// Two memberships that both place the client in the feature that is refused, by cgroups
// at different depths: with the depths of one and the cgroups of the other it would be in
// none.
func testNoMixOfMembers(in *instance) {
	const changes = 60
	plan := planOf(in, `
providers:
  x: {cidrs: [127.1.0.0/16]}
features:
  f: {class: batch, providers: {x: {connections: 0, errno: EAGAIN}}}
  g: {class: batch}
`)
	upper, lower := in.Mkdir("a"), in.Mkdir("a/b/c")
	one := []Member{member(in, plan, upper, "f", "")}
	two := []Member{member(in, plan, lower, "f", "")}
	three := []Member{member(in, plan, upper, "g", ""), member(in, plan, lower, "f", "")}
	in.apply(plan, one...)
	generation := in.snapshot().Generation
	storming(in, []kerneltest.Cgroup{lower, in.Mkdir("a/b/c/d")}, "127.1.0.1:80", errnoSeen(syscall.EAGAIN), func() {
		for i := range changes {
			in.setMembers([][]Member{two, one, three, two, three, one}[i%6]...)
		}
	})
	if g := in.snapshot().Generation; g != generation {
		in.Errorf("generation %d, want %d: members are not a new policy", g, generation)
	}
}

// What a bulkhead, a route and a refusal have counted stays over any number of applies,
// wherever the new plan has its feature and provider.
func testCountsAreKept(in *instance) {
	text := `
providers:
  p: {cidrs: [127.1.0.0/16], limits: {connections: 3}}
  q: {cidrs: [127.2.0.0/16]}
features:
  f: {class: batch, limits: {connections: 9}}
  g: {class: batch}
`
	moved := `
providers:
  n: {cidrs: [127.3.0.0/16]}
  q: {cidrs: [127.2.0.0/16]}
  p: {cidrs: [127.1.0.0/16], limits: {connections: 3}}
features:
  a: {class: batch}
  g: {class: batch}
  f: {class: batch, limits: {connections: 9}}
`
	cg := in.Mkdir("f")
	plan := planOf(in, text)
	in.apply(plan, member(in, plan, cg, "f", ""))
	kerneltest.Serve(in, "127.1.0.1:80", kerneltest.Drain)
	client := in.start(cg)
	open, _ := split(in, client.Burst(kerneltest.TCP4, "127.1.0.1:80", 5), syscall.ECONNREFUSED)
	if len(open) != 3 {
		in.Fatalf("%d connects passed, want 3", len(open))
	}
	before, traffic := in.counts(), in.traffic("f", "", "p")
	told, err := in.k.Reader().Refusals()
	if err != nil {
		in.Fatal(err)
	}
	for range 3 {
		for _, text := range []string{moved, text} {
			plan := planOf(in, text)
			in.apply(plan, member(in, plan, cg, "f", ""))
			after := in.counts()
			for _, k := range []policy.Key{provider("p"), feature("f")} {
				if b, a := before[k], after[k]; a.InUse != 3 || a.InUse != b.InUse || a.Peak != b.Peak || a.Accepted != b.Accepted || a.refused() != b.refused() {
					in.Fatalf("%s is %+v after an apply, was %+v", k, a, b)
				}
			}
			if a := in.traffic("f", "", "p"); a.Connections != traffic.Connections {
				in.Fatalf("%d connections after an apply, were %d", a.Connections, traffic.Connections)
			}
			again, err := in.k.Reader().Refusals()
			if err != nil || len(again) != 1 || again[0].Total != told[0].Total || again[0].Bulkhead != told[0].Bulkhead {
				in.Fatalf("refusals %+v (%v) after an apply, were %+v", again, err, told)
			}
		}
	}
	client.Close(open...)
	in.empty("after closing what was opened under another generation")
	client.MustDial(kerneltest.TCP4, "127.1.0.1:80")
}

// A limit below what is in use cuts nobody; it refuses until the count has fallen below.
func testLoweredLimit(in *instance) {
	with := func(n int) *policy.Plan {
		return planOf(in, fmt.Sprintf(`
providers:
  p: {cidrs: [127.0.0.0/8], limits: {connections: %d}}
features:
  f: {class: batch}
`, n))
	}
	cg := in.Mkdir("f")
	plan := with(5)
	in.apply(plan, member(in, plan, cg, "f", ""))
	server := kerneltest.Serve(in, "127.0.0.1:8000", kerneltest.Echo)
	client := in.start(cg)
	var open []int
	for range 5 {
		open = append(open, client.MustDial(kerneltest.TCP4, server.Addr))
	}
	plan = with(3)
	in.apply(plan, member(in, plan, cg, "f", ""))
	for len(open) >= 3 {
		for _, fd := range open {
			client.Exchange(fd, 1, 64) // still there
		}
		fd, errno := client.Dial(kerneltest.TCP4, server.Addr)
		wantErrno(in, errno, errnoSeen(syscall.ECONNREFUSED), fmt.Sprintf("connect with %d open and a limit of 3", len(open)))
		client.Close(fd, open[0])
		open = open[1:]
		in.inUse(provider("p"), uint32(len(open)), "after a close")
	}
	client.MustDial(kerneltest.TCP4, server.Addr)
	_, errno := client.Dial(kerneltest.TCP4, server.Addr)
	wantErrno(in, errno, errnoSeen(syscall.ECONNREFUSED), "connect above the limit of 3")
}

// A feature that leaves the policy keeps counting what it holds, under its name, and is
// forgotten after the last of it. Nobody gets its place before, and then it is zero.
func testRemovedFeatureDrains(in *instance) {
	with := func(feature string) *policy.Plan {
		return planOf(in, `
providers:
  p: {cidrs: [127.0.0.0/8], limits: {connections: 9}}
features:
  `+feature+`: {class: batch, limits: {connections: 4}}
`)
	}
	indexOf := func(k policy.Key) (uint32, bool) {
		at, traffic, err := readNames(in.k.coll.Maps)
		if err != nil {
			in.Fatal(err)
		}
		// The Kernel's own Reader knows them without reading.
		own, err := in.k.Reader().names()
		if err != nil || !maps.Equal(own.bulkheads, at) || !maps.Equal(own.traffic, traffic) {
			in.Fatalf("the Kernel's Reader knows %v (%v), pinned are %v and %v", own, err, at, traffic)
		}
		i, ok := at[k]
		return i, ok
	}
	// lowest makes the next new name get the lowest index that is free, so that one
	// that is free too early is noticed.
	lowest := func() { in.k.bulkheads.next, in.k.traffic.next = 0, 0 }

	cg := in.Mkdir("f")
	plan := with("old")
	lowest()
	in.apply(plan, member(in, plan, cg, "old", ""))
	server := kerneltest.Serve(in, "127.0.0.1:8000", kerneltest.Drain)
	client := in.start(cg)
	a, b := client.MustDial(kerneltest.TCP4, server.Addr), client.MustDial(kerneltest.TCP4, server.Addr)
	held, ok := indexOf(feature("old"))
	if !ok {
		in.Fatal("no name for the feature")
	}

	plan = with("new")
	lowest()
	in.apply(plan, member(in, plan, cg, "new", ""))
	client.MustDial(kerneltest.TCP4, server.Addr)
	if i, ok := indexOf(feature("new")); !ok || i == held {
		in.Fatalf("the new feature has place %d, which 2 connections of the old one hold", i)
	}
	for range 2 {
		if c := in.count(feature("old")); c.InUse != 2 || !c.Draining || c.Accepted != 2 {
			in.Fatalf("the removed feature is %+v, want 2 in use and draining", c)
		}
		in.reconcile() // forgets what is to be forgotten
	}
	if c := in.count(feature("new")); c.InUse != 1 || c.Accepted != 1 || c.Draining {
		in.Fatalf("the new feature is %+v, want 1 in use", c)
	}
	var compartments []string
	for _, c := range in.snapshot().Connections {
		compartments = append(compartments, c.Feature)
	}
	if slices.Sort(compartments); !slices.Equal(compartments, []string{"new", "old", "old"}) {
		in.Fatalf("connections are of %v", compartments)
	}

	client.Close(a)
	in.inUse(feature("old"), 1, "after one close")
	in.reconcile()
	if _, ok := indexOf(feature("old")); !ok {
		in.Fatal("forgotten while one connection holds it")
	}
	client.Close(b)
	kerneltest.Poll(in, "the removed feature is forgotten", func() error {
		in.reconcile()
		if i, ok := indexOf(feature("old")); ok {
			return fmt.Errorf("it has place %d", i)
		}
		return nil
	})
	plan = with("third")
	lowest()
	in.apply(plan, member(in, plan, cg, "third", ""))
	if i, _ := indexOf(feature("third")); i != held {
		in.Fatalf("the third feature has place %d, want the free %d", i, held)
	}
	if c := in.count(feature("third")); c.InUse != 0 || c.Peak != 0 || c.Accepted != 0 {
		in.Fatalf("the third feature begins with %+v, want zeros", c)
	}
	if n := in.traffic("third", "", "p").Connections; n != 0 {
		in.Fatalf("the third feature begins with %d connections", n)
	}
}

// An apply that cannot be done leaves the plan before it in force.
func testFailedApply(in *instance) {
	plan, cg := in.enforce(closedPolicy)
	before := in.snapshot()
	client := in.start(cg)

	open := planOf(in, "providers:\n  p: {cidrs: [127.0.0.0/8]}\nfeatures:\n  f: {class: batch}\n")
	twice := member(in, open, cg, "f", "")
	// More routes than the maps hold, and than the policy compiler lets through.
	const side = 182
	tooLarge := &policy.Plan{Mode: policy.Enforce}
	for i := range side {
		tooLarge.Compartments = append(tooLarge.Compartments, policy.Compartment{Feature: fmt.Sprintf("x%d", i)})
		tooLarge.Providers = append(tooLarge.Providers, policy.Provider{Name: fmt.Sprintf("x%d", i)})
		for p := range side {
			tooLarge.Routes = append(tooLarge.Routes, policy.Route{Compartment: uint32(i), Provider: uint32(p), CountOnly: true})
		}
	}
	for _, c := range []struct {
		name    string
		plan    *policy.Plan
		members []Member
		want    error
	}{
		{"a cgroup twice", open, []Member{twice, twice}, nil},
		{"no such compartment", open, []Member{{CgroupID: cg.ID, Level: cg.Level, Compartment: 99}}, nil},
		{"level 0", open, []Member{{CgroupID: cg.ID, Level: 0}}, nil},
		{"more routes than there is room for", tooLarge, nil, ErrFull},
	} {
		if _, err := in.k.Apply(c.plan, c.members); err == nil || c.want != nil && !errors.Is(err, c.want) {
			in.Errorf("%s: error %v, want one (%v)", c.name, err, c.want)
		}
		_, errno := client.Dial(kerneltest.TCP4, "127.0.0.1:8000")
		wantErrno(in, errno, errnoSeen(syscall.EAGAIN), c.name)
		if s := in.snapshot(); s.Generation != before.Generation || s.Plan.Hash != plan.Hash {
			in.Errorf("%s: generation %d of %s in force, want %d of %s", c.name, s.Generation, s.Plan.Hash, before.Generation, plan.Hash)
		}
	}
	if err := in.k.SetMembers([]Member{twice, twice}); err == nil {
		in.Error("a cgroup twice: no error")
	}
	_, errno := client.Dial(kerneltest.TCP4, "127.0.0.1:8000")
	wantErrno(in, errno, errnoSeen(syscall.EAGAIN), "after a failed change of members")
	// What the failed ones took for themselves is free again.
	in.apply(plan, member(in, plan, cg, "f", ""))
	if n := len(in.k.traffic.at); n != len(plan.Routes) {
		in.Errorf("%d routes have a place, the plan has %d", n, len(plan.Routes))
	}
}

func TestSetMembersNeedsAPlan(t *testing.T) {
	in := newInstance(t)
	if err := in.k.SetMembers(nil); !errors.Is(err, ErrNoPlan) {
		t.Errorf("got %v, want ErrNoPlan", err)
	}
}
