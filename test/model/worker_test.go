package model

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/conn"
)

const (
	roleVar    = "BULKHEAD_MODEL"
	roleWorker = "worker"
	roleCopy   = "copy"
	roleChurn  = "churn"
	roleMany   = "many"
)

// lanes is how many threads of a worker do operations, descs how many descriptors each
// has a name for.
const (
	lanes = 3
	descs = 8
)

// waitMillis is how long ConnectWait waits.
const waitMillis = 50

// call is an operation as it is sent to a worker; answer is what came of it.
type call struct {
	Op
	nonblock bool
}

type answer struct {
	errno  syscall.Errno
	cookie uint64 // Open, Accept
	pid    int    // Fork; Storm: refusals with EAGAIN or EPERM
}

const (
	callBytes   = 12
	answerBytes = 16
)

func (c call) encode() []byte {
	b := []byte{byte(c.Kind), c.W, c.L, c.D, c.W2, c.L2, c.D2, byte(c.Sock), c.Dest, c.Arg, 0, 0}
	if c.nonblock {
		b[10] = 1
	}
	return b
}

func decodeCall(b []byte) call {
	return call{Op{Kind(b[0]), b[1], b[2], b[3], b[4], b[5], b[6], Sock(b[7]), b[8], b[9]}, b[10] == 1}
}

// fault is the errno of an operation that the worker itself could not do.
const fault = syscall.Errno(9999)

// table is a worker's descriptors.
type table [lanes][descs]int

// workerMain does operations until there are no more.
func workerMain() int {
	// A signal that asks a goroutine to yield would interrupt system calls.
	fds := &table{}
	var threads [lanes]chan call
	var write sync.Mutex
	for l := range lanes {
		threads[l] = make(chan call, 1)
		go func() {
			runtime.LockOSThread()
			for c := range threads[l] {
				a := fds.do(c)
				b := binary.LittleEndian.AppendUint64([]byte{byte(l), 0}, a.cookie)
				b = binary.LittleEndian.AppendUint16(b, uint16(a.errno))
				b = binary.LittleEndian.AppendUint32(b, uint32(a.pid))
				write.Lock()
				os.Stdout.Write(b)
				write.Unlock()
			}
		}()
	}
	b := make([]byte, callBytes)
	for {
		if _, err := io.ReadFull(os.Stdin, b); err != nil {
			return 0 // the test has ended
		}
		c := decodeCall(b)
		l := c.L
		if c.Kind == Pass && c.Arg == 1 {
			l = c.L2 // the end that takes it
		}
		threads[l] <- c
	}
}

// post is the descriptor that every worker inherits: one pair of sockets for all, one
// end to send a descriptor and one to take it.
const post = 3

func (t *table) do(c call) (a answer) {
	fd := &t[c.L][c.D]
	var err error
	switch c.Kind {
	case Open:
		if *fd, err = newSocket(c.Sock); err == nil {
			a.cookie, err = unix.GetsockoptUint64(*fd, unix.SOL_SOCKET, unix.SO_COOKIE)
		}
	case Connect, ConnectWait:
		if err = unix.SetNonblock(*fd, c.nonblock); err != nil {
			return answer{errno: fault}
		}
		err = connect(*fd, c.Op)
		if c.Kind == ConnectWait && errors.Is(err, unix.EINPROGRESS) {
			unix.Poll([]unix.PollFd{{Fd: int32(*fd), Events: unix.POLLOUT}}, waitMillis)
			if err = connect(*fd, c.Op); errors.Is(err, unix.EALREADY) {
				err = unix.EINPROGRESS
			}
		}
	case Sendto:
		err = unix.Sendto(*fd, []byte("x"), 0, address(c.Op))
	case Unspec:
		err = disconnect(*fd)
	case Shutdown:
		err = unix.Shutdown(*fd, unix.SHUT_RDWR)
	case Close:
		err = unix.Close(*fd)
	case Reset:
		err = errors.Join(unix.SetsockoptLinger(*fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}), unix.Close(*fd))
	case Bind:
		err = unix.Bind(*fd, anyAddress(c.Sock))
	case Listen:
		if err = unix.Bind(*fd, anyAddress(c.Sock)); err == nil {
			err = unix.Listen(*fd, 8)
		}
	case Accept:
		var accepted int
		if accepted, err = accept(*fd, c.Sock); err == nil {
			t[c.L2][c.D2] = accepted
			a.cookie, err = unix.GetsockoptUint64(accepted, unix.SOL_SOCKET, unix.SO_COOKIE)
		}
	case Dup:
		t[c.L2][c.D2], err = unix.FcntlInt(uintptr(*fd), unix.F_DUPFD_CLOEXEC, 0)
	case Pass:
		if c.Arg == 0 {
			err = unix.Sendmsg(post, []byte("x"), unix.UnixRights(*fd), nil, 0)
			break
		}
		t[c.L2][c.D2], err = receive()
	case Fork:
		a.pid, err = fork(*fd)
	case Storm:
		a.pid, err = storm(c)
	default:
		return answer{errno: fault}
	}
	if err != nil && !errors.As(err, &a.errno) {
		fmt.Fprintf(os.Stderr, "worker: %s: %v\n", c.Op, err)
		a.errno = fault
	}
	return a
}

