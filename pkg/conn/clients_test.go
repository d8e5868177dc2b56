package conn

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/policy"
)

// Programs that were not written for us. A test of one that is not installed is skipped
// and names it.
func TestClients(t *testing.T) {
	runAll(t,
		test{"happy eyeballs of Go", eyeballs("Go")},
		test{"happy eyeballs of curl", eyeballs("curl")},
		test{"happy eyeballs of Node", eyeballs("node")},
		test{"name lookup by Go", lookup("Go")},
		test{"name lookup by Python", lookup("python3")},
		test{"name lookup by Node", lookup("node")},
		test{"errno in Go", refusedClient("Go")},
		test{"errno in Python", refusedClient("python3")},
		test{"errno in Python's asyncio", refusedClient("asyncio")},
		test{"errno in Node", refusedClient("node")},
		test{"errno in curl", refusedClient("curl")},
		test{"many requests on one connection", testHTTP2},
		test{"idle connections of a pool", testIdlePool},
		test{"redirected to a proxy", testRedirected},
	)
}

// httpServer answers every request, over HTTP/1 or HTTP/2 without TLS, and those that come
// between hold and release at the release.
type httpServer struct {
	Addr string

	mu   sync.Mutex
	gate chan struct{} // nil if open
	seen int           // requests
}

func serveHTTP(in *instance, addr string) *httpServer {
	in.Helper()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		in.Fatal(err)
	}
	s := &httpServer{Addr: l.Addr().String()}
	server := http.Server{Protocols: &http.Protocols{}, Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		s.mu.Lock()
		s.seen++
		gate := s.gate
		s.mu.Unlock()
		if gate != nil {
			<-gate
		}
	})}
	server.Protocols.SetHTTP1(true)
	server.Protocols.SetUnencryptedHTTP2(true)
	go server.Serve(l)
	in.Cleanup(func() {
		s.release()
		server.Close()
	})
	return s
}

func (s *httpServer) hold() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gate, s.seen = make(chan struct{}), 0
}

func (s *httpServer) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gate != nil {
		close(s.gate)
		s.gate = nil
	}
}

// holds waits until n requests have come since hold.
func (s *httpServer) holds(in *instance, n int) {
	in.Helper()
	kerneltest.Poll(in, fmt.Sprintf("%d requests are held", n), func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.seen != n {
			return fmt.Errorf("%d are", s.seen)
		}
		return nil
	})
}

// eyeballs is a client of a name with two addresses, of which the one that it tries first,
// of IPv6, does not answer (RFC 8305). For a moment it may try both, and each is a
// connection; once it has settled there is one.
func eyeballs(program string) func(in *instance) {
	return func(in *instance) {
		const name, six, four = "both.test", "2001:db8::1", "127.1.0.1"
		_, cg := in.enforce("providers:\n  p: {cidrs: [127.1.0.0/16, '2001:db8::/32'], limits: {connections: 100}}\nfeatures:\n  f: {class: batch}\n")
		kerneltest.Hosts(in, four+" "+name+"\n"+six+" "+name+"\n")
		ns := kerneltest.NewNetns(in)
		// Addresses that are not of loopback: IPv6 comes first then (RFC 6724), and IPv4 is
		// not left out (AI_ADDRCONFIG in getaddrinfo(3)).
		ns.Do(func() error {
			lo, err := netlink.LinkByName("lo")
			if err != nil {
				return err
			}
			for _, a := range []string{six + "/128", "10.77.0.1/32"} {
				addr, err := netlink.ParseAddr(a)
				if err != nil {
					return err
				}
				if addr.IP.To4() == nil {
					addr.Flags = unix.IFA_F_NODAD
				}
				if err := netlink.AddrAdd(lo, addr); err != nil {
					return err
				}
			}
			return nil
		})
		// The address is usable a moment after it was added.
		kerneltest.Poll(in, "a server that does not answer", func() error {
			return ns.Try(func() error { return blackHole6(in, six, 81) })
		})
		var server *httpServer
		ns.Do(func() error {
			server = serveHTTP(in, four+":81")
			return nil
		})
		server.hold()
		run := func(args ...string) {
			in.Helper()
			cmd := in.Command(cg, args[0], args[1:]...)
			var out strings.Builder
			cmd.Stdout, cmd.Stderr = &out, &out
			ns.Do(cmd.Start)
			server.holds(in, 1)
			in.inUse(provider("p"), 1, "settled")
			in.states("settled", map[string]int{"established": 1})
			server.release()
			if err := cmd.Wait(); err != nil {
				in.Errorf("%s: %v\n%s", program, err, out.String())
			}
		}
		url := "http://" + name + ":81/"
		switch program {
		case "curl":
			run("curl", "--silent", "--show-error", "--noproxy", "*", url)
		case "node":
			run("node", "-e", `require('http').get({host: '`+name+`', port: 81, autoSelectFamily: true}, r => { r.resume(); r.on('end', () => process.exit(0)) })`)
		default:
			client := in.startIn(ns, cg)
			remote, errno := client.DialName(name + ":81")
			if errno != 0 || remote != four+":81" {
				in.Fatalf("connected to %s (%v), want %s:81", remote, errno, four)
			}
			in.inUse(provider("p"), 1, "settled")
			client.Kill()
		}
		in.empty("after the end")
		b := in.count(provider("p"))
		if b.Accepted != 2 || b.Peak > 2 || b.refused() != 0 {
			in.Errorf("got %+v, want both attempts accepted", b)
		}
		in.Logf("%s: %d at once at most", program, b.Peak)
	}
}

