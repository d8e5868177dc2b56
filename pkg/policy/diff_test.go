package policy

import (
	"encoding/json"
	"testing"
	"time"
)

func diffLines(old, new *Plan) []string {
	var lines []string
	for _, c := range Diff(old, new) {
		lines = append(lines, c.String())
	}
	return lines
}

func TestDiff(t *testing.T) {
	old, _ := compileText(t, head+`
protect: [a.service]
providers:
  p: {cidrs: [10.0.0.0/8, 9.0.0.0/8, 100.0.0.0/8], ports: [443], limits: {connections: 10}}
  q: {cidrs: ["fd00::/16"], limits: {connections: 5}}
  h: {hosts: [a.test]}
  u: {cidrs: [12.0.0.0/8], protocol: [tcp, udp]}
  v: {cidrs: [13.0.0.0/8], protocol: [tcp, udp], idle: 30m}
tenants: {t: {limits: {connections: 9}}, gone: {}}
features:
  f: {class: batch, owner: x, match: [{unit: f.service}], memory: {high: 1Gi, max: 2Gi}, pids: {max: 7}, limits: {connections: 3}, providers: {p: {connections: 2}}}
  g: {class: timely}
  away: {class: batch}
`)
	new, _ := compileText(t, "apiVersion: bulkhead/v1\nkind: Policy\nmode: observe\nexhausted: refuse"+`
protect: [b.service]
providers:
  r: {cidrs: [11.0.0.0/8], protocol: udp, ports: [53]}
  p: {cidrs: [9.0.0.0/8, 10.0.0.0/8], ports: [443, 8443], limits: {connections: 12, errno: EAGAIN}}
  q: {cidrs: ["fd00::/16"]}
  other: {limits: {connections: unlimited}}
  h: {hosts: [a.test, b.test]}
  u: {cidrs: [12.0.0.0/8], protocol: [udp, tcp], idle: 1h30m}
  v: {cidrs: [13.0.0.0/8]}
tenants: {t: {limits: {connections: 9, errno: EUSERS}}}
features:
  g: {class: timely, cpu: {max: 50%, burst: 5ms, cpus: "0,2", exclusive: true, uclamp_min: 2%, uclamp_max: 70%}, match: [{cgroup: /x, tenant: t, user: root, exe: /bin/x, cmdline: z}, {container: {name: y, label: "a=b"}}]}
  f: {class: realtime, owner: y, cpu: none, memory: {max: 2Gi}, pids: {max: 8}, limits: {connections: 3}, tenants: {t: {limits: {connections: 0}}}}
  default: {owner: z}
`)
	wantLines(t, diffLines(old, new), []string{
		"change mode: enforce -> observe",
		"change exhausted: allow -> refuse",
		"remove protect a.service",
		"add protect b.service",
		"add provider r",
		"change hosts h: a.test -> a.test b.test",
		"add idle r: 2m",
		"change idle u: 2m -> 1h30m",
		"remove idle v: 30m",
		"change destination 9.0.0.0/8: tcp 443 p -> tcp 443 p, tcp 8443 p",
		"change destination 10.0.0.0/8: tcp 443 p -> tcp 443 p, tcp 8443 p",
		"add destination 11.0.0.0/8: udp 53 r",
		"change destination 13.0.0.0/8: tcp 0-65535 v, udp 0-65535 v -> tcp 0-65535 v",
		"remove destination 100.0.0.0/8: tcp 443 p",
		"remove tenant gone",
		"remove feature away",
		"change order: default f g -> default g f",
		"add owner default: z",
		"change owner f: x -> y",
		"remove class away: batch",
		"change class f: batch -> realtime",
		"remove match f: {unit: f.service}",
		"add match g: {cgroup: /x, exe: /bin/x, cmdline: z, user: root, tenant: t} {container.label: a=b, container.name: y}",
		"remove cpu away: weight 1",
		"remove cpu f: weight 1",
		"change cpu g: weight 1000 -> weight 1000, max 50% of 100ms, burst 5ms, cpus 0,2 exclusive, uclamp_min 2%, uclamp_max 70%",
		"change memory f: high 1Gi, max 2Gi -> high max, max 2Gi",
		"change pids f: max 7 -> max 8",
		"remove limit feature_provider f/p: 2",
		"add limit feature_tenant f/t: 0",
		"change limit tenant t: 9 -> 9 EUSERS",
		"add limit provider other: unlimited",
		"change limit provider p: 10 -> 12 EAGAIN",
		"remove limit provider q: 5",
	})
	if d := Diff(old, old); len(d) != 0 {
		t.Errorf("a plan differs from itself: %v", d)
	}
	for _, c := range Diff(nil, new) {
		if c.Kind != Added || c.Old != "" {
			t.Errorf("from nothing: %v", c)
		}
	}
	// The same in words that tools read.
	for _, c := range Diff(old, new) {
		if c.What == "limit" && c.Name == "provider p" && (c.Kind != Changed || c.Old != "10" || c.New != "12 EAGAIN") {
			t.Errorf("%+v", c)
		}
	}
	// Provider numbers moved by one; what does not change is not told.
	moved, _ := compileText(t, head+"providers: {a: {cidrs: [1.0.0.0/8]}, p: {cidrs: [10.0.0.0/8]}}\nfeatures: {}\n")
	before, _ := compileText(t, head+"providers: {p: {cidrs: [10.0.0.0/8]}}\nfeatures: {}\n")
	wantLines(t, diffLines(before, moved), []string{"add provider a", "add destination 1.0.0.0/8: tcp 0-65535 a"})
}

// A plan that was stored by a release without exhausted and idle: that a connect
// without a slot is let through is no news, that idle slots end is.
func TestDiffOfAnEarlierRelease(t *testing.T) {
	const text = "providers: {u: {cidrs: [10.0.0.0/8], protocol: udp}}\nfeatures: {}\n"
	next, _ := compileText(t, head+text)
	wrote, err := json.Marshal(next)
	if err != nil {
		t.Fatal(err)
	}
	var fields map[string]any
	if err := json.Unmarshal(wrote, &fields); err != nil {
		t.Fatal(err)
	}
	delete(fields, "exhausted")
	for _, p := range fields["providers"].([]any) {
		delete(p.(map[string]any), "idle_sec")
	}
	if wrote, err = json.Marshal(fields); err != nil {
		t.Fatal(err)
	}
	var stored Plan
	if err := json.Unmarshal(wrote, &stored); err != nil {
		t.Fatal(err)
	}
	wantLines(t, diffLines(&stored, next), []string{"add idle u: 2m"})
	refuse, _ := compileText(t, head+"exhausted: refuse\n"+text)
	wantLines(t, diffLines(&stored, refuse), []string{"change exhausted: allow -> refuse", "add idle u: 2m"})
	wantLines(t, diffLines(nil, refuse)[:2], []string{"add mode: enforce", "add exhausted: refuse"})
}

func TestTimeText(t *testing.T) {
	for want, d := range map[string]time.Duration{
		"1s": time.Second, "30s": 30 * time.Second, "2m": 2 * time.Minute, "1m30s": 90 * time.Second, "10m": 10 * time.Minute,
		"1h": time.Hour, "1h30m": 90 * time.Minute, "1h0m5s": time.Hour + 5*time.Second, "24h": 24 * time.Hour, "20h": 20 * time.Hour,
	} {
		if got := timeText(d); got != want {
			t.Errorf("%s is told as %s, want %s", d, got, want)
		}
		if back, err := parseTime(want, wantIdle, MinIdle, MaxIdle); err != nil || back != d {
			t.Errorf("%s is read as %s, %v", want, back, err)
		}
	}
}
