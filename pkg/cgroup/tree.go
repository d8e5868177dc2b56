package cgroup

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"sort"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// rootID is the id (inode number) of the true root of the cgroup v2
// hierarchy: kernfs numbers from 1 and makes the root first. No other cgroup
// ever has it, so it tells the true root from the root of a namespace.
const rootID = 1

// initCgroupNS is the inode number of /proc/PID/ns/cgroup in the initial
// cgroup namespace (PROC_CGROUP_INIT_INO in linux/proc_ns.h).
const initCgroupNS = 0xEFFFFFFB

// Tree is the part of the cgroup v2 tree that an agent works in. Its fields
// do not change after Find; the methods read and write the kernel's state and
// may be called from several goroutines, but two that change the tree at once
// may report each other's changes as failures.
type Tree struct {
	// Dir is the host path of the tree's root, without symbolic links.
	Dir string
	// Mount is the mount point that Dir is in.
	Mount string
	// Level is the kernel's level of Dir: 0 for the true root.
	Level int
	// ID is the cgroup id of Dir: 1 for the true root.
	ID uint64
	// Namespaced is true if the calling process is in a private cgroup
	// namespace but sees the host's tree. Values and programs work; if the tree
	// is mounted with nsdelegate, as systemd does, moving a process across the
	// namespace's border fails with ENOENT.
	Namespaced bool
	// Manager says through whom cgroups are made, and Backend is it.
	Manager Manager
	Backend Backend

	held *held // nil: nothing is, see Hold
	// abs is the path of Dir below the true root, as /proc/PID/cgroup shows it
	// ("" for the true root itself).
	abs string
}

// Cgroup is one cgroup of a tree.
type Cgroup struct {
	Path  string // below Tree.Dir, starting with "/"; "/" is Dir itself
	ID    uint64 // as bpf_get_current_cgroup_id() returns it
	Level int    // absolute, as bpf_get_current_ancestor_cgroup_id() takes it
	Owner uint32 // uid of who may make cgroups in it
}

// Find returns the tree whose root is dir, which may be any directory of a
// cgroup v2 mount. An empty dir means the true root of the hierarchy, found in
// /proc/self/mountinfo by file system type, wherever it is mounted (on hybrid
// hosts /sys/fs/cgroup/unified).
//
// Errors: ErrNoCgroup2, ErrNotCgroup2, and ErrNamespaced if only the tree of a
// private cgroup namespace can be seen. A dir below the true root is fine, and
// so is the host's tree mounted into a private namespace if it is given by
// name.
func Find(dir string) (*Tree, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("find the cgroup v2 mount: %w (is /proc mounted?)", err)
	}
	defer f.Close()
	mounts, err := parseMounts(f)
	if err != nil {
		return nil, fmt.Errorf("read /proc/self/mountinfo: %w", err)
	}
	if dir == "" {
		return findRoot(mounts)
	}
	return openTree(dir, mounts)
}

// mount is one cgroup2 line of mountinfo.
type mount struct {
	id    uint64
	root  string // what of the file system is mounted: "/", "/a", "/.." from inside a namespace
	point string
}

// parseMounts returns the cgroup2 mounts of a mountinfo file (proc(5)).
func parseMounts(r io.Reader) ([]mount, error) {
	var out []mount
	s := bufio.NewScanner(r)
	s.Buffer(nil, 1<<20) // overlay options make long lines
	for s.Scan() {
		fields := strings.Fields(s.Text())
		// id parent dev root point options [optional...] - type source options
		sep := 6
		for sep < len(fields) && fields[sep] != "-" {
			sep++
		}
		if sep+1 >= len(fields) || fields[sep+1] != "cgroup2" {
			continue
		}
		id, err := strconv.ParseUint(fields[0], 10, 64)
		if err != nil {
			return nil, fmt.Errorf("mount id %q: %w", fields[0], err)
		}
		out = append(out, mount{id: id, root: unescape(fields[3]), point: unescape(fields[4])})
	}
	return out, s.Err()
}

