package agent

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// late is when a test gives up; nothing here takes so long.
const late = time.Minute

// watching starts a watcher on a path whose present content is known to it.
func watching(t *testing.T, path string, change func(*watcher)) <-chan string {
	t.Helper()
	w := newWatcher(path, contentHash(path), slog.New(slog.NewTextHandler(t.Output(), nil)))
	w.settle, w.poll = 50*time.Millisecond, time.Hour // events only, unless a test says otherwise
	if change != nil {
		change(w)
	}
	ctx, cancel := context.WithCancel(context.Background())
	out := make(chan string)
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.run(ctx, out)
	}()
	t.Cleanup(func() { cancel(); <-done })
	return out
}

func next(t *testing.T, told <-chan string) string {
	t.Helper()
	select {
	case hash := <-told:
		return hash
	case <-time.After(late):
		t.Fatal("the change was not told")
		return ""
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestConfigMap: Kubernetes replaces a ConfigMap by renaming the link ..data,
// and removes what it named before. Every one of 20 swaps is told, for a
// policy that is a file and for one that is a directory.
func TestConfigMap(t *testing.T) {
	for _, policy := range []string{"policy.yaml", ""} {
		t.Run("policy="+policy, func(t *testing.T) {
			dir := t.TempDir()
			version := func(n int) string { return filepath.Join(dir, fmt.Sprintf("..v%d", n)) }
			// The old version stays for now, so that only the link tells.
			swap := func(n int) {
				must(t, os.Mkdir(version(n), 0o755))
				write(t, filepath.Join(version(n), "policy.yaml"), fmt.Sprintf("content: %d\n", n))
				must(t, os.Symlink(filepath.Base(version(n)), filepath.Join(dir, "..data_tmp")))
				must(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
			}
			swap(0)
			must(t, os.Symlink("..data/policy.yaml", filepath.Join(dir, "policy.yaml")))
			path := filepath.Join(dir, policy)
			told := watching(t, path, nil)
			seen := map[string]bool{contentHash(path): true}
			for n := 1; n <= 20; n++ {
				swap(n)
				hash := next(t, told)
				if hash != contentHash(path) || seen[hash] {
					t.Fatalf("swap %d: told %s, which is not its content", n, hash)
				}
				seen[hash] = true
				must(t, os.RemoveAll(version(n-1)))
			}
		})
	}
}

// quiet fails if anything is told for a while. That nothing comes can only be
// seen by waiting; a slow machine makes this pass, never fail.
func quiet(t *testing.T, told <-chan string, what string) {
	t.Helper()
	select {
	case <-told:
		t.Fatal(what)
	case <-time.After(200 * time.Millisecond):
	}
}

// TestSavedInSteps: a file that is truncated and written in pieces is told
// once, when it is whole.
func TestSavedInSteps(t *testing.T) {
	path := filepath.Join(t.TempDir(), "policy.yaml")
	write(t, path, "old\n")
	// Much longer than the pauses between the pieces.
	told := watching(t, path, func(w *watcher) { w.settle, w.longest = 4*time.Second, late })
	f, err := os.Create(path)
	must(t, err)
	for i := range 4 {
		quiet(t, told, "half a file was told")
		_, err := fmt.Fprintln(f, "line", i)
		must(t, err)
	}
	must(t, f.Close())
	if got := next(t, told); got != contentHash(path) {
		t.Fatal("what was told is not the whole file")
	}
}

// TestEmptyIsToldOnce: a file that was left empty is news, and not news again
// when it is written empty once more.
func TestEmptyIsToldOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "policy.yaml")
	write(t, path, "old\n")
	told := watching(t, path, func(w *watcher) { w.poll = 20 * time.Millisecond })
	write(t, path, "")
	empty := next(t, told)
	if empty != contentHash(path) {
		t.Fatal("told something else than the empty file")
	}
	write(t, path, "")
	quiet(t, told, "the empty file was told twice")
	write(t, path, "new\n")
	if got := next(t, told); got != contentHash(path) {
		t.Fatal("the new file was not told")
	}
}

// TestGoneAndBack: a file that is removed and made again, as editors do it by
// rename, is told each time.
func TestGoneAndBack(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "policy.yaml")
	write(t, path, "1\n")
	told := watching(t, path, nil)
	for n := 2; n < 5; n++ {
		must(t, os.Remove(path))
		if got := next(t, told); got != contentHash(path) {
			t.Fatal("told something else than that it is gone")
		}
		write(t, path+"~", fmt.Sprintln(n))
		must(t, os.Rename(path+"~", path))
		if got := next(t, told); got != contentHash(path) {
			t.Fatal("told something else than the new file")
		}
	}
}

// TestWithoutEvents: what raises no event (here a write through a mapping,
// inotify(7)) is found by polling.
func TestWithoutEvents(t *testing.T) {
	path := filepath.Join(t.TempDir(), "policy.yaml")
	write(t, path, "old\n")
	told := watching(t, path, func(w *watcher) { w.poll = 20 * time.Millisecond })
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	page, err := unix.Mmap(int(f.Fd()), 0, 4, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	must(t, err)
	defer func() { must(t, unix.Munmap(page)) }()
	// Once this is told, only the poll is left to look.
	write(t, path, "one\n")
	before := next(t, told)
	copy(page, "new\n")
	if got := next(t, told); got == before || got != contentHash(path) {
		t.Fatal("the mapped write was not told")
	}
}

// TestBusyDirectory: other files of the directory neither count nor keep the
// policy from settling.
func TestBusyDirectory(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "policy.yaml")
	write(t, path, "old\n")
	told := watching(t, path, func(w *watcher) { w.settle, w.longest = time.Second, 10*late })
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				_ = os.WriteFile(filepath.Join(dir, "other"), fmt.Append(nil, i), 0o600)
			}
		}
	}()
	defer func() { close(stop); <-stopped }()
	write(t, path, "new\n")
	if got := next(t, told); got != contentHash(path) {
		t.Fatal("the new file was not told")
	}
}

// TestContentHash: it depends on what Load reads, and on nothing else.
func TestContentHash(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "a.yaml"), "a\n")
	write(t, filepath.Join(dir, "b.yml"), "b\n")
	one := contentHash(dir)
	write(t, filepath.Join(dir, ".hidden.yaml"), "x\n")
	write(t, filepath.Join(dir, "README.md"), "x\n")
	if contentHash(dir) != one {
		t.Error("files that are not read count")
	}
	must(t, os.Rename(filepath.Join(dir, "b.yml"), filepath.Join(dir, "c.yml")))
	if contentHash(dir) == one {
		t.Error("a file's name does not count")
	}
	must(t, os.Rename(filepath.Join(dir, "c.yml"), filepath.Join(dir, "b.yml")))
	if contentHash(dir) != one {
		t.Error("the same content has another hash")
	}
	// What moves from one file to the next is another content.
	write(t, filepath.Join(dir, "a.yaml"), "")
	write(t, filepath.Join(dir, "b.yml"), "a\nb\n")
	if contentHash(dir) == one {
		t.Error("the borders of files do not count")
	}
	missing := contentHash(filepath.Join(dir, "none"))
	if again := contentHash(filepath.Join(dir, "none")); again != missing {
		t.Error("a file that is missing is not the same news twice")
	}
}
