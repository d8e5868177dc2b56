package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Originals are kept in extended attributes of the cgroup's own directory:
// user.bulkhead.<root id>.<file>. They live exactly as long as the cgroup, need
// no file beside it, survive the agent, and need no CAP_SYS_ADMIN (trusted.*
// does). cgroupfs has user.* since kernel 5.7. The root's id keeps instances
// with different roots apart. See docs/decisions/originals-in-xattrs.md.
const xattrPrefix = "user.bulkhead."

// controllersAttr, on the tree's root, names the controllers that we turned on
// there.
const controllersAttr = "cgroup.subtree_control"

func (t *Tree) attr(file string) string {
	return xattrPrefix + strconv.FormatUint(t.ID, 10) + "." + file
}

// originals are the values on record for a cgroup, by file; empty for nearly
// every cgroup. An attribute that somebody else could have written is an
// error.
func (t *Tree) originals(p string) (map[string]string, error) {
	out := make(map[string]string)
	list, err := listxattr(t.path(p))
	if err != nil {
		return nil, fmt.Errorf("originals of cgroup %s: %w", p, err)
	}
	for _, attr := range list {
		file, ok := strings.CutPrefix(attr, t.attr(""))
		if !ok || file == controllersAttr {
			continue
		}
		if err := t.trusted(p, file); err != nil {
			return nil, fmt.Errorf("original of %s of cgroup %s: %w", file, t.path(p), err)
		}
		v, err := getxattr(t.path(p), attr)
		if err != nil {
			return nil, fmt.Errorf("originals of cgroup %s: %w", p, err)
		}
		out[file] = v
	}
	return out, nil
}

// record keeps a file's original.
func (t *Tree) record(p, file, value string) error {
	if err := t.trusted(p, file); err != nil {
		return err
	}
	if err := unix.Setxattr(t.path(p), t.attr(file), []byte(value), 0); err != nil {
		return fmt.Errorf("keep the original of %s of cgroup %s: %w", file, p, err)
	}
	return nil
}

// forget drops a file's original.
func (t *Tree) forget(p, file string) error {
	err := unix.Removexattr(t.path(p), t.attr(file))
	if err != nil && !errors.Is(err, unix.ENODATA) {
		return fmt.Errorf("drop the original of %s of cgroup %s: %w", file, p, err)
	}
	return nil
}

// trusted makes sure that who can write the attribute can write the file too.
// The owner of a delegated cgroup owns the directory but not its cpu.weight;
// through a forged original he could have us raise it for him.
func (t *Tree) trusted(p, file string) error {
	var dir, ctl unix.Stat_t
	if err := unix.Lstat(t.path(p), &dir); err != nil {
		return err
	}
	if dir.Mode&0o022 != 0 {
		return fmt.Errorf("not kept in %s: others than its owner may write there (mode %o)", t.path(p), dir.Mode&0o777)
	}
	if dir.Uid == 0 {
		return nil
	}
	if err := unix.Lstat(t.path(p)+"/"+file, &ctl); err != nil {
		return err
	}
	if ctl.Uid != dir.Uid {
		return fmt.Errorf("not kept in %s: it is delegated to uid %d, who may not change %s himself", t.path(p), dir.Uid, file)
	}
	return nil
}

// recordControllers adds controllers to those that we turned on at the root.
func (t *Tree) recordControllers(names []string) error {
	on := t.recordedControllers()
	for _, c := range names {
		if !slices.Contains(on, c) {
			on = append(on, c)
		}
	}
	return t.record("/", controllersAttr, strings.Join(on, " "))
}

func (t *Tree) recordedControllers() []string {
	if t.trusted("/", controllersAttr) != nil {
		return nil
	}
	v, err := getxattr(t.Dir, t.attr(controllersAttr))
	if err != nil {
		return nil
	}
	return strings.Fields(v)
}

func listxattr(p string) ([]string, error) {
	buf, err := grow(func(b []byte) (int, error) { return unix.Llistxattr(p, b) })
	if err != nil {
		return nil, err
	}
	var out []string
	for _, name := range bytes.Split(buf, []byte{0}) {
		if len(name) > 0 {
			out = append(out, string(name))
		}
	}
	return out, nil
}

func getxattr(p, attr string) (string, error) {
	buf, err := grow(func(b []byte) (int, error) { return unix.Lgetxattr(p, attr, b) })
	return string(buf), err
}

// grow calls f with a larger buffer until the answer fits.
func grow(f func([]byte) (int, error)) ([]byte, error) {
	for size := 512; ; size *= 2 {
		buf := make([]byte, size)
		n, err := f(buf)
		if err == nil {
			return buf[:n], nil
		}
		if !errors.Is(err, unix.ERANGE) || size > 1<<17 {
			return nil, err
		}
	}
}
