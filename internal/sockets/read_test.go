package sockets

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
)

// readOwn reads a namespace from inside.
func readOwn(t *testing.T, ns *kerneltest.Netns, protos ...uint8) Dump {
	t.Helper()
	var d Dump
	ns.With(t).Do(func() error {
		d = Read(context.Background(), Namespace{}, protos...)
		return nil
	})
	return d
}

func complete(t *testing.T, d Dump) Dump {
	t.Helper()
	if d.Err != nil || !d.Complete {
		t.Fatalf("%s: complete %v, error %v; expected a complete dump", d.Namespace, d.Complete, d.Err)
	}
	return d
}

func TestSocketsByCookie(t *testing.T) {
	ns := kerneltest.NewNetns(t)
	for _, c := range []struct{ name, network, listen, dial, addr string }{
		{"ipv4", "tcp4", "127.0.0.1", "127.0.0.1", "127.0.0.1"},
		{"ipv6", "tcp6", "::1", "::1", "::1"},
		{"ipv4 to a listener on ipv6", "tcp4", "::", "127.0.0.1", "127.0.0.1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPair(t, ns, c.network, c.listen, c.dial)
			d := complete(t, readOwn(t, ns, unix.IPPROTO_TCP))
			if want := cookie(t, p.client, unix.SO_NETNS_COOKIE); d.Cookie != want {
				t.Errorf("namespace cookie %d, expected %d", d.Cookie, want)
			}
			for end, conn := range map[string]*net.TCPConn{"client": p.client, "server": p.server} {
				s, ok := d.Sockets[cookie(t, conn, unix.SO_COOKIE)]
				if !ok {
					t.Fatalf("%s is not among %d sockets", end, len(d.Sockets))
				}
				local, remote := addrPort(conn.LocalAddr()), addrPort(conn.RemoteAddr())
				if s.Local != local || s.Remote != remote || s.Local.Addr() != netip.MustParseAddr(c.addr) {
					t.Errorf("%s: got %s to %s, expected %s to %s", end, s.Local, s.Remote, local, remote)
				}
				if s.State != Established || s.Proto != unix.IPPROTO_TCP || s.Inode == 0 || s.UID != 0 {
					t.Errorf("%s: got %+v, expected an established TCP socket of user 0 with an inode", end, s)
				}
				if s.LastSent > time.Hour || s.LastReceived > time.Hour {
					t.Errorf("%s: got %+v, expected a handshake a moment ago", end, s)
				}
			}
		})
	}
}

// An IPv6 socket that talks IPv4 has IPv4 addresses and headers.
func TestMappedAddress(t *testing.T) {
	ns := kerneltest.NewNetns(t)
	var fd int
	ns.Do(func() error {
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			return err
		}
		t.Cleanup(func() { l.Close() })
		fd, err = unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		to := &unix.SockaddrInet6{Port: l.Addr().(*net.TCPAddr).Port, Addr: netip.MustParseAddr("::ffff:127.0.0.1").As16()}
		return unix.Connect(fd, to)
	})
	defer unix.Close(fd)
	c, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	if err != nil {
		t.Fatal(err)
	}
	s, ok := complete(t, readOwn(t, ns, unix.IPPROTO_TCP)).Sockets[c]
	if !ok || !s.Local.Addr().Is4() || !s.Remote.Addr().Is4() {
		t.Errorf("got %+v (found %v), expected IPv4 addresses", s, ok)
	}
	if s.TxBytes != 60+52 || s.RxBytes != 60 {
		t.Errorf("got tx %d rx %d, expected the 112 and 60 bytes of an IPv4 handshake", s.TxBytes, s.RxBytes)
	}
}

func addrPort(a net.Addr) netip.AddrPort {
	ap := a.(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

func TestUDP(t *testing.T) {
	ns := kerneltest.NewNetns(t)
	var bound, connected *net.UDPConn
	ns.Do(func() (err error) {
		if bound, err = net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)}); err != nil {
			return err
		}
		connected, err = net.DialUDP("udp4", nil, bound.LocalAddr().(*net.UDPAddr))
		return err
	})
	defer bound.Close()
	defer connected.Close()
	d := complete(t, readOwn(t, ns, unix.IPPROTO_TCP, unix.IPPROTO_UDP))
	for state, c := range map[State]*net.UDPConn{Close: bound, Established: connected} {
		s, ok := d.Sockets[cookie(t, c, unix.SO_COOKIE)]
		if !ok || s.State != state || s.Proto != unix.IPPROTO_UDP {
			t.Errorf("got %+v (found %v), expected a UDP socket in state %s", s, ok, state)
		}
	}
}

