package cgroup

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"bulkhead/pkg/policy"
)

// The process itself and the kernel agree on its place, and the slice has none.
func TestEnter(t *testing.T) {
	tree := testTree(t)
	_, err := tree.EnsureSlices(plan(policy.Enforce, []string{"free"}, feature("chat", nil, nil)))
	must(t, err)
	for _, slice := range []string{chat, chat + "/bulkhead-chat-free.slice"} {
		c := start(t, tree, "", "enter", tree.Dir, slice)
		var e entered
		must(t, json.Unmarshal([]byte(c.line), &e))
		leaf := slice + fmt.Sprintf("/exec-%d.scope", c.Process.Pid)
		if e.PID != c.Process.Pid || e.Leaf != leaf {
			t.Errorf("%+v, want %s", e, leaf)
		}
		if !strings.Contains(e.Cgroup, "0::"+tree.abs+leaf+"\n") {
			t.Errorf("it says it is in %q, want %s", e.Cgroup, tree.abs+leaf)
		}
		in, err := tree.Of(c.Process.Pid)
		if err != nil || in.Path != leaf {
			t.Errorf("it is in %+v, %v", in, err)
		}
		if pids, err := tree.pids(slice); err != nil || len(pids) != 0 {
			t.Errorf("processes %v in the slice itself, %v", pids, err)
		}
	}
	if n, err := tree.Processes(chat); err != nil || n != 2 {
		t.Errorf("%d processes, %v", n, err)
	}
	for slice, want := range map[string]error{
		"/bulkhead.slice/bulkhead-none.slice": ErrGone,
		"/bulkhead.slice":                     nil,
		"/system.slice":                       nil,
		chat + "/../../x":                     nil,
	} {
		_, err := tree.Enter(slice)
		if err == nil || want != nil && !errors.Is(err, want) {
			t.Errorf("Enter(%s): %v", slice, err)
		}
	}
}

// A leaf of this name that belongs to another pid namespace is not shared.
func TestEnterNameTaken(t *testing.T) {
	tree := testTree(t)
	mkdir(t, tree, chat)
	taken := fmt.Sprintf("%s/exec-%d.scope", chat, os.Getpid())
	mkdir(t, tree, taken)
	leaf, err := tree.enter(chat, 0)
	if !errors.Is(err, ErrBusy) {
		t.Errorf("%s, %v", leaf, err)
	}
}

// Leaves are pruned while others are entered: every process arrives, and in
// the end nothing is left.
func TestEnterWhilePruning(t *testing.T) {
	tree := testTree(t)
	p := plan(policy.Enforce, nil, feature("chat", nil, nil))
	_, err := tree.EnsureSlices(p)
	must(t, err)
	stop, pruned := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-stop:
				pruned <- nil
				return
			default:
				if left, err := tree.Prune(p, nil); err != nil || len(left) > 0 {
					pruned <- fmt.Errorf("left %v: %w", left, err)
					return
				}
			}
		}
	}()
	var wg sync.WaitGroup
	for i := 0; i < 4; i++ {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for j := 0; j < 10; j++ {
				c, err := startHelper(tree, "", "enter", tree.Dir, chat)
				if err != nil {
					t.Error(err)
					return
				}
				c.end()
			}
		}()
	}
	wg.Wait()
	close(stop)
	must(t, <-pruned)
	left, err := tree.Prune(p, nil)
	if got := paths(t, tree); err != nil || len(left) != 0 || len(got) != 2 {
		t.Errorf("left %v, %v, tree %q", left, err, got)
	}
}

// A leaf that is removed just before the process enters is made again.
func TestEnterRetries(t *testing.T) {
	tree := testTree(t)
	mkdir(t, tree, chat)
	if err := tree.write(chat+"/exec-1.scope", "cgroup.procs", "0"); !gone(err) {
		t.Errorf("a removed leaf answers %v", err)
	}
	f, err := os.OpenFile(tree.path(mkdir(t, tree, chat+"/exec-1.scope").Path)+"/cgroup.procs", os.O_WRONLY, 0)
	must(t, err)
	defer f.Close()
	must(t, unix.Rmdir(tree.path(chat+"/exec-1.scope")))
	if _, err := f.WriteString("0"); !gone(err) {
		t.Errorf("a leaf removed after it was opened answers %v", err)
	}
}
