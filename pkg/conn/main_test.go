package conn

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
	"bulkhead/internal/sockets"
	"bulkhead/pkg/policy"
)

func TestMain(m *testing.M) { os.Exit(kerneltest.Main(m)) }

// header is how every policy here starts.
const header = "apiVersion: bulkhead/v1\nkind: Policy\nmode: enforce\n"

// closedPolicy lets nothing of feature f through to loopback.
const closedPolicy = `
providers:
  p: {cidrs: [127.0.0.0/8], limits: {connections: 0, errno: EAGAIN}}
features:
  f: {class: batch}
`

// planOf compiles a policy.
func planOf(t testing.TB, text string) *policy.Plan {
	t.Helper()
	if !strings.HasPrefix(text, "apiVersion") {
		text = header + text
	}
	f, err := policy.Parse("policy.yaml", []byte(text))
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	plan, _, err := policy.Compile(f)
	if err != nil {
		t.Fatal(err)
	}
	return plan
}

// instance is a Kernel in an environment of its own.
type instance struct {
	*testing.T
	*kerneltest.Env
	o Options
	k *Kernel

	clients []*kerneltest.Client
}

// newInstance opens a Kernel. When the test ends every client is killed, and then
// nothing may be in use any more and no count may ever have gone below zero: whatever
// a test is about, it must not have leaked a slot.
func newInstance(t *testing.T) *instance {
	t.Helper()
	env := kerneltest.New(t)
	in := &instance{T: t, Env: env, o: Options{CgroupRoot: env.Cgroup.Path, BPFFS: env.BPFFS}}
	in.open()
	t.Cleanup(func() {
		in.leakless()
		if in.k != nil {
			in.close()
		}
	})
	return in
}

// test is a test on an instance that it shares with others, because to load the
// programs takes longer than most tests.
type test struct {
	name string
	run  func(in *instance)
}

// runAll runs tests one after the other, each from counts of zero.
func runAll(t *testing.T, tests ...test) {
	t.Helper()
	newInstance(t).runAll(t, tests)
}

// runCrowded is runAll with every home taken.
func runCrowded(t *testing.T, tests ...test) {
	t.Helper()
	in := newInstance(t)
	in.crowd()
	in.runAll(t, tests)
}

func (in *instance) runAll(t *testing.T, tests []test) {
	t.Helper()
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			sub := &instance{T: t, Env: in.With(t), o: in.o, k: in.k}
			sub.apply(planOf(t, "providers: {}\nfeatures: {}\n")) // which forgets every name, and with it its counts
			t.Cleanup(sub.leakless)
			c.run(sub)
		})
	}
}

func (in *instance) leakless() { in.Helper(); in.leaklessBut(0) }

// leaklessBut is leakless where so many connections found no room for a slot.
func (in *instance) leaklessBut(full uint64) {
	in.Helper()
	for _, c := range in.clients {
		c.Kill()
	}
	if in.k == nil || !in.k.pinned {
		return
	}
	in.empty("after every client has ended")
	if s := in.snapshot(); s.Totals.Underflow != 0 || s.Totals.SlotsFull != full {
		in.Errorf("totals %+v: a count went below zero, or slots ran out", s.Totals)
	}
}

func (in *instance) open() {
	in.Helper()
	k, err := Open(in.o)
	if err != nil {
		in.Fatal(err)
	}
	in.k = k
}

func (in *instance) close() {
	in.Helper()
	if err := in.k.Close(); err != nil {
		in.Error(err)
	}
	in.k = nil
}

// apply puts a policy in force.
func (in *instance) apply(plan *policy.Plan, members ...Member) {
	in.Helper()
	if _, err := in.k.Apply(plan, members); err != nil {
		in.Fatal(err)
	}
}

// load loads other programs on the instance's maps.
func (in *instance) load(spec *ebpf.CollectionSpec) map[string]*ebpf.Program {
	in.Helper()
	own := map[string]*ebpf.Map{}
	for name, m := range in.k.coll.Maps {
		if isPinned(name) {
			own[name] = m
		}
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: own})
	if err != nil {
		in.Fatalf("%+v", err)
	}
	in.Cleanup(coll.Close)
	return coll.Programs
}

