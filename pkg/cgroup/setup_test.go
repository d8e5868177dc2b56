package cgroup

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/policy"
)

const busybox = "/bin/busybox" // of busybox-static; the guests have it too

// runs starts a program of any name in a cgroup. busybox is what it is called.
func runs(t *testing.T, tree *Tree, in, name string) *exec.Cmd {
	t.Helper()
	text, err := os.ReadFile(busybox)
	must(t, err)
	file := filepath.Join(t.TempDir(), name)
	must(t, os.WriteFile(file, text, 0o755))
	return runsFile(t, tree, in, file)
}

// runsOpen starts what is open, of which /proc tells as it does of what has no path.
func runsOpen(t *testing.T, tree *Tree, in string, fd int) *exec.Cmd {
	t.Helper()
	f := os.NewFile(uintptr(fd), "program")
	defer f.Close()
	return runsFile(t, tree, in, "/proc/self/fd/3", f)
}

func runsFile(t *testing.T, tree *Tree, in, file string, held ...*os.File) *exec.Cmd {
	t.Helper()
	d, err := os.Open(tree.path(in))
	must(t, err)
	defer d.Close()
	cmd := &exec.Cmd{Path: file, Args: []string{"sleep", "1000"}, ExtraFiles: held, SysProcAttr: &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(d.Fd())}}
	must(t, cmd.Start())
	t.Cleanup(func() { ends(cmd) })
	// The kernel gives it its name last.
	name := filepath.Base(file)
	kerneltest.Poll(t, name+" runs", func() error {
		comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", cmd.Process.Pid))
		if got := strings.TrimSpace(string(comm)); got != name[:min(len(name), 15)] {
			return fmt.Errorf("it is %q (%v)", got, err)
		}
		return nil
	})
	return cmd
}

func ends(cmd *exec.Cmd) {
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
}

func TestSettingUp(t *testing.T) {
	tree := testTree(t)
	for _, tc := range []struct {
		dir, program string
		want         bool
	}{
		{"/apps", "", true},
		{"/x/a.scope", "", true},
		{"/x/a.service", "", false}, // systemd is done with it
		{"/x/a.slice", "", false},
		{"/x/runs", "sleep", false},
		{"/x/runc", "runc", true},
		{"/x/crun", "crun", true},
		{"/x/youki", "youki", true},
		{"/x/init", "runc:[2:INIT]", true}, // the name that runc gives itself; its executable has another
		{"/x/other", "runcible", false},
		{"/x/a1.service", "runc", false},
	} {
		c := mkdir(t, tree, tc.dir)
		if tc.program != "" {
			runs(t, tree, tc.dir, tc.program)
		}
		now := time.Now()
		w, got := tree.settingUp(c, waits{}, now)
		if got != tc.want {
			t.Errorf("%s with %q: %v", tc.dir, tc.program, got)
		}
		// Who has a runtime's name and stays is none.
		if _, got := tree.settingUp(c, w, now.Add(setupLimit)); got != (tc.want && tc.program == "") {
			t.Errorf("%s with %q after %v: %v", tc.dir, tc.program, setupLimit, got)
		}
	}
	// Its processes are further down.
	c := mkdir(t, tree, "/y")
	mkdir(t, tree, "/y/below")
	runs(t, tree, "/y/below", "sleep")
	if _, waits := tree.settingUp(c, waits{}, time.Now()); waits {
		t.Error("one whose processes are below it waits")
	}
	// A runtime runs a copy of itself that nobody can write to: in memory, or a mount that is in no tree.
	inMemory := func(name string) int {
		t.Helper()
		fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
		must(t, err)
		defer unix.Close(fd)
		text, err := os.ReadFile(busybox)
		must(t, err)
		_, err = unix.Write(fd, text)
		must(t, err)
		again, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDONLY|unix.O_CLOEXEC, 0) // what is open for writing cannot run
		must(t, err)
		return again
	}
	mount, err := unix.OpenTree(unix.AT_FDCWD, busybox, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	must(t, err)
	for _, tc := range []struct {
		fd   int
		want bool
	}{{inMemory("runc_cloned:/proc/self/exe"), true}, {inMemory("crun"), true}, {inMemory("runcible"), false}, {inMemory("other"), false}, {mount, true}} {
		program := runsOpen(t, tree, "/x/runs", tc.fd)
		if got := ofRuntime(program.Process.Pid); got != tc.want {
			exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", program.Process.Pid))
			t.Errorf("%s (%v): %v", exe, err, got)
		}
	}
	// A cgroup that is made again is another, for which nobody has waited yet.
	must(t, syscall.Rmdir(tree.path("/apps")))
	old := waits{id: 1, since: time.Now().Add(-setupLimit)}
	again := mkdir(t, tree, "/apps")
	runs(t, tree, "/apps", "runc")
	if w, waits := tree.settingUp(again, old, time.Now()); !waits || w.id != again.ID {
		t.Errorf("one that is made again: %+v %v", w, waits)
	}
	// What runc says of itself, and nobody else may.
	named := start(t, tree, "/x/a.scope", "hold")
	if ofRuntime(named.Process.Pid) || ofRuntime(1<<30) {
		t.Error("a process of nobody's is taken for a runtime's")
	}
}

