package conn

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/policy"
)

func TestCompartments(t *testing.T) {
	runAll(t,
		test{"at any depth the deepest decides", testDepths},
		test{"who has moved is judged by where it is", testMoved},
		test{"protected", testProtected},
		test{"a cgroup that comes later", testLater},
		test{"the leaf cache is never stale", testLeafCache},
		test{"many cgroups", testManyCgroups},
	)
}

// deep is the path of a cgroup at an absolute depth below the environment.
func deep(in *instance, level int) kerneltest.Cgroup {
	in.Helper()
	if level == in.Cgroup.Level {
		return in.Cgroup
	}
	parts := make([]string, level-in.Cgroup.Level)
	for i := range parts {
		parts[i] = fmt.Sprintf("l%d", in.Cgroup.Level+1+i)
	}
	cg := in.Mkdir(strings.Join(parts, "/"))
	if cg.Level != level {
		in.Fatalf("%s is at level %d, want %d", cg.Path, cg.Level, level)
	}
	return cg
}

// whose connects once and returns the feature, "f1" say, that the connect was counted
// on, or "" if on none.
func whose(in *instance, client *kerneltest.Client, fd int, addr string) string {
	in.Helper()
	before := in.counts()
	if errno := client.Connect(fd, addr); errno != 0 {
		in.Fatalf("connect to %s: %v", addr, errno)
	}
	var names []string
	for k, a := range in.counts() {
		if k.Scope == policy.ScopeFeature && a.Accepted != before[k].Accepted {
			names = append(names, k.Feature)
		}
	}
	return strings.Join(names, "+")
}

const fiveFeatures = `
providers:
  p: {cidrs: [127.0.0.0/8]}
features:
  f1: {class: batch}
  f8: {class: batch}
  f9: {class: batch}
  f20: {class: batch}
  none: {class: batch, limits: {connections: 0}}
`

// Compartments at depth 1, 8, 9 and 20, and clients at, between and below them.
func testDepths(in *instance) {
	plan := planOf(in, fiveFeatures)
	levels := []int{1, 8, 9, 20}
	server := kerneltest.Serve(in, "127.0.0.1:8000", kerneltest.Drain)
	clients := map[int]*kerneltest.Client{}
	for _, at := range []int{1, 2, 7, 8, 9, 10, 19, 20, 25} {
		clients[at] = in.start(deep(in, at))
	}
	// Every combination of these four being in the plan.
	for set := range 1 << len(levels) {
		var members []Member
		for i, level := range levels {
			if set>>i&1 != 0 {
				members = append(members, member(in, plan, deep(in, level), fmt.Sprintf("f%d", level), ""))
			}
		}
		if set == 0 {
			in.apply(plan)
		} else {
			in.setMembers(members...)
		}
		for at, client := range clients {
			want := policy.DefaultFeature
			for i, level := range levels {
				if set>>i&1 != 0 && level <= at {
					want = fmt.Sprintf("f%d", level)
				}
			}
			fd := client.Socket(kerneltest.TCP4)
			if got := whose(in, client, fd, server.Addr); got != want {
				in.Fatalf("members at %v of %v: a client at depth %d is of %q, want %q", set, levels, at, got, want)
			}
			client.Close(fd)
		}
	}
	// As many depths as there is room for, and one more.
	var members []Member
	for level := 1; level <= len(kernelGen{}.Level)+1; level++ {
		members = append(members, member(in, plan, deep(in, level), "none", ""))
	}
	if err := in.k.SetMembers(members); !errors.Is(err, ErrFull) {
		in.Errorf("%d depths: %v, want ErrFull", len(members), err)
	}
	members = members[:len(members)-1]
	members[0] = member(in, plan, in.Cgroup, "f1", "")
	in.setMembers(members...)
	fd := clients[1].Socket(kerneltest.TCP4)
	if got := whose(in, clients[1], fd, server.Addr); got != "f1" {
		in.Errorf("with %d depths, a client at the least deep is of %q, want f1", len(members), got)
	}
}