// blackHole6 is blackHole for an address of IPv6, in the network namespace of the calling
// thread.
func blackHole6(in *instance, addr string, port int) error {
	sa := &unix.SockaddrInet6{Addr: [16]byte(net.ParseIP(addr).To16()), Port: port}
	var fds [2]int
	for i := range fds {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		fds[i] = fd
	}
	err := errors.Join(unix.Bind(fds[0], sa), unix.Listen(fds[0], 0), unix.Connect(fds[1], sa))
	closeBoth := func() {
		unix.Close(fds[0])
		unix.Close(fds[1])
	}
	if err != nil {
		closeBoth()
		return err
	}
	in.Cleanup(closeBoth)
	return nil
}

// lookup asks for a name alone, whose addresses are of a provider with a limit of 0 and of
// none that is known. The resolver connects UDP sockets to them to sort them: that is
// neither refused nor counted, and it gets both addresses.
func lookup(program string) func(in *instance) {
	return func(in *instance) {
		const name = "look.test"
		kerneltest.Hosts(in, "127.3.0.1 "+name+"\nfd00:9::1 "+name+"\n")
		_, cg := in.enforce(tcpPolicy)
		udp4, udp6 := newNeighbour(in, ebpf.AttachCGroupInet4Connect), newNeighbour(in, ebpf.AttachCGroupInet6Connect)
		udp4.mustAttach(cg.Path, allowMulti)
		udp6.mustAttach(cg.Path, allowMulti)
		before := in.counts()
		var args []string
		switch program {
		case "python3":
			args = []string{"python3", "-c", `import socket; print(len({a[4][0] for a in socket.getaddrinfo("` + name + `", 443, type=socket.SOCK_STREAM)}))`}
		case "node":
			args = []string{"node", "-e", `require('dns').lookup('` + name + `', {all: true}, (err, all) => console.log(err || all.length))`}
		}
		if args == nil {
			wantErrno(in, in.start(cg).LookUp(name), 0, "look up")
		} else if out, err := in.Command(cg, args[0], args[1:]...).CombinedOutput(); err != nil || string(out) != "2\n" {
			in.Errorf("%s: %q (%v), want 2 addresses", program, out, err)
		}
		// It is no test if nothing was connected.
		if udp4.ran()[0]+udp6.ran()[0] == 0 {
			in.Errorf("%s connected nothing at all", program)
		}
		for k, b := range in.counts() {
			if b.InUse != 0 || b.Accepted != before[k].Accepted || b.refused() != before[k].refused() {
				in.Errorf("%s is %+v, was %+v", k, b, before[k])
			}
		}
		for _, tr := range in.snapshot().Traffic {
			if tr.Connections != 0 {
				in.Errorf("counted as connections: %+v", tr)
			}
		}
	}
}

