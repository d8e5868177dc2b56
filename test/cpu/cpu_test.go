//go:build vm

package cpu

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
)

const (
	// binaryVar is the path of the binary under test.
	binaryVar = "BULKHEAD_BINARY"
	// few and many are how many parsers there are.
	few, many = 8, 64
	// samples are the requests of a case. One cgroup needs fewer: each takes up to ten times
	// as long, and its multiple is far from the limit.
	samples, samplesStarved = 120, 60
	// samplesBench are those of a case of the benchmark, which is about the slowest of a
	// hundred, too.
	samplesBench = 150
	// starved is how much longer, at least, the handler takes in one cgroup with the
	// parsers: if it did not, the load would be too small to show anything.
	starved = 3.0
	// isolated is how much longer, at most, nine of ten requests take beside them with
	// bulkheads; unlucky, 95 of a hundred. On 7.2 one request in twenty waits for a slice of
	// the scheduler (0.7 ms) behind class batch, whatever the weights; not behind background,
	// whose cgroups are idle.
	isolated, unlucky = 1.2, 1.5
	// undisturbed is that of 95 of a hundred beside parsers that take the CPU only when it is theirs.
	undisturbed = 1.05
	// conserved is the part of the machine that parsers get, at least, while the handler has
	// nothing to do.
	conserved = 0.95
	// casesVar is an expression: of the benchmark only the cases that it matches are done.
	casesVar = "BULKHEAD_CPU_CASES"
	// plainVar, if it is set, has the benchmark's parsers be plain ones: see plainParser.
	plainVar = "BULKHEAD_CPU_PLAIN"
	// roundsVar is how often the benchmark does all cases by turns, 1 if it is not set.
	roundsVar = "BULKHEAD_CPU_ROUNDS"
)

const head = `
apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers: {}
features:
`

const classes = `
  chat:        {class: realtime}
  batch_parse: {class: batch}
  night_parse: {class: background}
`

// A handler beside parsers of a lower class answers as if it were alone, and they work on
// with what it leaves.
func TestHandlerBesideParsers(t *testing.T) { besideParsers(t, few) }

// So it does beside many, if they have no timers.
func TestHandlerBesideManyParsers(t *testing.T) { besideParsers(t, many) }

func besideParsers(t *testing.T, parsers int) {
	n := newNode(t)
	n.plain = parsers == many
	together := n.in(n.Mkdir("together"))
	alone := n.measure("alone", samples, 0, together, together)
	one := n.measure("one cgroup", samplesStarved, few, together, together)
	chat, batch, night := n.through("chat"), n.through("batch_parse"), n.through("night_parse")
	results := []result{alone, one,
		n.measure("chat beside batch", samples, parsers, chat, batch),
		n.measure("chat beside background", samples, parsers, chat, night),
	}
	t.Logf("kernel %s, p95 as a multiple of that alone:\n%s", release(t), table(results...))

	// About 2 ms, or the handler is not the one that the multiples are about.
	if alone.at(50) < time.Millisecond || alone.at(50) > 4*time.Millisecond {
		t.Errorf("alone the handler takes %s, want about 2 ms", alone.at(50))
	}
	if x := one.times(alone); x < starved {
		t.Errorf("%s: p95 is %.2f times that alone, want at least %.1f: the parsers are no load", one.name, x, starved)
	}
	for _, r := range results[2:] {
		name := fmt.Sprintf("%s, %d parsers", r.name, r.parsers)
		if x := float64(r.at(90)) / float64(alone.at(90)); x > isolated {
			t.Errorf("%s: p90 is %.2f times that alone, want at most %.1f", name, x, isolated)
		}
		most := unlucky
		if n.plain {
			most = undisturbed
		}
		if x := r.times(alone); x > most {
			t.Errorf("%s: p95 is %.2f times that alone, want at most %.2f", name, x, most)
		}
		for i, d := range r.documents {
			if d == 0 {
				t.Errorf("%s: parser %d has parsed nothing in %s", name, i, r.took)
			}
		}
		// The handler takes less than a fifth of the CPU, so most of it is theirs.
		if r.rate() < one.rate()/2 {
			t.Errorf("%s: %.1f documents a second, want at least half of the %.1f in one cgroup", name, r.rate(), one.rate())
		}
		// While the handler has nothing to do it is all theirs.
		if r.idle < conserved {
			t.Errorf("%s: with the handler idle they get %.3f of the machine, want %.2f", name, r.idle, conserved)
		}
	}
}

