package cgroup

import (
	"fmt"
	"os"
	"os/exec"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/policy"
)

// mark is an argument that only the processes of one test have.
func mark(t *testing.T) string { return fmt.Sprintf("mark-%d-%s", os.Getpid(), path.Base(t.Name())) }

// marked is a match item for them.
func marked(t *testing.T, more ...func(*policy.Match)) policy.Match {
	m := policy.Match{Cmdline: mark(t) + "( |$)"}
	for _, f := range more {
		f(&m)
	}
	return m
}

// placing makes the slices of a plan in a tree and its placer.
func placing(t *testing.T, tree *Tree, plan *policy.Plan) *Placer {
	t.Helper()
	_, err := tree.EnsureSlices(plan)
	must(t, err)
	return NewPlacer(tree, plan)
}

// sleeper starts a process in a cgroup that has the test's mark and waits.
func sleeper(t *testing.T, tree *Tree, in string, args ...string) *child {
	t.Helper()
	return start(t, tree, in, "hold", append([]string{mark(t)}, args...)...)
}

// where is the cgroup of a process below the tree's root.
func where(t *testing.T, tree *Tree, pid int) string {
	t.Helper()
	c, err := tree.Of(pid)
	must(t, err)
	return c.Path
}

func wantIn(t *testing.T, tree *Tree, c *child, slice string) {
	t.Helper()
	if at := where(t, tree, c.Process.Pid); at != slice && path.Dir(at) != slice {
		t.Errorf("process %d is in %s, want %s", c.Process.Pid, at, slice)
	}
}

// Each key, and all keys of one item together; the first item that matches wins.
func TestMatchProcess(t *testing.T) {
	tree := testTree(t)
	exe, err := os.Readlink("/proc/self/exe")
	must(t, err)
	mkdir(t, tree, "/apps/other")
	mkdir(t, tree, "/elsewhere")
	both := marked(t, func(m *policy.Match) { m.Exe, m.User, m.Cgroup = "**/"+path.Base(exe), "root", "/apps/**" })
	for name, c := range map[string]struct {
		items []policy.Match
		in    string
		args  []string
		want  string
	}{
		"cmdline":            {[]policy.Match{marked(t)}, "/apps", nil, "chat"},
		"another cmdline":    {[]policy.Match{{Cmdline: mark(t) + "x"}}, "/apps", nil, ""},
		"arguments":          {[]policy.Match{{Cmdline: "^/proc/self/exe " + mark(t) + " a b$"}}, "/apps", []string{"a", "b"}, "chat"},
		"exe":                {[]policy.Match{marked(t, func(m *policy.Match) { m.Exe = exe })}, "/apps", nil, "chat"},
		"another exe":        {[]policy.Match{marked(t, func(m *policy.Match) { m.Exe = "/usr/bin/*" })}, "/apps", nil, ""},
		"user":               {[]policy.Match{marked(t, func(m *policy.Match) { m.User = "0" })}, "/apps", nil, "chat"},
		"another user":       {[]policy.Match{marked(t, func(m *policy.Match) { m.User = "nobody" })}, "/apps", nil, ""},
		"all keys":           {[]policy.Match{both}, "/apps/other", nil, "chat"},
		"all keys but where": {[]policy.Match{both}, "/elsewhere", nil, ""},
		"first":              {[]policy.Match{{Cmdline: "no such"}, marked(t), marked(t, func(m *policy.Match) { m.Tenant = "free" })}, "/apps", nil, "chat"},
		"tenant":             {[]policy.Match{marked(t, func(m *policy.Match) { m.Tenant = "free" })}, "/apps", nil, "chat-free"},
		"adopted before":     {[]policy.Match{{Cgroup: "/apps"}, marked(t)}, "/apps/other", nil, ""},
		"adopted after":      {[]policy.Match{marked(t), {Cgroup: "/apps"}}, "/apps/other", nil, "chat"},
	} {
		t.Run(name, func(t *testing.T) {
			for i := range c.items { // of this test, not of its parent
				c.items[i].Cmdline = strings.ReplaceAll(c.items[i].Cmdline, "TestMatchProcess", path.Base(t.Name()))
			}
			pl := placing(t, tree, plan(policy.Enforce, []string{"free"}, feature("chat", nil, nil, c.items...)))
			p := sleeper(t, tree, c.in, c.args...)
			must(t, pl.Pass())
			want := map[string]string{"": c.in, "chat": chat, "chat-free": chat + "/bulkhead-chat-free.slice"}[c.want]
			wantIn(t, tree, p, want)
			if n := pl.Counts().Moved; (n == 1) != (c.want != "") {
				t.Errorf("%d moved", n)
			}
			// There is nothing to do twice.
			must(t, pl.Pass())
			if n := len(pl.Moves()); n > 1 {
				t.Errorf("%d moves", n)
			}
			p.end()
		})
	}
}

