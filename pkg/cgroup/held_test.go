package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"bulkhead/internal/kerneltest"
)

// What is held open reads as a file that is opened anew does, whatever became of its cgroup.
func TestHeld(t *testing.T) {
	tree := testTree(t)
	tree.Hold()
	reads := func(p, want string) {
		t.Helper()
		for range 2 { // the first may open it
			if got, err := tree.again(p, "cgroup.max.depth"); err != nil || got != want {
				t.Errorf("%s reads %q, %v, want %q", p, got, err, want)
			}
		}
	}
	mkdir(t, tree, "/a/b")
	reads("/a", "max")
	reads("/a/b", "max")
	must(t, tree.write("/a", "cgroup.max.depth", "7"))
	must(t, tree.write("/a/b", "cgroup.max.depth", "5"))
	reads("/a", "7")
	reads("/a/b", "5")
	if len(tree.held.files) != 2 {
		t.Errorf("%d are held", len(tree.held.files))
	}
	// It hinders nobody from removing the cgroup, and is not the one that comes after it.
	must(t, os.Remove(tree.path("/a/b")))
	if got, err := tree.again("/a/b", "cgroup.max.depth"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of a cgroup that is gone: %q, %v", got, err)
	}
	if len(tree.held.files) != 1 {
		t.Errorf("%d are held", len(tree.held.files))
	}
	mkdir(t, tree, "/a/b")
	reads("/a/b", "max")
	must(t, os.Remove(tree.path("/a/b")))
	mkdir(t, tree, "/a/b")
	must(t, tree.write("/a/b", "cgroup.max.depth", "9"))
	reads("/a/b", "9")

	// Longer than a page of the kernel's, and nothing of it left when they have ended.
	const many = 700
	f, err := os.Open(tree.path("/a/b"))
	must(t, err)
	defer f.Close()
	shell := exec.Command("sh", "-c", fmt.Sprintf("n=1; while [ $n -lt %d ]; do sleep 1000 & n=$((n+1)); done; echo; wait", many))
	shell.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(f.Fd())}
	ready, err := shell.StdoutPipe()
	must(t, err)
	must(t, shell.Start())
	defer shell.Wait()
	defer tree.write("/a/b", "cgroup.kill", "1")
	_, err = ready.Read(make([]byte, 1))
	must(t, err)
	for range 2 {
		if got, err := tree.members("/a/b"); err != nil || len(got) != many {
			t.Errorf("%d members, %v, want %d", len(got), err, many)
		}
	}
	must(t, tree.write("/a/b", "cgroup.kill", "1"))
	kerneltest.Poll(t, "they have ended", func() error {
		if got, err := tree.members("/a/b"); err != nil || len(got) > 0 {
			return fmt.Errorf("%d members, %v", len(got), err)
		}
		return nil
	})
}

// openIn is how many files of a tree this process has open.
func openIn(t *testing.T, tree *Tree) (n int) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	for _, e := range entries {
		if to, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name())); err == nil && strings.HasPrefix(to, tree.Dir) {
			n++
		}
	}
	return n
}

// Not more are held than may be, and none that nobody reads.
func TestHeldBounds(t *testing.T) {
	tree := testTree(t)
	tree.Hold()
	h := tree.held
	h.most = 3
	for i := range 5 {
		p := "/" + strconv.Itoa(i)
		mkdir(t, tree, p)
		must(t, tree.write(p, "cgroup.max.depth", strconv.Itoa(i)))
	}
	for range 2 {
		for i := range 5 {
			if got, err := tree.again("/"+strconv.Itoa(i), "cgroup.max.depth"); err != nil || got != strconv.Itoa(i) {
				t.Errorf("%d reads %q, %v", i, got, err)
			}
		}
	}
	if len(h.files) != 3 || openIn(t, tree) != 3 {
		t.Errorf("%d are held and %d open", len(h.files), openIn(t, tree))
	}
	h.files[tree.path("/1")+"/cgroup.max.depth"].used.Add(-int64(heldFor/time.Second) - 1)
	h.swept = h.swept.Add(-heldFor - time.Second)
	_, err := tree.again("/4", "cgroup.max.depth") // in the place of that
	must(t, err)
	if h.files[tree.path("/1")+"/cgroup.max.depth"] != nil || h.files[tree.path("/4")+"/cgroup.max.depth"] == nil || len(h.files) != 3 || openIn(t, tree) != 3 {
		t.Errorf("%v are held and %d open", h.files, openIn(t, tree))
	}
}

// One is closed for some while others read it.
func TestHeldTogether(t *testing.T) {
	tree := testTree(t)
	tree.Hold()
	mkdir(t, tree, "/a")
	mkdir(t, tree, "/b")
	must(t, tree.write("/b", "cgroup.max.depth", "3"))
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if got, err := tree.again("/a", "cgroup.max.depth"); err == nil && got != "max" || err != nil && !gone(err) {
					t.Errorf("a reads %q, %v", got, err)
					return
				}
				if got, err := tree.again("/b", "cgroup.max.depth"); err != nil || got != "3" {
					t.Errorf("b reads %q, %v", got, err)
					return
				}
			}
		})
	}
	for range 200 {
		must(t, os.Remove(tree.path("/a")))
		mkdir(t, tree, "/a")
	}
	close(stop)
	wg.Wait()
	if n := openIn(t, tree); n != len(tree.held.files) {
		t.Errorf("%d are open and %d held", n, len(tree.held.files))
	}
}