// unescape undoes mountinfo's \040 for blanks, tabs, newlines and backslashes.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// findRoot returns the tree of the first mount that shows the true root.
func findRoot(mounts []mount) (*Tree, error) {
	if len(mounts) == 0 {
		return nil, fmt.Errorf("%w: mount one (mount -t cgroup2 none /sys/fs/cgroup/unified) or boot with systemd.unified_cgroup_hierarchy=1", ErrNoCgroup2)
	}
	host := "" // where the host's tree is visible from inside a namespace
	for _, m := range mounts {
		st, err := stat(m.point)
		if err != nil || st.Mnt_id != m.id || st.Ino != rootID {
			continue // hidden under a later mount, or not the root
		}
		if m.root == "/" {
			return openTree(m.point, mounts)
		}
		host = m.point
	}
	if host != "" {
		return nil, fmt.Errorf("%w: the agent must see the node's own tree; run it in the host's cgroup namespace, or give the host's tree by name (--cgroup-root %s)", ErrNamespaced, host)
	}
	return nil, fmt.Errorf("%w: %s is not the root of the node's tree; run in the host's cgroup namespace, or mount the host's cgroup2 and give it by name (--cgroup-root DIR)", ErrNamespaced, mounts[0].point)
}

// openTree returns the tree whose root is dir.
func openTree(dir string, mounts []mount) (*Tree, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("cgroup root: %w", err)
	}
	dir, err = filepath.EvalSymlinks(dir)
	if err != nil {
		return nil, fmt.Errorf("cgroup root: %w", err)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return nil, fmt.Errorf("cgroup root %s: %w", dir, err)
	}
	if fs.Type != unix.CGROUP2_SUPER_MAGIC {
		return nil, fmt.Errorf("cgroup root %s: %w (give --cgroup-root a directory of one, or leave it out)", dir, ErrNotCgroup2)
	}
	st, err := stat(dir)
	if err != nil {
		return nil, fmt.Errorf("cgroup root: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return nil, fmt.Errorf("cgroup root %s: %w: it is a file", dir, ErrNotCgroup2)
	}
	for _, m := range mounts {
		if m.id != st.Mnt_id {
			continue
		}
		t := &Tree{Dir: dir, Mount: m.point, ID: st.Ino}
		t.Backend = cgroupfs{t}
		top, err := stat(m.point)
		if err != nil {
			return nil, fmt.Errorf("cgroup root %s: %w", dir, err)
		}
		rel, err := filepath.Rel(m.point, dir)
		if err != nil {
			return nil, fmt.Errorf("cgroup root %s: %w", dir, err)
		}
		switch {
		case top.Ino == rootID:
			// From inside a namespace the true root shows as "/..".
			t.Namespaced = m.root != "/"
			t.abs = path.Join("/", rel)
		case inInitialNamespace():
			t.abs = path.Join("/", m.root, rel)
		default:
			// Where the namespace's own root lies is not to be seen from
			// inside, so levels below it cannot be known.
			return nil, fmt.Errorf("cgroup root %s: %w: its level in the node's tree cannot be known; run in the host's cgroup namespace, or mount the host's cgroup2 and give a directory of it", dir, ErrNamespaced)
		}
		if t.abs == "/" {
			t.abs = ""
		}
		t.Level = strings.Count(t.abs, "/")
		if t.Manager = t.manager(); t.Manager.Name == "systemd" {
			t.Backend = newSystemd(t, privateSocket, usualLimits())
		}
		return t, nil
	}
	return nil, fmt.Errorf("cgroup root %s: its mount is not in /proc/self/mountinfo", dir)
}

func inInitialNamespace() bool {
	st, err := os.Readlink("/proc/self/ns/cgroup")
	return err == nil && st == fmt.Sprintf("cgroup:[%d]", uint32(initCgroupNS))
}

// stat is statx(2) with the mount id (kernel 5.8).
func stat(p string) (unix.Statx_t, error) {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, p, 0, unix.STATX_TYPE|unix.STATX_INO|unix.STATX_MNT_ID, &st)
	if err != nil {
		return st, fmt.Errorf("stat %s: %w", p, err)
	}
	return st, nil
}

// Interrupt makes what the tree waits for end soon, and all that is asked of it from now on: whoever has it stops. It may be
// called by any goroutine.
func (t *Tree) Interrupt() { t.Backend.Interrupt() }

// path gives the host path of a cgroup. A ".." never leads out of the tree.
func (t *Tree) path(p string) string {
	return filepath.Join(t.Dir, path.Clean("/"+p))
}

