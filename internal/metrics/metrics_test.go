package metrics

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"bulkhead/pkg/cgroup"
	"bulkhead/pkg/conn"
	"bulkhead/pkg/policy"
)

// aSnapshot has one of everything that is exported in its own way: a limit, no
// limit, reasons, bytes that are counted and bytes that are not.
func aSnapshot() *conn.Snapshot {
	return &conn.Snapshot{
		Generation: 3,
		Bulkheads: []conn.Bulkhead{
			{
				Key:   policy.Key{Scope: policy.ScopeFeatureProvider, Feature: "chat", Provider: "deepseek"},
				Limit: 15, InUse: 3, Peak: 9, Accepted: 120,
				Rejected: map[string]uint64{"full": 4, "contended": 1}, WouldReject: map[string]uint64{"full": 0},
			},
			{Key: policy.Key{Scope: policy.ScopeTenant, Tenant: "free"}, Limit: policy.Unlimited, InUse: 1, Accepted: 7},
			{Key: policy.Key{Scope: policy.ScopeProvider, Provider: "other"}, Limit: 0, WouldReject: map[string]uint64{"full": 2}},
		},
		Traffic: []conn.Traffic{
			{Feature: "chat", Provider: "deepseek", Connections: 120, TxBytes: 1000, RxBytes: 5000, Bytes: true},
			{Feature: "chat", Tenant: "free", Provider: "other", Connections: 9},
		},
		Connections: []conn.Connection{
			{Feature: "chat", Provider: "deepseek", State: "established", Idle: 2 * time.Second},
			{Feature: "chat", Provider: "deepseek", State: "established", Idle: 90 * time.Second},
			{Feature: "chat", Provider: "deepseek", State: "close_wait", Idle: time.Hour},
			{Feature: "chat", Provider: "deepseek", Proto: policy.UDP, State: "established", Idle: time.Second},
			{Feature: "chat", Provider: "deepseek", State: "fin_wait1"},
			{Feature: "chat", Provider: "deepseek"},
		},
		Totals: conn.Totals{Slots: 4, SlotsMax: 65536, SlotsFull: 1, RefusedEarlier: 2, Uncounted: 3},
	}
}

func ptr(n uint64) *uint64 { return &n }

func someCgroups() []Cgroup {
	return []Cgroup{
		{Feature: "chat", ID: 1, Path: "/bulkhead.slice/bulkhead-chat.slice", Stat: cgroup.Stat{CPU: cgroup.CPUStat{UsageUsec: 5_000_000, NrPeriods: 10, NrThrottled: 2, ThrottledUsec: 500_000}, Memory: cgroup.MemoryStat{Current: ptr(5000), OOMKills: ptr(3)}, Pressure: cgroup.Pressure{CPU: cgroup.Stalls{SomeUsec: ptr(2_000_000), FullUsec: ptr(1_000_000)}, IO: cgroup.Stalls{SomeUsec: ptr(250_000)}}}},
		{Feature: "chat", Tenant: "free", ID: 2, Path: "/bulkhead.slice/bulkhead-chat.slice/bulkhead-chat-free.slice", Stat: cgroup.Stat{CPU: cgroup.CPUStat{UsageUsec: 1_500_000}, Memory: cgroup.MemoryStat{Current: ptr(2000), OOMKills: ptr(2)}}},
		{Feature: "chat", ID: 3, Path: "/system.slice/chat.service", Stat: cgroup.Stat{CPU: cgroup.CPUStat{UsageUsec: 250_000, NrPeriods: 1}, Pressure: cgroup.Pressure{CPU: cgroup.Stalls{SomeUsec: ptr(500_000)}}}},
	}
}

