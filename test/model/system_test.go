package model

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
	"bulkhead/internal/sockets"
	"bulkhead/pkg/conn"
	"bulkhead/pkg/policy"
)

// stage is what outlasts a system: cgroups, servers and the wire to some of them.
type stage struct {
	t       testing.TB
	env     *kerneltest.Env
	o       conn.Options
	cgroups []kerneltest.Cgroup
	many    kerneltest.Cgroup // of those who exhaust slots
	servers []server
	far     *kerneltest.Netns
	post    [2]*os.File
}

type server struct {
	destination
	*kerneltest.Server
}

func newStage(t testing.TB, maxSlots uint32) *stage {
	t.Helper()
	env := kerneltest.New(t)
	g := &stage{t: t, env: env, o: conn.Options{CgroupRoot: env.Cgroup.Path, BPFFS: env.BPFFS, MaxSlots: maxSlots}, far: kerneltest.NewNetns(t)}
	for i := range cgroups {
		g.cgroups = append(g.cgroups, env.Mkdir(fmt.Sprintf("w%d", i)))
	}
	g.many = env.Mkdir("many")
	g.wire()
	sink := func() error {
		p, err := net.ListenPacket("udp", fmt.Sprintf("[::]:%d", serverPort))
		if err == nil {
			t.Cleanup(func() { p.Close() })
		}
		return err
	}
	if err := sink(); err != nil {
		t.Fatal(err)
	}
	g.far.Do(sink)
	for _, d := range dests {
		if d.manner != open {
			continue
		}
		serve := func() error {
			if err := addressable(d.Addr.Addr()); err != nil {
				return err
			}
			g.servers = append(g.servers, server{d, kerneltest.Serve(t, d.Addr.String(), kerneltest.Drain)})
			return nil
		}
		if d.wire {
			g.far.Do(serve)
		} else if err := serve(); err != nil {
			t.Fatal(err)
		}
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for i, fd := range pair {
		g.post[i] = os.NewFile(uintptr(fd), "post")
		t.Cleanup(func() { g.post[i].Close() })
	}
	return g
}

// wire joins this network namespace and another, where every address of 10.78.0.0/16
// and fd78::/16 is local. 10.79.0.0/16 and fd79::/16 lead there and to nobody.
func (g *stage) wire() {
	t := g.t
	t.Helper()
	var far int
	g.far.Do(func() (err error) {
		far, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		return err
	})
	defer unix.Close(far)
	near := &netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "near", HardwareAddr: hardware(1)}, PeerName: "far", PeerHardwareAddr: hardware(2), PeerNamespace: netlink.NsFd(far),
	}
	if err := netlink.LinkAdd(near); err != nil {
		t.Fatalf("veth pair: %v", err)
	}
	t.Cleanup(func() {
		if err := netlink.LinkDel(near); err != nil {
			t.Error(err)
		}
	})
	g.far.Do(func() error {
		// A router would answer for those whom nobody is.
		err := errors.Join(os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("0"), 0), os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("0"), 0))
		lo, loErr := netlink.LinkByName("lo")
		if err = errors.Join(err, loErr); err != nil {
			return err
		}
		for _, dst := range []string{"10.78.0.0/16", "fd78::/16"} {
			local := prefix(dst)
			err = errors.Join(err, netlink.RouteReplace(&netlink.Route{Dst: local, LinkIndex: lo.Attrs().Index, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST}))
		}
		return err
	})
	g.far.Do(mend)
	if err := plug("near", 1, 2); err != nil {
		t.Fatal(err)
	}
	link, err := netlink.LinkByName("near")
	if err != nil {
		t.Fatal(err)
	}
	for dst, by := range map[string]string{"10.78.0.0/15": "10.77.0.2", "fd78::/15": "fd77::2"} {
		if err := netlink.RouteAdd(&netlink.Route{Dst: prefix(dst), Gw: net.ParseIP(by), LinkIndex: link.Attrs().Index}); err != nil {
			t.Fatalf("route to %s: %v", dst, err)
		}
	}
}

