package conn

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
	"bulkhead/internal/sockets"
	"bulkhead/pkg/policy"
)

// More ways in which a connection can begin, fail, live on and end than TestSlotLife has:
// those that need a machine of their own kind around them. After each the instance checks
// that nothing is in use and that no slot is left.
func TestBirths(t *testing.T) {
	runAll(t,
		test{"no port is left", testNoPort},
		test{"the path is cut", testPathCut},
		test{"half closed", testHalfClosed},
		test{"twenty-five in CLOSE_WAIT", testManyCloseWait},
		test{"connected to itself", testSelf},
		test{"passed on", testPassed},
		test{"killed in every state", testManyKills},
		test{"a hundred accepted", testManyAccepted},
		test{"a listener that is passed on", testPassedListener},
		test{"a cgroup that comes and goes", testCgroupAgain},
		test{"every depth", testEveryDepth},
		test{"ten thousand refused by the server", testManyRefused},
		test{"given up early", testGivenUp},
		test{"short connections far below the limit", testShort},
		test{"a second path of MPTCP", testSubflows},
		test{"TCP Fast Open", testFastOpen},
		test{"io_uring", testRing},
		test{"bytes beyond 32 bits", testManyBytes},
	)
}

// states waits until the connections that hold a slot are so many in each state.
func (in *instance) states(when string, want map[string]int) {
	in.Helper()
	kerneltest.Poll(in, when, func() error {
		got := map[string]int{}
		for _, c := range in.snapshot().Connections {
			got[c.State]++
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			return fmt.Errorf("states %v, want %v", got, want)
		}
		return nil
	})
}

// sysctl sets a value of the network namespace that the calling thread is in.
func sysctl(name, value string) error {
	return os.WriteFile(filepath.Join("/proc/sys/net", name), []byte(value), 0)
}

// twoIn is two with client and server in a network namespace of their own, after prepare
// has been done there.
func twoIn(in *instance, prepare func() error) (ns *kerneltest.Netns, client *kerneltest.Client) {
	in.Helper()
	_, cg := in.enforce(twoProviders)
	ns = kerneltest.NewNetns(in)
	ns.Do(prepare)
	ns.Do(func() error {
		kerneltest.Serve(in, "127.1.0.1:80", kerneltest.Drain)
		kerneltest.Serve(in, "127.2.0.1:80", kerneltest.Drain)
		return nil
	})
	return ns, in.startIn(ns, cg)
}

// A connect for which there is no local port (EADDRNOTAVAIL) gives no event, like one
// without a route: close, the next connect of the descriptor or two Reconciles free it,
// and nothing that is open.
func testNoPort(in *instance) {
	const ports = 4
	_, client := twoIn(in, func() error { return sysctl("ipv4/ip_local_port_range", "40000 40003") })
	var open []int
	for range ports {
		open = append(open, client.MustDial(kerneltest.TCP4, "127.1.0.1:80"))
	}
	none := func() int {
		fd, errno := client.Dial(kerneltest.TCP4, "127.1.0.1:80")
		wantErrno(in, errno, syscall.EADDRNOTAVAIL, "connect without a port")
		return fd
	}
	client.Close(none())
	in.inUse(provider("p"), ports, "after the close of a connect without a port")

	for range 100 { // each is a connect more of the same socket
		client.Close(none())
	}
	in.inUse(provider("p"), ports, "after a hundred")

	fd := none()
	wantErrno(in, client.Connect(fd, "127.2.0.1:80"), 0, "connect elsewhere on the same descriptor") // its ports are free
	in.want(ports, 1, "after it")
	client.Close(fd)
	in.want(ports, 0, "after its close")

	fd = none()
	in.reconcile()
	in.reconcile()
	in.want(ports, 0, "after two Reconciles, with the descriptor open")
	client.Reset(open[0]) // else the port would be in TIME_WAIT
	in.inUse(provider("p"), ports-1, "with a port that is free")
	wantErrno(in, client.Connect(fd, "127.1.0.1:80"), 0, "connect on the descriptor that was reclaimed")
	in.want(ports, 0, "after it")
	if b := in.count(provider("p")); b.refused() != 0 {
		in.Errorf("%d refused by us", b.refused())
	}
	client.Close(append(open[1:], fd)...)
}

