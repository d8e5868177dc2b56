package conn

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/policy"
)

func TestUDP(t *testing.T) {
	runAll(t,
		test{"a rule without a protocol leaves UDP alone", testNameLookup},
		test{"one slot for a socket and provider", testUDPSlots},
		test{"limits", testUDPLimits},
		test{"disconnected", testUDPDisconnected},
		test{"threads that share a socket", testUDPThreads},
		test{"idle", testUDPIdle},
		test{"more providers than one socket can hold", testUDPProviders},
		test{"a socket that closed unseen", testUDPUnseen},
		test{"connect elsewhere that fails", testUDPFailsElsewhere},
		test{"a policy that stops naming UDP", testUDPStops},
		test{"a provider that is renamed", testUDPRenamed},
		test{"adopted", testUDPAdopted},
		test{"adopted while it connects elsewhere", testUDPAdoptedLate},
		test{"bytes", testUDPBytes},
		test{"bytes of one socket to two providers", testUDPBytesApart},
		test{"bytes of what is cut into segments later", testUDPSegments},
	)
}

const udpPolicy = `
providers:
  p: {cidrs: [127.1.0.0/16, "fd00:1::/32"], protocol: udp, limits: {connections: 2, errno: EAGAIN}}
  q: {cidrs: [127.2.0.0/16, "fd00:2::/32"], protocol: [tcp, udp], limits: {connections: 2, errno: EAGAIN}}
  r: {cidrs: [127.3.0.0/16], limits: {connections: 0}}
features:
  f: {class: batch}
`

const tcpPolicy = `
providers:
  r: {cidrs: [127.3.0.0/16, "fd00:3::/32"], limits: {connections: 0}}
  other: {limits: {connections: 0}}
features:
  f: {class: batch}
`

// getaddrinfo connects UDP sockets to candidate addresses on the service's port (glibc),
// 53 (Go) or 0 (Node) to sort them: that is never refused and never counted, whether the
// plan names UDP elsewhere or not.
func testNameLookup(in *instance) {
	cg := in.Mkdir("f")
	client := in.start(cg)
	capped := strings.Replace(udpPolicy, "providers:\n", "providers:\n  other: {limits: {connections: 0}}\n", 1)
	for _, text := range []string{tcpPolicy, udpPolicy, capped} {
		plan := planOf(in, text)
		in.apply(plan, member(in, plan, cg, "f", ""))
		before := in.counts()
		for _, port := range []int{443, 53, 0} {
			for kind, addrs := range map[kerneltest.Kind][]string{
				kerneltest.UDP4: {fmt.Sprintf("127.3.0.1:%d", port), fmt.Sprintf("127.9.0.1:%d", port)},
				kerneltest.UDP6: {fmt.Sprintf("[fd00:3::1]:%d", port), fmt.Sprintf("[::ffff:127.3.0.1]:%d", port), fmt.Sprintf("127.3.0.1:%d", port)},
			} {
				for i, errno := range client.Probe(kind, addrs) {
					wantErrno(in, errno, 0, string(kind)+" connect to "+addrs[i])
				}
			}
		}
		fd := client.Socket(kerneltest.UDP4)
		wantErrno(in, client.SendTo(fd, "127.3.0.1:443", 10), 0, "sendto")
		for k, a := range in.counts() {
			if a.Accepted != before[k].Accepted || a.refused() != before[k].refused() || a.InUse != 0 {
				in.Errorf("%s is %+v, was %+v", k, a, before[k])
			}
		}
		for _, tr := range in.snapshot().Traffic {
			if tr.Connections != 0 {
				in.Errorf("counted as connections: %+v", tr)
			}
		}
		client.Close(fd)
	}
}

