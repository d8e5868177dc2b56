package agent

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"

	"bulkhead/pkg/policy"
)

// watcher tells when the policy files have content that it has not told of.
//
// It never decides by events alone: they only make it look again, and it looks
// every poll anyway. Network file systems have no events, an event can be lost
// with the directory it was watched through, and Kubernetes replaces a
// ConfigMap by renaming a link two steps away from the file.
type watcher struct {
	path string
	log  *slog.Logger
	// settle is how long nothing must have happened before the content is
	// looked at, so that a save in several writes is seen once it is whole.
	settle time.Duration
	// longest bounds the wait when it never settles.
	longest time.Duration
	poll    time.Duration
	// told is the hash that was told last.
	told string
}

func newWatcher(path, told string, log *slog.Logger) *watcher {
	return &watcher{path: path, told: told, log: log, settle: 300 * time.Millisecond, longest: 2 * time.Second, poll: 5 * time.Second}
}

// run sends the hash of every new content to out, until ctx is done. A content
// that was replaced before out took it is not sent.
func (w *watcher) run(ctx context.Context, out chan<- string) {
	var events <-chan fsnotify.Event
	var errors <-chan error
	fs, err := fsnotify.NewWatcher()
	if err != nil {
		w.log.Warn("the policy files are not watched, only polled", "every", w.poll.String(), "error", err.Error())
	} else {
		defer fs.Close()
		events, errors = fs.Events, fs.Errors
	}
	poll := time.NewTicker(w.poll)
	defer poll.Stop()

	var (
		look   <-chan time.Time // fires when the content has settled; nil if nothing has happened
		latest time.Time
		news   string
		send   chan<- string // out while there is news
	)
	touched := func() {
		if look == nil {
			latest = time.Now().Add(w.longest)
		}
		look = time.After(min(w.settle, time.Until(latest)))
	}
	trail := w.watch(fs)
	// What happened before there was a watch is found by looking once.
	touched()
	for {
		select {
		case <-ctx.Done():
			return
		case send <- news:
			w.told, send = news, nil
		case e := <-events:
			if e.Op != fsnotify.Chmod && trail.concerns(e.Name) {
				trail = w.watch(fs)
				touched()
			}
		case err := <-errors:
			w.log.Warn("watching the policy files", "error", err.Error())
			touched()
		case <-poll.C:
			trail = w.watch(fs)
			if look == nil && contentHash(w.path) != w.told {
				touched()
			}
		case <-look:
			look = nil
			trail = w.watch(fs)
			if news = contentHash(w.path); news != w.told {
				send = out
			} else {
				send = nil
			}
		}
	}
}

// watch makes fs watch the directories through which the path leads now.
func (w *watcher) watch(fs *fsnotify.Watcher) trail {
	t := trailOf(w.path)
	if fs == nil {
		return t
	}
	for _, dir := range fs.WatchList() {
		if !t.dirs[dir] {
			_ = fs.Remove(dir) // it may have gone by itself
		}
	}
	for dir := range t.dirs {
		if !slices.Contains(fs.WatchList(), dir) {
			// A directory that is gone will be missed by the next look too.
			_ = fs.Add(dir)
		}
	}
	return t
}

// trail is the way to the policy's content: every name that, replaced, would
// lead elsewhere.
type trail struct {
	dirs  map[string]bool // real directories, to be watched
	names map[string]bool // entries of these that matter
	all   string          // a directory in which every policy file matters, or ""
}

// concerns reports whether an event on a name can have changed the content. In
// a busy directory (/tmp) most do not, and must not keep it from settling.
func (t trail) concerns(name string) bool {
	return t.names[name] || t.all != "" && filepath.Dir(name) == t.all && isPolicyFile(filepath.Base(name))
}

// trailOf follows a path and, if it is a directory, the policy files in it.
func trailOf(path string) trail {
	t := trail{dirs: map[string]bool{}, names: map[string]bool{}}
	abs, err := filepath.Abs(path)
	if err != nil {
		abs = path
	}
	end := t.follow(abs)
	info, err := os.Stat(end)
	if err != nil || !info.IsDir() {
		return t
	}
	t.dirs[end], t.all = true, end
	entries, err := os.ReadDir(end)
	if err != nil {
		return t
	}
	for _, e := range entries {
		if isPolicyFile(e.Name()) {
			t.follow(filepath.Join(end, e.Name()))
		}
	}
	return t
}

// maxLinks is the kernel's own limit (MAXSYMLINKS, path_resolution(7)).
const maxLinks = 40

// follow walks an absolute path as the kernel does and notes every symbolic
// link and the last name. It returns where the path leads.
func (t trail) follow(abs string) string {
	at, rest, links := "/", strings.Split(abs, "/"), 0
	note := func(name string) {
		t.dirs[filepath.Dir(name)] = true
		t.names[name] = true
	}
	for len(rest) > 0 {
		name := rest[0]
		rest = rest[1:]
		switch name {
		case "", ".":
			continue
		case "..":
			at = filepath.Dir(at)
			continue
		}
		next := filepath.Join(at, name)
		target, err := os.Readlink(next)
		if err != nil || links == maxLinks {
			at = next
			continue
		}
		links++
		note(next)
		rest = append(strings.Split(target, "/"), rest...)
		if filepath.IsAbs(target) {
			at = "/"
		}
	}
	note(at)
	return at
}

// isPolicyFile is policy.Load's rule for the files of a directory.
func isPolicyFile(name string) bool {
	ext := filepath.Ext(name)
	return !strings.HasPrefix(name, ".") && (ext == ".yaml" || ext == ".yml")
}

// contentHash is a digest of all that policy.Load would read at path. What
// cannot be read has a digest too, of why, so that it is news once.
func contentHash(path string) string {
	h := sha256.New()
	add := func(name string) {
		fmt.Fprintf(h, "%d %s\n", len(name), name)
		err := regular(name)
		var f *os.File
		if err == nil {
			f, err = os.Open(name)
		}
		if err == nil {
			defer f.Close()
			var n int64
			n, err = io.Copy(h, io.LimitReader(f, policy.MaxFileSize+1))
			fmt.Fprintf(h, "\n%d\n", n)
		}
		if err != nil {
			fmt.Fprintf(h, "%v\n", err)
		}
	}
	info, err := os.Stat(path)
	if err != nil || !info.IsDir() {
		add(path)
		return hex.EncodeToString(h.Sum(nil))
	}
	entries, err := os.ReadDir(path) // sorted
	if err != nil {
		fmt.Fprintf(h, "%v\n", err)
	}
	for _, e := range entries {
		if isPolicyFile(e.Name()) {
			add(filepath.Join(path, e.Name()))
		}
	}
	return hex.EncodeToString(h.Sum(nil))
}

// regular refuses what is no regular file, behind all links: to open a FIFO waits for
// somebody to write, and the agent with it.
func regular(name string) error {
	info, err := os.Stat(name)
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", name)
	}
	return err
}
