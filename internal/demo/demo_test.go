package demo

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"bulkhead/pkg/cgroup"
)

// The test binary stands in for bulkhead: it has the demo and its hidden
// commands, and an agent that only fails. The real agent is tested with the
// real binary in test/.
func TestMain(m *testing.M) {
	if len(os.Args) < 2 {
		os.Exit(m.Run())
	}
	ctx := context.Background()
	var err error
	switch name := os.Args[1]; {
	case slices.Contains(ChildCommands(), name):
		err = Child(ctx, name, os.Args[2:])
	case name == "demo":
		o := Options{CgroupRoot: os.Args[2], JSON: true, scenario: &scenario{}}
		if err = json.Unmarshal([]byte(os.Args[3]), o.scenario); err == nil {
			err = Run(ctx, o)
		}
	case name == "agent":
		err = errors.New("no luck today")
	default:
		os.Exit(m.Run())
	}
	switch {
	case errors.Is(err, ErrInterrupted):
		os.Exit(130)
	case err != nil:
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// small is a scenario of a second or two.
func small(phases ...phase) scenario {
	return scenario{
		Phases:      phases,
		Seconds:     0.5,
		ServeAtOnce: 4,
		ChatRate:    40,
		ChatWork:    20 * time.Millisecond,
		ChatLimit:   2,
		Workers:     16,
		BatchWork:   60 * time.Millisecond,
		BatchLimit:  2,
	}
}

// command is a demo that runs as a process of its own.
type command struct {
	*exec.Cmd
	root   string // its --cgroup-root, the test's own
	mark   string // in the environment of all its processes
	stdout bytes.Buffer
	stderr *bufio.Reader
}

const waitLimit = 30 * time.Second

// startDemo starts the demo in a cgroup of the test's own.
func startDemo(t *testing.T, root string, sc scenario) *command {
	t.Helper()
	arg, err := json.Marshal(sc)
	if err != nil {
		t.Fatal(err)
	}
	c := &command{Cmd: exec.Command("/proc/self/exe", "demo", root, string(arg)), root: root}
	c.mark = fmt.Sprintf("BULKHEAD_DEMO_TEST=%d.%d", os.Getpid(), rand.Uint64())
	c.Env = append(os.Environ(), c.mark)
	c.Stdout = &c.stdout
	pipe, err := c.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.stderr = bufio.NewReader(pipe)
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	// A demo that hangs must not hang the test.
	watchdog := time.AfterFunc(waitLimit, func() { c.Process.Kill() })
	t.Cleanup(func() { watchdog.Stop() })
	return c
}

// finish waits for the demo and returns its exit code and the rest of its
// stderr.
func (c *command) finish(t *testing.T) (code int, stderr string) {
	t.Helper()
	rest, err := io.ReadAll(c.stderr)
	if err != nil {
		t.Fatal(err)
	}
	c.Wait()
	return c.ProcessState.ExitCode(), string(rest)
}

// readTo reads stderr up to and with the line that has text.
func (c *command) readTo(t *testing.T, text string) {
	t.Helper()
	for {
		line, err := c.stderr.ReadString('\n')
		if err != nil {
			t.Fatalf("stderr ended before %q: %v", text, err)
		}
		if strings.Contains(line, text) {
			return
		}
	}
}

// processes returns the command lines of the demo's live processes, by pid.
func (c *command) processes(t *testing.T) map[int]string {
	t.Helper()
	found := map[int]string{}
	procs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range procs {
		// A process that ends meanwhile cannot be read, and has ended.
		env, _ := os.ReadFile(p + "/environ")
		if bytes.Contains(env, []byte(c.mark)) {
			pid, _ := strconv.Atoi(filepath.Base(p))
			line, _ := os.ReadFile(p + "/cmdline")
			found[pid] = strings.ReplaceAll(string(line), "\x00", " ")
		}
	}
	return found
}

// find waits for a process of the demo whose command line has text.
func (c *command) find(t *testing.T, text string) int {
	t.Helper()
	for deadline := time.Now().Add(waitLimit); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		for pid, line := range c.processes(t) {
			if strings.Contains(line, text) {
				return pid
			}
		}
	}
	t.Fatalf("no process with %q", text)
	return 0
}

// testRoot makes a cgroup for demos to be in.
func testRoot(t *testing.T) string {
	t.Helper()
	tree, err := cgroup.Find("")
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp(tree.Dir, "demotest")
	if err != nil {
		t.Fatalf("these tests need root and a writable cgroup v2: %v", err)
	}
	t.Cleanup(func() {
		if err := removeCgroups(dir); err != nil {
			t.Errorf("%v", err)
		}
	})
	return dir
}

// left returns what is left of the demo: cgroups, processes, mounts.
func (c *command) left(t *testing.T, mountsBefore []string) []string {
	t.Helper()
	var left []string
	entries, err := os.ReadDir(c.root)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.IsDir() {
			left = append(left, "cgroup "+e.Name())
		}
	}
	for pid, line := range c.processes(t) {
		left = append(left, fmt.Sprint("process ", pid, " ", line))
	}
	if now := mounts(t); !slices.Equal(now, mountsBefore) {
		left = append(left, fmt.Sprintf("mounts: %q, before %q", now, mountsBefore))
	}
	return left
}

