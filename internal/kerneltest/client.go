package kerneltest

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// Kind is a kind of socket.
type Kind string

// The kinds. An IPv4-mapped address ("[::ffff:127.0.0.1]:80") is one of TCP6 or UDP6.
const (
	TCP4   Kind = "tcp4"
	TCP6   Kind = "tcp6"
	UDP4   Kind = "udp4"
	UDP6   Kind = "udp6"
	MPTCP4 Kind = "mptcp4"
)

// Client is a process in a cgroup. Its methods do one system call each unless they say
// otherwise, return its errno (0 is success), and fail the test if the process cannot
// be talked to. One goroutine at a time may use it. It ends with the test.
type Client struct {
	PID int

	t    testing.TB
	cmd  *exec.Cmd
	in   *os.File
	out  *os.File
	read *bufio.Reader
	over bool
}

// Result is one of many connects.
type Result struct {
	FD    int
	Errno syscall.Errno
}

type request struct {
	Op    string   `json:"op"`
	FD    int      `json:"fd,omitempty"`
	FDs   []int    `json:"fds,omitempty"`
	Kind  Kind     `json:"kind,omitempty"`
	Addr  string   `json:"addr,omitempty"`
	Addrs []string `json:"addrs,omitempty"`
	N     int      `json:"n,omitempty"`
	Size  int      `json:"size,omitempty"`
	PID   int      `json:"pid,omitempty"`
	Name  string   `json:"name,omitempty"`

	Level  int `json:"level,omitempty"`
	Option int `json:"option,omitempty"`
}

type response struct {
	Errno   syscall.Errno         `json:"errno,omitempty"`
	FD      int                   `json:"fd,omitempty"`
	PID     int                   `json:"pid,omitempty"`
	Addr    string                `json:"addr,omitempty"`
	N       int                   `json:"n,omitempty"`
	Results []Result              `json:"results,omitempty"`
	Counts  map[syscall.Errno]int `json:"counts,omitempty"`
	Fault   string                `json:"fault,omitempty"` // of the request, not of the system call
}

// Start starts a client inside a cgroup: it is never anywhere else (clone3 with
// CLONE_INTO_CGROUP). It is in the network namespace of the calling thread.
func (e *Env) Start(in Cgroup) *Client {
	e.t.Helper()
	c, err := startClient(e.t, in)
	if err != nil {
		e.t.Fatalf("start a client in %s: %v", in.Path, err)
	}
	e.t.Cleanup(c.Kill)
	return c
}

// StartIn is Start in another network namespace.
func (e *Env) StartIn(ns *Netns, in Cgroup) *Client {
	e.t.Helper()
	var c *Client
	ns.Do(func() (err error) {
		c, err = startClient(e.t, in)
		return err
	})
	e.t.Cleanup(c.Kill)
	return c
}

func startClient(t testing.TB, in Cgroup) (*Client, error) {
	dir, err := os.Open(in.Path)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	stdin, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer stdin.Close()
	r, stdout, err := os.Pipe()
	if err != nil {
		w.Close()
		return nil, err
	}
	defer stdout.Close()
	c := &Client{t: t, in: w, out: r, read: bufio.NewReader(r), cmd: exec.Command("/proc/self/exe")}
	// A signal that asks a goroutine to yield would interrupt system calls.
	c.cmd.Env = append(os.Environ(), roleVar+"="+roleClient, "GODEBUG=asyncpreemptoff=1")
	c.cmd.Stdin, c.cmd.Stdout, c.cmd.Stderr = stdin, stdout, os.Stderr
	c.cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	if err := c.cmd.Start(); err != nil {
		w.Close()
		r.Close()
		return nil, err
	}
	c.PID = c.cmd.Process.Pid
	return c, nil
}

// Kill ends the client with SIGKILL and waits until it is gone.
func (c *Client) Kill() {
	if c.over {
		return
	}
	c.over = true
	c.cmd.Process.Kill()
	c.cmd.Wait()
	c.in.Close()
	c.out.Close()
}

