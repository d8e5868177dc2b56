//go:build !vm

// Not in emulated machines: the demo shows latencies, and there everything is late.

package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"bulkhead/internal/kerneltest"
)

// demo starts the demo in the node's part of the tree.
func (n *node) demo(flags ...string) (cmd *exec.Cmd, progress *bufio.Reader, wait func() result) {
	n.t.Helper()
	return n.demoWith(nil, flags...)
}

// demoWith is demo with an input of its own.
func (n *node) demoWith(stdin *os.File, flags ...string) (cmd *exec.Cmd, progress *bufio.Reader, wait func() result) {
	n.t.Helper()
	cmd = exec.Command(os.Getenv(binaryVar), append([]string{"demo", "--cgroup-root", n.Cgroup.Path, "-o", "json"}, flags...)...)
	cmd.Env = append(os.Environ(), "TMPDIR="+n.dir)
	if stdin != nil {
		cmd.Stdin = stdin
		defer stdin.Close()
	}
	var stdout strings.Builder
	cmd.Stdout = &stdout
	pipe, err := cmd.StderrPipe()
	if err != nil {
		n.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { cmd.Process.Kill() })
	progress = bufio.NewReader(pipe)
	return cmd, progress, func() result {
		rest, err := io.ReadAll(progress)
		if err != nil {
			n.t.Fatal(err)
		}
		cmd.Wait()
		return result{stdout.String(), string(rest), cmd.ProcessState.ExitCode()}
	}
}

// wantNoDemo fails if the demo has left something.
func (n *node) wantNoDemo(before []string) {
	n.t.Helper()
	n.wantState(before)
	n.wantDetached()
	files, err := os.ReadDir(n.dir)
	if err != nil {
		n.t.Fatal(err)
	}
	if len(files) > 0 {
		n.t.Errorf("left in the directory for temporary files: %v", files)
	}
}

// demoDoc is what the tests read of the demo's JSON.
type demoDoc struct {
	Phases []struct {
		Phase string `json:"phase"`
	} `json:"phases"`
	Experiments []struct {
		Name    string   `json:"name"`
		Skipped string   `json:"skipped"`
		Remarks []string `json:"remarks"`
		Verdict string   `json:"verdict"`
		Runs    []demoRun
	} `json:"experiments"`
}

type demoRun struct {
	Run     string  `json:"run"`
	Calls   int     `json:"calls"`
	P50     float64 `json:"p50_ms"`
	P95     float64 `json:"p95_ms"`
	P99     float64 `json:"p99_ms"`
	Failed  int     `json:"failed"`
	Refused int     `json:"refused"`
	Load    struct {
		Done    int `json:"done"`
		Refused int `json:"refused"`
	} `json:"load"`
}

// The demo runs with nothing to configure, shows every experiment that this
// node can do, and leaves nothing. What is asserted of latencies is far from
// what is aimed at: how far, the demo says itself.
func TestDemo(t *testing.T) {
	n := newNode(t)
	before := n.state()
	_, _, wait := n.demo()
	r := wait()
	if r.code != 0 {
		t.Fatalf("demo: %s", r)
	}
	var doc demoDoc
	if err := json.Unmarshal([]byte(r.stdout), &doc); err != nil {
		t.Fatalf("demo -o json: %v\n%s", err, r.stdout)
	}
	wantWords(t, r.stdout, "chat alone", "flood, no bulkheads", "flood, bulkheads")
	runs := map[string]demoRun{}
	for _, e := range doc.Experiments {
		t.Logf("%s: %s %q %s", e.Name, e.Verdict, e.Remarks, e.Skipped)
		if e.Skipped != "" && (e.Name != "cpu" || !strings.Contains(e.Skipped, "make demo-vm")) {
			t.Errorf("%s: skipped: %s; make deps installs what it needs", e.Name, e.Skipped)
		}
		for _, run := range e.Runs {
			runs[e.Name+" "+run.Run] = run
		}
	}
	for name, want := range map[string]int{
		"flood alone": 300, "flood without": 300, "slow alone": 27, "slow without": 27, "slow with": 27, "tenants alone": 15, "tenants without": 15, "tenants with": 15,
		"bounded without": 200, "database with": 20,
	} {
		if run := runs[name]; run.Calls != want || run.Failed+run.Refused != 0 {
			t.Errorf("%s: want %d calls, all answered: %+v", name, want, run)
		}
	}
	// What comes due while a busy node holds chat up for a moment may be more
	// than its places.
	if run := runs["flood with"]; run.Calls+run.Refused != 300 || run.Calls < 270 || run.Failed != 0 {
		t.Errorf("flood with: want 300 calls, nearly all answered: %+v", run)
	}
	if run := runs["bounded with"]; run.Calls < 8 || run.Refused < 100 || run.Calls+run.Refused != 200 || run.Failed != 0 {
		t.Errorf("bounded with: want the rest of 8 places refused: %+v", run)
	}
	if run := runs["database without"]; run.Failed != 20 || run.Load.Done != 10 {
		t.Errorf("database without: want no connection left: %+v", run)
	}
	if run := runs["database with"]; run.Load.Done != 5 || run.Load.Refused < 15 {
		t.Errorf("database with: want the report held at 5: %+v", run)
	}
	for _, name := range []string{"flood", "tenants", "slow"} {
		if run := runs[name+" with"]; run.Load.Refused == 0 {
			t.Errorf("%s: nothing was refused: %+v", name, run)
		}
		if runs[name+" without"].P50 < 3*runs[name+" with"].P50 {
			t.Errorf("%s: the median without bulkheads is below 3 times that with them: %+v and %+v", name, runs[name+" without"], runs[name+" with"])
		}
	}
	n.wantNoDemo(before)
}