// refusedClient meets limits of 0 with several errnos: it fails at once and says the one
// of the policy. EAGAIN is apart: who connects without blocking may take it for a connect
// in progress. curl fails without a reason, and asyncio finds no error on the socket,
// calls it open, and fails when it reads; that it fails is all that is asked of them.
func refusedClient(program string) func(in *instance) {
	return func(in *instance) {
		errnos := []namedErrno{{"ECONNREFUSED", syscall.ECONNREFUSED}, {"EACCES", syscall.EACCES}, {"ETIMEDOUT", syscall.ETIMEDOUT}, {"EHOSTUNREACH", syscall.EHOSTUNREACH}, {"EAGAIN", syscall.EAGAIN}}
		text := "providers:\n"
		for i, e := range errnos {
			text += fmt.Sprintf("  p%d: {cidrs: [127.1.%d.0/24], limits: {connections: 0, errno: %s}}\n", i, i, e.name)
		}
		_, cg := in.enforce(text + "features:\n  f: {class: batch}\n")
		for i, e := range errnos {
			host := fmt.Sprintf("127.1.%d.1", i)
			kerneltest.Serve(in, host+":80", kerneltest.Drain)
			want := errnoSeen(e.Errno)
			run := func(args ...string) (string, error) {
				in.Helper()
				out, err := in.Command(cg, args[0], args[1:]...).CombinedOutput()
				return strings.TrimSpace(string(out)), err
			}
			number := strconv.Itoa(int(want))
			switch program {
			case "Go":
				_, errno := in.start(cg).DialName(host + ":80")
				wantErrno(in, errno, want, "Go's Dial")
			case "python3":
				got, err := run("python3", "-c", "import socket\ntry: socket.create_connection(('"+host+"', 80), timeout=20)\nexcept OSError as e: print(e.errno)")
				if got != number || err != nil {
					in.Errorf("%s: Python says %q (%v), want %s", e.name, got, err, number)
				}
			case "asyncio":
				got, err := run("python3", "-c", `import asyncio
async def main():
	try:
		r, w = await asyncio.open_connection('`+host+`', 80)
		w.write(b'x'); await w.drain(); await r.read(1)
		print("connected")
	except OSError as e: print(e.errno)
asyncio.run(main())`)
				if err != nil || got == "connected" || e.Errno != syscall.EAGAIN && got != number {
					in.Errorf("%s: asyncio says %q (%v), want %s", e.name, got, err, number)
				}
			case "node":
				name := e.name
				if want == syscall.EPERM {
					name = "EPERM"
				}
				got, err := run("node", "-e", "require('net').connect(80, '"+host+"').on('error', e => console.log(e.code))")
				if got != name || err != nil {
					in.Errorf("%s: Node says %q (%v), want %s", e.name, got, err, name)
				}
			case "curl":
				got, err := run("curl", "--verbose", "--noproxy", "*", "--max-time", "20", "http://"+host+"/")
				var exit *exec.ExitError
				code := 7 // could not connect
				if want == syscall.ETIMEDOUT {
					code = 28
				}
				if !errors.As(err, &exit) || e.Errno != syscall.EAGAIN && (exit.ExitCode() != code || !strings.Contains(strings.ToLower(got), want.Error())) {
					in.Errorf("%s: curl says (%v)\n%s\nwant exit code %d and %q", e.name, err, got, code, want.Error())
				}
			}
			if b := in.count(provider(fmt.Sprintf("p%d", i))); b.refused() != 1 || b.Accepted != 0 {
				in.Errorf("%s: %+v, want one refused", e.name, b)
			}
		}
	}
}

// answers is how requests ended.
type answers struct {
	answered int
	errno    syscall.Errno
}

// ask makes n requests at the same moment.
func ask(client *kerneltest.Client, protocol string, server *httpServer, n int) <-chan answers {
	done := make(chan answers, 1)
	go func() {
		answered, errno := client.Requests(protocol, server.Addr, n)
		done <- answers{answered, errno}
	}()
	return done
}

// A hundred requests in flight on one connection are one, and a limit that is lowered
// under them breaks none: it caps connections, not requests.
func testHTTP2(in *instance) {
	const requests = 100
	text := func(limit int) *policy.Plan {
		return planOf(in, fmt.Sprintf("providers:\n  p: {cidrs: [127.0.0.0/8], limits: {connections: %d}}\nfeatures:\n  f: {class: batch}\n", limit))
	}
	cg := in.Mkdir("f")
	plan := text(2)
	in.apply(plan, member(in, plan, cg, "f", ""))
	server := serveHTTP(in, "127.0.0.1:0")
	client := in.start(cg)
	// The first makes the connection that the others share.
	if r := <-ask(client, "http/2", server, 1); r.answered != 1 {
		in.Fatalf("the first request: %v", r.errno)
	}
	server.hold()
	done := ask(client, "http/2", server, requests)
	server.holds(in, requests)
	if b := in.count(provider("p")); b.InUse != 1 || b.Peak != 1 || b.refused() != 0 {
		in.Errorf("with %d requests in flight: %+v, want one connection", requests, b)
	}
	for _, limit := range []int{1, 0} {
		plan := text(limit)
		in.apply(plan, member(in, plan, cg, "f", ""))
	}
	if b := in.count(provider("p")); b.InUse != 1 {
		in.Errorf("after the limit was lowered: %+v", b)
	}
	server.release()
	if r := <-done; r.answered != requests {
		in.Errorf("%d of %d requests were answered (%v)", r.answered, requests, r.errno)
	}
	client.CloseIdle()
	in.empty("after the pool has closed it")
	if r := <-ask(client, "http/2", server, 1); r.answered != 0 || r.errno != errnoSeen(syscall.ECONNREFUSED) {
		in.Errorf("a new connection at a limit of 0: %v", r.errno)
	}
}

