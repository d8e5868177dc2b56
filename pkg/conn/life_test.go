package conn

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/policy"
)

// The agent ends and starts again, with connections open and clients at work: limits
// hold all the time, and it carries on with the same counts.
func TestRestart(t *testing.T) {
	in := newInstance(t)
	plan, cg := in.enforce(`
providers:
  p: {cidrs: [127.1.0.0/16], limits: {connections: 5}}
  q: {cidrs: [127.2.0.0/16], limits: {connections: 0, errno: EAGAIN}}
features:
  f: {class: batch}
`)
	server := kerneltest.Serve(t, "127.1.0.1:80", kerneltest.Drain)
	client := in.start(cg)
	var open []int
	for range 4 {
		open = append(open, client.MustDial(kerneltest.TCP4, server.Addr))
	}
	client.Close(open[3])
	in.inUse(provider("p"), 3, "after a close")
	before, traffic := in.snapshot(), in.traffic("f", "", "p")

	// The first moment, a connect while nobody is there, and after a new start.
	same := func(when string) {
		t.Helper()
		r, err := OpenReader(in.o)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		s, err := r.Snapshot(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if s.Generation < before.Generation || s.Plan.Hash != plan.Hash || !slices.Equal(s.Members, before.Members) {
			t.Errorf("%s: generation %d of %s with members %v", when, s.Generation, s.Plan.Hash, s.Members)
		}
		for _, b := range s.Bulkheads {
			i := slices.IndexFunc(before.Bulkheads, func(o Bulkhead) bool { return o.Key == b.Key })
			if b.Provider == "q" {
				continue
			}
			if o := before.Bulkheads[i]; b.InUse != o.InUse || b.Peak != o.Peak || b.Accepted != o.Accepted || b.Limit != o.Limit {
				t.Errorf("%s: %+v, was %+v", when, b, o)
			}
		}
		if len(s.Connections) != 3 {
			t.Errorf("%s: %d connections, want 3", when, len(s.Connections))
		}
	}
	storm := in.start(cg)
	storm.Storm(kerneltest.TCP4, "127.2.0.1:80", 2)
	in.close()
	same("while no agent runs")
	for range 2 {
		in.open()
		in.close()
	}
	in.open()
	same("after a new start")
	if !in.k.pinned || len(in.k.links) != 4 {
		t.Errorf("took over %d links, want 4", len(in.k.links))
	}
	in.apply(plan, member(t, plan, cg, "f", ""))
	same("after the first apply of the new one")
	for errno, n := range storm.Calm() {
		if errno != errnoSeen(syscall.EAGAIN) {
			t.Errorf("%d connects at a limit of 0 returned %v during restarts", n, errno)
		}
	}
	if tr := in.traffic("f", "", "p"); tr.Connections != traffic.Connections || tr.TxBytes < traffic.TxBytes {
		t.Errorf("traffic %+v, was %+v", tr, traffic)
	}
	if n := attached(t, in.Cgroup.Path); len(n) != 4 || slices.Max(slices.Collect(maps.Values(n))) != 1 {
		t.Errorf("attached: %v, want one program on each of four hooks", n)
	}
	// The new one can give back what the old one took.
	open[3] = client.MustDial(kerneltest.TCP4, server.Addr)
	client.Close(open...)
	in.empty("after closing all")
}

func TestOnlyOneAgent(t *testing.T) {
	in := newInstance(t)
	for _, applied := range []bool{false, true} {
		if applied {
			in.apply(planOf(t, twoProviders))
		}
		var busy *BusyError
		if k, err := Open(in.o); !errors.As(err, &busy) || k != nil {
			t.Fatalf("a second Open: %v, want a BusyError", err)
		}
		if busy.PID != os.Getpid() || !strings.Contains(busy.Error(), fmt.Sprint(os.Getpid())) {
			t.Errorf("busy: %v, want pid %d", busy, os.Getpid())
		}
		if pid, ok := Holder(in.o); !ok || pid != os.Getpid() {
			t.Errorf("holder %d, %v; want %d", pid, ok, os.Getpid())
		}
		if err := Detach(in.o); !errors.As(err, &busy) {
			t.Errorf("Detach: %v, want a BusyError", err)
		}
	}
	// The refused ones have changed nothing.
	if n := attached(t, in.Cgroup.Path); len(n) != 4 {
		t.Errorf("attached: %v", n)
	}
	in.close()
	if pid, ok := Holder(in.o); ok {
		t.Errorf("holder %d after Close", pid)
	}
}

// Who only looks whether an agent runs holds the lock for a moment, shared: an agent
// that starts at that moment tries again.
func TestLockBesideHolder(t *testing.T) {
	env := kerneltest.New(t)
	o := Options{CgroupRoot: env.Cgroup.Path, BPFFS: env.BPFFS}
	if err := os.Mkdir(o.dir(), 0o700); err != nil {
		t.Fatal(err)
	}
	looks, err := os.Open(o.dir())
	if err != nil {
		t.Fatal(err)
	}
	defer looks.Close()
	if err := unix.Flock(int(looks.Fd()), unix.LOCK_SH|unix.LOCK_NB); err != nil {
		t.Fatal(err)
	}
	opens, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(opens)
	if _, err := unix.InotifyAddWatch(opens, o.dir(), unix.IN_OPEN|unix.IN_CLOSE); err != nil {
		t.Fatal(err)
	}

	type result struct {
		lock *os.File
		err  error
	}
	done := make(chan result, 1)
	go func() {
		f, err := o.lock()
		done <- result{f, err}
	}()
	// Each try opens and closes the directory twice, the second time to ask who has it:
	// the fifth event is of a try after one that was in vain.
	seen := make(chan error, 1)
	go func() {
		buffer := make([]byte, 4096)
		for n := 0; n < 5; {
			got, err := unix.Read(opens, buffer)
			if err != nil {
				seen <- err
				return
			}
			n += got / unix.SizeofInotifyEvent // without a name: it is the directory itself
		}
		seen <- nil
	}()
	select {
	case r := <-done:
		t.Fatalf("lock beside somebody who looks: %v, %v; want it to try again", r.lock, r.err)
	case err := <-seen:
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := looks.Close(); err != nil {
		t.Fatal(err)
	}
	r := <-done
	if r.err != nil {
		t.Fatalf("lock once nobody looks any more: %v", r.err)
	}
	defer r.lock.Close()
	if pid, ok := Holder(o); !ok || pid != os.Getpid() {
		t.Errorf("holder %d, %v; want %d", pid, ok, os.Getpid())
	}
}

func TestWrongPlaces(t *testing.T) {
	env := kerneltest.New(t)
	dir := t.TempDir()
	for _, c := range []struct {
		name string
		o    Options
		want error
	}{
		{"no bpf file system", Options{CgroupRoot: env.Cgroup.Path, BPFFS: dir}, ErrNoBPFFS},
		{"no directory for pins", Options{CgroupRoot: env.Cgroup.Path, BPFFS: filepath.Join(dir, "none")}, os.ErrNotExist},
		{"no cgroup v2", Options{CgroupRoot: dir, BPFFS: env.BPFFS}, ErrNoCgroup2},
		{"no cgroup", Options{CgroupRoot: filepath.Join(env.Cgroup.Path, "none"), BPFFS: env.BPFFS}, os.ErrNotExist},
	} {
		k, err := Open(c.o)
		if !errors.Is(err, c.want) || k != nil {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
	for _, d := range []string{dir, env.BPFFS} {
		if left, err := os.ReadDir(d); err != nil || len(left) != 0 {
			t.Errorf("left in %s: %v (%v)", d, left, err)
		}
	}
	o := Options{CgroupRoot: env.Cgroup.Path, BPFFS: env.BPFFS}
	if r, err := OpenReader(o); !errors.Is(err, ErrNotLoaded) || r != nil {
		t.Errorf("OpenReader: %v, want ErrNotLoaded", err)
	}
	if err := Detach(o); !errors.Is(err, ErrNotLoaded) {
		t.Errorf("Detach: %v, want ErrNotLoaded", err)
	}
	if n := attached(t, env.Cgroup.Path); len(n) != 0 {
		t.Errorf("attached: %v", n)
	}
}

// Before the first Apply nothing is attached and nothing is pinned, and Close leaves
// nothing.
func TestOpenAloneDoesNothing(t *testing.T) {
	in := newInstance(t)
	if n := attached(t, in.Cgroup.Path); len(n) != 0 {
		t.Errorf("attached: %v", n)
	}
	if _, err := OpenReader(in.o); !errors.Is(err, ErrNotLoaded) {
		t.Errorf("OpenReader: %v, want ErrNotLoaded", err)
	}
	in.close()
	if left, err := os.ReadDir(in.BPFFS); err != nil || len(left) != 0 {
		t.Errorf("left: %v (%v)", left, err)
	}
}

// Pins that are not what they should be are reported and not touched, and Detach clears
// them away.
func TestForeignPins(t *testing.T) {
	in := newInstance(t)
	_, cg := in.enforce(closedPolicy)
	client := in.start(cg)
	in.close()
	programs := func() string {
		p, err := Programs(in.o)
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(p)
	}
	before := programs()
	foreign := func(o Options, what, name string) {
		t.Helper()
		k, err := Open(o)
		if !errors.Is(err, ErrForeign) || k != nil {
			t.Errorf("%s: %v, want ErrForeign", what, err)
		} else if !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "detach") {
			t.Errorf("%s: %q names neither %q nor the cure", what, err, name)
		}
		if _, ok := Holder(o); ok {
			t.Errorf("%s: the lock is still held", what)
		}
		if after := programs(); after != before {
			t.Errorf("%s: programs are %s, were %s", what, after, before)
		}
		_, errno := client.Dial(kerneltest.TCP4, "127.0.0.1:1")
		wantErrno(t, errno, errnoSeen(syscall.EAGAIN), what+": the limit in force")
	}
	foreign(Options{CgroupRoot: cg.Path, BPFFS: in.BPFFS}, "another root", "link_")

	pin := filepath.Join(in.o.pins(), kernelMapTraffic)
	if err := os.Remove(pin); err != nil {
		t.Fatal(err)
	}
	foreign(in.o, "a map is missing", kernelMapTraffic)
	if _, err := OpenReader(in.o); !errors.Is(err, ErrForeign) {
		t.Errorf("OpenReader: %v, want ErrForeign", err)
	}
	other, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := other.Pin(pin); err != nil {
		t.Fatal(err)
	}
	foreign(in.o, "a map of another shape", kernelMapTraffic)

	if err := Detach(in.o); err != nil {
		t.Fatal(err)
	}
	in.gone(cg, client)
}

// gone checks that an instance has left no trace.
func (in *instance) gone(cg kerneltest.Cgroup, client *kerneltest.Client) {
	in.Helper()
	if left, err := os.ReadDir(in.BPFFS); err != nil || len(left) != 0 {
		in.Errorf("left: %v (%v)", left, err)
	}
	kerneltest.Poll(in, "programs are detached", func() error { // the kernel does it later
		if n := attached(in, in.Cgroup.Path); len(n) != 0 {
			return fmt.Errorf("attached: %v", n)
		}
		return nil
	})
	_, errno := client.Dial(kerneltest.TCP4, "127.0.0.1:1")
	wantErrno(in, errno, syscall.ECONNREFUSED, "connect to a closed port, which a limit of 0 refused with another errno")
}

func TestDetach(t *testing.T) {
	in := newInstance(t)
	cg := in.Mkdir("f")
	server := kerneltest.Serve(t, "127.1.0.1:80", kerneltest.Echo)
	client := in.start(cg)
	for _, text := range []string{udpPolicy, strings.ReplaceAll(twoProviders, "100", "1")} {
		plan := planOf(t, text)
		in.apply(plan, member(t, plan, cg, "f", ""))
		fd := client.MustDial(kerneltest.TCP4, server.Addr)
		in.close()
		if err := Detach(in.o); err != nil {
			t.Fatal(err)
		}
		in.gone(cg, client)
		client.Exchange(fd, 1, 10) // what is open stays open
		client.Close(fd)
		if err := Detach(in.o); !errors.Is(err, ErrNotLoaded) {
			t.Errorf("Detach again: %v, want ErrNotLoaded", err)
		}
		in.open()
		if s := in.k.bulkheads.at; len(s) != 0 {
			t.Errorf("a new start finds %v", s)
		}
	}
}

// A start that was killed before it published leaves a directory; the next one clears
// it away, and with it what was attached.
func TestInterruptedStart(t *testing.T) {
	in := newInstance(t)
	aside := filepath.Join(in.o.dir(), staging+"1")
	if err := os.Mkdir(aside, 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := link.AttachCgroup(link.CgroupOptions{
		Path: in.Cgroup.Path, Attach: ebpf.AttachCGroupInet4Connect, Program: in.k.coll.Programs[kernelProgBhConnect4],
	})
	if err != nil {
		t.Fatal(err)
	}
	err = errors.Join(
		l.Pin(filepath.Join(aside, "link_connect4")),
		in.k.coll.Maps[kernelMapSlots].Pin(filepath.Join(aside, kernelMapSlots)),
		l.Close())
	if err != nil {
		t.Fatal(err)
	}
	// Its lock and its descriptors go when it is killed.
	in.close()
	in.open()
	if _, err := os.Stat(aside); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s: %v, want it gone", aside, err)
	}
	kerneltest.Poll(t, "what the killed start attached is detached", func() error {
		if n := attached(t, in.Cgroup.Path); len(n) != 0 {
			return fmt.Errorf("attached: %v", n)
		}
		return nil
	})
	in.apply(planOf(t, twoProviders))
	left, err := os.ReadDir(in.o.dir())
	if err != nil || len(left) != 1 || left[0].Name() != filepath.Base(in.o.pins()) {
		t.Errorf("pins: %v (%v), want only %s", left, err, in.o.pins())
	}
}

// Two instances side by side know nothing of one another, and a connect below both is
// judged by both.
func TestTwoInstances(t *testing.T) {
	t.Run("on one root", func(t *testing.T) {
		in := newInstance(t)
		in.enforce(closedPolicy)
		other := filepath.Join(in.BPFFS, "other")
		if err := os.Mkdir(other, 0o700); err != nil {
			t.Fatal(err)
		}
		o := Options{CgroupRoot: in.o.CgroupRoot, BPFFS: other}
		k, err := Open(o)
		if !errors.Is(err, ErrForeign) || !strings.Contains(err.Error(), "--bpffs") {
			t.Errorf("got %v, want ErrForeign that names --bpffs", err)
		}
		if err == nil {
			k.Close()
		}
		if entries, err := os.ReadDir(filepath.Join(other, "bulkhead")); err == nil && len(entries) > 0 {
			t.Errorf("it left %v", entries)
		}
	})
	outer := newInstance(t)
	cg := outer.Mkdir("inner")
	inner := &instance{T: t, Env: kerneltest.New(t)}
	inner.o = Options{CgroupRoot: cg.Path, BPFFS: inner.BPFFS}
	inner.open()
	t.Cleanup(inner.close)
	text := func(limit int, errno string) *policy.Plan {
		return planOf(t, fmt.Sprintf(`
providers:
  p: {cidrs: [127.0.0.0/8], limits: {connections: %d, errno: %s}}
features:
  f: {class: batch}
`, limit, errno))
	}
	outer.apply(text(2, "EAGAIN"))
	inner.apply(text(1, "EBUSY"))
	server := kerneltest.Serve(t, "127.0.0.1:8000", kerneltest.Drain)
	below, beside := outer.start(cg), outer.start(outer.Cgroup)
	below.MustDial(kerneltest.TCP4, server.Addr)
	_, errno := below.Dial(kerneltest.TCP4, server.Addr)
	wantErrno(t, errno, errnoSeen(syscall.EBUSY), "a second connect below both")
	beside.MustDial(kerneltest.TCP4, server.Addr)
	_, errno = beside.Dial(kerneltest.TCP4, server.Addr)
	wantErrno(t, errno, errnoSeen(syscall.EAGAIN), "a third connect below the outer")
	if o, i := outer.count(provider("p")), inner.count(provider("p")); HaveErrno() && (o.InUse != 2 || i.InUse != 1) {
		t.Errorf("in use: %d by the outer, %d by the inner; want 2 and 1", o.InUse, i.InUse)
	}
	below.Kill()
	beside.Kill()
	inner.empty("after the clients have ended")
}

// The branch for kernels before 5.18 loads here too, and refuses with EPERM.
func TestWithoutErrno(t *testing.T) {
	in := newInstance(t)
	_, cg := in.enforce(closedPolicy)
	client := in.start(cg)
	_, errno := client.Dial(kerneltest.TCP4, "127.0.0.1:1")
	wantErrno(t, errno, errnoSeen(syscall.EAGAIN), "connect")

	spec, err := loadKernel()
	if err != nil {
		t.Fatal(err)
	}
	if err := spec.Variables[kernelVarHaveRetval].Set(uint32(0)); err != nil {
		t.Fatal(err)
	}
	old := in.load(spec)
	for _, h := range hooks() {
		if l := in.k.links[h.name]; l != nil {
			if err := l.Update(old[h.program]); err != nil {
				t.Fatal(err)
			}
		}
	}
	_, errno = client.Dial(kerneltest.TCP4, "127.0.0.1:1")
	wantErrno(t, errno, syscall.EPERM, "connect as before 5.18")
	if n := in.count(provider("p")).refused(); n != 2 {
		t.Errorf("%d refused, want 2", n)
	}
}

// TestMaxSlots: what finds no room is let through and counted as such, or refused if the
// policy says so, and nothing else is wrong; the size stays with the pins.
func TestMaxSlots(t *testing.T) {
	env := kerneltest.New(t)
	in := &instance{T: t, Env: env, o: Options{CgroupRoot: env.Cgroup.Path, BPFFS: env.BPFFS, MaxSlots: MinMaxSlots}}
	in.open()
	t.Cleanup(func() { in.close() })
	plan, cg := in.enforce("providers:\n  p: {cidrs: [127.1.0.0/16], limits: {connections: 5000}}\nfeatures:\n  f: {class: batch}\n")
	server := kerneltest.Serve(t, "127.1.0.1:80", kerneltest.Drain)
	client := in.start(cg)
	// Cookies are handed out in a row, so that every home is taken too.
	const room, over = MinMaxSlots + MinMaxSlots/8, 76
	var open []int
	for range room + over {
		open = append(open, client.MustDial(kerneltest.TCP4, server.Addr))
	}
	s := in.snapshot()
	if b := in.count(provider("p")); s.Totals.Slots != room || s.Totals.SlotsMax != MinMaxSlots || s.Totals.SlotsFull != over ||
		b.InUse != room || b.Peak > room+1 || b.Accepted != room || b.refused() != 0 {
		t.Errorf("%d connections with room for %d: %+v, %+v", len(open), room, s.Totals, b)
	}

	// A strict policy refuses what finds no room, and that is a refusal as others are.
	strict, _ := in.enforce("exhausted: refuse\nproviders:\n  p: {cidrs: [127.1.0.0/16], limits: {connections: 5000, errno: EAGAIN}}\nfeatures:\n  f: {class: batch}\n")
	for i := range uint64(3) {
		_, errno := client.Dial(kerneltest.TCP4, server.Addr)
		wantErrno(t, errno, errnoSeen(syscall.EAGAIN), "connect without room")
		s, b := in.snapshot(), in.count(provider("p"))
		if s.Totals.SlotsFull != over+i+1 || b.InUse != room || b.Accepted != room || b.Rejected["exhausted"] != i+1 || b.refused() != 0 {
			t.Errorf("refused for want of room: %+v, %+v", s.Totals, b)
		}
		if r := s.Refusals[0]; r.Reason != "exhausted" || r.Bulkhead != provider("p") || r.Limit != 5000 {
			t.Errorf("told: %+v", r)
		}
	}
	strict.Mode = policy.Observe
	in.apply(strict, member(t, strict, cg, "f", ""))
	client.Close(client.MustDial(kerneltest.TCP4, server.Addr))
	if b := in.count(provider("p")); b.WouldReject["exhausted"] != 1 || b.InUse != room {
		t.Errorf("without room in mode observe: %+v", b)
	}
	in.apply(plan, member(t, plan, cg, "f", ""))
	const full = over + 4

	// Those without a slot take none with them, and there is room again.
	for _, fd := range open[room-1:] {
		client.Close(fd)
	}
	in.inUse(provider("p"), room-1, "after the last ones have closed")
	client.MustDial(kerneltest.TCP4, server.Addr)
	if s := in.snapshot(); s.Totals.SlotsFull != full {
		t.Errorf("with room for one: %+v", s.Totals)
	}

	in.close()
	in.o.MaxSlots = 4 * MinMaxSlots
	in.open()
	if got := in.k.MaxSlots(); got != MinMaxSlots {
		t.Errorf("room for %d after taking over, want the %d that are pinned", got, MinMaxSlots)
	}
	in.apply(plan, member(t, plan, cg, "f", ""))
	in.leaklessBut(full)
	in.close()
	if err := Detach(in.o); err != nil {
		t.Fatal(err)
	}
	for _, n := range []uint32{1, MinMaxSlots - 1, MaxMaxSlots + 1} {
		in.o.MaxSlots = n
		if k, err := Open(in.o); err == nil {
			k.Close()
			t.Errorf("room for %d is taken", n)
		}
	}
	in.o.MaxSlots = 2 * MinMaxSlots
	in.open()
	if got := in.k.MaxSlots(); got != 2*MinMaxSlots {
		t.Errorf("room for %d, want the %d that were asked for", got, 2*MinMaxSlots)
	}
}
