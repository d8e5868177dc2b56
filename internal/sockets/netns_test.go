package sockets

import (
	"io"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
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

// wait starts a process that waits in the namespace until the test
// ends, and returns it once it runs.
func wait(t *testing.T, ns *kerneltest.Netns) *exec.Cmd {
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
	ns.With(t).Do(cmd.Start)
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

// pair is a connection over loopback, made in the namespace.
type pair struct{ client, server *net.TCPConn }

func newPair(t *testing.T, ns *kerneltest.Netns, network, listen, dial string) pair {
	t.Helper()
	var p pair
	ns.With(t).Do(func() error {
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