// The task's cgroup at connect() decides, not where the socket was made; what is open
// stays with the compartment that admitted it.
func testMoved(in *instance) {
	plan := planOf(in, `
providers:
  p: {cidrs: [127.0.0.0/8]}
features:
  a: {class: batch, limits: {connections: 0, errno: EAGAIN}}
  b: {class: batch}
`)
	a, b := in.Mkdir("a"), in.Mkdir("b")
	in.apply(plan, member(in, plan, a, "a", ""), member(in, plan, b, "b", ""))
	server := kerneltest.Serve(in, "127.0.0.1:8000", kerneltest.Drain)
	client := in.start(b)
	made, other := client.Socket(kerneltest.TCP4), client.Socket(kerneltest.TCP4)
	open := client.MustDial(kerneltest.TCP4, server.Addr)

	in.Move(client.PID, a)
	wantErrno(in, client.Connect(made, server.Addr), errnoSeen(syscall.EAGAIN), "connect of a socket made before the move")
	_, errno := client.Dial(kerneltest.TCP4, server.Addr)
	wantErrno(in, errno, errnoSeen(syscall.EAGAIN), "connect of a socket made after the move")
	if n := in.count(feature("b")).InUse; n != 1 {
		in.Errorf("%d in use by b, want the 1 that it admitted", n)
	}
	inA := client.Socket(kerneltest.TCP4)

	in.Move(client.PID, b)
	for _, fd := range []int{made, other, inA} {
		if got := whose(in, client, fd, server.Addr); got != "b" {
			in.Errorf("a connect after the move back is of %q, want b", got)
		}
	}
	client.Close(open)
	in.inUse(feature("b"), 3, "after closing the first")

	// A passed descriptor is judged by who connects it, and held by whoever has it.
	second := in.start(a)
	fd := client.Socket(kerneltest.TCP4)
	got := second.Take(client, fd)
	wantErrno(in, second.Connect(got, server.Addr), errnoSeen(syscall.EAGAIN), "connect by a of a socket made by b")
	fromA := client.Take(second, second.Socket(kerneltest.TCP4))
	if got := whose(in, client, fromA, server.Addr); got != "b" {
		in.Errorf("connect by b of a socket made by a is of %q", got)
	}
}

// Protected cgroups are never refused and never counted, with all that is below them
// unless it is named itself.
func testProtected(in *instance) {
	plan := planOf(in, `
providers:
  p: {cidrs: [127.0.0.0/8], limits: {connections: 0}}
features:
  f: {class: batch, limits: {connections: 0}}
  default: {limits: {connections: 0}}
`)
	keep, below, named := in.Mkdir("keep"), in.Mkdir("keep/x/y"), in.Mkdir("keep/x/f")
	in.apply(plan, member(in, plan, in.Cgroup, "f", ""), protected(keep), member(in, plan, named, "f", ""))
	server := kerneltest.Serve(in, "127.0.0.1:8000", kerneltest.Drain)
	before := in.counts()
	for _, cg := range []kerneltest.Cgroup{keep, below} {
		in.start(cg).MustDial(kerneltest.TCP4, server.Addr)
	}
	if after := in.counts(); after[provider("p")].Accepted != before[provider("p")].Accepted || after[feature("f")].InUse != 0 {
		in.Errorf("protected connects were counted: %+v", after)
	}
	for _, tr := range in.snapshot().Traffic {
		if tr.Connections != 0 {
			in.Errorf("protected connects were counted: %+v", tr)
		}
	}
	_, errno := in.start(named).Dial(kerneltest.TCP4, server.Addr)
	wantErrno(in, errno, errnoSeen(syscall.ECONNREFUSED), "connect from a compartment below a protected cgroup")
	in.setMembers()
	_, errno = in.start(below).Dial(kerneltest.TCP4, server.Addr)
	wantErrno(in, errno, errnoSeen(syscall.ECONNREFUSED), "connect once it is not protected any more")
}

