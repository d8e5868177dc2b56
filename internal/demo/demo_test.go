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

// small is a scenario whose runs take a second or two.
func small(runs ...step) scenario {
	return scenario{
		Runs: runs,
		Flood: flood{
			Seconds:     0.5,
			ServeAtOnce: 4,
			ChatRate:    40,
			ChatWork:    20 * time.Millisecond,
			ChatLimit:   2,
			Workers:     16,
			BatchWork:   60 * time.Millisecond,
			BatchLimit:  2,
		},
		Slow: slow{
			Threads:  2,
			SlowWork: 300 * time.Millisecond,
			Limit:    1,
			Rounds:   1,
			Calls:    3,
			First:    30 * time.Millisecond,
			Apart:    10 * time.Millisecond,
		},
		Tenants: tenants{
			ServeAtOnce: 2,
			Work:        20 * time.Millisecond,
			Workers:     20,
			LimitA:      1,
			LimitB:      1,
			Calls:       3,
			Step:        5 * time.Millisecond,
			Rounds:      1,
			Apart:       500 * time.Millisecond,
		},
		Bounded:  bounded{ServeAtOnce: 4, Work: 20 * time.Millisecond, Calls: 20},
		CPU:      cpu{Parsers: 2, Records: 50, Seconds: 0.5, Apart: 50 * time.Millisecond},
		Database: database{Connections: 4, Sessions: 6, Limit: 2, Calls: 5, Apart: 100 * time.Millisecond},
	}
}

// Runs that many tests do.
func floodAlone() step   { return step{"flood", alone} }
func floodWithout() step { return step{"flood", without} }

// command is a demo that runs as a process of its own.
type command struct {
	*exec.Cmd
	root   string // its --cgroup-root, the test's own
	mark   string // in the environment of all its processes
	stdout bytes.Buffer
	stderr *bufio.Reader
}

const waitLimit = 60 * time.Second

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
	c := startDemo(t, testRoot(t), small(floodAlone(), floodWithout()))
	code, stderr := c.finish(t)
	if code != 0 {
		t.Fatalf("exit %d: %s", code, stderr)
	}
	if left := c.left(t, before); left != nil {
		t.Errorf("left behind: %q", left)
	}
	if !strings.HasPrefix(stderr, "[1/2] flood, alone; about 3 s left\n[2/2] flood, without bulkheads; about ") || strings.Count(stderr, "\n") != 2 {
		t.Errorf("progress %q", stderr)
	}
	var r Result
	if err := json.Unmarshal(c.stdout.Bytes(), &r); err != nil {
		t.Fatalf("%v in %s", err, &c.stdout)
	}
	if len(r.Phases) != 2 || r.Phases[0].Chat == nil || r.Phases[1].Chat == nil || r.Phases[1].Batch == nil || r.Phases[1].Batch.Jobs == nil {
		t.Fatalf("incomplete: %s", &c.stdout)
	}
	alone, flooded := r.Phases[0], r.Phases[1]
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

// Every experiment can be done without bulkheads, accounts for all of its
// calls, and leaves nothing.
func TestWithoutBulkheads(t *testing.T) {
	before := mounts(t)
	sc := small(step{"slow", alone}, step{"slow", without}, step{"tenants", alone}, step{"tenants", without}, step{"bounded", alone}, step{"bounded", without}, step{"cpu", alone}, step{"cpu", without}, step{"database", without})
	c := startDemo(t, testRoot(t), sc)
	code, stderr := c.finish(t)
	if code != 0 {
		t.Fatalf("exit %d: %s", code, stderr)
	}
	if left := c.left(t, before); left != nil {
		t.Errorf("left behind: %q", left)
	}
	var r Result
	if err := json.Unmarshal(c.stdout.Bytes(), &r); err != nil {
		t.Fatalf("%v in %s", err, &c.stdout)
	}
	runs := map[step]RunResult{}
	for _, e := range r.Experiments {
		for _, run := range e.Runs {
			runs[step{e.Name, runName(run.Run)}] = run
		}
	}
	for s, want := range map[step]int{
		{"slow", alone}: 3, {"slow", without}: 3, {"tenants", alone}: 3, {"tenants", without}: 3, {"bounded", without}: 20, {"cpu", alone}: 10, {"cpu", without}: 10,
	} {
		if run, ok := runs[s]; !ok || run.Calls != want || run.Failed+run.Refused != 0 {
			t.Errorf("%v: want %d calls answered: %+v", s, want, run)
		}
	}
	// The shared threads are all with the slow service until 300 ms, 50 ms
	// after the last call.
	if run := runs[step{"slow", without}]; run.P50 < 240 || run.Load == nil || run.Load.Done != 2 {
		t.Errorf("slow: %+v", run)
	}
	// Twenty calls, two at a time, are before each of B's.
	if run := runs[step{"tenants", without}]; run.P50 < 100 {
		t.Errorf("tenants: %+v", run)
	}
	// Five rounds of four.
	if run := runs[step{"bounded", without}]; run.P95 < 100 || run.P50 < 60 || run.WallMS < run.P99 {
		t.Errorf("bounded: %+v", run)
	}
	// Those that have a place, and nobody before them.
	if run := runs[step{"bounded", alone}]; run.Calls != 4 || run.Refused != 16 || run.Failed != 0 || run.P95 >= runs[step{"bounded", without}].P95 {
		t.Errorf("bounded alone: %+v", run)
	}
	for _, name := range []string{"slow", "tenants"} {
		if run := runs[step{name, alone}]; run.Load != nil || run.P50 >= runs[step{name, without}].P50 {
			t.Errorf("%s alone: %+v", name, run)
		}
	}
	// The report has all connections.
	if run := runs[step{"database", without}]; run.Failed != 5 || !strings.Contains(run.Error, "too many clients") || run.Load == nil || run.Load.Done != 4 {
		t.Errorf("database: %+v", run)
	}
}