// addressable gives lo an IPv6 address: a prefix that is local is not enough to listen.
func addressable(a netip.Addr) error {
	if a.Is4() {
		return nil
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	addr := &netlink.Addr{IPNet: prefix(a.String() + "/128"), Flags: unix.IFA_F_NODAD}
	if err := netlink.AddrReplace(lo, addr); err != nil {
		return fmt.Errorf("address %s: %w", a, err)
	}
	return nil
}

func hardware(n byte) net.HardwareAddr { return net.HardwareAddr{2, 0, 0, 0, 0, n} }

func prefix(s string) *net.IPNet {
	p := netip.MustParsePrefix(s)
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// plug brings one end up. Neither end asks who the other is: nothing would answer
// while the way is cut.
func plug(name string, own, other byte) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return err
	}
	for _, a := range []string{fmt.Sprintf("10.77.0.%d/24", own), fmt.Sprintf("fd77::%d/64", own)} {
		addr, err := netlink.ParseAddr(a)
		if err != nil {
			return err
		}
		addr.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrReplace(link, addr); err != nil {
			return fmt.Errorf("address %s: %w", a, err)
		}
	}
	for _, ip := range []string{fmt.Sprintf("10.77.0.%d", other), fmt.Sprintf("fd77::%d", other)} {
		err := netlink.NeighSet(&netlink.Neigh{LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT, IP: net.ParseIP(ip), HardwareAddr: hardware(other)})
		if err != nil {
			return fmt.Errorf("neighbour %s: %w", ip, err)
		}
	}
	return nil
}

func mend() error { return plug("far", 2, 1) }

func cut() error {
	link, err := netlink.LinkByName("far")
	if err == nil {
		err = netlink.LinkSetDown(link)
	}
	return err
}

// system is the kernel programs, the workers and the model of what they hold.
type system struct {
	*stage
	k        *conn.Kernel
	compiled []*policy.Plan
	model    *model
	patience time.Duration

	kernel sync.Mutex // Kernel is for one goroutine at a time

	mu      sync.RWMutex // of workers and in
	workers []*alive
	in      []int // cgroup of each worker

	swing   sync.RWMutex // held while the members change
	swinger place

	copies map[uint8]int // pid by number
	log    []Op          // what was begun, in order
	logMu  sync.Mutex

	reclaimed int
	samples   atomic.Int64
}

// alive is one worker, until it is killed.
type alive struct {
	*worker
	rest sync.RWMutex  // operations read it; to be moved needs it
	gone chan struct{} // closed when it has been killed and the model knows
}

func compile(text string) (*policy.Plan, error) {
	f, err := policy.Parse("policy.yaml", []byte(text))
	if err != nil {
		return nil, err
	}
	p, _, err := policy.Compile(f)
	return p, err
}

// newSystem opens a Kernel and starts workers. Close it.
func newSystem(g *stage, workers int, patience time.Duration) (_ *system, err error) {
	s := &system{stage: g, patience: patience, swinger: cgroups[0], copies: map[uint8]int{}}
	for _, limits := range plans {
		p, err := compile(policyText(limits))
		if err != nil {
			return nil, err
		}
		s.compiled = append(s.compiled, p)
	}
	errno := unix.EAGAIN
	if !conn.HaveErrno() {
		errno = unix.EPERM
	}
	if s.model, err = newModel(s.compiled, errno); err != nil {
		return nil, err
	}
	if s.k, err = conn.Open(g.o); err != nil {
		return nil, err
	}
	if _, err := s.k.Apply(s.compiled[0], s.members()); err != nil {
		s.k.Close()
		return nil, err
	}
	for w := range workers {
		a, err := s.start(w, w%len(cgroups))
		if err != nil {
			s.close()
			return nil, err
		}
		s.workers = append(s.workers, a)
		s.in = append(s.in, w%len(cgroups))
	}
	return s, nil
}

func (s *system) start(w, in int) (*alive, error) {
	k, err := startWorker(w, s.cgroups[in], s.post)
	if err != nil {
		return nil, fmt.Errorf("start worker %d: %w", w, err)
	}
	return &alive{worker: k, gone: make(chan struct{})}, nil
}

