package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestParseMounts(t *testing.T) {
	const mountinfo = `22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
31 22 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
41 31 0:38 / /sys/fs/cgroup/unified rw shared:9 master:2 - cgroup2 cgroup2 rw
57 22 0:38 /a\040b /mnt/with\040blank\134s rw - cgroup2 none rw
58 22 0:38 /../.. /host rw - cgroup2 none ro
59 22 0:40 / /cgroup2 rw - ext4 cgroup2 rw
`
	got, err := parseMounts(strings.NewReader(mountinfo))
	want := []mount{
		{41, "/", "/sys/fs/cgroup/unified"},
		{57, "/a b", `/mnt/with blank\s`},
		{58, "/../..", "/host"},
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v\nwant %+v", got, err, want)
	}
}

func TestFindTrueRoot(t *testing.T) {
	tree, err := Find("")
	must(t, err)
	if tree.Level != 0 || tree.ID != 1 || tree.Dir != tree.Mount || tree.Namespaced {
		t.Errorf("%+v is not the true root", tree)
	}
	again, err := Find(tree.Dir)
	must(t, err)
	if again.Level != 0 || again.ID != 1 || again.Dir != tree.Dir {
		t.Errorf("by name %+v, by type %+v", again, tree)
	}
}

// The level of a root below the true root is the kernel's: what the member's
// own /proc/self/cgroup counts.
func TestFindBelowTheRoot(t *testing.T) {
	top := testTree(t)
	deep := mkdir(t, top, "/a/b/c/d/e/f/g/h/i")
	link := filepath.Join(t.TempDir(), "link")
	must(t, os.Symlink(top.path(deep.Path), link))
	for _, dir := range []string{top.path(deep.Path), top.path(deep.Path) + "/../i/", link} {
		tree, err := Find(dir)
		must(t, err)
		if tree.Level != 10 || tree.ID != deep.ID || tree.Dir != top.path(deep.Path) || deep.Level != 10 {
			t.Errorf("Find(%s) = %+v, want level 10 and id %d", dir, tree, deep.ID)
		}
	}
	c := start(t, top, deep.Path, "hold")
	own, err := procCgroup(strconv.Itoa(c.Process.Pid))
	must(t, err)
	if n := strings.Count(own, "/"); n != 10 {
		t.Errorf("the process is in %s, level %d", own, n)
	}
}

// A bind mount of a part of the tree: the level is still the kernel's.
func TestFindBindMount(t *testing.T) {
	top := testTree(t)
	c := mkdir(t, top, "/a/b")
	point := t.TempDir()
	cmd := exec.Command("/proc/self/exe", top.path("/a/b"), point)
	cmd.Env = append(os.Environ(), "BULKHEAD_TEST_HELPER=bound")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	want := fmt.Sprintln(3, c.ID, point, top.abs+"/a/b")
	if err != nil || string(out) != want {
		t.Errorf("got %q (%v), want %q", out, err, want)
	}
}

func TestFindRefuses(t *testing.T) {
	host, err := Find("")
	must(t, err)
	for dir, want := range map[string]error{
		t.TempDir():                           ErrNotCgroup2,
		"/proc":                               ErrNotCgroup2,
		filepath.Join(host.Dir, "cpu.stat"):   ErrNotCgroup2,
		filepath.Join(host.Dir, "not-there"):  os.ErrNotExist,
		filepath.Join(t.TempDir(), "no", "x"): os.ErrNotExist,
	} {
		tree, err := Find(dir)
		if !errors.Is(err, want) {
			t.Errorf("Find(%s) = %+v, %v, want %v", dir, tree, err, want)
		}
	}
	if _, err := findRoot(nil); !errors.Is(err, ErrNoCgroup2) {
		t.Errorf("without a mount: %v", err)
	}
}

// From inside a private cgroup namespace the agent must not take the
// namespace's root for the node's.
func TestPrivateNamespace(t *testing.T) {
	host, err := Find("")
	must(t, err)
	top := testTree(t)
	mkdir(t, top, "/pod")
	mkdir(t, top, chat)
	d, err := os.Open(top.path("/pod"))
	must(t, err)
	defer d.Close()
	cmd := exec.Command("/proc/self/exe", host.Dir, top.Dir, t.TempDir())
	cmd.Env = append(os.Environ(), "BULKHEAD_TEST_HELPER=namespaced")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Unshareflags: unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP,
		UseCgroupFD:  true, CgroupFD: int(d.Fd()),
	}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil || !strings.HasSuffix(out.String(), "all seen\n") {
		t.Errorf("%v\n%s", err, out.String())
	}
}

