package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Effective is what the CPU values of a cgroup come to in its place: a quota holds for all
// below it, and a weight counts among siblings only.
type Effective struct {
	// CPU is the smallest quota of the cgroup and of those around it, in CPUs; nil if none has
	// one. A runtime that looks at its own cgroup alone does not see it (Go's GOMAXPROCS).
	CPU *float64 `json:"effective_cpu"`
	// CPUFrom is the cgroup that sets it, "" if none does. Outside of the tree it is a path of
	// the host.
	CPUFrom string `json:"effective_cpu_from"`
	// Share is the part of the parent's time that it gets while it and all its siblings want
	// it: its weight of WeightSum, which is that of Siblings and its own; 0 if it is idle.
	// Siblings without processes want nothing. Nil without the cpu controller.
	Share     *float64 `json:"weight_share"`
	WeightSum uint64   `json:"weight_sum"`
	Siblings  int      `json:"siblings"`
}

// Effective reads it, or ErrGone.
func (t *Tree) Effective(p string) (Effective, error) {
	var e Effective
	c, err := t.Get(p)
	if err != nil {
		return e, err
	}
	if err := t.smallestQuota(&e, c.Path); err != nil {
		return e, fmt.Errorf("quotas around cgroup %s: %w", p, err)
	}
	if c.Path == "/" {
		return e, nil
	}
	own, ok := t.weight(c.Path)
	if !ok {
		return e, nil
	}
	e.WeightSum = own
	parent := path.Dir(c.Path)
	names, err := subdirs(t.path(parent))
	if err != nil {
		return e, fmt.Errorf("siblings of cgroup %s: %w", p, err)
	}
	for _, name := range names {
		s := path.Join(parent, name)
		if s == c.Path {
			continue
		}
		if events, err := t.read(s, "cgroup.events"); err != nil || !strings.Contains(events, "populated 1") {
			continue // gone, or nobody in it
		}
		if w, ok := t.weight(s); ok {
			e.WeightSum += w
			e.Siblings++
		}
	}
	share := 1.0 // alone, if idle
	if e.WeightSum > 0 {
		share = float64(own) / float64(e.WeightSum)
	}
	e.Share = &share
	return e, nil
}

// weight is that of a cgroup; 0 if it is idle, where the file reads 0 or 1 by the kernel's version.
func (t *Tree) weight(p string) (uint64, bool) {
	w, err := t.readUint(p, "cpu.weight")
	if idle, errIdle := t.read(p, "cpu.idle"); errIdle == nil && idle == "1" {
		w = 0
	}
	return w, err == nil
}

