package cgroup

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/policy"
)

// never is longer than any test.
const never = time.Hour

// fileTree is a tree of ordinary files, which read what was written last: what is tested here is who waits for what, and
// the kernel has no part in that.
func fileTree(t *testing.T, slices ...string) *Tree {
	t.Helper()
	dir := t.TempDir()
	tree := &Tree{Dir: dir, Mount: dir, ID: rootID}
	tree.Backend = cgroupfs{tree}
	for _, p := range append([]string{"/", policy.ParentSlice}, slices...) {
		lay(t, tree, p, "cgroup.procs", "")
		lay(t, tree, p, "cgroup.threads", "")
		lay(t, tree, p, "cgroup.controllers", "cpu memory pids")
		lay(t, tree, p, "cgroup.subtree_control", "cpu memory pids")
	}
	return tree
}

// lay gives a cgroup of a fileTree a file.
func lay(t *testing.T, tree *Tree, p, file, text string) {
	t.Helper()
	must(t, os.MkdirAll(tree.path(p), 0o755))
	must(t, os.WriteFile(filepath.Join(tree.path(p), file), []byte(text+"\n"), 0o644))
}

// fakeSystemd answers on a socket as systemd does.
type fakeSystemd struct {
	socket string
	mu     sync.Mutex
	// answer gives the reply to a request for a unit; nil for none. It may close the connection.
	answer func(c net.Conn, member, unit string, body []any) []any
	// asked are the requests, by member.
	asked map[string]int
}

// newFake serves answer: with nil it takes connections and says nothing at all.
func newFake(t *testing.T, answer func(c net.Conn, member, unit string, body []any) []any) *fakeSystemd {
	t.Helper()
	f := &fakeSystemd{socket: filepath.Join(t.TempDir(), "private"), answer: answer, asked: map[string]int{}}
	l, err := net.Listen("unix", f.socket)
	must(t, err)
	var conns []net.Conn
	t.Cleanup(func() {
		l.Close()
		f.mu.Lock()
		defer f.mu.Unlock()
		for _, c := range conns {
			c.Close()
		}
	})
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			f.mu.Lock()
			conns = append(conns, c)
			f.mu.Unlock()
			go f.serve(c)
		}
	}()
	return f
}

func (f *fakeSystemd) set(answer func(c net.Conn, member, unit string, body []any) []any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.answer = answer
}

func (f *fakeSystemd) count(member string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.asked[member]
}

func (f *fakeSystemd) serve(c net.Conn) {
	f.mu.Lock()
	mute := f.answer == nil
	f.mu.Unlock()
	if mute {
		return
	}
	in := bufio.NewReader(c)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return
		}
		switch line = strings.Trim(line, "\x00\r\n"); {
		case line == "BEGIN":
			f.messages(c, in)
			return
		case line == "AUTH":
			fmt.Fprint(c, "REJECTED EXTERNAL\r\n")
		case strings.HasPrefix(line, "AUTH"):
			fmt.Fprint(c, "OK 0123456789abcdef0123456789abcdef\r\n")
		default:
			fmt.Fprint(c, "ERROR\r\n")
		}
	}
}

func (f *fakeSystemd) messages(c net.Conn, in *bufio.Reader) {
	for {
		m, err := dbus.DecodeMessage(in)
		if err != nil {
			return
		}
		member, _ := m.Headers[dbus.FieldMember].Value().(string)
		object, _ := m.Headers[dbus.FieldPath].Value().(dbus.ObjectPath)
		unit := unescaped(path.Base(string(object)))
		if member == "SetUnitProperties" || strings.HasSuffix(member, "Unit") {
			unit, _ = m.Body[0].(string)
		}
		f.mu.Lock()
		f.asked[member]++
		answer := f.answer
		f.mu.Unlock()
		body := []any{}
		if member != "AddMatch" && answer != nil {
			body = answer(c, member, unit, m.Body)
		}
		if body == nil {
			continue
		}
		reply := dbus.Message{Type: dbus.TypeMethodReply, Body: body, Headers: map[dbus.HeaderField]dbus.Variant{
			dbus.FieldReplySerial: dbus.MakeVariant(m.Serial())}}
		if len(body) > 0 {
			reply.Headers[dbus.FieldSignature] = dbus.MakeVariant(dbus.SignatureOf(body...))
		}
		if reply.EncodeTo(c, binary.LittleEndian) != nil {
			return
		}
	}
}

// unescaped undoes the escaping of unit names in object paths.
func unescaped(s string) string {
	return regexp.MustCompile("_[0-9a-f]{2}").ReplaceAllStringFunc(s, func(x string) string {
		n, _ := strconv.ParseUint(x[1:], 16, 8)
		return string(rune(n))
	})
}

