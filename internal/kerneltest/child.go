package kerneltest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// threads is how many may run at the same time: with fewer than there are in a burst,
// they would go one after the other.
const threads = 128

// child is the state of a client process.
type child struct {
	forks map[int]*fork
	storm *storm
	ring  *ring
	http  *http.Transport
	conns []net.Conn // made by name
}

type fork struct {
	cmd *exec.Cmd
	in  io.Closer
}

// clientMain answers requests until there are no more.
func clientMain() int {
	runtime.GOMAXPROCS(threads)
	c := &child{forks: map[int]*fork{}}
	out := json.NewEncoder(os.Stdout)
	in := bufio.NewReader(os.Stdin)
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return 0 // the test has ended
		}
		var q request
		var a response
		if err = json.Unmarshal(line, &q); err == nil {
			a, err = c.do(q)
		}
		if errno := syscall.Errno(0); errors.As(err, &errno) {
			a.Errno = errno
		} else if err != nil {
			a.Fault = err.Error()
		}
		if out.Encode(a) != nil {
			return 1
		}
	}
}

// holdMain is a process that only has what it inherited.
func holdMain() int {
	os.Stdout.WriteString("here\n")
	io.Copy(io.Discard, os.Stdin)
	return 0
}

func (c *child) do(q request) (a response, err error) {
	switch q.Op {
	case "socket":
		a.FD, err = socket(q.Kind)
	case "connect":
		err = connect(q.FD, q.Addr)
	case "disconnect":
		err = disconnect(q.FD)
	case "burst":
		a.Results, err = burst(q.Kind, q.Addr, q.N)
	case "probe":
		a.Results, err = probe(q.Kind, q.Addrs)
	case "storm":
		c.storm, err = newStorm(q.Kind, q.Addr, q.N)
	case "hammer":
		c.storm, err = newHammer(q.Kind, q.Addrs, q.N)
	case "calm":
		a.Counts = c.storm.end()
	case "close":
		for _, fd := range q.FDs {
			err = errors.Join(err, unix.Close(fd))
		}
	case "reset":
		err = errors.Join(reset(q.FD), unix.Close(q.FD))
	case "shutdown":
		err = unix.Shutdown(q.FD, unix.SHUT_RDWR)
	case "close write":
		err = unix.Shutdown(q.FD, unix.SHUT_WR)
	case "nonblocking":
		err = unix.SetNonblock(q.FD, true)
	case "bind":
		var sa unix.Sockaddr
		if sa, err = sockaddr(q.Addr); err == nil {
			err = unix.Bind(q.FD, sa)
		}
	case "listen":
		if err = unix.Listen(q.FD, unix.SOMAXCONN); err == nil {
			a.Addr, err = localAddr(q.FD)
		}
	case "accept":
		a.FD, _, err = unix.Accept4(q.FD, unix.SOCK_CLOEXEC)
	case "sendto":
		err = sendTo(q.FD, q.Addr, q.Size)
	case "upload":
		err = transfer(unix.Write, q.FD, q.Size)
	case "download":
		err = transfer(unix.Read, q.FD, q.Size)
	case "exchange":
		for i := 0; i < q.N && err == nil; i++ {
			if err = transfer(unix.Write, q.FD, q.Size); err == nil {
				err = transfer(unix.Read, q.FD, q.Size)
			}
		}
	case "dup":
		a.FD, err = unix.FcntlInt(uintptr(q.FD), unix.F_DUPFD_CLOEXEC, 0)
	case "fork":
		a.PID, err = c.fork(q.FD)
	case "reap":
		f := c.forks[q.PID]
		delete(c.forks, q.PID)
		f.in.Close()
		err = f.cmd.Wait()
	case "take":
		a.FD, err = take(q.PID, q.FD)
	case "stray":
		a.FD, err = stray(q.Kind)
	case "option":
		err = unix.SetsockoptInt(q.FD, q.Level, q.Option, q.N)
	case "receive":
		a.N, err = unix.Read(q.FD, make([]byte, q.Size))
	case "fast open":
		err = fastOpen(q.FD, q.Addr, q.Size)
	case "mailbox":
		a.FD, a.Addr, err = mailbox()
	case "post":
		err = post(q.Addr, q.FD)
	case "collect":
		a.FD, err = collect(q.FD)
	case "ring":
		c.ring, err = newRing(q.N)
	case "ring connect":
		err = c.ring.connect(q.FD, q.Addr, Way(q.Name), q.Size)
	case "requests":
		a.N, err = c.requests(q.Name, q.Addr, q.N)
	case "idle":
		c.http.CloseIdleConnections()
	case "dial name":
		a.Addr, err = c.dialName(q.Addr)
	case "look up":
		_, err = net.DefaultResolver.LookupNetIP(context.Background(), "ip", q.Name)
	default:
		err = fmt.Errorf("unknown operation %q", q.Op)
	}
	return a, err
}

