package conn

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/policy"
)

// Each is one way in which a connection can begin and end. After each the instance
// checks that nothing is in use and that no slot is left.
func TestSlotLife(t *testing.T) {
	// What takes longest, and is the same wherever a slot is.
	once := []test{
		{"refused by us", testRefusedByUs},
		{"close in SYN_SENT", testSynSent},
	}
	life := []test{
		{"refused by the server", testRefusedByServer},
		{"unreachable", testUnreachable},
		{"close, reset, hangup", testCloses},
		{"peer closes first", testCloseWait},
		{"close with a dead peer", testDeadPeer},
		{"AF_UNSPEC", testDisconnect},
		{"again and elsewhere on one descriptor", testReconnect},
		{"non-blocking connect again and again", testNonBlocking},
		{"shared descriptors", testShared},
		{"kill -9", testKill},
		{"listeners and accepted sockets", testAccepted},
		{"bound and never connected", testBound},
		{"MPTCP", testMPTCP},
		{"another program refuses", testAnotherProgram},
		{"another program has callbacks of its own", testOtherCallbacks},
	}
	t.Run("at home", func(t *testing.T) { runAll(t, append(once, life...)...) })
	// The same for those that find somebody else at home.
	t.Run("as guests", func(t *testing.T) { runCrowded(t, life...) })
}

const twoProviders = `
providers:
  p: {cidrs: [127.1.0.0/16, 192.0.2.0/24, "fd00:1::/32"], limits: {connections: 100}}
  q: {cidrs: [127.2.0.0/16, "fd00:2::/32"], limits: {connections: 100}}
features:
  f: {class: batch}
`

// two puts twoProviders in force and starts a client; servers on 127.1.0.1:80 (p),
// 127.2.0.1:80 (q) and 127.3.0.1:80 (other) hold what they accept.
func two(in *instance) (client *kerneltest.Client, servers map[string]*kerneltest.Server) {
	in.Helper()
	_, cg := in.enforce(twoProviders)
	servers = map[string]*kerneltest.Server{
		"p":     kerneltest.Serve(in, "127.1.0.1:80", kerneltest.Drain),
		"q":     kerneltest.Serve(in, "127.2.0.1:80", kerneltest.Drain),
		"other": kerneltest.Serve(in, "127.3.0.1:80", kerneltest.Drain),
	}
	return in.start(cg), servers
}

// want checks what is in use now, without waiting.
func (in *instance) want(p, q uint32, when string) {
	in.Helper()
	c := in.counts()
	if c[provider("p")].InUse != p || c[provider("q")].InUse != q || c[feature("f")].InUse != p+q {
		in.Fatalf("%s: %d in use at p, %d at q, %d by f; want %d, %d and their sum", when,
			c[provider("p")].InUse, c[provider("q")].InUse, c[feature("f")].InUse, p, q)
	}
}

// Ten thousand refusals leave nothing behind, with the descriptor open too.
func testRefusedByUs(in *instance) {
	_, cg := in.enforce(`
providers:
  p: {cidrs: [127.0.0.0/8], limits: {connections: 0}}
features:
  f: {class: batch}
`)
	client := in.start(cg)
	addrs := slices.Repeat([]string{"127.0.0.1:1"}, 10_000)
	for _, errno := range client.Probe(kerneltest.TCP4, addrs) {
		wantErrno(in, errno, errnoSeen(syscall.ECONNREFUSED), "connect")
	}
	fd := client.Socket(kerneltest.TCP4)
	for range 3 {
		wantErrno(in, client.Connect(fd, "127.0.0.1:1"), errnoSeen(syscall.ECONNREFUSED), "connect on one descriptor")
	}
	if b := in.count(provider("p")); b.refused() != 10_003 || b.InUse != 0 {
		in.Errorf("got %+v, want 10003 refused", b)
	}
	if n := in.snapshot().Totals.Slots; n != 0 {
		in.Errorf("%d entries in the slot map", n)
	}
}