// What is listed in which state, and that a cookie past CLOSE is not.
func TestStates(t *testing.T) {
	ns := kerneltest.NewNetns(t)
	reaches := func(t *testing.T, ns *kerneltest.Netns, c uint64, want State) {
		t.Helper()
		kerneltest.Poll(t, "the state", func() error {
			if got := complete(t, readOwn(t, ns, unix.IPPROTO_TCP)).Sockets[c].State; got != want {
				return fmt.Errorf("state %s, expected %s", got, want)
			}
			return nil
		})
	}

	t.Run("syn_sent", func(t *testing.T) {
		ns := kerneltest.NewWire(t, true).Client
		var fd int
		ns.Do(func() (err error) {
			fd, err = connectToNobody()
			return err
		})
		defer unix.Close(fd)
		c, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
		if err != nil {
			t.Fatal(err)
		}
		reaches(t, ns, c, SynSent)
	})
	t.Run("close_wait and time_wait", func(t *testing.T) {
		p := newPair(t, ns, "tcp4", "127.0.0.1", "127.0.0.1")
		client, server := cookie(t, p.client, unix.SO_COOKIE), cookie(t, p.server, unix.SO_COOKIE)
		p.server.Close()
		// The server's end is past CLOSE, a FIN_WAIT2 stand-in with its cookie.
		reaches(t, ns, client, CloseWait)
		reaches(t, ns, server, 0)
		p.client.Close()
		reaches(t, ns, client, 0)
		reaches(t, ns, server, 0)
	})
	t.Run("fin_wait2 with a descriptor", func(t *testing.T) {
		p := newPair(t, ns, "tcp4", "127.0.0.1", "127.0.0.1")
		if err := p.client.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		reaches(t, ns, cookie(t, p.client, unix.SO_COOKIE), FinWait2)
	})
	t.Run("listen", func(t *testing.T) {
		var l net.Listener
		ns.With(t).Do(func() (err error) {
			var plain net.ListenConfig
			plain.SetMultipathTCP(false) // else the listener's own cookie is that of an MPTCP socket
			l, err = plain.Listen(context.Background(), "tcp4", "127.0.0.1:0")
			return err
		})
		defer l.Close()
		reaches(t, ns, cookie(t, l.(*net.TCPListener), unix.SO_COOKIE), Listen)
	})
}

// connectToNobody is a socket in SYN_SENT: no end of a Wire has the address.
func connectToNobody() (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, err
	}
	err = unix.Connect(fd, &unix.SockaddrInet4{Port: 443, Addr: [4]byte{10, 77, 0, 99}})
	if !errors.Is(err, unix.EINPROGRESS) {
		unix.Close(fd)
		return -1, fmt.Errorf("connect to nobody: %v, expected EINPROGRESS", err)
	}
	return fd, nil
}

// A subflow is listed as the TCP socket that it is; the MPTCP socket, whose
// cookie no connect hook sees, is not.
func TestMPTCP(t *testing.T) {
	if _, err := os.Stat("/proc/sys/net/mptcp"); errors.Is(err, os.ErrNotExist) {
		t.Skip("kernel without CONFIG_MPTCP")
	}
	ns := kerneltest.NewNetns(t)
	var fd int
	var l net.Listener
	ns.Do(func() (err error) {
		if l, err = net.Listen("tcp4", "127.0.0.1:0"); err != nil {
			return err
		}
		if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_MPTCP); err != nil {
			return os.NewSyscallError("MPTCP socket", err)
		}
		return unix.Connect(fd, &unix.SockaddrInet4{Port: l.Addr().(*net.TCPAddr).Port, Addr: [4]byte{127, 0, 0, 1}})
	})
	defer l.Close()
	defer unix.Close(fd)
	sa, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	own, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	if err != nil {
		t.Fatal(err)
	}
	d := complete(t, readOwn(t, ns, unix.IPPROTO_TCP))
	var subflows []Socket
	for _, s := range d.Sockets {
		if int(s.Local.Port()) == sa.(*unix.SockaddrInet4).Port {
			subflows = append(subflows, s)
		}
	}
	if len(subflows) != 1 || subflows[0].State != Established || subflows[0].Cookie == own {
		t.Errorf("got %+v, expected one established subflow with a cookie other than %d", subflows, own)
	}
	if s, ok := d.Sockets[own]; ok {
		t.Errorf("got %+v, expected the MPTCP socket not to be listed", s)
	}
}