// A process that matches takes its children along, wherever they are by then, and
// nobody else.
func TestDescendants(t *testing.T) {
	tree := testTree(t)
	mkdir(t, tree, "/apps")
	mkdir(t, tree, "/elsewhere")
	m := mark(t)
	// A shell with a child and a grandchild, and one that has moved away.
	cmd := exec.Command("/bin/sh", "-c", "sleep 1000 & (sleep 1000; :) & echo $$ >"+tree.path("/elsewhere")+"/cgroup.procs; wait", m)
	stranger := start(t, tree, "/apps", "hold")
	d, err := os.Open(tree.path("/apps"))
	must(t, err)
	defer d.Close()
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(d.Fd()), Setpgid: true}
	must(t, cmd.Start())
	defer func() { syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL); cmd.Wait() }()
	kerneltest.Poll(t, "all have begun", func() error {
		apps, _ := tree.pids("/apps")
		if here, _ := tree.pids("/elsewhere"); len(apps) != 4 || len(here) != 1 {
			return fmt.Errorf("%v and %v", apps, here)
		}
		return nil
	})
	pl := placing(t, tree, plan(policy.Enforce, nil, feature("chat", nil, nil, policy.Match{Cmdline: m + "$"})))
	must(t, pl.Pass())
	if n, err := tree.Processes(chat); n != 4 || err != nil {
		t.Errorf("%d processes in the compartment (%v), want the shell, its two children and a grandchild", n, err)
	}
	wantIn(t, tree, stranger, "/apps")
	if c := pl.Counts(); c.Moved != 4 {
		t.Errorf("%+v", c)
	}
	// They go back to where each came from.
	if conds := tree.SendBack(plan(policy.Observe, nil)); conds != nil {
		t.Errorf("%+v", conds)
	}
	apps, _ := tree.pids("/apps")
	if here, _ := tree.pids("/elsewhere"); len(apps) != 4 || !slices.Equal(here, []int{cmd.Process.Pid}) {
		t.Errorf("back in %v and %v", apps, here)
	}
}

// Out of a unit, a scope, a container, what is delegated, what is protected and what
// exec has placed nobody is moved; the message names the cure.
func TestNotLoose(t *testing.T) {
	tree := testTree(t)
	for name, c := range map[string]struct {
		in    string
		set   func(t *testing.T, dir string)
		kind  string
		words []string
	}{
		"service":   {"/system.slice/chat.service", nil, "managed", []string{"unit: chat.service", "Delegate=yes"}},
		"below it":  {"/system.slice/chat.service/sub/deeper", nil, "managed", []string{"unit: chat.service"}},
		"scope":     {"/user.slice/session-1.scope", nil, "managed", []string{"unit: session-1.scope"}},
		"user unit": {"/user.slice/user@1.service/app.slice/x.service", nil, "managed", []string{"unit: x.service"}},
		"in a delegated": {"/user.slice/user@1.service/app.slice/x.service", func(t *testing.T, dir string) {
			must(t, unix.Setxattr(path.Dir(path.Dir(dir)), "user.delegate", []byte("1"), 0))
		}, "managed", []string{"unit: x.service"}},
		"delegated": {"/lent", func(t *testing.T, dir string) { must(t, os.Chown(dir, 65534, 65534)) }, "managed", []string{"uid 65534"}},
		"protected": {"/kept/below", nil, "protected", nil},
		"in a manager's": {"/system.slice/runtime.service/job/step", func(t *testing.T, dir string) {
			must(t, unix.Setxattr(path.Dir(path.Dir(dir)), "user.delegate", []byte("1"), 0))
		}, "managed", []string{"unit: runtime.service"}},
		"exec": {batch + "/exec-1.scope", nil, "explicit", nil},
	} {
		t.Run(name, func(t *testing.T) {
			pl := plan(policy.Enforce, nil, feature("chat", nil, nil, marked(t)), feature("batch", nil, nil))
			pl.Protect = []string{"/kept"}
			mkdir(t, tree, c.in)
			if c.set != nil {
				c.set(t, tree.path(c.in))
			}
			p := sleeper(t, tree, c.in)
			placer := placing(t, tree, pl)
			must(t, placer.Pass())
			wantIn(t, tree, p, c.in)
			if n := placer.Counts(); n.Moved != 0 || n.Skipped[c.kind] != 1 {
				t.Errorf("%+v, want one %s", n, c.kind)
			}
			if c.words == nil {
				noConditions(t, placer.Conditions(), nil)
			} else {
				wantCondition(t, placer.Conditions(), TypePlacement, ReasonNotLoose, append(c.words, fmt.Sprint(p.Process.Pid), "chat", c.in)...)
			}
			// With the process the complaint ends.
			p.end()
			placer.Verify()
			noConditions(t, placer.Conditions(), nil)
		})
	}
	for kind, flag := range map[string]uintptr{"pid": unix.CLONE_NEWPID, "mnt": unix.CLONE_NEWNS, "cgroup": unix.CLONE_NEWCGROUP} {
		t.Run(kind+" namespace", func(t *testing.T) {
			placer := placing(t, tree, plan(policy.Enforce, nil, feature("chat", nil, nil, marked(t))))
			mkdir(t, tree, "/container")
			apart(t, tree, "/container", flag, mark(t))
			must(t, placer.Pass())
			if n := placer.Counts(); n.Moved != 0 || n.Skipped["container"] != 1 {
				t.Errorf("%+v", n)
			}
			wantCondition(t, placer.Conditions(), TypePlacement, ReasonNotLoose, kind+" namespace of its own", "/container")
		})
	}
}