func testRefusedByServer(in *instance) {
	client, _ := two(in)
	fd := client.Socket(kerneltest.TCP4)
	for range 2 {
		wantErrno(in, client.Connect(fd, "127.1.0.1:9"), syscall.ECONNREFUSED, "connect to a closed port")
		in.empty("after a refusal by the server, with the descriptor open")
	}
	wantErrno(in, client.Connect(fd, "127.2.0.1:80"), 0, "connect elsewhere on the same descriptor")
	in.want(0, 1, "after two refusals at p and a connect at q")
	if b := in.count(provider("p")); b.Accepted != 2 || b.refused() != 0 {
		in.Errorf("p has %+v, want 2 accepted: we refused none", b)
	}
	for _, errno := range client.Probe(kerneltest.TCP4, slices.Repeat([]string{"127.1.0.1:9"}, 1000)) {
		wantErrno(in, errno, syscall.ECONNREFUSED, "connect to a closed port")
	}
	client.Close(fd)
}

// A connect that fails before its SYN gives no event: close, the next connect on the
// descriptor, or two Reconciles free its slot.
func testUnreachable(in *instance) {
	client, _ := two(in)
	dial := func() int {
		fd, errno := client.Dial(kerneltest.TCP4, "192.0.2.1:80")
		wantErrno(in, errno, syscall.ENETUNREACH, "connect without a route")
		in.want(1, 0, "after ENETUNREACH, with the descriptor open")
		return fd
	}
	client.Close(dial())
	in.empty("after the close")

	fd := dial()
	wantErrno(in, client.Connect(fd, "192.0.2.2:80"), syscall.ENETUNREACH, "again")
	in.want(1, 0, "after ENETUNREACH twice")
	wantErrno(in, client.Connect(fd, "127.2.0.1:80"), 0, "connect elsewhere on the same descriptor")
	in.want(0, 1, "after ENETUNREACH at p and a connect at q")
	client.Close(fd)
	in.empty("after closing it")

	fd = dial()
	if r := in.reconcile(); r.Reclaimed != 0 || len(r.Errors) != 0 {
		in.Fatalf("the first Reconcile: %+v; one dump proves nothing", r)
	}
	in.want(1, 0, "after one Reconcile")
	if r := in.reconcile(); r.Reclaimed != 1 || len(r.Errors) != 0 {
		in.Fatalf("the second Reconcile: %+v, want 1 reclaimed", r)
	}
	in.want(0, 0, "after two Reconciles")
	for range 2 {
		if r := in.reconcile(); r.Reclaimed != 0 {
			in.Fatalf("a Reconcile more: %+v, want none reclaimed twice", r)
		}
	}
	in.empty("after four Reconciles, with the descriptor open")
	// It can be used as if nothing had been.
	wantErrno(in, client.Connect(fd, "127.1.0.1:80"), 0, "connect on the descriptor that was reclaimed")
	in.want(1, 0, "after it")
	in.reconcile()
	in.reconcile()
	in.reconcile()
	in.want(1, 0, "after three more Reconciles")
	client.Close(fd)
	in.empty("after the close")

	// The tombstone in between is no obstacle either.
	fd = dial()
	in.reconcile()
	in.reconcile()
	wantErrno(in, client.Connect(fd, "127.2.0.1:80"), 0, "connect over the tombstone")
	in.want(0, 1, "after it")
	client.Close(fd)
}

func testCloses(in *instance) {
	client, servers := two(in)
	for _, c := range []struct {
		name string
		end  func(fd int)
	}{
		{"close", func(fd int) { client.Close(fd) }},
		{"reset by us", func(fd int) { client.Reset(fd) }},
		{"reset by the server", func(fd int) { servers["p"].Hangup(true) }},
		{"shutdown of both directions", func(fd int) { client.Shutdown(fd) }},
	} {
		for _, kind := range []struct {
			kerneltest.Kind
			addr string
		}{{kerneltest.TCP4, "127.1.0.1:80"}, {kerneltest.TCP6, "[::ffff:127.1.0.1]:80"}} {
			fd := client.MustDial(kind.Kind, kind.addr)
			in.want(1, 0, c.name+": before")
			kerneltest.Poll(in, "the server has it", func() error {
				if servers["p"].Open() == 0 {
					return errors.New("not accepted")
				}
				return nil
			})
			c.end(fd)
			in.empty(c.name)
			kerneltest.Poll(in, "the server has let go", func() error {
				if n := servers["p"].Open(); n != 0 {
					return fmt.Errorf("%d open", n)
				}
				return nil
			})
		}
	}
	// IPv6 proper.
	kerneltest.Serve(in, "[::]:8080", kerneltest.Drain)
	fd := client.MustDial(kerneltest.TCP6, "[fd00:1::5]:8080")
	in.want(1, 0, "IPv6")
	client.Close(fd)
	in.empty("IPv6 after the close")
}

