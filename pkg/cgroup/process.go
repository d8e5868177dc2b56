package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// kernelThread is PF_KTHREAD of linux/sched.h, in the flags of /proc/PID/stat.
const kernelThread = 0x00200000

// process is what /proc says of one process. What is not always needed is read
// when it is asked for.
type process struct {
	pid, parent int
	// start is when it began, in the kernel's clock ticks: with the pid it is the
	// same process, and not one that has its pid after it.
	start uint64
	// dead: its first thread has ended. Others may go on, and then it is alive.
	dead bool
	// What it is, as it was when an item asked first: a policy may have hundreds.
	executable, line func() (string, error)
	user             func() (uint32, error)
}

// processOf reads a process. The error is ErrGone if there is none, and
// errKernel for a thread of the kernel, which no cgroup may have.
func processOf(pid int) (process, error) {
	p := process{pid: pid}
	b, err := readFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return p, lost(pid, err)
	}
	// The name is in parentheses and may have any others in it (proc_pid_stat(5)).
	_, rest, _ := bytes.Cut(b[max(bytes.LastIndexByte(b, ')'), 0):], []byte(" "))
	f := strings.Fields(string(rest))
	if len(f) < 20 {
		return p, fmt.Errorf("process %d: /proc/%d/stat says %q", pid, pid, b)
	}
	flags, err1 := strconv.ParseUint(f[6], 10, 64)
	parent, err2 := strconv.Atoi(f[1])
	start, err3 := strconv.ParseUint(f[19], 10, 64)
	if err := errors.Join(err1, err2, err3); err != nil {
		return p, fmt.Errorf("process %d: %w", pid, err)
	}
	if flags&kernelThread != 0 {
		return p, fmt.Errorf("process %d: %w", pid, errKernel)
	}
	p.parent, p.start, p.dead = parent, start, f[0] == "Z" || f[0] == "X"
	if p.dead && len(p.threads()) == 0 {
		return p, fmt.Errorf("process %d: %w", pid, ErrGone) // nobody has asked how it ended, yet
	}
	p.executable, p.line, p.user = sync.OnceValues(p.exe), sync.OnceValues(p.cmdline), sync.OnceValues(p.uid)
	return p, nil
}

var errKernel = errors.New("a thread of the kernel")

// lost tells a process that has ended from one that cannot be read.
func lost(pid int, err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		err = ErrGone
	}
	return fmt.Errorf("process %d: %w", pid, err)
}

// Age is for how long there has been the process that has a pid now, to the tick (10 ms) above.
func Age(pid int) (time.Duration, error) {
	p, err := processOf(pid)
	if err != nil {
		return 0, err
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return 0, fmt.Errorf("time since boot: %w", err)
	}
	const tick = time.Second / 100 // USER_HZ, by which /proc counts whatever the kernel's own is
	return time.Duration(now.Nano()) - time.Duration(p.start)*tick, nil
}

// still reports whether it is there, and no other with its pid.
func (p process) still() bool {
	now, err := processOf(p.pid)
	return err == nil && now.start == p.start
}

// threads are those that have not ended, but for the first.
func (p process) threads() []string {
	names, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/[0-9]*", p.pid))
	var out []string
	for _, dir := range names {
		if filepath.Base(dir) != strconv.Itoa(p.pid) {
			out = append(out, dir)
		}
	}
	return out
}

// dir is where to read what all its threads share: an ended first thread has
// given it up.
func (p process) dir() string {
	if p.dead {
		if t := p.threads(); len(t) > 0 {
			return t[0]
		}
	}
	return filepath.Join("/proc", strconv.Itoa(p.pid))
}

// in is the cgroup that it is in. An ended first thread stays where it was when
// the others are moved.
func (p process) in(t *Tree) (Cgroup, error) {
	return t.below(strings.TrimPrefix(p.dir(), "/proc/"))
}

// exe is the path of its executable, as its own mount namespace has it.
func (p process) exe() (string, error) {
	s, err := os.Readlink(p.dir() + "/exe")
	if err != nil {
		return "", lost(p.pid, err)
	}
	return strings.TrimSuffix(s, " (deleted)"), nil
}

// cmdline are its arguments, joined by spaces.
func (p process) cmdline() (string, error) {
	b, err := readFile(p.dir() + "/cmdline")
	if err != nil {
		return "", lost(p.pid, err)
	}
	return string(bytes.ReplaceAll(bytes.TrimRight(b, "\x00"), []byte{0}, []byte(" "))), nil
}

// uid is its effective user. The owner of its directory is another where it
// may not be dumped (proc(5)).
func (p process) uid() (uint32, error) {
	b, err := readFile(p.dir() + "/status")
	if err != nil {
		return 0, lost(p.pid, err)
	}
	_, rest, _ := strings.Cut(string(b), "\nUid:")
	f := strings.Fields(rest)
	if len(f) < 2 {
		return 0, fmt.Errorf("process %d: no Uid in its status", p.pid)
	}
	n, err := strconv.ParseUint(f[1], 10, 32)
	return uint32(n), err
}

// matchesProcess compares the keys that are about processes.
func (it item) matchesProcess(p process) (bool, error) {
	if it.User != "" {
		if !it.known {
			return false, nil
		}
		if uid, err := p.user(); err != nil || uid != it.uid {
			return false, err
		}
	}
	if it.Exe != "" {
		if exe, err := p.executable(); err != nil || !match(it.Exe, exe) {
			return false, err
		}
	}
	if it.cmdline != nil {
		if line, err := p.line(); err != nil || !it.cmdline.MatchString(line) {
			return false, err
		}
	}
	return true, nil
}

// processes lists all that there are.
func processes() ([]int, error) {
	f, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	names, err := f.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	var out []int
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			out = append(out, pid)
		}
	}
	return out, nil
}