// The hooks of UDP are attached and pinned only while the plan names UDP, whether the
// first one does, which is pinned aside, or a later one.
func TestUDPHooks(t *testing.T) {
	in := newInstance(t)
	always := map[string]int{"link_sock_release": 1, "link_sockops": 1, "link_connect4": 1, "link_connect6": 1}
	udp := maps.Clone(always)
	for _, name := range []string{"link_egress", "link_ingress", "link_sendmsg4", "link_sendmsg6"} {
		udp[name] = 1
	}
	for i, text := range []string{udpPolicy, tcpPolicy, udpPolicy, udpPolicy, tcpPolicy} {
		in.apply(planOf(in, text))
		want := always
		if text == udpPolicy {
			want = udp
		}
		kerneltest.Poll(in, fmt.Sprintf("apply %d", i), func() error { // the kernel detaches later
			if got := attached(in, in.Cgroup.Path); !maps.Equal(got, want) {
				return fmt.Errorf("attached: %v, want %v", got, want)
			}
			return nil
		})
		for _, h := range hooks() {
			_, err := os.Stat(filepath.Join(in.o.pins(), h.name))
			if pinned := err == nil; pinned != (want[h.name] == 1) {
				in.Errorf("apply %d: pin of %s: %v", i, h.name, err)
			}
		}
	}
}

func udp(in *instance) *kerneltest.Client {
	in.Helper()
	_, cg := in.enforce(udpPolicy)
	return in.start(cg)
}

func testUDPSlots(in *instance) {
	client := udp(in)
	for _, c := range []struct {
		kerneltest.Kind
		p, q string // addresses of p and q, without the port
	}{
		{kerneltest.UDP4, "127.1.0.1", "127.2.0.1"},
		{kerneltest.UDP6, "[fd00:1::1]", "[fd00:2::1]"},
		{kerneltest.UDP6, "[::ffff:127.1.0.1]", "[::ffff:127.2.0.1]"},
		{kerneltest.UDP6, "127.1.0.1", "127.2.0.1"},
	} {
		when := func(s string) string { return fmt.Sprintf("%s to %s: %s", c.Kind, c.p, s) }
		fd := client.Socket(c.Kind)
		for _, port := range []string{":80", ":80", ":81"} {
			wantErrno(in, client.Connect(fd, c.p+port), 0, when("connect"))
			in.want(1, 0, when("after connects to p"))
		}
		// A datagram to somebody else leaves the connected socket's slot alone.
		if !strings.HasPrefix(c.p, "[::ffff:") {
			wantErrno(in, client.SendTo(fd, strings.Replace(strings.Replace(c.p, "127.1.", "127.9.", 1), "fd00:1:", "fd00:9:", 1)+":80", 10), 0, when("sendto nobody of ours"))
			in.want(1, 0, when("after a datagram to nobody of ours"))
		}
		if c := in.snapshot().Connections; len(c) != 1 || c[0].Proto != policy.UDP || c[0].Provider != "p" {
			in.Errorf("connections %+v, want one of UDP to p", c)
		}
		wantErrno(in, client.Connect(fd, c.q+":80"), 0, when("connect to q"))
		in.want(0, 1, when("after a connect to q"))
		client.Close(fd)
		in.want(0, 0, when("after the close"))

		fd = client.Socket(c.Kind)
		accepted := in.count(provider("p")).Accepted
		for range 50 {
			if errno := client.SendTo(fd, c.p+":80", 10); errno != 0 {
				in.Fatal(when("sendto: " + errno.Error()))
			}
		}
		in.want(1, 0, when("after 50 datagrams to p"))
		if n := in.count(provider("p")).Accepted - accepted; n != 1 {
			in.Errorf(when("%d accepted, want 1"), n)
		}
		// What a connected socket sends elsewhere is judged by where it goes.
		wantErrno(in, client.Connect(fd, c.p+":82"), 0, when("connect"))
		wantErrno(in, client.SendTo(fd, c.q+":80", 10), 0, when("sendto q of a socket connected to p"))
		in.want(1, 1, when("after it"))
		// A slot is held until the socket closes, connects elsewhere or is idle.
		wantErrno(in, client.SendTo(fd, "127.9.0.1:80", 10), 0, when("sendto other"))
		in.want(1, 1, when("after it"))
		client.Close(fd)
		in.want(0, 0, when("after the close"))
	}
	if n := in.traffic("f", "", "r").Connections; n != 0 {
		in.Errorf("%d connections to r", n)
	}
}