// Policies of the cases that are not the classes' own. Equal weights show what the rest
// does by itself.
const (
	equal = `
  chat:        {class: realtime, cpu: {weight: 100}}
  batch_parse: {class: batch, cpu: {weight: 100}}
`
	// %d is a fifth less than the machine, in percent.
	quota = `
  chat:        {class: realtime, cpu: {weight: 100}}
  batch_parse: {class: batch, cpu: {weight: 100, max: %d%%}}
`
	quotaBurst = `
  chat:        {class: realtime, cpu: {weight: 100}}
  batch_parse: {class: batch, cpu: {weight: 100, max: %d%%, burst: 80ms}}
`
	ownCPU = `
  chat:        {class: realtime, cpu: {cpus: 0, exclusive: true}}
  batch_parse: {class: batch}
`
	keptOff = `
  chat:        {class: realtime}
  batch_parse: {class: batch, cpu: {cpus: not 0}}
`
	uclamped = `
  chat:        {class: realtime, cpu: {weight: 100, uclamp_min: 100%}}
  batch_parse: {class: batch, cpu: {weight: 100, uclamp_max: 20%}}
`
	idleBatch = `
  chat:        {class: realtime, cpu: {cpus: 0, exclusive: true}}
  batch_parse: {class: background}
`
)

// trial is a case of the benchmark.
type trial struct {
	name string
	// features are a policy's; "" are the classes as they are.
	features        string
	number          int
	handler, parser starter
}

// trials are what the kernel offers, in the order of what one would try.
func (n *node) trials() []trial {
	together := n.in(n.Mkdir("together"))
	chat, batch, night := n.through("chat"), n.through("batch_parse"), n.through("night_parse")
	fifth := func(policy string) string { return fmt.Sprintf(policy, 80*runtime.NumCPU()) }
	all := []trial{
		{"one cgroup", "", samplesStarved, together, together},
		{"one cgroup, handler's slice 0.1 ms", "", samplesStarved, n.as(roleSlice, together), together},
		{"one cgroup, parsers SCHED_BATCH", "", samplesStarved, together, n.as(roleBatch, together)},
		{"one cgroup, parsers SCHED_IDLE", "", samplesBench, together, n.as(roleIdle, together)},
		{"SCHED_FIFO", "", samplesBench, n.as(roleFIFO, together), together},
		{caseBatch, "", samplesBench, chat, batch},
		{caseBackground, "", samplesBench, chat, night},
		{caseBatch + ", handler's slice 0.1 ms", "", samplesBench, n.as(roleSlice, chat), batch},
		{caseBatch + ", parsers' slice 0.1 ms", "", samplesBench, chat, n.as(roleSlice, batch)},
		{caseBatch + ", parsers SCHED_IDLE", "", samplesBench, chat, n.as(roleIdle, batch)},
		{"equal weights", equal, samplesBench, chat, batch},
		{"equal weights, handler's slice 0.1 ms", equal, samplesBench, n.as(roleSlice, chat), batch},
		{"equal weights, batch max 80%", fifth(quota), samplesBench, chat, batch},
		{"equal weights, batch max 80%, burst 80 ms", fifth(quotaBurst), samplesBench, chat, batch},
	}
	if n.has("cpu.uclamp.min") {
		all = append(all, trial{"equal weights, uclamp", uclamped, samplesBench, chat, batch})
	}
	if runtime.NumCPU() > 1 {
		all = append(all,
			trial{caseBatch + ", own CPU", ownCPU, samplesBench, chat, batch},
			trial{caseBatch + " kept off a CPU", keptOff, samplesBench, chat, batch},
			trial{caseBackground + ", own CPU", idleBatch, samplesBench, chat, batch})
	}
	return all
}

// Cases that test/bench has limits for.
const (
	caseBatch      = "realtime beside batch"
	caseBackground = "realtime beside background"
)