// willing takes everything, and does what effect does of it.
func willing(disabled map[string][]string, effect func(unit string)) func(c net.Conn, member, unit string, body []any) []any {
	return func(_ net.Conn, member, unit string, body []any) []any {
		switch member {
		case "Get":
			switch body[1] {
			case "ActiveState":
				return []any{dbus.MakeVariant("active")}
			case "DisableControllers":
				return []any{dbus.MakeVariant(append([]string{}, disabled[unit]...))}
			}
			return []any{dbus.MakeVariant("")}
		case "SetUnitProperties":
			if effect != nil {
				effect(unit)
			}
		case "StartUnit", "StopUnit":
			return []any{dbus.ObjectPath("/org/freedesktop/systemd1/job/7")}
		}
		return []any{}
	}
}

// asked makes systemd's back end of a tree that asks a fake.
func asking(t *testing.T, tree *Tree, f *fakeSystemd, l limits) *systemd {
	b := newSystemd(tree, f.socket, l)
	tree.Backend = b
	t.Cleanup(func() { b.drop() })
	return b
}

func slicesOf(n int, tenants bool) (all []string) {
	for i := range n {
		p := fmt.Sprintf("%s/bulkhead-f%d.slice", policy.ParentSlice, i)
		if all = append(all, p); tenants {
			all = append(all, fmt.Sprintf("%s/bulkhead-f%d-t.slice", p, i))
		}
	}
	return all
}

var weight = []Value{{"cpu.weight", "900"}}

// What does not come is waited for once, not with each unit, and not for ever where every unit is another case.
func TestWaitsInVain(t *testing.T) {
	const units = 200
	const most = time.Minute // of an emulated machine; to wait for each takes more than two
	for name, c := range map[string]struct {
		where  []string
		limits limits
	}{
		"one cause":      {slicesOf(units, false), limits{request: never, effect: time.Second, vain: never, window: never}},
		"as many causes": {slicesOf(units/3, true), limits{request: never, effect: 2 * time.Second, vain: 2 * time.Second, window: never}},
	} {
		t.Run(name, func(t *testing.T) {
			tree := fileTree(t, c.where...)
			f := newFake(t, willing(nil, nil))
			b := asking(t, tree, f, c.limits)
			if name != "one cause" { // those below do not have what those around them do not have
				c.where = slices.DeleteFunc(c.where, func(p string) bool { return !strings.HasSuffix(p, "-t.slice") })
			}
			began := time.Now()
			for i, p := range c.where {
				err := b.Set(p, weight)
				if took := time.Since(began); took > most {
					t.Fatalf("%d units took %v", i, took)
				}
				var u *unmet
				if !errors.As(err, &u) || !strings.Contains(err.Error(), "CPUWeight of "+path.Base(p)) || !strings.Contains(err.Error(), "the file is not there") {
					t.Fatalf("%s: %v", p, err)
				}
			}
			if n := f.count("SetUnitProperties"); n != len(c.where) {
				t.Errorf("%d of %d units were asked for", n, len(c.where))
			}
		})
	}
}

// Waits that end well are not counted, however many they are.
func TestWaitsThatEndWell(t *testing.T) {
	where := slicesOf(40, false)
	tree := fileTree(t, where...)
	var late sync.WaitGroup
	defer late.Wait()
	effect := func(unit string) {
		late.Go(func() { lay(t, tree, slicePathOf(unit), "cpu.weight", "900") })
	}
	b := asking(t, tree, newFake(t, willing(nil, effect)), limits{request: never, effect: 30 * time.Second, vain: 30 * time.Second, window: never})
	for _, p := range where {
		must(t, b.Set(p, weight))
	}
	if b.patience.spent != 0 || len(b.patience.ranOut) != 0 {
		t.Errorf("%+v", b.patience)
	}
}