func testUDPLimits(in *instance) {
	client := udp(in)
	a, b, c := client.Socket(kerneltest.UDP4), client.Socket(kerneltest.UDP4), client.Socket(kerneltest.UDP4)
	wantErrno(in, client.Connect(a, "127.1.0.1:80"), 0, "connect 1 of 2")
	wantErrno(in, client.SendTo(b, "127.1.0.1:80", 10), 0, "sendto 2 of 2")
	wantErrno(in, client.Connect(c, "127.1.0.1:80"), errnoSeen(syscall.EAGAIN), "connect 3 of 2")
	wantErrno(in, client.SendTo(c, "127.1.0.1:80", 10), errnoSeen(syscall.EAGAIN), "sendto 3 of 2")
	wantErrno(in, client.SendTo(b, "127.1.0.1:80", 10), 0, "sendto again through the slot that it has")
	in.want(2, 0, "at the limit")
	if n := in.count(provider("p")).refused(); n != 2 {
		in.Errorf("%d refused, want 2", n)
	}
	client.Close(a)
	wantErrno(in, client.SendTo(c, "127.1.0.1:80", 10), 0, "sendto after a close")
	in.want(2, 0, "at the limit again")
	// A limit of TCP and UDP together.
	tcp := kerneltest.Serve(in, "127.2.0.1:80", kerneltest.Drain)
	client.MustDial(kerneltest.TCP4, tcp.Addr)
	client.MustDial(kerneltest.UDP4, tcp.Addr)
	_, errno := client.Dial(kerneltest.TCP4, tcp.Addr)
	wantErrno(in, errno, errnoSeen(syscall.EAGAIN), "TCP connect 3 of 2")
	// Sockets that hold a slot when the plan stops naming UDP give it back too.
	plan := planOf(in, tcpPolicy)
	in.apply(plan, member(in, plan, in.Mkdir("f"), "f", ""))
	client.Kill()
	in.empty("after closing under a plan without UDP")
}

// A UDP socket that is disconnected gives no event: the next connect frees its slot, or
// two Reconciles.
func testUDPDisconnected(in *instance) {
	client := udp(in)
	fd := client.MustDial(kerneltest.UDP4, "127.1.0.1:80")
	in.reconcile()
	in.reconcile()
	in.want(1, 0, "connected, after two Reconciles")
	wantErrno(in, client.Disconnect(fd), 0, "connect with AF_UNSPEC")
	in.reconcile()
	in.want(1, 0, "disconnected, after one Reconcile")
	if r := in.reconcile(); r.Reclaimed != 1 {
		in.Fatalf("%+v, want 1 reclaimed", r)
	}
	in.want(0, 0, "disconnected, after two Reconciles")
	wantErrno(in, client.SendTo(fd, "127.2.0.1:80", 1), 0, "sendto")
	in.want(0, 1, "after a datagram to q")
	client.Close(fd)
}

// Sends run without the socket's lock.
func testUDPThreads(in *instance) {
	client := udp(in)
	client.Hammer(kerneltest.UDP4, 4, "127.1.0.1:80", "127.2.0.1:80", "127.1.0.2:80", "127.9.0.1:80")
	for range 20 {
		in.reconcile()
		if c := in.counts(); c[feature("f")].InUse > 1 {
			// Each thread may be between taking and inserting.
			if n := c[feature("f")].InUse; n > 4 {
				in.Fatalf("%d in use by one socket and four threads", n)
			}
		}
	}
	client.Calm()
	in.want(0, 0, "after the close")
}