// enforce puts a policy in force, with a cgroup in its feature f.
func (in *instance) enforce(text string) (*policy.Plan, kerneltest.Cgroup) {
	in.Helper()
	plan, cg := planOf(in, text), in.Mkdir("f")
	in.apply(plan, member(in, plan, cg, "f", ""))
	return plan, cg
}

func (in *instance) setMembers(members ...Member) {
	in.Helper()
	if err := in.k.SetMembers(members); err != nil {
		in.Fatal(err)
	}
}

func (in *instance) reconcile() Reconciled {
	in.Helper()
	r, err := in.k.Reconcile(context.Background())
	if err != nil {
		in.Fatal(err)
	}
	return r
}

// start starts a client that ends before the instance is looked at for leaks.
func (in *instance) start(cg kerneltest.Cgroup) *kerneltest.Client {
	in.Helper()
	c := in.Env.Start(cg)
	in.clients = append(in.clients, c)
	return c
}

func (in *instance) startIn(ns *kerneltest.Netns, cg kerneltest.Cgroup) *kerneltest.Client {
	in.Helper()
	c := in.Env.StartIn(ns, cg)
	in.clients = append(in.clients, c)
	return c
}

// member places a cgroup in a compartment of a plan.
func member(t testing.TB, plan *policy.Plan, cg kerneltest.Cgroup, feature, tenant string) Member {
	t.Helper()
	c, ok := plan.FindCompartment(feature, tenant)
	if !ok {
		t.Fatalf("no compartment %s/%s", feature, tenant)
	}
	return Member{CgroupID: cg.ID, Level: cg.Level, Compartment: c}
}

func protected(cg kerneltest.Cgroup) Member {
	return Member{CgroupID: cg.ID, Level: cg.Level, Protected: true}
}

func (in *instance) snapshot() *Snapshot {
	in.Helper()
	s, err := in.k.Reader().Snapshot(context.Background())
	if err != nil {
		in.Fatal(err)
	}
	return s
}

// counts are every bulkhead's, by key: a Snapshot's, without the sockets.
func (in *instance) counts() map[policy.Key]Bulkhead {
	in.Helper()
	at, _, err := readNames(in.k.coll.Maps)
	if err != nil {
		in.Fatal(err)
	}
	list, err := in.k.Reader().bulkheads(in.k.plan, at)
	if err != nil {
		in.Fatal(err)
	}
	all := map[policy.Key]Bulkhead{}
	for _, b := range list {
		all[b.Key] = b
	}
	return all
}

func (in *instance) count(k policy.Key) Bulkhead {
	in.Helper()
	b, ok := in.counts()[k]
	if !ok {
		in.Fatalf("no bulkhead %s", k)
	}
	return b
}

func (in *instance) traffic(feature, tenant, provider string) Traffic {
	in.Helper()
	for _, t := range in.snapshot().Traffic {
		if t.Feature == feature && t.Tenant == tenant && t.Provider == provider {
			return t
		}
	}
	in.Fatalf("no traffic of %s/%s to %s", feature, tenant, provider)
	return Traffic{}
}

func (b Bulkhead) refused() uint64  { return b.Rejected["full"] + b.Rejected["contended"] }
func (b Bulkhead) observed() uint64 { return b.WouldReject["full"] + b.WouldReject["contended"] }

// Short keys.
func provider(name string) policy.Key {
	return policy.Key{Scope: policy.ScopeProvider, Provider: name}
}

func feature(name string) policy.Key { return policy.Key{Scope: policy.ScopeFeature, Feature: name} }

// inUse waits until a bulkhead has n slots in use: what frees one may come after the
// call that causes it has returned.
func (in *instance) inUse(k policy.Key, n uint32, when string) {
	in.Helper()
	kerneltest.Poll(in, when, func() error {
		if b := in.count(k); b.InUse != n {
			return fmt.Errorf("%s has %d in use, want %d", k, b.InUse, n)
		}
		return nil
	})
}