func mounts(t *testing.T) []string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(string(b), "\n")
}

// The flood is felt by chat through the provider's queue alone, all calls are
// accounted for, and nothing is left.
func TestFloodIsFelt(t *testing.T) {
	before := mounts(t)
	c := startDemo(t, testRoot(t), small(chatAlone, flood))
	code, stderr := c.finish(t)
	if code != 0 {
		t.Fatalf("exit %d: %s", code, stderr)
	}
	if left := c.left(t, before); left != nil {
		t.Errorf("left behind: %q", left)
	}
	if want := "[1/2] chat alone, 0.5 s\n[2/2] flood, no bulkheads, 0.5 s\n"; stderr != want {
		t.Errorf("progress %q, want %q", stderr, want)
	}
	var r Result
	if err := json.Unmarshal(c.stdout.Bytes(), &r); err != nil {
		t.Fatalf("%v in %s", err, &c.stdout)
	}
	alone, flooded := r.phase(chatAlone), r.phase(flood)
	if len(r.Phases) != 2 || alone == nil || flooded == nil || alone.Chat == nil || flooded.Chat == nil || flooded.Batch == nil || flooded.Batch.Jobs == nil {
		t.Fatalf("incomplete: %s", &c.stdout)
	}
	for _, p := range r.Phases {
		if got := p.Chat.Calls + p.ChatFailed; got != 20 {
			t.Errorf("%s: %d calls answered or failed, want 20", p.Phase, got)
		}
	}
	if alone.Batch != nil {
		t.Errorf("batch ran beside chat alone: %+v", alone.Batch)
	}
	// 16 workers in front of 4 places: 12 calls of 48 ms or more queue, 4 at a
	// time, so nearly every chat call waits for several of its own length.
	if flooded.Chat.P50 <= alone.Chat.P50 {
		t.Errorf("chat's median is %g ms under the flood, %g ms alone", flooded.Chat.P50, alone.Chat.P50)
	}
	if flooded.Batch.CallsPerSecond <= 0 || flooded.Batch.Refused != 0 || flooded.Batch.Failed != 0 {
		t.Errorf("batch: %+v", flooded.Batch)
	}
}

// Each signal ends the demo with exit code 130 and nothing left, whenever it
// comes.
func TestSignalAtAnyMoment(t *testing.T) {
	before := mounts(t)
	root := testRoot(t)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	signals := []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP}
	interrupted := 0
	for i := range 12 {
		sig := signals[i%len(signals)]
		c := startDemo(t, root, small(chatAlone, flood))
		if i < 3 {
			c.readTo(t, "[2/2]")
		} else {
			c.find(t, supervisorCommand)
			time.Sleep(time.Duration(random.Int64N(int64(1500 * time.Millisecond))))
		}
		c.Process.Signal(sig)
		if i%2 == 1 {
			c.Process.Signal(sig) // the impatient press twice
		}
		code, stderr := c.finish(t)
		switch {
		case code == 130:
			interrupted++
		case i < 3 || code != 0: // a demo that was done before the signal is no failure
			t.Errorf("%v: exit %d: %s", sig, code, stderr)
		}
		if left := c.left(t, before); left != nil {
			t.Errorf("after %v left behind: %q", sig, left)
		}
	}
	t.Logf("%d of 12 were interrupted", interrupted)
}

// A part that is killed ends the demo with an error that names it, and nothing
// is left.
func TestKilledPart(t *testing.T) {
	before := mounts(t)
	root := testRoot(t)
	for part, name := range map[string]string{
		supervisorCommand: "supervisor",
		providerCommand:   "the provider",
		chatCommand:       "chat",
		batchCommand:      "batch",
	} {
		sc := small(flood)
		sc.Seconds = 5
		c := startDemo(t, root, sc)
		syscall.Kill(c.find(t, " "+part+" "), syscall.SIGKILL)
		code, stderr := c.finish(t)
		if code != 1 || !strings.Contains(stderr, name+" ended early: signal: killed") {
			t.Errorf("%s killed: exit %d: %s", part, code, stderr)
		}
		if left := c.left(t, before); left != nil {
			t.Errorf("%s killed: left behind: %q", part, left)
		}
	}
}

