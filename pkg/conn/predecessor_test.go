package conn

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/policy"
)

const successionPolicy = `
providers:
  p: {cidrs: [127.1.0.0/16], protocol: [tcp, udp], limits: {connections: 7, errno: EAGAIN}}
  q: {cidrs: [127.2.0.0/16], protocol: [tcp, udp], limits: {connections: 100}}
features:
  f: {class: batch, limits: {connections: 100}}
`

// release ends this release and opens another on the same pins.
func (in *instance) release(layout int) {
	in.Helper()
	in.close()
	in.o.layout = layout
	in.open()
}

// newRelease is newInstance of a release.
func newRelease(t *testing.T, layout int) *instance {
	t.Helper()
	in := newInstance(t)
	in.release(layout)
	return in
}

// TestSuccession: a release whose maps have another layout takes over, and the one before
// takes over again: counts are what they were, the limit holds all the time, and of the
// other nothing is left.
func TestSuccession(t *testing.T) {
	in := newRelease(t, 101)
	plan, cg := in.enforce(successionPolicy)
	server := kerneltest.Serve(t, "127.1.0.1:80", kerneltest.Drain)
	kerneltest.Serve(t, "127.2.0.1:80", kerneltest.Drain)
	client, full, busy := in.start(cg), in.start(cg), in.start(cg)

	// Seven at p, which is full: five of TCP, one guest among them, a connected UDP socket
	// and one that sent to both.
	var open []int
	for range 4 {
		open = append(open, client.MustDial(kerneltest.TCP4, server.Addr))
	}
	in.crowd()
	open = append(open, client.MustDial(kerneltest.TCP4, server.Addr))
	connected := client.MustDial(kerneltest.UDP4, "127.1.0.1:80")
	both := client.Socket(kerneltest.UDP4)
	wantErrno(t, client.SendTo(both, "127.1.0.1:80", 1), 0, "sendto p")
	wantErrno(t, client.SendTo(both, "127.2.0.1:80", 1), 0, "sendto q")
	client.Upload(open[0], 100_000)
	in.want(7, 1, "before")
	full.Storm(kerneltest.TCP4, server.Addr, 1)
	busy.Storm(kerneltest.TCP4, "127.2.0.1:80", 2)

	before, traffic := in.counts(), in.traffic("f", "", "p")
	check := func(when string) {
		t.Helper()
		now := in.counts()
		if n := now[provider("p")].InUse; n != 7 {
			t.Errorf("%s: %d in use at p, want 7", when, n)
		}
		for k, b := range before {
			if c := now[k]; c.Accepted < b.Accepted || c.Peak < b.Peak || c.refused() < b.refused() {
				t.Errorf("%s: %s fell from %+v to %+v", when, k, b, c)
			}
		}
		if tr := in.traffic("f", "", "p"); tr.TxBytes < traffic.TxBytes || tr.RxBytes < traffic.RxBytes || tr.Connections != traffic.Connections {
			t.Errorf("%s: traffic %+v, was %+v", when, tr, traffic)
		}
		before = now
		for name, n := range attached(t, in.Cgroup.Path) {
			if n != 1 {
				t.Errorf("%s: %d programs at %s", when, n, name)
			}
		}
		if left, err := in.o.others(); err != nil || len(left) != 0 {
			t.Errorf("%s: left of the other release: %v (%v)", when, left, err)
		}
	}
	check("before")
	for i, next := range []int{102, 101, 103} {
		when := fmt.Sprintf("takeover %d, by %d", i, next)
		in.close()
		in.o.layout = next
		if _, err := OpenReader(in.o); !errors.Is(err, ErrOtherRelease) {
			t.Fatalf("%s: a reader of the next release: %v", when, err)
		}
		in.open()
		if i == 2 {
			// Killed after its own came into force: the next start goes on.
			in.k.predecessors = nil
			in.apply(plan, member(t, plan, cg, "f", ""))
			if left, _ := in.o.others(); len(left) != 1 {
				t.Fatalf("%s: left %v", when, left)
			}
			in.close()
			in.open()
		}
		in.apply(plan, member(t, plan, cg, "f", ""))
		check(when)
	}
	counts := full.Calm()
	if n := counts[0]; n != 0 || len(counts) != 1 {
		t.Errorf("connects to p, which is full: %v", counts)
	}
	if counts := busy.Calm(); counts[0] == 0 || len(counts) != 1 {
		t.Errorf("connects to q: %v", counts)
	}
	in.want(7, 1, "after the storm")

	// What was taken over ends as anything else does, and its bytes are counted.
	wantErrno(t, client.Connect(connected, "127.2.0.1:80"), 0, "connect of the UDP socket elsewhere")
	in.want(6, 2, "after it")
	client.Upload(open[0], 100_000)
	client.Close(open...)
	client.Close(both)
	in.want(0, 1, "after closing")
	kerneltest.Poll(t, "bytes of what was taken over", func() error {
		if tr := in.traffic("f", "", "p"); tr.TxBytes < 200_000 {
			return fmt.Errorf("%+v, want 200,000 sent", tr)
		}
		return nil
	})
}