func newSocket(s Sock) (int, error) {
	domain, typ := unix.AF_INET6, unix.SOCK_STREAM
	if s == TCP4 || s == UDP4 {
		domain = unix.AF_INET
	}
	if s.udp() {
		typ = unix.SOCK_DGRAM
	}
	return unix.Socket(domain, typ|unix.SOCK_CLOEXEC, 0)
}

// address is where an operation goes, in the form that its socket has addresses.
func address(o Op) unix.Sockaddr {
	d := dests[o.Dest].Addr
	if d.Addr().Is4() && (o.Sock == TCP4 || o.Sock == UDP4 || o.Sock == UDPMapped && o.Arg == 1) {
		return &unix.SockaddrInet4{Port: int(d.Port()), Addr: d.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(d.Port()), Addr: d.Addr().As16()}
}

func anyAddress(s Sock) unix.Sockaddr {
	if s == TCP4 || s == UDP4 {
		return &unix.SockaddrInet4{}
	}
	return &unix.SockaddrInet6{}
}

// disconnect is connect() with AF_UNSPEC.
func disconnect(fd int) error {
	sa := unix.RawSockaddr{Family: unix.AF_UNSPEC}
	_, _, e := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&sa)), unsafe.Sizeof(sa))
	if e != 0 {
		return e
	}
	return nil
}

func connect(fd int, o Op) error { return unix.Connect(fd, address(o)) }

// accept connects to the listener from a socket that is closed at once. Its address is
// nobody's.
func accept(listener int, s Sock) (int, error) {
	sa, err := unix.Getsockname(listener)
	if err != nil {
		return -1, err
	}
	var peer unix.Sockaddr
	domain := unix.AF_INET
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		peer = &unix.SockaddrInet4{Port: sa.Port, Addr: [4]byte{127, 3, 0, 1}}
	case *unix.SockaddrInet6:
		domain = unix.AF_INET6
		peer = &unix.SockaddrInet6{Port: sa.Port, Addr: [16]byte{0xfd, 0, 0, 3, 15: 1}}
	}
	client, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(client)
	if err := unix.Connect(client, peer); err != nil {
		return -1, err
	}
	fd, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
	return fd, err
}

func receive() (int, error) {
	var data [1]byte
	oob := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(post+1, data[:], oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return -1, err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(messages) != 1 {
		return -1, fmt.Errorf("%d control messages: %v", len(messages), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return -1, err
	}
	return fds[0], nil
}

// fork starts a process that has a copy of the descriptor, and returns once it runs.
func fork(fd int) (int, error) {
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	file := os.NewFile(uintptr(dup), "copy")
	defer file.Close()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleVar+"="+roleCopy)
	cmd.ExtraFiles = []*os.File{file}
	if err := cmd.Start(); err != nil { // it has been executed then, or failed to
		return 0, fmt.Errorf("fork: %v", err)
	}
	go cmd.Wait()
	return cmd.Process.Pid, nil
}

// A storm is so many times: sockets are opened until one is refused, or there are so
// many, and closed. For each, two threads do the same at the same moment: each connects a
// TCP socket of its own, or sends through one UDP socket, which is closed at once.
const (
	storms    = 8
	stormMost = 8  // sockets at a time
	stormUDP  = 48 // sockets, one after the other
)

func storm(c call) (refused int, err error) {
	type try struct {
		fd int
		op Op
	}
	one := func(t try) bool {
		var err error
		if c.Sock.udp() {
			err = unix.Sendto(t.fd, []byte("x"), 0, address(t.op))
		} else {
			err = connect(t.fd, t.op)
		}
		return errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EPERM)
	}
	// They wait for each other in a loop and stay awake between two sockets: woken by a
	// call, one would be late. What one writes before they meet the other reads after it.
	var arrived atomic.Int64
	meeting := func() func() {
		n := int64(0)
		return func() {
			n += 2
			arrived.Add(1)
			for spins := 0; arrived.Load() < n; spins++ {
				if spins > 100_000 {
					unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0) // the other has no processor
				}
			}
		}
	}
	var second try
	var over, secondRefused bool
	// On a processor each, or they may take turns on one.
	var may unix.CPUSet
	if err := unix.SchedGetaffinity(0, &may); err != nil {
		return 0, err
	}
	defer unix.SchedSetaffinity(0, &may)
	pin := func(n int) {
		var one unix.CPUSet
		for cpu := 0; cpu < 8*int(unsafe.Sizeof(may)); cpu++ {
			if may.IsSet(cpu) {
				one.Zero()
				one.Set(cpu)
				if n--; n < 0 {
					break
				}
			}
		}
		unix.SchedSetaffinity(0, &one)
	}
	pin(0)
	go func() {
		runtime.LockOSThread()
		pin(1)
		for meet := meeting(); ; meet() {
			if meet(); over {
				return
			}
			secondRefused = one(second)
		}
	}()
	meet := meeting()
	defer func() {
		over = true
		meet()
	}()
	other := c.Op
	other.Dest = c.D2
	for range storms {
		var fds []int
		for lives, full := 0, false; !full && len(fds) < stormMost && lives < stormUDP && err == nil; lives++ {
			var pair [2]int
			if pair[0], err = stormSocket(c); err != nil {
				break
			}
			fds = append(fds, pair[0])
			if pair[1] = pair[0]; !c.Sock.udp() {
				if pair[1], err = stormSocket(c); err != nil {
					break
				}
				fds = append(fds, pair[1])
			}
			second = try{pair[1], other}
			meet()
			firstRefused := one(try{pair[0], c.Op})
			meet()
			for _, was := range []bool{firstRefused, secondRefused} {
				if was {
					full = true
					refused++
				}
			}
			if c.Sock.udp() {
				unix.Close(pair[0])
				fds = nil
			}
		}
		for _, fd := range fds {
			if !c.Sock.udp() {
				unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
			}
			unix.Close(fd)
		}
	}
	return refused, err
}