// The network goes away under an open connection. It is held until its owner lets go of
// it, or TCP does, and is free at that very moment.
func testPathCut(in *instance) {
	plan := planOf(in, "providers:\n  p: {cidrs: [10.77.0.0/24], limits: {connections: 100}}\nfeatures:\n  f: {class: batch}\n")
	cg := in.Mkdir("f")
	in.apply(plan, member(in, plan, cg, "f", ""))
	p := provider("p")
	device := func(do func(netlink.Link) error) func() error {
		return func() error {
			dev, err := netlink.LinkByName("client")
			if err != nil {
				return err
			}
			return do(dev)
		}
	}
	for _, cut := range []struct {
		name string
		do   func() error
	}{
		{"down", device(netlink.LinkSetDown)},
		{"removed", device(netlink.LinkDel)},
		{"without its address", device(func(dev netlink.Link) error {
			addr, err := netlink.ParseAddr(kerneltest.WireClient4 + "/24")
			if err != nil {
				return err
			}
			return netlink.AddrDel(dev, addr)
		})},
		{"without a route", device(func(dev netlink.Link) error {
			routes, err := netlink.RouteList(dev, netlink.FAMILY_V4)
			for _, r := range routes {
				err = errors.Join(err, netlink.RouteDel(&r))
			}
			return err
		})},
	} {
		wire := kerneltest.NewWire(in, true)
		// What nobody holds any more gives up after one try more (tcp_orphan_retries in
		// Documentation/networking/ip-sysctl.rst) and not after minutes.
		wire.Client.Do(func() error { return sysctl("ipv4/tcp_orphan_retries", "1") })
		var server *kerneltest.Server
		wire.Server.Do(func() error {
			server = kerneltest.Serve(in, kerneltest.WireServer4+":80", kerneltest.Drain)
			return nil
		})
		client := in.startIn(wire.Client, cg)
		var fds []int
		for range 4 {
			fds = append(fds, client.MustDial(kerneltest.TCP4, server.Addr))
		}
		closed, reset, given, killed := fds[0], fds[1], fds[2], fds[3]
		wire.Client.Do(cut.do)
		when := func(s string) string { return "a device " + cut.name + ": " + s }
		for range 3 {
			if r := in.reconcile(); r.Reclaimed != 0 {
				in.Fatalf("%s: %+v, want nothing reclaimed", cut.name, r)
			}
		}
		if n := in.count(p).InUse; n != 4 {
			in.Fatalf(when("%d in use, want 4"), n)
		}
		client.Close(closed)
		if n := in.count(p).InUse; n != 3 {
			in.Fatalf(when("%d in use directly after a close, want 3"), n)
		}
		client.Reset(reset)
		if n := in.count(p).InUse; n != 2 {
			in.Fatalf(when("%d in use directly after a reset, want 2"), n)
		}
		// TCP gives up, and the descriptor is still open (TCP_USER_TIMEOUT, in ms).
		client.Option(given, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 100)
		client.SendTo(given, "", 10)
		in.inUse(p, 1, when("after TCP has given up"))
		if _, errno := client.Receive(given, 1); errno == 0 {
			in.Error(when("a read of what TCP has given up returns no error"))
		}
		client.Close(given)
		in.inUse(p, 1, when("after its close"))
		client.NonBlocking(killed)
		client.SendTo(killed, "", 10)
		client.Kill()
		in.inUse(p, 0, when("after the kill"))
		in.empty(when("after all"))
		server.Close()
	}
}

// One direction is shut, by either side, and data goes on the other way: the connection
// is one until both are.
func testHalfClosed(in *instance) {
	client, _ := two(in)
	server := in.start(in.Mkdir("server"))
	l := server.Socket(kerneltest.TCP4)
	server.Bind(l, "127.1.0.7:0")
	addr := server.Listen(l)
	pair := func() (c, s int) {
		c = client.MustDial(kerneltest.TCP4, addr)
		return c, server.Accept(l)
	}
	end := func(who *kerneltest.Client, fd int) {
		in.Helper()
		if n, errno := who.Receive(fd, 1); n != 0 || errno != 0 {
			in.Fatalf("read %d (%v), want the end", n, errno)
		}
	}

	// Ours first: FIN_WAIT2.
	c, s := pair()
	client.CloseWrite(c)
	end(server, s)
	in.states("half closed by us", map[string]int{"fin_wait2": 1})
	server.Upload(s, 100_000)
	client.Download(c, 100_000)
	in.reconcile()
	in.reconcile()
	in.want(1, 0, "half closed by us, with data still coming")
	server.Close(s)
	end(client, c)
	client.Close(c)
	in.empty("half closed by us, then closed by both")

	// The peer first: CLOSE_WAIT, then LAST_ACK.
	c, s = pair()
	server.CloseWrite(s)
	end(client, c)
	in.states("half closed by the peer", map[string]int{"close_wait": 1})
	client.Upload(c, 100_000)
	server.Download(s, 100_000)
	in.want(1, 0, "half closed by the peer, with data still going")
	client.CloseWrite(c)
	end(server, s)
	in.empty("both directions shut, with both descriptors open")
	client.Close(c)
	server.Close(s)
	in.want(0, 0, "after the closes")

	// A reset while it is half closed, either way and by either side.
	for i, half := range []struct{ ours, resetOurs bool }{{true, true}, {true, false}, {false, true}, {false, false}} {
		c, s := pair()
		if half.ours {
			client.CloseWrite(c)
			end(server, s)
		} else {
			server.CloseWrite(s)
			end(client, c)
		}
		in.want(1, 0, fmt.Sprintf("half closed, way %d", i))
		if half.resetOurs {
			client.Reset(c)
			server.Close(s)
			in.empty(fmt.Sprintf("reset by us, way %d", i))
			continue
		}
		server.Reset(s)
		in.empty(fmt.Sprintf("reset by the peer, way %d", i))
		client.Close(c)
	}
}

// The server has closed and the client never reads: 25 places are held, for as long as
// the descriptors are open.
func testManyCloseWait(in *instance) {
	const n = 25
	client, _ := two(in)
	server := kerneltest.Serve(in, "127.1.0.7:0", kerneltest.Hangup)
	var fds []int
	for range n {
		fds = append(fds, client.MustDial(kerneltest.TCP4, server.Addr))
	}
	in.states("the server has closed", map[string]int{"close_wait": n})
	for range 4 {
		in.reconcile()
		in.want(n, 0, "in CLOSE_WAIT")
	}
	client.Close(fds[:5]...)
	in.want(n-5, 0, "after closing five")
	client.Close(fds[5:]...)
}