// A cgroup that appears while a plan is in force is in its compartment as soon as
// SetMembers has returned.
func testLater(in *instance) {
	plan := planOf(in, fiveFeatures)
	first := in.Mkdir("pods/one")
	in.apply(plan, member(in, plan, first, "f1", ""))
	server := kerneltest.Serve(in, "127.0.0.1:8000", kerneltest.Drain)
	second := in.Mkdir("pods/two")
	client := in.start(second)
	if got := whose(in, client, client.Socket(kerneltest.TCP4), server.Addr); got != policy.DefaultFeature {
		in.Errorf("a cgroup that no member names is of %q", got)
	}
	in.setMembers(member(in, plan, first, "f1", ""), member(in, plan, second, "none", ""))
	_, errno := client.Dial(kerneltest.TCP4, server.Addr)
	wantErrno(in, errno, errnoSeen(syscall.ECONNREFUSED), "connect after SetMembers")
	// The same members again change nothing, not even the epoch of the caches.
	word := *in.k.control()
	in.setMembers(member(in, plan, first, "f1", ""), member(in, plan, second, "none", ""))
	if *in.k.control() != word {
		in.Error("SetMembers flipped without a change")
	}
}

// From the moment that SetMembers has returned no connect is judged by the members
// before, on any processor.
func testLeafCache(in *instance) {
	plan := planOf(in, fiveFeatures)
	cg := in.Mkdir("f")
	open, shut := member(in, plan, cg, "f1", ""), member(in, plan, cg, "none", "")
	in.apply(plan, open)
	server := kerneltest.Serve(in, "127.0.0.1:8000", kerneltest.Drain)
	client := in.start(cg)
	for i := range 60 {
		m, want := open, syscall.Errno(0)
		if i%2 == 0 {
			m, want = shut, errnoSeen(syscall.ECONNREFUSED)
		}
		in.setMembers(m)
		var fds []int
		for _, r := range client.Burst(kerneltest.TCP4, server.Addr, 8) {
			wantErrno(in, r.Errno, want, fmt.Sprintf("change %d: a connect right after it", i))
			fds = append(fds, r.FD)
		}
		client.Close(fds...)
	}
}

// More cgroups than the cache has places, in turn: each is in its own compartment.
func testManyCgroups(in *instance) {
	const cgroups = 600
	plan := planOf(in, `
providers:
  p: {cidrs: [127.0.0.0/8], limits: {connections: 0, errno: EAGAIN}}
features:
  a: {class: batch, limits: {connections: 0, errno: EBUSY}}
  b: {class: batch, limits: {connections: 0, errno: EUSERS}}
`)
	var members []Member
	var cgs []kerneltest.Cgroup
	for i := range cgroups {
		cg := in.Mkdir(fmt.Sprintf("many/c%d", i))
		cgs = append(cgs, cg)
		if i%3 != 0 {
			members = append(members, member(in, plan, cg, []string{"", "a", "b"}[i%3], ""))
		}
	}
	in.apply(plan, members...)
	client := in.start(cgs[0])
	want := []syscall.Errno{syscall.EAGAIN, syscall.EBUSY, syscall.EUSERS}
	for round := range 2 {
		for i, cg := range cgs {
			in.Move(client.PID, cg)
			for _, errno := range client.Probe(kerneltest.TCP4, []string{"127.0.0.1:1", "127.0.0.1:2"}) {
				wantErrno(in, errno, errnoSeen(want[i%3]), fmt.Sprintf("round %d, cgroup %d", round, i))
			}
		}
	}
}

// Processes in the true root cgroup are never refused and never counted: kernel threads
// are there. This is the one test that attaches to the root; its policy is about an
// address that nobody has (RFC 5737), and lets all else pass.
func TestRootCgroupIsNeverRefused(t *testing.T) {
	in := newInstance(t)
	in.k.Close()
	in.o.CgroupRoot = in.TrueRoot().Path
	in.open()
	plan := planOf(t, `
providers:
  p: {cidrs: [198.51.100.0/24], limits: {connections: 0, errno: EAGAIN}}
features:
  f: {class: batch}
`)
	in.apply(plan)
	atRoot, below := in.start(in.TrueRoot()), in.start(in.Cgroup)
	_, errno := atRoot.Dial(kerneltest.TCP4, "198.51.100.1:80")
	wantErrno(t, errno, syscall.ENETUNREACH, "connect from the root cgroup")
	_, errno = below.Dial(kerneltest.TCP4, "198.51.100.1:80")
	wantErrno(t, errno, errnoSeen(syscall.EAGAIN), "connect from a cgroup below")
	if b := in.count(provider("p")); b.refused() != 1 || b.Accepted != 0 {
		t.Errorf("got %+v, want only the one below counted", b)
	}
}