func socket(kind Kind) (int, error) {
	domain, typ, proto := unix.AF_INET, unix.SOCK_STREAM, 0
	switch kind {
	case TCP4:
	case TCP6:
		domain = unix.AF_INET6
	case UDP4:
		typ = unix.SOCK_DGRAM
	case UDP6:
		domain, typ = unix.AF_INET6, unix.SOCK_DGRAM
	case MPTCP4:
		proto = unix.IPPROTO_MPTCP
	default:
		return -1, fmt.Errorf("unknown kind of socket %q", kind)
	}
	return unix.Socket(domain, typ|unix.SOCK_CLOEXEC, proto)
}

// sockaddr reads "127.0.0.1:80" or "[fe80::1%lo]:80". An IPv4-mapped address stays IPv6.
func sockaddr(s string) (unix.Sockaddr, error) {
	ap, err := netip.ParseAddrPort(s)
	if err != nil {
		return nil, err
	}
	if ap.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(ap.Port()), Addr: ap.Addr().As4()}, nil
	}
	sa := &unix.SockaddrInet6{Port: int(ap.Port()), Addr: ap.Addr().As16()}
	if zone := ap.Addr().Zone(); zone != "" {
		dev, err := net.InterfaceByName(zone)
		if err != nil {
			return nil, err
		}
		sa.ZoneId = uint32(dev.Index)
	}
	return sa, nil
}

func connect(fd int, addr string) error {
	sa, err := sockaddr(addr)
	if err != nil {
		return err
	}
	return unix.Connect(fd, sa)
}

func disconnect(fd int) error {
	sa := unix.RawSockaddr{Family: unix.AF_UNSPEC}
	return rawConnect(fd, &sa)
}

func localAddr(fd int) (string, error) {
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return "", err
	}
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port)).String(), nil
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), uint16(sa.Port)).String(), nil
	}
	return "", fmt.Errorf("socket of another family: %T", sa)
}

func sendTo(fd int, addr string, size int) error {
	if addr == "" {
		_, err := unix.Write(fd, make([]byte, size))
		return err
	}
	sa, err := sockaddr(addr)
	if err != nil {
		return err
	}
	return unix.Sendto(fd, make([]byte, size), 0, sa)
}

func transfer(call func(int, []byte) (int, error), fd, size int) error {
	b := make([]byte, min(size, 64<<10))
	for size > 0 {
		n, err := call(fd, b[:min(size, len(b))])
		if err != nil {
			return err
		}
		if n == 0 {
			return io.ErrUnexpectedEOF
		}
		size -= n
	}
	return nil
}

func reset(fd int) error {
	return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
}

// burst lets n threads wait for the end of one pipe, so that the kernel wakes them all
// at once.
func burst(kind Kind, addr string, n int) ([]Result, error) {
	if n > threads {
		return nil, fmt.Errorf("at most %d at once", threads)
	}
	sa, err := sockaddr(addr)
	if err != nil {
		return nil, err
	}
	var gate [2]int
	if err := unix.Pipe2(gate[:], unix.O_CLOEXEC); err != nil {
		return nil, fmt.Errorf("pipe: %v", err)
	}
	defer unix.Close(gate[0])
	results := make([]Result, n)
	faults := make([]error, n)
	var ready, done sync.WaitGroup
	ready.Add(n)
	for i := range n {
		done.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			fd, err := socket(kind)
			ready.Done()
			if err != nil {
				faults[i] = err
				return
			}
			unix.Read(gate[0], make([]byte, 1))
			results[i] = Result{fd, errnoOf(unix.Connect(fd, sa))}
		})
	}
	ready.Wait()
	unix.Close(gate[1])
	done.Wait()
	if err := errors.Join(faults...); err != nil {
		return nil, fmt.Errorf("socket: %v", err)
	}
	return results, nil
}