// What sends took is given back after the idle time of its provider, and not before;
// what a connect took stays for as long as the socket is connected.
func testUDPIdle(in *instance) {
	_, cg := in.enforce(strings.Replace(udpPolicy, "protocol: udp,", "protocol: udp, idle: 1s,", 1))
	client := in.start(cg)
	connected := client.Socket(kerneltest.UDP4)
	client.Bind(connected, "127.0.0.1:0")
	wantErrno(in, client.Connect(connected, "127.1.0.1:80"), 0, "connect to p")
	bound := client.Socket(kerneltest.UDP4)
	before := time.Now()
	wantErrno(in, client.SendTo(bound, "127.1.0.1:80", 1), 0, "sendto p")
	wantErrno(in, client.SendTo(bound, "127.2.0.1:80", 1), 0, "sendto q")
	in.want(2, 1, "after two datagrams of one socket")
	last := time.Second + 1
	kerneltest.Poll(in, "the idle slot is given back", func() error {
		n, next, err := in.k.Expire()
		if n == 0 && (next < 0 || next >= last) {
			in.Fatalf("the next in %v, after it was %v", next, last)
		}
		last = next
		if err != nil || n > 1 {
			in.Fatalf("%d expired (%v), want one", n, err)
		}
		if n == 0 {
			return errors.New("it is not")
		}
		return nil
	})
	if d := time.Since(before); d < time.Second {
		in.Errorf("given back after %v, want a second", d)
	}
	in.want(1, 1, "after the idle time of p")
	in.reconcile()
	in.reconcile()
	in.want(1, 1, "and two Reconciles")

	// It is admitted again, and somebody who saw it before that retires nothing.
	wantErrno(in, client.SendTo(bound, "127.1.0.1:80", 1), 0, "sendto p again")
	in.want(2, 1, "after a datagram to p")
	var old slot
	slots, err := readSlots(in.k.coll.Maps)
	if err != nil {
		in.Fatal(err)
	}
	for _, s := range slots {
		if !s.released() && s.Part != 0 && time.Duration(s.Tally-s.BornNs) < time.Millisecond && in.remote(s) == "p" {
			old = s
		}
	}
	old.Tally--
	if done, err := in.k.retire(&old); err != nil || done {
		in.Errorf("a slot that was used since it was looked at was retired: %v (%v)", done, err)
	}
	in.want(2, 1, "after that")

	// Bound and disconnected, it is in the kernel's tables, and idle.
	wantErrno(in, client.Disconnect(connected), 0, "AF_UNSPEC")
	kerneltest.Poll(in, "the disconnected socket's slot is given back", func() error {
		in.reconcile()
		if n := in.count(provider("p")).InUse; n != 0 {
			return fmt.Errorf("%d in use at p", n)
		}
		return nil
	})
	client.Close(bound, connected)
}

// remote is the provider that a slot is of.
func (in *instance) remote(s slot) string {
	for k, i := range in.k.traffic.at {
		if i == s.Traffic {
			return k.provider
		}
	}
	return ""
}

// A socket holds slots of 15 providers at once. What it sends to one more is as a
// connection that there is no room for, until one of them has ended.
func testUDPProviders(in *instance) {
	const most = 15
	text := "providers:\n"
	for i := range most + 2 {
		text += fmt.Sprintf("  p%d: {cidrs: [127.1.%d.0/24], protocol: udp, limits: {connections: 5}}\n", i, i)
	}
	_, cg := in.enforce(text + "features:\n  f: {class: batch}\n")
	client := in.start(cg)
	fd := client.Socket(kerneltest.UDP4)
	send := func(i int) {
		in.Helper()
		wantErrno(in, client.SendTo(fd, fmt.Sprintf("127.1.%d.1:80", i), 1), 0, fmt.Sprint("sendto ", i))
	}
	for i := range most + 2 {
		send(i)
	}
	full := func() uint64 { return in.snapshot().Totals.SlotsFull }
	if n, c := full(), in.count(feature("f")); n != 2 || c.InUse != most {
		in.Fatalf("%d found no room, %d in use, want 2 and %d", n, c.InUse, most)
	}
	slots, err := readSlots(in.k.coll.Maps)
	if err != nil {
		in.Fatal(err)
	}
	for i := range slots {
		if in.remote(slots[i]) == "p3" {
			if done, err := in.k.retire(&slots[i]); err != nil || !done {
				in.Fatalf("retire: %v (%v)", done, err)
			}
		}
	}
	send(most)
	send(most + 1) // no room again
	send(3)
	if n := full(); n != 4 {
		in.Errorf("%d found no room, want 4", n)
	}
	if c := in.count(provider(fmt.Sprint("p", most))); c.InUse != 1 {
		in.Errorf("%+v, want the place that p3 has left", c)
	}
	client.Close(fd)
	in.empty("after the close")
	if err := in.k.coll.Maps[kernelMapTotals].Update(uint32(kernelTotalTOTAL_SLOTS_FULL), uint64(0), ebpf.UpdateExist); err != nil {
		in.Fatal(err)
	}
}