// Why it does not come is told, with the cure; what systemd says never comes is not waited for.
func TestCauses(t *testing.T) {
	where := slicesOf(2, false)
	for name, c := range map[string]struct {
		disabled map[string][]string
		lay      func(t *testing.T, tree *Tree)
		wait     time.Duration
		reason   string
		words    []string
	}{
		"disabled around": {map[string][]string{"bulkhead.slice": {"io", "cpu"}}, nil, 5 * time.Second, ReasonControllerNotEnabled,
			[]string{"bulkhead.slice has DisableControllers=cpu", "daemon-reload"}},
		"disabled at the root": {map[string][]string{"-.slice": {"cpu"}}, nil, 5 * time.Second, ReasonControllerNotEnabled, []string{"-.slice has DisableControllers=cpu"}},
		"another is disabled": {map[string][]string{"bulkhead.slice": {"io"}}, func(t *testing.T, tree *Tree) {
			lay(t, tree, policy.ParentSlice, "cgroup.subtree_control", "memory")
		}, 100 * time.Millisecond, ReasonControllerNotEnabled, []string{"bulkhead.slice does not pass cpu on"}},
		"realtime threads": {nil, func(t *testing.T, tree *Tree) {
			lay(t, tree, policy.ParentSlice, "cgroup.subtree_control", "memory")
			pid := realtimeProcess(t)
			lay(t, tree, where[1], "cgroup.threads", strconv.Itoa(pid))
		}, 100 * time.Millisecond, ReasonRealtimeThreads, []string{"SCHED_FIFO 7", "CONFIG_RT_GROUP_SCHED", "chrt -o", "rt_group_sched=0"}},
		"not theirs": {nil, func(t *testing.T, tree *Tree) {
			lay(t, tree, policy.ParentSlice, "cgroup.subtree_control", "memory")
			pid := realtimeProcess(t)
			lay(t, tree, policy.ParentSlice, "cgroup.threads", strconv.Itoa(pid)) // which would not be grouped
		}, 100 * time.Millisecond, ReasonControllerNotEnabled, nil},
		"no controller": {nil, func(t *testing.T, tree *Tree) { lay(t, tree, "/", "cgroup.controllers", "memory") },
			100 * time.Millisecond, "", nil},
		"somebody else's word": {nil, func(t *testing.T, tree *Tree) { lay(t, tree, where[0], "cpu.weight", "5") }, 100 * time.Millisecond, ReasonWriteFailed,
			[]string{`the file reads "5"`, "systemctl cat"}},
	} {
		t.Run(name, func(t *testing.T) {
			tree := fileTree(t, where...)
			if c.lay != nil {
				c.lay(t, tree)
			}
			whole, missing := tree.Shortfall("cpu")
			if missing { // which is this machine's reason
				c.reason, c.words = whole.Reason, []string{whole.Message}
			}
			b := asking(t, tree, newFake(t, willing(c.disabled, nil)), limits{request: never, effect: c.wait, vain: never, window: never})
			began := time.Now()
			refused, conds := tree.set(where[0], weight)
			wantCondition(t, conds, TypeCPU, c.reason, append(c.words, "CPUWeight of bulkhead-f0.slice", "cpu.weight")...)
			if took := time.Since(began); took > 4*time.Second || len(refused) != 1 {
				t.Errorf("after %v, refused %v", took, refused)
			}
			if c.reason == ReasonWriteFailed {
				// That one unit is another case than the rest.
				if _, _, known := b.patience.known(where[1], "cpu.weight", time.Now()); known {
					t.Error("another unit is not waited for because of it")
				}
				return
			}
			// As a slice of ours it is told once, for all.
			var all []Condition
			for _, p := range where {
				cond, ok := b.account(p, "cpu")
				if ok != missing { // which is told for the whole tree
					t.Errorf("%s has it: %v", p, ok)
				}
				if !ok {
					all = append(all, cond)
				}
			}
			if !missing {
				wantCondition(t, Distinct(all), TypeCPU, c.reason, append(c.words, tree.path(policy.ParentSlice))...)
			}
		})
	}
}

// A systemd that takes requests and does not answer them holds up one of them. When it answers again that is found out.
func TestSilentSystemd(t *testing.T) {
	where := slicesOf(200, false)
	for name, silent := range map[string]func(c net.Conn, member, unit string, body []any) []any{
		"at once":   nil,
		"after all": func(net.Conn, string, string, []any) []any { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			tree := fileTree(t, where...)
			f := newFake(t, silent)
			b := asking(t, tree, f, limits{request: 500 * time.Millisecond, effect: 10 * time.Second, vain: never, window: never})
			began := time.Now()
			for i, p := range where {
				err := b.Set(p, weight)
				want := "it is not asked again yet"
				if i == 0 {
					want = "no answer within 500ms"
				}
				if took := time.Since(began); err == nil || !strings.Contains(err.Error(), want) && took < time.Second || took > 20*time.Second {
					t.Fatalf("%d, after %v: %v, want %q", i, took, err, want)
				}
			}
			f.set(willing(nil, func(unit string) { lay(t, tree, slicePathOf(unit), "cpu.weight", "900") }))
			kerneltest.Poll(t, "it is asked again", func() error { return b.Set(where[0], weight) })
		})
	}
}

