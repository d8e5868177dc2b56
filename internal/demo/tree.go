package demo

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// treePrefix and a process id name the demo's cgroup.
const treePrefix = "bulkhead-demo-"

// removeTimeout bounds the wait for killed processes to be gone.
const removeTimeout = 10 * time.Second

// tree is the demo's own part of the cgroup tree:
//
//	bulkhead-demo-PID       locked as long as its demo lives
//	├ supervisor            the supervisor, providers, the prober and the database
//	└ node                  the --cgroup-root of the agent: the node of the demo
//	  ├ agent               the agent
//	  └ apps                workloads before they are managed
//
// bulkhead-demo-PID and node hold no process themselves, so that controllers
// can be turned on in them.
type tree struct {
	dir  string
	lock *os.File // nil in the supervisor, which does not own the tree
}

func (t *tree) supervisor() string { return filepath.Join(t.dir, "supervisor") }
func (t *tree) node() string       { return filepath.Join(t.dir, "node") }
func (t *tree) agent() string      { return filepath.Join(t.dir, "node", "agent") }
func (t *tree) apps() string       { return filepath.Join(t.dir, "node", "apps") }

// makeTree makes and locks the cgroups of the demo with process id pid.
func makeTree(root string, pid int) (*tree, error) {
	t := &tree{dir: filepath.Join(root, fmt.Sprint(treePrefix, pid))}
	for t.lock == nil {
		if err := os.Mkdir(t.dir, 0o755); err != nil {
			return nil, fmt.Errorf("make the demo's cgroup: %w: the cgroup v2 tree must be mounted writable; in a container, run it privileged", err)
		}
		lock, err := lockDir(t.dir, unix.LOCK_EX)
		if errors.Is(err, fs.ErrNotExist) {
			continue // a demo that swept took it for a dead one's: make it again
		}
		if err != nil {
			return nil, fmt.Errorf("lock the demo's cgroup: %w", err)
		}
		t.lock = lock
	}
	err := enableControllers(t.dir)
	for _, dir := range []string{t.supervisor(), t.node(), t.agent(), t.apps()} {
		if err == nil {
			err = os.Mkdir(dir, 0o755)
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make the demo's cgroups: %w", err), t.remove())
	}
	return t, nil
}

// lockDir opens and locks dir. It returns fs.ErrNotExist if dir was removed
// before the lock was ours.
func lockDir(dir string, how int) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), how); err != nil {
		f.Close()
		return nil, err
	}
	ours, err := f.Stat()
	if err == nil {
		var now os.FileInfo
		if now, err = os.Stat(dir); err == nil && !os.SameFile(ours, now) {
			err = fs.ErrNotExist
		}
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// enableControllers passes what the demo's cgroup has of the cpu and memory
// controllers on to its children, for the agent to use. A node that has none
// here (v1 controllers, or nobody asked for them) runs the demo without.
func enableControllers(dir string) error {
	have, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return err
	}
	for _, c := range strings.Fields(string(have)) {
		if c != "cpu" && c != "memory" {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+c), 0); err != nil {
			return err
		}
	}
	return nil
}

// killApps kills the workloads with all their children, in compartments too,
// and waits until they are gone.
func (t *tree) killApps() error {
	entries, err := os.ReadDir(t.node())
	if err != nil {
		return err
	}
	var groups []string
	for _, e := range entries {
		dir := filepath.Join(t.node(), e.Name())
		if e.IsDir() && dir != t.agent() {
			groups = append(groups, dir)
		}
	}
	for _, dir := range groups {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0); err != nil {
			return fmt.Errorf("kill the workloads in %s: %w", dir, err)
		}
	}
	deadline := time.Now().Add(removeTimeout)
	for _, dir := range groups {
		for {
			events, err := os.ReadFile(filepath.Join(dir, "cgroup.events"))
			if err != nil {
				return err
			}
			if strings.Contains(string(events), "populated 0\n") {
				break
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("killed processes are still in %s after %v", dir, removeTimeout)
			}
			time.Sleep(5 * time.Millisecond)
		}
	}
	// Linux 6.18 kills what is cloned into a cgroup that was killed before: the
	// next run needs another. Those of the agent's slices go with detach.
	if err := removeCgroups(t.apps()); err != nil {
		return err
	}
	return os.Mkdir(t.apps(), 0o755)
}

// goFirst lets the demo's processes run before what else runs on the node: it
// measures queues for connections, for which it needs a tenth of a processor,
// but at once. (At a load of 17 on two processors chat's p99 alone is 125 ms
// with it and 150 to 640 ms without.) Which of the two counts depends on who
// has the cpu controller: the demo's cgroup, or, of the whole node's root
// group, its session (sched(7), autogroup). Called by the supervisor, which has
// a session of its own.
func (t *tree) goFirst() {
	// A node that has neither shows the same, only with more noise.
	for _, dir := range []string{t.dir, t.supervisor()} {
		_ = os.WriteFile(filepath.Join(dir, "cpu.weight"), []byte("10000"), 0)
	}
	_ = os.WriteFile("/proc/self/autogroup", []byte("-20"), 0)
}

// remove kills every process in the tree, waits until they are gone and removes
// the cgroups. It needs cgroup.kill (Linux 5.14).
func (t *tree) remove() error {
	defer t.lock.Close()
	if err := os.WriteFile(filepath.Join(t.dir, "cgroup.kill"), []byte("1"), 0); err != nil {
		return fmt.Errorf("kill the processes of the demo: %w", err)
	}
	// A killed process leaves its cgroup when it has exited, not when the
	// signal is sent; until then rmdir is EBUSY.
	deadline := time.Now().Add(removeTimeout)
	for {
		err := removeCgroups(t.dir)
		if err == nil || !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
			return err
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// removeCgroups removes dir and the cgroups below it, deepest first.
func removeCgroups(dir string) error {
	var dirs []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		return err
	})
	if err != nil {
		return err
	}
	for _, d := range slices.Backward(dirs) {
		// rmdir itself: os.Remove would try to unlink first, and report that.
		if err := unix.Rmdir(d); err != nil {
			return fmt.Errorf("remove cgroup %s: %w", d, err)
		}
	}
	return nil
}

// sweep removes the cgroups of demos that were killed before they could.
func sweep(root string) error {
	entries, err := os.ReadDir(root)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !e.IsDir() || !strings.HasPrefix(e.Name(), treePrefix) {
			continue
		}
		dir := filepath.Join(root, e.Name())
		lock, err := lockDir(dir, unix.LOCK_EX|unix.LOCK_NB)
		if errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, fs.ErrNotExist) {
			continue // its demo lives, or has just removed it
		}
		if err == nil {
			err = (&tree{dir: dir, lock: lock}).remove()
		}
		if err != nil {
			return fmt.Errorf("remove what an earlier demo left: %w", err)
		}
	}
	return nil
}