// close ends everything, and what was pinned.
func (s *system) close() error {
	for _, w := range s.workers {
		w.kill()
	}
	var err error
	for _, pid := range s.copies {
		err = errors.Join(err, endProcess(pid))
	}
	return errors.Join(err, s.far.Try(mend), s.k.Close(), conn.Detach(s.o))
}

func (s *system) members() []conn.Member {
	var all []conn.Member
	for i, p := range cgroups {
		if i == 0 {
			p = s.swinger
		}
		m := conn.Member{CgroupID: s.cgroups[i].ID, Level: s.cgroups[i].Level, Protected: p.protected}
		if p.feature == policy.DefaultFeature {
			continue // those that nobody names
		}
		if !p.protected {
			m.Compartment, _ = s.compiled[0].FindCompartment(p.feature, p.tenant)
		}
		all = append(all, m)
	}
	many := conn.Member{CgroupID: s.many.ID, Level: s.many.Level}
	many.Compartment, _ = s.compiled[0].FindCompartment("many", "")
	return append(all, many)
}

// note appends to the log.
func (s *system) note(o Op) {
	s.logMu.Lock()
	defer s.logMu.Unlock()
	s.log = append(s.log, o)
}

// runAll runs operations one after the other.
func (s *system) runAll(ops []Op) error {
	for _, o := range ops {
		if err := s.run(o); err != nil {
			return err
		}
	}
	return nil
}

// runRound runs those of a round that may be together at the same time, each thread's in
// order.
func (s *system) runRound(ops []Op) error {
	for len(ops) > 0 {
		if ops[0].Kind.alone() {
			if err := s.run(ops[0]); err != nil {
				return err
			}
			ops = ops[1:]
			continue
		}
		n := slices.IndexFunc(ops, func(o Op) bool { return o.Kind.alone() })
		if n < 0 {
			n = len(ops)
		}
		if err := s.runTogether(ops[:n]); err != nil {
			return err
		}
		ops = ops[n:]
	}
	return nil
}

func (s *system) runTogether(ops []Op) error {
	type lane struct{ w, l uint8 }
	type when struct {
		Op
		after int // operations of threads
	}
	byLane := map[lane][]Op{}
	var beside []when
	n := 0
	for _, o := range ops {
		if o.Kind.byThread() {
			byLane[lane{o.W, o.L}] = append(byLane[lane{o.W, o.L}], o)
			n++
		} else {
			beside = append(beside, when{o, n})
		}
	}
	var (
		mu    sync.Mutex
		more  = sync.NewCond(&mu)
		done  int
		first error
		all   sync.WaitGroup
	)
	finish := func(err error) (stop bool) {
		mu.Lock()
		defer mu.Unlock()
		done++
		if first == nil {
			first = err
		}
		more.Broadcast()
		return first != nil
	}
	for _, list := range byLane {
		all.Go(func() {
			for _, o := range list {
				if finish(s.run(o)) {
					return
				}
			}
		})
	}
	all.Go(func() {
		for _, o := range beside {
			mu.Lock()
			for done < o.after && first == nil {
				more.Wait()
			}
			stop := first != nil
			mu.Unlock()
			if stop {
				return
			}
			if err := s.run(o.Op); err != nil {
				mu.Lock()
				first = errors.Join(first, err)
				mu.Unlock()
				return
			}
		}
	})
	all.Wait()
	return first
}

