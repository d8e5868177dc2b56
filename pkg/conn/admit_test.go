package conn

import (
	"fmt"
	"math/bits"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/policy"
)

// sampler reads one bulkhead's in_use without pause, as anybody can who maps the
// pinned array.
type sampler struct {
	page    []byte
	over    atomic.Bool
	done    sync.WaitGroup
	highest uint32
	samples uint64
}

func sample(t *testing.T, in *instance, key policy.Key) *sampler {
	t.Helper()
	at, ok := in.k.bulkheads.at[key]
	if !ok {
		t.Fatalf("no bulkhead %s", key)
	}
	// A read-only descriptor cannot be mapped: its mapping counts as private (EINVAL).
	m, err := ebpf.LoadPinnedMap(filepath.Join(in.o.pins(), kernelMapBulkheads), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	size := int(m.MaxEntries()) * int(unsafe.Sizeof(kernelBulkhead{}))
	s := &sampler{}
	if s.page, err = unix.Mmap(m.FD(), 0, size, unix.PROT_READ, unix.MAP_SHARED); err != nil {
		t.Fatalf("map the bulkheads: %v", err)
	}
	word := &(*kernelBulkhead)(unsafe.Pointer(&s.page[int(at)*int(unsafe.Sizeof(kernelBulkhead{}))])).InUse
	s.done.Go(func() {
		for !s.over.Load() {
			s.highest = max(s.highest, atomic.LoadUint32(word))
			s.samples++
		}
	})
	return s
}

// end stops sampling.
func (s *sampler) end() (highest uint32, samples uint64) {
	s.over.Store(true)
	s.done.Wait()
	unix.Munmap(s.page)
	return s.highest, s.samples
}

func TestAdmission(t *testing.T) {
	runAll(t,
		test{"exact under contention", testExactUnderContention},
		test{"exact in a storm", testExactInAStorm},
		test{"the most specific full one refuses", testMostSpecificFullRefuses},
		test{"default errno", testDefaultErrno},
		test{"observe", testObserve},
		test{"refusals are told", testRefusals},
		test{"a refusal that is being written is not told", testHalfRefusal},
	)
}

// 64 simultaneous connects against a limit of 8: exactly 8 pass, every time, and at no
// moment are more than 8 in use.
func testExactUnderContention(in *instance) {
	t := in.T
	const rounds, limit, threads = 100, 8, 64
	_, cg := in.enforce(`
providers:
  p: {cidrs: [127.0.0.0/8], ports: [8000], limits: {connections: 8}}
features:
  f: {class: batch}
`)
	kerneltest.Serve(t, "127.0.0.1:8000", kerneltest.Drain)
	client := in.start(cg)
	p := provider("p")
	s := sample(t, in, p)
	for round := range rounds {
		open, refused := split(t, client.Burst(kerneltest.TCP4, "127.0.0.1:8000", threads), syscall.ECONNREFUSED)
		if len(open) != limit || len(refused) != threads-limit {
			t.Fatalf("round %d: %d connects passed and %d were refused, want %d and %d", round, len(open), len(refused), limit, threads-limit)
		}
		if b := in.count(p); b.InUse != limit {
			t.Fatalf("round %d: %d in use while %d are open", round, b.InUse, limit)
		}
		client.Close(append(open, refused...)...)
		in.inUse(p, 0, "after closing all")
	}
	highest, samples := s.end()
	if highest != limit {
		t.Errorf("%d samples, the highest %d; want %d", samples, highest, limit)
	}
	b := in.count(p)
	if b.Accepted != rounds*limit || b.refused() != rounds*(threads-limit) || b.Peak != limit {
		t.Errorf("accepted %d, rejected %v, peak %d; want %d, %d, %d", b.Accepted, b.Rejected, b.Peak, rounds*limit, rounds*(threads-limit), limit)
	}
	t.Logf("%d samples; rejected %v", samples, b.Rejected)
}

// The same where every connect is a race for one of the last places: sockets connect
// again and again to where there is no route, and each gives back and takes in one go.
func testExactInAStorm(in *instance) {
	const connects, limit, threads = 300_000, 2, 8
	_, cg := in.enforce(`
providers:
  p: {cidrs: [192.0.2.0/24], limits: {connections: 2}}
features:
  f: {class: batch}
`)
	s := sample(in.T, in, provider("p"))
	client := in.start(cg)
	client.Hammer(kerneltest.TCP4, threads, "192.0.2.1:80")
	kerneltest.Poll(in, "many connects", func() error {
		if b := in.count(provider("p")); b.Accepted+b.refused() < connects {
			return fmt.Errorf("%d and %d", b.Accepted, b.refused())
		}
		return nil
	})
	counts := client.Calm()
	highest, samples := s.end()
	b := in.count(provider("p"))
	if highest != limit || b.Peak != limit {
		in.Errorf("%d samples, the highest %d, peak %d; want %d", samples, highest, b.Peak, limit)
	}
	passed, refused := counts[syscall.ENETUNREACH], counts[errnoSeen(syscall.ECONNREFUSED)]
	if len(counts) != 2 || int(b.Accepted) != passed || int(b.refused()) != refused {
		in.Errorf("accepted %d, rejected %v; connect returned %v", b.Accepted, b.Rejected, counts)
	}
	in.Logf("%d samples; accepted %d, rejected %v", samples, b.Accepted, b.Rejected)
}

// sevenScopes is a policy whose route from (f, t) to p holds a bulkhead of every
// scope, each with its limit and an errno of its own, and other routes beside it.
func sevenScopes(t *testing.T, mode string, limits [policy.MaxHolds + 1]string) *policy.Plan {
	t.Helper()
	block := func(s policy.Scope) string {
		return "{connections: " + limits[s] + ", errno: " + sevenErrnos()[s].name + "}"
	}
	return planOf(t, "apiVersion: bulkhead/v1\nkind: Policy\nmode: "+mode+`
providers:
  p: {cidrs: [127.1.0.0/16], limits: `+block(policy.ScopeProvider)+`}
  q: {cidrs: [127.2.0.0/16], limits: {connections: 9}}
tenants:
  t: {limits: `+block(policy.ScopeTenant)+`, providers: {p: `+block(policy.ScopeTenantProvider)+`}}
  u: {limits: {connections: 9}}
features:
  f:
    class: batch
    limits: `+block(policy.ScopeFeature)+`
    providers: {p: `+block(policy.ScopeFeatureProvider)+`}
    tenants:
      t: {limits: `+block(policy.ScopeFeatureTenant)+`, providers: {p: `+block(policy.ScopeFeatureTenantProvider)+`}}
  g: {class: batch, limits: {connections: 9}}
`)
}

type namedErrno struct {
	name string
	syscall.Errno
}

func sevenErrnos() [policy.MaxHolds + 1]namedErrno {
	return [...]namedErrno{
		policy.ScopeFeatureTenantProvider: {"EAGAIN", syscall.EAGAIN},
		policy.ScopeFeatureProvider:       {"EACCES", syscall.EACCES},
		policy.ScopeTenantProvider:        {"EBUSY", syscall.EBUSY},
		policy.ScopeFeatureTenant:         {"EUSERS", syscall.EUSERS},
		policy.ScopeFeature:               {"ENETDOWN", syscall.ENETDOWN},
		policy.ScopeTenant:                {"ENOBUFS", syscall.ENOBUFS},
		policy.ScopeProvider:              {"EHOSTDOWN", syscall.EHOSTDOWN},
	}
}

// key of the bulkhead of a scope on the route from (f, t) to p.
func sevenKey(s policy.Scope) policy.Key {
	k := policy.Key{Scope: s}
	switch s {
	case policy.ScopeFeatureTenantProvider, policy.ScopeFeatureProvider, policy.ScopeFeatureTenant, policy.ScopeFeature:
		k.Feature = "f"
	}
	switch s {
	case policy.ScopeFeatureTenantProvider, policy.ScopeTenantProvider, policy.ScopeFeatureTenant, policy.ScopeTenant:
		k.Tenant = "t"
	}
	switch s {
	case policy.ScopeFeatureTenantProvider, policy.ScopeFeatureProvider, policy.ScopeTenantProvider, policy.ScopeProvider:
		k.Provider = "p"
	}
	return k
}

// Whichever bulkheads of a route are full, one, any two, or one and all that are less
// specific: the connect fails with the errno of the most specific of them, it is counted
// there and nowhere else, and nothing else changes on any bulkhead.
func testMostSpecificFullRefuses(in *instance) {
	t := in.T
	cg := in.Mkdir("f")
	var limits [policy.MaxHolds + 1]string
	for s := range limits {
		limits[s] = "5"
	}
	plan := sevenScopes(t, "enforce", limits)
	in.apply(plan, member(t, plan, cg, "f", "t"))
	kerneltest.Serve(t, "127.1.0.1:80", kerneltest.Drain)
	client := in.start(cg)

	// One connection holds one place of all seven, and of no other.
	client.MustDial(kerneltest.TCP4, "127.1.0.1:80")
	held := in.counts()
	for k, b := range held {
		on := false
		for s := policy.ScopeFeatureTenantProvider; s <= policy.ScopeProvider; s++ {
			on = on || k == sevenKey(s)
		}
		if on && (b.InUse != 1 || b.Accepted != 1 || b.Peak != 1) || !on && (b.InUse != 0 || b.Accepted != 0 || b.Peak != 0) {
			t.Errorf("%s (on the route: %v): %+v after one connection", k, on, b)
		}
	}
	if len(held) < policy.MaxHolds+4 {
		t.Fatalf("only %d bulkheads", len(held))
	}

	for full := 1; full < 1<<policy.MaxHolds; full++ {
		most := 1<<policy.MaxHolds - 1
		rest := most &^ (1<<bits.TrailingZeros(uint(full)) - 1)
		if bits.OnesCount(uint(full)) > 2 && full != rest {
			continue
		}
		var first policy.Scope
		for s := policy.ScopeFeatureTenantProvider; s <= policy.ScopeProvider; s++ {
			limits[s] = "2"
			if full>>(s-1)&1 != 0 {
				limits[s] = "1"
				if first == 0 {
					first = s
				}
			}
		}
		plan := sevenScopes(t, "enforce", limits)
		in.apply(plan, member(t, plan, cg, "f", "t"))
		before := in.counts()
		fd, errno := client.Dial(kerneltest.TCP4, "127.1.0.1:80")
		wantErrno(t, errno, errnoSeen(sevenErrnos()[first].Errno), "connect with "+first.String()+" full")
		after := in.counts()
		for k, b := range before {
			a := after[k]
			if k == sevenKey(first) {
				b.Rejected["full"]++
			}
			if a.InUse != b.InUse || a.Peak != b.Peak || a.Accepted != b.Accepted || a.observed() != 0 ||
				a.Rejected["full"] != b.Rejected["full"] || a.Rejected["contended"] != b.Rejected["contended"] {
				t.Fatalf("%07b full: %s is %+v, want %+v", full, k, a, b)
			}
		}
		client.Close(fd)
	}
}

// A limit without an errno refuses with ECONNREFUSED, and a limit of 0 refuses all.
func testDefaultErrno(in *instance) {
	t := in.T
	_, cg := in.enforce(`
providers:
  p: {cidrs: [127.0.0.0/8], limits: {connections: 0}}
features:
  f: {class: batch}
`)
	kerneltest.Serve(t, "127.0.0.1:8000", kerneltest.Drain)
	client := in.start(cg)
	_, errno := client.Dial(kerneltest.TCP4, "127.0.0.1:8000")
	wantErrno(t, errno, errnoSeen(syscall.ECONNREFUSED), "connect at a limit of 0")
	if b := in.count(provider("p")); b.refused() != 1 || b.Accepted != 0 || b.Peak != 0 {
		t.Errorf("got %+v, want 1 refused", b)
	}
	if n := in.traffic("f", "", "p").Connections; n != 0 {
		t.Errorf("%d connections counted, want 0", n)
	}
}

// Observe mode refuses nothing, counts what it would refuse on the most specific full
// bulkhead, and gives back to zero.
func testObserve(in *instance) {
	t := in.T
	cg := in.Mkdir("f")
	limits := [policy.MaxHolds + 1]string{}
	for s := range limits {
		limits[s] = "4"
	}
	limits[policy.ScopeFeature], limits[policy.ScopeProvider] = "2", "2"
	plan := sevenScopes(t, "observe", limits)
	in.apply(plan, member(t, plan, cg, "f", "t"))
	kerneltest.Serve(t, "127.1.0.1:80", kerneltest.Drain)
	client := in.start(cg)
	open, _ := split(t, client.Burst(kerneltest.TCP4, "127.1.0.1:80", 7), 0)
	if len(open) != 7 {
		t.Fatalf("%d of 7 connects passed", len(open))
	}
	// Of 7, the first 2 are within every limit; 3 and 4 are above the feature's, the
	// more specific of the two that are full; the rest above that of the narrowest.
	want := map[policy.Scope]uint64{policy.ScopeFeature: 2, policy.ScopeFeatureTenantProvider: 3}
	for s := policy.ScopeFeatureTenantProvider; s <= policy.ScopeProvider; s++ {
		b := in.count(sevenKey(s))
		if b.InUse != 7 || b.Peak != 7 || b.Accepted != 7 || b.refused() != 0 {
			t.Errorf("%s: %+v, want all 7 in use and none refused", b.Key, b)
		}
		// Connects that were at it together may have seen one another late.
		if got := b.observed(); got > want[s]+5 || got == 0 && want[s] != 0 {
			t.Errorf("%s: %d would have been refused, want about %d", b.Key, got, want[s])
		}
	}
	client.Close(open...)
	in.empty("after closing all")

	// One after the other it is exact.
	before := in.counts()
	for range 7 {
		open = append(open, client.MustDial(kerneltest.TCP4, "127.1.0.1:80"))
	}
	for s := policy.ScopeFeatureTenantProvider; s <= policy.ScopeProvider; s++ {
		b := in.count(sevenKey(s))
		if got := b.observed() - before[b.Key].observed(); got != want[s] {
			t.Errorf("%s: %d would have been refused, want %d", b.Key, got, want[s])
		}
	}
	if n := in.traffic("f", "t", "p").Connections; n != 14 {
		t.Errorf("%d connections counted, want 14", n)
	}
}

// A refusal is told with who, where, which bulkhead and why, and the total is of all.
func testRefusals(in *instance) {
	t := in.T
	_, cg := in.enforce(`
providers:
  p: {cidrs: ["127.0.0.0/8", "::1/128"], limits: {connections: 0, errno: EAGAIN}}
features:
  f: {class: batch, providers: {p: {connections: 3}}}
`)
	client := in.start(cg)
	for range 5 {
		_, errno := client.Dial(kerneltest.TCP6, "[::ffff:127.0.0.9]:4711")
		wantErrno(t, errno, errnoSeen(syscall.EAGAIN), "connect")
	}
	all, err := in.k.Reader().Refusals()
	if err != nil || len(all) != 1 {
		t.Fatalf("refusals %+v, error %v; want one", all, err)
	}
	r := all[0]
	if r.Total != 5 || r.Refused != 5 || r.WouldRefuse != 0 || r.Feature != "f" || r.Provider != "p" || int(r.PID) != client.PID || r.Comm == "" ||
		r.Remote.String() != "127.0.0.9:4711" || r.Proto != policy.TCP || r.Bulkhead != provider("p") ||
		r.Limit != 0 || r.Reason != "full" || r.Errno != uint16(syscall.EAGAIN) || r.Observed {
		t.Errorf("got %+v", r)
	}
}

// Who has claimed the record writes it bit by bit: until it is whole it is not told, not
// even with what the one before it said.
func testHalfRefusal(in *instance) {
	_, cg := in.enforce(closedPolicy)
	_, errno := in.start(cg).Dial(kerneltest.TCP4, "127.0.0.1:1")
	wantErrno(in, errno, errnoSeen(syscall.EAGAIN), "connect")

	at := in.k.traffic.at[trafficKey{feature: "f", provider: "p"}]
	records := in.k.coll.Maps[kernelMapRefusals]
	var whole kernelRefusal
	if err := records.Lookup(at, &whole); err != nil {
		in.Fatal(err)
	}
	told := func(r kernelRefusal) int {
		in.Helper()
		if err := records.Update(at, &r, ebpf.UpdateExist); err != nil {
			in.Fatal(err)
		}
		all, err := in.k.Reader().Refusals()
		if err != nil {
			in.Fatal(err)
		}
		return len(all)
	}
	again, first := whole, whole
	again.ClaimedNs++
	again.Pid++
	first.AtNs = 0
	for _, c := range []struct {
		name string
		kernelRefusal
		want int
	}{{"whole", whole, 1}, {"the next is being written", again, 0}, {"the first is being written", first, 0}, {"none yet", kernelRefusal{}, 0}, {"whole again", whole, 1}} {
		if n := told(c.kernelRefusal); n != c.want {
			in.Errorf("%s: %d refusals are told, want %d", c.name, n, c.want)
		}
	}
}