// apart starts a process with a namespace of its own.
func apart(t *testing.T, tree *Tree, in string, flag uintptr, mark string) {
	t.Helper()
	d, err := os.Open(tree.path(in))
	must(t, err)
	defer d.Close()
	cmd := exec.Command("/bin/sh", "-c", "read -r x; exit 0", mark)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flag, UseCgroupFD: true, CgroupFD: int(d.Fd())}
	stdin, err := cmd.StdinPipe()
	must(t, err)
	must(t, cmd.Start())
	t.Cleanup(func() {
		stdin.Close()
		_ = cmd.Wait()
	})
}

// A process in a container that an earlier item matches is where that item has it, and nobody is told that it stays;
// also where the container is known only later.
func TestInMatchedContainer(t *testing.T) {
	tree := testTree(t)
	id := strings.Repeat("ab", 32)
	at := "/docker-" + id + ".scope"
	mkdir(t, tree, at+"/below")
	apart(t, tree, at+"/below", unix.CLONE_NEWPID, mark(t))
	other := policy.Match{Container: map[string]string{"name": "other"}}
	for name, want := range map[string]bool{"web": true, "other": false} {
		pl := plan(policy.Enforce, nil, feature("batch", nil, nil, other), feature("web", nil, nil, policy.Match{Container: map[string]string{"name": "web"}}),
			feature("chat", nil, nil, marked(t), other))
		all, err := tree.Walk()
		must(t, err)
		found, conds := NewContainerFinder(tree).Find(pl, []Container{{Runtime: "docker", ID: id, Name: name}}, all)
		noConditions(t, conds, nil)
		if !want { // the item that matches comes after the process's
			pl = plan(policy.Enforce, nil, feature("chat", nil, nil, marked(t), other))
			found, _ = NewContainerFinder(tree).Find(pl, []Container{{Runtime: "docker", ID: id, Name: name}}, all)
		}
		placer := placing(t, tree, pl)
		must(t, placer.Pass())
		wantCondition(t, placer.Conditions(), TypePlacement, ReasonNotLoose, "pid namespace of its own", at)
		placer.Containers(found)
		placer.Verify()
		if got := len(placer.Conditions()) == 0; got != want {
			t.Errorf("container %s: %+v", name, placer.Conditions())
		}
		if want {
			before := placer.Counts().Skipped["container"]
			must(t, placer.Pass())
			if n := placer.Counts().Skipped["container"]; n != before {
				t.Errorf("%d skipped, were %d", n, before)
			}
		}
	}

	// So is one that gets a name by which it does, and not one where what is beside container does not hold.
	for unit, want := range map[string]bool{"docker-*.scope": true, "*.service": false} {
		pl := plan(policy.Enforce, nil, feature("web", nil, nil, policy.Match{Unit: unit, Container: map[string]string{"name": "web"}}),
			feature("chat", nil, nil, marked(t), other))
		all, err := tree.Walk()
		must(t, err)
		placer := placing(t, tree, pl)
		for _, name := range []string{"other", "web"} {
			found, _ := NewContainerFinder(tree).Find(pl, []Container{{Runtime: "docker", ID: id, Name: name}}, all)
			placer.Containers(found)
			if name == "other" {
				must(t, placer.Pass())
				wantCondition(t, placer.Conditions(), TypePlacement, ReasonNotLoose, at)
			}
			placer.Verify()
		}
		if got := len(placer.Conditions()) == 0; got != want {
			t.Errorf("renamed, with unit %s: %+v", unit, placer.Conditions())
		}
	}
}

