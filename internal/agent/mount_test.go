package agent

import (
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestPinsPersist: a file system that process 1 has is one that persists.
func TestPinsPersist(t *testing.T) {
	want := Persists
	var ns unix.Stat_t
	if err := unix.Stat("/proc/self/ns/pid", &ns); err != nil || ns.Ino != initPidNamespace {
		want = PersistenceUnknown // process 1 is not the host's
	}
	if got := PinsPersist("/proc"); got != want {
		t.Errorf("/proc: %v, want %v", got, want)
	}
	if got := PinsPersist(filepath.Join(t.TempDir(), "none")); got != PersistenceUnknown {
		t.Errorf("what is not there: %v", got)
	}

	const table = "23 27 0:22 / /sys rw,relatime - sysfs sysfs rw\n" +
		"41 23 0:32 / /sys/fs/bpf rw,nosuid shared:11 - bpf bpf rw,mode=700\n" +
		"60 27 8:1 /srv /srv rw - ext4 /dev/sda1 rw\n"
	for dev, want := range map[uint64]bool{unix.Mkdev(0, 32): true, unix.Mkdev(0, 33): false, unix.Mkdev(8, 1): true, unix.Mkdev(0, 3): false} {
		if got := hasDevice(table, dev); got != want {
			t.Errorf("device %d:%d: %t", unix.Major(dev), unix.Minor(dev), got)
		}
	}
}
