package conn

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Detach removes an instance's programs and pins: every connect is let through from
// then on, and nothing is counted. What takes slots goes first. It refuses with a
// BusyError while an agent runs. Removing nothing is ErrNotLoaded.
func Detach(o Options) error {
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
			if err := os.Remove(filepath.Join(dir, h.name)); err != nil && !errors.Is(err, os.ErrNotExist) {
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