// manySlots is more than there is room for.
const manySlots = 3 * conn.MinMaxSlots / 2

// manyMain gives each of many sockets a slot at the same time: a connect that finds no way
// leaves it one.
func manyMain() int {
	for range manySlots {
		fd, err := newSocket(TCP4)
		if err == nil {
			err = unix.Connect(fd, &unix.SockaddrInet4{Port: int(nowhere.Port()), Addr: nowhere.Addr().As4()})
		}
		if !errors.Is(err, unix.ENETUNREACH) {
			fmt.Fprintf(os.Stderr, "connect to %s: %v\n", nowhere, err)
			return 1
		}
	}
	return 0 // and all are closed
}

// stormSocket makes one. UDP is bound, or the first send would lock it for that.
func stormSocket(c call) (int, error) {
	fd, err := newSocket(c.Sock)
	if err == nil && c.Sock.udp() {
		err = unix.Bind(fd, anyAddress(c.Sock))
	} else if err == nil {
		err = unix.SetNonblock(fd, c.nonblock)
	}
	return fd, err
}

// copyMain is a process that only has what it inherited.
func copyMain() int {
	for {
		unix.Pause()
	}
}

// worker is the test's side of one worker process at a time.
type worker struct {
	number int
	pid    int
	cmd    *exec.Cmd
	in     *os.File
	out    *os.File
	got    [lanes]chan answer // closed when the process has ended
}

// startWorker starts one in a cgroup: it is never anywhere else.
func startWorker(number int, in kerneltest.Cgroup, post [2]*os.File) (*worker, error) {
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
	cmd, err := start(in, roleWorker, func(cmd *exec.Cmd) {
		cmd.Stdin, cmd.Stdout = stdin, stdout
		cmd.ExtraFiles = []*os.File{post[0], post[1]}
		cmd.Env = append(cmd.Env, "GODEBUG=asyncpreemptoff=1", "GOMAXPROCS="+strconv.Itoa(lanes+2))
	})
	if err != nil {
		w.Close()
		r.Close()
		return nil, err
	}
	k := &worker{number: number, pid: cmd.Process.Pid, cmd: cmd, in: w, out: r}
	for l := range lanes {
		k.got[l] = make(chan answer, 1)
	}
	go k.read()
	return k, nil
}

// start starts this binary in a role inside a cgroup.
func start(in kerneltest.Cgroup, role string, with func(*exec.Cmd)) (*exec.Cmd, error) {
	dir, err := os.Open(in.Path)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleVar+"="+role)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	with(cmd)
	return cmd, cmd.Start()
}

func (w *worker) read() {
	b := make([]byte, answerBytes)
	for {
		if _, err := io.ReadFull(w.out, b); err != nil {
			for l := range lanes {
				close(w.got[l])
			}
			return
		}
		w.got[b[0]] <- answer{
			cookie: binary.LittleEndian.Uint64(b[2:]),
			errno:  syscall.Errno(binary.LittleEndian.Uint16(b[10:])),
			pid:    int(binary.LittleEndian.Uint32(b[12:])),
		}
	}
}

// do has an operation done; false if the process was killed before it answered.
func (w *worker) do(c call) (answer, bool) {
	l := c.L
	if c.Kind == Pass && c.Arg == 1 {
		l = c.L2
	}
	if _, err := w.in.Write(c.encode()); err != nil {
		return answer{}, false
	}
	a, ok := <-w.got[l]
	return a, ok
}

// kill ends the process and waits until it is gone, and with it what it alone had open:
// descriptors are closed before a parent is told (exit_files, then exit_notify in the
// kernel's do_exit).
func (w *worker) kill() {
	w.cmd.Process.Kill()
	w.cmd.Wait()
	w.in.Close()
	w.out.Close()
}

// endProcess kills a process that is no child of ours and waits until it is gone.
func endProcess(pid int) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return os.NewSyscallError("pidfd_open", err)
	}
	defer unix.Close(fd)
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return os.NewSyscallError("pidfd_send_signal", err)
	}
	for {
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("poll", err)
		}
	}
}