// A socket that closed while nothing of ours was attached keeps no slot.
func testUDPUnseen(in *instance) {
	client := udp(in)
	fd := client.Socket(kerneltest.UDP4)
	wantErrno(in, client.SendTo(fd, "127.1.0.1:80", 1), 0, "sendto")
	slots, err := readSlots(in.k.coll.Maps)
	if err != nil || len(slots) != 1 {
		in.Fatalf("%d slots (%v), want 1", len(slots), err)
	}
	release := in.k.links["link_sock_release"]
	nothing, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.CGroupSock, AttachType: ebpf.AttachCgroupInetSockRelease, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()}})
	if err != nil {
		in.Fatal(err)
	}
	defer nothing.Close()
	if err := release.Update(nothing); err != nil {
		in.Fatal(err)
	}
	client.Close(fd)
	if err := release.Update(in.k.coll.Programs[kernelProgBhSockRelease]); err != nil {
		in.Fatal(err)
	}
	in.want(1, 0, "after a close that nobody saw")
	for range 4 { // two until it is missing, and two for the tombstone
		in.reconcile()
	}
	in.empty("after Reconciles")
}

// If a connect elsewhere fails the kernel leaves the association as it is. Who denies it
// before us is seen. What fails behind us gives no event: the slot has ended with the hook,
// and the socket is counted again when it connects or is adopted.
func testUDPFailsElsewhere(in *instance) {
	_, cg := in.enforce(udpPolicy)
	client := in.start(cg)
	fd := client.MustDial(kerneltest.UDP4, "127.1.0.1:80")
	wantErrno(in, client.Connect(fd, "192.0.2.1:80"), syscall.ENETUNREACH, "connect without a route")
	in.want(0, 0, "after a connect without a route")
	in.adopt(1, "the socket that is still connected to p")
	in.want(1, 0, "after it")
	if _, _, err := in.k.Expire(); err != nil {
		in.Fatal(err)
	}
	wantErrno(in, client.SendTo(fd, "127.2.0.1:80", 1), 0, "sendto q")
	denyAll(in, cg.Path)
	for _, addr := range []string{"127.2.0.1:80", "127.9.0.1:80"} {
		wantErrno(in, client.Connect(fd, addr), syscall.EPERM, "connect to "+addr+", which somebody else denies")
		in.want(1, 1, "after it")
	}
	client.Close(fd)
}

// What a policy that names UDP has counted ends under one that does not.
func testUDPStops(in *instance) {
	client := udp(in)
	elsewhere, kept := client.MustDial(kerneltest.UDP4, "127.1.0.1:80"), client.MustDial(kerneltest.UDP4, "127.1.0.1:80")
	plan := planOf(in, strings.ReplaceAll(strings.ReplaceAll(udpPolicy, "protocol: udp, ", ""), "protocol: [tcp, udp], ", ""))
	in.apply(plan, member(in, plan, in.Mkdir("f"), "f", ""))
	in.want(2, 0, "after the reload")
	wantErrno(in, client.Connect(elsewhere, "127.9.0.1:80"), 0, "connect elsewhere")
	in.want(1, 0, "after a connect elsewhere")
	client.Close(elsewhere, kept)
	in.empty("after the close")
}

// A datagram keeps the slot of the provider that its address has now.
func testUDPRenamed(in *instance) {
	const policy = "providers:\n  p: {cidrs: [127.1.0.0/16], protocol: udp}\nfeatures:\n  f: {class: batch}\n"
	_, cg := in.enforce(policy)
	client := in.start(cg)
	fd := client.Socket(kerneltest.UDP4)
	send := func() {
		in.Helper()
		wantErrno(in, client.SendTo(fd, "127.1.0.1:80", 100), 0, "sendto")
	}
	send()
	plan := planOf(in, strings.Replace(policy, "  p: {", "  z: {", 1))
	in.apply(plan, member(in, plan, cg, "f", ""))
	send()
	used := func() map[string]uint64 {
		m := map[string]uint64{}
		slots, err := readSlots(in.k.coll.Maps)
		if err != nil {
			in.Fatal(err)
		}
		for _, s := range slots {
			m[in.remote(s)] = s.Tally
		}
		return m
	}
	before := used()
	kerneltest.Poll(in, "a datagram is noted", func() error {
		send()
		if now := used(); now["z"] == before["z"] {
			return fmt.Errorf("%v, was %v", now, before)
		}
		return nil
	})
	if now := used(); now["p"] != before["p"] {
		in.Errorf("a datagram to z has kept the slot of p: %v, was %v", now, before)
	}
	if p, z := in.traffic("f", "", "p").TxBytes, in.traffic("f", "", "z").TxBytes; p != 128 || z < 2*128 {
		in.Errorf("%d bytes to p, %d to z", p, z)
	}
	client.Close(fd)
}