// Ctrl-C leaves nothing either, not even while the demo's own agent has limits in
// force.
func TestDemoInterrupted(t *testing.T) {
	for _, name := range []string{"flood", "slow", "tenants", "bounded", "database"} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			before := n.state()
			cmd, progress, wait := n.demo("--only", name)
			readTo(t, progress, "with bulkheads")
			n.wantDemoAttached()
			if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
				t.Fatal(err)
			}
			wantResult(t, wait(), 130, "interrupted")
			n.wantNoDemo(before)
		})
	}
}

// readTo reads lines up to and with the one that has text.
func readTo(t *testing.T, r *bufio.Reader, text string) (line string) {
	t.Helper()
	for !strings.Contains(line, text) {
		var err error
		if line, err = r.ReadString('\n'); err != nil {
			t.Fatalf("no line with %q: %v", text, err)
		}
	}
	return line
}

func (n *node) wantDemoAttached() {
	n.t.Helper()
	kerneltest.Poll(n.t, "the demo's agent has attached its programs", func() error {
		trees, err := filepath.Glob(n.Cgroup.Path + "/*/*/cgroup.procs")
		for _, procs := range trees {
			if len(attached(n.t, filepath.Dir(procs))) > 0 {
				return nil
			}
		}
		return fmt.Errorf("none of %v has programs (%v)", trees, err)
	})
}

// --keep leaves the flood running for a look with the commands that it prints,
// until ENTER or a signal, and then nothing.
func TestDemoKept(t *testing.T) {
	for _, end := range []string{"ENTER", "Ctrl-C"} {
		t.Run(end, func(t *testing.T) {
			n := newNode(t)
			before := n.state()
			enter, in, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer in.Close()
			cmd, progress, wait := n.demoWith(enter, "--only", "bounded", "--keep")
			var commands []string
			for line := ""; !strings.Contains(line, "ENTER or Ctrl-C"); {
				if line, err = progress.ReadString('\n'); err != nil {
					t.Fatal(err)
				}
				if strings.HasPrefix(line, "  ") {
					commands = append(commands, strings.TrimSpace(line))
				}
			}
			if len(commands) != 6 {
				t.Errorf("%q", commands)
			}
			for _, c := range commands {
				if strings.Contains(c, " top ") {
					continue // goes on until it is stopped; it is tested with a terminal
				}
				out, err := exec.Command("/bin/sh", "-c", c).CombinedOutput()
				if err != nil {
					t.Errorf("%s: %v\n%s", c, err, out)
				}
				switch {
				case strings.Contains(c, " status "):
					wantWords(t, string(out), "chat", "batch", "local")
				case strings.Contains(c, " conns "):
					wantWords(t, string(out), "python3", "batch")
				case strings.Contains(c, "cgroup tree"):
					wantWords(t, string(out), "bh_connect4")
				}
			}
			if end == "ENTER" {
				_, err = in.WriteString("\n")
			} else {
				err = cmd.Process.Signal(syscall.SIGINT)
			}
			if err != nil {
				t.Fatal(err)
			}
			if r := wait(); r.code != 0 || !strings.Contains(r.stdout, `"bounded"`) {
				t.Errorf("demo --keep: %s", r)
			}
			n.wantNoDemo(before)
		})
	}
}

// Wrong use of --only is told as that, with the names that there are.
func TestDemoOnly(t *testing.T) {
	n := newNode(t)
	_, _, wait := n.demo("--only", "flod")
	wantResult(t, wait(), 2, `no such experiment: "flod"; there are: flood, slow`)
}
