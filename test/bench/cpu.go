package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"
)

// cpuRow is one line of what test/cpu's benchmark prints: milliseconds of virtual time
// that a handler takes. The row alone is that of the run with so many parsers.
type cpuRow struct {
	Kernel     string  `json:"kernel"`
	CPUs       int     `json:"cpus"`
	Parsers    int     `json:"parsers"`
	Plain      bool    `json:"plain"` // parsers of one thread, without timers
	Case       string  `json:"case"`
	Requests   int     `json:"requests"`
	P50        float64 `json:"p50_ms"`
	P95        float64 `json:"p95_ms"`
	P99        float64 `json:"p99_ms"`
	TimesAlone float64 `json:"p95_times_alone"`
	Documents  float64 `json:"documents_per_second"`
	// Idle is the part of the machine that the parsers had while the handler had nothing to
	// do.
	Idle float64 `json:"idle_share"`
}

// beside is how many parsers there are, and what they are.
func (r cpuRow) beside() string {
	if r.Plain {
		return fmt.Sprint(r.Parsers, " plain")
	}
	return fmt.Sprint(r.Parsers)
}

// run is what is the same of all rows that are compared.
func (r cpuRow) run() cpuRow {
	return cpuRow{Kernel: r.Kernel, CPUs: r.CPUs, Parsers: r.Parsers, Plain: r.Plain}
}

// named is the row of a case in the same run.
func (r cpuRow) named(name string) cpuRow {
	run := r.run()
	run.Case = name
	return run
}

// checkedCases are those that limits are about, for $BULKHEAD_CPU_CASES.
const checkedCases = "^(" + caseBatch + "|" + caseBackground + "|" + caseFIFO + ")$"

// Cases that limits are about, as test/cpu names them.
const (
	caseAlone      = "alone"
	caseBatch      = "realtime beside batch"
	caseBackground = "realtime beside background"
	caseFIFO       = "SCHED_FIFO"
)

// cpuSection runs test/cpu's benchmark in virtual machines.
func cpuSection(ctx context.Context, o options) ([]cpuRow, error) {
	progress("cpu: boot kernels (%s)", o.kernels)
	machine := []string{"-smp", fmt.Sprint(o.cpus)}
	if !o.ordinary {
		machine = append(machine, "-virtual")
	}
	plain := ""
	if o.plain {
		plain = "1"
	}
	cmd := exec.CommandContext(ctx, o.rig, append(machine, "-kernel", o.kernels, "-jobs", fmt.Sprint(o.jobs), "-timeout", "90m",
		"-file", o.binary+":/bin/bulkhead", "-file", o.cpuTest+":/bin/cpu.test",
		"--", "/bin/busybox", "env", "BULKHEAD_CPU_CASES="+o.cases, "BULKHEAD_CPU_ROUNDS="+fmt.Sprint(o.cpuRounds), "BULKHEAD_CPU_PLAIN="+plain,
		"/bin/cpu.test", "-test.run", "^$", "-test.bench", "/^("+strings.ReplaceAll(o.parsers, ",", "|")+")$", "-test.benchtime", "1x", "-test.timeout", "90m")...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) }
	cmd.WaitDelay = 10 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	var failure bytes.Buffer
	cmd.Stderr = &failure
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("cpu: the rig (make bench builds it): %w", err)
	}
	rows, log, readErr := cpuRows(out, func(r cpuRow) { progress("cpu: %s, %d CPUs, %d parsers: %s", r.Kernel, r.CPUs, r.Parsers, r.Case) })
	if err := cmd.Wait(); err != nil {
		return rows, fmt.Errorf("cpu: %w\n%s%s", err, log, &failure)
	}
	if readErr != nil {
		return nil, fmt.Errorf("cpu: %w", readErr)
	}
	if len(rows) == 0 {
		return nil, errors.New("cpu: the guests have said nothing:\n" + log)
	}
	return rows, nil
}

// cpuRows are those in the rig's output, whose lines start with the kernel's name, each
// told as it comes; log is the rest.
func cpuRows(out io.Reader, told func(cpuRow)) (rows []cpuRow, log string, err error) {
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		_, text, ok := strings.Cut(lines.Text(), " | {")
		if !ok {
			log += lines.Text() + "\n"
			continue
		}
		var r cpuRow
		if err := json.Unmarshal([]byte("{"+text), &r); err != nil {
			return nil, log, fmt.Errorf("%w in %s", err, lines.Text())
		}
		told(r)
		rows = append(rows, r)
	}
	// Kernels that ran at the same time have told their rows in between each other.
	slices.SortStableFunc(rows, func(a, b cpuRow) int { return strings.Compare(a.Kernel, b.Kernel) })
	return rows, log, lines.Err()
}