// A runtime's own values are written before ours, and are what comes back: cpu.weight cannot be
// written any more once there is cpu.idle, and the runtime would give up.
func TestValuesWaitForRuntime(t *testing.T) {
	tree := cpuTree(t)
	must(t, tree.write("/", "cgroup.subtree_control", "+cpu +memory"))
	p := plan(policy.Enforce, nil, feature("batch", &policy.CPU{Idle: true}, &policy.Memory{Max: 1 << 30}, policy.Match{Cgroup: "/web*"}))
	k := NewKeeper(tree)
	keeping(t, k, p)
	mkdir(t, tree, "/web")
	keeping(t, k, p)
	wantFiles(t, tree, "/web", map[string]string{"cpu.idle": "0", "memory.max": "1073741824"}) // a limit does not wait
	if k.Waiting() == 0 || k.Ready() {
		t.Errorf("empty: waiting %v, ready %v", k.Waiting(), k.Ready())
	}
	runtime := runs(t, tree, "/web", "runc")
	keeping(t, k, p)
	must(t, tree.write("/web", "cpu.weight", "39"))
	if k.Waiting() == 0 || k.Ready() {
		t.Errorf("a runtime's: waiting %v, ready %v", k.Waiting(), k.Ready())
	}
	start(t, tree, "/web", "hold")
	ends(runtime)
	if !k.Ready() {
		t.Error("not ready with a process of its own")
	}
	wantPut(t, "the start", keeping(t, k, p))
	wantFiles(t, tree, "/web", map[string]string{"cpu.idle": "1"})
	if k.Waiting() > 0 {
		t.Error("it still waits")
	}
	_, conds, err := tree.Remove()
	noConditions(t, conds, err)
	wantFiles(t, tree, "/web", map[string]string{"cpu.idle": "0", "cpu.weight": "39", "memory.max": "max"})

	// A container's own has a weight instead, so that its runtime can write it later too.
	own := mkdir(t, tree, "/web-1/"+strings.Repeat("ab", 32))
	must(t, tree.write("/web-1", "cgroup.subtree_control", "+cpu"))
	start(t, tree, own.Path, "hold")
	all := plan(policy.Enforce, nil, feature("batch", &policy.CPU{Idle: true}, nil, policy.Match{Cgroup: "/web-1/*"}))
	k = NewKeeper(tree)
	keeping(t, k, all)
	wantFiles(t, tree, own.Path, map[string]string{"cpu.idle": "0", "cpu.weight": "1"})
	must(t, tree.write(own.Path, "cpu.weight", "39"))
	wantPut(t, "the runtime's", k.Check(time.Now().Add(CheckEvery)), Correction{Feature: "batch", Path: own.Path, File: "cpu.weight", Was: "39", Now: "1"})
	_, conds, err = tree.Remove()
	noConditions(t, conds, err)

	// One that was there before the plan does not wait, and one that goes is not waited for.
	mkdir(t, tree, "/web-old")
	k = NewKeeper(tree)
	keeping(t, k, p)
	wantFiles(t, tree, "/web-old", map[string]string{"cpu.idle": "1"})
	gone := mkdir(t, tree, "/web-gone")
	keeping(t, k, p)
	must(t, syscall.Rmdir(tree.path(gone.Path)))
	if k.Waiting() == 0 || !k.Ready() {
		t.Error("one that is gone is waited for")
	}
	keeping(t, k, p)
	if k.Waiting() > 0 {
		t.Error("and still is")
	}
}