func anAgent() Agent {
	return Agent{Generation: 3, LastReload: time.UnixMilli(1_700_000_000_250), LastReloadSuccessful: true, ReloadFailures: 2, SlotsReclaimed: 5, ReconcileErrors: 6,
		Runtimes:       []Runtime{{Runtime: "docker", Socket: "/run/docker.sock", Up: true}, {Runtime: "podman", Socket: "/run/podman/podman.sock"}},
		ProcessesMoved: 7, MembershipLost: 8, ProcessesSkipped: map[string]uint64{"managed": 9, "gone": 0},
		ValuesCorrected: []Corrected{{}, {Feature: "chat", Count: 7}, {Feature: "chat", Tenant: "free"}}}
}

func fixed() Sources {
	return Sources{
		Connections: func(context.Context) (*conn.Snapshot, error) { return aSnapshot(), nil },
		CPU:         func(context.Context) ([]Cgroup, error) { return someCgroups(), nil },
		Agent:       anAgent,
	}
}

func aBuild() Build { return Build{Version: "v1.2.3", Revision: "abc", GoVersion: "go1.26"} }

// TestExactly holds the contract's names and labels, to the letter.
func TestExactly(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(New(aBuild(), fixed()))
	got, err := testutil.GatherAndLint(reg)
	if err != nil || len(got) > 0 {
		t.Errorf("lint: %v %v", got, err)
	}
	want := `
# HELP bulkhead_accepted_total Connections that were let through the bulkhead.
# TYPE bulkhead_accepted_total counter
bulkhead_accepted_total{feature_group="",provider="",scope="tenant",tenant="free"} 7
bulkhead_accepted_total{feature_group="",provider="other",scope="provider",tenant=""} 0
bulkhead_accepted_total{feature_group="chat",provider="deepseek",scope="feature_provider",tenant=""} 120
# HELP bulkhead_build_info Always 1; the labels say which build this is.
# TYPE bulkhead_build_info gauge
bulkhead_build_info{goversion="go1.26",revision="abc",version="v1.2.3"} 1
# HELP bulkhead_bytes_total IP bytes, headers included, that a compartment exchanged with a provider; absent where bytes are not counted.
# TYPE bulkhead_bytes_total counter
bulkhead_bytes_total{direction="rx",feature_group="chat",provider="deepseek",tenant=""} 5000
bulkhead_bytes_total{direction="tx",feature_group="chat",provider="deepseek",tenant=""} 1000
# HELP bulkhead_cgroup_values_corrected_total Values of the compartment's cgroups that somebody else changed and the agent put back. Those of the slice around all compartments are in the one without feature_group.
# TYPE bulkhead_cgroup_values_corrected_total counter
bulkhead_cgroup_values_corrected_total{feature_group="",tenant=""} 0
bulkhead_cgroup_values_corrected_total{feature_group="chat",tenant=""} 7
bulkhead_cgroup_values_corrected_total{feature_group="chat",tenant="free"} 0
# HELP bulkhead_concurrent_current Connections that hold the bulkhead now. One connection holds one bulkhead of each scope on its route: fix scope before summing.
# TYPE bulkhead_concurrent_current gauge
bulkhead_concurrent_current{feature_group="",provider="",scope="tenant",tenant="free"} 1
bulkhead_concurrent_current{feature_group="",provider="other",scope="provider",tenant=""} 0
bulkhead_concurrent_current{feature_group="chat",provider="deepseek",scope="feature_provider",tenant=""} 3
# HELP bulkhead_connections_oldest_idle_seconds The longest time for which one of these connections has moved no data; absent where there are none.
# TYPE bulkhead_connections_oldest_idle_seconds gauge
bulkhead_connections_oldest_idle_seconds{feature_group="chat",provider="deepseek",state="close_wait",tenant=""} 3600
bulkhead_connections_oldest_idle_seconds{feature_group="chat",provider="deepseek",state="established",tenant=""} 90
bulkhead_connections_oldest_idle_seconds{feature_group="chat",provider="deepseek",state="other",tenant=""} 0
bulkhead_connections_oldest_idle_seconds{feature_group="chat",provider="deepseek",state="udp",tenant=""} 1
# HELP bulkhead_connections_open Connections that hold a slot now, by the state of their socket. In close_wait the provider has closed and the application has not: it still holds its place.
# TYPE bulkhead_connections_open gauge
bulkhead_connections_open{feature_group="chat",provider="deepseek",state="close_wait",tenant=""} 1
bulkhead_connections_open{feature_group="chat",provider="deepseek",state="established",tenant=""} 2
bulkhead_connections_open{feature_group="chat",provider="deepseek",state="other",tenant=""} 2
bulkhead_connections_open{feature_group="chat",provider="deepseek",state="udp",tenant=""} 1
# HELP bulkhead_connections_total Connections of a compartment to a provider that were let through.
# TYPE bulkhead_connections_total counter
bulkhead_connections_total{feature_group="chat",provider="deepseek",tenant=""} 120
bulkhead_connections_total{feature_group="chat",provider="other",tenant="free"} 9
# HELP bulkhead_container_runtime_up 1 if a container runtime that the agent asks answers, else 0; none while no feature matches containers.
# TYPE bulkhead_container_runtime_up gauge
bulkhead_container_runtime_up{runtime="docker",socket="/run/docker.sock"} 1
bulkhead_container_runtime_up{runtime="podman",socket="/run/podman/podman.sock"} 0
# HELP bulkhead_cpu_periods_total Periods in which a quota of the compartment's cgroups was counted.
# TYPE bulkhead_cpu_periods_total counter
bulkhead_cpu_periods_total{feature_group="chat",tenant=""} 11
bulkhead_cpu_periods_total{feature_group="chat",tenant="free"} 0
# HELP bulkhead_cpu_throttled_periods_total Periods in which a quota of the compartment's cgroups ran out.
# TYPE bulkhead_cpu_throttled_periods_total counter
bulkhead_cpu_throttled_periods_total{feature_group="chat",tenant=""} 2
bulkhead_cpu_throttled_periods_total{feature_group="chat",tenant="free"} 0
# HELP bulkhead_cpu_throttled_seconds_total Time for which a quota held back the compartment's cgroups.
# TYPE bulkhead_cpu_throttled_seconds_total counter
bulkhead_cpu_throttled_seconds_total{feature_group="chat",tenant=""} 0.5
bulkhead_cpu_throttled_seconds_total{feature_group="chat",tenant="free"} 0
# HELP bulkhead_cpu_usage_seconds_total Processor time of the compartment's own cgroups. That of a compartment nested in them (a tenant's, in its feature's) counts there only, so a feature's is the sum over tenant.
# TYPE bulkhead_cpu_usage_seconds_total counter
bulkhead_cpu_usage_seconds_total{feature_group="chat",tenant=""} 3.75
bulkhead_cpu_usage_seconds_total{feature_group="chat",tenant="free"} 1.5
# HELP bulkhead_max_concurrent Limit of the bulkhead; absent when unlimited.
# TYPE bulkhead_max_concurrent gauge
bulkhead_max_concurrent{feature_group="",provider="other",scope="provider",tenant=""} 0
bulkhead_max_concurrent{feature_group="chat",provider="deepseek",scope="feature_provider",tenant=""} 15
# HELP bulkhead_membership_lost_total Processes that had been moved into their compartment and were found outside of it later.
# TYPE bulkhead_membership_lost_total counter
bulkhead_membership_lost_total 8
# HELP bulkhead_memory_current_bytes Memory of the compartment's own cgroups; that of a nested compartment counts there only.
# TYPE bulkhead_memory_current_bytes gauge
bulkhead_memory_current_bytes{feature_group="chat",tenant=""} 3000
bulkhead_memory_current_bytes{feature_group="chat",tenant="free"} 2000
# HELP bulkhead_memory_oom_kills_total Processes that the kernel killed for want of memory, in the compartment's own cgroups; those of a nested compartment count there only.
# TYPE bulkhead_memory_oom_kills_total counter
bulkhead_memory_oom_kills_total{feature_group="chat",tenant=""} 1
bulkhead_memory_oom_kills_total{feature_group="chat",tenant="free"} 2
# HELP bulkhead_policy_generation Generation of the policy in force; each time a policy is applied adds one.
# TYPE bulkhead_policy_generation gauge
bulkhead_policy_generation 3
# HELP bulkhead_policy_last_reload_successful Whether the policy that was tried last came into force. If not, the one before it is in force.
# TYPE bulkhead_policy_last_reload_successful gauge
bulkhead_policy_last_reload_successful 1
# HELP bulkhead_policy_last_reload_timestamp_seconds When a policy was last tried, successfully or not.
# TYPE bulkhead_policy_last_reload_timestamp_seconds gauge
bulkhead_policy_last_reload_timestamp_seconds 1.70000000025e+09
# HELP bulkhead_policy_reload_failures_total Policies that were tried and refused.
# TYPE bulkhead_policy_reload_failures_total counter
bulkhead_policy_reload_failures_total 2
# HELP bulkhead_pressure_stalled_seconds_total Time for which all of the processes that had work waited for the resource (pressure stall information, full).
# TYPE bulkhead_pressure_stalled_seconds_total counter
bulkhead_pressure_stalled_seconds_total{feature_group="chat",resource="cpu",tenant=""} 1
# HELP bulkhead_pressure_waiting_seconds_total Time for which some of the processes of the compartment's cgroups, nested ones among them, waited for the resource (pressure stall information, some). Two cgroups that wait at the same time count twice.
# TYPE bulkhead_pressure_waiting_seconds_total counter
bulkhead_pressure_waiting_seconds_total{feature_group="chat",resource="cpu",tenant=""} 2.5
bulkhead_pressure_waiting_seconds_total{feature_group="chat",resource="io",tenant=""} 0.25
# HELP bulkhead_processes_moved_total Processes that were moved into the compartment that they match by exe, cmdline or user.
# TYPE bulkhead_processes_moved_total counter
bulkhead_processes_moved_total 7
# HELP bulkhead_processes_skipped_total Looks at a process that matches and may not be moved: it is in a unit, scope or directory that somebody manages (managed), in a container, protected, started by bulkhead exec (explicit), it ended meanwhile (gone), cannot be read (unreadable), or the kernel or systemd refused.
# TYPE bulkhead_processes_skipped_total counter
bulkhead_processes_skipped_total{reason="gone"} 0
bulkhead_processes_skipped_total{reason="managed"} 9
# HELP bulkhead_reconcile_errors_total Network namespaces or tables that reconciling could not read; nothing is freed there.
# TYPE bulkhead_reconcile_errors_total counter
bulkhead_reconcile_errors_total 6
# HELP bulkhead_refused_earlier_total Connections that another program on the same hook had refused before bulkhead looked.
# TYPE bulkhead_refused_earlier_total counter
bulkhead_refused_earlier_total 2
# HELP bulkhead_rejected_total Connections that were refused, by reason: full, counted on the most specific bulkhead that was; contended, which lost every race for its last places; exhausted, for which there was no room to be counted where the policy says exhausted: refuse, on the most specific that has a limit.
# TYPE bulkhead_rejected_total counter
bulkhead_rejected_total{feature_group="",provider="",reason="full",scope="tenant",tenant="free"} 0
bulkhead_rejected_total{feature_group="",provider="other",reason="full",scope="provider",tenant=""} 0
bulkhead_rejected_total{feature_group="chat",provider="deepseek",reason="contended",scope="feature_provider",tenant=""} 1
bulkhead_rejected_total{feature_group="chat",provider="deepseek",reason="full",scope="feature_provider",tenant=""} 4
# HELP bulkhead_scrape_success Whether the collector was read for this scrape; 0 means that its values are those of an earlier one, or missing.
# TYPE bulkhead_scrape_success gauge
bulkhead_scrape_success{collector="cgroups"} 1
bulkhead_scrape_success{collector="connections"} 1
# HELP bulkhead_slots Connections that hold a slot now.
# TYPE bulkhead_slots gauge
bulkhead_slots 4
# HELP bulkhead_slots_full_total Connections that found no room for their slot: let through uncounted, or refused where the policy says exhausted: refuse.
# TYPE bulkhead_slots_full_total counter
bulkhead_slots_full_total 1
# HELP bulkhead_slots_max Connections that can hold a slot at one time.
# TYPE bulkhead_slots_max gauge
bulkhead_slots_max 65536
# HELP bulkhead_slots_reclaimed_total Slots that reconciling freed because their connection was gone.
# TYPE bulkhead_slots_reclaimed_total counter
bulkhead_slots_reclaimed_total 5
# HELP bulkhead_uncounted_total Connections that were let through uncounted because an old entry of their socket did not go away in time; expected to stay 0.
# TYPE bulkhead_uncounted_total counter
bulkhead_uncounted_total 3
# HELP bulkhead_underflow_total Releases that found a count of zero. Anything but 0 is a bug in bulkhead.
# TYPE bulkhead_underflow_total counter
bulkhead_underflow_total 0
# HELP bulkhead_would_reject_total Connections that mode observe let through and mode enforce would have refused.
# TYPE bulkhead_would_reject_total counter
bulkhead_would_reject_total{feature_group="",provider="",reason="full",scope="tenant",tenant="free"} 0
bulkhead_would_reject_total{feature_group="",provider="other",reason="full",scope="provider",tenant=""} 2
bulkhead_would_reject_total{feature_group="chat",provider="deepseek",reason="full",scope="feature_provider",tenant=""} 0
`
	if err := testutil.GatherAndCompare(reg, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
}

// scrape asks as Prometheus does.
func scrape(t *testing.T, h http.Handler) string {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if w.Code != http.StatusOK {
		t.Fatalf("scrape: %d", w.Code)
	}
	body, err := io.ReadAll(w.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(body)
}

func handler(t *testing.T, c *Collector) http.Handler {
	t.Helper()
	h, err := Handler(c)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func wants(t *testing.T, text string, lines ...string) {
	t.Helper()
	for _, l := range lines {
		if !strings.Contains(text, l+"\n") {
			t.Errorf("missing: %s", l)
		}
	}
}

// TestNeverLess: a byte counter that reads a little lower than before is not
// exported lower, and goes on from there.
func TestNeverLess(t *testing.T) {
	s := fixed()
	snap := aSnapshot()
	s.Connections = func(context.Context) (*conn.Snapshot, error) { return snap, nil }
	h := handler(t, New(aBuild(), s))
	const series = `bulkhead_bytes_total{direction="tx",feature_group="chat",provider="deepseek",tenant=""} `
	for _, step := range []struct {
		read uint64
		want string
	}{{1000, "1000"}, {996, "1000"}, {1004, "1004"}} {
		snap = aSnapshot()
		snap.Traffic[0].TxBytes = step.read
		wants(t, scrape(t, h), series+step.want)
	}
}

// TestCgroupsComeAndGo: the time of a cgroup that is gone stays in the sum, and
// nothing is counted twice.
func TestCgroupsComeAndGo(t *testing.T) {
	l := newLedger()
	chat := compartment{"chat", ""}
	pod := func(id, usage uint64) Cgroup {
		return Cgroup{Feature: "chat", ID: id, Path: "/pod" + string(rune('0'+id)), Stat: cgroup.Stat{CPU: cgroup.CPUStat{UsageUsec: usage, NrPeriods: usage / 10}, Memory: cgroup.MemoryStat{OOMKills: ptr(usage / 100)}, Pressure: cgroup.Pressure{Memory: cgroup.Stalls{SomeUsec: &usage, FullUsec: ptr(usage / 2)}}}}
	}
	for i, step := range []struct {
		cgroups []Cgroup
		usage   uint64
	}{
		{[]Cgroup{pod(1, 100), pod(2, 40)}, 140},
		{[]Cgroup{pod(1, 100), pod(2, 40)}, 140},
		{[]Cgroup{pod(1, 130)}, 170},
		{[]Cgroup{pod(1, 130), pod(3, 50)}, 220},
		{nil, 220},
	} {
		got := l.add(step.cgroups)[chat]
		if got.usage != step.usage {
			t.Errorf("step %d: usage %d, want %d", i, got.usage, step.usage)
		}
		if got.waiting["memory"] != step.usage || got.stalled["memory"] != step.usage/2 || *got.oomKills != 1 {
			t.Errorf("step %d: waited %v, stalled %v, %d killed, want %d, half of it, and 1", i, got.waiting, got.stalled, *got.oomKills, step.usage)
		}
	}
	// The controller was turned off and on: periods start again at 0.
	l = newLedger()
	l.add([]Cgroup{pod(1, 100)})
	again := pod(1, 110)
	again.Stat.CPU.NrPeriods = 3
	if got := l.add([]Cgroup{again})[chat].periods; got != 13 {
		t.Errorf("periods %d, want 10 and then 3 more", got)
	}
}

// TestBrokenSource: what cannot be read does not take the rest with it.
func TestBrokenSource(t *testing.T) {
	s := fixed()
	var broken error
	s.Connections = func(context.Context) (*conn.Snapshot, error) {
		if broken != nil {
			return nil, broken
		}
		return aSnapshot(), nil
	}
	h := handler(t, New(aBuild(), s))
	broken = errors.New("no such map")
	first := scrape(t, h)
	wants(t, first, `bulkhead_scrape_success{collector="connections"} 0`, `bulkhead_scrape_success{collector="cgroups"} 1`, `bulkhead_policy_generation 3`)
	if strings.Contains(first, "bulkhead_accepted_total") {
		t.Error("counts without a reading")
	}
	broken = nil
	const accepted = `bulkhead_accepted_total{feature_group="",provider="",scope="tenant",tenant="free"} 7`
	wants(t, scrape(t, h), accepted, `bulkhead_scrape_success{collector="connections"} 1`)
	broken = errors.New("no such map")
	wants(t, scrape(t, h), accepted, `bulkhead_scrape_success{collector="connections"} 0`)
}

// TestDuplicate: one series twice leaves all the others.
func TestDuplicate(t *testing.T) {
	s := fixed()
	s.Connections = func(context.Context) (*conn.Snapshot, error) {
		snap := aSnapshot()
		snap.Traffic = append(snap.Traffic, snap.Traffic[0])
		return snap, nil
	}
	wants(t, scrape(t, handler(t, New(aBuild(), s))), `bulkhead_policy_generation 3`, `bulkhead_slots 4`)
}

// TestSlowSource: while a reading hangs, every scrape answers with the last
// values, and none starts another.
func TestSlowSource(t *testing.T) {
	var mu sync.Mutex
	readings := 0
	hang := make(chan struct{})
	hanging := make(chan struct{})
	s := fixed()
	s.Connections = func(context.Context) (*conn.Snapshot, error) {
		mu.Lock()
		readings++
		n := readings
		mu.Unlock()
		if n == 2 {
			close(hanging)
			<-hang
		}
		return aSnapshot(), nil
	}
	c := New(aBuild(), s)
	c.connections.patience = 10 * time.Millisecond
	h := handler(t, c)
	const slots = `bulkhead_slots 4`
	for {
		// A machine that is busy may miss even a source that answers at once.
		if strings.Contains(scrape(t, h), `bulkhead_scrape_success{collector="connections"} 1`) {
			break
		}
		mu.Lock()
		n := readings
		mu.Unlock()
		if n >= 2 {
			break
		}
	}
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			wants(t, scrape(t, h), slots, `bulkhead_scrape_success{collector="connections"} 0`, `bulkhead_scrape_success{collector="cgroups"} 1`)
		})
	}
	wg.Wait()
	<-hanging
	if readings != 2 {
		t.Errorf("%d readings, want the first and the one that hangs", readings)
	}
	close(hang)
	deadline := time.Now().Add(30 * time.Second)
	for !strings.Contains(scrape(t, h), `bulkhead_scrape_success{collector="connections"} 1`) {
		if time.Now().After(deadline) {
			t.Fatal("never fresh again")
		}
	}
}
