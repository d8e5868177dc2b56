package cgroup

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/policy"
)

// The tests work on the real tree, in cgroups of their own, as root, wherever
// cgroup2 is mounted. What needs the cpu or memory controller is skipped where
// a v1 hierarchy holds it; BULKHEAD_REQUIRE=cpu,memory makes that a failure.

// TestMain runs one of the helpers below instead of the tests if
// BULKHEAD_TEST_HELPER names it. Helpers end when their standard input closes,
// so none outlives the tests.
func TestMain(m *testing.M) {
	if name := os.Getenv("BULKHEAD_TEST_HELPER"); name != "" {
		if err := helpers[name](os.Args[1:]); err != nil {
			fmt.Println("ERROR", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

var helpers = map[string]func(args []string) error{
	// hold does nothing.
	"hold": func([]string) error { return ready("") },
	// spin uses the processor.
	"spin": func([]string) error {
		go func() {
			for n := 0; ; n++ {
				_ = n * n
			}
		}()
		return ready("")
	},
	// alloc uses so many bytes of memory.
	"alloc": func(args []string) error {
		n, err := strconv.Atoi(args[0])
		if err != nil {
			return err
		}
		b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			return err
		}
		for i := 0; i < n; i += os.Getpagesize() {
			b[i] = 1
		}
		return ready("")
	},
	// enter ROOT SLICE becomes what bulkhead exec is, and says where it is.
	"enter": func(args []string) error {
		t, err := Find(args[0])
		if err != nil {
			return err
		}
		leaf, err := t.Enter(args[1])
		if err != nil {
			return err
		}
		own, err := os.ReadFile("/proc/self/cgroup")
		if err != nil {
			return err
		}
		b, err := json.Marshal(entered{leaf, os.Getpid(), string(own)})
		if err != nil {
			return err
		}
		return ready(string(b))
	},
	// namespaced HOST OWN sees the tree from inside a private namespace.
	"namespaced": seenFromInside,
	// headless ends its first thread, and goes on.
	"headless": func([]string) error {
		go func() {
			defer os.Exit(0)
			fmt.Println("ready")
			_, _ = io.Copy(io.Discard, os.Stdin)
		}()
		// TestMain runs in the first thread: it was locked to it by init of the runtime.
		unix.RawSyscall(unix.SYS_EXIT, 0, 0, 0)
		return nil
	},
	// forks MARK N makes N children that wait as it does.
	"forks": func(args []string) error {
		n, err := strconv.Atoi(args[1])
		if err != nil {
			return err
		}
		go func() {
			for range n {
				cmd := exec.Command("/bin/cat")
				cmd.Stdin = os.Stdin
				_ = cmd.Start()
			}
		}()
		return ready("")
	},
	// moveAll ROOT FROM TO moves what it sees, and says how that ended and where it is.
	"moveAll": func(args []string) error {
		t, err := Find(args[0])
		if err != nil {
			return err
		}
		err = t.moveAll(args[1], args[2], func(int) bool { return false })
		own, _ := os.ReadFile("/proc/self/cgroup")
		fmt.Printf("%v\n%s", err, own)
		return nil
	},
	// bound DIR POINT finds DIR mounted at POINT.
	"bound": func(args []string) error {
		if err := unix.Mount(args[0], args[1], "", unix.MS_BIND, ""); err != nil {
			return err
		}
		t, err := Find(args[1])
		if err != nil {
			return err
		}
		fmt.Println(t.Level, t.ID, t.Mount, t.abs)
		return nil
	},
}

type entered struct {
	Leaf   string
	PID    int
	Cgroup string
}

// ready prints a line and waits until standard input closes.
func ready(line string) error {
	fmt.Println("ready", line)
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

// child is a running helper.
type child struct {
	*exec.Cmd
	line string // what it printed when it was ready
	end  func() // ends it and waits
}

// start runs a helper inside a cgroup ("" for the test's own).
func start(t *testing.T, tree *Tree, in, helper string, args ...string) *child {
	t.Helper()
	c, err := startHelper(tree, in, helper, args...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.end)
	return c
}

func startHelper(tree *Tree, in, helper string, args ...string) (*child, error) {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), "BULKHEAD_TEST_HELPER="+helper)
	cmd.Stderr = os.Stderr
	if in != "" {
		d, err := os.Open(tree.path(in))
		if err != nil {
			return nil, err
		}
		defer d.Close()
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(d.Fd())}
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s in %q: %w", helper, in, err)
	}
	line, err := bufio.NewReader(stdout).ReadString('\n')
	line, ok := strings.CutPrefix(strings.TrimSpace(line), "ready")
	if err != nil || !ok {
		stdin.Close()
		return nil, errors.Join(fmt.Errorf("helper %s: %q", helper, line), err, cmd.Wait())
	}
	c := &child{Cmd: cmd, line: strings.TrimSpace(line)}
	var ended atomic.Bool
	c.end = func() {
		if ended.CompareAndSwap(false, true) {
			stdin.Close()
			cmd.Wait()
		}
	}
	return c, nil
}

var number atomic.Int64

// testTree returns a tree whose root is a new cgroup directly below the true
// root, and removes it with all that is in it when the test ends.
func testTree(t testing.TB) *Tree {
	t.Helper()
	host, err := Find("")
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(host.Dir, fmt.Sprintf("bulkhead-test-%d-%d", os.Getpid(), number.Add(1)))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatalf("%v (these tests need root)", err)
	}
	tree, err := Find(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		kerneltest.Poll(t, "remove "+dir, func() error {
			all, err := tree.Walk()
			if err != nil {
				return err
			}
			for i := len(all) - 1; i >= 0; i-- {
				err = errors.Join(err, unix.Rmdir(tree.path(all[i].Path)))
			}
			return err
		})
	})
	return tree
}

