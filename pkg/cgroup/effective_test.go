package cgroup

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A quota above holds below, and a weight is of the siblings that have processes.
func TestEffective(t *testing.T) {
	tree := cpuTree(t)
	for _, p := range []string{"/a/b/c", "/a/busy", "/a/empty", "/a/idle"} {
		mkdir(t, tree, p)
	}
	for _, p := range []string{"/", "/a", "/a/b"} {
		must(t, tree.write(p, "cgroup.subtree_control", "+cpu"))
	}
	for _, p := range []string{"/a/b/c", "/a/busy", "/a/idle"} {
		start(t, tree, p, "hold")
	}
	for _, w := range [][3]string{{"/a", "cpu.max", "200000 100000"}, {"/a/b/c", "cpu.max", "300000 100000"},
		{"/a/b", "cpu.weight", "500"}, {"/a/busy", "cpu.weight", "100"}, {"/a/empty", "cpu.weight", "10000"}, {"/a/idle", "cpu.idle", "1"}} {
		must(t, tree.write(w[0], w[1], w[2]))
	}
	check := func(of *Tree, p string, cpu float64, from string, share float64, sum uint64, siblings int) {
		t.Helper()
		e, err := of.Effective(p)
		must(t, err)
		if e.CPU == nil || *e.CPU != cpu || e.CPUFrom != from || e.Share == nil || *e.Share != share || e.WeightSum != sum || e.Siblings != siblings {
			t.Errorf("%s: %+v, want %v CPUs from %s, %v of %d, %d siblings", p, e, cpu, from, share, sum, siblings)
		}
	}
	check(tree, "/a/b/c", 2, "/a", 1, 100, 0)
	check(tree, "/a/b", 2, "/a", 500./600, 600, 2)
	check(tree, "/a/busy", 2, "/a", 100./600, 600, 2)
	check(tree, "/a/empty", 2, "/a", 10000./10600, 10600, 3)
	check(tree, "/a/idle", 2, "/a", 0, 600, 2)
	must(t, tree.write("/a/b/c", "cpu.max", "50000 100000"))
	check(tree, "/a/b/c", 0.5, "/a/b/c", 1, 100, 0)
	must(t, tree.write("/a/b/c", "cpu.max", "max"))
	// The root of a tree has somebody above it.
	below, err := Find(tree.path("/a/b"))
	must(t, err)
	check(below, "/c", 2, tree.path("/a"), 1, 100, 0)
	must(t, tree.write("/a", "cpu.max", "max"))
	if e, err := tree.Effective("/a/b"); err != nil || e.CPU != nil || e.CPUFrom != "" {
		t.Errorf("without a quota: %+v %v", e, err)
	}
	if _, err := tree.Effective("/gone"); !errors.Is(err, ErrGone) {
		t.Errorf("gone: %v", err)
	}
}

// Realtime threads are named with their process, in the innermost of the cgroups that are asked for, and nothing is
// done to them.
func TestRealtime(t *testing.T) {
	tree := testTree(t)
	mkdir(t, tree, "/a/b/leaf")
	mkdir(t, tree, "/a/other")
	c := start(t, tree, "/a/b/leaf", "hold")
	start(t, tree, "/a/other", "hold")
	pid := c.Process.Pid
	tasks, err := os.ReadDir("/proc/" + strconv.Itoa(pid) + "/task")
	must(t, err)
	tid, err := strconv.Atoi(tasks[len(tasks)-1].Name()) // not the first: a process is more than its leader
	must(t, err)
	if tid == pid {
		t.Fatalf("a Go program with one thread: %v", tasks)
	}
	if found, err := tree.Realtime([]string{"/a"}); err != nil || len(found) != 0 {
		t.Errorf("before: %v %v", found, err)
	}
	must(t, unix.SchedSetAttr(tid, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 7}, 0))
	for _, paths := range [][]string{{"/a", "/a/b"}, {"/a"}, {"/a/other"}} {
		found, err := tree.Realtime(paths)
		must(t, err)
		in := map[string]string{"/a/b": "/a/b", "/a": "/a"}[paths[len(paths)-1]]
		n := 0
		for p, threads := range found {
			n += len(threads)
			if p != in || threads[0].PID != pid || threads[0].TID != tid || threads[0].Policy != "SCHED_FIFO" || threads[0].Priority != 7 {
				t.Errorf("of %v: %s has %v", paths, p, threads)
			}
		}
		if in != "" && n != 1 || in == "" && n != 0 {
			t.Errorf("of %v: %v", paths, found)
		}
	}
	found, err := tree.Realtime([]string{"/a/b"})
	must(t, err)
	name := strconv.Itoa(pid) + " " + found["/a/b"][0].Comm + " SCHED_FIFO 7"
	wantCondition(t, []Condition{tree.Unweighed("/a/b", found["/a/b"])}, TypeScheduling, ReasonRealtimeThreads, "1 realtime thread", tree.path("/a/b"), name, "chrt -o")
	// What a kernel with CONFIG_RT_GROUP_SCHED answers, which Debian's are not.
	wantCondition(t, []Condition{tree.ungrouped("/a", unix.EINVAL)}, TypeCPU, ReasonRealtimeThreads, "cpu unavailable: realtime threads", tree.path("/a"), name, "chrt -o", "connection limits work")
	if now, err := tree.Of(pid); err != nil || now.Path != "/a/b/leaf" {
		t.Errorf("it is in %v (%v)", now, err)
	}
	if attr, err := unix.SchedGetAttr(tid, 0); err != nil || attr.Policy != unix.SCHED_FIFO {
		t.Errorf("it has %+v (%v)", attr, err)
	}
}

// sched_ext is told by the files of the kernel that has it.
func TestSchedExt(t *testing.T) {
	dir := t.TempDir()
	if c, on := Unscheduled(filepath.Join(dir, "none")); on {
		t.Errorf("a kernel without it: %+v", c)
	}
	write := func(file, text string) {
		t.Helper()
		must(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, file)), 0o755))
		must(t, os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644))
	}
	write("state", "disabled\n")
	if c, on := Unscheduled(dir); on {
		t.Errorf("disabled: %+v", c)
	}
	write("state", "enabled\n")
	write("root/ops", "lavd\n")
	c, on := Unscheduled(dir)
	if !on {
		t.Error("enabled, and not told")
	}
	wantCondition(t, []Condition{c}, TypeScheduling, ReasonSchedExt, "lavd", dir, "stop the program")
	// Where this kernel has it, the files are there.
	state, err := os.ReadFile(filepath.Join(SchedExtDir, "state"))
	if err == nil && strings.TrimSpace(string(state)) == "disabled" && SchedExt(SchedExtDir) != "" {
		t.Errorf("this kernel's is disabled, and %q", SchedExt(SchedExtDir))
	}
}