// A socket that connects to its own port is its own peer (a simultaneous open, RFC 9293,
// figure 7) and one connection.
func testSelf(in *instance) {
	client, _ := two(in)
	for kind, host := range map[kerneltest.Kind]string{kerneltest.TCP4: "127.1.0.1", kerneltest.TCP6: "[::ffff:127.1.0.1]"} {
		fd := client.Socket(kind)
		client.Bind(fd, host+":0")
		wantErrno(in, client.Connect(fd, fmt.Sprintf("%s:%d", host, portOf(in, client, fd))), 0, "connect to itself")
		in.want(1, 0, "connected to itself")
		client.Exchange(fd, 1, 10_000)
		in.want(1, 0, "connected to itself, with data")
		client.Close(fd)
		in.want(0, 0, "after the close")
		in.empty("after the close")
	}
}

// portOf is the port that a client's socket is bound to.
func portOf(in *instance, client *kerneltest.Client, fd int) (port int) {
	in.Helper()
	borrow(in, client, fd, func(fd int) error {
		sa, err := unix.Getsockname(fd)
		switch sa := sa.(type) {
		case *unix.SockaddrInet4:
			port = sa.Port
		case *unix.SockaddrInet6:
			port = sa.Port
		}
		return err
	})
	return port
}

// A descriptor goes to another process over a Unix socket. Whoever has it holds it, be it
// the socket that it is on its way in.
func testPassed(in *instance) {
	client, _ := two(in)
	stranger := in.start(in.Mkdir("stranger"))
	box := stranger.Mailbox()
	post := func() {
		in.Helper()
		fd := client.MustDial(kerneltest.TCP4, "127.1.0.1:80")
		client.Post(box, fd)
		client.Close(fd)
		in.want(1, 0, "in a message")
	}
	post()
	client.Kill()
	in.want(1, 0, "in a message, after its sender was killed")
	got := box.Collect()
	in.reconcile()
	in.reconcile()
	in.want(1, 0, "received from a process that is dead")
	if c := in.snapshot().Connections; len(c) != 1 || c[0].Feature != "f" || int(c[0].PID) != client.PID {
		in.Errorf("connections %+v, want one of f and of process %d, which connected", c, client.PID)
	}
	stranger.Close(got)
	in.want(0, 0, "after the receiver has closed it")

	client = in.start(in.Mkdir("f"))
	post()
	stranger.Kill() // and with it the message
	in.empty("after the receiver of a message that was never read was killed")

	// Connected by the one who gets it, and reused: what counts is who connects.
	stranger = in.start(in.Mkdir("stranger"))
	box = stranger.Mailbox()
	fd, errno := client.Dial(kerneltest.TCP4, "192.0.2.1:80")
	wantErrno(in, errno, syscall.ENETUNREACH, "connect without a route")
	client.Post(box, fd)
	client.Kill()
	got = box.Collect()
	wantErrno(in, stranger.Connect(got, "127.2.0.1:80"), 0, "connect by the receiver")
	c := in.counts()
	if c[feature("f")].InUse != 0 || c[provider("p")].InUse != 0 || c[provider("q")].InUse != 1 {
		in.Errorf("in use: %d by f, %d at p, %d at q; want only the 1 at q, by the receiver", c[feature("f")].InUse, c[provider("p")].InUse, c[provider("q")].InUse)
	}
}

// Killed again and again, with sockets in every state that they can be in.
func testManyKills(in *instance) {
	const rounds = 50 // each is a process of our own, which takes long on an emulated machine
	client, _ := two(in)
	cg := in.Mkdir("f")
	blackHole(in, "127.1.0.9")
	hangup := kerneltest.Serve(in, "127.1.0.7:0", kerneltest.Hangup)
	for round := range rounds {
		client.MustDial(kerneltest.TCP4, "127.1.0.1:80")
		client.CloseWrite(client.MustDial(kerneltest.TCP4, "127.2.0.1:80"))
		client.MustDial(kerneltest.TCP4, hangup.Addr)
		client.Dial(kerneltest.TCP4, "192.0.2.1:80")
		client.Dial(kerneltest.TCP4, "127.1.0.1:9") // refused, and open
		fd := client.Socket(kerneltest.TCP4)
		client.NonBlocking(fd)
		wantErrno(in, client.Connect(fd, "127.1.0.9:81"), syscall.EINPROGRESS, "connect to a server that does not answer")
		if n := in.count(provider("p")).InUse; n < 3 {
			in.Fatalf("round %d: %d in use at p before the kill", round, n)
		}
		client.Kill()
		in.empty(fmt.Sprintf("after kill %d", round))
		client = in.start(cg)
	}
}

// Connections that come in are not counted, whoever makes them.
func testManyAccepted(in *instance) {
	const n = 100
	plan := planOf(in, twoProviders)
	cg := in.Mkdir("f")
	in.apply(plan, member(in, plan, cg, "f", ""))
	server, outside := in.start(cg), in.start(in.Mkdir("outside"))
	in.setMembers(member(in, plan, cg, "f", ""), protected(in.Mkdir("outside")))
	l := server.Socket(kerneltest.TCP4)
	server.Bind(l, "127.1.0.7:0")
	addr := server.Listen(l)
	before := in.counts() // default's is never forgotten
	var accepted []int
	for range n {
		outside.MustDial(kerneltest.TCP4, addr)
		accepted = append(accepted, server.Accept(l))
	}
	in.want(0, 0, "with accepted connections")
	server.Close(accepted[:n/2]...)
	for _, fd := range accepted[n/2:] {
		server.Reset(fd)
	}
	server.Close(l)
	in.want(0, 0, "after closing them")
	for k, b := range in.counts() {
		if b.Accepted != before[k].Accepted {
			in.Errorf("%s accepted %d, before %d", k, b.Accepted, before[k].Accepted)
		}
	}
}

