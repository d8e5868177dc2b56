package model

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/conn"
	"bulkhead/pkg/policy"
)

// A churner is a process that connects and closes on its own, without a word.
type churner struct {
	cmd    *exec.Cmd
	counts *churnCounts
	page   []byte
}

// churnCounts are in memory that the test shares, so that nothing is lost when a churner
// is killed.
type churnCounts struct {
	opened, closed, refused, unreachable atomic.Uint64
	limited                              atomic.Uint64 // refused by us
	other                                atomic.Uint64 // any other errno
	errno                                atomic.Uint64 // the last such
}

// over are connections that are over, if the process is.
func (c *churnCounts) over() uint64 {
	return c.opened.Load() + c.refused.Load() + c.unreachable.Load()
}

// churnTask is what a churner does.
type churnTask struct {
	Open        string // destinations: one that accepts,
	Refusing    string // and for one in sixteen each, unless they are "",
	Unreachable string
	Threads     int
	Hold        int           // connections that each thread has open
	Every       time.Duration // of each thread: at most one connect in that time
	Count       int           // connects of each thread; 0 is no end
	Limited     int           // errno of a refusal by us
}

const churnVar = "BULKHEAD_MODEL_CHURN"

// countsFD is the descriptor of the shared memory.
const countsFD = 3

func churnMain() int {
	var task churnTask
	err := json.Unmarshal([]byte(os.Getenv(churnVar)), &task)
	var page []byte
	if err == nil {
		page, err = unix.Mmap(countsFD, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "churn:", err)
		return 1
	}
	counts := (*churnCounts)(unsafe.Pointer(&page[0]))
	done := make(chan struct{})
	for range task.Threads {
		go func() {
			runtime.LockOSThread()
			task.churn(counts)
			done <- struct{}{}
		}()
	}
	for range task.Threads {
		<-done
	}
	return 0
}