// A connection that is cut in the middle of a request is made again, as after a daemon-reexec.
func TestCutConnection(t *testing.T) {
	where := slicesOf(1, false)
	tree := fileTree(t, where...)
	var f *fakeSystemd
	does := willing(nil, func(unit string) { lay(t, tree, slicePathOf(unit), "cpu.weight", "900") })
	cuts := 0
	f = newFake(t, func(c net.Conn, member, unit string, body []any) []any {
		if member == "SetUnitProperties" && cuts < 3 {
			cuts++
			c.Close()
			return nil
		}
		return does(c, member, unit, body)
	})
	b := asking(t, tree, f, usualLimits())
	must(t, b.Set(where[0], weight))
	// And that nobody listens for a moment.
	must(t, os.Rename(f.socket, f.socket+".away"))
	b.drop()
	go func() {
		<-time.After(200 * time.Millisecond)
		_ = os.Rename(f.socket+".away", f.socket)
	}()
	lay(t, tree, where[0], "cpu.weight", "1")
	must(t, b.Set(where[0], weight))
}

// A job that does not end is waited for once.
func TestJobThatDoesNotEnd(t *testing.T) {
	tree := fileTree(t)
	f := newFake(t, willing(nil, nil))
	b := asking(t, tree, f, limits{request: 300 * time.Millisecond, effect: 300 * time.Millisecond, vain: never, window: never})
	for range 100 {
		if err := b.start(chat); !errors.Is(err, errRuns) || !strings.Contains(err.Error(), "bulkhead-chat.slice") {
			t.Fatal(err)
		}
	}
	if n := f.count("StartUnit"); n != 1 {
		t.Errorf("%d jobs were asked for", n)
	}
	if !b.patience.silent.IsZero() {
		t.Error("it counts as a systemd that does not answer")
	}
}

// Interrupted, nobody waits any more, whatever it is that does not come; and nothing more is begun. What is taken back is.
func TestInterrupt(t *testing.T) {
	where := slicesOf(1, false)
	patient := limits{request: never, effect: never, vain: never, window: never}
	for name, c := range map[string]struct {
		answer func(c net.Conn, member, unit string, body []any) []any
		do     func(b *systemd) error
		begun  string
	}{
		"no connection": {nil, func(b *systemd) error { return b.Set(where[0], weight) }, ""},
		"no answer":     {func(net.Conn, string, string, []any) []any { return nil }, func(b *systemd) error { return b.Set(where[0], weight) }, "SetUnitProperties"},
		"no effect":     {willing(nil, nil), func(b *systemd) error { return b.Set(where[0], weight) }, "SetUnitProperties"},
		"no end":        {willing(nil, nil), func(b *systemd) error { return b.start(chat) }, "StartUnit"},
	} {
		t.Run(name, func(t *testing.T) {
			tree := fileTree(t, where...)
			f := newFake(t, c.answer)
			b := asking(t, tree, f, patient)
			ended := make(chan error, 1)
			go func() { ended <- c.do(b) }()
			if c.begun != "" {
				kerneltest.Poll(t, "it is asked", func() error {
					if f.count(c.begun) == 0 {
						return errors.New("it is not")
					}
					return nil
				})
			}
			tree.Interrupt()
			select {
			case err := <-ended:
				if !errors.Is(err, errStopping) {
					t.Errorf("%v", err)
				}
			case <-time.After(30 * time.Second):
				t.Fatal("it still waits")
			}
			before := f.count("SetUnitProperties")
			if err := b.Set(where[0], weight); !errors.Is(err, errStopping) || f.count("SetUnitProperties") != before {
				t.Errorf("%v; %d more requests", err, f.count("SetUnitProperties")-before)
			}
			f.set(willing(nil, nil))
			if err := b.property(b.givingBack, where[0], set("CPUWeight", unset)); err != nil {
				t.Errorf("giving back: %v", err)
			}
		})
	}
}

// While it is not known whether a cgroup is a unit, nothing is written past systemd, and nothing is given back.
func TestUnknownUnit(t *testing.T) {
	const unit = "/system.slice/x.service"
	tree := fileTree(t, "/system.slice", unit, chat)
	lay(t, tree, unit, "cpu.weight", "100")
	lay(t, tree, policy.ParentSlice, "cpu.weight", "100")
	asking(t, tree, newFake(t, nil), limits{request: 50 * time.Millisecond, effect: 50 * time.Millisecond, vain: never, window: never})
	p := plan(policy.Enforce, nil, feature("chat", &policy.CPU{Weight: 900}, nil))
	values, refused, conds := tree.setForeign(unit, &p.Features[1])
	wantCondition(t, conds, TypeCPU, ReasonWriteFailed, "left alone", unit)
	if !slices.Equal(values, weight) || !slices.Equal(refused, []string{"cpu.weight"}) {
		t.Errorf("%v, refused %v", values, refused)
	}
	wantFiles(t, tree, unit, map[string]string{"cpu.weight": "100"})
}

