package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// errUsage is wrong use: exit code 2.
var errUsage = errors.New("wrong use")

func main() {
	// The kernel kills qemu when the thread that started it ends, so that must
	// be one that lives as long as we do.
	runtime.LockOSThread()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := rig(ctx, os.Args[1:], os.Stdout)
	switch {
	case errors.Is(err, flag.ErrHelp):
	case errors.Is(err, errUsage):
		fmt.Fprintln(os.Stderr, "vm:", err)
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "vm:", err)
		os.Exit(1)
	}
}

// target is a kernel, and the system on a disk that it boots; "" is busybox alone.
type target struct {
	release
	system string
}

func (t target) name() string { return cmp.Or(t.system, t.release.name) }

// options are the command line.
type options struct {
	targets  []target
	machine  machine
	files    []guestFile
	run      string
	skip     string
	only     map[string][]string // by a target's name, expressions of tests that no other target runs
	jobs     int
	refresh  bool
	packages []string
	command  []string
}

func parseOptions(args []string) (options, error) {
	var o options
	names, systems := "all", ""
	f := flag.NewFlagSet("vm", flag.ContinueOnError)
	f.Usage = func() {
		fmt.Fprintln(f.Output(), "usage: vm [flags] [package...] [-- command [argument...]]")
		f.PrintDefaults()
	}
	f.StringVar(&names, "kernel", names, "kernels to boot, comma-separated: 6.1, 6.12, newest, or all")
	f.StringVar(&systems, "system", "", "boot an installed Debian with systemd and its own kernel: 12, 13, or all; -kernel is not heeded")
	f.IntVar(&o.machine.boots, "boots", 1, "with -system: run the commands so many times, with a reboot in between; $BULKHEAD_BOOT counts from 1")
	f.IntVar(&o.machine.cpus, "smp", 0, "virtual CPUs: 2, or 1 with -virtual, if it is not said")
	f.IntVar(&o.machine.memoryMiB, "memory", 2048, "the guest's memory in MiB")
	f.BoolVar(&o.machine.virtual, "virtual", false, "virtual time: a clock that counts instructions; several CPUs take QEMU 10")
	f.DurationVar(&o.machine.timeout, "timeout", 5*time.Minute, "host time for each kernel")
	f.StringVar(&o.run, "run", "", "run only tests that match this expression")
	f.StringVar(&o.skip, "skip", "", "leave out tests that match this expression")
	f.Func("only", "NAME:EXPRESSION, tests that only the kernel or system of that name runs; may be repeated", func(s string) error {
		name, tests, ok := strings.Cut(s, ":")
		if !ok || name == "" || tests == "" {
			return errors.New("must be NAME:EXPRESSION")
		}
		if o.only == nil {
			o.only = map[string][]string{}
		}
		o.only[name] = append(o.only[name], tests)
		return nil
	})
	f.IntVar(&o.jobs, "jobs", 1, "kernels to run at the same time; each emulated CPU wants one of the host's")
	f.BoolVar(&o.refresh, "refresh", false, "fetch the kernels again, for newer ones")
	f.Func("file", "HOST:GUEST, a file or directory to put into the guest; may be repeated", func(s string) error {
		host, guest, ok := strings.Cut(s, ":")
		if !ok || host == "" || !path.IsAbs(guest) {
			return errors.New("must be HOST:GUEST with an absolute path in the guest")
		}
		o.files = append(o.files, guestFile{host, guest})
		return nil
	})
	if i := slices.Index(args, "--"); i >= 0 {
		args, o.command = args[:i], args[i+1:]
	}
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return o, err
		}
		return o, fmt.Errorf("%w: %w", errUsage, err)
	}
	o.packages = f.Args()
	if o.machine.cpus == 0 {
		o.machine.cpus = 2
		if o.machine.virtual {
			o.machine.cpus = 1
		}
	}
	var err error
	if o.targets, err = targets(names, systems); err != nil {
		return o, err
	}
	for name := range o.only {
		if !slices.ContainsFunc(o.targets, func(t target) bool { return t.name() == name }) {
			return o, fmt.Errorf("%w: -only %s: that is not among what is booted", errUsage, name)
		}
	}
	if o.machine.boots < 1 || o.machine.boots > 1 && systems == "" {
		return o, fmt.Errorf("%w: -boots wants a number from 1, and -system", errUsage)
	}
	if len(o.packages) == 0 && len(o.command) == 0 && !o.refresh {
		return o, fmt.Errorf("%w: nothing to run: name packages, or a command after --", errUsage)
	}
	return o, nil
}