// In a unit with Delegate=yes a process gets a cgroup in the unit, which is adopted; it
// goes back to where it was in there, and the cgroup goes.
func TestDelegatedUnit(t *testing.T) {
	tree := testTree(t)
	unit := mkdir(t, tree, "/system.slice/chat.service")
	must(t, unix.Setxattr(tree.path(unit.Path), "user.delegate", []byte("1"), 0))
	pl := plan(policy.Enforce, []string{"free"}, feature("chat", nil, nil, marked(t, func(m *policy.Match) { m.Tenant = "free" })))
	placer := placing(t, tree, pl)
	p, stranger := sleeper(t, tree, unit.Path), start(t, tree, unit.Path, "hold")
	must(t, placer.Pass())
	noConditions(t, placer.Conditions(), nil)
	sub := fmt.Sprintf("%s/bulkhead-match-%d.%d-chat-free", unit.Path, tree.ID, unit.ID)
	wantIn(t, tree, p, sub)
	wantIn(t, tree, stranger, unit.Path)
	all, err := tree.Walk()
	must(t, err)
	if a := Adopt(pl, all, nil); len(a) != 1 || a[0].Path != sub || pl.Compartments[a[0].Compartment].Tenant != "free" {
		t.Errorf("adopted: %+v", a)
	}
	// It is where it should be, for another agent too, and is seen when it is not.
	again := placing(t, tree, pl)
	must(t, again.Pass())
	if c := again.Counts(); c.Moved != 0 || c.Skipped["managed"] != 0 {
		t.Errorf("%+v", c)
	}
	must(t, tree.write(unit.Path, "cgroup.procs", strconv.Itoa(p.Process.Pid)))
	again.Verify()
	wantIn(t, tree, p, sub)
	if c := again.Counts(); c.Lost != 1 {
		t.Errorf("%+v", c)
	}
	// One of that name which the unit's user has made is nobody's place.
	forged := mkdir(t, tree, "/system.slice/x.service/"+path.Base(sub))
	must(t, os.Chown(tree.path(forged.Path), 65534, 65534))
	all, err = tree.Walk()
	must(t, err)
	if a := Adopt(pl, all, nil); len(a) != 1 || a[0].Path != sub {
		t.Errorf("adopted: %+v", a)
	}

	_, conds, err := tree.Remove()
	noConditions(t, conds, err)
	wantIn(t, tree, p, unit.Path)
	if tree.has(sub, "cgroup.procs") || !tree.has(forged.Path, "cgroup.procs") {
		t.Error("ours is still there, or somebody else's is not")
	}
}

