package kerneltest

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// What a test binary is, from its environment.
const (
	roleVar    = "BULKHEAD_KERNELTEST"
	bpffsVar   = "BULKHEAD_KERNELTEST_BPFFS"
	roleInside = "inside" // runs the tests
	roleClient = "client"
	roleHold   = "hold"
)

// rootID is the inode number of the true root of the cgroup v2 hierarchy: kernfs
// numbers from 1, the root first.
const rootID = 1

// Main is for TestMain: it runs the tests in namespaces of their own and returns the
// exit code. In a process that a test has started it is that process.
func Main(m *testing.M) int {
	switch role := os.Getenv(roleVar); {
	case role == roleClient:
		return clientMain()
	case role == roleHold:
		return holdMain()
	case os.Geteuid() != 0:
		fmt.Fprintln(os.Stderr, "these tests need root: they load kernel programs and make cgroups and namespaces")
		return 1
	case role == roleInside:
		if err := prepare(os.Getenv(bpffsVar)); err != nil {
			fmt.Fprintln(os.Stderr, "prepare the test's namespaces:", err)
			return 1
		}
		return m.Run()
	}
	code, err := again()
	if err != nil {
		fmt.Fprintln(os.Stderr, "run the tests in namespaces of their own:", err)
		return 1
	}
	return code
}

// again runs this binary in new namespaces and cleans up behind it, however it ends.
func again() (code int, err error) {
	root, err := Root()
	if err != nil {
		return 1, err
	}
	dir, err := os.MkdirTemp("", "bulkhead-test-")
	if err != nil {
		return 1, err
	}
	defer os.Remove(dir)
	runtime.LockOSThread() // the death signal comes when the thread ends
	defer runtime.UnlockOSThread()

	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), roleVar+"="+roleInside, bpffsVar+"="+dir)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS,
		Pdeathsig:  syscall.SIGKILL,
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	defer signal.Stop(signals)
	if err := cmd.Start(); err != nil {
		return 1, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for wait := true; wait; {
		select {
		case s := <-signals:
			cmd.Process.Signal(s)
		case err = <-ended:
			wait = false
		}
	}
	left, _ := filepath.Glob(filepath.Join(root, fmt.Sprintf("bulkhead-test-%d-*", cmd.Process.Pid)))
	for _, cg := range left {
		if err := removeTree(cg); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		return exit.ExitCode(), nil
	}
	return 0, err
}

// prepare makes the new namespaces usable.
func prepare(bpffs string) error {
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("bpf", bpffs, "bpf", 0, ""); err != nil {
		return fmt.Errorf("mount a bpf file system on %s: %w", bpffs, err)
	}
	return loopback()
}

// loopback makes lo of the calling thread's namespace usable, IPv6 included.
func loopback() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("bring lo up: %w", err)
	}
	_, local, err := net.ParseCIDR("fd00::/16")
	if err != nil {
		return err
	}
	err = netlink.RouteAdd(&netlink.Route{
		Dst: local, LinkIndex: lo.Attrs().Index, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL,
	})
	if err != nil {
		return fmt.Errorf("make %s local: %w", local, err)
	}
	return nil
}

// Root is where the true root of the cgroup v2 hierarchy is mounted: the first mount
// of its type (/proc/self/mountinfo, proc(5)) that shows it.
func Root() (string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("find the cgroup v2 mount: %w", err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20) // overlay options make long lines
	for lines.Scan() {
		before, after, _ := strings.Cut(lines.Text(), " - ")
		fields := strings.Fields(before)
		if !strings.HasPrefix(after, "cgroup2 ") || len(fields) < 5 {
			continue
		}
		var st unix.Stat_t
		if unix.Stat(fields[4], &st) == nil && st.Ino == rootID {
			return fields[4], nil
		}
	}
	if err := lines.Err(); err != nil {
		return "", fmt.Errorf("read mountinfo: %w", err)
	}
	return "", errors.New("the root of the cgroup v2 hierarchy is not mounted (mount -t cgroup2 none DIR)")
}

// patience is how long a condition may take, on a slow emulated machine too.
const patience = 30 * time.Second

// Poll repeats f until it returns nil, and fails the test if it does not in time.
func Poll(t testing.TB, what string, f func() error) {
	t.Helper()
	PollFor(t, patience, what, f)
}

// PollFor is Poll for what may take longer or shorter than others.
func PollFor(t testing.TB, limit time.Duration, what string, f func() error) {
	t.Helper()
	if err := poll(limit, f); err != nil {
		t.Fatalf("%s: still after %s: %v", what, limit, err)
	}
}

func poll(limit time.Duration, f func() error) error {
	for began := time.Now(); ; {
		asked := time.Now()
		err := f()
		if err == nil || time.Since(began) > limit {
			return err
		}
		// What is waited for may want the only CPU of an emulated machine.
		time.Sleep(max(time.Millisecond, time.Since(asked), time.Since(began)/20))
	}
}
