package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"bulkhead/pkg/cgroup"
)

// options are the command line.
type options struct {
	sections []string
	output   string
	check    bool

	rounds, connects       int
	only                   string
	rateRounds, httpRounds int

	binary                      string // the agent's
	slots, routes, compartments []int
	idle, scraped               time.Duration

	upkeep    [][2]int // compartments and processes
	upkeepFor time.Duration

	rig, cpuTest string // test/vm and test/cpu, built
	kernels      string
	cases        string
	parsers      string
	cpuRounds    int
	cpus         int
	ordinary     bool
	plain        bool
	jobs         int
}

var errUsage = errors.New("wrong use")

func parseOptions(args []string) (options, error) {
	var o options
	f := flag.NewFlagSet("bench", flag.ContinueOnError)
	sections := f.String("sections", "connect,throughput,growth,upkeep,cpu", "what to measure, comma-separated")
	f.StringVar(&o.output, "o", "table", "table, markdown or json")
	f.BoolVar(&o.check, "check", false, "measure what has limits, and exit with 1 if one is missed")
	f.IntVar(&o.rounds, "rounds", 201, "connect: turns of every configuration")
	f.IntVar(&o.connects, "connects", 300, "connect: connects in a turn")
	f.StringVar(&o.only, "only", "", "connect: comma-separated beginnings of the names of configurations to run; none and empty always run")
	f.IntVar(&o.rateRounds, "rate-rounds", 201, "throughput: turns of every configuration")
	f.IntVar(&o.httpRounds, "http-rounds", 31, "throughput: turns with wrk, a second each")
	f.StringVar(&o.binary, "binary", "bin/bulkhead", "growth: the agent")
	slots := f.String("slots", "1000,10000,100000,1000000", "growth: numbers of slots")
	routes := f.String("routes", "10,100,1000,10000", "growth: numbers of routes")
	compartments := f.String("compartments", "10,100,1000", "growth: numbers of compartments")
	f.DurationVar(&o.idle, "idle", 31*time.Second, "growth: how long an agent is left alone to see what it uses; it reconciles every 30s")
	f.DurationVar(&o.scraped, "scraped", 10*time.Second, "growth: how long it is scraped each second")
	upkeep := f.String("upkeep", "200x5000", "upkeep: numbers of compartments and processes, 50x1000,200x5000 say")
	f.DurationVar(&o.upkeepFor, "upkeep-for", time.Minute, "upkeep: how long each is watched")
	f.StringVar(&o.rig, "rig", "bin/vm", "cpu: test/vm")
	f.StringVar(&o.cpuTest, "cpu-test", "bin/cpu.test", "cpu: the test binary of test/cpu, static and with the tag vm")
	f.StringVar(&o.kernels, "kernels", "all", "cpu: kernels to boot, comma-separated: 6.1, 6.12, newest, or all")
	f.BoolVar(&o.ordinary, "ordinary", false, "cpu: in ordinary time in place of virtual time; only on an idle machine with a processor for each of -cpus")
	f.IntVar(&o.cpus, "cpus", 1, "cpu: CPUs of the virtual machine; several in virtual time take QEMU 10")
	f.StringVar(&o.parsers, "parsers", "8,64", "cpu: numbers of parsers, of 8 and 64")
	f.BoolVar(&o.plain, "plain-parsers", false, "cpu: parsers of one thread and without timers, in place of Go programs")
	f.IntVar(&o.cpuRounds, "cpu-rounds", 1, "cpu: turns of every case, whose requests are put together")
	f.StringVar(&o.cases, "cases", ".", "cpu: only the cases whose names this expression matches")
	f.IntVar(&o.jobs, "jobs", 2, "cpu: kernels to run at the same time")
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return o, err
		}
		return o, fmt.Errorf("%w: %w", errUsage, err)
	}
	for _, s := range strings.Split(*sections, ",") {
		if !slices.Contains([]string{"connect", "throughput", "growth", "upkeep", "cpu"}, s) {
			return o, fmt.Errorf("%w: no section %q: there are connect, throughput, growth, upkeep and cpu", errUsage, s)
		}
		o.sections = append(o.sections, s)
	}
	if f.NArg() > 0 || !slices.Contains([]string{"table", "markdown", "json"}, o.output) {
		return o, fmt.Errorf("%w: see -help", errUsage)
	}
	if o.check {
		// Of growth only the size of a slot and the time of a reload have a limit.
		*slots, *routes, *compartments, o.idle, o.scraped = "100000", "", "", 0, 0
		o.cases = checkedCases
	}
	for list, into := range map[*string]*[]int{slots: &o.slots, routes: &o.routes, compartments: &o.compartments} {
		for _, s := range strings.FieldsFunc(*list, func(r rune) bool { return r == ',' }) {
			n, err := strconv.Atoi(s)
			if err != nil || n < 1 {
				return o, fmt.Errorf("%w: %q is no number", errUsage, s)
			}
			*into = append(*into, n)
		}
	}
	for _, s := range strings.FieldsFunc(*upkeep, func(r rune) bool { return r == ',' }) {
		var z [2]int
		if n, err := fmt.Sscanf(s, "%dx%d", &z[0], &z[1]); n != 2 || err != nil || z[0] < 1 || z[1] < 1 {
			return o, fmt.Errorf("%w: %q is no number of compartments and processes", errUsage, s)
		}
		o.upkeep = append(o.upkeep, z)
	}
	for _, path := range []*string{&o.binary, &o.rig, &o.cpuTest} {
		absolute, err := filepath.Abs(*path)
		if err != nil {
			return o, err
		}
		*path = absolute
	}
	return o, nil
}