// slow is a back end that takes its time and then refuses, for as long as it does.
type slow struct {
	Backend
	takes time.Duration
	sets  int
}

func (b *slow) Set(p string, values []Value) error {
	b.sets++
	if b.takes == 0 {
		return b.Backend.Set(p, values)
	}
	time.Sleep(b.takes) // of the test's own time
	return errors.New("not now")
}

// A value that could not be set is tried again a minute after the attempt has ended, and at once when its file reads as
// it should after all.
func TestRetry(t *testing.T) {
	tree := fileTree(t, chat)
	lay(t, tree, chat, "cpu.weight", "100")
	synctest.Test(t, func(t *testing.T) {
		b := &slow{Backend: tree.Backend, takes: 2 * retryEvery}
		tree.Backend = b
		k := NewKeeper(tree)
		_, err := k.SetValues(plan(policy.Enforce, nil, feature("chat", &policy.CPU{Weight: 900}, nil)), nil)
		must(t, err)
		wantCondition(t, k.Conditions(), TypeCPU, ReasonWriteFailed, "not now")
		k.Check(time.Now())
		tries, since := b.sets, time.Now()
		for b.sets == tries {
			k.Check(time.Now())
			time.Sleep(time.Second)
		}
		if waited := time.Since(since) - b.takes; waited < retryEvery {
			t.Errorf("tried again %v after the end of the attempt, want %v", waited, retryEvery)
		}
		// systemd does it later.
		tries = b.sets
		must(t, tree.write(chat, "cpu.weight", "900"))
		time.Sleep(CheckEvery)
		b.takes = 0
		wantPut(t, "it came", k.Check(time.Now()))
		noConditions(t, k.Conditions(), nil)
		if b.sets == tries {
			t.Error("nothing was done")
		}
	})
}

// What was being written when an agent was killed is swept away; what is somebody else's is not.
func TestSweep(t *testing.T) {
	dirs := []string{t.TempDir(), t.TempDir(), filepath.Join(t.TempDir(), "none")}
	write := func(name string) string {
		must(t, os.MkdirAll(filepath.Dir(name), 0o755))
		must(t, os.WriteFile(name, []byte("x"), 0o644))
		return name
	}
	keep := []string{
		write(dirs[0] + "/a.service.d/bulkhead.json"), write(dirs[0] + "/a.service.d/50-CPUWeight.conf"), write(dirs[0] + "/b.service.d/theirs.new"),
		write(dirs[0] + "/a.service.d/zz-bulkhead-CPUWeight.conf"), write(dirs[1] + "/bulkhead.json.new"),
	}
	// Killed in the middle of what replaceFile does, which is all but the last step.
	var left []string
	for _, file := range []string{dirs[0] + "/a.service.d/bulkhead.json", dirs[1] + "/c.scope.d/bulkhead.json", dirs[0] + "/a.service.d/50-CPUWeight.conf", dirs[0] + "/a.service.d/zz-bulkhead-CPUWeight.conf"} {
		must(t, os.MkdirAll(filepath.Dir(file), 0o755))
		tmp := unfinished(file)
		if !strings.HasPrefix(filepath.Base(tmp), "bulkhead") || filepath.Ext(tmp) == ".conf" {
			t.Errorf("%s", tmp)
		}
		left = append(left, write(tmp))
	}
	left = append(left, write(dirs[0]+"/a.service.d/bulkhead.json.new")) // of the release before
	sweep(dirs...)
	for _, file := range left {
		if _, err := os.Stat(file); err == nil {
			t.Errorf("%s is still there", file)
		}
	}
	if _, err := os.Stat(dirs[1] + "/c.scope.d"); err == nil {
		t.Error("an empty directory is left")
	}
	for _, file := range keep {
		if _, err := os.Stat(file); err != nil {
			t.Error(err)
		}
	}
}

// realtimeProcess starts one under SCHED_FIFO.
func realtimeProcess(t *testing.T) int {
	t.Helper()
	c := start(t, nil, "", "hold")
	must(t, unix.SchedSetAttr(c.Process.Pid, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 7}, 0))
	return c.Process.Pid
}
