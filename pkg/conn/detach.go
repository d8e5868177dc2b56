package conn

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf/link"
)

// Detach removes an instance's programs and pins: every connect is let through from
// then on, and nothing is counted. What takes slots goes first. It refuses with a
// BusyError while an agent runs. Removing nothing is ErrNotLoaded.
func Detach(o Options) error {
	if err := o.checkBPFFS(); err != nil {
		return err
	}
	if _, err := os.Stat(o.dir()); errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%s: %w", o.dir(), ErrNotLoaded)
	}
	lock, err := o.lock()
	if err != nil {
		return err
	}
	defer lock.Close()
	entries, err := os.ReadDir(o.dir())
	if err != nil {
		return fmt.Errorf("pin directory: %w", err)
	}
	for _, e := range entries {
		// Every layout, and what an interrupted start left.
		if !strings.HasPrefix(e.Name(), "v") && !strings.HasPrefix(e.Name(), staging) {
			continue
		}
		dir := filepath.Join(o.dir(), e.Name())
		pins, err := os.ReadDir(dir)
		if err != nil {
			return fmt.Errorf("pin directory: %w", err)
		}
		if err := detachAll(dir, pins); err != nil {
			return err
		}
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("remove pins: %w", err)
		}
	}
	if err := os.Remove(o.dir()); err != nil {
		return fmt.Errorf("remove pin directory: %w", err)
	}
	if len(entries) == 0 {
		return fmt.Errorf("%s: %w", o.dir(), ErrNotLoaded)
	}
	return nil
}

// detachAll detaches the links among the pins of a directory: what takes slots first, and
// last what only another release has.
func detachAll(dir string, pins []os.DirEntry) error {
	var names []string
	for _, h := range slices.Backward(hooks()) {
		names = append(names, h.name)
	}
	for _, p := range pins {
		if strings.HasPrefix(p.Name(), linkPrefix) && !slices.Contains(names, p.Name()) {
			names = append(names, p.Name())
		}
	}
	for _, name := range names {
		if err := detachLink(filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("detach %s: %w", filepath.Join(dir, name), err)
		}
	}
	return nil
}

// detachLink detaches a pinned link and removes its pin. To remove the pin alone
// would detach too, but at some later moment: the kernel puts a link that an
// inode let go of aside for a worker (bpf_link_put, kernel/bpf/syscall.c).
func detachLink(path string) error {
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer l.Close()
	if err := l.Detach(); err != nil {
		return err
	}
	return os.Remove(path)
}
