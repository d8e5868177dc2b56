package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"bulkhead/internal/kerneltest"
)

// processes is what status says of those that match by what they are.
type processes struct {
	Watch   string            `json:"watch"`
	Moved   uint64            `json:"moved"`
	Lost    uint64            `json:"lost"`
	Skipped map[string]uint64 `json:"skipped"`
}

// in waits until a process is in a cgroup, or in a leaf of it.
func (n *node) in(pid int, cgroup string) {
	n.t.Helper()
	kerneltest.Poll(n.t, fmt.Sprintf("process %d is in %s", pid, cgroup), func() error {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		_, got, ok := strings.Cut(strings.TrimSpace(string(b)), "/"+filepath.Base(n.Cgroup.Path))
		if err != nil || !ok {
			return fmt.Errorf("it is in %s (%v)", b, err)
		}
		if got != cgroup && !strings.HasPrefix(got, cgroup+"/") {
			return fmt.Errorf("it is in %s", got)
		}
		return nil
	})
}

// A process that matches by what it is gets into its compartment when it begins, with
// all that it holds counted there; one that was there before the agent too. One that
// becomes another program belongs to what it is then. With the agent's limits they go.
func TestProcessesArePlaced(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	const sleep = `  sleep: {class: batch, match: [{cmdline: "^sleep 1000$", user: root}]}
`
	const matching = oneProvider + `  chat: {class: realtime, match: [{exe: "**/*e2e.test", cgroup: /apps}], limits: {connections: 2}}
`
	n.write(matching + sleep)
	apps, other := n.Mkdir("apps"), n.Mkdir("other")
	early, not := n.place(apps), n.place(other)
	early.MustDial(kerneltest.TCP4, n.addr(1)) // in default, which is nowhere
	wantWords(t, n.run("plan", n.policy).stdout, fmt.Sprintf("move process %d from /apps into chat", early.PID))
	n.in(early.PID, "/apps")
	n.start()
	chat := "/bulkhead.slice/bulkhead-chat.slice"
	n.in(early.PID, chat)
	if p := n.status().Agent.Processes; p.Watch == "" || p.Moved != 1 {
		t.Errorf("%+v", p)
	}
	n.logged("moved processes into their compartment", fmt.Sprint(early.PID))
	// What it had open before is counted where it is now.
	if b := n.status().find("feature chat"); b == nil || b.InUse != 1 {
		t.Errorf("%+v, want 1 in use", b)
	}
	late := n.place(apps)
	n.in(late.PID, chat)
	dials(t, late, n.addr(1), 1, 0)
	wantDial(t, late, syscall.ECONNREFUSED, n.addr(1))
	wantDial(t, early, syscall.ECONNREFUSED, n.addr(1))
	wantDial(t, not, 0, n.addr(1))
	n.in(not.PID, "/other")

	// A shell that becomes another program.
	cmd := exec.Command("/bin/sh", "-c", "read -r go; exec sleep 1000")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { cmd.Process.Kill(); cmd.Wait() }()
	n.Move(cmd.Process.Pid, other)
	fmt.Fprintln(stdin, "go")
	n.in(cmd.Process.Pid, "/bulkhead.slice/bulkhead-sleep.slice")

	// What a reload no longer names goes back to where it came from, and the rest stays.
	n.write(matching)
	kerneltest.Poll(t, "the moves are told", func() error {
		if p := n.status().Agent.Processes; p.Moved != 3 {
			return fmt.Errorf("%+v", p)
		}
		return nil
	})
	n.must("reload")
	n.in(cmd.Process.Pid, "/other")
	if now := n.status().Agent.Processes.Moved; now != 3 {
		t.Errorf("3 moved, and %d after a reload", now)
	}
	n.in(late.PID, chat)
	n.must("detach")
	n.in(late.PID, "/apps")
	n.in(early.PID, "/apps")
	if left := n.state(); strings.Contains(strings.Join(left, "\n"), "bulkhead.slice") {
		t.Errorf("left: %q", left)
	}
}

