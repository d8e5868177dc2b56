package agent

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Persistence is whether the pins in a bpf file system outlive the mount namespace that
// we are in.
type Persistence int

const (
	// PersistenceUnknown: it could not be looked at. So it is in a pid namespace of our
	// own, whose process 1 is not the host's.
	PersistenceUnknown Persistence = iota
	// Persists: the host has the file system mounted too.
	Persists
	// Private: only mount namespaces like ours have it, and the limits end with the last
	// of them.
	Private
)

// PrivateCure is what to do about pins that are Private.
const PrivateCure = "mount it on the host (mount -t bpf bpf /sys/fs/bpf) before this mount namespace is made; in a pod, a hostPath volume of the host's /sys/fs/bpf, with mountPropagation: Bidirectional if the pod is to mount it"

// initPidNamespace is the inode number of the first pid namespace (PROC_PID_INIT_INO,
// include/linux/proc_ns.h).
const initPidNamespace = 0xEFFFFFFC

// PinsPersist looks for the bpf file system at a path among the mounts of process 1,
// which lives as long as the host does. Each mount of type bpf is a file system of its
// own, unless it was bound or propagated from another, so the device number tells.
func PinsPersist(bpffs string) Persistence {
	var st, ns unix.Stat_t
	if unix.Stat(bpffs, &st) != nil || unix.Stat("/proc/self/ns/pid", &ns) != nil || ns.Ino != initPidNamespace {
		return PersistenceUnknown
	}
	table, err := os.ReadFile("/proc/1/mountinfo")
	if err != nil {
		return PersistenceUnknown
	}
	if hasDevice(string(table), st.Dev) {
		return Persists
	}
	return Private
}

// hasDevice says whether a mount table (proc_pid_mountinfo(5)) has a file system.
func hasDevice(table string, dev uint64) bool {
	want := fmt.Sprintf("%d:%d", unix.Major(dev), unix.Minor(dev))
	for line := range strings.Lines(table) {
		// ID PARENT MAJOR:MINOR ROOT POINT ...
		if w := strings.Fields(line); len(w) > 4 && w[2] == want {
			return true
		}
	}
	return false
}
