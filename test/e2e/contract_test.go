package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"bulkhead/internal/kerneltest"
)

// The documents of the contract, field by field. What the contract does not have is
// marked `extra`, and may be missing. Null is only for pointers.

type status struct {
	SchemaVersion int           `json:"schema_version"`
	Time          time.Time     `json:"time"`
	Node          string        `json:"node"`
	Agent         agentStatus   `json:"agent"`
	Generation    int           `json:"generation"`
	PolicyHash    string        `json:"policy_hash"`
	Mode          string        `json:"mode"`
	Compartments  []compartment `json:"compartments"`
	Bulkheads     []bulkhead    `json:"bulkheads"`
	Traffic       []traffic     `json:"traffic"`
	Conditions    []condition   `json:"conditions"`
	Slots         any           `json:"slots" extra:""`
}

// agentStatus has nothing but running while no agent runs.
type agentStatus struct {
	Running   bool      `json:"running"`
	Version   string    `json:"version" extra:""`
	PID       int       `json:"pid" extra:""`
	Since     time.Time `json:"since" extra:""`
	Processes processes `json:"processes" extra:""`
	Runtimes  []asked   `json:"container_runtimes" extra:""`
	// Nil while no agent runs.
	ValuesCorrected *int `json:"values_corrected" extra:""`
}

// asked is a container runtime.
type asked struct {
	Runtime    string `json:"runtime"`
	Socket     string `json:"socket"`
	Answers    bool   `json:"answers"`
	Error      string `json:"error"`
	Containers int    `json:"containers"`
}

type compartment struct {
	Feature   string   `json:"feature"`
	Tenant    string   `json:"tenant"`
	Class     string   `json:"class"`
	Processes int      `json:"processes"`
	Cgroups   []member `json:"cgroups"`

	ValuesCorrected *int `json:"values_corrected" extra:""`
}

type member struct {
	Path    string `json:"path"`
	ID      uint64 `json:"id"`
	Adopted bool   `json:"adopted"`
	CPU     struct {
		Weight        *int   `json:"weight"`
		Max           *quota `json:"max"`
		Idle          bool   `json:"idle"`
		UsageUsec     uint64 `json:"usage_usec"`
		NrPeriods     uint64 `json:"nr_periods"`
		NrThrottled   uint64 `json:"nr_throttled"`
		ThrottledUsec uint64 `json:"throttled_usec"`
		// Of kernels and policies that have them.
		NrBursts  uint64  `json:"nr_bursts" extra:""`
		BurstUsec uint64  `json:"burst_usec" extra:""`
		CPUs      *string `json:"cpus" extra:""`
		UclampMin string  `json:"uclamp_min" extra:""`
		UclampMax string  `json:"uclamp_max" extra:""`
	} `json:"cpu"`
	Container  *contained `json:"container" extra:""`
	CompetesIn string     `json:"competes_in" extra:""`
	Memory     any        `json:"memory" extra:""`

	EffectiveCPU     *float64 `json:"effective_cpu" extra:""`
	EffectiveCPUFrom string   `json:"effective_cpu_from" extra:""`
	WeightShare      *float64 `json:"weight_share" extra:""`
	WeightSum        int      `json:"weight_sum" extra:""`
	Siblings         int      `json:"siblings" extra:""`
	RealtimeThreads  int      `json:"realtime_threads" extra:""`

	Pressure any `json:"pressure" extra:""`
}

// contained says whose cgroup it is, if it is a container's.
type contained struct {
	CgroupID uint64 `json:"cgroup_id"`
	Runtime  string `json:"runtime"`
	Name     string `json:"name"`
	Image    string `json:"image"`
}

type quota struct {
	QuotaUsec  uint64 `json:"quota_usec"`
	PeriodUsec uint64 `json:"period_usec"`
	BurstUsec  uint64 `json:"burst_usec" extra:""`
}

type bulkhead struct {
	Scope       string         `json:"scope"`
	Feature     string         `json:"feature"`
	Tenant      string         `json:"tenant"`
	Provider    string         `json:"provider"`
	Limit       *int           `json:"limit"`
	InUse       int            `json:"in_use"`
	Peak        int            `json:"peak"`
	Accepted    int            `json:"accepted"`
	Rejected    map[string]int `json:"rejected"`
	WouldReject map[string]int `json:"would_reject"`
	Draining    bool           `json:"draining" extra:""`
}

