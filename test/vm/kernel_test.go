package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestLocate: both layouts of Debian's packages are found, and nothing else.
func TestLocate(t *testing.T) {
	tree := func(names ...string) string {
		dir := t.TempDir()
		for _, n := range names {
			p := filepath.Join(dir, n)
			if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(p, nil, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		return dir
	}
	old := tree("boot/vmlinuz-6.1.0-1", "lib/modules/6.1.0-1/kernel/x.ko")
	k, err := locate(old, release{"6.1", "bookworm", "6.1."})
	if err != nil || k.version != "6.1.0-1" || !strings.HasSuffix(k.vmlinuz, "boot/vmlinuz-6.1.0-1") {
		t.Errorf("image in boot: %+v, %v", k, err)
	}
	k, err = locate(tree("usr/lib/modules/7.2/kernel/x.ko", "usr/lib/modules/7.2/vmlinuz"), release{"newest", "sid", ""})
	if err != nil || k.version != "7.2" || !strings.HasSuffix(k.vmlinuz, "modules/7.2/vmlinuz") {
		t.Errorf("image with the modules: %+v, %v", k, err)
	}
	if _, err := locate(old, release{"6.12", "trixie", "6.12."}); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("another version: %v", err)
	}
	if _, err := locate(t.TempDir(), release{"6.1", "bookworm", "6.1."}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("nothing there: %v, want %v", err, fs.ErrNotExist)
	}
	if _, err := locate(tree("boot/x", "lib/modules/6.1.0-1/kernel/x.ko"), release{"6.1", "bookworm", "6.1."}); err == nil {
		t.Error("no image: no error")
	}
}

// TestImagePackage picks the packages that a kernel is made of from what
// apt-cache says.
func TestImagePackage(t *testing.T) {
	const out = `linux-image-cloud-amd64
  Depends: linux-image-7.2.13+deb14-cloud-amd64
linux-base-7.2.13+deb14-cloud-amd64
linux-image-7.2.13+deb14-cloud-amd64
  Depends: linux-binary-7.2.13+deb14-cloud-amd64
linux-binary-7.2.13+deb14-cloud-amd64
linux-modules-7.2.13+deb14-cloud-amd64
linux-base
`
	got := strings.Join(imagePackage.FindAllString(out, -1), " ")
	want := "linux-image-7.2.13+deb14-cloud-amd64 linux-binary-7.2.13+deb14-cloud-amd64 linux-modules-7.2.13+deb14-cloud-amd64"
	if got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