// seenFromInside runs in a private cgroup namespace whose root is OWN/pod.
func seenFromInside(args []string) error {
	host, own, dir := args[0], args[1], args[2]
	// The host's mount is visible as "/../..": refused by default, with its
	// name in the cure, and fine when it is given.
	_, err := Find("")
	if !errors.Is(err, ErrNamespaced) || !strings.Contains(err.Error(), "--cgroup-root "+host) {
		return fmt.Errorf("default: %v", err)
	}
	tree, err := Find(host)
	if err != nil || tree.Level != 0 || tree.ID != 1 || !tree.Namespaced {
		return fmt.Errorf("host's tree by name: %+v, %v", tree, err)
	}
	tree, err = Find(own)
	if err != nil || tree.Level != 1 {
		return fmt.Errorf("part of the host's tree: %+v, %v", tree, err)
	}
	// /proc/self/cgroup says "/" here.
	c, err := tree.Of(os.Getpid())
	if err != nil || c.Path != "/pod" {
		return fmt.Errorf("own place: %+v, %v", c, err)
	}
	// A mount with nsdelegate (systemd's) lets no process across the border.
	mountinfo, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	leaf, err := tree.Enter(chat)
	if strings.Contains(string(mountinfo), "nsdelegate") {
		if left, walkErr := tree.walk(chat); !errors.Is(err, ErrNamespaced) || walkErr != nil || len(left) != 1 {
			return fmt.Errorf("enter across the border: %v, leaves %v, %v", err, left, walkErr)
		}
	} else if c, ofErr := tree.Of(os.Getpid()); err != nil || ofErr != nil || c.Path != leaf {
		return fmt.Errorf("enter: %s, %v; in %+v, %v", leaf, err, c, ofErr)
	}
	// Only the namespace's own tree is visible.
	if err := unix.Mount("none", dir, "cgroup2", 0, ""); err != nil {
		return err
	}
	if tree, err := Find(dir); !errors.Is(err, ErrNamespaced) {
		return fmt.Errorf("namespace's tree by name: %+v, %v", tree, err)
	}
	if err := unix.Mount("none", host, "tmpfs", 0, ""); err != nil {
		return err
	}
	_, err = Find("")
	if !errors.Is(err, ErrNamespaced) || strings.Contains(err.Error(), "--cgroup-root "+host) {
		return fmt.Errorf("only the namespace's tree: %v", err)
	}
	fmt.Println("all seen")
	return nil
}

func TestWalkAndLookup(t *testing.T) {
	tree := testTree(t)
	want := []string{"/", "/a"}
	p := "/a"
	for i := 0; i < 20; i++ {
		p += "/n"
		want = append(want, p)
	}
	mkdir(t, tree, p)
	mkdir(t, tree, "/b")
	want = append(want, "/b")
	all, err := tree.Walk()
	must(t, err)
	var got []string
	for _, c := range all {
		got = append(got, c.Path)
		var st unix.Stat_t
		must(t, unix.Stat(tree.path(c.Path), &st))
		level := tree.Level + strings.Count(strings.TrimSuffix(c.Path, "/"), "/")
		if c.ID != st.Ino || c.Level != level {
			t.Errorf("%+v: inode %d, level %d", c, st.Ino, level)
		}
		found, ok, err := tree.Lookup(c.ID)
		if err != nil || !ok || found != c {
			t.Errorf("Lookup(%d) = %+v %v %v, want %+v", c.ID, found, ok, err, c)
		}
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("walk gave %q\nwant %q", got, want)
	}
	if c, ok, err := tree.Lookup(1); ok || err != nil {
		t.Errorf("Lookup(1) below the true root found %+v, %v", c, err)
	}
	if _, err := tree.Get("/nothing"); !errors.Is(err, ErrGone) {
		t.Errorf("Get of nothing: %v", err)
	}
	if got := tree.path("/../../etc"); got != tree.path("/etc") {
		t.Errorf("a path led out of the tree: %s", got)
	}
}

// The id is the one that the kernel gives to programs: that of the file handle
// (name_to_handle_at), which on 64 bit is the inode number.
func TestIDIsTheKernels(t *testing.T) {
	tree := testTree(t)
	h, _, err := unix.NameToHandleAt(unix.AT_FDCWD, tree.Dir, 0)
	must(t, err)
	if got := uint64(len(h.Bytes())); got != 8 {
		t.Fatalf("handle of %d bytes", got)
	}
	var id uint64
	for i, b := range h.Bytes() {
		id |= uint64(b) << (8 * i)
	}
	if id != tree.ID {
		t.Errorf("handle %d, inode %d", id, tree.ID)
	}
}

func TestOf(t *testing.T) {
	tree := testTree(t)
	want := mkdir(t, tree, "/x/y")
	c := start(t, tree, "/x/y", "hold")
	got, err := tree.Of(c.Process.Pid)
	if err != nil || got != want {
		t.Errorf("Of = %+v, %v, want %+v", got, err, want)
	}
	if _, err := tree.Of(os.Getpid()); !errors.Is(err, ErrOutside) {
		t.Errorf("this test: %v", err)
	}
	c.end()
	if _, err := tree.Of(c.Process.Pid); !errors.Is(err, ErrGone) {
		t.Errorf("ended process: %v", err)
	}
	// /x must not match /xy.
	mkdir(t, tree, "/xy")
	sub, err := Find(tree.path("/x"))
	must(t, err)
	d := start(t, tree, "/xy", "hold")
	if c, err := sub.Of(d.Process.Pid); !errors.Is(err, ErrOutside) {
		t.Errorf("%+v, %v", c, err)
	}
}