type traffic struct {
	Feature     string `json:"feature"`
	Tenant      string `json:"tenant"`
	Provider    string `json:"provider"`
	Connections int    `json:"connections_total"`
	TxBytes     *int   `json:"tx_bytes"` // null where bytes are not counted
	RxBytes     *int   `json:"rx_bytes"`
}

type condition struct {
	Type    string `json:"type"`
	Status  string `json:"status"`
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

// connection is a row of conns -o json.
type connection struct {
	PID        int     `json:"pid"`
	Command    string  `json:"command"`
	Feature    string  `json:"feature"`
	Tenant     string  `json:"tenant"`
	Provider   string  `json:"provider"`
	Address    string  `json:"address"`
	AgeSeconds float64 `json:"age_seconds"`
	TxBytes    *int    `json:"tx_bytes"`
	RxBytes    *int    `json:"rx_bytes"`
	Proto      string  `json:"proto" extra:""`
	State      string  `json:"state" extra:""`
	Bulkheads  any     `json:"bulkheads" extra:""`
	Container  string  `json:"container" extra:""`
}

// decode reads a document strictly.
func decode(document string, into any) error {
	d := json.NewDecoder(strings.NewReader(document))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return fmt.Errorf("%w in\n%s", err, document)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("something follows the document\n%s", document)
	}
	if faults := complete(reflect.TypeOf(into).Elem(), "", []byte(document)); len(faults) > 0 {
		return fmt.Errorf("%s in\n%s", strings.Join(faults, ", "), document)
	}
	return nil
}

// complete lists the fields that are missing or null and may not be.
func complete(t reflect.Type, path string, raw json.RawMessage) (faults []string) {
	if bytes.Equal(bytes.TrimSpace(raw), []byte("null")) {
		if t.Kind() == reflect.Pointer || t.Kind() == reflect.Interface {
			return nil
		}
		return []string{path + " is null"}
	}
	switch {
	case t.Kind() == reflect.Pointer:
		return complete(t.Elem(), path, raw)
	case t.Kind() == reflect.Slice:
		var items []json.RawMessage
		json.Unmarshal(raw, &items) // it has been decoded before
		for i, item := range items {
			faults = append(faults, complete(t.Elem(), fmt.Sprintf("%s[%d]", path, i), item)...)
		}
	case t.Kind() == reflect.Struct && t != reflect.TypeFor[time.Time]():
		var fields map[string]json.RawMessage
		json.Unmarshal(raw, &fields)
		for i := range t.NumField() {
			f := t.Field(i)
			name := f.Tag.Get("json")
			value, there := fields[name]
			if _, extra := f.Tag.Lookup("extra"); extra && !there {
				continue
			}
			if !there {
				faults = append(faults, path+"."+name+" is missing")
				continue
			}
			faults = append(faults, complete(f.Type, path+"."+name, value)...)
		}
	}
	return faults
}

// status reads status -o json.
func (n *node) status() *status {
	n.t.Helper()
	var s status
	if err := decode(n.must("status", "-o", "json"), &s); err != nil {
		n.t.Fatal("status: ", err)
	}
	return &s
}

// conns reads conns -o json.
func (n *node) conns() []connection {
	n.t.Helper()
	var all []connection
	if err := decode(n.must("conns", "-o", "json"), &all); err != nil {
		n.t.Fatal("conns: ", err)
	}
	return all
}

// find returns a bulkhead by its name, as explain and plan write it:
// "feature_provider chat/deepseek"; nil if there is none.
func (s *status) find(name string) *bulkhead {
	for i, b := range s.Bulkheads {
		if b.name() == name {
			return &s.Bulkheads[i]
		}
	}
	return nil
}

func (b bulkhead) name() string {
	names := slices.DeleteFunc([]string{b.Feature, b.Tenant, b.Provider}, func(s string) bool { return s == "" })
	return b.Scope + " " + strings.Join(names, "/")
}

// connections is connections_total of a route.
func (s *status) connections(feature, provider string) int {
	for _, t := range s.Traffic {
		if t.Feature == feature && t.Tenant == "" && t.Provider == provider {
			return t.Connections
		}
	}
	return 0
}

// condition returns the first of a type, nil if there is none.
func (s *status) condition(typ string) *condition {
	for i, c := range s.Conditions {
		if c.Type == typ {
			return &s.Conditions[i]
		}
	}
	return nil
}

// cgroups are the paths of a feature's cgroups without tenant.
func (s *status) cgroups(feature string) (paths []string) {
	for _, c := range s.Compartments {
		for _, m := range c.Cgroups {
			if c.Feature == feature && c.Tenant == "" {
				paths = append(paths, m.Path)
			}
		}
	}
	return paths
}