// Threads of the kernel, what has ended and is not waited for, and what has ended but
// for some of its threads.
func TestOddProcesses(t *testing.T) {
	tree := testTree(t)
	mkdir(t, tree, "/apps")
	everybody := plan(policy.Enforce, nil, feature("chat", nil, nil, policy.Match{User: "root", Cgroup: "/apps"}))
	pl := placing(t, tree, everybody)
	if _, err := processOf(2); err == nil {
		t.Error("kthreadd is taken for a process")
	}
	pl.Look(2)
	zombie := exec.Command("/bin/true")
	must(t, zombie.Start())
	kerneltest.Poll(t, "it has ended", func() error {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", zombie.Process.Pid))
		if err == nil && !strings.Contains(string(b), ") Z ") {
			err = fmt.Errorf("%s", b)
		}
		return err
	})
	pl.Look(zombie.Process.Pid)
	must(t, zombie.Wait())
	pl.Look(zombie.Process.Pid)
	if c := pl.Counts(); c.Moved != 0 || len(c.Skipped) != 0 {
		t.Errorf("%+v", c)
	}
	// Its first thread ends, others go on: it is moved like any other.
	half := start(t, tree, "/apps", "headless", mark(t))
	pl = placing(t, tree, plan(policy.Enforce, nil, feature("chat", nil, nil, policy.Match{Cmdline: mark(t) + "$", Exe: "**/*.test"})))
	must(t, pl.Pass())
	pl.Verify()
	pr, err := processOf(half.Process.Pid)
	must(t, err)
	if c, err := pr.in(tree); err != nil || path.Dir(c.Path) != chat || !pr.dead {
		t.Errorf("it is in %s (%v); its first thread has ended: %v", c.Path, err, pr.dead)
	}
	if c := pl.Counts(); c.Moved != 1 || c.Lost != 0 {
		t.Errorf("%+v", c)
	}
}

// What a process was that has ended before it was looked at, its children are: they are
// looked at themselves, and belong to the compartment that it had. One that only has its
// number is nobody's child.
func TestEndedParents(t *testing.T) {
	tree := testTree(t)
	mkdir(t, tree, "/apps")
	placer := placing(t, tree, plan(policy.Enforce, nil, feature("chat", nil, nil, marked(t))))
	ended := exec.Command("/bin/true")
	must(t, ended.Run())
	gone := ended.Process.Pid

	matches := sleeper(t, tree, "/apps")
	placer.Forked(gone, matches.Process.Pid)
	wantIn(t, tree, matches, "/apps") // of no process that is known
	placer.Begin()
	placer.Look(gone)
	placer.Forked(gone, matches.Process.Pid)
	wantIn(t, tree, matches, chat)

	child := start(t, tree, "/apps", "hold")
	placer.followed[gone] = follow{start: 1, compartment: 1, at: chat}
	placer.Forked(gone, child.Process.Pid)
	wantIn(t, tree, child, chat)
	grandchild := start(t, tree, "/apps", "hold")
	placer.Forked(child.Process.Pid, grandchild.Process.Pid)
	wantIn(t, tree, grandchild, chat)

	// The parent of these is the test, which began another time.
	placer.followed[os.Getpid()] = follow{start: 1, compartment: 1, at: chat}
	stranger := start(t, tree, "/apps", "hold")
	placer.Look(stranger.Process.Pid)
	wantIn(t, tree, stranger, "/apps")
	// And one has the number of what was followed.
	placer.followed[stranger.Process.Pid] = follow{start: 1, compartment: 1, at: ""}
	placer.Forked(1, stranger.Process.Pid)
	if _, ok := placer.followed[stranger.Process.Pid]; ok {
		t.Error("a process is taken for the one that had its number before")
	}
	placer.followed[stranger.Process.Pid] = follow{start: 1, compartment: 1, at: ""}
	placer.Verify()
	if _, ok := placer.followed[stranger.Process.Pid]; ok {
		t.Error("what has ended is followed for ever")
	}
}

// A tenant's slice is in its feature's and is another compartment.
func TestTenantIsNotFeature(t *testing.T) {
	tree := testTree(t)
	mkdir(t, tree, "/apps")
	free := plan(policy.Enforce, []string{"free"}, feature("chat", nil, nil, marked(t, func(m *policy.Match) { m.Tenant = "free" })))
	p := sleeper(t, tree, "/apps")
	must(t, placing(t, tree, free).Pass())
	wantIn(t, tree, p, chat+"/bulkhead-chat-free.slice")
	placer := placing(t, tree, plan(policy.Enforce, []string{"free"}, feature("chat", nil, nil, marked(t))))
	must(t, placer.Pass())
	wantIn(t, tree, p, chat)
	// Moved on by somebody else it is found.
	must(t, os.MkdirAll(tree.path(chat+"/bulkhead-chat-free.slice/exec-9.scope"), 0o755))
	must(t, tree.write(chat+"/bulkhead-chat-free.slice/exec-9.scope", "cgroup.procs", strconv.Itoa(p.Process.Pid)))
	placer.Verify()
	if c := placer.Counts(); c.Lost != 1 {
		t.Errorf("%+v", c)
	}
}

