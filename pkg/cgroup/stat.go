package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Stat is what one cgroup has and uses. Pointers are nil where there is
// nothing to say: no controller, no limit.
type Stat struct {
	CPU    CPUStat    `json:"cpu"`
	Memory MemoryStat `json:"memory"`
	// Pressure is for how long work has stood still for want of a resource.
	Pressure Pressure `json:"pressure"`
	// Processes counts those in the cgroup and in all cgroups below it.
	Processes int `json:"processes"`
}

// CPUStat is the processor's part. Usage is known without the cpu controller;
// weight, max, periods and throttling are not.
type CPUStat struct {
	Weight        *uint64 `json:"weight"` // 1 to 10000; nil without the controller, or while idle
	Max           *Quota  `json:"max"`    // nil: no quota
	Idle          bool    `json:"idle"`
	UsageUsec     uint64  `json:"usage_usec"`
	NrPeriods     uint64  `json:"nr_periods"` // periods in which a quota was counted
	NrThrottled   uint64  `json:"nr_throttled"`
	ThrottledUsec uint64  `json:"throttled_usec"`
	// NrBursts are the periods in which more than the quota was used, and BurstUsec how
	// much more.
	NrBursts  uint64 `json:"nr_bursts"`
	BurstUsec uint64 `json:"burst_usec"`
	// CPUs are those that it can use: cpuset.cpus.effective, its own or the nearest above.
	// nil where cgroup v2 has no cpuset.
	CPUs *string `json:"cpus"`
	// UclampMin and UclampMax are as the kernel shows them, percentages or "max"; "" where
	// it has none.
	UclampMin string `json:"uclamp_min,omitempty"`
	UclampMax string `json:"uclamp_max,omitempty"`
}

// Quota is cpu.max: so much processor time, over all CPUs, in each period.
type Quota struct {
	QuotaUsec  uint64 `json:"quota_usec"`
	PeriodUsec uint64 `json:"period_usec"`
	BurstUsec  uint64 `json:"burst_usec"` // of what earlier periods left, at once
}

// MemoryStat is the memory part, in bytes.
type MemoryStat struct {
	Current *uint64 `json:"current"` // nil without the controller
	High    *uint64 `json:"high"`    // nil: no limit
	Max     *uint64 `json:"max"`     // nil: no limit
	// OOMKills are processes that the kernel killed for want of memory, of the cgroup
	// and those below it; nil without the controller.
	OOMKills *uint64 `json:"oom_kills"`
}

// Pressure is the kernel's pressure stall information of a cgroup and all below it
// (Documentation/accounting/psi.rst), by resource.
type Pressure struct {
	CPU    Stalls `json:"cpu"`
	Memory Stalls `json:"memory"`
	IO     Stalls `json:"io"`
}

// Stalls are microseconds since the cgroup exists; nil where the kernel does not say
// (booted with psi=0, or cgroup.pressure is 0).
type Stalls struct {
	SomeUsec *uint64 `json:"some_usec"` // some of the processes waited
	FullUsec *uint64 `json:"full_usec"` // all that had work did
}

// Stat reads a cgroup. A cgroup that does not exist, or is removed while it is
// read, is ErrGone: drop its series, log nothing.
func (t *Tree) Stat(p string) (Stat, error) { return t.whole(p, t.stat) }

// Used is the part of Stat that goes on by itself: processor time and periods, memory in
// use, kills for want of it, pressure. It reads a third of the files, and none of what is
// below. ErrGone is as in Stat.
func (t *Tree) Used(p string) (Stat, error) { return t.whole(p, t.used) }

// whole reads what is of one cgroup, from beginning to end.
func (t *Tree) whole(p string, read func(string) (Stat, error)) (Stat, error) {
	before, err := t.Get(p)
	if err != nil {
		return Stat{}, err
	}
	s, err := read(p)
	if err != nil && !gone(err) {
		return Stat{}, fmt.Errorf("read cgroup %s: %w", p, err)
	}
	// Files that are missing mean "no controller" only if the cgroup is still
	// there, and still the same.
	after, errGet := t.Get(p)
	if err != nil || errGet != nil || after.ID != before.ID {
		return Stat{}, fmt.Errorf("read cgroup %s: %w", p, ErrGone)
	}
	return s, nil
}

func (t *Tree) used(p string) (Stat, error) {
	var s Stat
	usage, err := t.again(p, "cpu.stat")
	if err != nil {
		return s, err
	}
	for _, line := range strings.Split(usage, "\n") {
		key, value, _ := strings.Cut(line, " ")
		into := map[string]*uint64{
			"usage_usec": &s.CPU.UsageUsec, "nr_periods": &s.CPU.NrPeriods,
			"nr_throttled": &s.CPU.NrThrottled, "throttled_usec": &s.CPU.ThrottledUsec,
			"nr_bursts": &s.CPU.NrBursts, "burst_usec": &s.CPU.BurstUsec,
		}[key]
		if into == nil {
			continue
		}
		if *into, err = strconv.ParseUint(value, 10, 64); err != nil {
			return s, fmt.Errorf("cpu.stat: %w", err)
		}
	}
	if s.Memory.Current, err = t.limit(p, "memory.current"); err != nil {
		return s, err
	}
	if s.Memory.OOMKills, err = t.oomKills(p); err != nil {
		return s, err
	}
	for file, into := range map[string]*Stalls{"cpu.pressure": &s.Pressure.CPU, "memory.pressure": &s.Pressure.Memory, "io.pressure": &s.Pressure.IO} {
		if *into, err = t.stalls(p, file); err != nil {
			return s, err
		}
	}
	return s, nil
}