func total(byReason map[string]int) (n int) {
	for _, v := range byReason {
		n += v
	}
	return n
}

// counts are what a bulkhead must say.
type counts struct {
	limit                           int // unlimited is null
	inUse, peak, accepted, rejected int
}

const unlimited = -1

func (n *node) wantCounts(want map[string]counts) {
	n.t.Helper()
	s := n.status()
	for name, w := range want {
		b := s.find(name)
		if b == nil {
			n.t.Errorf("status has no bulkhead %s", name)
			continue
		}
		got := counts{unlimited, b.InUse, b.Peak, b.Accepted, total(b.Rejected)}
		if b.Limit != nil {
			got.limit = *b.Limit
		}
		if got != w {
			n.t.Errorf("%s: %+v, want %+v", name, got, w)
		}
	}
}

func series(name string, labels ...string) string {
	var l []string
	for i := 0; i < len(labels); i += 2 {
		l = append(l, fmt.Sprintf("%s=%q", labels[i], labels[i+1]))
	}
	if slices.Sort(l); len(l) == 0 {
		return "bulkhead_" + name
	}
	return "bulkhead_" + name + "{" + strings.Join(l, ",") + "}"
}

// wantAgreement waits until the metrics say what status says.
func (n *node) wantAgreement() {
	n.t.Helper()
	kerneltest.Poll(n.t, "metrics and status agree", func() error {
		s, m := n.status(), n.scrape()
		want := map[string]float64{series("policy_generation"): float64(s.Generation)}
		absent := map[string]bool{}
		for _, b := range s.Bulkheads {
			labels := []string{"scope", b.Scope, "feature_group", b.Feature, "tenant", b.Tenant, "provider", b.Provider}
			want[series("concurrent_current", labels...)] = float64(b.InUse)
			want[series("accepted_total", labels...)] = float64(b.Accepted)
			if b.Limit != nil {
				want[series("max_concurrent", labels...)] = float64(*b.Limit)
			} else {
				absent[series("max_concurrent", labels...)] = true
			}
			for reason, v := range b.Rejected {
				want[series("rejected_total", append(labels, "reason", reason)...)] = float64(v)
			}
			for reason, v := range b.WouldReject {
				want[series("would_reject_total", append(labels, "reason", reason)...)] = float64(v)
			}
		}
		for _, t := range s.Traffic {
			labels := []string{"feature_group", t.Feature, "tenant", t.Tenant, "provider", t.Provider}
			want[series("connections_total", labels...)] = float64(t.Connections)
			if t.TxBytes != nil {
				want[series("bytes_total", append(labels, "direction", "tx")...)] = float64(*t.TxBytes)
				want[series("bytes_total", append(labels, "direction", "rx")...)] = float64(*t.RxBytes)
			}
		}
		var faults []error
		for _, name := range slices.Sorted(maps.Keys(want)) {
			if got, ok := m[name]; !ok || got != want[name] {
				faults = append(faults, fmt.Errorf("%s is %v (there: %t), status says %v", name, got, ok, want[name]))
			}
		}
		for name := range absent {
			if _, ok := m[name]; ok {
				faults = append(faults, fmt.Errorf("%s is there, status says unlimited", name))
			}
		}
		return errors.Join(faults...)
	})
}

// everything names all that the language has without names and units.
const everything = `
apiVersion: bulkhead/v1
kind: Policy
mode: enforce
protect: [/keep]
providers:
  deepseek: {cidrs: [@1/32], ports: [8000], limits: {connections: 6}}
  qwen:     {cidrs: [@2/32, "fd00:20::/64"], ports: ["8000-8010"], protocol: [tcp, udp], limits: {connections: unlimited}}
tenants:
  free: {limits: {connections: 5}, providers: {qwen: {connections: 4}}}
  pro:  {}
features:
  chat:
    owner: team-chat
    class: realtime
    match: [{cgroup: /apps/chat}, {cgroup: /apps/chat-free, tenant: free}]
    limits: {connections: 5}
    providers: {deepseek: {connections: 50%}}
  batch:
    class: batch
    cpu: {weight: 10, max: 150%}
    memory: {high: 2Gi, max: 3Gi}
    limits: {connections: 5, errno: EAGAIN}
    tenants:
      free: {limits: {connections: 3}, providers: {deepseek: {connections: 2}}}
  default: {limits: {connections: 100}}
`