// targets are what the flags -kernel and -system name.
func targets(kernels, systems string) ([]target, error) {
	var all []target
	if systems != "" {
		for _, name := range strings.Split(strings.ReplaceAll(systems, "all", "12,13"), ",") {
			_, kernel, err := systemOf(name)
			if err != nil {
				return nil, err
			}
			i := slices.IndexFunc(releases(), func(r release) bool { return r.name == kernel })
			all = append(all, target{releases()[i], name})
		}
		return all, nil
	}
	for _, name := range strings.Split(kernels, ",") {
		found := false
		for _, r := range releases() {
			if name == r.name || name == "all" {
				all = append(all, target{release: r})
				found = true
			}
		}
		if !found {
			return nil, fmt.Errorf("%w: no kernel %q: there are 6.1, 6.12 and newest", errUsage, name)
		}
	}
	return all, nil
}

// rig does what args ask and writes the guests' output and a line for each
// kernel to out.
func rig(ctx context.Context, args []string, out io.Writer) error {
	o, err := parseOptions(args)
	if err != nil {
		return err
	}
	tmp, err := os.MkdirTemp("", "bulkhead-vm-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	if o.machine.virtual && o.machine.cpus > 1 {
		if err := fairTurns(ctx); err != nil {
			return err
		}
	}
	commands, binaries, err := buildTests(ctx, tmp, o)
	if err != nil {
		return err
	}
	if len(o.command) > 0 {
		commands = append(commands, command{args: o.command})
	}
	cache, err := cacheDir()
	if err != nil {
		return err
	}

	kernels := make([]outcome, len(o.targets))
	slots := make(chan struct{}, max(o.jobs, 1))
	shared := &lockedWriter{out: out}
	var wg sync.WaitGroup
	for i, t := range o.targets {
		k, err := getKernel(ctx, cache, t.release, o.refresh, os.Stderr)
		m := o.machine
		if err == nil && t.system != "" {
			k.name = "debian " + t.system
			m.disk, err = getSystem(ctx, cache, t.system, o.refresh, os.Stderr)
		}
		if err != nil {
			kernels[i].err = err
			continue
		}
		if len(commands) == 0 {
			kernels[i].summary = []string{fmt.Sprintf("%-6s  %s", k.name, k.version)}
			continue
		}
		slots <- struct{}{}
		if ctx.Err() != nil {
			kernels[i].err = fmt.Errorf("kernel %s: %w", k.name, ctx.Err())
			break
		}
		wg.Go(func() {
			defer func() { <-slots }()
			runtime.LockOSThread() // see main
			defer runtime.UnlockOSThread()
			kernels[i] = runKernel(ctx, k, m, append(slices.Clone(binaries), o.files...), o.commandsOf(t, commands), shared)
		})
	}
	wg.Wait()
	var errs []error
	for _, k := range kernels {
		for _, line := range k.summary {
			fmt.Fprintln(out, line)
		}
		errs = append(errs, k.err)
	}
	return errors.Join(errs...)
}

