package agent

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/cgroup"
)

// tree is a cgroup of the test's own, with one for workloads in it.
func testTree(t *testing.T) (tree *cgroup.Tree, apps string) {
	t.Helper()
	root, err := kerneltest.Root()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(root, fmt.Sprintf("bulkhead-agent-%d-%d", os.Getpid(), time.Now().UnixNano()))
	apps = filepath.Join(dir, "apps")
	if err := os.MkdirAll(apps, 0o755); err != nil {
		t.Fatalf("%v (this test needs root)", err)
	}
	if tree, err = cgroup.Find(dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0)
		kerneltest.Poll(t, "remove "+dir, func() error {
			if _, _, err := tree.Remove(); err != nil {
				return err
			}
			if err := os.Remove(apps); err != nil && !os.IsNotExist(err) {
				return err
			}
			return os.Remove(dir)
		})
	})
	return tree, apps
}

// inside starts a command in a cgroup.
func inside(t *testing.T, dir string, name string, args ...string) *exec.Cmd {
	t.Helper()
	d, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	cmd := exec.Command(name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(d.Fd())}
	return cmd
}

func pidsIn(t *testing.T, dir string) (pids []int) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range strings.Fields(string(b)) {
		pid, _ := strconv.Atoi(f)
		pids = append(pids, pid)
	}
	return pids
}

// forks makes children, each as soon as it can, and says when it has made the last.
// They wait for the end of its input.
const forks = `exec 3<&0; i=0; while [ $i -lt $1 ]; do (read -r x <&3) & i=$((i+1)); done; echo done; read -r x`

// A thousand processes that a program that matches forks, from its very first moment
// on, are all in its compartment, by what the kernel tells alone; nobody else is moved.
func TestAThousandForks(t *testing.T) {
	const n = 1000
	tree, apps := testTree(t)
	mark := fmt.Sprintf("forks-%d", os.Getpid())
	plan, err := loaded(t, fmt.Sprintf("apiVersion: bulkhead/v1\nkind: Policy\nmode: enforce\nproviders: {}\nfeatures:\n  loose: {class: batch, match: [{exe: '/**/{sh,dash,bash}', cmdline: ' %s %d$'}]}\n", mark, n))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tree.EnsureSlices(plan); err != nil {
		t.Fatal(err)
	}
	p := processes{tree: tree, log: slog.New(slog.DiscardHandler)}
	if err := p.follow(plan, nil); err != nil {
		t.Fatal(err)
	}
	defer p.close()
	if p.events == nil {
		t.Fatal("the kernel tells nothing of processes here")
	}

	stranger := inside(t, apps, "/bin/sh", "-c", "while :; do /bin/true; done")
	if err := stranger.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { stranger.Process.Kill(); stranger.Wait() }()
	program := inside(t, apps, "/bin/sh", "-c", forks, mark, strconv.Itoa(n))
	stdin, err := program.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := program.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := program.Start(); err != nil {
		t.Fatal(err)
	}
	defer program.Wait()
	defer stdin.Close()
	last := make(chan time.Time, 1)
	go func() {
		_, _ = bufio.NewReader(stdout).ReadString('\n')
		last <- time.Now()
	}()

	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	slice := filepath.Join(tree.Dir, "bulkhead.slice/bulkhead-loose.slice")
	var forked time.Time
	began := time.Now()
	for {
		in, err := tree.Processes("/bulkhead.slice/bulkhead-loose.slice")
		if err != nil {
			t.Fatal(err)
		}
		if !forked.IsZero() && in == n+1 {
			break
		}
		select {
		case <-p.events.Wake():
			if err := p.told(); err != nil {
				t.Fatal(err)
			}
		case forked = <-last:
		case <-ctx.Done():
			t.Fatalf("%d of %d are inside %s; outside: %v", in, n+1, slice, pidsIn(t, apps))
		}
	}
	said, conds := p.says()
	t.Logf("%d forks within %v, all inside %v after the last; %d were moved, the others born inside", n, forked.Sub(began), time.Since(forked), said.Moved)
	if said.Moved < 1 || said.Moved > n+1 || len(conds) != 0 {
		t.Errorf("%+v %+v", said, conds)
	}
	at := false
	for _, pid := range pidsIn(t, apps) {
		at = at || pid == stranger.Process.Pid
	}
	if !at {
		t.Errorf("process %d, which does not match, was moved", stranger.Process.Pid)
	}
}

// The watcher tells of directories at any depth, also of those in one that was made in
// the moment before, and of their end.
func TestTreeWatcher(t *testing.T) {
	tree, apps := testTree(t)
	w, err := newTreeWatcher(tree.Dir)
	if err != nil {
		t.Fatal(err)
	}
	defer w.close()
	if all, err := tree.Walk(); err != nil {
		t.Fatal(err)
	} else if more, err := w.watch(all); !more || err != nil {
		t.Errorf("what is new may have had more made in it: %v, %v", more, err)
	}
	settle := func() {
		t.Helper()
		for {
			all, err := tree.Walk()
			if err != nil {
				t.Fatal(err)
			}
			more, err := w.watch(all)
			if err != nil {
				t.Fatal(err)
			}
			if !more {
				return
			}
		}
	}
	told := func(what string) {
		t.Helper()
		select {
		case <-w.wake:
		case <-time.After(30 * time.Second):
			t.Fatalf("%s is not told", what)
		}
	}
	settle()
	select { // what was made before it was watched may be told too
	case <-w.wake:
	default:
	}
	deep := filepath.Join(apps, "a", "b", "c")
	if err := os.MkdirAll(deep, 0o755); err != nil {
		t.Fatal(err)
	}
	told("a directory")
	settle()
	if err := os.Mkdir(filepath.Join(deep, "d"), 0o755); err != nil {
		t.Fatal(err)
	}
	told("one in it")
	settle()
	for _, dir := range []string{filepath.Join(deep, "d"), deep, filepath.Dir(deep), filepath.Join(apps, "a")} {
		if err := os.Remove(dir); err != nil {
			t.Fatal(err)
		}
	}
	told("the end")
	// One of the same name is another, also if nobody has looked in between.
	if err := os.MkdirAll(deep, 0o755); err != nil {
		t.Fatal(err)
	}
	settle()
	for drained := false; !drained; {
		select {
		case <-w.wake:
		case <-time.After(100 * time.Millisecond): // nothing more is told of the past
			drained = true
		}
	}
	if err := os.Mkdir(filepath.Join(deep, "d"), 0o755); err != nil {
		t.Fatal(err)
	}
	told("one in the same again")
	for _, dir := range []string{filepath.Join(deep, "d"), deep, filepath.Dir(deep), filepath.Join(apps, "a")} {
		if err := os.Remove(dir); err != nil {
			t.Fatal(err)
		}
	}
}