// A protocol that the kernel cannot dump fails in the message that ends an
// otherwise empty dump.
func TestUnsupportedProtocolIsAnError(t *testing.T) {
	ns := kerneltest.NewNetns(t)
	for _, protos := range [][]uint8{{253}, {unix.IPPROTO_TCP, 253}} {
		d := readOwn(t, ns, protos...)
		if d.Complete || !errors.Is(d.Err, ErrNoDiag) {
			t.Errorf("protocols %v: complete %v, error %v; expected ErrNoDiag", protos, d.Complete, d.Err)
		}
	}
}

func TestCancelled(t *testing.T) {
	ns := kerneltest.NewNetns(t)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for _, d := range readAll(t, ns, ctx, 1) {
		if d.Complete || !errors.Is(d.Err, context.Canceled) {
			t.Errorf("%s: complete %v, error %v; expected that it was cancelled", d.Namespace, d.Complete, d.Err)
		}
	}
}

// readAll is ReadAll of TCP from inside a namespace; the first Dump must be its own.
func readAll(t *testing.T, ns *kerneltest.Netns, ctx context.Context, wanted ...uint64) []Dump {
	t.Helper()
	set := map[uint64]struct{}{}
	for _, c := range wanted {
		set[c] = struct{}{}
	}
	var dumps []Dump
	ns.With(t).Do(func() error {
		dumps = ReadAll(ctx, set, unix.IPPROTO_TCP)
		return nil
	})
	if len(dumps) != 1+len(wanted) || dumps[0].Path != "" {
		t.Fatalf("got %d dumps, first of %q; expected the own one and %d others", len(dumps), dumps[0].Path, len(wanted))
	}
	return dumps
}

// A namespace is found by the process that is in it, and the rest of the
// machine is left alone.
func TestOtherNamespaceByProcess(t *testing.T) {
	own, other := kerneltest.NewNetns(t), kerneltest.NewNetns(t)
	mine, theirs := newPair(t, own, "tcp4", "127.0.0.1", "127.0.0.1"), newPair(t, other, "tcp4", "127.0.0.1", "127.0.0.1")
	proc := wait(t, other)
	netns := cookie(t, theirs.client, unix.SO_NETNS_COOKIE)

	dumps := readAll(t, own, context.Background(), netns)
	if _, ok := complete(t, dumps[0]).Sockets[cookie(t, mine.client, unix.SO_COOKIE)]; !ok {
		t.Errorf("own socket is not among %d", len(dumps[0].Sockets))
	}
	d := complete(t, dumps[1])
	if _, ok := d.Sockets[cookie(t, theirs.client, unix.SO_COOKIE)]; !ok {
		t.Errorf("socket of the other namespace is not among %d", len(d.Sockets))
	}
	if want := fmt.Sprintf("/proc/%d/ns/net", proc.Process.Pid); d.Cookie != netns || d.Path != want {
		t.Errorf("got namespace %+v, expected cookie %d by %s", d.Namespace, netns, want)
	}
	if _, ok := d.Sockets[cookie(t, mine.client, unix.SO_COOKIE)]; ok {
		t.Error("own socket is listed in the other namespace")
	}
}

// Entering leaves no thread of ours behind.
func TestThreadsComeHome(t *testing.T) {
	own := kerneltest.NewNetns(t)
	var inode uint64
	other := kerneltest.NewNetns(t)
	p := newPair(t, other, "tcp4", "127.0.0.1", "127.0.0.1")
	wait(t, other)
	other.Do(func() (err error) {
		if inode, err = linkInode("/proc/thread-self/ns/net"); err != nil {
			return err
		}
		return unix.Unshare(unix.CLONE_NEWNET) // only the process stays
	})
	netns := cookie(t, p.client, unix.SO_NETNS_COOKIE)
	for range 10 {
		if d := complete(t, readAll(t, own, context.Background(), netns)[1]); d.Inode != inode {
			t.Fatalf("inode %d, expected %d", d.Inode, inode)
		}
	}
	for tid := range numbered("/proc/self/task") {
		if in, err := linkInode(filepath.Join("/proc/self/task", tid, "ns/net")); err == nil && in == inode {
			t.Errorf("thread %s was left in the other namespace", tid)
		}
	}
}

// A namespace that only a thread of some process is in.
func TestOtherNamespaceByThread(t *testing.T) {
	own, other := kerneltest.NewNetns(t), kerneltest.NewNetns(t)
	p := newPair(t, other, "tcp4", "127.0.0.1", "127.0.0.1")
	d := complete(t, readAll(t, own, context.Background(), cookie(t, p.client, unix.SO_NETNS_COOKIE))[1])
	if _, ok := d.Sockets[cookie(t, p.client, unix.SO_COOKIE)]; !ok {
		t.Errorf("socket is not among %d", len(d.Sockets))
	}
}

