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
	Path            string // below the agent's cgroup root, "/a/b"
	CPU             cgroup.CPUStat
}

// ledger sums what the cgroups of a compartment use, over the time that this
// agent looks. A cgroup that is removed takes its cpu.stat with it, so a plain
// sum over those that exist would fall, and to Prometheus that is a reset.
type ledger struct {
	seen  map[uint64]cpuTimes
	total map[compartment]cpuTimes
}

type cpuTimes struct{ usage, periods, throttledPeriods, throttled uint64 }

func newLedger() *ledger {
	return &ledger{seen: map[uint64]cpuTimes{}, total: map[compartment]cpuTimes{}}
}

// add books what is new since the last call. Compartments that have no cgroups
// any more keep their total; those that never had any have none.
func (l *ledger) add(cgroups []Cgroup) map[compartment]cpuTimes {
	seen := make(map[uint64]cpuTimes, len(cgroups))
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

type ownTimes struct {
	compartment
	id    uint64
	times cpuTimes
}

// own is what each cgroup used by itself. Periods and throttling are of the
// cgroup's own quota alone (kernel/sched/core.c, cpu_extra_stat_show).
func own(cgroups []Cgroup) []ownTimes {
	total := make(map[string]uint64, len(cgroups))
	for _, c := range cgroups {
		total[c.Path] = c.CPU.UsageUsec
	}
	usage := cgroup.OwnUsage(total)
	out := make([]ownTimes, len(cgroups))
	for i, c := range cgroups {
		out[i] = ownTimes{compartment{c.Feature, c.Tenant}, c.ID,
			cpuTimes{usage[c.Path], c.CPU.NrPeriods, c.CPU.NrThrottled, c.CPU.ThrottledUsec}}
	}
	return out
}
