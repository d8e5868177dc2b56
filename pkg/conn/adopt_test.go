package conn

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/policy"
)

const adoptPolicy = `
providers:
  p: {cidrs: [127.1.0.0/16], limits: {connections: 2}}
features:
  f: {class: batch}
  g: {class: batch}
`

// whereabouts are by the members in force, as the agent fills them in from its tree.
func (in *instance) whereabouts() Whereabouts {
	in.Helper()
	named, at := map[uint64]Member{}, map[string]Member{}
	for _, m := range in.k.known.Load().members {
		named[m.CgroupID] = m
	}
	w := Whereabouts{Members: map[uint64]Member{}}
	err := filepath.WalkDir(in.o.CgroupRoot, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		id, err := inode(path)
		m, ok := named[id]
		if !ok {
			m = at[filepath.Dir(path)]
		}
		at[path], w.Members[id] = m, m
		return err
	})
	if err != nil {
		in.Fatal(err)
	}
	top, err := kerneltest.Root()
	if err != nil {
		in.Fatal(err)
	}
	w.Of = func(pid uint32) (uint64, bool) {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		if err != nil {
			return 0, false
		}
		_, path, _ := strings.Cut(string(text), "0::")
		id, err := inode(filepath.Join(top, strings.TrimSpace(path)))
		return id, err == nil
	}
	return w
}

// adopt adopts; what other tests of this process have left outside of the root is not placed.
func (in *instance) adopt(slots int, when string) {
	in.Helper()
	a, err := in.k.Adopt(context.Background(), in.whereabouts())
	if err != nil || len(a.Errors) != 0 || a.Slots != slots {
		in.Fatalf("%s: %+v (%v), want %d adopted", when, a, err, slots)
	}
}

// TestAdopt: connections from before the attach are counted where their processes are,
// in every network namespace, and so is their end, however they end.
func TestAdopt(t *testing.T) {
	in := newInstance(t)
	cg := map[string]kerneltest.Cgroup{}
	for _, name := range []string{"f", "f/deep/er", "g", "none", "safe"} {
		cg[name] = in.Mkdir(name)
	}
	server := kerneltest.Serve(t, "127.1.0.1:80", kerneltest.Drain)
	elsewhere := kerneltest.Serve(t, "127.2.0.1:80", kerneltest.Drain)
	ns := kerneltest.NewNetns(in)
	var far *kerneltest.Server
	ns.Do(func() error {
		far = kerneltest.Serve(in, "127.1.0.1:80", kerneltest.Drain)
		return nil
	})

	f, deep, g, none, safe := in.start(cg["f"]), in.start(cg["f/deep/er"]), in.start(cg["g"]), in.start(cg["none"]), in.start(cg["safe"])
	other := in.startIn(ns, cg["g"])
	open := []int{f.MustDial(kerneltest.TCP4, server.Addr), f.MustDial(kerneltest.TCP6, "[::ffff:127.1.0.1]:80"), f.MustDial(kerneltest.TCP4, server.Addr)}
	deep.MustDial(kerneltest.TCP4, server.Addr)
	moved := g.MustDial(kerneltest.TCP4, server.Addr)
	none.MustDial(kerneltest.TCP4, server.Addr)
	safe.MustDial(kerneltest.TCP4, server.Addr)
	other.MustDial(kerneltest.TCP4, far.Addr)
	f.MustDial(kerneltest.TCP4, elsewhere.Addr)
	// Accepted, not made, though it comes from where p is.
	listener := g.Socket(kerneltest.TCP4)
	g.Bind(listener, "127.3.0.1:0")
	at := g.Listen(listener)
	from := none.Socket(kerneltest.TCP4)
	none.Bind(from, "127.1.0.9:0")
	wantErrno(t, none.Connect(from, at), 0, "connect")
	g.Accept(listener)
	// Passed on: it belongs where the process is that holds it now.
	f.Take(g, moved)
	g.Close(moved)

	plan := planOf(t, adoptPolicy)
	members := []Member{member(t, plan, cg["f"], "f", ""), member(t, plan, cg["g"], "g", ""), protected(cg["safe"])}
	in.apply(plan, members...)
	if n := in.count(provider("p")).InUse; n != 0 {
		t.Fatalf("%d in use before", n)
	}
	in.adopt(7, "first")
	for k, want := range map[string]uint32{"f": 5, "g": 1, "default": 1} {
		if n := in.count(feature(k)).InUse; n != want {
			t.Errorf("%d in use by %s, want %d", n, k, want)
		}
	}
	for _, c := range in.snapshot().Connections {
		if c.PID == 0 || c.Comm == "" || c.State != "established" || c.Provider != "p" {
			t.Errorf("adopted: %+v", c)
		}
	}
	in.adopt(0, "again")
	in.reconcile()
	in.reconcile()
	in.inUse(provider("p"), 7, "after two Reconciles")

	// Over its limit it refuses newcomers until it is below.
	_, errno := f.Dial(kerneltest.TCP4, server.Addr)
	wantErrno(t, errno, errnoSeen(111), "connect over the limit")
	f.Close(open[0])
	in.inUse(provider("p"), 6, "after a close")
	f.Reset(open[1])
	in.inUse(provider("p"), 5, "after a reset")
	wantErrno(t, f.Disconnect(open[2]), 0, "AF_UNSPEC") // of which the kernel tells nothing here
	wantErrno(t, f.Connect(open[2], elsewhere.Addr), 0, "connect elsewhere on the same descriptor")
	in.inUse(provider("p"), 4, "after a connect elsewhere")
	for _, c := range []*kerneltest.Client{deep, none, other, f} {
		c.Kill()
	}
	in.inUse(provider("p"), 0, "after the processes are killed")
	newcomer := in.start(cg["f"])
	newcomer.MustDial(kerneltest.TCP4, server.Addr)
	if tr := in.traffic("f", "", "p"); tr.Connections != 1 {
		t.Errorf("%+v, want 1 connection", tr)
	}
}