func (c *Client) call(q request) response {
	c.t.Helper()
	b, err := json.Marshal(q)
	if err == nil {
		_, err = c.in.Write(append(b, '\n'))
	}
	if err != nil {
		c.t.Fatalf("client %d: %s: %v", c.PID, q.Op, err)
	}
	c.out.SetReadDeadline(time.Now().Add(patience))
	line, err := c.read.ReadBytes('\n')
	var a response
	if err == nil {
		err = json.Unmarshal(line, &a)
	}
	if err != nil {
		c.t.Fatalf("client %d: answer to %s: %v", c.PID, q.Op, err)
	}
	if a.Fault != "" {
		c.t.Fatalf("client %d: %s: %s", c.PID, q.Op, a.Fault)
	}
	return a
}

// must is for calls that can only fail if the test is wrong.
func (c *Client) must(q request) response {
	c.t.Helper()
	a := c.call(q)
	if a.Errno != 0 {
		c.t.Fatalf("client %d: %s: %v", c.PID, q.Op, a.Errno)
	}
	return a
}

// Socket makes a blocking socket. SocketErrno is for kinds that a kernel may lack.
func (c *Client) Socket(kind Kind) int {
	c.t.Helper()
	return c.must(request{Op: "socket", Kind: kind}).FD
}

// SocketErrno is Socket that may fail.
func (c *Client) SocketErrno(kind Kind) (int, syscall.Errno) {
	c.t.Helper()
	a := c.call(request{Op: "socket", Kind: kind})
	return a.FD, a.Errno
}

// Connect connects a socket.
func (c *Client) Connect(fd int, addr string) syscall.Errno {
	c.t.Helper()
	return c.call(request{Op: "connect", FD: fd, Addr: addr}).Errno
}

// Dial makes a socket and connects it. The socket is open whatever the errno.
func (c *Client) Dial(kind Kind, addr string) (int, syscall.Errno) {
	c.t.Helper()
	fd := c.Socket(kind)
	return fd, c.Connect(fd, addr)
}

// MustDial is Dial that must succeed.
func (c *Client) MustDial(kind Kind, addr string) int {
	c.t.Helper()
	fd, errno := c.Dial(kind, addr)
	if errno != 0 {
		c.t.Fatalf("client %d: connect to %s: %v", c.PID, addr, errno)
	}
	return fd
}

// Disconnect is connect() with AF_UNSPEC.
func (c *Client) Disconnect(fd int) syscall.Errno {
	c.t.Helper()
	return c.call(request{Op: "disconnect", FD: fd}).Errno
}

// Burst makes n sockets and connects them at the same moment, each from a thread of
// its own.
func (c *Client) Burst(kind Kind, addr string, n int) []Result {
	c.t.Helper()
	return c.must(request{Op: "burst", Kind: kind, Addr: addr, N: n}).Results
}

// Probe makes a socket for each address, connects and closes it.
func (c *Client) Probe(kind Kind, addrs []string) []syscall.Errno {
	c.t.Helper()
	var all []syscall.Errno
	for _, r := range c.must(request{Op: "probe", Kind: kind, Addrs: addrs}).Results {
		all = append(all, r.Errno)
	}
	return all
}

// Storm starts n threads that make sockets, connect and close them without pause until
// Calm. Most close by a RST, so that ports do not run out.
func (c *Client) Storm(kind Kind, addr string, n int) {
	c.t.Helper()
	c.must(request{Op: "storm", Kind: kind, Addr: addr, N: n})
}

// Hammer starts n threads that each connect one socket again and again until Calm, as
// only works where every connect fails; UDP threads share a socket and send.
func (c *Client) Hammer(kind Kind, n int, addrs ...string) {
	c.t.Helper()
	c.must(request{Op: "hammer", Kind: kind, Addrs: addrs, N: n})
}

// Calm ends the storm and returns how often its connects returned which errno.
func (c *Client) Calm() map[syscall.Errno]int {
	c.t.Helper()
	return c.must(request{Op: "calm"}).Counts
}

// Close closes descriptors.
func (c *Client) Close(fds ...int) {
	c.t.Helper()
	c.must(request{Op: "close", FDs: fds})
}