// The server has closed, the client has not: the slot is held, and status can say why.
func testCloseWait(in *instance) {
	client, servers := two(in)
	var fds []int
	for range 5 {
		fds = append(fds, client.MustDial(kerneltest.TCP4, "127.1.0.1:80"))
	}
	kerneltest.Poll(in, "every connection in CLOSE_WAIT", func() error {
		servers["p"].Hangup(false)
		for _, c := range in.snapshot().Connections {
			if c.State != "close_wait" {
				return fmt.Errorf("one is in %q", c.State)
			}
		}
		return nil
	})
	for range 3 {
		in.reconcile()
	}
	in.want(5, 0, "in CLOSE_WAIT")
	idle := func() time.Duration { return in.snapshot().Connections[0].Idle }
	first := idle()
	kerneltest.Poll(in, "the time without data rises", func() error {
		if now := idle(); now <= first {
			return fmt.Errorf("%v, was %v", now, first)
		}
		return nil
	})
	client.Close(fds...)
}

// Nothing of the client reaches its peer any more: the kernel goes on sending the FIN for
// minutes, and the slot is free directly after the close.
func testDeadPeer(in *instance) {
	client, _ := two(in)
	fd := client.MustDial(kerneltest.TCP4, "127.1.0.1:80")
	in.want(1, 0, "connected")
	alive := attach(in, in.Cgroup.Path, ebpf.CGroupSKB, ebpf.AttachCGroupInetEgress,
		asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}) // drops every packet
	client.Close(fd)
	in.want(0, 0, "directly after the close")
	if err := noSockets(in, "127.1.0.1:80"); err == nil {
		in.Error("the connection is over: the FIN was not lost")
	}
	alive()
	in.empty("after the FIN has come through")
}

// A server that answers no SYN: its queue of one is full.
func blackHole(in *instance, addr string) {
	in.Helper()
	sa := &unix.SockaddrInet4{Addr: [4]byte(net.ParseIP(addr).To4()), Port: 81}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		in.Fatal(err)
	}
	in.Cleanup(func() { unix.Close(fd) })
	if err := errors.Join(unix.Bind(fd, sa), unix.Listen(fd, 0)); err != nil {
		in.Fatal(err)
	}
	full, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		in.Fatal(err)
	}
	in.Cleanup(func() { unix.Close(full) })
	if err := unix.Connect(full, sa); err != nil {
		in.Fatal(err)
	}
}

func testSynSent(in *instance) {
	client, _ := two(in)
	blackHole(in, "127.1.0.9")
	for range 100 {
		fd := client.Socket(kerneltest.TCP4)
		client.NonBlocking(fd)
		wantErrno(in, client.Connect(fd, "127.1.0.9:81"), syscall.EINPROGRESS, "connect to a server that does not answer")
		in.want(1, 0, "in SYN_SENT")
		if c := in.snapshot().Connections; len(c) != 1 || c[0].State != "syn_sent" {
			in.Fatalf("connections %+v, want one in syn_sent", c)
		}
		client.Close(fd)
		in.want(0, 0, "directly after close in SYN_SENT")
	}
}

