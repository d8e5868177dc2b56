package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"

	"bulkhead/internal/kerneltest"
)

// wantGone waits until programs are no more.
func wantGone(t testing.TB, ids []ebpf.ProgramID) {
	t.Helper()
	if len(ids) < 4 {
		t.Errorf("only %d programs had been attached", len(ids))
	}
	kerneltest.Poll(t, "the kernel frees the programs", func() error {
		for _, id := range ids {
			p, err := ebpf.NewProgramFromID(id)
			if err == nil {
				p.Close()
				return fmt.Errorf("program %d is there", id)
			}
			if !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
		return nil
	})
}

// Detach takes everything back, with an agent and without, and doing it again is fine.
func TestDetach(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	n.Mkdir("login")
	adopted := n.place(n.Mkdir("apps/chat"))
	// What is not ours stays.
	if err := os.Mkdir(filepath.Join(n.BPFFS, "other"), 0o700); err != nil {
		t.Fatal(err)
	}
	before := n.state()
	n.write(everything)
	for _, running := range []bool{true, false} {
		a := n.start()
		if !running {
			a.kill()
		}
		ids := attached(t, n.Cgroup.Path)
		client := n.client("batch", "--tenant", "free")
		dials(t, client, n.addr(1), 3, syscall.ECONNREFUSED)
		fds := dials(t, adopted, n.addr(1), 4, syscall.ECONNREFUSED)
		client.Kill()
		out := n.must("detach")
		if running {
			wantWords(t, out, fmt.Sprintf("stopping agent %d", a.Process.Pid))
			if code := a.end(); code != 0 {
				t.Errorf("the agent's exit code is %d", code)
			}
			n.logged("stopped by bulkhead detach")
		}
		wantWords(t, out, "removed the programs", "/bulkhead.slice/bulkhead-batch.slice")
		n.wantState(before)
		n.wantDetached()
		wantGone(t, ids)
		for _, path := range []string{n.ready, n.socket} {
			if _, err := os.Stat(path); running && err == nil {
				t.Errorf("%s is still there", path)
			}
		}
		wantWords(t, n.must("detach"), "nothing to remove")

		// Nothing is refused any more, and what was open stays open.
		more := dials(t, adopted, n.addr(1), 10, 0)
		for _, fd := range fds {
			adopted.Upload(fd, 1)
		}
		adopted.Close(append(fds, more...)...)
	}
}

// What still runs in a slice goes on there, without limits, until it has ended.
func TestDetachInhabited(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	n.Mkdir("login")
	before := n.state()
	n.write(shares)
	n.start()
	client := n.client("batch")
	open := dials(t, client, n.addr(1), 13, syscall.ECONNREFUSED)
	comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", client.PID))
	if err != nil {
		t.Fatal(err)
	}
	out := n.must("detach")
	wantWords(t, out, fmt.Sprintf("left cgroup /bulkhead.slice/bulkhead-batch.slice: 1 process in it: %d (%s)\n", client.PID, strings.TrimSpace(string(comm))),
		"end it, then run bulkhead detach again")
	// The one around it stays because of it.
	if strings.Contains(out, "cgroup /bulkhead.slice:") {
		t.Errorf("detach said\n%s", out)
	}
	n.wantDetached()
	if _, err := os.Stat(n.slice("chat")); err == nil {
		t.Error("the empty slice is still there")
	}
	open = append(open, dials(t, client, n.addr(1), 5, 0)...)

	// A new start finds it in its place and counts it, with what it has open.
	a := n.start()
	wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))
	n.wantCounts(map[string]counts{"feature_provider batch/deepseek": {12, 17, 17, 0, 1}})
	client.Close(open[:6]...)
	wantDial(t, client, 0, n.addr(1))
	if s := n.status(); strings.Join(s.cgroups("batch"), "") != "/bulkhead.slice/bulkhead-batch.slice" {
		t.Errorf("batch's cgroups %v", s.cgroups("batch"))
	}
	a.kill()
	client.Kill()
	n.must("detach")
	n.wantState(before)
}

// Of many that are left some are named, each where it is, once.
func TestDetachMany(t *testing.T) {
	n := newNode(t)
	n.write(tenanted)
	n.start()
	here := n.client("chat")
	pids := map[string]bool{}
	for range 7 {
		pids[fmt.Sprint(n.client("chat", "--tenant", "free").PID)] = true
	}
	out := n.must("detach")
	wantWords(t, out, fmt.Sprintf("left cgroup /bulkhead.slice/bulkhead-chat.slice: 1 process in it: %d (", here.PID))
	line := regexp.MustCompile(`left cgroup \S+/bulkhead-chat-free.slice: 7 processes in it: (.*) and 2 more\n`).FindStringSubmatch(out)
	if line == nil {
		t.Fatalf("detach said\n%s", out)
	}
	named := strings.Split(line[1], ", ")
	for _, p := range named {
		pid, _, _ := strings.Cut(p, " (")
		if !pids[pid] {
			t.Errorf("%s is not in it", p)
		}
		delete(pids, pid)
	}
	if len(named) != 5 || len(pids) != 2 {
		t.Errorf("named %q", named)
	}
}

// An agent is stopped by detach only if it is the one of these pins.
func TestDetachOtherSocket(t *testing.T) {
	n := newNode(t)
	n.write(shares)
	a := n.start()
	before := n.state()
	other := *n
	other.socket += ".other"
	other.wantRun(1, []string{fmt.Sprint(a.Process.Pid), "--admin-socket"}, "detach")
	n.wantState(before)
	n.must("reload")
}
