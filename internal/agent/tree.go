package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"bulkhead/pkg/cgroup"
)

// treeWatcher tells when directories of the cgroup tree come or go, so that a
// unit that starts is in its compartment before it connects. It only says that
// something happened: the tree itself says what.
//
// It asks inotify(7) itself, and not through fsnotify, which would tell of
// every cgroup.events that the kernel changes: two for each command that runs.
type treeWatcher struct {
	root string
	fd   int
	file *os.File
	// watched are the directories by path, with their cgroup id: one that is made
	// again needs a new watch.
	watched map[string]uint64
	wake    chan struct{}
}

const cgroupEvents = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_DELETE_SELF | unix.IN_ONLYDIR

func newTreeWatcher(root string) (*treeWatcher, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch cgroups: %w", err)
	}
	w := &treeWatcher{root: root, fd: fd, file: os.NewFile(uintptr(fd), "inotify"), watched: map[string]uint64{}, wake: make(chan struct{}, 1)}
	go func() {
		buf := make([]byte, 64<<10)
		for {
			// Which events does not matter, nor if some are lost: an overflow is one too.
			if _, err := w.file.Read(buf); err != nil {
				return // closed
			}
			select {
			case w.wake <- struct{}{}:
			default:
			}
		}
	}()
	return w, nil
}

// watch watches all of a walk. It returns true if a directory is new to it:
// what was made in that before it was watched, only another walk can tell.
func (w *treeWatcher) watch(all []cgroup.Cgroup) (more bool, err error) {
	there := make(map[string]uint64, len(all))
	for _, c := range all {
		if w.watched[c.Path] == c.ID {
			there[c.Path] = c.ID
			continue
		}
		if err == nil {
			_, e := unix.InotifyAddWatch(w.fd, filepath.Join(w.root, c.Path), cgroupEvents)
			switch e {
			case nil:
				there[c.Path] = c.ID
				more = true
			case unix.ENOENT, unix.ENODEV:
			case unix.ENOSPC:
				err = fmt.Errorf("watch cgroups: %w: more than fs.inotify.max_user_watches; those that are not watched are looked for every %v", e, tickEvery)
			default:
				err = fmt.Errorf("watch cgroup %s: %w", c.Path, e)
			}
		}
	}
	w.watched = there
	return more, err
}

func (w *treeWatcher) close() { w.file.Close() }

const (
	// lookEvery is how often the tree is looked at although nothing is told.
	lookEvery = 10 * time.Second
	// lookApart is between two looks while directories come and go all the time, or as
	// long as a look takes, which leaves the agent half of its time; but at most
	// lookLatest, on a machine that is so busy that everything takes long.
	lookApart  = 10 * time.Millisecond
	lookLatest = 50 * time.Millisecond
)

// watchTree looks at the tree, and again until all of it is watched.
func (a *agent) watchTree() {
	for range 10 {
		all := a.look()
		if all == nil {
			a.lookedAt = time.Time{} // again in a second
		}
		if a.watcher == nil || all == nil {
			return
		}
		more, err := a.watcher.watch(all)
		a.unwatched = err != nil
		a.complain("watch all cgroups", err)
		if !more {
			return
		}
	}
}