func testDisconnect(in *instance) {
	client, _ := two(in)
	fd := client.MustDial(kerneltest.TCP4, "127.1.0.1:80")
	for range 3 {
		in.want(1, 0, "connected to p")
		wantErrno(in, client.Disconnect(fd), 0, "connect with AF_UNSPEC")
		in.want(0, 0, "after AF_UNSPEC")
		wantErrno(in, client.Connect(fd, "127.2.0.1:80"), 0, "connect to q")
		in.want(0, 1, "connected to q")
		wantErrno(in, client.Disconnect(fd), 0, "connect with AF_UNSPEC")
		in.want(0, 0, "after AF_UNSPEC")
		wantErrno(in, client.Connect(fd, "127.1.0.1:80"), 0, "connect to p")
	}
	client.Close(fd)
	// While it is still trying.
	blackHole(in, "127.1.0.9")
	fd = client.Socket(kerneltest.TCP4)
	client.NonBlocking(fd)
	wantErrno(in, client.Connect(fd, "127.1.0.9:81"), syscall.EINPROGRESS, "connect to a server that does not answer")
	in.want(1, 0, "in SYN_SENT")
	wantErrno(in, client.Disconnect(fd), 0, "connect with AF_UNSPEC")
	in.want(0, 0, "after AF_UNSPEC in SYN_SENT")
}

// One descriptor after another destination: what it held before is given back, also if
// the next one matches nothing, and what the next one does is not the first one's.
func testReconnect(in *instance) {
	client, _ := two(in)
	fd, errno := client.Dial(kerneltest.TCP4, "192.0.2.1:80")
	wantErrno(in, errno, syscall.ENETUNREACH, "connect without a route")
	wantErrno(in, client.Connect(fd, "127.3.0.1:80"), 0, "connect to what matches nothing")
	in.want(0, 0, "after a connect that matches nothing")
	client.Upload(fd, 100_000)
	client.Close(fd)
	in.empty("after the close")
	kerneltest.Poll(in, "the connection is over", func() error { return noSockets(in, "127.3.0.1:80") })
	if tr := in.traffic("f", "", "p"); tr.TxBytes != 0 || tr.RxBytes != 0 {
		in.Errorf("p is charged with %d and %d bytes of a connection that matched nothing", tr.TxBytes, tr.RxBytes)
	}

	// Then refused by us: nothing is held of either.
	limited := planOf(in, `
providers:
  p: {cidrs: [127.1.0.0/16, 192.0.2.0/24], limits: {connections: 100}}
  q: {cidrs: [127.2.0.0/16], limits: {connections: 0}}
features:
  f: {class: batch}
`)
	cg := in.Mkdir("f")
	in.apply(limited, member(in, limited, cg, "f", ""))
	fd, errno = client.Dial(kerneltest.TCP4, "192.0.2.1:80")
	wantErrno(in, errno, syscall.ENETUNREACH, "connect without a route")
	wantErrno(in, client.Connect(fd, "127.2.0.1:80"), errnoSeen(syscall.ECONNREFUSED), "connect at a limit of 0")
	in.want(0, 0, "after a connect that was refused")
	wantErrno(in, client.Connect(fd, "127.1.0.1:80"), 0, "connect to p")
	in.want(1, 0, "after a connect to p")
	client.Close(fd)

	// Then from a protected cgroup: what was held is given back.
	fd, errno = client.Dial(kerneltest.TCP4, "192.0.2.1:80")
	wantErrno(in, errno, syscall.ENETUNREACH, "connect without a route")
	in.setMembers(protected(cg))
	wantErrno(in, client.Connect(fd, "127.2.0.1:80"), 0, "connect once protected")
	in.want(0, 0, "after a protected connect")
}

// noSockets says whether a connection to addr is left.
func noSockets(in *instance, addr string) error {
	for _, d := range readOwnSockets(in) {
		if d == addr {
			return errors.New("there is a socket left")
		}
	}
	return nil
}