// Each signal ends the demo with exit code 130 and nothing left, in whatever
// experiment and whenever it comes.
func TestSignalAtAnyMoment(t *testing.T) {
	before := mounts(t)
	root := testRoot(t)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	signals := []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP}
	experiments := Experiments()
	interrupted := 0
	for i := range 3 * len(experiments) {
		sig := signals[i/len(experiments)]
		name := experiments[i%len(experiments)]
		sc := small(floodAlone(), step{name, without})
		if i < len(experiments) {
			sc.Runs = sc.Runs[1:]
		}
		c := startDemo(t, root, sc)
		if i < len(experiments) {
			c.readTo(t, "[1/1] "+name)
		}
		c.find(t, supervisorCommand)
		time.Sleep(time.Duration(random.Int64N(int64(1500 * time.Millisecond))))
		c.Process.Signal(sig)
		if i%2 == 1 {
			c.Process.Signal(sig) // the impatient press twice
		}
		code, stderr := c.finish(t)
		switch {
		case code == 130:
			interrupted++
		case code != 0: // a demo that was done before the signal is no failure
			t.Errorf("%s, %v: exit %d: %s", name, sig, code, stderr)
		}
		if left := c.left(t, before); left != nil {
			t.Errorf("%s, after %v left behind: %q", name, sig, left)
		}
	}
	t.Logf("%d of %d were interrupted", interrupted, 3*len(experiments))
}

// A part that is killed ends the demo with an error that names it, and nothing
// is left.
func TestKilledPart(t *testing.T) {
	before := mounts(t)
	root := testRoot(t)
	for part, name := range map[string]string{
		supervisorCommand: "supervisor",
		providerCommand:   "the provider",
		proberCommand:     "the prober",
		"/app.":           "the application",
		"batch.py":        "batch",
	} {
		sc := small(floodWithout())
		sc.Flood.Seconds = 5
		c := startDemo(t, root, sc)
		c.find(t, proberCommand) // all parts run
		syscall.Kill(c.find(t, part), syscall.SIGKILL)
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
	sc := small(floodWithout())
	sc.Flood.Seconds = 5
	c := startDemo(t, testRoot(t), sc)
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/autogroup", c.find(t, proberCommand)))
	if err != nil || !strings.HasSuffix(string(b), " nice -20\n") {
		t.Errorf("the prober's autogroup: %q, %v", b, err)
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
	sc := small(floodWithout())
	sc.Flood.Seconds = 2
	c := startDemo(t, testRoot(t), sc)
	c.find(t, proberCommand)
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
	sc := small(floodWithout())
	sc.Flood.Seconds = 20
	killed := startDemo(t, testRoot(t), sc)
	killed.find(t, proberCommand)
	// A demo beside it must leave the living one alone.
	beside := startDemo(t, killed.root, small(floodAlone()))
	if code, stderr := beside.finish(t); code != 0 {
		t.Errorf("a second demo: exit %d: %s", code, stderr)
	}
	killed.find(t, proberCommand)

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
	next := startDemo(t, killed.root, small(floodAlone()))
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
	c := startDemo(t, testRoot(t), small(step{"flood", with}))
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

// A name that is none is wrong use, before anything is made.
func TestNoSuchExperiment(t *testing.T) {
	err := Run(t.Context(), Options{Only: []string{"slow", "flod"}, Stderr: io.Discard})
	if !errors.Is(err, ErrNoSuchExperiment) || !strings.Contains(err.Error(), `"flod"`) || !strings.Contains(err.Error(), "flood, slow") {
		t.Errorf("%v", err)
	}
}

// Where nothing can be done, that is a failure that says what is missing.
func TestNothingToShow(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	err := Run(t.Context(), Options{CgroupRoot: testRoot(t), Only: []string{"flood", "bounded"}, Stderr: io.Discard})
	if !errors.Is(err, ErrNothingShown) || !strings.Contains(err.Error(), "flood: python3 is not installed: apt install python3\nbounded: curl is not installed: apt install curl") {
		t.Errorf("%v", err)
	}
}

func TestNotCgroup2(t *testing.T) {
	err := Run(t.Context(), Options{CgroupRoot: t.TempDir(), Stderr: io.Discard})
	if !errors.Is(err, cgroup.ErrNotCgroup2) {
		t.Errorf("%v", err)
	}
}