// A process in somebody's unit stays, and status says why and what helps.
func TestProcessInUnitStays(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	const inUnit = oneProvider + `  chat: {class: realtime, match: [{exe: "**/*e2e.test"}], limits: {connections: 0}}
`
	n.write(inUnit)
	client := n.place(n.Mkdir("system.slice/chat.service"))
	n.start()
	n.in(client.PID, "/system.slice/chat.service")
	wantDial(t, client, 0, n.addr(1))
	c := n.status().condition("Placement")
	if c == nil || c.Reason != "NotLoose" {
		t.Fatalf("%+v", c)
	}
	other := n.place(n.Mkdir("system.slice/other.service"))
	kerneltest.Poll(t, "another one is told of", func() error {
		if c := n.status().condition("Placement"); c == nil || !strings.Contains(fmt.Sprint(n.status().Conditions), "unit: other.service") {
			return fmt.Errorf("%+v", n.status().Conditions)
		}
		return nil
	})
	other.Kill()
	kerneltest.Poll(t, "and no more when it has ended", func() error {
		if text := fmt.Sprint(n.status().Conditions); strings.Contains(text, "unit: other.service") {
			return fmt.Errorf("%s", text)
		}
		return nil
	})
	wantWords(t, c.Message, fmt.Sprint(client.PID), "/system.slice/chat.service", "Delegate=yes", "unit: chat.service")
	n.wantRun(1, nil, "status", "--check")
	if p := n.status().Agent.Processes; p.Moved != 0 || p.Skipped["managed"] == 0 {
		t.Errorf("%+v", p)
	}
	// The cure that it names.
	n.write(strings.Replace(inUnit, `exe: "**/*e2e.test"`, "unit: chat.service", 1))
	n.must("reload")
	wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))
	if c := n.status().condition("Placement"); c != nil {
		t.Errorf("%+v", c)
	}
	// A restarted unit has another cgroup, which is adopted as it appears.
	client.Kill()
	kerneltest.Poll(t, "the unit's cgroup is removed", func() error {
		return os.Remove(filepath.Join(n.Cgroup.Path, "system.slice/chat.service"))
	})
	again := n.place(n.Mkdir("system.slice/chat.service"))
	kerneltest.Poll(t, "the new cgroup is adopted", func() error {
		if fd, errno := again.Dial(kerneltest.TCP4, n.addr(1)); errno == 0 {
			again.Close(fd)
			return fmt.Errorf("it connects")
		}
		return nil
	})
	n.in(again.PID, "/system.slice/chat.service")
}

// What could not go back at once goes later, and what a plan since has moved goes back by the next.
func TestGoesBackLater(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	sleeping := func(seconds, at string) int {
		cmd := exec.Command("sleep", seconds)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
		n.Move(cmd.Process.Pid, n.Mkdir(at))
		return cmd.Process.Pid
	}
	matching := func(seconds string) {
		n.write(oneProvider + fmt.Sprintf("  chat: {class: realtime, match: [{cmdline: \"^sleep %s$\"}]}\n", seconds))
	}
	stays := func() bool {
		return slices.ContainsFunc(n.status().Conditions, func(c condition) bool { return c.Reason == "Stays" })
	}
	const chat = "/bulkhead.slice/bulkhead-chat.slice"
	first, second := sleeping("1001", "apps/first"), sleeping("1002", "other")
	matching("1001")
	n.start()
	n.in(first, chat)
	// Beside a threaded cgroup goes no process.
	threaded := n.Mkdir("apps/threaded")
	set(t, threaded.Path, "cgroup.type", "threaded")
	matching("1002")
	n.must("reload")
	n.in(second, chat)
	if n.in(first, chat); !stays() {
		t.Errorf("it cannot go back, and nobody is told: %+v", n.status().Conditions)
	}
	matching("1003")
	n.must("reload")
	n.in(second, "/other")
	n.in(first, chat)
	if err := os.Remove(threaded.Path); err != nil {
		t.Fatal(err)
	}
	n.in(first, "/apps/first")
	kerneltest.Poll(t, "the condition ends", func() error {
		if stays() {
			return errors.New("it stands")
		}
		return nil
	})
}
