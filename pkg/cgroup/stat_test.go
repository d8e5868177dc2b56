package cgroup

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/policy"
)

// Usage and processes are known on every host.
func TestStatUsage(t *testing.T) {
	tree := testTree(t)
	mkdir(t, tree, "/x/a")
	mkdir(t, tree, "/x/b")
	start(t, tree, "/x/a", "spin")
	start(t, tree, "/x/a", "hold")
	start(t, tree, "/x/b", "hold")
	kerneltest.Poll(t, "usage", func() error {
		s, err := tree.Stat("/x")
		if err != nil || s.CPU.UsageUsec < 20_000 {
			return fmt.Errorf("%+v, %v", s, err)
		}
		if s.Processes != 3 {
			t.Errorf("%d processes, want 3", s.Processes)
		}
		return nil
	})
	s, err := tree.Stat("/")
	if err != nil || s.Processes != 3 || s.CPU.Max != nil || s.CPU.Idle {
		t.Errorf("%+v, %v", s, err)
	}
	host, err := Find("")
	must(t, err)
	if s, err := host.Stat("/"); err != nil || s.Processes < 1 {
		t.Errorf("true root: %+v, %v", s, err)
	}
}

// Processes that want the processor and do not get it are seen as pressure, where the
// kernel tells.
func TestStatPressure(t *testing.T) {
	tree := testTree(t)
	mkdir(t, tree, "/x/a")
	if !tree.has("/x/a", "cpu.pressure") {
		s, err := tree.Stat("/x/a")
		if err != nil || s.Pressure != (Pressure{}) {
			t.Errorf("%+v, %v: this kernel tells of no pressure", s, err)
		}
		return
	}
	for range runtime.NumCPU() + 1 {
		start(t, tree, "/x/a", "spin")
	}
	kerneltest.Poll(t, "pressure", func() error {
		s, err := tree.Stat("/x")
		if err != nil || s.Pressure.CPU.SomeUsec == nil || *s.Pressure.CPU.SomeUsec == 0 {
			return fmt.Errorf("%+v, %v", s, err)
		}
		for name, n := range map[string]*uint64{"memory, some": s.Pressure.Memory.SomeUsec, "memory, full": s.Pressure.Memory.FullUsec, "io, some": s.Pressure.IO.SomeUsec, "io, full": s.Pressure.IO.FullUsec} {
			if n == nil {
				t.Errorf("pressure on %s is not known", name)
			}
		}
		return nil
	})
}

// What the kernel kills for want of memory is counted, in the cgroups above too.
func TestStatOOM(t *testing.T) {
	tree := cpuTree(t)
	noConditions(t, apply(t, tree, plan(policy.Enforce, nil, feature("chat", nil, &policy.Memory{Max: 16 << 20}))), nil)
	mkdir(t, tree, chat+"/exec-1.scope")
	if s, err := tree.Stat(chat); err != nil || s.Memory.OOMKills == nil || *s.Memory.OOMKills != 0 {
		t.Fatalf("before: %+v, %v", s.Memory, err)
	}
	if c, err := startHelper(tree, chat+"/exec-1.scope", "alloc", fmt.Sprint(64<<20)); err == nil {
		c.end()
		t.Fatal("64 MiB were given in a cgroup of 16")
	}
	if s, err := tree.Stat(chat); err != nil || *s.Memory.OOMKills != 1 {
		t.Errorf("after: %+v, %v, want one killed", s.Memory, err)
	}
}

// The processes of threaded cgroups are counted once, in the cgroup above.
func TestStatThreaded(t *testing.T) {
	tree := testTree(t)
	mkdir(t, tree, "/x/threads")
	c := start(t, tree, "/x", "hold")
	must(t, tree.write("/x/threads", "cgroup.type", "threaded"))
	must(t, tree.write("/x/threads", "cgroup.threads", fmt.Sprint(c.Process.Pid)))
	if _, err := tree.pids("/x/threads"); !errors.Is(err, unix.EOPNOTSUPP) {
		t.Fatalf("a threaded cgroup answers %v", err)
	}
	if s, err := tree.Stat("/x"); err != nil || s.Processes != 1 {
		t.Errorf("%+v, %v", s, err)
	}
	if s, err := tree.Stat("/x/threads"); err != nil || s.Processes != 0 {
		t.Errorf("%+v, %v", s, err)
	}
	c.end()
}