// A plan that names a destination for the first time counts what is connected there.
func TestAdoptReload(t *testing.T) {
	in := newInstance(t)
	cg := in.Mkdir("f")
	server := kerneltest.Serve(t, "127.1.0.1:80", kerneltest.Drain)
	before := planOf(t, "providers: {}\nfeatures:\n  f: {class: batch}\n")
	in.apply(before, member(t, before, cg, "f", ""))
	client := in.start(cg)
	for range 3 {
		client.MustDial(kerneltest.TCP4, server.Addr)
	}
	after := planOf(t, adoptPolicy)
	in.apply(after, member(t, after, cg, "f", ""))
	in.adopt(3, "after a reload")
	if b := in.count(feature("f")); b.InUse != 3 {
		t.Errorf("%+v, want 3 in use", b)
	}
	// The bytes of what was adopted leave no sum when it closes.
	first := in.traffic("f", "", "p")
	client.Kill()
	in.inUse(feature("f"), 0, "after the process is killed")
	if last := in.traffic("f", "", "p"); last.TxBytes < first.TxBytes || last.RxBytes < first.RxBytes {
		t.Errorf("traffic fell from %+v to %+v", first, last)
	}
}

// A socket that connects elsewhere while it is adopted has one slot, its own.
func TestAdoptTwins(t *testing.T) {
	in := newInstance(t)
	client, _ := two(in)
	in.crowd()
	fd := client.MustDial(kerneltest.TCP4, "127.2.0.1:80")
	slots, err := readSlots(in.k.coll.Maps)
	if err != nil || len(slots) != 1 {
		t.Fatalf("%d slots (%v)", len(slots), err)
	}
	// As if home had become free between two looks at it: the other is there.
	homes := in.k.coll.Maps[kernelMapHomes]
	twin := slots[0]
	twin.Flags |= uint8(kernelSlotFlagSLOT_HOME | kernelSlotFlagSLOT_ADOPTED)
	twin.N = 0
	twin.Word ^= 1 << 20
	if err := homes.Update(uint32(twin.Cookie)&(homes.MaxEntries()-1), &twin.kernelSlot, 0); err != nil {
		t.Fatal(err)
	}
	if err := in.k.coll.Maps[kernelMapCookies].Update(uint32(twin.Cookie)&(homes.MaxEntries()-1), uint32(1<<24+1), 0); err != nil {
		t.Fatal(err)
	}
	if err := in.k.dropTwins(); err != nil {
		t.Fatal(err)
	}
	slots, err = readSlots(in.k.coll.Maps)
	if err != nil || len(slots) != 1 || slots[0].has(kernelSlotFlagSLOT_ADOPTED) {
		t.Fatalf("slots %s (%v), want its own", fmt.Sprintf("%+v", slots), err)
	}
	in.want(0, 1, "after the twin is gone")
	client.Close(fd)
}

