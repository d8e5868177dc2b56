package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"golang.org/x/sys/unix"
)

// Errors that callers tell apart. Every error of this package also names the
// cgroup or the mount that it is about.
var (
	// ErrNoCgroup2: no cgroup v2 file system is mounted.
	ErrNoCgroup2 = errors.New("no cgroup v2 file system is mounted")
	// ErrNotCgroup2: the given root is not a directory of a cgroup v2 mount.
	ErrNotCgroup2 = errors.New("not in a cgroup v2 file system")
	// ErrNamespaced: only the tree of a private cgroup namespace is visible, so
	// that neither the node's other cgroups nor absolute levels are known.
	ErrNamespaced = errors.New("private cgroup namespace")
	// ErrGone: the cgroup does not exist or was removed while it was read.
	ErrGone = errors.New("cgroup is gone")
	// ErrBusy: the cgroup has processes or children and cannot be removed.
	ErrBusy = errors.New("cgroup is in use")
	// ErrOutside: the process is not below the tree's root.
	ErrOutside = errors.New("outside the cgroup root")
)

// gone reports whether err means that a cgroup was removed: ENOENT from its
// path, ENODEV from a file that was opened before.
func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV)
}

// Condition is a shortfall that leaves everything else working. The fields are
// those of the conditions in status.
type Condition struct {
	Type    string `json:"type"`   // one of those below
	Status  string `json:"status"` // always "False"
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

// What conditions are about.
const (
	TypeCPU    = "CPU"
	TypeCPUSet = "CPUSet"
	TypeMemory = "Memory"
	TypePids   = "Pids"
	// TypePlacement is about processes that a policy names by what they are.
	TypePlacement = "Placement"
	// TypeScheduling: what is in force counts for less than it says.
	TypeScheduling = "Scheduling"
)

// Reasons of conditions.
const (
	// ReasonControllerOnV1: the controller is held by a cgroup v1 hierarchy.
	ReasonControllerOnV1 = "ControllerOnV1"
	// ReasonControllerNotEnabled: the kernel has it, an ancestor does not pass
	// it on.
	ReasonControllerNotEnabled = "ControllerNotEnabled"
	// ReasonControllerNotInKernel: not built in, or disabled at boot.
	ReasonControllerNotInKernel = "ControllerNotInKernel"
	// ReasonProcessesInside: processes sit in an inner cgroup.
	ReasonProcessesInside = "ProcessesInside"
	// ReasonThreaded: a threaded cgroup, in which controllers work otherwise.
	ReasonThreaded = "ThreadedCgroup"
	// ReasonRealtimeThreads: a kernel with CONFIG_RT_GROUP_SCHED does not give
	// the cpu controller to cgroups with realtime threads; any other does, and the
	// values do not hold for them.
	ReasonRealtimeThreads = "RealtimeThreads"
	// ReasonSchedExt: a BPF program schedules in place of the kernel.
	ReasonSchedExt = "SchedExt"
	// ReasonThrottled: a quota stalls a feature that is to answer at once.
	ReasonThrottled = "Throttled"
	// ReasonIdleNotInKernel: no cpu.idle; weight 1 is used instead.
	ReasonIdleNotInKernel = "IdleNotInKernel"
	// ReasonCPUsNotThere: CPUs that the node, or the cgroup above, does not have.
	ReasonCPUsNotThere = "CPUsNotThere"
	// ReasonNoCPULeft: all CPUs are another feature's own, so they are shared.
	ReasonNoCPULeft = "NoCPULeft"
	// ReasonBelowUse: a limit of memory or processes below present use was not written.
	ReasonBelowUse = "BelowUse"
	// ReasonOriginalUnsafe: a value was left alone because its original cannot
	// be kept where nobody else may forge it.
	ReasonOriginalUnsafe = "OriginalUnsafe"
	// ReasonSystemdUnreachable: a systemd runs the tree and cannot be asked, so what
	// is written to its files is lost with its next daemon-reload.
	ReasonSystemdUnreachable = "SystemdUnreachable"
	// ReasonNotLoose: a process that matches is in a unit, scope or container of somebody
	// else's, out of which none is moved.
	ReasonNotLoose = "NotLoose"
	// ReasonNamespaced: from a private cgroup namespace processes cannot be moved.
	ReasonNamespaced = "PrivateCgroupNamespace"
	// ReasonUnknownUser: a policy names a user that the node does not know.
	ReasonUnknownUser = "UnknownUser"
	// ReasonStays: a process that was moved cannot go back to where it came from.
	ReasonStays = "Stays"
	// ReasonNoCgroup: a container has none of its own.
	ReasonNoCgroup = "NoCgroupOfItsOwn"
	// ReasonRuntimeAway: a container runtime does not answer, or there is none.
	ReasonRuntimeAway = "RuntimeAway"
	// ReasonRuntimeNoEvents: a container runtime answers and does not tell of changes.
	ReasonRuntimeNoEvents = "RuntimeNoEvents"
	// ReasonWriteFailed: the kernel or another writer refused a value.
	ReasonWriteFailed = "WriteFailed"
)

// typeOf gives the condition type of a controller or of one of its files.
func typeOf(name string) string {
	switch name, _, _ = strings.Cut(name, "."); name {
	case cpuset:
		return TypeCPUSet
	case "memory":
		return TypeMemory
	case "pids":
		return TypePids
	}
	return TypeCPU
}

func shortfall(typ, reason, format string, args ...any) Condition {
	return Condition{Type: typ, Status: "False", Reason: reason, Message: fmt.Sprintf(format, args...)}
}

// Distinct keeps the first of equal conditions: one cause above many slices is
// told once.
func Distinct(conds []Condition) []Condition {
	seen := make(map[Condition]bool, len(conds))
	var out []Condition
	for _, c := range conds {
		if !seen[c] {
			seen[c] = true
			out = append(out, c)
		}
	}
	return out
}
