package metrics

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"bulkhead/pkg/conn"
	"bulkhead/pkg/policy"
)

// patience is how long a scrape waits for a reading before it answers with the
// last one. Prometheus's own default timeout is 10 s.
const patience = 800 * time.Millisecond

// Build says which program this is.
type Build struct{ Version, Revision, GoVersion string }

// Agent is the agent's own state at one moment.
type Agent struct {
	// Generation in force; 0 if none is.
	Generation uint32
	// LastReload is when a policy was last tried, well or not; the first is the
	// start.
	LastReload time.Time
	// LastReloadSuccessful: and it came into force.
	LastReloadSuccessful bool
	ReloadFailures       uint64
	SlotsReclaimed       uint64
	ReconcileErrors      uint64
	// ProcessesMoved were put into the compartment that they match, MembershipLost of
	// them were found elsewhere later. ProcessesSkipped matched and were not moved, by
	// reason.
	ProcessesMoved   uint64
	MembershipLost   uint64
	ProcessesSkipped map[string]uint64
	// Runtimes are the container runtimes that are asked.
	Runtimes        []Runtime
	ValuesCorrected []Corrected
}

// Runtime is a container runtime, by its socket.
type Runtime struct {
	Runtime, Socket string
	Up              bool
}

// Corrected counts, for one compartment, the values that others changed and the agent put
// back. The feature of the parent slice is "".
type Corrected struct {
	Feature string `json:"feature"`
	Tenant  string `json:"tenant"`
	Count   uint64 `json:"count"`
}

// Sources are read at scrape time, from several goroutines but each by one at
// a time.
type Sources struct {
	Connections func(context.Context) (*conn.Snapshot, error)
	CPU         func(context.Context) ([]Cgroup, error)
	// Agent returns at once.
	Agent func() Agent
}

// Collector makes metrics of Sources. It is safe for concurrent scrapes.
type Collector struct {
	build       Build
	agent       func() Agent
	connections source[*conn.Snapshot]
	cpu         source[[]Cgroup]
	d           descs

	mu     sync.Mutex // one scrape at a time remembers what it exported
	floor  floor
	ledger *ledger
}

// New returns a Collector that reads s.
func New(build Build, s Sources) *Collector {
	return &Collector{
		build:       build,
		agent:       s.Agent,
		connections: source[*conn.Snapshot]{read: s.Connections, patience: patience},
		cpu:         source[[]Cgroup]{read: s.CPU, patience: patience},
		d:           newDescs(),
		floor:       floor{},
		ledger:      newLedger(),
	}
}

// descs are all metrics that there are.
type descs struct {
	current, max, accepted, rejected, wouldReject *prometheus.Desc
	bytes, connections, open, idle                *prometheus.Desc
	cpuUsage, cpuPeriods                          *prometheus.Desc
	cpuThrottledPeriods, cpuThrottled             *prometheus.Desc
	waiting, stalled, oomKills, memory            *prometheus.Desc
	generation, reloadOK, reloadTime, reloadFails *prometheus.Desc
	reclaimed, reconcileErrors, corrected         *prometheus.Desc
	processesMoved, membershipLost, runtimeUp     *prometheus.Desc
	processesSkipped                              *prometheus.Desc
	slots, slotsMax, slotsFull                    *prometheus.Desc
	underflow, refusedEarlier, uncounted          *prometheus.Desc
	scrapeOK, buildInfo                           *prometheus.Desc
}