// run runs one operation, or skips it if it is not possible.
func (s *system) run(o Op) error {
	if int(o.W) >= len(s.workers) || int(o.W2) >= len(s.workers) {
		return nil
	}
	if o.Kind.byThread() {
		return s.runThread(o)
	}
	s.note(o)
	m := s.model
	m.mu.Lock()
	m.ops[o.Kind]++
	m.mu.Unlock()
	switch o.Kind {
	case Dup, Pass, Fork:
		return s.share(o)
	case Exhaust:
		return s.exhaust()
	case Kill:
		return s.killWorker(o.W)
	case EndFork:
		return s.endFork(o.D2)
	case Move:
		w := s.workers[o.W]
		w.rest.Lock()
		defer w.rest.Unlock()
		s.env.Move(w.pid, s.cgroups[o.Arg])
		s.mu.Lock()
		s.in[o.W] = int(o.Arg)
		s.mu.Unlock()
	case Members:
		s.swing.Lock()
		defer s.swing.Unlock()
		s.swinger = cgroups[o.Arg]
		s.kernel.Lock()
		defer s.kernel.Unlock()
		return s.k.SetMembers(s.members())
	case Reload:
		m.flipping(o.Arg)
		s.kernel.Lock()
		defer s.kernel.Unlock()
		if _, err := s.k.Apply(s.compiled[o.Arg], s.members()); err != nil {
			return err
		}
		m.flipped(o.Arg)
	case Cut:
		return s.far.Try(cut)
	case Mend:
		return s.far.Try(mend)
	case Hangup, HangupRST:
		at := s.servers[int(o.Arg)%len(s.servers)]
		m.disturb(at.destination)
		at.Hangup(o.Kind == HangupRST)
		m.calm()
	case Reconcile:
		m.reconciling()
		_, err := s.reconcile()
		return err
	case Quiet:
		return s.quiet(o.Arg == 1)
	}
	return nil
}

func (s *system) reconcile() (int, error) {
	s.kernel.Lock()
	defer s.kernel.Unlock()
	r, err := s.k.Reconcile(context.Background())
	s.reclaimed += r.Reclaimed
	return r.Reclaimed, errors.Join(append(r.Errors, err)...)
}

// runThread runs an operation of a thread.
func (s *system) runThread(o Op) error {
	s.mu.RLock()
	w := s.workers[o.W]
	s.mu.RUnlock()
	w.rest.RLock()
	defer w.rest.RUnlock()
	s.mu.RLock()
	in := s.in[o.W] // until it rests
	s.mu.RUnlock()
	at := cgroups[in]
	if in == 0 {
		s.swing.RLock()
		defer s.swing.RUnlock()
		at = s.swinger
	}

	m := s.model
	key := desc{o.W, o.L, o.D}
	m.mu.Lock()
	on := m.descs[key]
	var shared bool
	if o.Kind == Storm {
		on = nil
	}
	if on != nil {
		o.Sock = on.kind
		shared = o.Kind == Sendto && len(on.owners) == 1
	}
	m.mu.Unlock()
	if on != nil {
		if shared {
			on.lock.RLock()
			defer on.lock.RUnlock()
		} else {
			on.lock.Lock()
			defer on.lock.Unlock()
		}
	}
	d := dests[o.Dest]
	s.note(o)
	var also *hold
	if o.Kind == Storm {
		also = m.holdOf(at, dests[o.D2].Provider, o.Sock.udp())
	}
	f := m.begin(o, m.holdOf(at, d.Provider, o.Sock.udp()), also)
	if f == nil {
		return nil
	}
	if f.sock != on && o.Kind != Open && o.Kind != Storm {
		return fmt.Errorf("%s: the descriptor is another socket's now", o)
	}
	// What is under way would be waited for.
	a, ok := w.do(call{o, d.wire || f.before == connecting || o.Kind == Storm && dests[o.D2].wire})
	if !ok {
		<-w.gone
	}
	return m.end(f, a, ok)
}