// A UDP socket that was connected before the policy named its destination.
func testUDPAdopted(in *instance) {
	cg := in.Mkdir("f")
	client := in.start(cg)
	// What listens for TCP at the same port has nothing to do with it.
	listener := client.Socket(kerneltest.TCP4)
	client.Bind(listener, "127.3.0.1:0")
	at := netip.MustParseAddrPort(client.Listen(listener))
	fd := client.Socket(kerneltest.UDP4)
	client.Bind(fd, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), at.Port()).String())
	wantErrno(in, client.Connect(fd, "127.1.0.1:80"), 0, "connect")
	client.MustDial(kerneltest.UDP4, "127.9.0.1:80")
	plan := planOf(in, udpPolicy)
	in.apply(plan, member(in, plan, cg, "f", ""))
	in.adopt(1, "after the reload")
	in.want(1, 0, "after it")
	if n, _, err := in.k.Expire(); n != 0 || err != nil {
		in.Errorf("%d expired (%v)", n, err)
	}
	wantErrno(in, client.SendTo(fd, "", 100), 0, "send")
	if n := in.traffic("f", "", "p").TxBytes; n != 128 {
		in.Errorf("%d bytes, want 128", n)
	}
	wantErrno(in, client.Connect(fd, "127.2.0.1:80"), 0, "connect elsewhere")
	in.want(0, 1, "after it")
	client.Close(fd)
}

// What another release has noted of a socket is not what holds if the socket has
// connected elsewhere meanwhile.
func testUDPAdoptedLate(in *instance) {
	client := udp(in)
	a, b := client.MustDial(kerneltest.UDP4, "127.1.0.1:80"), client.Socket(kerneltest.UDP4)
	slots, err := readSlots(in.k.coll.Maps)
	if err != nil || len(slots) != 1 {
		in.Fatal(err, slots)
	}
	late := kernelAdopt{Slot: slots[0].kernelSlot, Connected: 1}
	client.Close(a)
	wantErrno(in, client.Connect(b, "127.2.0.1:80"), 0, "connect to q")
	slots, err = readSlots(in.k.coll.Maps)
	if err != nil || len(slots) != 1 {
		in.Fatal(err, slots)
	}
	late.Slot.Word, late.Slot.Cookie = 0, slots[0].Cookie
	out, err := in.k.runAdopt(&late)
	if err != nil || out.Done != 1 {
		in.Fatal(err, out)
	}
	in.want(1, 1, "adopted") // and retired, as the other release has it no more
	if done, err := in.k.retire(&slot{out.Slot}); err != nil || !done {
		in.Fatal(done, err)
	}
	in.want(0, 1, "after that")
	client.Close(b)
}

// Datagrams of one socket are counted where they go.
func testUDPBytesApart(in *instance) {
	client := udp(in)
	fd := client.Socket(kerneltest.UDP4)
	before := map[string]uint64{"p": in.traffic("f", "", "p").TxBytes, "q": in.traffic("f", "", "q").TxBytes}
	for range 10 {
		for _, addr := range []string{"127.1.0.1:80", "127.2.0.1:80", "127.1.0.2:81", "127.9.0.1:80"} {
			wantErrno(in, client.SendTo(fd, addr, 100), 0, "sendto "+addr)
		}
	}
	for name, want := range map[string]uint64{"p": 20 * 128, "q": 10 * 128} {
		if n := in.traffic("f", "", name).TxBytes - before[name]; n != want {
			in.Errorf("%d bytes to %s, want %d", n, name, want)
		}
	}
	// The answers that come are of those that they come from.
	wantErrno(in, client.Connect(fd, "127.1.0.1:80"), 0, "connect to p")
	wantErrno(in, client.SendTo(fd, "127.2.0.1:80", 100), 0, "sendto q of a socket connected to p")
	wantErrno(in, client.SendTo(fd, "", 100), 0, "send")
	for name, want := range map[string]uint64{"p": 21 * 128, "q": 11 * 128} {
		if n := in.traffic("f", "", name).TxBytes - before[name]; n != want {
			in.Errorf("%d bytes to %s, want %d", n, name, want)
		}
	}
	client.Close(fd)
}

