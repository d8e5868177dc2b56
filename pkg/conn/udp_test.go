package conn

import (
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

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
		test{"bytes", testUDPBytes},
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
		in.want(0, 1, when("after it"))
		// A slot is held until the socket closes or is used for another provider.
		wantErrno(in, client.SendTo(fd, "127.9.0.1:80", 10), 0, when("sendto other"))
		in.want(0, 1, when("after it"))
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
