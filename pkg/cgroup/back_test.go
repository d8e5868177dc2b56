package cgroup

import (
	"fmt"
	"os"
	"os/exec"
	"path"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/policy"
)

// family starts a shell in a cgroup that has a mark and a child, which matches nothing, and says who they are.
func family(t *testing.T, tree *Tree, in, mark string) (parent *exec.Cmd, child int) {
	t.Helper()
	parent = exec.Command("/bin/sh", "-c", "sleep 1000 & wait; :", mark)
	d, err := os.Open(tree.path(in))
	must(t, err)
	defer d.Close()
	parent.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(d.Fd()), Setpgid: true}
	must(t, parent.Start())
	t.Cleanup(func() { syscall.Kill(-parent.Process.Pid, syscall.SIGKILL); parent.Wait() })
	kerneltest.Poll(t, "it has a child", func() error {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", parent.Process.Pid))
		if err == nil {
			_, err = fmt.Sscan(string(text), &child)
		}
		return err
	})
	return parent, child
}

func wantPlaces(t *testing.T, tree *Tree, when string, want map[string]int) {
	t.Helper()
	for what, pid := range want {
		in := map[bool]string{true: chat, false: "/apps"}[strings.HasPrefix(what, "stays")]
		if at := where(t, tree, pid); at != in && path.Dir(at) != in {
			t.Errorf("%s: what %s, %d, is in %s", when, what, pid, at)
		}
	}
}

// Of a compartment that loses one of its match items those go back who were there by that one, with what comes of them.
// Who matches another, or comes of one that does, stays; and so does of whom it cannot be told.
func TestItemLeaves(t *testing.T) {
	tree := testTree(t)
	mkdir(t, tree, "/apps")
	m := mark(t)
	item := func(name string) policy.Match { return policy.Match{Cmdline: m + "-" + name + "$"} }
	before := plan(policy.Enforce, nil, feature("chat", nil, nil, item("stays"), item("goes")))
	after := plan(policy.Enforce, nil, feature("chat", nil, nil, item("stays")))
	stays, ofStays := family(t, tree, "/apps", m+"-stays")
	goes, ofGoes := family(t, tree, "/apps", m+"-goes")
	ends, orphan := family(t, tree, "/apps", m+"-goes")
	placer := placing(t, tree, before)
	must(t, placer.Pass())
	all := map[string]int{"stays": stays.Process.Pid, "stays, of it": ofStays, "stays, goes now": goes.Process.Pid, "stays, of goes": ofGoes, "stays, orphan": orphan}
	wantPlaces(t, tree, "both", all)
	must(t, ends.Process.Kill())
	_ = ends.Wait()

	follows := func(plan *policy.Plan) {
		t.Helper()
		next := NewPlacer(tree, plan)
		next.Follow(placer)
		must(t, next.Pass())
		next.Verify()
		if c := next.Counts(); c.Lost != 0 {
			t.Errorf("what went back counts as lost: %+v", c)
		}
		placer = next
	}
	again := *before
	noConditions(t, tree.SendBack(&again, before), nil)
	follows(&again)
	wantPlaces(t, tree, "the same policy", all)
	// By which plan they were moved may not be known.
	noConditions(t, tree.SendBack(after), nil)
	wantPlaces(t, tree, "by nobody's plan", all)

	noConditions(t, tree.SendBack(after, &again), nil)
	want := map[string]int{"stays": stays.Process.Pid, "stays, of it": ofStays, "goes": goes.Process.Pid, "goes with it": ofGoes, "stays, orphan": orphan}
	wantPlaces(t, tree, "one item less", want)
	follows(after)
	wantPlaces(t, tree, "and all were looked at", want)
	// With the last item all go.
	none := plan(policy.Enforce, nil, feature("chat", nil, nil))
	noConditions(t, tree.SendBack(none, after), nil)
	wantPlaces(t, tree, "none", map[string]int{"goes too": stays.Process.Pid, "goes too, of it": ofStays, "goes too, orphan": orphan})
}