// cpuTree is testTree with the cpu, memory and pids controllers; it skips the
// test where v2 does not have them.
func cpuTree(t *testing.T) *Tree {
	t.Helper()
	host, err := Find("")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []string{"cpu", "memory"} {
		cond, missing := host.Shortfall(c)
		if !missing {
			continue
		}
		if slices.Contains(strings.Split(os.Getenv("BULKHEAD_REQUIRE"), ","), c) {
			t.Fatalf("BULKHEAD_REQUIRE names %s: %s", c, cond.Message)
		}
		t.Skipf("this kernel lacks: %s controller on cgroup v2 (%s)", c, cond.Reason)
	}
	before, err := host.read("/", "cgroup.subtree_control")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range controllers {
		if slices.Contains(strings.Fields(before), c) {
			continue
		}
		must(t, host.write("/", "cgroup.subtree_control", "+"+c))
		t.Cleanup(func() { must(t, host.write("/", "cgroup.subtree_control", "-"+c)) })
	}
	return testTree(t)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func mkdir(t testing.TB, tree *Tree, p string) Cgroup {
	t.Helper()
	must(t, os.MkdirAll(tree.path(p), 0o755))
	c, err := tree.Get(p)
	must(t, err)
	return c
}

// wantFiles compares control files with what the kernel reads.
func wantFiles(t *testing.T, tree *Tree, p string, want map[string]string) {
	t.Helper()
	for file, v := range want {
		got, err := tree.read(p, file)
		if err != nil || got != v {
			t.Errorf("%s of %s is %q (%v), want %q", file, p, got, err, v)
		}
	}
}

func noConditions(t *testing.T, conds []Condition, err error) {
	t.Helper()
	must(t, err)
	for _, c := range conds {
		t.Errorf("unexpected condition %+v", c)
	}
}

// wantCondition fails unless exactly one condition is there: this one, with
// all the words in its message.
func wantCondition(t *testing.T, conds []Condition, typ, reason string, words ...string) {
	t.Helper()
	if len(conds) != 1 || conds[0].Type != typ || conds[0].Reason != reason || conds[0].Status != "False" {
		t.Errorf("conditions %+v, want one %s %s", conds, typ, reason)
		return
	}
	for _, w := range words {
		if !strings.Contains(conds[0].Message, w) {
			t.Errorf("message %q does not name %q", conds[0].Message, w)
		}
	}
}

// plan makes a plan of features with the given tenants, as compiling does.
func plan(mode policy.Mode, tenants []string, features ...policy.Feature) *policy.Plan {
	p := &policy.Plan{Mode: mode, Tenants: tenants}
	p.Features = append([]policy.Feature{{Name: policy.DefaultFeature, Class: policy.Background}}, features...)
	p.Compartments = []policy.Compartment{{Feature: policy.DefaultFeature}}
	for _, f := range features {
		slice := path.Join(policy.ParentSlice, "bulkhead-"+f.Name+".slice")
		p.Compartments = append(p.Compartments, policy.Compartment{Feature: f.Name, Slice: slice})
		for _, tenant := range tenants {
			p.Compartments = append(p.Compartments, policy.Compartment{
				Feature: f.Name, Tenant: tenant, Slice: path.Join(slice, "bulkhead-"+f.Name+"-"+tenant+".slice")})
		}
	}
	return p
}

const (
	chat  = "/bulkhead.slice/bulkhead-chat.slice"
	batch = "/bulkhead.slice/bulkhead-batch.slice"
)

func feature(name string, cpu *policy.CPU, memory *policy.Memory, match ...policy.Match) policy.Feature {
	return policy.Feature{Name: name, CPU: cpu, Memory: memory, Match: match}
}
