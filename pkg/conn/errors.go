package conn

import (
	"errors"
	"fmt"
)

// What callers may want to tell apart. Everything else that this package returns
// is a wrapped error of the kernel with what it was about.
var (
	// ErrNotLoaded: nothing is pinned, so no agent has applied a policy here.
	ErrNotLoaded = errors.New("nothing is loaded")
	// ErrOtherRelease: what is pinned is of a release whose maps have another layout.
	ErrOtherRelease = errors.New("another release of bulkhead is in force")
	// ErrNoBPFFS: the directory for the pins is not on a bpf file system.
	ErrNoBPFFS = errors.New("not a bpf file system")
	// ErrNoCgroup2: the root to attach to is not a cgroup v2 directory.
	ErrNoCgroup2 = errors.New("not a cgroup v2 directory")
	// ErrNoPlan: asked for a change of members before any plan was applied.
	ErrNoPlan = errors.New("no plan has been applied yet")
	// ErrFull: a plan needs more of something than the kernel maps hold.
	ErrFull = errors.New("plan is too large for the kernel maps")
	// ErrInTheWay: a program of somebody else is attached in a way that excludes ours.
	ErrInTheWay = errors.New("another program is in the way")
	// ErrForeign: what is pinned is not ours, not of this layout, or incomplete.
	ErrForeign = errors.New("pins are not usable")
)

// BusyError says that another agent holds the pins.
type BusyError struct {
	Dir string
	PID int // 0 if the kernel does not tell (another pid namespace)
}

func (e *BusyError) Error() string {
	if e.PID == 0 {
		return fmt.Sprintf("another agent already runs on %s", e.Dir)
	}
	return fmt.Sprintf("another agent already runs on %s: pid %d", e.Dir, e.PID)
}