func newDescs() descs {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("bulkhead_"+name, help, labels, nil)
	}
	bulkhead := []string{"scope", "feature_group", "tenant", "provider"}
	reason := append(slices.Clone(bulkhead), "reason")
	route := []string{"feature_group", "tenant", "provider"}
	group := []string{"feature_group", "tenant"}
	return descs{
		current:     desc("concurrent_current", "Connections that hold the bulkhead now. One connection holds one bulkhead of each scope on its route: fix scope before summing.", bulkhead...),
		max:         desc("max_concurrent", "Limit of the bulkhead; absent when unlimited.", bulkhead...),
		accepted:    desc("accepted_total", "Connections that were let through the bulkhead.", bulkhead...),
		rejected:    desc("rejected_total", "Connections that were refused, by reason: full, counted on the most specific bulkhead that was; contended, which lost every race for its last places; exhausted, for which there was no room to be counted where the policy says exhausted: refuse, on the most specific that has a limit.", reason...),
		wouldReject: desc("would_reject_total", "Connections that mode observe let through and mode enforce would have refused.", reason...),
		bytes:       desc("bytes_total", "IP bytes, headers included, that a compartment exchanged with a provider; absent where bytes are not counted.", append(slices.Clone(route), "direction")...),
		connections: desc("connections_total", "Connections of a compartment to a provider that were let through.", route...),
		open:        desc("connections_open", "Connections that hold a slot now, by the state of their socket. In close_wait the provider has closed and the application has not: it still holds its place.", append(slices.Clone(route), "state")...),
		idle:        desc("connections_oldest_idle_seconds", "The longest time for which one of these connections has moved no data; absent where there are none.", append(slices.Clone(route), "state")...),

		cpuUsage:            desc("cpu_usage_seconds_total", "Processor time of the compartment's own cgroups. That of a compartment nested in them (a tenant's, in its feature's) counts there only, so a feature's is the sum over tenant.", group...),
		cpuPeriods:          desc("cpu_periods_total", "Periods in which a quota of the compartment's cgroups was counted.", group...),
		cpuThrottledPeriods: desc("cpu_throttled_periods_total", "Periods in which a quota of the compartment's cgroups ran out.", group...),
		cpuThrottled:        desc("cpu_throttled_seconds_total", "Time for which a quota held back the compartment's cgroups.", group...),

		waiting:  desc("pressure_waiting_seconds_total", "Time for which some of the processes of the compartment's cgroups, nested ones among them, waited for the resource (pressure stall information, some). Two cgroups that wait at the same time count twice.", append(slices.Clone(group), "resource")...),
		stalled:  desc("pressure_stalled_seconds_total", "Time for which all of the processes that had work waited for the resource (pressure stall information, full).", append(slices.Clone(group), "resource")...),
		oomKills: desc("memory_oom_kills_total", "Processes that the kernel killed for want of memory, in the compartment's own cgroups; those of a nested compartment count there only.", group...),
		memory:   desc("memory_current_bytes", "Memory of the compartment's own cgroups; that of a nested compartment counts there only.", group...),

		generation:  desc("policy_generation", "Generation of the policy in force; each time a policy is applied adds one."),
		reloadOK:    desc("policy_last_reload_successful", "Whether the policy that was tried last came into force. If not, the one before it is in force."),
		reloadTime:  desc("policy_last_reload_timestamp_seconds", "When a policy was last tried, successfully or not."),
		reloadFails: desc("policy_reload_failures_total", "Policies that were tried and refused."),

		reclaimed:       desc("slots_reclaimed_total", "Slots that reconciling freed because their connection was gone."),
		reconcileErrors: desc("reconcile_errors_total", "Network namespaces or tables that reconciling could not read; nothing is freed there."),

		processesMoved:   desc("processes_moved_total", "Processes that were moved into the compartment that they match by exe, cmdline or user."),
		runtimeUp:        desc("container_runtime_up", "1 if a container runtime that the agent asks answers, else 0; none while no feature matches containers.", "runtime", "socket"),
		membershipLost:   desc("membership_lost_total", "Processes that had been moved into their compartment and were found outside of it later."),
		processesSkipped: desc("processes_skipped_total", "Looks at a process that matches and may not be moved: it is in a unit, scope or directory that somebody manages (managed), in a container, protected, started by bulkhead exec (explicit), it ended meanwhile (gone), cannot be read (unreadable), or the kernel or systemd refused.", "reason"),
		corrected:        desc("cgroup_values_corrected_total", "Values of the compartment's cgroups that somebody else changed and the agent put back. Those of the slice around all compartments are in the one without feature_group.", group...),

		slots:          desc("slots", "Connections that hold a slot now."),
		slotsMax:       desc("slots_max", "Connections that can hold a slot at one time."),
		slotsFull:      desc("slots_full_total", "Connections that found no room for their slot: let through uncounted, or refused where the policy says exhausted: refuse."),
		underflow:      desc("underflow_total", "Releases that found a count of zero. Anything but 0 is a bug in bulkhead."),
		uncounted:      desc("uncounted_total", "Connections that were let through uncounted because an old entry of their socket did not go away in time; expected to stay 0."),
		refusedEarlier: desc("refused_earlier_total", "Connections that another program on the same hook had refused before bulkhead looked."),

		scrapeOK:  desc("scrape_success", "Whether the collector was read for this scrape; 0 means that its values are those of an earlier one, or missing.", "collector"),
		buildInfo: desc("build_info", "Always 1; the labels say which build this is.", "version", "revision", "goversion"),
	}
}

