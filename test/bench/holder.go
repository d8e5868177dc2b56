package main

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// perHolder is how many sockets one process holds, fewer than the descriptors that it may
// mostly have, and perAddress how many have one local address, fewer than there are ports.
const (
	perHolder  = 15_000
	perAddress = 50_000
	firstPort  = 10_000
)

// holders are processes that hold connected datagram sockets, the cheapest that have a
// slot each.
type holders struct {
	dir   string // their cgroup
	n     int
	start []*exec.Cmd
}

// growTo has them hold n in all.
func (h *holders) growTo(n int) error {
	dir, err := os.Open(h.dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	for h.n < n {
		more := min(perHolder, n-h.n)
		cmd := exec.Command("/proc/self/exe", "hold", strconv.Itoa(h.n), strconv.Itoa(more))
		cmd.Stderr = os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd()), Pdeathsig: syscall.SIGKILL}
		out, err := cmd.StdoutPipe()
		if err != nil {
			return err
		}
		if err := cmd.Start(); err != nil {
			return err
		}
		h.start = append(h.start, cmd)
		if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
			return fmt.Errorf("sockets %d to %d are not held: it says why above", h.n, h.n+more)
		}
		h.n += more
		progress("growth: %d sockets of %d", h.n, n)
	}
	return nil
}

// end ends them all.
func (h *holders) end() {
	for _, cmd := range h.start {
		cmd.Process.Kill()
	}
	for _, cmd := range h.start {
		cmd.Wait()
	}
	h.start, h.n = nil, 0
}

// allowFiles lets this process have so many open files.
func allowFiles(n int) error {
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return os.NewSyscallError("getrlimit", err)
	}
	files.Cur = max(files.Cur, uint64(n))
	files.Max = max(files.Max, files.Cur) // to raise it needs CAP_SYS_RESOURCE
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return fmt.Errorf("raise the limit of open files to %d: %w", files.Max, err)
	}
	return nil
}

// hold is a holder's own side: the first socket's number and how many. It stays until it
// is killed.
func hold(args []string) error {
	if len(args) != 2 {
		return fmt.Errorf("%d arguments", len(args))
	}
	first, err1 := strconv.Atoi(args[0])
	n, err2 := strconv.Atoi(args[1])
	if err1 != nil || err2 != nil {
		return fmt.Errorf("not numbers: %q", args)
	}
	if err := allowFiles(n + 100); err != nil {
		return err
	}
	for i := first; i < first+n; i++ {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return os.NewSyscallError("socket", err)
		}
		local := &unix.SockaddrInet4{Addr: [4]byte{127, 1, 0, byte(1 + i/perAddress)}, Port: firstPort + i%perAddress}
		if err := unix.Bind(fd, local); err != nil {
			return fmt.Errorf("bind %v port %d: %w", local.Addr, local.Port, err)
		}
		if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: heldPort}); err != nil {
			return os.NewSyscallError("connect", err)
		}
	}
	fmt.Println("ok")
	select {}
}