// Connections that a pool keeps open are held, whatever they are used for: another process
// of the feature is refused until the pool lets go. Whose they are can be told.
func testIdlePool(in *instance) {
	const limit = 4
	_, cg := in.enforce("providers:\n  p: {cidrs: [127.0.0.0/8], limits: {connections: 4, errno: EACCES}}\nfeatures:\n  f: {class: batch}\n")
	server := serveHTTP(in, "127.0.0.1:0")
	pool, other := in.start(cg), in.start(cg)
	server.hold() // so that each needs a connection of its own
	done := ask(pool, "http/1", server, limit)
	server.holds(in, limit)
	server.release()
	if r := <-done; r.answered != limit {
		in.Fatalf("%d of %d requests were answered (%v)", r.answered, limit, r.errno)
	}
	for range 3 {
		in.reconcile()
		if r := <-ask(other, "http/1", server, 1); r.answered != 0 || r.errno != errnoSeen(syscall.EACCES) {
			in.Errorf("a request beside an idle pool: %v", r.errno)
		}
		if r := <-ask(pool, "http/1", server, 1); r.answered != 1 {
			in.Errorf("a request of the pool's own: %v", r.errno)
		}
	}
	held := map[uint32]int{}
	for _, c := range in.snapshot().Connections {
		held[c.PID]++
	}
	if held[uint32(pool.PID)] != limit || len(held) != 1 {
		in.Errorf("connections by process %v, want %d of %d", held, limit, pool.PID)
	}
	pool.CloseIdle()
	in.inUse(provider("p"), 0, "after the pool's idle connections are closed")
	if r := <-ask(other, "http/1", server, 1); r.answered != 1 {
		in.Errorf("a request once the pool has let go: %v", r.errno)
	}
}

// An application whose connection is redirected to a proxy in another compartment, by a
// rule of the packet filter: the hook sees where the application meant to go, and what
// the proxy connects to is the proxy's.
func testRedirected(in *instance) {
	plan := planOf(in, "providers:\n  p: {cidrs: [127.1.0.0/16], limits: {connections: 100}}\nfeatures:\n  app: {class: batch}\n  proxy: {class: batch}\n")
	a, b := in.Mkdir("app"), in.Mkdir("proxy")
	in.apply(plan, member(in, plan, a, "app", ""), member(in, plan, b, "proxy", ""))
	nft, err := exec.LookPath("nft")
	if err != nil {
		in.Skip("not installed: nft")
	}
	ns := kerneltest.NewNetns(in)
	var out []byte
	err = ns.Try(func() (err error) {
		out, err = exec.Command(nft, "table ip t { chain c { type nat hook output priority -100; ip daddr 127.1.0.1 tcp dport 80 redirect to :15001; }; }").CombinedOutput()
		return err
	})
	if err != nil {
		in.Skipf("this kernel lacks: nf_tables with NAT (nft: %s)", strings.TrimSpace(string(out)))
	}
	app, proxy := in.startIn(ns, a), in.startIn(ns, b)
	l := proxy.Socket(kerneltest.TCP4)
	proxy.Bind(l, "127.0.0.1:15001")
	proxy.Listen(l)
	ns.Do(func() error {
		kerneltest.Serve(in, "127.1.0.2:80", kerneltest.Drain)
		return nil
	})
	c := app.MustDial(kerneltest.TCP4, "127.1.0.1:80")
	s := proxy.Accept(l)
	on := proxy.MustDial(kerneltest.TCP4, "127.1.0.2:80")
	check := func(when string, app, proxy uint32) {
		in.Helper()
		all := in.counts()
		if all[provider("p")].InUse != app+proxy || all[feature("app")].InUse != app || all[feature("proxy")].InUse != proxy {
			in.Errorf("%s: in use %d at p, %d by app, %d by proxy; want %d by app and %d by proxy", when,
				all[provider("p")].InUse, all[feature("app")].InUse, all[feature("proxy")].InUse, app, proxy)
		}
	}
	check("through the proxy", 1, 1)
	for _, got := range in.snapshot().Connections {
		if want := map[string]string{"app": "127.1.0.1:80", "proxy": "127.1.0.2:80"}[got.Feature]; got.Remote.String() != want {
			in.Errorf("%+v, want it to %s", got, want)
		}
	}
	app.Close(c)
	check("after the application has closed", 0, 1)
	proxy.Close(s, on)
	check("after the proxy has", 0, 0)
}