// A listener made in one compartment and served in another: what comes in takes no slot
// and is nobody's bytes.
func testPassedListener(in *instance) {
	const mega = 1 << 20
	client, _ := two(in)
	maker := in.start(in.Mkdir("maker"))
	l := maker.Socket(kerneltest.TCP4)
	maker.Bind(l, "127.1.0.7:0")
	addr := maker.Listen(l)
	outside := in.start(in.Mkdir("outside"))
	plan := in.k.Plan()
	in.setMembers(member(in, plan, in.Mkdir("f"), "f", ""), protected(in.Mkdir("outside")))
	got := client.Take(maker, l)
	maker.Kill()
	c := outside.MustDial(kerneltest.TCP4, addr)
	s := client.Accept(got)
	done := make(chan struct{})
	go func() {
		defer close(done)
		outside.Upload(c, mega)
	}()
	client.Download(s, mega)
	<-done
	in.want(0, 0, "while serving")
	client.Close(s)
	outside.Close(c)
	in.want(0, 0, "after serving")
	for _, tr := range in.snapshot().Traffic {
		if tr.Connections+tr.TxBytes+tr.RxBytes != 0 {
			in.Errorf("what came in is counted: %+v", tr)
		}
	}
}

// The cgroup that a socket was made in is removed while it lives: its process has moved,
// or is dead and the descriptor elsewhere. The slot stays, and ends with the descriptor,
// under other programs too.
func TestCgroupRemoved(t *testing.T) {
	in := newInstance(t)
	client, _ := two(in)
	f, g := in.Mkdir("f"), in.Mkdir("g")
	plan := in.k.Plan()
	remove := func() {
		in.Helper()
		kerneltest.Poll(in, "remove the cgroup", func() error { return unix.Rmdir(f.Path) }) // it is populated for a moment more
	}
	held := client.MustDial(kerneltest.TCP4, "127.1.0.1:80")
	unused := client.Socket(kerneltest.TCP4)
	in.Move(client.PID, g)
	remove()
	in.want(1, 0, "after its cgroup was removed")
	in.setMembers()
	in.reconcile()
	in.reconcile()
	in.want(1, 0, "after its compartment has no cgroup")
	// Programs are put under their links meanwhile: the dead cgroup gets them too.
	in.close()
	in.open()
	in.apply(plan)
	in.want(1, 0, "after a restart")
	client.Close(held)
	in.want(0, 0, "after the close of a socket whose cgroup is gone")

	// A socket of the dead cgroup connects only now.
	wantErrno(in, client.Connect(unused, "127.1.0.1:80"), 0, "connect of a socket whose cgroup is gone")
	if c := in.counts(); c[provider("p")].InUse != 1 || c[feature("f")].InUse != 0 {
		in.Errorf("in use: %d at p, %d by f; want 1 and 0: its process has moved", c[provider("p")].InUse, c[feature("f")].InUse)
	}
	client.Close(unused)
	in.want(0, 0, "after its close")

	// Passed on before its process was killed.
	f = in.Mkdir("f")
	in.setMembers(member(in, plan, f, "f", ""))
	first := in.start(f)
	fd := first.MustDial(kerneltest.TCP4, "127.1.0.1:80")
	got := client.Take(first, fd)
	first.Kill()
	remove()
	in.want(1, 0, "passed on, and its cgroup removed")
	if c := in.snapshot().Connections; len(c) != 1 || c[0].Feature != "f" {
		in.Errorf("connections %+v, want one of f", c)
	}
	client.Close(got)
	in.want(0, 0, "after the close of what was passed on")
}

// A unit that restarts gets a new cgroup with the old path: nothing needs to be attached
// again, nothing is attached twice, and it is in its compartment as soon as SetMembers
// has returned.
func testCgroupAgain(in *instance) {
	_, cg := in.enforce(closedPolicy)
	plan := in.k.Plan()
	before := attached(in, in.Cgroup.Path)
	for round := range 5 {
		client := in.start(cg)
		_, errno := client.Dial(kerneltest.TCP4, "127.0.0.1:1")
		wantErrno(in, errno, errnoSeen(syscall.EAGAIN), fmt.Sprintf("start %d", round))
		client.Kill()
		old := cg.ID
		kerneltest.Poll(in, "remove the cgroup", func() error { return unix.Rmdir(cg.Path) })
		if cg = in.Mkdir("f"); cg.ID == old {
			in.Logf("start %d: the new cgroup has the old one's id %d", round, old)
		}
		in.setMembers(member(in, plan, cg, "f", ""))
		if now := attached(in, in.Cgroup.Path); fmt.Sprint(now) != fmt.Sprint(before) {
			in.Errorf("start %d: attached %v, were %v", round, now, before)
		}
	}
}

