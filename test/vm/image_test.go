package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestArchive: directories come once and before what is in them, and every
// part begins on a multiple of four, as the kernel requires.
func TestArchive(t *testing.T) {
	var a archive
	a.file("/bin/deep/x", 0o755, []byte("12345"))
	a.file("bin/deep/y", 0o644, nil)
	got := list(t, a.bytes())
	want := []string{"040755 bin 0", "040755 bin/deep 0", "100755 bin/deep/x 5", "100644 bin/deep/y 0", "000000 TRAILER!!! 0"}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// list reads a newc archive: mode, name and size of each entry.
func list(t *testing.T, b []byte) []string {
	t.Helper()
	var out []string
	for len(b) > 0 {
		var magic, ino, mode, uid, gid, nlink, mtime, size, maj, min, rmaj, rmin, namesize, check int
		if _, err := fmt.Sscanf(string(b[:110]), "%6d%8x%8x%8x%8x%8x%8x%8x%8x%8x%8x%8x%8x%8x",
			&magic, &ino, &mode, &uid, &gid, &nlink, &mtime, &size, &maj, &min, &rmaj, &rmin, &namesize, &check); err != nil || magic != 70701 {
			t.Fatalf("magic %d: %v", magic, err)
		}
		out = append(out, fmt.Sprintf("%06o %s %d", mode, b[110:110+namesize-1], size))
		b = b[(110+namesize+3)&^3:]
		b = b[(size+3)&^3:]
	}
	return out
}

// TestShellLine: sh gives the arguments back as they were.
func TestShellLine(t *testing.T) {
	args := []string{"printf", `<%s>`, "a b", "", `it's`, `$HOME "x" \`, "*"}
	out, err := exec.Command("sh", "-c", shellLine(args)).Output()
	if want := "<" + strings.Join(args[2:], "><") + ">"; err != nil || string(out) != want {
		t.Errorf("%q, %v, want %q", out, err, want)
	}
}

// TestDynamicRefused: what could not start in the guest is refused here.
func TestDynamicRefused(t *testing.T) {
	var a archive
	err := addFiles(&a, guestFile{"/bin/sh", "/bin/x"})
	if err == nil || !strings.Contains(err.Error(), "dynamic") {
		t.Errorf("/bin/sh: %v", err)
	}
}

// TestAddDirectory: a directory goes in whole.
func TestAddDirectory(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "sub/f"), []byte("x"), 0o640); err != nil {
		t.Fatal(err)
	}
	var a archive
	if err := addFiles(&a, guestFile{dir, "/data"}); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(list(t, a.bytes()), "\n"); !strings.Contains(got, "100640 data/sub/f 1") {
		t.Errorf("got\n%s", got)
	}
}

// TestMissingModule: a module that a kernel has not is an error, not a guest
// without it; one that is built in is neither.
func TestMissingModule(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "kernel"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "modules.builtin"), []byte("kernel/net/ipv4/tcp-diag.ko\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if order, err := loadOrder(dir, []string{"tcp_diag"}); err != nil || len(order) != 0 {
		t.Errorf("built in: %v, %v", order, err)
	}
	if _, err := loadOrder(dir, []string{"veth"}); err == nil {
		t.Error("missing: no error")
	}
}
