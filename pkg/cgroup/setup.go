package cgroup

import (
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"bulkhead/pkg/policy"
)

// hasValues reports whether a feature asks for any.
func hasValues(f *policy.Feature) bool {
	return f != nil && (f.CPU != nil || f.Memory != nil || f.Pids != nil)
}

// settingUp reports whether a container runtime has still to write its own values into a cgroup: it
// makes one, puts a process of its own in, writes, and becomes the container. What we write before is lost,
// or worse: with cpu.idle the kernel refuses the runtime's cpu.weight (EINVAL, since 5.15), and the container
// does not start. appeared is whether the cgroup has come since the plan is in force: who made one that is
// empty is not done with it.
//
// systemd writes the values of its units before the first process; but a scope may be a container's.
func (t *Tree) settingUp(c Cgroup, appeared bool) bool {
	name := path.Base(c.Path)
	if isUnit(name) && !strings.HasSuffix(name, ".scope") {
		return false
	}
	pids, err := t.pids(c.Path)
	if err != nil {
		return false // gone; or threaded, which no runtime makes
	}
	if len(pids) == 0 {
		events, err := t.read(c.Path, "cgroup.events")
		return err == nil && strings.Contains(events, "populated 0") && (appeared || containerOf(name) != "")
	}
	// A runtime's own are the first, and few.
	for _, pid := range pids[:min(len(pids), 8)] {
		if ofRuntime(pid) {
			return true
		}
	}
	return false
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

// Waiting reports whether there are cgroups whose values wait until a container runtime has set them up.
func (k *Keeper) Waiting() bool { return len(k.waiting) > 0 }

// Ready reports whether one of them need not wait any more, so that SetValues is to be called.
func (k *Keeper) Ready() bool {
	for p, id := range k.waiting {
		c, err := k.tree.Get(p)
		if err != nil || c.ID != id || !k.tree.settingUp(c, true) {
			return true
		}
	}
	return false
}