// Describe implements prometheus.Collector.
func (c *Collector) Describe(ch chan<- *prometheus.Desc) {
	d := c.d
	for _, desc := range []*prometheus.Desc{
		d.current, d.max, d.accepted, d.rejected, d.wouldReject, d.bytes, d.connections, d.open, d.idle,
		d.cpuUsage, d.cpuPeriods, d.cpuThrottledPeriods, d.cpuThrottled, d.waiting, d.stalled, d.oomKills, d.memory,
		d.generation, d.reloadOK, d.reloadTime, d.reloadFails, d.reclaimed, d.reconcileErrors, d.corrected,
		d.processesMoved, d.membershipLost, d.processesSkipped, d.runtimeUp,
		d.slots, d.slotsMax, d.slotsFull, d.underflow, d.refusedEarlier, d.uncounted, d.scrapeOK, d.buildInfo,
	} {
		ch <- desc
	}
}

// emit sends one metric.
type emit func(d *prometheus.Desc, t prometheus.ValueType, value float64, labels ...string)

// Collect implements prometheus.Collector.
func (c *Collector) Collect(ch chan<- prometheus.Metric) {
	var put emit = func(d *prometheus.Desc, t prometheus.ValueType, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, t, value, labels...)
	}
	// Both at once, so that two slow sources cost one patience.
	var wg sync.WaitGroup
	var cgroups []Cgroup
	var haveCPU, freshCPU bool
	wg.Go(func() { cgroups, haveCPU, freshCPU = c.cpu.get() })
	snap, have, fresh := c.connections.get()
	wg.Wait()

	put(c.d.scrapeOK, prometheus.GaugeValue, number(fresh), "connections")
	put(c.d.scrapeOK, prometheus.GaugeValue, number(freshCPU), "cgroups")
	put(c.d.buildInfo, prometheus.GaugeValue, 1, c.build.Version, c.build.Revision, c.build.GoVersion)
	c.collectAgent(put)

	c.mu.Lock()
	defer c.mu.Unlock()
	if have {
		c.collectConnections(put, snap)
	}
	if haveCPU {
		c.collectCPU(put, cgroups)
	}
}

func (c *Collector) collectAgent(put emit) {
	a := c.agent()
	put(c.d.generation, prometheus.GaugeValue, float64(a.Generation))
	put(c.d.reloadOK, prometheus.GaugeValue, number(a.LastReloadSuccessful))
	put(c.d.reloadTime, prometheus.GaugeValue, float64(a.LastReload.UnixMilli())/1000)
	put(c.d.reloadFails, prometheus.CounterValue, float64(a.ReloadFailures))
	put(c.d.reclaimed, prometheus.CounterValue, float64(a.SlotsReclaimed))
	put(c.d.reconcileErrors, prometheus.CounterValue, float64(a.ReconcileErrors))
	put(c.d.processesMoved, prometheus.CounterValue, float64(a.ProcessesMoved))
	put(c.d.membershipLost, prometheus.CounterValue, float64(a.MembershipLost))
	for _, r := range a.Runtimes {
		up := 0.0
		if r.Up {
			up = 1
		}
		put(c.d.runtimeUp, prometheus.GaugeValue, up, r.Runtime, r.Socket)
	}
	for reason, n := range a.ProcessesSkipped {
		put(c.d.processesSkipped, prometheus.CounterValue, float64(n), reason)
	}
	for _, k := range a.ValuesCorrected {
		put(c.d.corrected, prometheus.CounterValue, float64(k.Count), k.Feature, k.Tenant)
	}
}