func TestStatGone(t *testing.T) {
	tree := testTree(t)
	if s, err := tree.Used("/x"); !errors.Is(err, ErrGone) {
		t.Errorf("used: %+v, %v", s, err)
	}
	if s, err := tree.Stat("/x"); !errors.Is(err, ErrGone) {
		t.Errorf("%+v, %v", s, err)
	}
	if n, err := tree.Processes("/x"); !errors.Is(err, ErrGone) {
		t.Errorf("%d, %v", n, err)
	}
	// Removed between open and read.
	mkdir(t, tree, "/x")
	f, err := os.Open(tree.path("/x") + "/cpu.stat")
	must(t, err)
	defer f.Close()
	must(t, os.Remove(tree.path("/x")))
	if _, err := f.Read(make([]byte, 10)); !gone(err) {
		t.Errorf("reading a removed cgroup: %v", err)
	}
	// While cgroups come and go there is an answer or ErrGone, nothing else.
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
				os.MkdirAll(tree.path("/x/y/z"), 0o755)
				for _, p := range []string{"/x/y/z", "/x/y", "/x"} {
					os.Remove(tree.path(p))
				}
			}
		}
	}()
	for i := 0; i < 500; i++ {
		if s, err := tree.Stat("/x/y"); err != nil && !errors.Is(err, ErrGone) {
			t.Fatalf("%+v, %v", s, err)
		}
		if _, err := tree.Walk(); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	<-done
}

func TestStatValues(t *testing.T) {
	tree := cpuTree(t)
	p := plan(policy.Enforce, nil,
		feature("chat", &policy.CPU{Weight: 700, MaxUsec: 5000, PeriodUsec: 50000}, &policy.Memory{High: 1 << 29, Max: 1 << 30}),
		feature("batch", &policy.CPU{Idle: true}, nil))
	noConditions(t, apply(t, tree, p), nil)
	mkdir(t, tree, chat+"/exec-1.scope")
	start(t, tree, chat+"/exec-1.scope", "spin")
	kerneltest.Poll(t, "throttling", func() error {
		s, err := tree.Stat(chat)
		if err != nil || s.CPU.NrPeriods == 0 || s.CPU.NrThrottled == 0 || s.CPU.ThrottledUsec == 0 {
			return fmt.Errorf("%+v, %v", s, err)
		}
		return nil
	})
	s, err := tree.Stat(chat)
	must(t, err)
	if s.CPU.Weight == nil || *s.CPU.Weight != 700 || s.CPU.Max == nil || *s.CPU.Max != (Quota{5000, 50000, 0}) || s.CPU.Idle ||
		s.Memory.High == nil || *s.Memory.High != 1<<29 || s.Memory.Max == nil || *s.Memory.Max != 1<<30 ||
		s.Memory.Current == nil || *s.Memory.Current == 0 || s.Processes != 1 {
		t.Errorf("%+v", s)
	}
	u, err := tree.Used(chat)
	must(t, err)
	if u.CPU.NrPeriods < s.CPU.NrPeriods || u.CPU.UsageUsec < s.CPU.UsageUsec || u.CPU.ThrottledUsec < s.CPU.ThrottledUsec || u.Memory.Current == nil || *u.Memory.Current == 0 ||
		(u.Memory.OOMKills == nil) != (s.Memory.OOMKills == nil) || (u.Pressure.CPU.SomeUsec == nil) != (s.Pressure.CPU.SomeUsec == nil) {
		t.Errorf("used: %+v, of %+v", u, s)
	}
	s, err = tree.Stat(batch)
	if err != nil || !s.CPU.Idle || s.CPU.Weight != nil || s.CPU.Max != nil || s.Memory.Max != nil || s.Memory.High != nil {
		t.Errorf("%+v, %v", s, err)
	}
}