// What is protected and comes after the policy is protected.
func TestProtectedLater(t *testing.T) {
	tree := testTree(t)
	pl := plan(policy.Enforce, nil, feature("chat", nil, nil, marked(t)))
	pl.Protect = []string{"keep*.service"}
	placer := placing(t, tree, pl)
	unit := mkdir(t, tree, "/system.slice/keeper.service")
	must(t, unix.Setxattr(tree.path(unit.Path), "user.delegate", []byte("1"), 0))
	p := sleeper(t, tree, unit.Path)
	placer.Look(p.Process.Pid)
	wantIn(t, tree, p, unit.Path)
	if c := placer.Counts(); c.Skipped["protected"] != 1 {
		t.Errorf("%+v", c)
	}
}

// A process that somebody moves elsewhere is noticed, counted and put back.
func TestMembershipLost(t *testing.T) {
	tree := testTree(t)
	mkdir(t, tree, "/apps")
	pl := placing(t, tree, plan(policy.Enforce, nil, feature("chat", nil, nil, marked(t))))
	p := sleeper(t, tree, "/apps")
	must(t, pl.Pass())
	pl.Verify()
	if c := pl.Counts(); c.Moved != 1 || c.Lost != 0 {
		t.Fatalf("%+v", c)
	}
	must(t, tree.write("/apps", "cgroup.procs", strconv.Itoa(p.Process.Pid)))
	pl.Verify()
	wantIn(t, tree, p, chat)
	if c := pl.Counts(); c.Moved != 2 || c.Lost != 1 {
		t.Errorf("%+v", c)
	}
}

// A thousand processes that one forks while it is moved are inside, by the events of
// their births alone.
func TestForkWhileMoved(t *testing.T) {
	tree := testTree(t)
	mkdir(t, tree, "/apps")
	pl := placing(t, tree, plan(policy.Enforce, nil, feature("chat", nil, nil, marked(t))))
	p := start(t, tree, "/apps", "forks", mark(t), "200")
	defer p.end()
	kerneltest.Poll(t, "all are inside", func() error {
		must(t, pl.Poll(time.Now()))
		n, err := tree.Processes(chat)
		if err == nil && n != 201 {
			err = fmt.Errorf("%d", n)
		}
		return err
	})
	if left, err := tree.pids("/apps"); len(left) != 0 || err != nil {
		t.Errorf("left outside: %v %v", left, err)
	}
}

// Observe moves nobody, and what an earlier plan has moved goes back.
func TestObservePlacesNobody(t *testing.T) {
	tree := testTree(t)
	mkdir(t, tree, "/apps")
	enforced := plan(policy.Enforce, nil, feature("chat", nil, nil, marked(t)))
	pl := placing(t, tree, enforced)
	p := sleeper(t, tree, "/apps")
	must(t, pl.Pass())
	wantIn(t, tree, p, chat)
	next := placing(t, tree, plan(policy.Observe, nil, enforced.Features[1]))
	next.Follow(pl)
	if next.Needed() {
		t.Error("observe is to place processes")
	}
	if next.Counts().Moved != 1 {
		t.Errorf("%+v: a counter goes down", next.Counts())
	}
	_, conds, err := tree.Remove()
	noConditions(t, conds, err)
	wantIn(t, tree, p, "/apps")
}

// refusing is a back end that refuses its first moves.
type refusing struct {
	Backend
	times int
}

func (b *refusing) Move(leaf string, pid int) error {
	if b.times--; b.times >= 0 {
		return unix.EAGAIN
	}
	return b.Backend.Move(leaf, pid)
}

// A move that is refused is told, and tried again.
func TestRefusedMove(t *testing.T) {
	tree := testTree(t)
	mkdir(t, tree, "/apps")
	placer := placing(t, tree, plan(policy.Enforce, nil, feature("chat", nil, nil, marked(t))))
	tree.Backend = &refusing{tree.Backend, 2}
	p := sleeper(t, tree, "/apps")
	must(t, placer.Pass())
	wantCondition(t, placer.Conditions(), TypePlacement, ReasonNotLoose, fmt.Sprint(p.Process.Pid), unix.EAGAIN.Error())
	placer.Verify()
	wantCondition(t, placer.Conditions(), TypePlacement, ReasonNotLoose, fmt.Sprint(p.Process.Pid))
	placer.Verify()
	wantIn(t, tree, p, chat)
	noConditions(t, placer.Conditions(), nil)
	if c := placer.Counts(); c.Moved != 1 || c.Skipped["refused"] != 2 {
		t.Errorf("%+v", c)
	}
}

