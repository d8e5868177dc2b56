package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"bulkhead/pkg/policy"
)

// enterTries bounds how often Enter makes a leaf again that was removed as
// empty before the process was in it.
const enterTries = 100

// Enter moves the calling process, all its threads, into a new leaf of a
// compartment's slice and returns the leaf's path. The slice must exist
// (EnsureSlices). The process stays there over execve(2), and so do the
// children it makes from now on; children that it already has do not follow.
//
// When it returns without an error the kernel itself has confirmed the place.
func (t *Tree) Enter(slice string) (string, error) {
	if !isSlice(slice) || slice == policy.ParentSlice {
		return "", fmt.Errorf("enter cgroup %s: not the slice of a compartment", slice)
	}
	if _, err := t.Get(slice); err != nil {
		return "", fmt.Errorf("enter slice: %w (is the agent running, and the feature in its policy?)", err)
	}
	return t.Backend.Enter(slice)
}

func (b cgroupfs) Enter(slice string) (string, error) {
	t := b.t
	var err error
	for i := range enterTries {
		var leaf string
		if leaf, err = t.enter(slice, i); err == nil {
			return leaf, nil
		}
		if !gone(err) && !errors.Is(err, ErrBusy) || t.Namespaced {
			break
		}
	}
	if gone(err) && t.Namespaced {
		err = fmt.Errorf("%w: processes cannot be moved across its border; run in the host's cgroup namespace", ErrNamespaced)
	}
	return "", fmt.Errorf("enter slice %s: %w", slice, err)
}

func (b cgroupfs) Move(leaf string, pid int) error {
	t := b.t
	for range enterTries {
		err := os.Mkdir(t.path(leaf), 0o755)
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("make cgroup %s: %w", leaf, err)
		}
		err = t.write(leaf, "cgroup.procs", strconv.Itoa(pid))
		if err == nil {
			return nil
		}
		// Somebody prunes what is empty.
		if !gone(err) || t.has(leaf, "cgroup.procs") {
			cure := ""
			if errors.Is(err, unix.EINVAL) {
				cure = " (a kernel with CONFIG_RT_GROUP_SCHED moves no realtime threads)"
			}
			return fmt.Errorf("move it to cgroup %s: %w%s", leaf, err, cure)
		}
	}
	return fmt.Errorf("move it to cgroup %s: %w", leaf, ErrGone)
}

// leafNameOf is the name of the calling process's leaf. Another pid namespace may have the
// same pid, and its process a leaf of this name; then this one gets a number.
func leafNameOf(try int) string {
	if try > 0 {
		return fmt.Sprintf("exec-%d-%d.scope", os.Getpid(), try)
	}
	return fmt.Sprintf("exec-%d.scope", os.Getpid())
}

func (t *Tree) enter(slice string, try int) (string, error) {
	leaf := path.Join(slice, leafNameOf(try))
	if err := os.Mkdir(t.path(leaf), 0o755); err != nil {
		if errors.Is(err, unix.EEXIST) {
			err = ErrBusy
		}
		return "", fmt.Errorf("make cgroup %s: %w", leaf, err)
	}
	// "0" is the writer itself, in whatever pid namespace.
	if err := t.write(leaf, "cgroup.procs", "0"); err != nil {
		_ = unix.Rmdir(t.path(leaf))
		return "", fmt.Errorf("enter cgroup %s: %w", leaf, err)
	}
	now, err := procCgroup("self")
	if err != nil {
		return "", err
	}
	// A private namespace shows another beginning of the path.
	if now != t.abs+leaf && !(t.Namespaced && strings.HasSuffix(now, leaf)) {
		return "", fmt.Errorf("enter cgroup %s: the process is in %s: another program moves processes too", leaf, now)
	}
	return leaf, nil
}