func testNonBlocking(in *instance) {
	client, _ := two(in)
	blackHole(in, "127.1.0.9")
	slow := client.Socket(kerneltest.TCP4)
	client.NonBlocking(slow)
	wantErrno(in, client.Connect(slow, "127.1.0.9:81"), syscall.EINPROGRESS, "connect")
	for range 3 {
		wantErrno(in, client.Connect(slow, "127.1.0.9:81"), syscall.EALREADY, "connect again")
	}
	in.want(1, 0, "after four connects of one slow socket")
	fast := client.Socket(kerneltest.TCP4)
	client.NonBlocking(fast)
	if errno := client.Connect(fast, "127.2.0.1:80"); errno != 0 && errno != syscall.EINPROGRESS {
		in.Fatalf("connect: %v", errno)
	}
	kerneltest.Poll(in, "connect again until it is connected", func() error {
		if errno := client.Connect(fast, "127.2.0.1:80"); errno != syscall.EISCONN {
			return errno
		}
		return nil
	})
	in.want(1, 1, "after connects of one slow and one fast socket")
	c := in.counts()
	if c[provider("p")].Accepted != 1 || c[provider("q")].Accepted != 1 {
		in.Errorf("accepted %d and %d, want 1 and 1", c[provider("p")].Accepted, c[provider("q")].Accepted)
	}
}

// The last close of the last descriptor gives it back.
func testShared(in *instance) {
	client, _ := two(in)
	fd := client.MustDial(kerneltest.TCP4, "127.1.0.1:80")
	dup := client.Dup(fd)
	client.Close(fd)
	in.want(1, 0, "after closing one of two descriptors")
	pid := client.Fork(dup)
	client.Close(dup)
	in.want(1, 0, "after closing both, with a child that has inherited it")
	client.Reap(pid)
	in.empty("after the child has ended")

	fd = client.MustDial(kerneltest.TCP4, "127.1.0.1:80")
	second := in.start(in.Mkdir("f"))
	passed := second.Take(client, fd)
	client.Kill()
	in.want(1, 0, "after the one that connected was killed")
	second.Close(passed)
}

func testKill(in *instance) {
	client, _ := two(in)
	cg := in.Mkdir("f")
	for range 10 {
		for range 3 {
			client.MustDial(kerneltest.TCP4, "127.1.0.1:80")
		}
		client.Dial(kerneltest.TCP4, "192.0.2.1:80")
		in.want(4, 0, "before the kill")
		client.Kill()
		in.empty("after the kill")
		client = in.start(cg)
	}
}

func testAccepted(in *instance) {
	client, _ := two(in)
	server := in.start(in.Mkdir("f"))
	l := server.Socket(kerneltest.TCP4)
	server.Bind(l, "127.1.0.7:0")
	addr := server.Listen(l)
	in.want(0, 0, "with a listener")
	for i := range 20 {
		fd := client.MustDial(kerneltest.TCP4, addr)
		got := server.Accept(l)
		in.want(1, 0, "with client and server in one compartment")
		switch i % 3 {
		case 0:
			server.Close(got)
			client.Close(fd)
		case 1:
			client.Close(fd)
			server.Close(got)
		case 2:
			server.Reset(got)
			client.Close(fd)
		}
		in.empty("after both have closed")
	}
	server.Close(l)
	in.want(0, 0, "after the listener")
}

func testBound(in *instance) {
	client, _ := two(in)
	for _, kind := range []kerneltest.Kind{kerneltest.TCP4, kerneltest.UDP4} {
		fd := client.Socket(kind)
		client.Bind(fd, "127.1.0.3:0")
		client.Close(fd)
	}
	client.Close(client.Socket(kerneltest.TCP4))
	in.want(0, 0, "after sockets that never connected")
}

// The slot is of the subflow, the close of the MPTCP socket.
func testMPTCP(in *instance) {
	client, _ := two(in)
	fd, errno := client.SocketErrno(kerneltest.MPTCP4)
	if errno == syscall.EPROTONOSUPPORT || errno == syscall.ENOPROTOOPT || errno == syscall.EINVAL {
		in.Skip("this kernel lacks: MPTCP (socket: " + errno.Error() + ")")
	}
	wantErrno(in, errno, 0, "socket")
	server := kerneltest.ServeMPTCP(in, "127.1.0.8:80", kerneltest.Drain)
	wantErrno(in, client.Connect(fd, server.Addr), 0, "connect")
	in.want(1, 0, "MPTCP connected")
	in.reconcile()
	in.reconcile()
	in.want(1, 0, "MPTCP connected, after two Reconciles")
	client.Close(fd)
	in.empty("after MPTCP closed")

	fd, _ = client.SocketErrno(kerneltest.MPTCP4)
	wantErrno(in, client.Connect(fd, "127.1.0.1:9"), syscall.ECONNREFUSED, "connect to a closed port")
	in.empty("after MPTCP was refused")
	client.Close(fd)

	fd, _ = client.SocketErrno(kerneltest.MPTCP4)
	wantErrno(in, client.Connect(fd, "192.0.2.1:80"), syscall.ENETUNREACH, "connect without a route")
	client.Close(fd)
	// No event names the subflow: Reconcile finds it.
	kerneltest.Poll(in, "the subflow is reclaimed", func() error {
		in.reconcile()
		if n := in.count(provider("p")).InUse; n != 0 {
			return fmt.Errorf("%d in use", n)
		}
		return nil
	})
	in.reconcile()
	in.reconcile()
}

