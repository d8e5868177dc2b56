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
		for _, h := range slices.Backward(hooks()) {
			if err := detachLink(filepath.Join(dir, h.name)); err != nil {
				return fmt.Errorf("detach %s: %w", h.name, err)
			}
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
