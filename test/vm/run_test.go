package main

import (
	"errors"
	"io"
	"strings"
	"testing"
)

// TestFairTurns: with an emulator whose CPUs do not take turns nothing is measured on several.
func TestFairTurns(t *testing.T) {
	for says, want := range map[string]error{
		"QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright": errUnfair,
		"QEMU emulator version 10.0.13 (Debian 1:10.0.13+ds-0+deb13u1)\n":        nil,
	} {
		if err := fair(says); !errors.Is(err, want) {
			t.Errorf("%q: got %v, want %v", says, err, want)
		}
	}
	if fair("something else") == nil {
		t.Error("something else is taken for a version")
	}
}

// TestOnly: what one target alone is to run, all others skip.
func TestOnly(t *testing.T) {
	o, err := parseOptions([]string{"-system", "all", "-skip", "^TestA$", "-only", "12:^TestB$", "-only", "13:^TestC$", "./x"})
	if err != nil {
		t.Fatal(err)
	}
	commands := []command{{args: []string{"/bin/x.test"}, test: "x"}, {args: []string{"true"}}}
	for i, want := range []string{"/bin/x.test -test.skip ^TestA$|^TestC$", "/bin/x.test -test.skip ^TestA$|^TestB$"} {
		got := o.commandsOf(o.targets[i], commands)
		if strings.Join(got[0].args, " ") != want || strings.Join(got[1].args, " ") != "true" {
			t.Errorf("%s runs %q", o.targets[i].name(), got)
		}
	}
	for _, wrong := range []string{"12", ":x", "6.1:x"} {
		if _, err := parseOptions([]string{"-system", "all", "-only", wrong, "./x"}); !errors.Is(err, errUsage) {
			t.Errorf("-only %s: %v", wrong, err)
		}
	}
}

// TestVerdict: only a complete and good report passes.
func TestVerdict(t *testing.T) {
	test := command{args: []string{"/bin/x.test"}, test: "x"}
	plain := command{args: []string{"true"}}
	for _, c := range []struct {
		name     string
		commands []command
		output   string
		report   string
		console  string
		ended    error
		want     error
	}{
		{name: "good", commands: []command{test, plain}, output: "\x16--- PASS: TestA (0.00s)\n", report: "w kernel 6.1\nw exit 0 0\nw exit 1 0\nw done\n"},
		{name: "exit code", commands: []command{plain}, report: "w exit 0 3\nw done\n", want: errCommand},
		{name: "second exit code", commands: []command{plain, plain}, report: "w exit 0 0\nw exit 1 1\nw done\n", want: errCommand},
		{name: "silence", commands: []command{plain}, want: errNoReport},
		{name: "half", commands: []command{plain, plain}, report: "w exit 0 0\nw done\n", want: errNoReport},
		{name: "not done", commands: []command{plain}, report: "w exit 0 0\n", want: errNoReport},
		{name: "another word", commands: []command{plain}, report: "v exit 0 0\nv done\n", want: errNoReport},
		{name: "a report in the output", commands: []command{plain}, output: "w exit 0 0\nw done\n", want: errNoReport},
		{name: "mount failed", commands: []command{plain}, report: "w fail mount -t bpf\nw exit 0 0\nw done\n", want: errNoReport},
		{name: "panic after all", commands: []command{plain}, report: "w exit 0 0\nw done\n", console: "[1.0] Kernel panic - not syncing: x\n", want: errPanic},
		{name: "qemu failed", commands: []command{plain}, report: "w exit 0 0\nw done\n", ended: io.ErrUnexpectedEOF, want: io.ErrUnexpectedEOF},
		{name: "no test", commands: []command{test}, output: "testing: warning: no tests to run\nPASS\n", report: "w exit 0 0\nw done\n", want: errNoTest},
		{name: "only skipped", commands: []command{test}, output: "\x16--- SKIP: TestA (0.00s)\n", report: "w exit 0 0\nw done\n", want: errNoTest},
		{name: "a test's own text", commands: []command{test}, output: "--- PASS: TestA (0.00s)\n", report: "w exit 0 0\nw done\n", want: errNoTest},
	} {
		r := newRun("w", c.commands, io.Discard)
		readLines(strings.NewReader(c.console), r.console)
		readLines(strings.NewReader(c.output), r.output)
		readLines(strings.NewReader(c.report), r.report)
		r.ended = c.ended
		if err := r.err(); !errors.Is(err, c.want) || (err == nil) != (c.want == nil) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
}

// TestCounts: subtests count, wherever the line begins.
func TestCounts(t *testing.T) {
	r := newRun("w", []command{{test: "x"}}, io.Discard)
	readLines(strings.NewReader("\x16=== RUN   TestA\r\nno end of line\x16--- PASS: TestA (0.01s)\r\n"+
		"    \x16--- FAIL: TestA/b (0.00s)\n    \x16--- SKIP: TestA/c (0.00s)\n\x16=== NAME  \n"), r.output)
	got := r.tests()
	if strings.Join(got.passed, " ") != "TestA" || strings.Join(got.failed, " ") != "TestA/b" || strings.Join(got.skipped, " ") != "TestA/c" {
		t.Errorf("got %+v", got)
	}
}

// A failure shows what the tests that failed said, and not what came after it.
func TestWhy(t *testing.T) {
	r := newRun("w", []command{{test: "x"}}, io.Discard)
	readLines(strings.NewReader("\x16=== RUN   TestA\n\x16=== RUN   TestA/b\n    a_test.go:3: wrong\n\x16=== NAME  TestA\n    a_test.go:9: of the whole\n"+
		"\x16--- FAIL: TestA (0.00s)\n    \x16--- FAIL: TestA/b (0.00s)\n\x16=== NAME  \n\x16=== RUN   TestC\n    a_test.go:7: fine\n\x16--- PASS: TestC (0.00s)\n"), r.output)
	if got, want := r.why(), "TestA:\n        a_test.go:9: of the whole\nTestA/b:\n        a_test.go:3: wrong"; got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	r = newRun("w", []command{{test: "x"}}, io.Discard)
	r.console("[2.0] Kernel panic - not syncing: x")
	if got, want := r.why(), "its last lines:\n    # [2.0] Kernel panic - not syncing: x"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A panic is of the boot only if the guest has said nothing.
func TestEarly(t *testing.T) {
	r := newRun("n", nil, io.Discard)
	if r.early() {
		t.Error("no panic is an early one")
	}
	r.console("[2.0] Kernel panic - not syncing: Fatal exception in interrupt")
	if !r.early() {
		t.Error("a panic at boot is not seen")
	}
	r.report("n kernel 6.1")
	if r.early() {
		t.Error("a panic after the guest's first word is taken for one of the boot")
	}
	if r.patched || r.emulators(machine{}) {
		t.Error("any panic is taken for the emulator's")
	}
	for _, line := range []string{"[   12.038761] Oops: int3: 0000 [#1] PREEMPT SMP NOPTI", "[    3.1] int3: 0000 [#1] PREEMPT SMP PTI"} {
		r = newRun("n", nil, io.Discard)
		r.report("n kernel 6.1")
		if r.console(line); !r.patched || r.emulators(machine{}) {
			t.Errorf("%q is not taken for the emulator's, or for the end", line)
		}
		if r.console("[2.0] Kernel panic - not syncing: Fatal exception in interrupt"); !r.emulators(machine{}) || r.emulators(machine{disk: "/disk"}) {
			t.Errorf("what %q ended is not started again, or although it has a disk", line)
		}
	}
}