// denyAll is a connect4 program of somebody else that denies everything.
func denyAll(in *instance, cgroup string) {
	in.Helper()
	attach(in, cgroup, ebpf.CGroupSockAddr, ebpf.AttachCGroupInet4Connect, asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()})
}

// attach attaches a program of somebody else until the test ends or detach is called.
func attach(in *instance, cgroup string, typ ebpf.ProgramType, at ebpf.AttachType, code asm.Instructions) (detach func()) {
	in.Helper()
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: typ, AttachType: at, License: "GPL", Instructions: code})
	if err != nil {
		in.Fatal(err)
	}
	defer prog.Close()
	l, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: at, Program: prog})
	if err != nil {
		in.Fatal(err)
	}
	detach = sync.OnceFunc(func() { l.Close() })
	in.Cleanup(detach)
	return detach
}

// A connect that a program before ours has denied takes no slot; one that a program
// after ours denies gives it back at its close. None of them eats the limit.
func testAnotherProgram(in *instance) {
	client, _ := two(in)
	limit := uint32(100)
	early := in.Mkdir("f/early") // programs of descendants run first
	denyAll(in, early.Path)
	first := in.start(early)
	before := in.snapshot().Totals.RefusedEarlier
	fd, errno := first.Dial(kerneltest.TCP4, "127.1.0.1:80")
	wantErrno(in, errno, syscall.EPERM, "connect that another program denies")
	if HaveErrno() { // before 5.18 the result of the program before cannot be asked for
		in.want(0, 0, "after a connect that a program before ours denied")
		if n := in.snapshot().Totals.RefusedEarlier - before; n != 1 {
			in.Errorf("%d refused earlier, want 1", n)
		}
	}
	first.Close(fd)
	in.empty("after its close")

	denyAll(in, in.Cgroup.Path)
	for range 2 * limit {
		fd, errno := client.Dial(kerneltest.TCP4, "127.1.0.1:80")
		wantErrno(in, errno, syscall.EPERM, "connect that another program denies")
		client.Close(fd)
	}
	in.empty("after connects that a program after ours denied")
	if b := in.count(provider("p")); b.refused() != 0 {
		in.Errorf("%d counted as refused by us", b.refused())
	}
}