// The table of docs/cpu.md: make bench runs it. It prints one line of JSON for each
// case and judges nothing; the limits are test/bench's. In ordinary time a host has better and
// worse minutes: with several rounds each case has requests in all of them.
func BenchmarkHandlerBesideParsers(b *testing.B) {
	rounds := 1
	if text := os.Getenv(roundsVar); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			b.Fatalf("%s is %q, want a number from 1", roundsVar, text)
		}
		rounds = n
	}
	for _, parsers := range []int{few, many} {
		b.Run(fmt.Sprint(parsers), func(b *testing.B) {
			for b.Loop() {
				n := newNode(b)
				n.plain = os.Getenv(plainVar) != ""
				in := n.in(n.Mkdir("alone"))
				alone := result{name: "alone", parsers: parsers, plain: n.plain} // that are beside it in the other cases of this run
				trials := slices.DeleteFunc(n.trials(), func(c trial) bool {
					return !regexp.MustCompile(os.Getenv(casesVar)).MatchString(c.name)
				})
				all := make([]result, len(trials))
				for range rounds {
					alone = alone.and(n.measure(alone.name, samplesBench, 0, in, in))
					if len(alone.latencies) == rounds*samplesBench {
						alone.print(b, alone)
					}
					for i, c := range trials {
						n.setPolicy(c.features)
						number := c.number
						if number == samplesStarved {
							number = number * few / parsers * 2
						}
						all[i].name, all[i].parsers, all[i].plain = c.name, parsers, n.plain
						all[i] = all[i].and(n.measure(c.name, min(number, c.number), parsers, c.handler, c.parser))
						if len(all[i].latencies) == rounds*min(number, c.number) {
							all[i].print(b, alone)
						}
					}
				}
			}
		})
	}
}

// has reports whether the kernel has a file in its cgroups.
func (n *node) has(file string) bool {
	_, err := os.Stat(filepath.Join(n.Mkdir("together").Path, file))
	return err == nil
}

// newNode makes one with an agent. It starts before all cases, so that they differ in
// nothing but the parsers and the place: outside of the slices an agent touches no CPU
// value.
func newNode(t testing.TB) *node {
	t.Helper()
	turnOn(t, "cpu", "memory", "cpuset")
	stopDAMON(t)
	n := &node{Env: kerneltest.New(t), t: t, dir: t.TempDir(), written: t.TempDir()}
	n.startAgent(head + classes)
	n.features = classes
	return n
}

// stopDAMON ends the kernel's own watching of memory, where it is on by default (Debian's
// 7.2). Its thread has the weight of any other outside of all cgroups, and took 7 to 30 parts
// in a hundred of one CPU beside 64 parsers, more with each case: docs/cpu.md.
func stopDAMON(t testing.TB) {
	t.Helper()
	err := os.WriteFile("/sys/module/damon_stat/parameters/enabled", []byte("N"), 0)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("stop DAMON: %v", err)
	}
}

// setPolicy brings features into force; "" are the classes.
func (n *node) setPolicy(features string) {
	n.t.Helper()
	if features == "" {
		features = classes
	}
	if features == n.features {
		return
	}
	if err := os.WriteFile(filepath.Join(n.dir, "policy.yaml"), []byte(head+features), 0o644); err != nil {
		n.t.Fatal(err)
	}
	args := n.bulkhead("reload")
	if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
		n.t.Fatalf("reload: %v\n%s", err, out)
	}
	n.features = features
}

// turnOn turns controllers on for the children of the root until the test ends.
func turnOn(t testing.TB, controllers ...string) {
	t.Helper()
	root, err := kerneltest.Root()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range controllers {
		words := func(file string) []string {
			text, err := os.ReadFile(filepath.Join(root, file))
			if err != nil {
				t.Fatal(err)
			}
			return strings.Fields(string(text))
		}
		if !slices.Contains(words("cgroup.controllers"), c) {
			t.Fatalf("this kernel lacks: the %s controller on cgroup v2, and the guest must have it", c)
		}
		if slices.Contains(words("cgroup.subtree_control"), c) {
			continue
		}
		control := filepath.Join(root, "cgroup.subtree_control")
		if err := os.WriteFile(control, []byte("+"+c), 0); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := os.WriteFile(control, []byte("-"+c), 0); err != nil {
				t.Error(err)
			}
		})
	}
}

// node is what the test has to itself.
type node struct {
	*kerneltest.Env
	t   testing.TB
	dir string // the agent's files
	// written are the parsers' files: elsewhere, as the agent watches the directory of its
	// policy and each document would wake it.
	written string
	// features are in force.
	features string
	plain    bool // the parsers: see plainParser
}

// starter gives a command that becomes another in a role, somewhere.
type starter func(role string, args ...string) *exec.Cmd

// in starts inside a cgroup: the process is never anywhere else.
func (n *node) in(cg kerneltest.Cgroup) starter {
	dir, err := os.Open(cg.Path)
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { dir.Close() })
	return func(role string, args ...string) *exec.Cmd {
		cmd := inRole(role, args...)
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
		return cmd
	}
}