// The demo goes first on the processor, where the kernel has sessions for that.
func TestGoesFirst(t *testing.T) {
	own, err := os.ReadFile("/proc/self/autogroup")
	if errors.Is(err, os.ErrNotExist) || len(own) == 0 {
		t.Skip("no autogroups: a kernel without CONFIG_SCHED_AUTOGROUP, or they are turned off")
	}
	sc := small(flood)
	sc.Seconds = 5
	c := startDemo(t, testRoot(t), sc)
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/autogroup", c.find(t, " "+chatCommand+" ")))
	if err != nil || !strings.HasSuffix(string(b), " nice -20\n") {
		t.Errorf("chat's autogroup: %q, %v", b, err)
	}
	if now, err := os.ReadFile("/proc/self/autogroup"); err != nil || !bytes.Equal(now, own) {
		t.Errorf("the test's own autogroup was %q and is %q, %v", own, now, err)
	}
	c.Process.Signal(syscall.SIGTERM)
	if code, stderr := c.finish(t); code != 130 {
		t.Errorf("exit %d: %s", code, stderr)
	}
}

// Whatever else is in the demo's cgroup ends with it too.
func TestStrayProcess(t *testing.T) {
	before := mounts(t)
	sc := small(flood)
	sc.Seconds = 2
	c := startDemo(t, testRoot(t), sc)
	c.find(t, " "+chatCommand+" ")
	group, err := os.Open(filepath.Join(c.root, fmt.Sprint(treePrefix, c.Process.Pid), "node", "apps"))
	if err != nil {
		t.Fatal(err)
	}
	defer group.Close()
	stray := exec.Command("sleep", "600")
	stray.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(group.Fd()), Pdeathsig: syscall.SIGKILL}
	if err := stray.Start(); err != nil {
		t.Fatal(err)
	}
	defer stray.Process.Kill()
	if code, stderr := c.finish(t); code != 0 {
		t.Errorf("exit %d: %s", code, stderr)
	}
	if left := c.left(t, before); left != nil {
		t.Fatalf("left behind: %q", left)
	}
	if err := stray.Wait(); err == nil || err.Error() != "signal: killed" {
		t.Errorf("the stray process: %v", err)
	}
}

// If the command itself is killed its processes end with it, and the next demo
// removes its cgroup.
func TestKilledDemo(t *testing.T) {
	before := mounts(t)
	sc := small(flood)
	sc.Seconds = 20
	killed := startDemo(t, testRoot(t), sc)
	killed.find(t, " "+chatCommand+" ")
	// A demo beside it must leave the living one alone.
	beside := startDemo(t, killed.root, small(chatAlone))
	if code, stderr := beside.finish(t); code != 0 {
		t.Errorf("a second demo: exit %d: %s", code, stderr)
	}
	killed.find(t, " "+chatCommand+" ")

	killed.Process.Kill()
	killed.finish(t)
	for deadline := time.Now().Add(waitLimit); len(killed.processes(t)) > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("processes of a killed demo live on: %v", killed.processes(t))
		}
	}
	if left := killed.left(t, before); len(left) != 1 {
		t.Errorf("a killed demo should leave its cgroup and only that, this test is about it: %q", left)
	}
	next := startDemo(t, killed.root, small(chatAlone))
	if code, stderr := next.finish(t); code != 0 {
		t.Errorf("the next demo: exit %d: %s", code, stderr)
	}
	if left := next.left(t, before); left != nil {
		t.Errorf("after the next demo: %q", left)
	}
}

// An agent that does not become ready ends the demo with what it said.
func TestAgentFails(t *testing.T) {
	before := mounts(t)
	c := startDemo(t, testRoot(t), small(floodLimited))
	code, stderr := c.finish(t)
	if code != 1 || !strings.Contains(stderr, "the agent ended early: exit status 1; its stderr:\nno luck today") {
		t.Errorf("exit %d: %s", code, stderr)
	}
	if c.stdout.Len() != 0 {
		t.Errorf("stdout: %s", &c.stdout)
	}
	if left := c.left(t, before); left != nil {
		t.Errorf("left behind: %q", left)
	}
}

func TestNotCgroup2(t *testing.T) {
	err := Run(t.Context(), Options{CgroupRoot: t.TempDir(), Stderr: io.Discard})
	if !errors.Is(err, cgroup.ErrNotCgroup2) {
		t.Errorf("%v", err)
	}
}