// TestAdoptGhosts: a connection that closes between the last look at it and its slot has
// none, as no hook will tell of its end.
func TestAdoptGhosts(t *testing.T) {
	in := newInstance(t)
	cg := in.Mkdir("f")
	server := kerneltest.Serve(t, "127.1.0.1:80", kerneltest.Drain)
	client := in.start(cg)
	closed, open := client.MustDial(kerneltest.TCP4, server.Addr), client.MustDial(kerneltest.TCP4, server.Addr)
	plan := planOf(t, adoptPolicy)
	in.apply(plan, member(t, plan, cg, "f", ""))

	dumps, _ := readEvery(t.Context(), policy.TCP)
	a := asked{plan: plan, where: in.whereabouts(), proto: policy.TCP, part: func(uint32) uint32 { return 0 }}
	found, _ := strays(t.Context(), a, dumps, nil)
	if len(found) != 2 {
		t.Fatalf("%d strays, want 2", len(found))
	}
	client.Reset(closed)
	if n, err := in.k.take(t.Context(), in.k.known.Load(), found, nil); n != 1 || err != nil {
		t.Errorf("%d adopted (%v), want 1", n, err)
	}
	in.inUse(provider("p"), 1, "after one of two has closed")
	client.Close(open)
	in.inUse(provider("p"), 0, "after both have")
}

// What comes and goes while it is looked for has had a slot, and gets no other.
func TestAdoptBusy(t *testing.T) {
	in := newInstance(t)
	plan, cg := in.enforce(adoptPolicy)
	kerneltest.Serve(t, "127.1.0.1:80", kerneltest.Drain)
	client, held := in.start(cg), in.start(cg)
	held.MustDial(kerneltest.TCP4, "127.1.0.1:80")
	client.Storm(kerneltest.TCP4, "127.1.0.1:80", 4)
	for i := range 12 {
		in.apply(plan, member(t, plan, cg, "f", ""))
		if _, err := in.k.Adopt(context.Background(), in.whereabouts()); err != nil {
			t.Fatal(err)
		}
		if b := in.count(provider("p")); b.InUse < 1 || b.Peak > 2 {
			t.Fatalf("round %d: %+v, one is held and two are allowed", i, b)
		}
	}
	if counts := client.Calm(); counts[0] == 0 {
		t.Errorf("connects: %v", counts)
	}
	in.inUse(provider("p"), 1, "after the storm")
	held.Kill()
	in.empty("after closing")
}

// The paths that the kernel adds to a connection of MPTCP are not adopted: no hook would
// tell of their end.
func TestAdoptSubflows(t *testing.T) {
	in := newInstance(t)
	subflows(in, func() {
		in.inUse(provider("p"), 1, "one connection")
		in.adopt(0, "with three paths")
		in.inUse(provider("p"), 1, "after it")
	})
}