// share runs an operation that makes one more descriptor of a socket.
func (s *system) share(o Op) error {
	m := s.model
	m.mu.Lock()
	from := m.descs[desc{o.W, o.L, o.D}]
	target := desc{o.W, o.L2, o.D2}
	if o.Kind == Pass {
		target.w = o.W2
	}
	busy := m.descs[target] != nil
	if o.Kind == Fork {
		busy = m.copies[o.D2] != nil
	}
	m.mu.Unlock()
	if from == nil || busy {
		return nil
	}
	a, ok := s.workers[o.W].do(call{Op: o})
	if !ok || a.errno != 0 {
		return fmt.Errorf("%s: %v", o, a.errno)
	}
	if o.Kind == Pass {
		o.Arg = 1
		if a, ok = s.workers[o.W2].do(call{Op: o}); !ok || a.errno != 0 {
			return fmt.Errorf("%s: take it: %v", o, a.errno)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if o.Kind == Fork {
		m.copies[o.D2] = from
		from.descs++
		from.owners[copied(o.D2)] = 1
		s.copies[o.D2] = a.pid
		return nil
	}
	m.attach(from, target)
	return nil
}

// exhaust fills slots from the only cgroup that has no limit to stop it, and counts what
// found no room.
func (s *system) exhaust() error {
	cmd, err := start(s.many, roleMany, func(*exec.Cmd) {})
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		return fmt.Errorf("exhaust slots: %w", err)
	}
	snap, err := s.k.Reader().Snapshot(context.Background())
	if err != nil {
		return err
	}
	s.model.mu.Lock()
	defer s.model.mu.Unlock()
	if snap.Totals.SlotsFull == s.model.full {
		return fmt.Errorf("exhaust slots: there was room for %d", manySlots)
	}
	s.model.full = snap.Totals.SlotsFull
	return nil
}

func (s *system) endFork(n uint8) error {
	m := s.model
	m.mu.Lock()
	on := m.copies[n]
	m.mu.Unlock()
	if on == nil {
		return nil
	}
	on.lock.Lock()
	defer on.lock.Unlock()
	m.mu.Lock()
	if on.descs == 1 {
		m.unsure(on)
	}
	m.mu.Unlock()
	if err := endProcess(s.copies[n]); err != nil {
		return err
	}
	delete(s.copies, n)
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.copies, n)
	delete(on.owners, copied(n))
	m.drop(on)
	return nil
}

// killWorker kills a worker, with operations under way, and starts another in its place.
// Those on sockets that other processes have too are let end: what would have come of
// them could not be told.
func (s *system) killWorker(n uint8) error {
	m := s.model
	m.mu.Lock()
	shared := map[*sock]bool{}
	for key, on := range m.descs {
		if key.w == n && len(on.owners) > 1 {
			shared[on] = true
		}
	}
	m.mu.Unlock()
	for on := range shared {
		on.lock.Lock()
		defer on.lock.Unlock()
	}
	w := s.workers[n]
	m.killing(n)
	w.kill()
	m.killed(n)
	next, err := s.start(int(n), s.in[n])
	if err == nil {
		s.mu.Lock()
		s.workers[n] = next
		s.mu.Unlock()
	}
	close(w.gone)
	return err
}

// quiet compares, when nothing is under way.
func (s *system) quiet(reconcile bool) error {
	if err := s.settle(); err != nil {
		return fmt.Errorf("at a quiet point: %w", err)
	}
	m := s.model
	if !reconcile && !m.loose {
		return nil
	}
	exact := !m.loose
	before := s.reclaimed
	dump, err := s.dump()
	if err != nil {
		return err
	}
	for range 2 {
		if _, err := s.reconcile(); err != nil {
			return fmt.Errorf("reconcile: %w", err)
		}
	}
	m.mu.Lock()
	freed := 0
	for on := range m.socks {
		_, listed := dump.Sockets[on.cookie]
		switch {
		case on.phase == stuck && !on.kind.udp(), on.kind.udp() && !listed:
			freed += len(on.slots)
			m.set(on, nil, true)
			if on.phase == stuck {
				on.phase = fresh
			}
		case on.kind.udp():
			m.set(on, on.slots, true)
		}
	}
	m.loose = false
	m.mu.Unlock()
	if got := s.reclaimed - before; exact && got != freed {
		return fmt.Errorf("reconciled twice: %d reclaimed, want %d", got, freed)
	}
	if err := s.settle(); err != nil {
		return fmt.Errorf("after reconciling: %w", err)
	}
	return s.buried()
}