func (t *Tree) stat(p string) (Stat, error) {
	s, err := t.used(p)
	if err != nil {
		return s, err
	}
	idle, err := t.optional(p, "cpu.idle")
	if err != nil {
		return s, err
	}
	s.CPU.Idle = idle == "1"
	if !s.CPU.Idle {
		if s.CPU.Weight, err = t.limit(p, "cpu.weight"); err != nil {
			return s, err
		}
	}
	if s.Memory.High, err = t.limit(p, "memory.high"); err != nil {
		return s, err
	}
	if s.Memory.Max, err = t.limit(p, "memory.max"); err != nil {
		return s, err
	}
	max, err := t.optional(p, "cpu.max")
	if err != nil {
		return s, err
	}
	if quota, period, ok := strings.Cut(max, " "); ok && quota != "max" {
		q, err1 := strconv.ParseUint(quota, 10, 64)
		d, err2 := strconv.ParseUint(period, 10, 64)
		if err := errors.Join(err1, err2); err != nil {
			return s, fmt.Errorf("cpu.max: %w", err)
		}
		s.CPU.Max = &Quota{QuotaUsec: q, PeriodUsec: d}
		if burst, err := t.readUint(p, "cpu.max.burst"); err == nil {
			s.CPU.Max.BurstUsec = burst
		}
	}
	for above := p; s.CPU.CPUs == nil; above = path.Dir(above) {
		cpus, err := t.optional(above, "cpuset.cpus.effective")
		if err != nil {
			return s, err
		}
		if cpus != "" {
			s.CPU.CPUs = &cpus
		} else if above == "/" {
			break
		}
	}
	if s.CPU.UclampMin, err = t.optional(p, "cpu.uclamp.min"); err != nil {
		return s, err
	}
	if s.CPU.UclampMax, err = t.optional(p, "cpu.uclamp.max"); err != nil {
		return s, err
	}
	s.Processes, err = t.Processes(p)
	return s, err
}

// limit reads a file with a number; nil without the file, or if it says max.
func (t *Tree) limit(p, file string) (*uint64, error) {
	v, err := t.optional(p, file)
	if err != nil || v == "" || v == "max" {
		return nil, err
	}
	n, err := strconv.ParseUint(v, 10, 64)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return &n, nil
}

// oomKills reads memory.events; nil without the file.
func (t *Tree) oomKills(p string) (*uint64, error) {
	text, err := t.optional(p, "memory.events")
	if err != nil {
		return nil, err
	}
	for _, line := range strings.Split(text, "\n") {
		if count, ok := strings.CutPrefix(line, "oom_kill "); ok {
			n, err := strconv.ParseUint(count, 10, 64)
			if err != nil {
				return nil, fmt.Errorf("memory.events: %w", err)
			}
			return &n, nil
		}
	}
	return nil, nil
}

// stalls reads a file of pressure: "some avg10=0.00 avg60=0.00 avg300=0.00 total=123" and
// the same for full.
func (t *Tree) stalls(p, file string) (Stalls, error) {
	var s Stalls
	text, err := t.optional(p, file)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return s, nil // the file is there and PSI is turned off
	}
	if err != nil {
		return s, err
	}
	for _, line := range strings.Split(text, "\n") {
		kind, _, _ := strings.Cut(line, " ")
		_, total, ok := strings.Cut(line, " total=")
		if !ok {
			continue
		}
		n, err := strconv.ParseUint(total, 10, 64)
		if err != nil {
			return s, fmt.Errorf("%s: %w", file, err)
		}
		switch kind {
		case "some":
			s.SomeUsec = &n
		case "full":
			s.FullUsec = &n
		}
	}
	return s, nil
}

// optional reads a control file, "" if the cgroup has none of that name.
func (t *Tree) optional(p, file string) (string, error) {
	v, err := t.again(p, file)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return v, err
}

// Processes counts the processes in a cgroup and in all cgroups below it, or
// ErrGone. Threaded cgroups have no list of their own: their processes are
// counted in the cgroup above that is not threaded.
func (t *Tree) Processes(p string) (int, error) {
	all, err := t.walk(p)
	if err != nil {
		return 0, err
	}
	if len(all) == 0 {
		return 0, fmt.Errorf("cgroup %s: %w", p, ErrGone)
	}
	n := 0
	for _, c := range all {
		pids, err := t.pids(c.Path)
		if gone(err) || errors.Is(err, unix.EOPNOTSUPP) {
			continue
		}
		if err != nil {
			return n, fmt.Errorf("processes of cgroup %s: %w", c.Path, err)
		}
		n += len(pids)
	}
	return n, nil
}
