package cgroup

import (
	"errors"
	"io/fs"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// mostHeld bounds how many control files are held open, of which the kernel keeps 5 KiB each (a page of it
	// what was read). Of those beyond, each is opened when it is read.
	mostHeld = 4096
	// heldFor is how long one is held that nobody reads: of a cgroup that is gone nobody does.
	heldFor = 2 * time.Minute
)

// held are control files that are read again and again, open. To read one takes the kernel 1 to 3 us, and
// opening and closing it six times that.
//
// They are as good as files opened anew: one of a cgroup that was removed, or of a controller that was turned off,
// answers ENODEV whatever has its path by then (kernfs_seq_start, fs/kernfs/file.c), and is opened again.
type held struct {
	mu    sync.RWMutex // for writing: to close, so that nobody reads what another file has become
	files map[string]*heldFile
	most  int
	swept time.Time
}

type heldFile struct {
	fd   int
	used atomic.Int64 // when it was read last, Unix seconds
}

// Hold has what is read again and again held open, for who does so every few seconds. It is called before anything is read.
func (t *Tree) Hold() {
	var files unix.Rlimit
	most := mostHeld
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &files) == nil {
		most = int(min(files.Cur/4, mostHeld)) // the others are for connections to us
	}
	t.held = &held{files: map[string]*heldFile{}, most: most, swept: time.Now()}
}

// again is read for what is read again and again.
func (t *Tree) again(p, file string) (string, error) {
	name := filepath.Join(t.path(p), file)
	b, err := t.held.read(name)
	return strings.TrimSuffix(string(b), "\n"), err
}

func (h *held) read(name string) ([]byte, error) {
	if h == nil {
		return readFile(name)
	}
	now := time.Now()
	h.mu.RLock()
	f, late := h.files[name], now.Sub(h.swept) > heldFor
	if f != nil {
		f.used.Store(now.Unix())
		b, err := readAll(f.fd, name)
		h.mu.RUnlock()
		if !errors.Is(err, unix.ENODEV) {
			return b, err
		}
		h.drop(name, f)
	} else {
		h.mu.RUnlock()
	}
	if late {
		h.sweep(now)
	}
	fd, err := openFile(name)
	if err != nil {
		return nil, err
	}
	b, err := readAll(fd, name)
	if err != nil || !h.keep(name, fd, now) {
		unix.Close(fd)
	}
	return b, err
}

// keep holds a file, if there is room and nobody else holds it by now.
func (h *held) keep(name string, fd int, now time.Time) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.files) >= h.most || h.files[name] != nil {
		return false
	}
	f := &heldFile{fd: fd}
	f.used.Store(now.Unix())
	h.files[name] = f
	return true
}

// drop closes one.
func (h *held) drop(name string, f *heldFile) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.files[name] == f {
		delete(h.files, name)
		unix.Close(f.fd)
	}
}

// sweep closes those that nobody has read for a while.
func (h *held) sweep(now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.swept = now
	for name, f := range h.files {
		if now.Unix()-f.used.Load() > int64(heldFor/time.Second) {
			delete(h.files, name)
			unix.Close(f.fd)
		}
	}
}

func openFile(name string) (int, error) {
	fd, err := ignoringEINTR(func() (int, error) { return unix.Open(name, unix.O_RDONLY|unix.O_CLOEXEC, 0) })
	if err != nil {
		return -1, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return fd, nil
}