// buried waits until slots has no entry but of those who hold something, and of sockets
// that the kernel still closes, whose bytes are to be counted.
func (s *system) buried() error {
	for range 2 {
		if _, err := s.reconcile(); err != nil {
			return fmt.Errorf("reconcile: %w", err)
		}
	}
	return s.poll(func(dump sockets.Dump, snap *conn.Snapshot) error {
		most := len(snap.Connections)
		for _, so := range dump.Sockets {
			if so.Proto == unix.IPPROTO_TCP && so.Inode == 0 && ours(so.Remote) {
				most++
			}
		}
		s.model.mu.Lock()
		for on := range s.model.socks {
			if _, listed := dump.Sockets[on.cookie]; listed && on.kind.udp() {
				most += len(on.tombs) // until it is used again, or closed
			}
		}
		s.model.mu.Unlock()
		if n := snap.Totals.Slots; n > uint64(most) {
			return fmt.Errorf("after reconciling four times: %d entries in slots, want at most the %d of connections and of sockets that close", n, most)
		}
		return nil
	})
}

func (s *system) dump() (sockets.Dump, error) {
	d := sockets.Read(context.Background(), sockets.Namespace{}, unix.IPPROTO_TCP, unix.IPPROTO_UDP)
	return d, d.Err
}

// settle waits until the kernel's counts, the model and the sockets that exist agree.
func (s *system) settle() error { return s.poll(s.model.compare) }

func (s *system) poll(agrees func(sockets.Dump, *conn.Snapshot) error) error {
	for deadline := time.Now().Add(s.patience); ; time.Sleep(time.Millisecond) {
		dump, err := s.dump()
		if err != nil {
			return err
		}
		snap, err := s.k.Reader().Snapshot(context.Background())
		if err != nil {
			return err
		}
		err = agrees(dump, snap)
		if err == nil || time.Now().After(deadline) {
			return err
		}
	}
}

// slotName is one slot: whose and of what traffic.
type slotName struct {
	cookie                    uint64
	feature, tenant, provider string
}

// compare compares the kernel's counts with the model and the sockets that exist, and if
// they agree takes over what only these could tell.
func (m *model) compare(dump sockets.Dump, snap *conn.Snapshot) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var err error
	wrong := func(format string, args ...any) { err = errors.Join(err, fmt.Errorf(format, args...)) }

	held := map[slotName]conn.Connection{}
	sums := map[policy.Key]uint32{}
	for _, c := range snap.Connections {
		held[slotName{c.Cookie, c.Feature, c.Tenant, c.Provider}] = c
		for _, k := range c.Bulkheads {
			sums[k]++
		}
	}
	want := map[slotName]bool{}
	known := map[uint64]bool{}
	type end struct {
		*sock
		h *hold
	}
	var ended []end
	for on := range m.socks {
		known[on.cookie] = true
		so, exists := dump.Sockets[on.cookie]
		tcp := !on.kind.udp()
		if tcp && on.sure && on.phase == connected && len(on.slots) > 0 && !exists {
			wrong("%s is in no dump, and nothing has ended it", on)
		}
		for h := range on.slots {
			name := slotName{on.cookie, h.feature, h.tenant, h.provider}
			c, is := held[name]
			switch {
			case tcp && !on.sure && on.phase != stuck && !exists:
				ended = append(ended, end{on, h})
				if is {
					wrong("%s is closed and has a slot from %s", on, h)
				}
				continue
			case m.loose && !is && (!tcp || on.phase == stuck):
				ended = append(ended, end{on, h}) // a Reconcile beside it has freed it
				continue
			case !is:
				wrong("%s (%s) has no slot from %s", on, so.State, h)
				continue
			}
			want[name] = true
			if keys := m.keys(h); !slices.Equal(keys, c.Bulkheads) {
				wrong("%s from %s holds %v, want %v", on, h, c.Bulkheads, keys)
			}
		}
	}
	for name := range held {
		if !want[name] {
			what := "a socket that the model does not have"
			for on := range m.socks {
				if on.cookie == name.cookie {
					what = fmt.Sprintf("%s, phase %d, which should hold %v", on, on.phase, slices.Collect(maps.Keys(on.slots)))
				}
			}
			_, listed := dump.Sockets[name.cookie]
			wrong("a slot of socket %d from %s/%s to %s (protocol %d), which is %s (in a dump: %t)",
				name.cookie, name.feature, name.tenant, name.provider, held[name].Proto, what, listed)
		}
	}
	for cookie, so := range dump.Sockets {
		if so.Proto == unix.IPPROTO_TCP && so.Inode != 0 && !known[cookie] && ours(so.Remote) {
			wrong("socket %d to %s exists, which nobody made", cookie, so.Remote)
		}
	}
	for i, b := range m.plan.Bulkheads {
		at := slices.IndexFunc(snap.Bulkheads, func(k conn.Bulkhead) bool { return k.Key == b.Key })
		if at < 0 {
			wrong("no bulkhead %s", b.Key)
			continue
		}
		got := snap.Bulkheads[at]
		if got.InUse != sums[b.Key] {
			wrong("%s has %d in use, and %d connections hold it", b.Key, got.InUse, sums[b.Key])
		}
		if most := m.most(i); policy.Limit(got.Peak) > most {
			wrong("%s has a peak of %d, and its limit was never above %d", b.Key, got.Peak, most)
		}
	}
	if n := len(snap.Bulkheads); n != len(m.plan.Bulkheads) {
		wrong("%d bulkheads, want %d", n, len(m.plan.Bulkheads))
	}
	if t := snap.Totals; t.Underflow != 0 || t.Uncounted != 0 || t.SlotsFull != m.full {
		wrong("totals %+v", t)
	}
	if len(snap.Unseen) != 0 {
		wrong("unseen: %v", snap.Unseen)
	}
	if err != nil {
		return err
	}
	for _, e := range ended {
		slots := maps.Clone(e.slots)
		delete(slots, e.h)
		m.set(e.sock, slots, !m.loose)
		if e.kind.udp() {
			if e.tombs == nil {
				e.tombs = map[string]bool{}
			}
			e.tombs[e.h.provider] = true
		}
	}
	return nil
}