// commandsOf are the commands for one target: tests that only others run are skipped.
func (o options) commandsOf(t target, commands []command) []command {
	var skip []string
	if o.skip != "" {
		skip = append(skip, o.skip)
	}
	for _, name := range slices.Sorted(maps.Keys(o.only)) {
		if name != t.name() {
			skip = append(skip, o.only[name]...)
		}
	}
	out := slices.Clone(commands)
	for i, c := range out {
		if c.test != "" {
			out[i].args = append(slices.Clone(c.args), "-test.skip", strings.Join(skip, "|"))
		}
	}
	return out
}

// outcome is what became of one kernel.
type outcome struct {
	summary []string
	err     error
}

// runKernel boots one kernel and judges what its guest reports.
func runKernel(ctx context.Context, k kernel, m machine, files []guestFile, commands []command, out io.Writer) outcome {
	start := time.Now()
	result, err := boot(ctx, k, m, files, commands, &prefixWriter{prefix: k.name + " | ", out: out})
	if err != nil {
		return outcome{err: fmt.Errorf("kernel %s: %w", k.name, err)}
	}
	var oc outcome
	verdict := "ok"
	if err := result.err(); err != nil {
		verdict = "FAILED"
		oc.err = fmt.Errorf("kernel %s (%s): %w\n%s", k.name, k.version, err, result.why())
	}
	t := result.tests()
	oc.summary = append(oc.summary, fmt.Sprintf("%-6s  %-32s %6s: %d passed, %d failed, %d skipped, %.1f s",
		k.name, result.version, verdict, len(t.passed), len(t.failed), len(t.skipped), time.Since(start).Seconds()))
	for _, name := range t.failed {
		oc.summary = append(oc.summary, "        failed: "+name)
	}
	for _, name := range t.skipped {
		oc.summary = append(oc.summary, "        skipped: "+name)
	}
	return oc
}

// lockedWriter keeps what several guests write apart, a write at a time.
type lockedWriter struct {
	mu  sync.Mutex
	out io.Writer
}

func (w *lockedWriter) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.out.Write(b)
}

// buildTests compiles the test binaries of o's packages into dir and returns
// the commands that run them and the files that they need in the guest.
func buildTests(ctx context.Context, dir string, o options) ([]command, []guestFile, error) {
	if len(o.packages) == 0 {
		return nil, nil, nil
	}
	// Only packages with tests: a pattern may cover others.
	listed, err := goTool(ctx, append([]string{"list", "-tags", "vm",
		"-f", "{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}"}, o.packages...)...)
	if err != nil {
		return nil, nil, err
	}
	packages := strings.Fields(listed)
	if len(packages) == 0 {
		return nil, nil, fmt.Errorf("%w: %s have no tests", errUsage, strings.Join(o.packages, " "))
	}
	var commands []command
	var files []guestFile
	for _, p := range packages {
		name := strings.ReplaceAll(p, "/", "-") + ".test"
		host, guest := filepath.Join(dir, name), "/bin/"+name
		// Without debugging information: there is less to load.
		if _, err := goTool(ctx, "test", "-c", "-tags", "vm", "-ldflags", "-s -w", "-o", host, p); err != nil {
			return nil, nil, err
		}
		args := []string{guest, "-test.v=test2json", "-test.run", o.run,
			// Before ours, so that the stacks are shown.
			"-test.timeout", (o.machine.timeout * 9 / 10).String()}
		commands = append(commands, command{args: args, test: p})
		files = append(files, guestFile{host, guest})
	}
	return commands, files, nil
}

// goTool runs go for the guest and returns its standard output.
func goTool(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("go %s: %w", strings.Join(args, " "), err)
	}
	return string(out), nil
}

// prefixWriter puts a prefix before every line. Each Write is whole lines.
type prefixWriter struct {
	mu     sync.Mutex
	prefix string
	out    io.Writer
}

func (w *prefixWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var b bytes.Buffer
	for line := range bytes.Lines(p) {
		b.WriteString(w.prefix)
		b.Write(line)
	}
	if _, err := w.out.Write(b.Bytes()); err != nil {
		return 0, err
	}
	return len(p), nil
}