// A compartment at each depth from 1 to 20, alone, with a client in it and one below.
func testEveryDepth(in *instance) {
	plan := planOf(in, fiveFeatures)
	in.apply(plan)
	server := kerneltest.Serve(in, "127.0.0.1:8000", kerneltest.Drain)
	client := in.start(in.Cgroup)
	for level := 1; level <= 20; level++ {
		in.setMembers(member(in, plan, deep(in, level), "f1", ""))
		for at := max(1, level-1); at <= level+3; at++ {
			in.Move(client.PID, deep(in, at))
			want := "f1"
			if at < level {
				want = policy.DefaultFeature
			}
			fd := client.Socket(kerneltest.TCP4)
			if got := whose(in, client, fd, server.Addr); got != want {
				in.Errorf("a compartment at depth %d: a client at depth %d is of %q, want %q", level, at, got, want)
			}
			client.Close(fd)
		}
	}
}

// Ten thousand connects that the server refuses leave nothing, and none is ours.
func testManyRefused(in *instance) {
	const n, each = 10_000, 1_000 // a call may not take too long
	client, _ := two(in)
	for range n / each {
		for _, errno := range client.Probe(kerneltest.TCP4, slices.Repeat([]string{"127.1.0.1:9"}, each)) {
			wantErrno(in, errno, syscall.ECONNREFUSED, "connect to a closed port")
		}
	}
	in.want(0, 0, "after them")
	s := in.snapshot()
	if b := in.count(provider("p")); s.Totals.Slots != 0 || b.Accepted != n || b.refused() != 0 || b.Peak != 1 {
		in.Errorf("%d slots, %+v; want 0 slots and %d accepted, one at a time", s.Totals.Slots, b, n)
	}
}

// A client that gives up before the handshake is over, by closing at its timeout, and a
// server that refuses: a close in SYN_SENT gives two events and one place back.
func testGivenUp(in *instance) {
	const rounds = 200
	client, _ := two(in)
	blackHole(in, "127.1.0.9")
	for round := range rounds {
		fd := client.Socket(kerneltest.TCP4)
		// A send timeout ends a connect too (socket(7)), and leaves it in SYN_SENT.
		borrow(in, client, fd, func(fd int) error {
			timeout := unix.NsecToTimeval((2 * time.Millisecond).Nanoseconds())
			return unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &timeout)
		})
		wantErrno(in, client.Connect(fd, "127.1.0.9:81"), syscall.EINPROGRESS, "connect that times out")
		if round%20 == 0 {
			in.want(1, 0, "after a timeout, with the descriptor open")
		}
		client.Close(fd)
		in.want(0, 0, "directly after the close")
	}
	for round := range rounds {
		fd, errno := client.Dial(kerneltest.TCP4, "127.1.0.1:9")
		wantErrno(in, errno, syscall.ECONNREFUSED, "connect to a closed port")
		in.want(0, 0, "refused, with the descriptor open")
		client.Close(fd)
		if round%20 == 0 {
			in.want(0, 0, "directly after the close")
		}
	}
	if n := in.snapshot().Totals.Slots; n != 0 {
		in.Errorf("%d slots are left", n)
	}
}

