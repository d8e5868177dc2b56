package main

import (
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"sync"
)

// Why a run that ended in order is a failure nevertheless.
var (
	errPanic    = errors.New("the kernel panicked")
	errNoReport = errors.New("the guest did not report")
	errCommand  = errors.New("a command failed")
	errNoTest   = errors.New("no test was run")
)

// tail is how many of the last lines a failure shows of a guest, or of each test that failed.
const tail = 30

// run is what one guest said. Its methods are called by the readers of the
// three serial ports at the same time; err and tests only when they are done.
type run struct {
	nonce    string
	commands []command
	ended    error // how qemu ended

	mu      sync.Mutex
	out     io.Writer
	lines   []string // the last ones of console and output
	version string
	panic   string
	patched bool // it ended by an int3
	fail    string
	codes   map[int]int // exit codes by index of the command
	done    bool
	current int // index of the command that is running
	results []result
	test    string              // that what comes is from
	said    map[string][]string // by the tests that run or failed, the last lines of each
}

// result is what became of the tests of one command, subtests too.
type result struct{ passed, failed, skipped []string }

func newRun(nonce string, commands []command, out io.Writer) *run {
	return &run{nonce: nonce, commands: commands, out: out, codes: map[int]int{}, results: make([]result, len(commands)+1), said: map[string][]string{}}
}

// int3 is how an oops begins that is the emulator's: the kernel patches its code by writing int3 over it first, and a CPU that
// comes by is to be sent on by the trap's handler. With several CPUs what QEMU translated before may trap when that handler
// knows of it no more. On a machine of silicon there is no such oops, and nothing of ours could make one.
var int3 = regexp.MustCompile(`\bint3: [0-9a-f]{4} \[#`)

// emulators reports whether the guest was ended by its emulator, so that it is to be started again: before it had said
// anything, or at any time by an int3. What was written on a disk stays, so one that has a disk goes on from there.
func (r *run) emulators(m machine) bool {
	return r.early() || r.panic != "" && r.patched && m.disk == ""
}

// early reports whether the kernel panicked before the guest had said anything.
func (r *run) early() bool { return r.panic != "" && r.version == "" }

// after adds what the tests of the start before did.
func (r *run) after(before *run) *run {
	if before != nil {
		for i, c := range before.results {
			r.results[i].passed = append(c.passed, r.results[i].passed...)
			r.results[i].failed = append(c.failed, r.results[i].failed...)
			r.results[i].skipped = append(c.skipped, r.results[i].skipped...)
		}
	}
	return r
}

// show prints and remembers a line. Called with mu held.
func (r *run) show(line string) {
	fmt.Fprintln(r.out, line)
	r.lines = lastLines(append(r.lines, line))
}

func lastLines(lines []string) []string { return lines[max(0, len(lines)-tail):] }

// console takes a line of the kernel's console.
func (r *run) console(line string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.show("# " + line)
	r.patched = r.patched || int3.MatchString(line)
	if i := strings.Index(line, "Kernel panic"); i >= 0 && r.panic == "" {
		r.panic = line[i:]
	}
}

// output takes a line of a command's output. Test binaries run with
// -test.v=test2json, which puts a control character before each line of the
// test framework's own, so that what a test prints cannot be taken for one.
func (r *run) output(line string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	before, framework, ok := strings.Cut(line, "\x16")
	if strings.TrimSpace(before) != "" && r.test != "" {
		r.said[r.test] = lastLines(append(r.said[r.test], before))
	}
	if strings.HasPrefix(framework, "=== ") {
		_, r.test, _ = strings.Cut(strings.TrimLeft(framework[len("=== "):], " "), " ")
		r.test = strings.TrimSpace(r.test)
	}
	if strings.HasPrefix(framework, "=== NAME") { // only for machines to read
		framework = ""
	}
	if line == "" || before+framework != "" {
		r.show(before + framework)
	}
	if !ok {
		return
	}
	verb, rest, _ := strings.Cut(framework, ": ")
	name, _, _ := strings.Cut(rest, " ")
	tests := &r.results[r.current]
	switch verb {
	case "--- PASS":
		delete(r.said, name)
		tests.passed = append(tests.passed, name)
	case "--- FAIL":
		tests.failed = append(tests.failed, name)
	case "--- SKIP":
		tests.skipped = append(tests.skipped, name)
	}
}

// report takes a line of the report (see init.sh).
func (r *run) report(line string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	line, ok := strings.CutPrefix(line, r.nonce+" ")
	if !ok {
		return
	}
	verb, rest, _ := strings.Cut(line, " ")
	switch verb {
	case "kernel":
		r.version = rest
	case "fail":
		r.fail = rest
	case "exit":
		index, code, _ := strings.Cut(rest, " ")
		i, err1 := strconv.Atoi(index)
		c, err2 := strconv.Atoi(code)
		if err1 == nil && err2 == nil && i == r.current && i < len(r.commands) {
			r.codes[i] = c
			r.current++
		}
	case "done":
		r.done = true
	}
}

// tests is the sum over all commands.
func (r *run) tests() result {
	var sum result
	for _, c := range r.results {
		sum.passed = append(sum.passed, c.passed...)
		sum.failed = append(sum.failed, c.failed...)
		sum.skipped = append(sum.skipped, c.skipped...)
	}
	return sum
}

// why is what the tests that failed said, or the guest's last lines if none did.
func (r *run) why() string {
	var b strings.Builder
	for _, name := range r.tests().failed {
		if said := r.said[name]; len(said) > 0 {
			fmt.Fprintf(&b, "%s:\n    %s\n", name, strings.Join(said, "\n    "))
		}
	}
	if b.Len() == 0 {
		return "its last lines:\n    " + strings.Join(r.lines, "\n    ")
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// err is nil only if the guest reported 0 for every command and that it was
// done, and every test binary ran a test.
func (r *run) err() error {
	var errs []error
	switch {
	case r.panic != "":
		errs = append(errs, fmt.Errorf("%w: %s", errPanic, r.panic))
	case r.fail != "":
		errs = append(errs, fmt.Errorf("%w: init failed: %s", errNoReport, r.fail))
	case r.ended != nil:
		errs = append(errs, r.ended)
	}
	for i, c := range r.commands {
		code, ok := r.codes[i]
		switch name := c.String(); {
		case !ok:
			errs = append(errs, fmt.Errorf("%w the end of %s", errNoReport, name))
		case code != 0:
			errs = append(errs, fmt.Errorf("%w: %s: exit code %d %s", errCommand, name, code, strings.Join(r.results[i].failed, " ")))
		case c.test != "" && len(r.results[i].passed)+len(r.results[i].failed) == 0:
			errs = append(errs, fmt.Errorf("%w: %s", errNoTest, name))
		}
	}
	if len(errs) == 0 && !r.done {
		errs = append(errs, fmt.Errorf("%w that it was done", errNoReport))
	}
	return errors.Join(errs...)
}

func (c command) String() string {
	if c.test != "" {
		return "tests of " + c.test
	}
	return strings.Join(c.args, " ")
}
