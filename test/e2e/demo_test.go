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
func (n *node) demo() (cmd *exec.Cmd, progress *bufio.Reader, wait func() result) {
	n.t.Helper()
	cmd = exec.Command(os.Getenv(binaryVar), "demo", "--cgroup-root", n.Cgroup.Path, "-o", "json")
	cmd.Env = append(os.Environ(), "TMPDIR="+n.dir)
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

// The demo runs with nothing to configure, says what it found, and leaves nothing.
func TestDemo(t *testing.T) {
	n := newNode(t)
	before := n.state()
	_, _, wait := n.demo()
	r := wait()
	if r.code != 0 {
		t.Fatalf("demo: %s", r)
	}
	var doc map[string]any
	if err := json.Unmarshal([]byte(r.stdout), &doc); err != nil {
		t.Errorf("demo -o json: %v\n%s", err, r.stdout)
	}
	wantWords(t, r.stdout, "chat alone", "flood, no bulkheads", "flood, bulkheads")
	n.wantNoDemo(before)
}

// Ctrl-C leaves nothing either, not even while the demo's own agent has limits in
// force.
func TestDemoInterrupted(t *testing.T) {
	n := newNode(t)
	before := n.state()
	cmd, progress, wait := n.demo()
	for {
		line, err := progress.ReadString('\n')
		if err != nil {
			t.Fatalf("progress: %v", err)
		}
		if strings.HasPrefix(line, "[3/3]") {
			break
		}
	}
	kerneltest.Poll(t, "the demo's agent has attached its programs", func() error {
		trees, err := filepath.Glob(n.Cgroup.Path + "/*/*/cgroup.procs")
		for _, procs := range trees {
			if len(attached(t, filepath.Dir(procs))) > 0 {
				return nil
			}
		}
		return fmt.Errorf("none of %v has programs (%v)", trees, err)
	})
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	wantResult(t, wait(), 130, "interrupted")
	n.wantNoDemo(before)
}
