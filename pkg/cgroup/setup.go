package cgroup

import (
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"bulkhead/pkg/policy"
)

// hasValues reports whether a feature asks for any.
func hasValues(f *policy.Feature) bool {
	return f != nil && (f.CPU != nil || f.Memory != nil || f.Pids != nil)
}

// setupLimit bounds how long values wait for a runtime that has put a process in: a name says nothing about who
// it is.
const setupLimit = 10 * time.Second

// waits is a cgroup whose values wait.
type waits struct {
	id uint64
	// since is when there were processes first; zero while there are none.
	since time.Time
}

// settingUp reports whether a container runtime has still to write its own values into a cgroup that has appeared since
// the plan is in force: it makes one, puts a process of its own in, writes, and becomes the container. What we write
// before is lost, or worse: with cpu.idle the kernel refuses the runtime's cpu.weight (EINVAL, since 5.15), and the
// container does not start.
//
// Of a cgroup that no runtime has named only cpu.idle waits: limits of a burst do not.
func (t *Tree) settingUp(c Cgroup, w waits, now time.Time) (waits, bool) {
	name := path.Base(c.Path)
	if isUnit(name) && !strings.HasSuffix(name, ".scope") {
		return w, false // systemd writes before the first process
	}
	if w.id != c.ID {
		w = waits{id: c.ID}
	}
	pids, err := t.pids(c.Path)
	if err != nil {
		return w, false // gone; or threaded, which no runtime makes
	}
	if len(pids) == 0 {
		return w, !t.populated(c.Path)
	}
	if w.since.IsZero() {
		w.since = now
	}
	if now.Sub(w.since) >= setupLimit {
		return w, false
	}
	// A runtime's own are the first, and few.
	return w, slices.ContainsFunc(pids[:min(len(pids), 8)], ofRuntime)
}

// ofRuntime reports whether a process is a runtime's that has not become the container yet. runc says so in
// its name ("runc:[2:INIT]") once it is under way; before that it runs, as crun does, its own executable, or a
// copy of it that nobody can write to: in memory (/memfd:runc_cloned:/proc/self/exe) or a mount that is in no
// tree, whose path reads "/".
func ofRuntime(pid int) bool {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	if comm, err := os.ReadFile(filepath.Join(dir, "comm")); err != nil || strings.HasPrefix(string(comm), "runc:[") {
		return err == nil
	}
	exe, err := os.Readlink(filepath.Join(dir, "exe"))
	if err != nil {
		return false
	}
	if exe == "/" {
		return true
	}
	for _, runtime := range [...]string{"runc", "crun", "youki"} {
		if rest, ok := strings.CutPrefix(exe, "/memfd:"+runtime); ok || path.Base(exe) == runtime {
			return !ok || rest == "" || !isLetter(rest[0])
		}
	}
	return false
}

func isLetter(c byte) bool { return 'a' <= c && c <= 'z' }

// withoutIdle are a feature's values without those of the CPU, if it is to be idle; nil if that is no matter.
func withoutIdle(f *policy.Feature) *policy.Feature {
	if f.CPU == nil || !f.CPU.Idle {
		return nil
	}
	g := *f
	g.CPU = nil
	return &g
}

// Waiting says for how long cgroups may be left alone whose values wait until a container runtime has set them up; 0 if
// there are none. Processes may be in one at any time, and are not to outrun their limits.
func (k *Keeper) Waiting() time.Duration {
	if len(k.waiting) == 0 {
		return 0
	}
	for p, w := range k.waiting {
		if !w.since.IsZero() || containerOf(path.Base(p)) != "" {
			return 50 * time.Millisecond
		}
	}
	return time.Second
}

// Ready reports whether one of them need not wait any more, so that SetValues is to be called.
func (k *Keeper) Ready() bool {
	for p, w := range k.waiting {
		c, err := k.tree.Get(p)
		if err != nil || c.ID != w.id {
			return true
		}
		now, waits := k.tree.settingUp(c, w, time.Now())
		if !waits {
			return true
		}
		k.waiting[p] = now
	}
	return false
}