func (c *Collector) collectConnections(put emit, s *conn.Snapshot) {
	for _, b := range s.Bulkheads {
		key := []string{b.Scope.String(), b.Feature, b.Tenant, b.Provider}
		put(c.d.current, prometheus.GaugeValue, float64(b.InUse), key...)
		if b.Limit != policy.Unlimited {
			put(c.d.max, prometheus.GaugeValue, float64(b.Limit), key...)
		}
		put(c.d.accepted, prometheus.CounterValue, float64(b.Accepted), key...)
		reasons(put, c.d.rejected, b.Rejected, key)
		reasons(put, c.d.wouldReject, b.WouldReject, key)
	}
	for _, t := range s.Traffic {
		put(c.d.connections, prometheus.CounterValue, float64(t.Connections), t.Feature, t.Tenant, t.Provider)
		if !t.Bytes {
			continue
		}
		for direction, n := range map[string]uint64{"tx": t.TxBytes, "rx": t.RxBytes} {
			n = c.floor.atLeast(series{t.Feature, t.Tenant, t.Provider, direction}, n)
			put(c.d.bytes, prometheus.CounterValue, float64(n), t.Feature, t.Tenant, t.Provider, direction)
		}
	}
	for k, g := range byState(s.Connections) {
		put(c.d.open, prometheus.GaugeValue, float64(g.n), k.feature, k.tenant, k.provider, k.state)
		put(c.d.idle, prometheus.GaugeValue, g.idle.Seconds(), k.feature, k.tenant, k.provider, k.state)
	}
	t := s.Totals
	put(c.d.slots, prometheus.GaugeValue, float64(t.Slots))
	put(c.d.slotsMax, prometheus.GaugeValue, float64(t.SlotsMax))
	put(c.d.slotsFull, prometheus.CounterValue, float64(t.SlotsFull))
	put(c.d.underflow, prometheus.CounterValue, float64(t.Underflow))
	put(c.d.refusedEarlier, prometheus.CounterValue, float64(t.RefusedEarlier))
	put(c.d.uncounted, prometheus.CounterValue, float64(t.Uncounted))
}

type stateKey struct{ feature, tenant, provider, state string }

type stateGroup struct {
	n    int
	idle time.Duration
}

// byState groups connections. States that hold a slot for moments only are one, and so are
// those that nobody saw, to keep the number of series small.
func byState(all []conn.Connection) map[stateKey]stateGroup {
	groups := map[stateKey]stateGroup{}
	for _, c := range all {
		state := c.State
		switch {
		case c.Proto == policy.UDP:
			state = "udp"
		case state != "established" && state != "close_wait" && state != "syn_sent":
			state = "other"
		}
		k := stateKey{c.Feature, c.Tenant, c.Provider, state}
		g := groups[k]
		groups[k] = stateGroup{g.n + 1, max(g.idle, c.Idle)}
	}
	return groups
}

// reasons exports a count for every reason, and "full" always: a series that
// appears with its first refusal hides that refusal from rate().
func reasons(put emit, d *prometheus.Desc, counts map[string]uint64, key []string) {
	if _, ok := counts["full"]; !ok {
		put(d, prometheus.CounterValue, 0, append(slices.Clone(key), "full")...)
	}
	for reason, n := range counts {
		put(d, prometheus.CounterValue, float64(n), append(slices.Clone(key), reason)...)
	}
}

func (c *Collector) collectCPU(put emit, cgroups []Cgroup) {
	const usec = 1e6
	for g, t := range c.ledger.add(cgroups) {
		put(c.d.cpuUsage, prometheus.CounterValue, float64(t.usage)/usec, g.feature, g.tenant)
		put(c.d.cpuPeriods, prometheus.CounterValue, float64(t.periods), g.feature, g.tenant)
		put(c.d.cpuThrottledPeriods, prometheus.CounterValue, float64(t.throttledPeriods), g.feature, g.tenant)
		put(c.d.cpuThrottled, prometheus.CounterValue, float64(t.throttled)/usec, g.feature, g.tenant)
		for resource, n := range t.waiting {
			put(c.d.waiting, prometheus.CounterValue, float64(n)/usec, g.feature, g.tenant, resource)
		}
		for resource, n := range t.stalled {
			put(c.d.stalled, prometheus.CounterValue, float64(n)/usec, g.feature, g.tenant, resource)
		}
		if t.oomKills != nil {
			put(c.d.oomKills, prometheus.CounterValue, float64(*t.oomKills), g.feature, g.tenant)
		}
	}
	for g, n := range memoryNow(cgroups) {
		put(c.d.memory, prometheus.GaugeValue, float64(n), g.feature, g.tenant)
	}
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