func TestStatusDocument(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	n.write(everything)
	adopted := n.Mkdir("apps/chat")
	a := n.start()
	client := n.place(adopted)
	dials(t, client, n.addr(1), 4, syscall.ECONNREFUSED)

	s := n.status()
	if s.SchemaVersion != 1 || s.Node == "" || time.Since(s.Time).Abs() > time.Hour {
		t.Errorf("schema_version %d, node %q, time %s", s.SchemaVersion, s.Node, s.Time)
	}
	if !s.Agent.Running || s.Agent.PID != a.Process.Pid || s.Agent.Version == "" || s.Agent.Since.IsZero() {
		t.Errorf("agent %+v, want pid %d", s.Agent, a.Process.Pid)
	}
	if s.Generation != 1 || !strings.HasPrefix(s.PolicyHash, "sha256:") || s.Mode != "enforce" {
		t.Errorf("generation %d, policy_hash %q, mode %q", s.Generation, s.PolicyHash, s.Mode)
	}

	// A feature, and a feature with each tenant; default has no tenants.
	var got []string
	for _, c := range s.Compartments {
		var paths []string
		for _, m := range c.Cgroups {
			paths = append(paths, fmt.Sprintf("%s %t", m.Path, m.Adopted))
			if m.ID == 0 {
				t.Errorf("%s has no id", m.Path)
			}
		}
		got = append(got, fmt.Sprintf("%s/%s %s %v", c.Feature, c.Tenant, c.Class, paths))
	}
	want := []string{
		"default/ background []",
		"chat/ realtime [/apps/chat true /bulkhead.slice/bulkhead-chat.slice false]",
		"chat/free realtime [/bulkhead.slice/bulkhead-chat.slice/bulkhead-chat-free.slice false]",
		"chat/pro realtime [/bulkhead.slice/bulkhead-chat.slice/bulkhead-chat-pro.slice false]",
		"batch/ batch [/bulkhead.slice/bulkhead-batch.slice false]",
		"batch/free batch [/bulkhead.slice/bulkhead-batch.slice/bulkhead-batch-free.slice false]",
		"batch/pro batch [/bulkhead.slice/bulkhead-batch.slice/bulkhead-batch-pro.slice false]",
	}
	if !slices.Equal(got, want) {
		t.Errorf("compartments:\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	for _, c := range s.Compartments {
		if c.Feature == "chat" && c.Tenant == "" && c.Processes != 1 {
			t.Errorf("chat has %d processes, want 1", c.Processes)
		}
	}

	// Every block of limits, and every provider, tenant and feature without.
	var names []string
	for _, b := range s.Bulkheads {
		limit := "null"
		if b.Limit != nil {
			limit = fmt.Sprint(*b.Limit)
		}
		names = append(names, b.name()+" "+limit)
	}
	slices.Sort(names)
	wantNames := []string{
		"feature batch 5", "feature chat 5", "feature default 100",
		"feature_provider chat/deepseek 3",
		"feature_tenant batch/free 3",
		"feature_tenant_provider batch/free/deepseek 2",
		"provider deepseek 6", "provider qwen null",
		"tenant free 5", "tenant pro null",
		"tenant_provider free/qwen 4",
	}
	if !slices.Equal(names, wantNames) {
		t.Errorf("bulkheads:\n%s\nwant\n%s", strings.Join(names, "\n"), strings.Join(wantNames, "\n"))
	}
	n.wantCounts(map[string]counts{
		"feature_provider chat/deepseek": {3, 3, 3, 3, 1},
		"feature chat":                   {5, 3, 3, 3, 0},
		"provider deepseek":              {6, 3, 3, 3, 0},
	})
	if c := s.connections("chat", "deepseek"); c != 3 {
		t.Errorf("connections_total %d, want 3", c)
	}
	n.wantAgreement()
}

// The exit code of --check is 1 if anything needs attention, and the document says what.
func TestStatusConditions(t *testing.T) {
	n := newNode(t)
	s := n.status() // nothing is loaded, and that is no failure
	if s.Generation != 0 || s.Agent.Running || s.condition("Loaded") == nil || s.condition("Agent") == nil {
		t.Errorf("nothing in force: generation %d, agent %+v, conditions %+v", s.Generation, s.Agent, s.Conditions)
	}
	n.wantRun(1, nil, "status", "--check")

	// Without CPU, memory and other programs there is nothing to fall short.
	const good = "apiVersion: bulkhead/v1\nkind: Policy\nmode: enforce\nproviders: {}\nfeatures: {chat: {class: realtime, cpu: none}}\n"
	n.write(good)
	a := n.start()
	n.wantRun(0, nil, "status", "--check")
	if s := n.status(); s.condition("Agent") != nil || s.condition("Loaded") != nil {
		t.Errorf("all is well: conditions %+v", s.Conditions)
	}

	n.write("features: [")
	n.wantRun(1, []string{"policy.yaml:"}, "reload")
	n.wantRun(1, nil, "status", "--check")
	if c := n.status().condition("Reload"); c == nil || c.Status != "False" || !strings.Contains(c.Message, "policy.yaml:") {
		t.Errorf("condition of a reload that was refused: %+v", c)
	}
	n.write(good)
	n.must("reload")
	n.wantRun(0, nil, "status", "--check")

	a.kill()
	n.wantRun(1, nil, "status", "--check")
	s = n.status()
	if !reflect.DeepEqual(s.Agent, agentStatus{}) || s.Generation == 0 || s.condition("Agent") == nil {
		t.Errorf("without an agent: generation %d, agent %+v, conditions %+v", s.Generation, s.Agent, s.Conditions)
	}
	wantWords(t, n.must("status"), "not running", "chat")
}

// Every metric of the contract is there, with exactly its labels.
func TestMetricNames(t *testing.T) {
	n := newNode(t)
	n.write(everything)
	n.start()
	got := map[string][]string{} // labels by name
	for s := range n.scrape() {
		name, rest, _ := strings.Cut(strings.TrimSuffix(s, "}"), "{")
		labels := []string{}
		for _, l := range strings.Split(rest, `",`) {
			if key, _, ok := strings.Cut(l, "="); ok {
				labels = append(labels, key)
			}
		}
		slices.Sort(labels)
		if before, ok := got[name]; ok && !slices.Equal(before, labels) {
			t.Errorf("%s has labels %v and %v", name, before, labels)
		}
		got[name] = labels
	}
	key := []string{"feature_group", "provider", "scope", "tenant"}
	reason := []string{"feature_group", "provider", "reason", "scope", "tenant"}
	route := []string{"feature_group", "provider", "tenant"}
	group := []string{"feature_group", "tenant"}
	for name, labels := range map[string][]string{
		"bulkhead_concurrent_current":                   key,
		"bulkhead_max_concurrent":                       key,
		"bulkhead_accepted_total":                       key,
		"bulkhead_rejected_total":                       reason,
		"bulkhead_would_reject_total":                   reason,
		"bulkhead_bytes_total":                          {"direction", "feature_group", "provider", "tenant"},
		"bulkhead_connections_total":                    route,
		"bulkhead_cpu_usage_seconds_total":              group,
		"bulkhead_cpu_periods_total":                    group,
		"bulkhead_cpu_throttled_periods_total":          group,
		"bulkhead_cpu_throttled_seconds_total":          group,
		"bulkhead_cgroup_values_corrected_total":        group,
		"bulkhead_policy_generation":                    {},
		"bulkhead_policy_last_reload_successful":        {},
		"bulkhead_policy_last_reload_timestamp_seconds": {},
		"bulkhead_policy_reload_failures_total":         {},
		"bulkhead_slots_reclaimed_total":                {},
		"bulkhead_reconcile_errors_total":               {},
		"bulkhead_processes_moved_total":                {},
		"bulkhead_membership_lost_total":                {},
		"bulkhead_processes_skipped_total":              {"reason"},
	} {
		if there, ok := got[name]; !ok || !slices.Equal(there, labels) {
			t.Errorf("%s has labels %v (there: %t), want %v", name, there, ok, labels)
		}
	}
	if _, ok := got["bulkhead_build_info"]; !ok {
		t.Error("bulkhead_build_info is missing")
	}
	// However many addresses there are, labels are the policy's own names.
	for s := range n.scrape() {
		if strings.HasPrefix(s, "bulkhead_") && strings.Contains(s, "127.") {
			t.Errorf("%s has an address in it", s)
		}
	}
}

func TestVersionAndWrongUse(t *testing.T) {
	n := newNode(t)
	wantWords(t, n.must("version"), "bulkhead ")
	for _, args := range [][]string{
		{"agent"}, {"agent", "--no-such-flag"}, {"no-such-command"}, {"check"}, {"status", "-o", "xml"}, {"explain", "--to", "nowhere"},
	} {
		n.wantRun(2, nil, args...)
	}
	// plan's 2 says that there are changes, exec's may be the command's own.
	n.wantRun(1, nil, "plan")
	n.wantRun(125, nil, "exec", "--", "true")
	n.wantRun(1, []string{"no agent answers"}, "reload")
}