func probe(kind Kind, addrs []string) ([]Result, error) {
	var results []Result
	for _, addr := range addrs {
		fd, err := socket(kind)
		if err != nil {
			return nil, fmt.Errorf("socket: %v", err)
		}
		sa, err := sockaddr(addr)
		if err != nil {
			return nil, err
		}
		results = append(results, Result{Errno: errnoOf(unix.Connect(fd, sa))})
		unix.Close(fd)
	}
	return results, nil
}

func errnoOf(err error) syscall.Errno {
	var errno syscall.Errno
	errors.As(err, &errno)
	return errno
}

type storm struct {
	over    atomic.Bool
	threads sync.WaitGroup
	mu      sync.Mutex
	counts  map[syscall.Errno]int
	fds     []int // closed at its end
}

func newStorm(kind Kind, addr string, n int) (*storm, error) {
	sa, err := sockaddr(addr)
	if err != nil {
		return nil, err
	}
	s := &storm{counts: map[syscall.Errno]int{}}
	for range n {
		s.thread(func(i int) error {
			fd, err := socket(kind)
			if err != nil {
				return err
			}
			err = unix.Connect(fd, sa)
			if i%16 != 0 {
				reset(fd)
			}
			unix.Close(fd)
			return err
		})
	}
	return s, nil
}

func newHammer(kind Kind, addrs []string, n int) (*storm, error) {
	var all []unix.Sockaddr
	for _, addr := range addrs {
		sa, err := sockaddr(addr)
		if err != nil {
			return nil, err
		}
		all = append(all, sa)
	}
	s := &storm{counts: map[syscall.Errno]int{}}
	shared, err := socket(kind)
	if err != nil {
		return nil, fmt.Errorf("socket: %v", err)
	}
	s.fds = append(s.fds, shared)
	for t := range n {
		if kind == UDP4 || kind == UDP6 {
			s.thread(func(i int) error { return unix.Sendto(shared, []byte("x"), unix.MSG_DONTWAIT, all[(t+i)%len(all)]) })
			continue
		}
		fd, err := socket(kind)
		if err != nil {
			return nil, fmt.Errorf("socket: %v", err)
		}
		s.fds = append(s.fds, fd)
		s.thread(func(i int) error { return unix.Connect(fd, all[(t+i)%len(all)]) })
	}
	return s, nil
}

// thread does something again and again and counts what it returns.
func (s *storm) thread(do func(i int) error) {
	s.threads.Go(func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		counts := map[syscall.Errno]int{}
		for i := 0; !s.over.Load(); i++ {
			counts[errnoOf(do(i))]++
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		for errno, n := range counts {
			s.counts[errno] += n
		}
	})
}

func (s *storm) end() map[syscall.Errno]int {
	s.over.Store(true)
	s.threads.Wait()
	for _, fd := range s.fds {
		unix.Close(fd)
	}
	return s.counts
}

func (c *child) fork(fd int) (int, error) {
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	file := os.NewFile(uintptr(dup), "held")
	defer file.Close()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleVar+"="+roleHold)
	cmd.ExtraFiles = []*os.File{file}
	in, err := cmd.StdinPipe()
	if err != nil {
		return 0, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("fork: %v", err)
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		return 0, fmt.Errorf("fork: %v", err)
	}
	c.forks[cmd.Process.Pid] = &fork{cmd, in}
	return cmd.Process.Pid, nil
}

func take(pid, fd int) (int, error) {
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(pidfd)
	return unix.PidfdGetfd(pidfd, fd, 0)
}

// stray makes a socket from a thread that ends with its namespace.
func stray(kind Kind) (fd int, err error) {
	done := make(chan struct{})
	onThread(func() {
		defer close(done)
		if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return
		}
		if err = loopback(); err != nil {
			return
		}
		fd, err = socket(kind)
	})
	<-done
	return fd, err
}

// rawConnect is connect() with an address that unix.Sockaddr cannot express.
func rawConnect(fd int, sa *unix.RawSockaddr) error {
	_, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(sa)), unsafe.Sizeof(*sa))
	if errno != 0 {
		return errno
	}
	return nil
}