func (t churnTask) churn(counts *churnCounts) {
	address := func(s string) Op {
		for i, d := range dests {
			if d.Addr.String() == s {
				return Op{Sock: TCP4, Dest: uint8(i)}
			}
		}
		return Op{}
	}
	accepting, refusing, unreachable := address(t.Open), address(t.Refusing), address(t.Unreachable)
	var held []int
	begin := time.Now()
	for i := 1; t.Count == 0 || i <= t.Count; i++ {
		if t.Every > 0 {
			time.Sleep(time.Until(begin.Add(time.Duration(i) * t.Every)))
		}
		op := accepting
		switch {
		case i%16 == 0 && t.Refusing != "":
			op = refusing
		case i%16 == 8 && t.Unreachable != "":
			op = unreachable
		}
		fd, err := newSocket(TCP4)
		if err != nil {
			counts.other.Add(1)
			counts.errno.Store(uint64(err.(unix.Errno)))
			continue
		}
		// Before the call: what is killed within it is over too.
		switch err := connect(fd, op); err {
		case nil:
			counts.opened.Add(1)
			held = append(held, fd)
			fd = -1
		case unix.ECONNREFUSED:
			counts.refused.Add(1)
		case unix.ENETUNREACH, unix.EADDRNOTAVAIL: // the latter where ports run out
			counts.unreachable.Add(1)
		case unix.Errno(t.Limited):
			counts.limited.Add(1)
		default:
			counts.other.Add(1)
			counts.errno.Store(uint64(err.(unix.Errno)))
		}
		if fd >= 0 {
			unix.Close(fd)
		}
		for len(held) > t.Hold || len(held) > 0 && i%64 == 0 {
			if i%4 != 0 {
				unix.SetsockoptLinger(held[0], unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
			}
			unix.Close(held[0])
			counts.closed.Add(1)
			held = held[1:]
		}
	}
	for _, fd := range held {
		unix.Close(fd)
		counts.closed.Add(1)
	}
}

// startChurner starts one; with counts of one before it, it counts on.
func startChurner(t testing.TB, in kerneltest.Cgroup, task churnTask) *churner {
	t.Helper()
	fd, err := unix.MemfdCreate("counts", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	memory := os.NewFile(uintptr(fd), "counts")
	defer memory.Close()
	if err := memory.Truncate(int64(os.Getpagesize())); err != nil {
		t.Fatal(err)
	}
	c := &churner{}
	if c.page, err = unix.Mmap(fd, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		t.Fatal(err)
	}
	c.counts = (*churnCounts)(unsafe.Pointer(&c.page[0]))
	text, err := json.Marshal(task)
	if err != nil {
		t.Fatal(err)
	}
	c.cmd, err = start(in, roleChurn, func(cmd *exec.Cmd) {
		cmd.ExtraFiles = []*os.File{memory}
		cmd.Env = append(cmd.Env, churnVar+"="+string(text))
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// end waits for the process, killed or not, and returns what it had open then.
func (c *churner) end(kill bool, sum *churnSum) {
	if kill {
		c.cmd.Process.Kill()
	}
	c.cmd.Wait()
	sum.add(c.counts)
	unix.Munmap(c.page)
}

// churnSum is what processes that have ended have done.
type churnSum struct{ cycles, killed, refused, unreachable, limited, other, errno uint64 }

func (s *churnSum) add(c *churnCounts) {
	s.cycles += c.over()
	s.killed += c.opened.Load() - c.closed.Load()
	s.refused += c.refused.Load()
	s.unreachable += c.unreachable.Load()
	s.limited += c.limited.Load()
	s.other += c.other.Load()
	s.errno = max(s.errno, c.errno.Load())
}

// instance is programs with one policy, and every cgroup of the stage in feature f.
type instance struct {
	*stage
	k      *conn.Kernel
	limits map[policy.Key]policy.Limit
}

func newInstance(t testing.TB, g *stage, text string) *instance {
	t.Helper()
	plan, err := compile(text)
	if err != nil {
		t.Fatal(err)
	}
	k, err := conn.Open(g.o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(k.Close(), conn.Detach(g.o)); err != nil {
			t.Error(err)
		}
	})
	in := &instance{stage: g, k: k, limits: map[policy.Key]policy.Limit{}}
	for _, b := range plan.Bulkheads {
		in.limits[b.Key] = b.Limit
	}
	f, _ := plan.FindCompartment("f", "")
	var members []conn.Member
	for _, cg := range g.cgroups {
		members = append(members, conn.Member{CgroupID: cg.ID, Level: cg.Level, Compartment: f})
	}
	if _, err := k.Apply(plan, members); err != nil {
		t.Fatal(err)
	}
	return in
}

func (in *instance) snapshot(t testing.TB) *conn.Snapshot {
	t.Helper()
	snap, err := in.k.Reader().Snapshot(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return snap
}

// check looks once: nothing is above its limit, and nothing is wrong.
func (in *instance) check(t testing.TB) *conn.Snapshot {
	t.Helper()
	snap := in.snapshot(t)
	for _, b := range snap.Bulkheads {
		if limit := in.limits[b.Key]; policy.Limit(b.InUse) > limit || policy.Limit(b.Peak) > limit {
			t.Fatalf("%s of %d has %d in use and a peak of %d", b.Key, limit, b.InUse, b.Peak)
		}
	}
	if n := snap.Totals; n.Underflow != 0 || n.Uncounted != 0 || n.SlotsFull != 0 {
		t.Fatalf("totals %+v", n)
	}
	return snap
}

// empty waits until nothing is in use and no slot is left.
func (in *instance) empty(t testing.TB) {
	t.Helper()
	kerneltest.Poll(t, "everything is closed", func() error {
		snap := in.check(t)
		var err error
		for _, b := range snap.Bulkheads {
			if b.InUse != 0 {
				err = errors.Join(err, fmt.Errorf("%s has %d in use", b.Key, b.InUse))
			}
		}
		if snap.Totals.Slots != 0 || len(snap.Connections) != 0 {
			err = errors.Join(err, fmt.Errorf("%d slots are left, and %d connections", snap.Totals.Slots, len(snap.Connections)))
		}
		return err
	})
}

// errnoOfLimits is what our refusals look like.
func errnoOfLimits() int {
	if conn.HaveErrno() {
		return int(unix.EAGAIN)
	}
	return int(unix.EPERM)
}

const churnPolicy = `apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers:
  a: {cidrs: [127.1.0.0/16, 192.0.2.0/25], limits: {connections: 100, errno: EAGAIN}}
  b: {cidrs: [127.2.0.0/16], limits: {connections: 5, errno: EAGAIN}}
features:
  f: {class: batch, limits: {connections: 100, errno: EAGAIN}, providers: {a: {connections: 50, errno: EAGAIN}}}
`

// TestChurn makes connections from eight processes until there have been as many as
// asked for. A tenth and more of them are refused by the server, unreachable, or open
// when their process is killed.
func TestChurn(t *testing.T) {
	const processes, hold = 8, 5
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64N(1_000_000)
	}
	r := rand.New(rand.NewPCG(seed, 1))
	in := newInstance(t, newStage(t, 0), churnPolicy)
	task := churnTask{Open: "127.1.0.1:80", Refusing: "127.1.0.1:9", Unreachable: "192.0.2.1:80", Threads: 1, Hold: hold, Limited: errnoOfLimits()}
	var sum churnSum
	kills := 0
	var all [processes]*churner
	startOne := func(i int) { all[i] = startChurner(t, in.cgroups[i%len(in.cgroups)], task) }
	for i := range all {
		startOne(i)
	}
	sofar := func() uint64 {
		n := sum.cycles
		for _, c := range all {
			n += c.counts.over() - hold - 1 // what is open is not over
		}
		return n
	}
	asked := uint64(*cyclesFlag)
	began := time.Now()
	// Each process is killed after some hundred connections of its own.
	until := func() uint64 { return 50 + r.Uint64N(max(asked/(processes*20), 200)) }
	var end [processes]uint64
	for i := range end {
		end[i] = until()
	}
	samples := 0
	var early footprint
	pause := time.NewTicker(2 * time.Millisecond)
	defer pause.Stop()
	for int64(sofar()) < int64(asked) {
		<-pause.C
		in.check(t)
		samples++
		if early.slots == 0 && sofar() > asked/4 && int64(sofar()) > 0 {
			early = in.footprint(t)
		}
		for i, c := range all {
			if c.counts.over() > end[i] {
				c.end(true, &sum)
				kills++
				startOne(i)
				end[i] = until()
			}
		}
	}
	for _, c := range all {
		c.end(true, &sum)
		kills++
	}
	lasted := time.Since(began)
	in.empty(t)
	late := in.footprint(t)
	t.Logf("seed %d: %d cycles from %d processes in %s (%.0f a second), %d kills with %d connections open, %d refused, %d unreachable; %d samples\nbefore %s\nafter  %s",
		seed, sum.cycles, processes, lasted.Round(time.Millisecond), float64(sum.cycles)/lasted.Seconds(), kills, sum.killed, sum.refused, sum.unreachable, samples, early, late)
	if sum.cycles < asked {
		t.Errorf("%d cycles, want at least %d", sum.cycles, asked)
	}
	if odd := sum.killed + sum.refused + sum.unreachable; odd < sum.cycles/10 || kills < processes {
		t.Errorf("%d of %d were killed, refused or unreachable, want a tenth; %d kills", odd, sum.cycles, kills)
	}
	if sum.limited != 0 || sum.other != 0 {
		t.Errorf("%d were refused by us, and %d failed otherwise (%v): there was room for all", sum.limited, sum.other, unix.Errno(sum.errno))
	}
	if late.maps > early.maps+1<<20 || late.rss > early.rss+16<<20 {
		t.Errorf("memory has grown: %s, then %s", early, late)
	}
	var accepted uint64
	for _, b := range in.snapshot(t).Bulkheads {
		if b.Key == (policy.Key{Scope: policy.ScopeProvider, Provider: "a"}) {
			accepted = b.Accepted
		}
	}
	// What was killed within its connect() was counted by us and not by the process.
	if accepted < sum.cycles || accepted > sum.cycles+uint64(kills) {
		t.Errorf("%d accepted, want the %d cycles and at most one for each of %d kills", accepted, sum.cycles, kills)
	}
}

// footprint is memory that must not grow.
type footprint struct {
	slots     uint64
	maps, rss uint64 // bytes: of the kernel's maps, of this process
}

func (f footprint) String() string {
	return fmt.Sprintf("%d slots, %d KiB of maps, %d KiB resident", f.slots, f.maps>>10, f.rss>>10)
}

func (in *instance) footprint(t testing.TB) (f footprint) {
	t.Helper()
	debug.FreeOSMemory()
	f.slots = in.snapshot(t).Totals.Slots
	pins, err := filepath.Glob(filepath.Join(in.o.BPFFS, "bulkhead", "v*", "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, pin := range pins {
		m, err := ebpf.LoadPinnedMap(pin, &ebpf.LoadPinOptions{ReadOnly: true})
		if err != nil {
			continue // a link
		}
		info, err := m.Info()
		if err == nil {
			if n, ok := info.Memlock(); ok {
				f.maps += n
			}
		}
		m.Close()
	}
	if f.maps == 0 {
		t.Fatalf("no memory of maps at %v", pins)
	}
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	var size uint64
	if _, err := fmt.Sscan(string(b), &size, &f.rss); err != nil {
		t.Fatal(err)
	}
	f.rss *= uint64(os.Getpagesize())
	return f
}

// TestNoWrongRefusals makes a thousand short connections a second with at most 5 open
// against a limit of 50, alone and beside a flood on another provider, which is full:
// none is refused, and no sample is above a limit.
func TestNoWrongRefusals(t *testing.T) {
	in := newInstance(t, newStage(t, 0), churnPolicy)
	const threads, rate = 5, 1000
	steady := churnTask{
		Open: "127.1.0.1:80", Threads: threads, Every: threads * time.Second / rate,
		Count: int(steadyFlag.Seconds() * rate / threads), Limited: errnoOfLimits(),
	}
	flood := churnTask{Open: "127.2.0.1:80", Threads: 4, Hold: 2, Limited: errnoOfLimits()}
	for _, beside := range []bool{false, true} {
		var floods []*churner
		if beside {
			for i := range 2 {
				floods = append(floods, startChurner(t, in.cgroups[1+i], flood))
			}
		}
		began := time.Now()
		c := startChurner(t, in.cgroups[0], steady)
		ended := make(chan struct{})
		var sum churnSum
		go func() {
			defer close(ended)
			c.end(false, &sum)
		}()
		samples := 0
		pause := time.NewTicker(2 * time.Millisecond)
		for running := true; running; samples++ {
			select {
			case <-ended:
				running = false
			case <-pause.C:
				in.check(t)
			}
		}
		pause.Stop()
		lasted := time.Since(began)
		var flooded churnSum
		for _, f := range floods {
			f.end(true, &flooded)
		}
		in.empty(t)
		t.Logf("%d connections in %s (%.0f a second), %d refused; flood: %d refused, %d let through; %d samples", sum.cycles, lasted.Round(time.Millisecond),
			float64(sum.cycles)/lasted.Seconds(), sum.limited, flooded.limited, flooded.cycles, samples)
		if sum.cycles != threads*uint64(steady.Count) || sum.limited != 0 || sum.other != 0 {
			t.Errorf("%+v, want %d connections, none refused", sum, threads*steady.Count)
		}
		if beside && (flooded.limited < 1000 || flooded.cycles == 0) {
			t.Errorf("the flood was refused %d times and let through %d times", flooded.limited, flooded.cycles)
		}
	}
}