// as starts the same in a policy of the scheduler.
func (n *node) as(policy string, s starter) starter {
	return func(role string, args ...string) *exec.Cmd {
		return s(policy, append([]string{n.self(), role}, args...)...)
	}
}

// through starts by bulkhead exec.
func (n *node) through(feature string) starter {
	return func(role string, args ...string) *exec.Cmd {
		return inRole(role, n.bulkhead("exec", append([]string{"--feature", feature, "--"}, args...)...)...)
	}
}

func (n *node) self() string {
	n.t.Helper()
	path, err := os.Executable()
	if err != nil {
		n.t.Fatal(err)
	}
	return path
}

// bulkhead is a command line of the binary under test that is about this node.
func (n *node) bulkhead(command string, args ...string) []string {
	n.t.Helper()
	binary := os.Getenv(binaryVar)
	if binary == "" {
		path, err := exec.LookPath("bulkhead")
		if err != nil {
			n.t.Fatalf("the binary under test: %v", err)
		}
		binary = path
	}
	return append([]string{binary, command, "--cgroup-root", n.Cgroup.Path, "--bpffs", n.BPFFS,
		"--admin-socket", filepath.Join(n.dir, "agent.sock")}, args...)
}

// startAgent brings a policy into force, until the test ends.
func (n *node) startAgent(policy string) {
	n.t.Helper()
	file, ready := filepath.Join(n.dir, "policy.yaml"), filepath.Join(n.dir, "ready")
	if err := os.WriteFile(file, []byte(policy), 0o644); err != nil {
		n.t.Fatal(err)
	}
	args := n.bulkhead("agent", "--policy", file, "--ready-file", ready)
	cmd := exec.Command(args[0], args[1:]...)
	var log bytes.Buffer
	cmd.Stderr = &log
	if err := cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		cmd.Wait()
		close(ended)
	}()
	n.t.Cleanup(func() {
		cmd.Process.Kill()
		<-ended // then the log is whole
		if n.t.Failed() {
			n.t.Logf("the agent's log:\n%s", &log)
		}
	})
	kerneltest.PollFor(n.t, 2*time.Minute, "the agent is ready", func() error {
		select {
		case <-ended:
			n.t.Fatalf("the agent ended: %s", cmd.ProcessState)
		default:
		}
		text, err := os.ReadFile(ready)
		if err == nil && len(text) == 0 {
			err = fmt.Errorf("%s is empty", ready)
		}
		return err
	})
}

// measure starts a handler and so many parsers, sends requests, and ends them.
func (n *node) measure(name string, number, parsers int, handler, parser starter) result {
	n.t.Helper()
	requests, toHandler := n.pipe()
	fromHandler, answers := n.pipe()
	h := handler(noRole, handlerCommand()...)
	h.Stdin, h.Stdout = requests, answers
	defer n.start(h)()

	var files []string
	for i := range parsers {
		file, err := os.Create(filepath.Join(n.written, fmt.Sprintf("documents-%d", i)))
		if err != nil {
			n.t.Fatal(err)
		}
		defer file.Close()
		files = append(files, file.Name())
		role, command := n.parserCommand()
		p := parser(role, command...)
		p.Stdout = file
		defer n.start(p)()
	}
	kerneltest.PollFor(n.t, time.Minute, name+": all parsers are at work", func() error {
		if d := n.documents(files); slices.Contains(d, 0) {
			return fmt.Errorf("%d documents", d)
		}
		return nil
	})
	stat := ""
	if parsers > 0 {
		stat = filepath.Join(n.cgroupOf(parser), "cpu.stat")
	}

	prober := inRole(roleFIFO, n.self(), roleProber, n.self(), strconv.Itoa(number), stat)
	prober.ExtraFiles = []*os.File{toHandler, fromHandler} // its 3 and 4
	prober.Stderr = os.Stderr
	before := n.documents(files)
	began := time.Now()
	out, err := prober.Output()
	r := result{name: name, parsers: parsers, took: time.Since(began), documents: n.documents(files)}
	var p probed
	if err == nil {
		err = json.Unmarshal(out, &p)
	}
	if err != nil || len(p.Latencies) != number {
		n.t.Fatalf("%s: the prober: %v, %d latencies, want %d", name, err, len(p.Latencies), number)
	}
	r.latencies, r.idle = p.Latencies, p.Idle/float64(runtime.NumCPU())
	slices.Sort(r.latencies)
	for i := range r.documents {
		r.documents[i] -= before[i]
	}
	return r
}