// Many short connections, five at a time, against a limit of ten times as many: none is
// refused, and none is left behind, whether somebody reconciles or not.
func testShort(in *instance) {
	const connects, threads = 2_000, 5
	_, cg := in.enforce("providers:\n  p: {cidrs: [127.1.0.0/16], limits: {connections: 50}}\nfeatures:\n  f: {class: batch}\n")
	server := kerneltest.Serve(in, "127.1.0.7:0", kerneltest.Drain)
	client := in.start(cg)
	client.Storm(kerneltest.TCP4, server.Addr, threads)
	kerneltest.Poll(in, "many connects", func() error {
		if n := in.count(provider("p")).Accepted; n < connects {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	counts := client.Calm()
	in.want(0, 0, "after them")
	b := in.count(provider("p"))
	if b.refused() != 0 || b.Peak > threads || int(b.Accepted) != counts[0] || len(counts) != 1 {
		in.Errorf("connects returned %v, counted %+v; want all accepted and at most %d at once", counts, b, threads)
	}
}

// The kernel opens more paths of an MPTCP connection by itself, from a thread of its own
// in the root cgroup: however they are counted, none is left when the connection is
// closed, and the first is held until then.
func testSubflows(in *instance) {
	subflows(in, func() {
		in.reconcile()
		in.reconcile()
		if n := in.count(provider("p")).InUse; n < 1 || n > 3 {
			in.Errorf("%d in use by three paths of one connection", n)
		}
	})
}

// subflows is a connection over three paths, while open runs.
func subflows(in *instance, open func()) {
	in.Helper()
	_, cg := in.enforce(twoProviders)
	ns := kerneltest.NewNetns(in)
	client := in.startIn(ns, cg)
	client.Close(mptcpSocket(in, client))
	// Addresses for more paths, and how many there may be: a socket takes it over when it
	// is made.
	ns.Do(func() error {
		return errors.Join(mptcpLimits(4), mptcpEndpoint("127.1.0.21"), mptcpEndpoint("127.1.0.22"))
	})
	var server *kerneltest.Server
	ns.Do(func() error {
		server = kerneltest.ServeMPTCP(in, "127.1.0.8:80", kerneltest.Echo)
		return nil
	})
	fd := mptcpSocket(in, client)
	wantErrno(in, client.Connect(fd, server.Addr), 0, "connect")
	client.Exchange(fd, 2, 1000) // paths are opened once the peer is known to speak MPTCP
	kerneltest.Poll(in, "the kernel has opened two paths more", func() error {
		paths := 0
		ns.Do(func() error {
			d := socketsHere()
			for _, s := range d.Sockets {
				if s.Remote.String() == server.Addr {
					paths++
				}
			}
			return d.Err
		})
		if paths != 3 {
			return fmt.Errorf("%d connections to the server", paths)
		}
		return nil
	})
	open()
	client.Close(fd)
	in.empty("after the close")
}

// socketsHere are the TCP sockets of the network namespace that the calling thread is in.
func socketsHere() sockets.Dump {
	return sockets.Read(context.Background(), sockets.Namespace{Path: "/proc/thread-self/ns/net"}, unix.IPPROTO_TCP)
}

func mptcpSocket(in *instance, client *kerneltest.Client) int {
	in.Helper()
	fd, errno := client.SocketErrno(kerneltest.MPTCP4)
	if errno == syscall.EPROTONOSUPPORT || errno == syscall.ENOPROTOOPT || errno == syscall.EINVAL {
		in.Skip("this kernel lacks: MPTCP (socket: " + errno.Error() + ")")
	}
	wantErrno(in, errno, 0, "socket")
	return fd
}

// Commands and attributes of the path manager (linux/mptcp_pm.h, before 6.6 linux/mptcp.h).
const (
	mptcpAddAddr, mptcpSetLimits                           = 1, 5
	mptcpAttrAddr, mptcpAttrRcvAddAddrs, mptcpAttrSubflows = 1, 2, 3
	mptcpAddrFamily, mptcpAddr4, mptcpAddrFlags            = 1, 3, 6
	mptcpFlagSubflow                                       = 1 << 1
)

func mptcpRequest(command uint8, attrs ...*nl.RtAttr) error {
	family, err := netlink.GenlFamilyGet("mptcp_pm")
	if err != nil {
		return fmt.Errorf("path manager of MPTCP: %w", err)
	}
	q := nl.NewNetlinkRequest(int(family.ID), unix.NLM_F_ACK)
	q.AddData(&nl.Genlmsg{Command: command, Version: 1})
	for _, a := range attrs {
		q.AddData(a)
	}
	_, err = q.Execute(unix.NETLINK_GENERIC, 0)
	return os.NewSyscallError(fmt.Sprintf("path manager command %d", command), err)
}

func mptcpLimits(n uint32) error {
	return mptcpRequest(mptcpSetLimits, nl.NewRtAttr(mptcpAttrRcvAddAddrs, nl.Uint32Attr(n)), nl.NewRtAttr(mptcpAttrSubflows, nl.Uint32Attr(n)))
}

// mptcpEndpoint makes an address one from which the kernel opens paths.
func mptcpEndpoint(addr string) error {
	a := nl.NewRtAttr(mptcpAttrAddr|unix.NLA_F_NESTED, nil)
	a.AddRtAttr(mptcpAddrFamily, nl.Uint16Attr(unix.AF_INET))
	a.AddRtAttr(mptcpAddr4, net.ParseIP(addr).To4())
	a.AddRtAttr(mptcpAddrFlags, nl.Uint32Attr(mptcpFlagSubflow))
	return mptcpRequest(mptcpAddAddr, a)
}

// borrow is a client's descriptor in the test, until use has returned.
func borrow(in *instance, client *kerneltest.Client, fd int, use func(fd int) error) {
	in.Helper()
	process, err := unix.PidfdOpen(client.PID, 0)
	if err != nil {
		in.Fatal(err)
	}
	defer unix.Close(process)
	got, err := unix.PidfdGetfd(process, fd, 0)
	if err != nil {
		in.Fatal(err)
	}
	if err := errors.Join(use(got), unix.Close(got)); err != nil {
		in.Fatal(err)
	}
}

// TCP Fast Open, by sendto and by an option (tcp(7)): the data go with the SYN if the
// server has given a cookie before, else the SYN asks for one. However that is, it is one
// connection from the connect to the close, also if nothing is ever written.
func testFastOpen(in *instance) {
	// Client, server, and every listener (tcp_fastopen in
	// Documentation/networking/ip-sysctl.rst).
	const everywhere = 0x1 | 0x2 | 0x400
	ns, client := twoIn(in, func() error { return sysctl("ipv4/tcp_fastopen", fmt.Sprint(everywhere)) })
	var server *kerneltest.Server
	ns.Do(func() error {
		server = kerneltest.Serve(in, "0.0.0.0:8080", kerneltest.Drain)
		return nil
	})
	withSYN := func(fd int) (was bool) { // TCPI_OPT_SYN_DATA (linux/tcp.h)
		in.Helper()
		borrow(in, client, fd, func(fd int) error {
			info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
			was = err == nil && info.Options&(1<<5) != 0
			return err
		})
		return was
	}
	ways := []struct {
		name    string
		data    bool
		connect func(fd int, addr string) syscall.Errno
	}{
		{"sendto", true, func(fd int, addr string) syscall.Errno { return client.FastOpen(fd, addr, 100) }},
		{"the option", true, func(fd int, addr string) syscall.Errno {
			client.Option(fd, unix.IPPROTO_TCP, unix.TCP_FASTOPEN_CONNECT, 1)
			if errno := client.Connect(fd, addr); errno != 0 {
				return errno
			}
			in.want(1, 0, "connected by the option, with nothing written")
			return client.SendTo(fd, "", 100)
		}},
		{"the option, never written", false, func(fd int, addr string) syscall.Errno {
			client.Option(fd, unix.IPPROTO_TCP, unix.TCP_FASTOPEN_CONNECT, 1)
			return client.Connect(fd, addr)
		}},
	}
	for i, way := range ways {
		addr := fmt.Sprintf("127.1.%d.1:8080", i+1) // cookies are kept by address
		if !way.data {
			fd := client.Socket(kerneltest.TCP4)
			wantErrno(in, client.FastOpen(fd, addr, 100), 0, "a connect for the cookie")
			client.Close(fd)
			in.empty("after it")
		}
		for _, cookie := range []bool{false, true} {
			when := func(s string) string {
				return fmt.Sprintf("%s, with a cookie %v: %s", way.name, cookie || !way.data, s)
			}
			accepted := in.count(provider("p")).Accepted
			fd := client.Socket(kerneltest.TCP4)
			wantErrno(in, way.connect(fd, addr), 0, when("connect"))
			in.want(1, 0, when("connected"))
			if got := withSYN(fd); got != (cookie && way.data) {
				in.Errorf(when("data with the SYN: %v"), got)
			}
			if !way.data {
				in.states(when("connected"), map[string]int{"syn_sent": 1})
			}
			for range 3 {
				in.reconcile()
			}
			in.want(1, 0, when("after three Reconciles"))
			client.Close(fd)
			in.want(0, 0, when("after the close"))
			in.empty(when("after the close"))
			if n := in.count(provider("p")).Accepted - accepted; n != 1 {
				in.Errorf(when("%d accepted, want 1"), n)
			}
		}
	}
	server.Close()

	// The server does not listen any more, and has given cookies.
	fd := client.Socket(kerneltest.TCP4)
	if errno := client.FastOpen(fd, "127.1.1.1:8080", 100); errno != 0 {
		wantErrno(in, errno, syscall.ECONNREFUSED, "sendto a closed port")
	}
	in.empty("refused by the server, with the descriptor open")
	client.Close(fd)

	// Nothing tells of the end of a connect that was put off and then taken back: it is
	// like one that failed before its SYN.
	fd = client.Socket(kerneltest.TCP4)
	client.Option(fd, unix.IPPROTO_TCP, unix.TCP_FASTOPEN_CONNECT, 1)
	wantErrno(in, client.Connect(fd, "127.1.2.1:8080"), 0, "connect that is put off")
	wantErrno(in, client.Disconnect(fd), 0, "connect with AF_UNSPEC")
	in.reconcile()
	in.reconcile()
	in.want(0, 0, "after AF_UNSPEC and two Reconciles")
	client.Close(fd)
	in.empty("after the close")

	// And a limit holds for each way.
	plan := planOf(in, closedPolicy)
	in.apply(plan, member(in, plan, in.Mkdir("f"), "f", ""))
	for _, way := range ways {
		fd := client.Socket(kerneltest.TCP4)
		wantErrno(in, way.connect(fd, "127.1.1.1:8080"), errnoSeen(syscall.EAGAIN), way.name+" at a limit of 0")
		client.Close(fd)
	}
}

// io_uring connects from other contexts than the system call: from a worker, from the
// poll thread, with a timeout. Each is judged by where its process is now.
func testRing(in *instance) {
	plan := planOf(in, `
providers:
  p: {cidrs: [127.1.0.0/16, 192.0.2.0/24], limits: {connections: 100}}
  q: {cidrs: [127.2.0.0/16], limits: {connections: 0, errno: EACCES}}
  r: {cidrs: [127.3.0.0/16], limits: {connections: 0, errno: EAGAIN}}
features:
  f: {class: batch}
  g: {class: batch, limits: {connections: 0, errno: EBUSY}}
`)
	f, g := in.Mkdir("f"), in.Mkdir("g")
	in.apply(plan, member(in, plan, f, "f", ""), member(in, plan, g, "g", ""))
	kerneltest.Serve(in, "127.1.0.1:80", kerneltest.Drain)
	blackHole(in, "127.1.0.9")
	const never, soon = time.Hour, 5 * time.Millisecond
	for _, poll := range []bool{false, true} {
		client := in.start(f)
		if errno := client.Ring(poll); errno == syscall.ENOSYS || errno == syscall.EPERM {
			in.Skip("this kernel lacks: io_uring, or its kernel.io_uring_disabled forbids it (" + errno.Error() + ")")
		} else if errno != 0 {
			in.Fatalf("io_uring_setup: %v", errno)
		}
		for _, way := range []kerneltest.Way{kerneltest.Plain, kerneltest.Async, kerneltest.LinkTimeout} {
			when := func(s string) string { return fmt.Sprintf("%s, polled %v: %s", way, poll, s) }
			connect := func(addr string, want syscall.Errno) int {
				in.Helper()
				fd := client.Socket(kerneltest.TCP4)
				wantErrno(in, client.RingConnect(fd, addr, way, never), want, when("connect to "+addr))
				return fd
			}
			fd := connect("127.1.0.1:80", 0)
			in.want(1, 0, when("connected"))
			if c := in.snapshot().Connections; len(c) != 1 || int(c[0].PID) != client.PID || c[0].Feature != "f" {
				in.Errorf(when("connections %+v, want one of f and process %d"), c, client.PID)
			}
			client.Close(fd)
			in.inUse(provider("p"), 0, when("after the close")) // the ring may let go of it later

			fd = connect("127.1.0.1:9", syscall.ECONNREFUSED)
			in.empty(when("refused by the server, with the descriptor open"))
			client.Close(fd)

			refused := in.count(provider("q")).refused()
			client.Close(connect("127.2.0.1:80", errnoSeen(syscall.EACCES)))
			if n := in.count(provider("q")).refused() - refused; n != 1 {
				in.Errorf(when("%d refused, want 1"), n)
			}
			// The ring takes EAGAIN for a request to try again, and does so up to 128 times
			// before it tells: one submission is many refusals.
			client.Close(connect("127.3.0.1:80", errnoSeen(syscall.EAGAIN)))
			client.Close(connect("192.0.2.1:80", syscall.ENETUNREACH))
			in.empty(when("unreachable, and closed"))

			in.Move(client.PID, g)
			client.Close(connect("127.1.0.1:80", errnoSeen(syscall.EBUSY)))
			in.Move(client.PID, f)
		}
		fd := client.Socket(kerneltest.TCP4)
		wantErrno(in, client.RingConnect(fd, "127.1.0.9:81", kerneltest.LinkTimeout, soon), syscall.ECANCELED, "connect that a timeout ends")
		in.want(1, 0, "ended by a timeout: it is still trying")
		client.Close(fd)
		in.empty("ended by a timeout, and closed")

		// Killed with its ring.
		client.RingConnect(client.Socket(kerneltest.TCP4), "127.1.0.1:80", kerneltest.Plain, never)
		client.RingConnect(client.Socket(kerneltest.TCP4), "127.1.0.9:81", kerneltest.LinkTimeout, soon)
		in.want(2, 0, "before the kill")
		client.Kill()
		in.empty("after the kill")
	}
}

// Bytes are counted in 64 bits.
func testManyBytes(in *instance) {
	const before, mega = 1<<32 - 100, 1 << 20
	client, _ := two(in)
	at, ok := in.k.traffic.at[trafficKey{feature: "f", provider: "p"}]
	if !ok {
		in.Fatal("no traffic of f to p")
	}
	seed := kernelTrafficCount{TxBytes: before, RxBytes: before}
	if err := in.k.coll.Maps[kernelMapTraffic].Update(at, &seed, ebpf.UpdateExist); err != nil {
		in.Fatal(err)
	}
	server := kerneltest.Serve(in, "127.1.0.7:0", kerneltest.Echo)
	fd := client.MustDial(kerneltest.TCP4, server.Addr)
	client.Exchange(fd, mega/1024, 1024)
	agrees := func(when string) {
		in.Helper()
		kerneltest.Poll(in, when, func() error {
			tr := in.traffic("f", "", "p")
			// Payload and headers, which are less than a tenth of it here.
			for _, n := range []uint64{tr.TxBytes, tr.RxBytes} {
				if n < before+mega || n > before+mega+mega/5 {
					return fmt.Errorf("%d bytes, want %d and headers", n, uint64(before+mega))
				}
			}
			return nil
		})
	}
	agrees("open")
	client.Close(fd)
	in.empty("after the close")
	agrees("closed")
}

// A socket that connects to its own port is its own peer (a simultaneous open, RFC 9293,
// figure 7): one connection, with all its bytes twice.
func TestSelfBytes(t *testing.T) {
	in := newInstance(t)
	const size = 10_000
	client, _ := two(in)
	for kind, host := range map[kerneltest.Kind]string{kerneltest.TCP4: "127.1.0.1", kerneltest.TCP6: "[::ffff:127.1.0.1]"} {
		before := in.traffic("f", "", "p")
		fd := client.Socket(kind)
		client.Bind(fd, host+":0")
		wantErrno(in, client.Connect(fd, fmt.Sprintf("%s:%d", host, portOf(in, client, fd))), 0, "connect to itself")
		in.want(1, 0, "connected to itself")
		client.Exchange(fd, 1, size)
		in.want(1, 0, "connected to itself, with data")
		client.Close(fd)
		in.want(0, 0, "after the close")
		in.empty("after the close")
		if tr := in.traffic("f", "", "p"); tr.TxBytes-before.TxBytes < size || tr.RxBytes-before.RxBytes < size {
			in.Errorf("%s: %d and %d bytes, want at least %d each", host, tr.TxBytes-before.TxBytes, tr.RxBytes-before.RxBytes, size)
		}
	}
}

// A socket whose connect failed before its SYN listens then: what comes in is not counted,
// and what it held is found, as if it were closed.
func TestThenListens(t *testing.T) {
	in := newInstance(t)
	client, _ := two(in)
	outside := in.start(in.Mkdir("outside"))
	in.setMembers(member(in, in.k.Plan(), in.Mkdir("f"), "f", ""), protected(in.Mkdir("outside")))
	fd, errno := client.Dial(kerneltest.TCP4, "192.0.2.1:80")
	wantErrno(in, errno, syscall.ENETUNREACH, "connect without a route")
	client.Bind(fd, "127.1.0.7:0")
	addr := client.Listen(fd)
	in.reconcile()
	in.reconcile()
	in.want(0, 0, "listening, after two Reconciles")
	c := outside.MustDial(kerneltest.TCP4, addr)
	got := client.Accept(fd)
	in.want(0, 0, "accepted")
	client.Close(got, fd)
	outside.Close(c)
	in.empty("after the close")
}