// crowd makes every free home look as if somebody were writing there, so that every slot
// from then on is a guest.
func (in *instance) crowd() {
	in.Helper()
	m := in.k.coll.Maps[kernelMapHomes]
	for i := range m.MaxEntries() {
		var s kernelSlot
		if err := m.Lookup(i, &s); err != nil {
			in.Fatal(err)
		}
		if s.Word != 0 {
			continue
		}
		s.Word = uint64(kernelConstantSLOT_THERE | kernelConstantSLOT_CLAIMED)
		if err := m.Update(i, &s, ebpf.UpdateAny); err != nil {
			in.Fatal(err)
		}
	}
}

// notes is the sum of the filter that says where a socket's entry may be; 0 without any.
func (in *instance) notes() (sum uint64) {
	in.Helper()
	m := in.k.coll.Maps[kernelMapCookies]
	keys, values := make([]uint32, m.MaxEntries()), make([]uint32, m.MaxEntries())
	var cursor ebpf.MapBatchCursor
	n, err := m.BatchLookup(&cursor, keys, values, nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) || n != len(values) {
		in.Fatalf("%d notes of %d: %v", n, len(values), err)
	}
	for _, v := range values {
		sum += uint64(v)
	}
	return sum
}

// empty waits until nothing is in use, no slot is left, and nothing is noted of any.
func (in *instance) empty(when string) {
	in.Helper()
	kerneltest.Poll(in, when, func() error {
		var err error
		for k, b := range in.counts() {
			if b.InUse != 0 {
				err = errors.Join(err, fmt.Errorf("%s has %d in use", k, b.InUse))
			}
		}
		slots, readErr := readSlots(in.k.coll.Maps)
		if readErr != nil {
			in.Fatal(readErr)
		}
		if n := len(slots); n != 0 {
			err = errors.Join(err, fmt.Errorf("%d slots are left, the first %+v", n, slots[0]))
		}
		udp, readErr := in.k.udpSockets()
		if readErr != nil {
			in.Fatal(readErr)
		}
		if n := in.notes(); n != uint64(len(udp)) {
			err = errors.Join(err, fmt.Errorf("the filter's notes have the sum %#x, want that of %d UDP sockets alone", n, len(udp)))
		}
		return err
	})
}

// refusals says which connects were refused with want, and fails on any other errno
// but success.
func split(t testing.TB, results []kerneltest.Result, want syscall.Errno) (open []int, refused []int) {
	t.Helper()
	for _, r := range results {
		switch r.Errno {
		case 0:
			open = append(open, r.FD)
		case errnoSeen(want):
			refused = append(refused, r.FD)
		default:
			t.Fatalf("connect: %v, want success or %v", r.Errno, want)
		}
	}
	return open, refused
}

// errnoSeen is what connect() returns for an errno of the policy on this kernel.
func errnoSeen(policy syscall.Errno) syscall.Errno {
	if !HaveErrno() {
		return syscall.EPERM
	}
	return policy
}

func wantErrno(t testing.TB, got, want syscall.Errno, what string) {
	t.Helper()
	if got != want {
		t.Fatalf("%s: %d (%v), want %d (%v)", what, int(got), got, int(want), want)
	}
}

// attached is the number of programs at each hook of a cgroup, by hook name.
func attached(t testing.TB, cgroup string) map[string]int {
	t.Helper()
	dir, err := os.Open(cgroup)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	n := map[string]int{}
	for _, h := range hooks() {
		r, err := link.QueryPrograms(link.QueryOptions{Target: int(dir.Fd()), Attach: h.attach})
		if err != nil {
			t.Fatalf("query %s: %v", h.name, err)
		}
		if len(r.Programs) > 0 {
			n[h.name] = len(r.Programs)
		}
	}
	return n
}

func keysOf[K ~string, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }

// readOwnSockets are the remote addresses of the TCP sockets in the test's namespace.
func readOwnSockets(in *instance) []string {
	in.Helper()
	d := sockets.Read(context.Background(), sockets.Namespace{}, unix.IPPROTO_TCP)
	if !d.Complete {
		in.Fatal(d.Err)
	}
	var all []string
	for _, s := range d.Sockets {
		all = append(all, s.Remote.String())
	}
	return all
}
