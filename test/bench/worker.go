package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// warmUp is the number of calls of a turn that come before the measured ones: the first
// meet caches that the configuration before has filled.
const warmUp = 30

// worker is the process that is measured. There is one for all configurations, which is
// moved from cgroup to cgroup: two processes of the same program differ by more than
// what is measured, by the pages and the cache sets that they happened to get.
type worker struct {
	pid int
	in  io.Writer
	out *bufio.Reader
}

// startWorker starts it with the listening socket whose connections it accepts itself;
// end kills it.
func startWorker(listener *os.File) (w *worker, end func(), err error) {
	cmd := exec.Command("/proc/self/exe", "worker")
	cmd.Stderr = os.Stderr
	cmd.ExtraFiles = []*os.File{listener}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, nil, err
	}
	return &worker{pid: cmd.Process.Pid, in: in, out: bufio.NewReader(out)}, func() {
		cmd.Process.Kill()
		cmd.Wait()
	}, nil
}

// do has it do one of jobs n times and gives the numbers that it answers with.
func (w *worker) do(job string, n int) ([]float64, error) {
	fmt.Fprintln(w.in, job, n)
	line, err := w.out.ReadString('\n')
	if err != nil {
		return nil, fmt.Errorf("worker: %w", err)
	}
	text, ok := strings.CutPrefix(strings.TrimSpace(line), "ok")
	if !ok {
		return nil, fmt.Errorf("worker: %s: %s", job, strings.TrimSpace(line))
	}
	var numbers []float64
	for _, f := range strings.Fields(text) {
		x, err := strconv.ParseFloat(f, 64)
		if err != nil {
			return nil, fmt.Errorf("worker: %s: %w", job, err)
		}
		numbers = append(numbers, x)
	}
	return numbers, nil
}

// work is the worker's own side: a line "JOB N" in, a line "ok NUMBER..." or an error out.
func work([]string) error {
	if err := pin(); err != nil {
		return err
	}
	debug.SetGCPercent(-1)
	jobs := map[string]func(int) ([]int64, error){
		"connect": connects, "singles": singles, "bulk": bulk, "exchange": exchange, "datagrams": datagrams,
	}
	for {
		var job string
		var n int
		if _, err := fmt.Scan(&job, &n); err != nil {
			return nil // its end
		}
		if jobs[job] == nil {
			fmt.Println("no such job")
			continue
		}
		numbers, err := jobs[job](n)
		if err != nil {
			fmt.Println(err)
			continue
		}
		fmt.Println("ok", strings.Trim(fmt.Sprint(numbers), "[]"))
	}
}

// pin keeps the calling goroutine on a thread of its own, on the last CPU, which has fewer
// interrupts than the first. Without, there is more noise and nothing else.
func pin() error {
	runtime.LockOSThread()
	var all, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		return fmt.Errorf("pin to a CPU: %w", err)
	}
	for i := range 1024 {
		if all.IsSet(i) {
			one.Zero()
			one.Set(i)
		}
	}
	return os.NewSyscallError("pin to a CPU", unix.SchedSetaffinity(0, &one))
}

// once connects and closes. The worker also takes the connection off the server's queue,
// so that no wake-up is measured and no memory grows cold. The listening socket was made
// outside of the measured cgroups, and so is what it accepts.
func once() error {
	const listener = 3 // inherited
	fd, err := dial(syscall.SOCK_STREAM, connectPort)
	if err != nil {
		return err
	}
	peer, _, err := syscall.Accept(listener)
	if err != nil {
		return os.NewSyscallError("accept", err)
	}
	// A reset leaves no TIME_WAIT, so that ports do not run out.
	syscall.SetsockoptLinger(fd, syscall.SOL_SOCKET, syscall.SO_LINGER, &syscall.Linger{Onoff: 1})
	syscall.Close(fd)
	syscall.Close(peer)
	return nil
}

// connects gives the nanoseconds of processor time of n connects: loopback's packets are
// handled within the calls, and what else the machine does is not counted.
func connects(n int) ([]int64, error) {
	var start int64
	for i := range warmUp + n {
		if i == warmUp {
			start = threadTime()
		}
		if err := once(); err != nil {
			return nil, err
		}
	}
	return []int64{threadTime() - start}, nil
}

