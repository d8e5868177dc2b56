package metrics

import "bulkhead/pkg/cgroup"

// floor remembers the largest value exported of each series and never gives a
// smaller one.
//
// The bytes of an open connection are an estimate from the socket's own
// counters (sock_diag); at close the kernel program reads them once more and
// keeps its own sum. Between the two, or when a scrape falls exactly between a
// close and its entry in the sum, the total can come out lower than a moment
// before. To Prometheus a counter that falls has been reset, and it would add
// the whole counter again: a few bytes less would look like gigabytes more.
type floor map[series]uint64

type series struct{ feature, tenant, provider, direction string }

func (f floor) atLeast(s series, value uint64) uint64 {
	f[s] = max(f[s], value)
	return f[s]
}

// compartment names one compartment in labels.
type compartment struct{ feature, tenant string }

// Cgroup is what one cgroup of a compartment has used. The readings of one
// moment list each cgroup once.
type Cgroup struct {
	Feature, Tenant string
	ID              uint64
	Path            string      // below the agent's cgroup root, "/a/b"
	Stat            cgroup.Stat // what Tree.Used reads
}

// ledger sums what the cgroups of a compartment use, over the time that this
// agent looks. A cgroup that is removed takes its cpu.stat with it, so a plain
// sum over those that exist would fall, and to Prometheus that is a reset.
type ledger struct {
	seen  map[uint64]counters
	total map[compartment]counters
}

// counters are of one cgroup, or of all that a compartment has and had.
type counters struct {
	usage, periods, throttledPeriods, throttled uint64
	// oomKills are nil, and waiting and stalled lack a resource, where the kernel never said.
	oomKills         *uint64
	waiting, stalled map[string]uint64 // microseconds, by resource
}

func newLedger() *ledger {
	return &ledger{seen: map[uint64]counters{}, total: map[compartment]counters{}}
}

// add books what is new since the last call. Compartments that have no cgroups
// any more keep their total; those that never had any have none.
func (l *ledger) add(cgroups []Cgroup) map[compartment]counters {
	seen := make(map[uint64]counters, len(cgroups))
	for _, c := range own(cgroups) {
		before, now := l.seen[c.id], c.times
		// A nested cgroup that is read a moment later than the one around it can
		// make the difference smaller than before; it will catch up.
		now.usage = max(now.usage, before.usage)
		t := l.total[c.compartment]
		t.usage += now.usage - before.usage
		t.periods += rise(before.periods, now.periods)
		t.throttledPeriods += rise(before.throttledPeriods, now.throttledPeriods)
		t.throttled += rise(before.throttled, now.throttled)
		if now.oomKills != nil {
			*now.oomKills = max(*now.oomKills, zero(before.oomKills)) // as with usage
			n := zero(t.oomKills) + *now.oomKills - zero(before.oomKills)
			t.oomKills = &n
		}
		t.waiting = risen(t.waiting, before.waiting, now.waiting)
		t.stalled = risen(t.stalled, before.stalled, now.stalled)
		l.total[c.compartment] = t
		seen[c.id] = now
	}
	l.seen = seen
	return l.total
}

// rise is how much a counter rose. Throttling counters start again from zero
// when the cpu controller is turned off and on.
func rise(before, now uint64) uint64 {
	if now < before {
		return now
	}
	return now - before
}

// risen adds to total by how much each of now has risen.
func risen(total, before, now map[string]uint64) map[string]uint64 {
	if total == nil {
		total = map[string]uint64{}
	}
	for resource, n := range now {
		total[resource] += rise(before[resource], n)
	}
	return total
}

func zero(n *uint64) uint64 {
	if n == nil {
		return 0
	}
	return *n
}

type ownTimes struct {
	compartment
	id    uint64
	times counters
}

// own is what each cgroup used by itself. Periods and throttling are of the
// cgroup's own quota alone (kernel/sched/core.c, cpu_extra_stat_show). Kills are counted
// with the processes' own, as the time is. Pressure is no sum: that of a cgroup has in it
// all that is nested.
func own(cgroups []Cgroup) []ownTimes {
	total, kills := make(map[string]uint64, len(cgroups)), map[string]uint64{}
	for _, c := range cgroups {
		total[c.Path] = c.Stat.CPU.UsageUsec
		if c.Stat.Memory.OOMKills != nil {
			kills[c.Path] = *c.Stat.Memory.OOMKills
		}
	}
	usage, ownKills := cgroup.OwnUsage(total), cgroup.OwnUsage(kills)
	out := make([]ownTimes, len(cgroups))
	for i, c := range cgroups {
		now := counters{usage: usage[c.Path], periods: c.Stat.CPU.NrPeriods, throttledPeriods: c.Stat.CPU.NrThrottled, throttled: c.Stat.CPU.ThrottledUsec,
			waiting: map[string]uint64{}, stalled: map[string]uint64{}}
		if n, ok := ownKills[c.Path]; ok {
			now.oomKills = &n
		}
		p := c.Stat.Pressure
		for resource, s := range map[string]cgroup.Stalls{"cpu": p.CPU, "memory": p.Memory, "io": p.IO} {
			if s.SomeUsec != nil {
				now.waiting[resource] = *s.SomeUsec
			}
			if s.FullUsec != nil {
				now.stalled[resource] = *s.FullUsec
			}
		}
		out[i] = ownTimes{compartment{c.Feature, c.Tenant}, c.ID, now}
	}
	return out
}

// memoryNow is what the compartments' own cgroups have now, where the kernel says.
func memoryNow(cgroups []Cgroup) map[compartment]uint64 {
	total := map[string]uint64{}
	for _, c := range cgroups {
		if c.Stat.Memory.Current != nil {
			total[c.Path] = *c.Stat.Memory.Current
		}
	}
	byPath := cgroup.OwnUsage(total)
	out := map[compartment]uint64{}
	for _, c := range cgroups {
		if n, ok := byPath[c.Path]; ok {
			out[compartment{c.Feature, c.Tenant}] += n
		}
	}
	return out
}