// cgroupOf is where a starter starts: that of a process which it has started.
func (n *node) cgroupOf(s starter) string {
	n.t.Helper()
	out, err := s(noRole, "cat", "/proc/self/cgroup").Output()
	path, ok := strings.CutPrefix(strings.TrimSpace(string(out)), "0::")
	if err != nil || !ok {
		n.t.Fatalf("the cgroup of a process: %q, %v", out, err)
	}
	root, err := kerneltest.Root()
	if err != nil {
		n.t.Fatal(err)
	}
	if strings.HasSuffix(path, ".scope") { // of exec: the slice has them all
		path = filepath.Dir(path)
	}
	return filepath.Join(root, path)
}

// pipe is closed when the test ends; a child has copies of its own.
func (n *node) pipe() (r, w *os.File) {
	n.t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() {
		r.Close()
		w.Close()
	})
	return r, w
}

// start starts a command; end kills it and waits until it is gone.
func (n *node) start(cmd *exec.Cmd) (end func()) {
	n.t.Helper()
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	return func() {
		cmd.Process.Kill()
		cmd.Wait()
	}
}

// documents counts what each parser has done.
func (n *node) documents(files []string) []int64 {
	n.t.Helper()
	var all []int64
	for _, f := range files {
		info, err := os.Stat(f)
		if err != nil {
			n.t.Fatal(err)
		}
		all = append(all, info.Size())
	}
	return all
}

// result is what one case showed.
type result struct {
	name      string
	parsers   int
	plain     bool
	latencies []time.Duration // sorted
	took      time.Duration
	documents []int64 // that each parser has done meanwhile
	idle      float64 // the parsers' part of the machine while the handler had nothing to do
}

// and adds the requests of another round, which may be the first.
func (r result) and(round result) result {
	if r.took > 0 {
		r.idle = (r.idle*r.took.Seconds() + round.idle*round.took.Seconds()) / (r.took + round.took).Seconds()
		for i := range r.documents {
			r.documents[i] += round.documents[i]
		}
	} else {
		r.idle, r.documents = round.idle, round.documents
	}
	r.took += round.took
	r.latencies = slices.Sorted(slices.Values(slices.Concat(r.latencies, round.latencies)))
	return r
}

// at is a percentile: the smallest latency that so many in a hundred do not exceed.
func (r result) at(percent int) time.Duration {
	return r.latencies[(len(r.latencies)*percent+99)/100-1]
}

// times is how many times as long as the other's the 95th percentile is.
func (r result) times(other result) float64 {
	return float64(r.at(95)) / float64(other.at(95))
}

// rate is documents a second, of all parsers together.
func (r result) rate() float64 {
	var sum int64
	for _, d := range r.documents {
		sum += d
	}
	return float64(sum) / r.took.Seconds()
}

// print writes a line of JSON to standard output; times are milliseconds.
func (r result) print(t testing.TB, alone result) {
	t.Helper()
	ms := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	line, err := json.Marshal(map[string]any{
		"kernel": release(t), "cpus": runtime.NumCPU(), "parsers": r.parsers, "plain": r.plain, "case": r.name, "requests": len(r.latencies),
		"p50_ms": ms(r.at(50)), "p95_ms": ms(r.at(95)), "p99_ms": ms(r.at(99)),
		"p95_times_alone": r.times(alone), "documents_per_second": r.rate(), "idle_share": r.idle,
	})
	if err != nil {
		t.Fatal(err)
	}
	fmt.Println(string(line))
}

// table prints results, the first of which is that alone.
func table(results ...result) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "case\tparsers\trequests\tp50 ms\tp95 ms\tp99 ms\tmax ms\tp95 x\tdocuments/s\teach parser\thandler idle\t")
	for _, r := range results {
		fmt.Fprintf(w, "%s\t%d\t%d", r.name, r.parsers, len(r.latencies))
		for _, p := range []int{50, 95, 99, 100} {
			fmt.Fprintf(w, "\t%.2f", float64(r.at(p))/float64(time.Millisecond))
		}
		fmt.Fprintf(w, "\t%.2f\t%.1f", r.times(results[0]), r.rate())
		if len(r.documents) > 0 {
			fmt.Fprintf(w, "\t%d to %d", slices.Min(r.documents), slices.Max(r.documents))
		} else {
			fmt.Fprint(w, "\t")
		}
		fmt.Fprintf(w, "\t%.3f\t\n", r.idle)
	}
	w.Flush()
	return b.String()
}

// release is that of the running kernel.
func release(t testing.TB) string {
	t.Helper()
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	return unix.ByteSliceToString(u.Release[:])
}