// A namespace that no process and no thread is in has live sockets all the
// same. It is read through a bind mount, or else through one of the sockets. When
// both are gone it is reported as unreachable, never as empty.
func TestNamespaceWithoutProcess(t *testing.T) {
	for _, mounted := range []bool{true, false} {
		t.Run(fmt.Sprintf("mounted=%v", mounted), func(t *testing.T) {
			own, other := kerneltest.NewNetns(t), kerneltest.NewNetns(t)
			p := newPair(t, other, "tcp4", "127.0.0.1", "127.0.0.1")
			netns := cookie(t, p.client, unix.SO_NETNS_COOKIE)

			at := filepath.Join(t.TempDir(), "a name space") // mountinfo escapes the blanks
			if err := os.WriteFile(at, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			own.Do(privateMounts)
			if mounted {
				var link string
				other.Do(func() error {
					link = fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), unix.Gettid())
					return nil
				})
				own.Do(func() error { return os.NewSyscallError("mount", unix.Mount(link, at, "", unix.MS_BIND, "")) })
			}
			other.Do(func() error { return unix.Unshare(unix.CLONE_NEWNET) }) // nobody is in it any more

			d := readAll(t, own, context.Background(), netns)[1]
			complete(t, d)
			by := d.Path == at
			if !mounted {
				by = strings.HasPrefix(d.Path, fmt.Sprintf("/proc/%d/fd/", os.Getpid()))
			}
			if _, ok := d.Sockets[cookie(t, p.client, unix.SO_COOKIE)]; !ok || !by {
				t.Errorf("socket found %v by %q, expected it by the mount %q or a socket", ok, d.Path, at)
			}
			if mounted {
				return
			}
			// A socket that was seen in a namespace leads to no other, and is not looked at
			// again; those that were not are.
			known := newPair(t, own, "tcp4", "127.0.0.1", "127.0.0.1")
			found := map[uint64]bool{}
			own.Do(func() error {
				dumps, _ := ReadEvery(context.Background(), unix.IPPROTO_TCP) // not all are ours to look at
				for _, d := range dumps {
					for c := range d.Sockets {
						found[c] = true
					}
				}
				return nil
			})
			for _, s := range []*net.TCPConn{known.client, p.client} {
				if !found[cookie(t, s, unix.SO_COOKIE)] {
					t.Errorf("a socket is not among the %d of all namespaces", len(found))
				}
			}
			p.client.Close()
			p.server.Close()
			if d := readAll(t, own, context.Background(), netns)[1]; d.Complete || !errors.Is(d.Err, ErrUnreachable) || d.Cookie != netns {
				t.Errorf("cookie %d, complete %v, error %v; expected %d to be unreachable", d.Cookie, d.Complete, d.Err, netns)
			}
		})
	}
}

func privateMounts() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	return os.NewSyscallError("mount", unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
}

// A path that has come to lead elsewhere is not read in the place of the
// namespace that it was listed for.
func TestPathLeadsElsewhere(t *testing.T) {
	ns := kerneltest.NewNetns(t)
	proc := wait(t, ns)
	for _, path := range []string{"", fmt.Sprintf("/proc/%d/ns/net", proc.Process.Pid), "/proc/0/ns/net", "/dev/null"} {
		d := Read(context.Background(), Namespace{Cookie: 1 << 60, Path: path}, unix.IPPROTO_TCP)
		if d.Complete || len(d.Sockets) != 0 || !errors.Is(d.Err, ErrUnreachable) {
			t.Errorf("%q: complete %v, %d sockets, error %v; expected it to be unreachable", path, d.Complete, len(d.Sockets), d.Err)
		}
	}
}

func TestNamespaces(t *testing.T) {
	own, other := kerneltest.NewNetns(t), kerneltest.NewNetns(t)
	wait(t, other)
	wait(t, other)
	var all []Namespace
	own.Do(func() error {
		var err error
		all, err = Namespaces()
		if errors.Is(err, os.ErrPermission) {
			t.Logf("some could not be looked at: %v", err)
			return nil
		}
		return err
	})
	var inode uint64
	other.Do(func() (err error) {
		inode, err = linkInode("/proc/thread-self/ns/net")
		return err
	})
	if all[0].Path != "" {
		t.Errorf("first is %+v, expected the own one", all[0])
	}
	seen, cookies := map[uint64]int{}, map[uint64]int{}
	for _, ns := range all {
		seen[ns.Inode]++
		cookies[ns.Cookie]++
		if seen[ns.Inode] > 1 || cookies[ns.Cookie] > 1 || ns.Cookie == 0 {
			t.Errorf("got %+v twice or without a cookie in %+v", ns, all)
		}
	}
	if seen[inode] != 1 {
		t.Errorf("namespace %d is not among %+v", inode, all)
	}
}