// What is released while it is taken over is given back.
func TestSuccessionRaces(t *testing.T) {
	in := newRelease(t, 101)
	plan, cg := in.enforce(twoProviders)
	kerneltest.Serve(t, "127.1.0.1:80", kerneltest.Drain)
	client := in.start(cg)
	client.Storm(kerneltest.TCP4, "127.1.0.1:80", 4)
	begun := time.Now()
	for i := 0; i < 20 && (i < 4 || time.Since(begun) < 20*time.Second); i++ { // fewer where loading takes long
		in.close()
		in.o.layout = 101 + (i+1)%2
		in.open()
		in.apply(plan, member(t, plan, cg, "f", ""))
		if n := in.count(provider("p")).InUse; n > 4 {
			t.Fatalf("takeover %d: %d in use by four threads", i, n)
		}
	}
	if counts := client.Calm(); counts[0] == 0 || len(counts) != 1 {
		t.Errorf("connects: %v", counts)
	}
	in.empty("after the storm")
}

// A start that is killed while it removes the release before leaves nothing that the next
// would take for open connections.
func TestSuccessionKilledLate(t *testing.T) {
	in := newRelease(t, 101)
	plan, cg := in.enforce(successionPolicy)
	server := kerneltest.Serve(t, "127.1.0.1:80", kerneltest.Drain)
	client := in.start(cg)
	open := []int{client.MustDial(kerneltest.TCP4, server.Addr), client.MustDial(kerneltest.TCP4, server.Addr)}
	in.release(102)
	p := in.k.predecessors[0]
	in.k.predecessors = nil
	in.apply(plan, member(t, plan, cg, "f", ""))
	theirs, err := p.names()
	if err != nil {
		t.Fatal(err)
	}
	if err := in.k.importSlots(p, theirs); err != nil {
		t.Fatal(err)
	}
	aside, err := in.k.putAside(p)
	if err != nil {
		t.Fatal(err)
	}
	p.close() // killed here
	in.close()
	if err := os.Remove(filepath.Join(aside, kernelMapLayout)); err != nil { // or here, within the removing
		t.Fatal(err)
	}
	client.Close(open...)
	in.open()
	in.apply(plan, member(t, plan, cg, "f", ""))
	in.empty("after the next start")
	kerneltest.Poll(t, "only ours are attached", func() error { // the kernel detaches later
		for name, n := range attached(t, in.Cgroup.Path) {
			if n != 1 {
				return fmt.Errorf("%d programs at %s", n, name)
			}
		}
		return nil
	})
	if _, err := os.Stat(aside); err == nil {
		t.Errorf("%s is left", aside)
	}
}

// There is room for all that the release before has, whatever was asked for.
func TestSuccessionSmaller(t *testing.T) {
	in := newInstance(t)
	in.close()
	in.o.layout, in.o.MaxSlots = 101, 4*MinMaxSlots
	in.open()
	plan, cg := in.enforce(successionPolicy)
	in.close()
	in.o.layout, in.o.MaxSlots = 102, MinMaxSlots
	in.open()
	in.apply(plan, member(t, plan, cg, "f", ""))
	if n := in.k.MaxSlots(); n != 4*MinMaxSlots {
		t.Errorf("room for %d, want %d", n, 4*MinMaxSlots)
	}
}

// A release that does not describe its layout is not taken over, and stays in force.
func TestNoSuccession(t *testing.T) {
	in := newRelease(t, 101)
	in.enforce(twoProviders)
	in.close()
	if err := os.Remove(filepath.Join(in.o.pins(), kernelMapLayout)); err != nil {
		t.Fatal(err)
	}
	in.o.layout = 102
	k, err := Open(in.o)
	if !errors.Is(err, ErrForeign) || !strings.Contains(err.Error(), "v101") || !strings.Contains(err.Error(), "bulkhead detach") {
		if err == nil {
			k.Close()
		}
		t.Fatalf("got %v, want what is in the way and what to do", err)
	}
	if n := attached(t, in.Cgroup.Path)["link_connect4"]; n != 1 {
		t.Errorf("%d programs at connect4", n)
	}
	if err := Detach(in.o); err != nil {
		t.Error(err)
	}
}

// TestDecode: fields are found by their names, wherever they are and whatever is
// between them.
func TestDecode(t *testing.T) {
	field := func(offset, size uint32) kernelLayoutField {
		return kernelLayoutField{Offset: offset, Size: size}
	}
	l := layout{"slot.Word": field(8, 8), "slot.Cookie": field(24, 8), "slot.Port": field(4, 4), "slot.N": field(40, 1), "slot.Addr": field(48, 16), "slot.Tally": field(60, 8)}
	raw := make([]byte, 64)
	for i := range raw {
		raw[i] = byte(i)
	}
	var s kernelSlot
	l.decode("slot", raw, &s)
	want := kernelSlot{Word: 0x0f0e0d0c0b0a0908, Cookie: 0x1f1e1d1c1b1a1918, Port: 0x0504, N: 40}
	copy(want.Addr[:], raw[48:])
	if s != want { // Tally would be beyond the end
		t.Errorf("got %+v, want %+v", s, want)
	}

	// Ours is what we say of it: a structure goes through its own description unchanged.
	own := ownLayout()
	if len(own) > int(kernelConstantLAYOUT_FIELDS) || len(own) < 20 {
		t.Errorf("%d fields", len(own))
	}
	var n kernelBulkheadName = bulkheadName(policy.Key{Scope: policy.ScopeFeatureProvider, Feature: "f", Provider: "p"})
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: 168, MaxEntries: 3})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.Put(uint32(5), &n); err != nil {
		t.Fatal(err)
	}
	p := &predecessor{layout: own, maps: map[string]*ebpf.Map{kernelMapBulkheadNames: m}}
	names, err := p.names()
	if err != nil || names.bulkheads[policy.Key{Scope: policy.ScopeFeatureProvider, Feature: "f", Provider: "p"}] != 5 {
		t.Errorf("names %v (%v)", names, err)
	}
}