func main() {
	// The kernel kills what was started when the thread that started it ends, so that must
	// be one that lives as long as we do.
	runtime.LockOSThread()
	// What this program starts is mostly itself.
	roles := map[string]func([]string) error{"worker": work, "hold": hold, "http": serveHTTP, "pinned": pinned}
	if len(os.Args) > 1 && roles[os.Args[1]] != nil {
		if err := roles[os.Args[1]](os.Args[2:]); err != nil {
			fmt.Fprintf(os.Stderr, "bench: %s: %v\n", os.Args[1], err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := run(ctx, os.Args[1:])
	switch {
	case errors.Is(err, flag.ErrHelp):
	case errors.Is(err, errUsage):
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// places are what the process outside has made for the one inside, and removes.
type places struct{ dir, cgroup string }

const (
	insideVar = "BULKHEAD_BENCH_INSIDE" // its value is places, with a colon between
	upkeepVar = "BULKHEAD_BENCH_UPKEEP" // is set for the section that has the node's network
)

func run(ctx context.Context, args []string) error {
	o, err := parseOptions(args)
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("needs root: it attaches programs")
	}
	// What was measured before something failed is shown all the same.
	if dir, group, ok := strings.Cut(os.Getenv(insideVar), ":"); ok {
		r, err := measure(ctx, o, places{dir, group})
		return errors.Join(err, json.NewEncoder(os.Stdout).Encode(r))
	}
	var r report
	// Those in a network namespace of their own, and the one that is not.
	if slices.ContainsFunc(o.sections, func(s string) bool { return s != "cpu" && s != "upkeep" }) {
		err = outside(ctx, args, syscall.CLONE_NEWNET, &r)
	}
	if err == nil && slices.Contains(o.sections, "upkeep") {
		err = outside(ctx, args, 0, &r)
	}
	if err == nil && slices.Contains(o.sections, "cpu") {
		r.CPU, err = cpuSection(ctx, o)
	}
	progress("")
	var e error
	r.Machine, e = thisMachine()
	if err = errors.Join(err, e, r.print(os.Stdout, o.output)); err != nil {
		return err
	}
	if o.check {
		return r.check(os.Stderr, o.output)
	}
	return nil
}

// outside runs the same again in namespaces of its own, waits for the report, and removes
// whatever may be left.
func outside(ctx context.Context, args []string, network uintptr, r *report) (err error) {
	tree, err := cgroup.Find("")
	if err != nil {
		return err
	}
	p := places{cgroup: filepath.Join(tree.Dir, fmt.Sprintf("bulkhead-bench-%d", os.Getpid()))}
	if p.dir, err = os.MkdirTemp("", "bulkhead-bench-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(p.dir)) }()
	if err := os.Mkdir(p.cgroup, 0o755); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, removeTree(p.cgroup)) }()

	c := exec.CommandContext(ctx, "/proc/self/exe", args...)
	c.Env = append(os.Environ(), insideVar+"="+p.dir+":"+p.cgroup)
	if network == 0 {
		c.Env = append(c.Env, upkeepVar+"=1")
	}
	c.Stderr = os.Stderr
	// A process group of its own: an interrupt from the terminal comes to us alone, and
	// those inside end in their order.
	c.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: network | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL, Setpgid: true,
	}
	c.Cancel = func() error { return c.Process.Signal(os.Interrupt) }
	c.WaitDelay = 30 * time.Second
	out, err := c.Output()
	if ctx.Err() != nil {
		err = errors.New("interrupted")
	} else if err != nil {
		err = fmt.Errorf("inside: %w", err)
	}
	if len(out) > 0 {
		err = errors.Join(err, json.Unmarshal(out, r))
	}
	return err
}

// measure is all sections that run inside.
func measure(ctx context.Context, o options, p places) (r report, err error) {
	if os.Getenv(upkeepVar) != "" {
		l := &lab{ctx: ctx, root: p.cgroup, dir: p.dir, bpffs: filepath.Join(p.dir, "bpf")}
		defer l.close()
		if err := l.mount(); err != nil {
			return r, err
		}
		if r.Upkeep, err = l.upkeepSection(o); err != nil {
			err = fmt.Errorf("upkeep: %w", err)
		}
		return r, err
	}
	l, err := newLab(ctx, p)
	if err != nil {
		return r, err
	}
	defer l.close()
	if slices.Contains(o.sections, "connect") {
		var missing []string
		if r.Connect, missing, err = l.connectSection(o.rounds, o.connects, o.only); err != nil {
			return r, fmt.Errorf("connect: %w", err)
		}
		r.Missing = append(r.Missing, missing...)
	}
	if slices.Contains(o.sections, "throughput") {
		var missing []string
		if r.Throughput, missing, err = l.throughputSection(o.rateRounds, o.httpRounds); err != nil {
			return r, fmt.Errorf("throughput: %w", err)
		}
		r.Missing = append(r.Missing, missing...)
	}
	if slices.Contains(o.sections, "growth") {
		var missing []string
		if r.Growth, missing, err = l.growthSection(o); err != nil {
			return r, fmt.Errorf("growth: %w", err)
		}
		r.Missing = append(r.Missing, missing...)
		if r.Applies, err = l.applyTimes(11); err != nil {
			return r, fmt.Errorf("growth: %w", err)
		}
	}
	return r, nil
}

func thisMachine() (machine, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return machine{}, err
	}
	m := machine{Kernel: unix.ByteSliceToString(u.Release[:]), CPUs: runtime.NumCPU()}
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return m, err
	}
	for _, line := range strings.Split(string(info), "\n") {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			m.Model = strings.TrimSpace(value)
		}
	}
	return m, nil
}

// removeTree kills what runs in a cgroup and below it (cgroup.kill, kernel 5.14), and
// removes them all, the deepest first.
func removeTree(dir string) error {
	err := os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("kill what runs in %s: %w", dir, err)
	}
	// A killed process leaves its cgroup a moment later; many sockets take their time.
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if err := rmdirAll(dir); err == nil || time.Now().After(deadline) {
			return err
		}
	}
}

func rmdirAll(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			err = errors.Join(err, rmdirAll(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(err, unix.Rmdir(dir))
}