// While something could not go back there may have been several plans, each of which moved some.
func TestItemOfALaterPlanLeaves(t *testing.T) {
	tree := testTree(t)
	mkdir(t, tree, "/apps")
	m := mark(t)
	chat := func(names ...string) *policy.Plan {
		f := feature("chat", nil, nil)
		for _, name := range names {
			f.Match = append(f.Match, policy.Match{Cmdline: m + "-" + name + "$"})
		}
		return plan(policy.Enforce, nil, f)
	}
	a, b, c := chat("first"), chat("first", "second"), chat("third")
	first, ofFirst := family(t, tree, "/apps", m+"-first")
	second, ofSecond := family(t, tree, "/apps", m+"-second")
	must(t, placing(t, tree, a).Pass())
	must(t, placing(t, tree, b).Pass())
	wantPlaces(t, tree, "both", map[string]int{"stays": first.Process.Pid, "stays, of it": ofFirst, "stays, second": second.Process.Pid, "stays, of the second": ofSecond})
	noConditions(t, tree.SendBack(c, a, b), nil)
	wantPlaces(t, tree, "neither", map[string]int{"goes": first.Process.Pid, "goes, of it": ofFirst, "goes, second": second.Process.Pid, "goes, of the second": ofSecond})
}

// One that matches the item of another compartment now takes along what comes of it, and an item that says where matches by
// where a process came from.
func TestItemMoves(t *testing.T) {
	tree := testTree(t)
	mkdir(t, tree, "/apps")
	m := mark(t)
	before := plan(policy.Enforce, nil, feature("chat", nil, nil, policy.Match{Cmdline: m + "$", Cgroup: "/apps"}), feature("batch", nil, nil))
	parent, child := family(t, tree, "/apps", m)
	placer := placing(t, tree, before)
	must(t, placer.Pass())
	both := map[string]int{"stays": parent.Process.Pid, "stays, of it": child}
	wantPlaces(t, tree, "at first", both)
	again := *before
	noConditions(t, tree.SendBack(&again, before), nil)
	wantPlaces(t, tree, "the same policy", both)

	other := plan(policy.Enforce, nil, feature("chat", nil, nil, policy.Match{Cmdline: "no such"}), feature("batch", nil, nil, policy.Match{Cmdline: m + "$"}))
	noConditions(t, tree.SendBack(other, before), nil)
	next := NewPlacer(tree, other)
	next.Follow(placer)
	must(t, next.Pass())
	for _, pid := range []int{parent.Process.Pid, child} {
		if at := where(t, tree, pid); path.Dir(at) != batch {
			t.Errorf("process %d is in %s", pid, at)
		}
	}
}

// Processes that an agent moved within a unit below its root are not those of an agent around it, which has features of the
// same names: they are neither adopted nor sent back by it.
func TestRootsInRoots(t *testing.T) {
	outer := testTree(t)
	mkdir(t, outer, "/inner")
	inner, err := Find(outer.path("/inner"))
	must(t, err)
	unit := mkdir(t, inner, "/system.slice/chat.service")
	must(t, unix.Setxattr(inner.path(unit.Path), "user.delegate", []byte("1"), 0))
	pl := plan(policy.Enforce, nil, feature("chat", nil, nil, marked(t)))
	p := sleeper(t, inner, unit.Path)
	must(t, placing(t, inner, pl).Pass())
	at := where(t, inner, p.Process.Pid)
	if at == unit.Path {
		t.Fatal("it was not moved")
	}
	all, err := inner.Walk()
	must(t, err)
	if a := Adopt(pl, all, nil); len(a) != 1 || a[0].Path != at {
		t.Errorf("adopted by its own: %+v", a)
	}
	all, err = outer.Walk()
	must(t, err)
	if a := Adopt(pl, all, nil); len(a) != 0 {
		t.Errorf("adopted by the outer: %+v", a)
	}
	_, conds, err := outer.Remove()
	noConditions(t, conds, err)
	if now := where(t, inner, p.Process.Pid); now != at {
		t.Errorf("the outer has moved it to %s", now)
	}
	_, conds, err = inner.Remove()
	noConditions(t, conds, err)
	wantIn(t, inner, p, unit.Path)
}