func (m *model) keys(h *hold) []policy.Key {
	var keys []policy.Key
	for _, b := range h.bulkheads {
		keys = append(keys, m.plan.Bulkheads[b].Key)
	}
	return keys
}

// ours says whether it is where a, b or c is.
func ours(to netip.AddrPort) bool {
	return slices.ContainsFunc(dests, func(d destination) bool { return d.Addr == to && d.Provider != policy.OtherProvider })
}

// sample looks again and again until stop is closed: no count may ever be above the
// highest limit that its bulkhead has.
func (s *system) sample(stop <-chan struct{}) error {
	reader := s.k.Reader()
	limits := map[policy.Key]policy.Limit{}
	for i, b := range s.model.plan.Bulkheads {
		limits[b.Key] = s.model.most(i)
	}
	pause := time.NewTicker(2 * time.Millisecond) // or it takes a processor from those that it watches
	defer pause.Stop()
	for {
		select {
		case <-stop:
			return nil
		case <-pause.C:
		}
		snap, err := reader.Snapshot(context.Background())
		if err != nil {
			return fmt.Errorf("sample: %w", err)
		}
		s.samples.Add(1)
		for _, b := range snap.Bulkheads {
			if policy.Limit(b.InUse) > limits[b.Key] {
				return fmt.Errorf("sample: %s had %d in use, and its limit was never above %d", b.Key, b.InUse, limits[b.Key])
			}
		}
	}
}

// counts are the operations that were begun, for the report.
func (m *model) report() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	total := 0
	out := ""
	for _, k := range slices.Sorted(maps.Keys(m.ops)) {
		total += m.ops[k]
		out += fmt.Sprintf("%s %d, ", k, m.ops[k])
	}
	out = fmt.Sprintf("%d operations: %s\nresults:", total, out)
	for _, k := range slices.Sorted(maps.Keys(m.outcomes)) {
		out += fmt.Sprintf(" %s %d,", k, m.outcomes[k])
	}
	return out
}