// Get returns the cgroup at path p, or ErrGone.
func (t *Tree) Get(p string) (Cgroup, error) {
	p = path.Clean("/" + p)
	var st unix.Stat_t
	if err := unix.Lstat(t.path(p), &st); err != nil {
		if gone(err) {
			err = ErrGone
		}
		return Cgroup{}, fmt.Errorf("cgroup %s: %w", p, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return Cgroup{}, fmt.Errorf("cgroup %s: %w: it is a file", p, ErrNotCgroup2)
	}
	return Cgroup{Path: p, ID: st.Ino, Level: t.level(p), Owner: st.Uid}, nil
}

func (t *Tree) level(p string) int {
	if p == "/" {
		return t.Level
	}
	return t.Level + strings.Count(p, "/")
}

// Lookup returns the cgroup with the given id. The second result is false if
// there is none in the tree. It walks the tree: use Walk to look up many.
func (t *Tree) Lookup(id uint64) (Cgroup, bool, error) {
	all, err := t.Walk()
	if err != nil {
		return Cgroup{}, false, err
	}
	for _, c := range all {
		if c.ID == id {
			return c, true, nil
		}
	}
	return Cgroup{}, false, nil
}

// Walk returns every cgroup of the tree, the root included, each parent before
// its children and siblings by name. Cgroups that come and go meanwhile may be
// there or not.
func (t *Tree) Walk() ([]Cgroup, error) {
	return t.walk("/")
}

// walk is Walk from p down; nothing if p does not exist.
func (t *Tree) walk(p string) ([]Cgroup, error) {
	var out []Cgroup
	var down func(p string) error
	down = func(p string) error {
		var st unix.Stat_t
		if err := unix.Lstat(t.path(p), &st); err != nil {
			if gone(err) {
				return nil
			}
			return fmt.Errorf("walk cgroup %s: %w", p, err)
		}
		out = append(out, Cgroup{Path: p, ID: st.Ino, Level: t.level(p), Owner: st.Uid})
		// kernfs counts a directory's subdirectories in its links, so the many
		// leaves of a tree need no listing.
		if st.Nlink <= 2 {
			return nil
		}
		names, err := subdirs(t.path(p))
		if err != nil {
			return fmt.Errorf("walk cgroup %s: %w", p, err)
		}
		for _, name := range names {
			if err := down(path.Join(p, name)); err != nil {
				return err
			}
		}
		return nil
	}
	if err := down(p); err != nil {
		return nil, err
	}
	if p == "/" && len(out) == 0 {
		return nil, fmt.Errorf("cgroup root %s: %w", t.Dir, ErrGone)
	}
	return out, nil
}

// subdirs lists the directories in dir by name; none if dir is gone. It asks the kernel itself: a cgroup
// has fifty files for each directory, and os.ReadDir makes an entry of each.
func subdirs(dir string) (names []string, err error) {
	fd, err := openFile(dir)
	if err != nil {
		if gone(err) {
			return nil, nil
		}
		return nil, err
	}
	defer unix.Close(fd)
	buf := make([]byte, 8<<10)
	for {
		n, err := ignoringEINTR(func() (int, error) { return unix.Getdents(fd, buf) })
		if err != nil && !gone(err) {
			return nil, &fs.PathError{Op: "getdents", Path: dir, Err: err}
		}
		if err != nil || n == 0 {
			sort.Strings(names)
			return names, nil
		}
		for rest := buf[:n]; len(rest) > 0; {
			// struct linux_dirent64 (getdents(2)): d_ino and d_off, 8 bytes each, d_reclen, d_type, d_name.
			length := binary.NativeEndian.Uint16(rest[16:])
			entry := rest[:length]
			rest = rest[length:]
			name, _, _ := bytes.Cut(entry[19:], []byte{0})
			if entry[18] == unix.DT_DIR && string(name) != "." && string(name) != ".." {
				names = append(names, string(name))
			}
		}
	}
}

// Of returns the cgroup of a process: ErrGone if there is no such process,
// ErrOutside if it is not in this tree.
func (t *Tree) Of(pid int) (Cgroup, error) {
	if t.Namespaced {
		return t.search(pid)
	}
	return t.below(strconv.Itoa(pid))
}

// below is Of for what has a directory in /proc: a process, or a thread of one.
func (t *Tree) below(pid string) (Cgroup, error) {
	p, err := procCgroup(pid)
	if err != nil {
		return Cgroup{}, err
	}
	rel, ok := strings.CutPrefix(p, t.abs)
	if !ok || rel != "" && rel[0] != '/' {
		return Cgroup{}, fmt.Errorf("process %s is in cgroup %s: %w %s", pid, p, ErrOutside, t.Dir)
	}
	return t.Get(rel)
}

// search finds a process by the member lists. Inside a private namespace
// /proc/PID/cgroup is relative to a place that cannot be seen ("/../../x"), so
// it must not be joined to anything.
func (t *Tree) search(pid int) (Cgroup, error) {
	all, err := t.Walk()
	if err != nil {
		return Cgroup{}, err
	}
	for _, c := range all {
		pids, err := t.pids(c.Path)
		if err != nil {
			continue // gone, or threaded: its processes are listed above it
		}
		for _, p := range pids {
			if p == pid {
				return c, nil
			}
		}
	}
	return Cgroup{}, fmt.Errorf("process %d: %w %s", pid, ErrOutside, t.Dir)
}

// procCgroup returns the cgroup v2 path in /proc/PID/cgroup.
func procCgroup(pid string) (string, error) {
	b, err := readFile("/proc/" + pid + "/cgroup")
	if err != nil {
		if gone(err) || errors.Is(err, unix.ESRCH) {
			err = ErrGone
		}
		return "", fmt.Errorf("cgroup of process %s: %w", pid, err)
	}
	for _, line := range strings.Split(string(b), "\n") {
		if p, ok := strings.CutPrefix(line, "0::"); ok {
			return strings.TrimSuffix(p, " (deleted)"), nil
		}
	}
	return "", fmt.Errorf("cgroup of process %s: %w", pid, ErrNoCgroup2)
}

// read returns a control file's content without the last newline.
func (t *Tree) read(p, file string) (string, error) {
	b, err := readFile(filepath.Join(t.path(p), file))
	return strings.TrimSuffix(string(b), "\n"), err
}

// readFile is os.ReadFile for the kernel's files, of which many are read again and again: an
// os.File asks for its size, and enters it into the poller, which takes as long as the rest.
func readFile(name string) ([]byte, error) {
	fd, err := openFile(name)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return readAll(fd, name)
}

// readAll reads a file from its beginning to its end, wherever it was read to before.
func readAll(fd int, name string) ([]byte, error) {
	b := make([]byte, 0, 1024)
	for {
		n, err := ignoringEINTR(func() (int, error) { return unix.Pread(fd, b[len(b):cap(b)], int64(len(b))) })
		if err != nil {
			return b, &fs.PathError{Op: "read", Path: name, Err: err}
		}
		if n == 0 {
			return b, nil
		}
		if b = b[:len(b)+n]; len(b) == cap(b) {
			b = slices.Grow(b, len(b))
		}
	}
}

func ignoringEINTR(call func() (int, error)) (int, error) {
	for {
		if n, err := call(); err != unix.EINTR {
			return n, err
		}
	}
}

// write writes a control file by one write(2), as the kernel wants it.
func (t *Tree) write(p, file, value string) error {
	f, err := os.OpenFile(filepath.Join(t.path(p), file), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if value == "" {
		value = "\n" // of nothing at all the kernel would not hear
	}
	_, err = f.WriteString(value)
	return err
}

// has reports whether a cgroup has a control file.
func (t *Tree) has(p, file string) bool {
	return unix.Access(filepath.Join(t.path(p), file), unix.F_OK) == nil
}

// pids are the processes in a cgroup itself. Processes of other pid namespaces
// are 0. In a threaded cgroup the kernel answers EOPNOTSUPP: its processes are
// listed in the nearest ancestor that is not.
func (t *Tree) pids(p string) ([]int, error) {
	s, err := t.read(p, "cgroup.procs")
	if err != nil {
		return nil, err
	}
	return parsePIDs(p, s)
}

func parsePIDs(p, s string) (out []int, err error) {
	for _, line := range strings.Fields(s) {
		pid, err := strconv.Atoi(line)
		if err != nil {
			return nil, fmt.Errorf("cgroup.procs of %s: %w", p, err)
		}
		out = append(out, pid)
	}
	return out, nil
}