// smallestQuota looks from p up to the root of the hierarchy, or of what is mounted of it.
func (t *Tree) smallestQuota(e *Effective, p string) error {
	for dir := t.path(p); ; dir = filepath.Dir(dir) {
		text, err := os.ReadFile(filepath.Join(dir, "cpu.max"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		quota, period, ok := strings.Cut(strings.TrimSpace(string(text)), " ")
		if ok && quota != "max" {
			q, err1 := strconv.ParseFloat(quota, 64)
			d, err2 := strconv.ParseFloat(period, 64)
			if err := errors.Join(err1, err2); err != nil || d <= 0 {
				return fmt.Errorf("cpu.max of %s is %q", dir, text)
			}
			if cpus := q / d; e.CPU == nil || cpus < *e.CPU {
				e.CPU, e.CPUFrom = &cpus, dir
				if rel, err := filepath.Rel(t.Dir, dir); err == nil && rel != ".." && !strings.HasPrefix(rel, "../") {
					e.CPUFrom = path.Join("/", rel)
				}
			}
		}
		if dir == t.Mount || dir == "/" {
			return nil
		}
	}
}

// Thread is a thread under a realtime policy. Neither weight nor quota of its cgroup holds for it.
type Thread struct {
	PID      int // of its process
	TID      int
	Comm     string
	Policy   string // SCHED_FIFO, SCHED_RR or SCHED_DEADLINE
	Priority uint32
}

// String names it as messages do.
func (t Thread) String() string {
	s := fmt.Sprintf("%d %s %s", t.PID, t.Comm, t.Policy)
	if t.Policy != "SCHED_DEADLINE" {
		s += fmt.Sprintf(" %d", t.Priority)
	}
	return s
}

// listed names threads for a message: at most five.
func listed(threads []Thread) string {
	const most = 5
	var names []string
	for i, t := range threads {
		if i == most {
			names = append(names, fmt.Sprintf("and %d more", len(threads)-most))
			break
		}
		names = append(names, t.String())
	}
	return strings.Join(names, ", ")
}

// Unweighed is the condition of realtime threads in a cgroup that has values.
func (t *Tree) Unweighed(p string, threads []Thread) Condition {
	return shortfall(TypeScheduling, ReasonRealtimeThreads,
		"%d realtime threads in cgroup %s run before all ordinary ones, and neither its weight nor its quota holds for them: %s; chrt -o -p 0 PID makes one ordinary, CPUSchedulingPolicy= in a unit is where it may come from",
		len(threads), t.path(p), listed(threads))
}

// Realtime are the threads under a realtime policy in cgroups and below them, by the innermost of paths. It asks for
// each thread that there is, so it is for commands and not for an agent's ticks. What ends meanwhile is left out, and
// so are threads of a pid namespace that is not seen from here.
func (t *Tree) Realtime(paths []string) (map[string][]Thread, error) {
	listed := make(map[string]bool, len(paths))
	for _, p := range paths {
		listed[p] = true
	}
	all, err := t.Walk()
	if err != nil {
		return nil, err
	}
	out := map[string][]Thread{}
	in := map[string]string{} // the innermost listed at or above a cgroup
	for _, c := range all {
		in[c.Path] = in[path.Dir(c.Path)]
		if listed[c.Path] {
			in[c.Path] = c.Path
		}
		of := in[c.Path]
		if of == "" {
			continue
		}
		text, err := t.read(c.Path, "cgroup.threads")
		if err != nil {
			continue // gone
		}
		for _, line := range strings.Fields(text) {
			tid, err := strconv.Atoi(line)
			if err != nil || tid == 0 {
				continue
			}
			if thread, ok := realtime(tid); ok {
				out[of] = append(out[of], thread)
			}
		}
	}
	return out, nil
}

// realtimePolicy names a policy of sched(7) that weights do not touch; "" for the others.
func realtimePolicy(policy uint32) string {
	switch policy {
	case unix.SCHED_FIFO:
		return "SCHED_FIFO"
	case unix.SCHED_RR:
		return "SCHED_RR"
	case unix.SCHED_DEADLINE:
		return "SCHED_DEADLINE"
	}
	return ""
}

func realtime(tid int) (Thread, bool) {
	attr, err := unix.SchedGetAttr(tid, 0)
	if err != nil || realtimePolicy(attr.Policy) == "" {
		return Thread{}, false
	}
	out := Thread{PID: tid, TID: tid, Policy: realtimePolicy(attr.Policy), Priority: attr.Priority}
	dir := filepath.Join("/proc", strconv.Itoa(tid))
	comm, err := os.ReadFile(filepath.Join(dir, "comm"))
	if err != nil {
		return Thread{}, false
	}
	out.Comm = strings.TrimSuffix(string(comm), "\n")
	status, _ := os.ReadFile(filepath.Join(dir, "status"))
	for _, line := range strings.Split(string(status), "\n") {
		if n, ok := strings.CutPrefix(line, "Tgid:"); ok {
			if pid, err := strconv.Atoi(strings.TrimSpace(n)); err == nil {
				out.PID = pid
			}
		}
	}
	return out, true
}

// SchedExtDir is where a kernel with sched_ext (6.12) tells of it.
const SchedExtDir = "/sys/kernel/sched_ext"

// Unscheduled is the condition of weights while another scheduler runs; false if none does.
func Unscheduled(dir string) (Condition, bool) {
	name := SchedExt(dir)
	if name == "" {
		return Condition{}, false
	}
	return shortfall(TypeScheduling, ReasonSchedExt,
		"the sched_ext scheduler %s runs ordinary threads in place of the kernel's own (%s): cpu.weight and cpu.idle count only as far as it heeds them, and so may cpu.max; stop the program that loaded it (echo S >/proc/sysrq-trigger ends any)", name, dir), true
}

// SchedExt is the name of the scheduler that a BPF program is and that runs ordinary threads in place of the kernel's
// own; "" if none does. What it makes of weights is up to it.
func SchedExt(dir string) string {
	state, err := os.ReadFile(filepath.Join(dir, "state"))
	if err != nil || strings.TrimSpace(string(state)) == "disabled" {
		return ""
	}
	ops, err := os.ReadFile(filepath.Join(dir, "root", "ops"))
	if name := strings.TrimSpace(string(ops)); err == nil && name != "" {
		return name
	}
	return "unnamed (" + strings.TrimSpace(string(state)) + ")"
}
