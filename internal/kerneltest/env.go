package kerneltest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// Env is a test's own part of the machine.
type Env struct {
	// Cgroup is the test's own, a child of the hierarchy's root.
	Cgroup Cgroup
	// BPFFS is an empty directory of a bpf file system.
	BPFFS string

	t testing.TB
}

// Cgroup is one cgroup.
type Cgroup struct {
	Path  string // of its directory
	ID    uint64 // as bpf_get_current_cgroup_id() returns it
	Level int    // 1 is a child of the hierarchy's root
}

// envs numbers the environments of this process.
var envs atomic.Int64

// New makes an environment that lasts as long as the test.
func New(t testing.TB) *Env {
	t.Helper()
	root, err := Root()
	if err != nil {
		t.Fatal(err)
	}
	name := fmt.Sprintf("bulkhead-test-%d-%d", os.Getpid(), envs.Add(1))
	e := &Env{t: t, BPFFS: filepath.Join(os.Getenv(bpffsVar), name)}
	dir := filepath.Join(root, name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatalf("cgroup of the test: %v", err)
	}
	t.Cleanup(func() {
		if err := removeTree(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.Mkdir(e.BPFFS, 0o700); err != nil {
		t.Fatalf("directory for pins (is kerneltest.Main called in TestMain?): %v", err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(e.BPFFS); err != nil {
			t.Error(err)
		}
	})
	e.Cgroup = e.cgroup(dir, 1)
	return e
}

// With is the same environment for a subtest, which it does not end with.
func (e *Env) With(t testing.TB) *Env {
	sub := *e
	sub.t = t
	return &sub
}

// Mkdir makes a cgroup, path below the environment's own, with those above it.
func (e *Env) Mkdir(path string) Cgroup {
	e.t.Helper()
	dir := filepath.Join(e.Cgroup.Path, path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		e.t.Fatalf("make a cgroup: %v", err)
	}
	below, err := filepath.Rel(e.Cgroup.Path, dir)
	if err != nil {
		e.t.Fatal(err)
	}
	return e.cgroup(dir, e.Cgroup.Level+1+strings.Count(below, "/"))
}

// TrueRoot is the root of the hierarchy.
func (e *Env) TrueRoot() Cgroup {
	e.t.Helper()
	return e.cgroup(filepath.Dir(e.Cgroup.Path), 0)
}

func (e *Env) cgroup(dir string, level int) Cgroup {
	e.t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		e.t.Fatalf("cgroup %s: %v", dir, err)
	}
	return Cgroup{Path: dir, ID: st.Ino, Level: level}
}

// Move moves a process into a cgroup.
func (e *Env) Move(pid int, to Cgroup) {
	e.t.Helper()
	if err := os.WriteFile(filepath.Join(to.Path, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0); err != nil {
		e.t.Fatalf("move process %d to %s: %v", pid, to.Path, err)
	}
}

// removeTree kills what runs in a cgroup and below it (cgroup.kill, kernel 5.14), and
// removes them all, the deepest first.
func removeTree(dir string) error {
	if err := os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("kill what runs in %s: %w", dir, err)
	}
	return poll(patience, func() error { return rmdirAll(dir) })
}

func rmdirAll(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			err = errors.Join(err, rmdirAll(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(err, unix.Rmdir(dir))
}