// From a private cgroup namespace nobody is moved, whoever tells of them.
func TestNamespacedPlacesNobody(t *testing.T) {
	tree := testTree(t)
	mkdir(t, tree, "/apps")
	placer := placing(t, tree, plan(policy.Enforce, nil, feature("chat", nil, nil, marked(t))))
	tree.Namespaced = true
	defer func() { tree.Namespaced = false }()
	p := sleeper(t, tree, "/apps")
	placer.Look(p.Process.Pid)
	must(t, placer.Pass())
	wantCondition(t, placer.Conditions(), TypePlacement, ReasonNamespaced, "private cgroup namespace")
	tree.Namespaced = false
	wantIn(t, tree, p, "/apps")
}

// A threaded cgroup in a compartment, which tells no processes, hides no others that are lost.
func TestVerifyBesideThreads(t *testing.T) {
	tree := testTree(t)
	mkdir(t, tree, "/apps")
	placer := placing(t, tree, plan(policy.Enforce, nil, feature("chat", nil, nil, marked(t))))
	p := sleeper(t, tree, "/apps")
	must(t, placer.Pass())
	must(t, tree.write(mkdir(t, tree, where(t, tree, p.Process.Pid)+"/threads").Path, "cgroup.type", "threaded"))
	must(t, tree.write("/apps", "cgroup.procs", strconv.Itoa(p.Process.Pid)))
	placer.Verify()
	if c := placer.Counts(); c.Lost != 1 {
		t.Errorf("%+v", c)
	}
}

// Processes that are seen from a pid namespace without a number there cannot be moved, and
// nobody else is in their place.
func TestMoveAllOfOthers(t *testing.T) {
	tree := testTree(t)
	mkdir(t, tree, "/apps")
	mkdir(t, tree, "/to")
	mkdir(t, tree, "/mover")
	p := sleeper(t, tree, "/apps")
	cmd := exec.Command("/proc/self/exe", tree.Dir, "/apps", "/to")
	cmd.Env = append(os.Environ(), "BULKHEAD_TEST_HELPER=moveAll")
	d, err := os.Open(tree.path("/mover"))
	must(t, err)
	defer d.Close()
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID, UseCgroupFD: true, CgroupFD: int(d.Fd())}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "another pid namespace") || !strings.Contains(string(out), "/mover\n") {
		t.Errorf("%v: %s", err, out)
	}
	wantIn(t, tree, p, "/apps")
}

// A user that the node does not know matches nobody, and is told.
func TestUnknownUser(t *testing.T) {
	tree := testTree(t)
	pl := placing(t, tree, plan(policy.Enforce, nil, feature("chat", nil, nil, policy.Match{User: "no-such-user-here"})))
	must(t, pl.Pass())
	if c := pl.Counts(); c.Moved != 0 {
		t.Errorf("%+v", c)
	}
	wantCondition(t, pl.Conditions(), TypePlacement, ReasonUnknownUser, "no-such-user-here", "chat")
}

// What a look at a process costs that none of 200 items matches, by executable and by command line:
// each program that begins on the node is looked at.
func BenchmarkLook(b *testing.B) {
	tree := testTree(b)
	for key, m := range map[string]func(i int) policy.Match{
		"exe":         func(i int) policy.Match { return policy.Match{Exe: fmt.Sprintf("/opt/features/f%d/bin/worker", i)} },
		"exe, a glob": func(i int) policy.Match { return policy.Match{Exe: fmt.Sprintf("/opt/features/f%d/bin/*", i)} },
		"cmdline":     func(i int) policy.Match { return policy.Match{Cmdline: fmt.Sprintf("--feature=f%d( |$)", i)} },
		"user":        func(i int) policy.Match { return policy.Match{User: strconv.Itoa(70000 + i)} },
	} {
		b.Run(key, func(b *testing.B) {
			var features []policy.Feature
			for i := range 200 {
				features = append(features, feature(fmt.Sprintf("f%d", i), nil, nil, m(i)))
			}
			p := NewPlacer(tree, plan(policy.Enforce, nil, features...))
			parent := os.Getppid()
			for b.Loop() {
				p.Look(parent)
			}
			if p.Counts().Moved > 0 || len(p.followed) > 0 {
				b.Fatal("it matches")
			}
		})
	}
}
