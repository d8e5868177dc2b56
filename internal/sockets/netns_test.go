package sockets

import (
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestMain lets the test binary stand in for a process in another namespace:
// it says that it runs and waits until its standard input ends.
func TestMain(m *testing.M) {
	if os.Getenv("SOCKETS_TEST_WAIT") != "" {
		os.Stdout.WriteString("here")
		io.Copy(io.Discard, os.Stdin)
		return
	}
	os.Exit(m.Run())
}

// thread runs functions on one operating system thread of its own, which ends
// with the test: it may enter namespaces and stay there.
type thread chan func()

func newThread(t *testing.T) thread {
	t.Helper()
	th := make(thread)
	go func() {
		runtime.LockOSThread()
		for f := range th {
			f()
		}
	}()
	t.Cleanup(func() { close(th) })
	return th
}

// do runs f on the thread and waits for it. f must not end the test.
func (th thread) do(f func() error) error {
	result := make(chan error)
	th <- func() { result <- f() }
	return <-result
}

// mustDo is do for what the test cannot go on without.
func (th thread) mustDo(t *testing.T, f func() error) {
	t.Helper()
	if err := th.do(f); err != nil {
		t.Fatal(err)
	}
}

// newNetns is a thread in a network namespace of its own, loopback up.
func newNetns(t *testing.T) thread {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("needs root: makes network namespaces")
	}
	th := newThread(t)
	th.mustDo(t, unshareNet)
	return th
}

func unshareNet() error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(lo)
}

// wait starts a process that waits in the thread's namespace until the test
// ends, and returns it once it runs.
func wait(t *testing.T, th thread) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "SOCKETS_TEST_WAIT=1")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	th.mustDo(t, cmd.Start)
	t.Cleanup(func() { in.Close(); cmd.Wait() })
	if _, err := io.ReadFull(out, make([]byte, 4)); err != nil {
		t.Fatalf("waiting process: %v", err)
	}
	return cmd
}

// cookie asks the kernel for the cookie of c or of its namespace.
func cookie(t *testing.T, c syscall.Conn, option int) uint64 {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var n uint64
	var soErr error
	if err := raw.Control(func(fd uintptr) { n, soErr = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, option) }); err != nil {
		t.Fatal(err)
	}
	if soErr != nil {
		t.Fatal(os.NewSyscallError("getsockopt", soErr))
	}
	return n
}

// pair is a connection over loopback, made on the thread.
type pair struct{ client, server *net.TCPConn }

func newPair(t *testing.T, th thread, network, listen, dial string) pair {
	t.Helper()
	var p pair
	th.mustDo(t, func() error {
		l, err := net.Listen("tcp", net.JoinHostPort(listen, "0"))
		if err != nil {
			return err
		}
		defer l.Close()
		_, port, err := net.SplitHostPort(l.Addr().String())
		if err != nil {
			return err
		}
		c, err := net.Dial(network, net.JoinHostPort(dial, port))
		if err != nil {
			return err
		}
		s, err := l.Accept()
		if err != nil {
			return err
		}
		p = pair{client: c.(*net.TCPConn), server: s.(*net.TCPConn)}
		return nil
	})
	t.Cleanup(func() { p.client.Close(); p.server.Close() })
	return p
}