// Reset closes a TCP socket with SO_LINGER 0: by a RST.
func (c *Client) Reset(fd int) {
	c.t.Helper()
	c.must(request{Op: "reset", FD: fd})
}

// Shutdown shuts both directions down.
func (c *Client) Shutdown(fd int) {
	c.t.Helper()
	c.must(request{Op: "shutdown", FD: fd})
}

// CloseWrite shuts the sending direction down.
func (c *Client) CloseWrite(fd int) {
	c.t.Helper()
	c.must(request{Op: "close write", FD: fd})
}

// Option sets an option of a socket to a number.
func (c *Client) Option(fd, level, option, value int) {
	c.t.Helper()
	c.must(request{Op: "option", FD: fd, Level: level, Option: option, N: value})
}

// Receive reads at most size bytes: 0 without an errno is the end of what the peer sends.
func (c *Client) Receive(fd, size int) (int, syscall.Errno) {
	c.t.Helper()
	a := c.call(request{Op: "receive", FD: fd, Size: size})
	return a.N, a.Errno
}

// FastOpen connects and sends size bytes in one call, sendto(2) with MSG_FASTOPEN.
func (c *Client) FastOpen(fd int, addr string, size int) syscall.Errno {
	c.t.Helper()
	return c.call(request{Op: "fast open", FD: fd, Addr: addr, Size: size}).Errno
}

// NonBlocking sets O_NONBLOCK.
func (c *Client) NonBlocking(fd int) {
	c.t.Helper()
	c.must(request{Op: "nonblocking", FD: fd})
}

// Bind binds a socket.
func (c *Client) Bind(fd int, addr string) {
	c.t.Helper()
	c.must(request{Op: "bind", FD: fd, Addr: addr})
}

// Listen listens on a bound socket and returns its address.
func (c *Client) Listen(fd int) string {
	c.t.Helper()
	return c.must(request{Op: "listen", FD: fd}).Addr
}

// Accept accepts a connection and returns its descriptor.
func (c *Client) Accept(fd int) int {
	c.t.Helper()
	return c.must(request{Op: "accept", FD: fd}).FD
}

// SendTo sends a datagram of size bytes; without an address to the one connected to.
func (c *Client) SendTo(fd int, addr string, size int) syscall.Errno {
	c.t.Helper()
	return c.call(request{Op: "sendto", FD: fd, Addr: addr, Size: size}).Errno
}

// Upload writes size zeros.
func (c *Client) Upload(fd, size int) {
	c.t.Helper()
	c.must(request{Op: "upload", FD: fd, Size: size})
}

// Download reads size bytes.
func (c *Client) Download(fd, size int) {
	c.t.Helper()
	c.must(request{Op: "download", FD: fd, Size: size})
}

// Exchange writes size bytes and reads as many, n times.
func (c *Client) Exchange(fd, n, size int) {
	c.t.Helper()
	c.must(request{Op: "exchange", FD: fd, N: n, Size: size})
}

// Dup duplicates a descriptor.
func (c *Client) Dup(fd int) int {
	c.t.Helper()
	return c.must(request{Op: "dup", FD: fd}).FD
}

// Fork starts a child of the client that inherits fd and only holds it.
func (c *Client) Fork(fd int) (pid int) {
	c.t.Helper()
	return c.must(request{Op: "fork", FD: fd}).PID
}

// Reap ends a child that Fork started.
func (c *Client) Reap(pid int) {
	c.t.Helper()
	c.must(request{Op: "reap", PID: pid})
}

// Take is how another client's descriptor gets here, as if it had been passed over a
// Unix socket (pidfd_getfd(2)).
func (c *Client) Take(from *Client, fd int) int {
	c.t.Helper()
	return c.must(request{Op: "take", PID: from.PID, FD: fd}).FD
}

// Stray makes a socket in a new network namespace that no process and no thread is in,
// with loopback up.
func (c *Client) Stray(kind Kind) int {
	c.t.Helper()
	return c.must(request{Op: "stray", Kind: kind}).FD
}

func (r Result) String() string { return fmt.Sprintf("fd %d: %v", r.FD, r.Errno) }