// singles gives those of each of n connects, reading the clock included.
func singles(n int) ([]int64, error) {
	times := make([]int64, 0, n)
	for i := range warmUp + n {
		start := threadTime()
		if err := once(); err != nil {
			return nil, err
		}
		if i >= warmUp {
			times = append(times, threadTime()-start)
		}
	}
	return times, nil
}

// The others give nanoseconds of processor time and of wall time.

// bulk sends n MiB on one connection and waits until the server has them.
func bulk(n int) ([]int64, error) {
	fd, err := dial(syscall.SOCK_STREAM, bulkPort)
	if err != nil {
		return nil, err
	}
	defer syscall.Close(fd)
	buffer := make([]byte, 64<<10)
	return timed(func() error {
		for left := n << 20; left > 0; {
			sent, err := syscall.Write(fd, buffer[:min(left, len(buffer))])
			if err != nil {
				return os.NewSyscallError("send", err)
			}
			left -= sent
		}
		if err := syscall.Shutdown(fd, syscall.SHUT_WR); err != nil {
			return os.NewSyscallError("shutdown", err)
		}
		if got, err := syscall.Read(fd, buffer); got != 0 || err != nil {
			return fmt.Errorf("wait for the server's end: %d bytes, %w", got, err)
		}
		return nil
	})
}

// exchange sends n requests of 64 bytes on one connection, one after the other.
func exchange(n int) ([]int64, error) {
	fd, err := dial(syscall.SOCK_STREAM, echoPort)
	if err != nil {
		return nil, err
	}
	defer syscall.Close(fd)
	if err := syscall.SetsockoptInt(fd, syscall.IPPROTO_TCP, syscall.TCP_NODELAY, 1); err != nil {
		return nil, err
	}
	return timed(func() error {
		message := make([]byte, 64)
		for range n {
			if _, err := syscall.Write(fd, message); err != nil {
				return os.NewSyscallError("send", err)
			}
			if got, err := syscall.Read(fd, message); got != len(message) {
				return fmt.Errorf("answer of %d bytes: %w", got, err)
			}
		}
		return nil
	})
}

// window is how many datagrams the server answers with one, so that none is lost.
const window = 32

// datagrams sends n of 64 bytes from a connected socket.
func datagrams(n int) ([]int64, error) {
	fd, err := dial(syscall.SOCK_DGRAM, datagramPort)
	if err != nil {
		return nil, err
	}
	defer syscall.Close(fd)
	return timed(func() error {
		message := make([]byte, 64)
		for i := range n / window * window {
			if _, err := syscall.Write(fd, message); err != nil {
				return os.NewSyscallError("send", err)
			}
			if i%window == window-1 {
				if _, err := syscall.Read(fd, message); err != nil {
					return os.NewSyscallError("receive", err)
				}
			}
		}
		return nil
	})
}

func timed(f func() error) ([]int64, error) {
	wall, cpu := time.Now(), threadTime()
	err := f()
	return []int64{threadTime() - cpu, time.Since(wall).Nanoseconds()}, err
}

func dial(kind, port int) (int, error) {
	fd, err := syscall.Socket(syscall.AF_INET, kind|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	if err := syscall.Connect(fd, loopbackAt(port)); err != nil {
		syscall.Close(fd)
		return -1, os.NewSyscallError("connect", err)
	}
	return fd, nil
}

func loopbackAt(port int) *syscall.SockaddrInet4 {
	return &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: port}
}

// threadTime is the processor time of the calling thread in nanoseconds.
func threadTime() int64 { return processorTime(unix.CLOCK_THREAD_CPUTIME_ID) }

func processorTime(clock int32) int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(clock, &t); err != nil {
		return 0 // whose clock it is has ended
	}
	return t.Nano()
}

// Clocks of others, as clock_getcpuclockid(3) and pthread_getcpuclockid(3) make them:
// the complement of the id above two bits that say what is counted (scheduled time) and
// one that says that it is a thread.
func processClock(pid int) int32 { return int32(^pid)<<3 | 2 }
func threadClock(tid int) int32  { return int32(^tid)<<3 | 6 }