// Two sockops programs of others: one before ours asks for callbacks of its own, which
// ours must not end; one after ours ends all callbacks as soon as a connect begins, and
// ours must ask again, or nothing would tell that the connection is over.
func testOtherCallbacks(in *instance) {
	// enum bpf_sock_ops and the flags, and offsets in struct bpf_sock_ops (linux/bpf.h).
	const connectOp, establishedOp, rttFlag = 3, 4, 8
	const opAt, flagsAt = 0, 84
	asked, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		in.Fatal(err)
	}
	defer asked.Close()
	client, _ := two(in)
	early := in.Mkdir("f/early") // programs of descendants run first
	attach(in, early.Path, ebpf.SockOps, ebpf.AttachCGroupSockOps, asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMem(asm.R2, asm.R6, opAt, asm.Word),
		asm.JEq.Imm(asm.R2, establishedOp, "established"),
		asm.JNE.Imm(asm.R2, connectOp, "out"),
		asm.Mov.Imm(asm.R2, rttFlag),
		asm.FnSockOpsCbFlagsSet.Call(),
		asm.Ja.Label("out"),
		// What it asked for, it still has: store the flags.
		asm.LoadMem(asm.R7, asm.R6, flagsAt, asm.Word).WithSymbol("established"),
		asm.StoreImm(asm.RFP, -4, 0, asm.Word),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.LoadMapPtr(asm.R1, asked.FD()),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.StoreMem(asm.R0, 0, asm.R7, asm.Word),
		asm.Mov.Imm(asm.R0, 1).WithSymbol("out"),
		asm.Return(),
	})
	first := in.start(early)
	fd := first.MustDial(kerneltest.TCP4, "127.1.0.1:80")
	var flags uint32
	if err := asked.Lookup(uint32(0), &flags); err != nil {
		in.Fatal(err)
	}
	if flags&rttFlag == 0 || flags == rttFlag {
		in.Errorf("callback flags %#x when established, want the other program's %#x and ours", flags, rttFlag)
	}
	first.Close(fd)
	in.empty("after its close")

	attach(in, in.Cgroup.Path, ebpf.SockOps, ebpf.AttachCGroupSockOps, asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, opAt, asm.Word),
		asm.JNE.Imm(asm.R2, connectOp, "out"),
		asm.Mov.Imm(asm.R2, 0),
		asm.FnSockOpsCbFlagsSet.Call(),
		asm.Mov.Imm(asm.R0, 1).WithSymbol("out"),
		asm.Return(),
	})
	before := in.traffic("f", "", "p")
	fd = client.MustDial(kerneltest.TCP4, "127.1.0.1:80")
	in.want(1, 0, "connected, with callbacks ended by another program")
	client.Upload(fd, 1000)
	client.Close(fd)
	in.empty("after a close whose callbacks another program had ended")
	if after := in.traffic("f", "", "p"); after.TxBytes < before.TxBytes+1000 {
		in.Errorf("%d bytes sent after 1000 more, were %d", after.TxBytes, before.TxBytes)
	}
}

// Connections from before the attach are not counted, and their end is not either.
func TestSocketsFromBeforeTheAttach(t *testing.T) {
	in := newInstance(t)
	cg := in.Mkdir("f")
	server := kerneltest.Serve(t, "127.1.0.1:80", kerneltest.Drain)
	client := in.start(cg)
	old := []int{client.MustDial(kerneltest.TCP4, server.Addr), client.MustDial(kerneltest.TCP4, server.Addr)}
	unconnected := client.Socket(kerneltest.TCP4)

	plan := planOf(t, twoProviders)
	in.apply(plan, member(t, plan, cg, "f", ""))
	in.want(0, 0, "after the attach")
	fd := client.MustDial(kerneltest.TCP4, server.Addr)
	client.Close(old[0])
	client.Reset(old[1])
	for range 3 {
		in.reconcile()
	}
	in.want(1, 0, "after closing what was there before")
	wantErrno(t, client.Connect(unconnected, server.Addr), 0, "connect of a socket from before")
	in.want(2, 0, "with a socket from before that connected after")
	client.Close(fd, unconnected)
	in.empty("after closing all")
	if b := in.count(provider("p")); b.Key.Scope != policy.ScopeProvider || b.Accepted != 2 {
		t.Errorf("got %+v, want 2 accepted", b)
	}
}

// TestAge: a connection's age is the time since its connect, to a tick of the kernel's
// coarse clock (10 ms at most), which may make it older.
func TestAge(t *testing.T) {
	in := newInstance(t)
	_, cg := in.enforce("providers:\n  p: {cidrs: [127.0.0.0/8]}\nfeatures:\n  f: {class: batch}\n")
	server := kerneltest.Serve(t, "127.0.0.1:8000", kerneltest.Drain)
	client := in.start(cg)
	before := time.Now()
	client.MustDial(kerneltest.TCP4, server.Addr)
	least := time.Now()
	s := in.snapshot()
	const tick = 10 * time.Millisecond
	if len(s.Connections) != 1 {
		t.Fatalf("%d connections", len(s.Connections))
	}
	if age := s.Connections[0].Age; age < s.Time.Sub(least) || age > time.Since(before)+tick {
		t.Errorf("age %v, want from %v to %v", age, s.Time.Sub(least), time.Since(before)+tick)
	}
}
