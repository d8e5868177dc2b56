package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
)

const (
	// binaryVar is the path of the binary under test.
	binaryVar = "BULKHEAD_BINARY"
	// preparedVar says that prepare has been done.
	preparedVar = "BULKHEAD_E2E_PREPARED"
	// viaVar makes the test binary become a command, a JSON list of arguments. If
	// its last is "", that is the test binary again: so a client of kerneltest gets
	// into a compartment by bulkhead exec and keeps its pid and its pipes.
	viaVar = "BULKHEAD_E2E_VIA"
	// capsVar is a comma-separated list of the only capabilities (numbers) that the
	// command of viaVar may have.
	capsVar = "BULKHEAD_E2E_CAPS"
)

func TestMain(m *testing.M) { os.Exit(runTests(m)) }

func runTests(m *testing.M) int {
	if via := os.Getenv(viaVar); via != "" {
		fmt.Fprintln(os.Stderr, "become a command:", become(via))
		return 1
	}
	if os.Getenv(preparedVar) == "" {
		undo, err := prepare()
		defer undo()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return kerneltest.Main(m)
}

// prepare does what is done once, for all processes that this one starts.
func prepare() (undo func(), err error) {
	dir, err := os.MkdirTemp("", "bulkhead-e2e-")
	if err != nil {
		return func() {}, err
	}
	var on []string
	undo = func() {
		os.RemoveAll(dir)
		for _, c := range on {
			controller("-" + c)
		}
	}
	if os.Getenv(binaryVar) == "" {
		path, err := build(dir)
		if err != nil {
			return undo, fmt.Errorf("the binary under test: %w", err)
		}
		os.Setenv(binaryVar, path)
	}
	// All nodes shall have the controllers that there are, from the beginning to
	// the end. Without root the tests do not run, and say so.
	for _, c := range []string{"cpu", "cpuset", "memory"} {
		if root, err := kerneltest.Root(); err == nil && !hasWord(root+"/cgroup.subtree_control", c) && controller("+"+c) == nil {
			on = append(on, c)
		}
	}
	os.Setenv(preparedVar, "yes")
	return undo, nil
}

// controller turns a controller on or off for the children of the root.
func controller(change string) error {
	root, err := kerneltest.Root()
	if err != nil {
		return err
	}
	return os.WriteFile(root+"/cgroup.subtree_control", []byte(change), 0)
}

// hasWord reports whether a file has a word.
func hasWord(path, word string) bool {
	text, err := os.ReadFile(path)
	return err == nil && slices.Contains(strings.Fields(string(text)), word)
}

// build gives the path of the binary: built, or found where there is no go.
func build(dir string) (string, error) {
	if _, err := exec.LookPath("go"); err != nil {
		return exec.LookPath("bulkhead")
	}
	path := filepath.Join(dir, "bulkhead")
	cmd := exec.Command("go", "build", "-o", path, "bulkhead/cmd/agent")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return path, nil
}

// become returns only if it failed.
func become(via string) error {
	var args []string
	if err := json.Unmarshal([]byte(via), &args); err != nil {
		return err
	}
	if n := len(args) - 1; args[n] == "" {
		self, err := os.Executable()
		if err != nil {
			return err
		}
		args[n] = self
	}
	if caps, ok := os.LookupEnv(capsVar); ok {
		if err := keepCapabilities(strings.Split(caps, ",")); err != nil {
			return err
		}
	}
	os.Unsetenv(viaVar)
	return syscall.Exec(args[0], args, os.Environ())
}

// keepCapabilities takes all others from what this goroutine executes next
// (capabilities(7): root gets the bounding set, which each thread has for itself).
func keepCapabilities(keep []string) error {
	runtime.LockOSThread()
	last, err := os.ReadFile("/proc/sys/kernel/cap_last_cap")
	if err != nil {
		return err
	}
	var n int
	if _, err := fmt.Sscan(string(last), &n); err != nil {
		return err
	}
drop:
	for c := 0; c <= n; c++ {
		for _, k := range keep {
			if k == fmt.Sprint(c) {
				continue drop
			}
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil {
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
	return nil
}

// copyFile copies a file so that everybody may execute it.
func copyFile(to, from string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		out.Close()
		return err
	}
	return out.Close()
}