func testUDPBytes(in *instance) {
	client := udp(in)
	const n, size = 200, 512
	for _, c := range []struct {
		kerneltest.Kind
		listen, addr string
		header       uint64
	}{
		{kerneltest.UDP4, "127.1.0.1:0", "", 28},
		{kerneltest.UDP6, "[::1]:0", "", 48},
	} {
		if c.Kind == kerneltest.UDP6 {
			plan := planOf(in, "providers:\n  p: {cidrs: ['::1/128'], protocol: udp}\nfeatures:\n  f: {class: batch}\n")
			in.apply(plan, member(in, plan, in.Mkdir("f"), "f", ""))
		}
		server, err := net.ListenPacket("udp", c.listen)
		if err != nil {
			in.Fatal(err)
		}
		defer server.Close()
		go func() {
			b := make([]byte, 2*size)
			for {
				got, from, err := server.ReadFrom(b)
				if err != nil {
					return
				}
				server.WriteTo(b[:got], from)
			}
		}()
		before := in.traffic("f", "", "p")
		fd := client.MustDial(c.Kind, server.LocalAddr().String())
		for range n {
			wantErrno(in, client.SendTo(fd, "", size), 0, "send")
			client.Download(fd, size)
		}
		want := n * (size + c.header)
		tr := in.traffic("f", "", "p")
		if tx, rx := tr.TxBytes-before.TxBytes, tr.RxBytes-before.RxBytes; tx != want || rx != want {
			in.Errorf("%s: tx %d rx %d, want %d each", c.Kind, tx, rx, want)
		}
		client.Close(fd)
		in.empty("after the close")
		if after := in.traffic("f", "", "p"); after.TxBytes != tr.TxBytes || after.RxBytes != tr.RxBytes {
			in.Errorf("%s: %+v after the close, was %+v", c.Kind, after, tr)
		}
	}
}

// A send with UDP_SEGMENT is one packet where it is counted and many on the wire (udp(7)):
// each has headers of its own.
func testUDPSegments(in *instance) {
	client := udp(in)
	const segments, size = 10, 500
	for _, c := range []struct {
		kerneltest.Kind
		listen string
		header uint64
	}{
		{kerneltest.UDP4, "127.1.0.1:0", 28},
		{kerneltest.UDP6, "[::1]:0", 48},
	} {
		if c.Kind == kerneltest.UDP6 {
			plan := planOf(in, "providers:\n  p: {cidrs: ['::1/128'], protocol: udp}\nfeatures:\n  f: {class: batch}\n")
			in.apply(plan, member(in, plan, in.Mkdir("f"), "f", ""))
		}
		server, err := net.ListenPacket("udp", c.listen)
		if err != nil {
			in.Fatal(err)
		}
		defer server.Close()
		fd := client.MustDial(c.Kind, server.LocalAddr().String())
		process, err := unix.PidfdOpen(client.PID, 0)
		if err != nil {
			in.Fatal(err)
		}
		defer unix.Close(process)
		shared, err := unix.PidfdGetfd(process, fd, 0)
		if err != nil {
			in.Fatal(err)
		}
		err = errors.Join(unix.SetsockoptInt(shared, unix.IPPROTO_UDP, unix.UDP_SEGMENT, size), unix.Close(shared))
		if err != nil {
			in.Fatal(err)
		}
		before := in.traffic("f", "", "p").TxBytes
		wantErrno(in, client.SendTo(fd, "", segments*size), 0, "send")
		b := make([]byte, 2*size)
		for range segments {
			if n, _, err := server.ReadFrom(b); err != nil || n != size {
				in.Fatalf("%s: a datagram of %d bytes (%v), want %d", c.Kind, n, err, size)
			}
		}
		if tx, want := in.traffic("f", "", "p").TxBytes-before, segments*(size+c.header); tx != want {
			in.Errorf("%s: %d bytes sent, want %d", c.Kind, tx, want)
		}
		client.Close(fd)
	}
}
