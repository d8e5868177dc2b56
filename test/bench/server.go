package main

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// Ports of the servers, all on 127.0.0.1.
const (
	connectPort  = 9001 // the worker accepts itself
	bulkPort     = 9002
	echoPort     = 9003
	datagramPort = 9004
	httpPort     = 9005
	heldPort     = 9006 // nobody: datagram sockets are only connected to it
)

// server is a thread that serves one client after the other, on the CPU that the worker is
// on: what both need together is what is measured, and no wake-up crosses CPUs.
type server struct {
	tid int
	fd  int
}

// cpu is the processor time that the server has used, in nanoseconds.
func (s *server) cpu() int64 { return processorTime(threadClock(s.tid)) }

// end makes the server's calls fail. It may still hold its port for a moment.
func (s *server) end() {
	syscall.Shutdown(s.fd, syscall.SHUT_RDWR)
}

// startServer serves connections, or datagrams where accepting is nil, until fd is shut.
func startServer(kind, port int, serve func(fd int, buffer []byte)) (*server, error) {
	fd, err := listening(kind, port)
	if err != nil {
		return nil, err
	}
	s := &server{fd: fd}
	started := make(chan error)
	go func() {
		err := pin()
		s.tid = unix.Gettid()
		started <- err
		defer syscall.Close(fd)
		buffer := make([]byte, 64<<10)
		if kind == syscall.SOCK_DGRAM {
			serve(fd, buffer)
			return
		}
		for {
			c, _, err := syscall.Accept4(fd, syscall.SOCK_CLOEXEC)
			if err != nil {
				return
			}
			serve(c, buffer)
			syscall.Close(c)
		}
	}()
	return s, <-started
}

// sink reads to the end.
func sink(fd int, buffer []byte) {
	for {
		if n, err := syscall.Read(fd, buffer); n <= 0 || err != nil {
			return
		}
	}
}

// echo answers each request with its own bytes.
func echo(fd int, buffer []byte) {
	syscall.SetsockoptInt(fd, syscall.IPPROTO_TCP, syscall.TCP_NODELAY, 1)
	for {
		n, err := syscall.Read(fd, buffer)
		if n <= 0 || err != nil {
			return
		}
		if _, err := syscall.Write(fd, buffer[:n]); err != nil {
			return
		}
	}
}

// acknowledge answers every window-th datagram.
func acknowledge(fd int, buffer []byte) {
	for i := 1; ; i++ {
		n, from, err := syscall.Recvfrom(fd, buffer, 0)
		if err != nil {
			return
		}
		if i%window == 0 {
			syscall.Sendto(fd, buffer[:n], 0, from)
		}
	}
}

func listening(kind, port int) (int, error) {
	fd, err := syscall.Socket(syscall.AF_INET, kind|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	if err := syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1); err != nil {
		return -1, err
	}
	if err := syscall.Bind(fd, loopbackAt(port)); err != nil {
		return -1, fmt.Errorf("bind port %d: %w", port, err)
	}
	if kind == syscall.SOCK_STREAM {
		if err := syscall.Listen(fd, 16); err != nil {
			return -1, fmt.Errorf("listen on port %d: %w", port, err)
		}
	}
	return fd, nil
}

// startHTTP starts a process that serves HTTP, on the last CPU as all servers.
func startHTTP() (pid int, stop func(), err error) {
	cmd := exec.Command("/proc/self/exe", "pinned", "/proc/self/exe", "http")
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 0, nil, err
	}
	if err := cmd.Start(); err != nil {
		return 0, nil, err
	}
	stop = func() {
		cmd.Process.Kill()
		cmd.Wait()
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		stop()
		return 0, nil, fmt.Errorf("http server: %q, %w", line, err)
	}
	return cmd.Process.Pid, stop, nil
}

// serveHTTP is its own side: a small page, with connections that stay open.
func serveHTTP([]string) error {
	l, err := net.Listen("tcp4", fmt.Sprintf("127.0.0.1:%d", httpPort))
	if err != nil {
		return err
	}
	fmt.Println("ready")
	page := make([]byte, 256)
	return http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Write(page) }))
}

// pinned becomes a command with all its threads on the last CPU, which execve(2) keeps.
func pinned(args []string) error {
	path, err := exec.LookPath(args[0])
	if err != nil {
		return err
	}
	if err := pin(); err != nil {
		return err
	}
	return syscall.Exec(path, args, os.Environ())
}
