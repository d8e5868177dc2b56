package policy

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// The example of the contract, host names included, is right, and says what it
// says there.
func TestContract(t *testing.T) {
	plan, warnings, err := Check("testdata/contract.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, w := range warnings {
		lines = append(lines, w.String())
	}
	wantLines(t, lines, []string{"testdata/contract.yaml:29:76: features.batch_summarize.tenants.free.providers.deepseek: " +
		"a limit of 1 is a serial queue, not isolation: one slow call holds up all others"})

	if plan.Mode != Enforce {
		t.Errorf("mode %s", plan.Mode)
	}
	wantProviders := []Provider{{Name: "other"}, {Name: "deepseek", Hosts: []string{"api.deepseek.com"}, Place: Place{"testdata/contract.yaml", 6, 21}},
		{Name: "qwen", Hosts: []string{"dashscope.aliyuncs.com"}, Place: Place{"testdata/contract.yaml", 7, 21}}, {Name: "local"}, {Name: "postgres"}}
	if !reflect.DeepEqual(plan.Providers, wantProviders) {
		t.Errorf("providers %+v", plan.Providers)
	}
	if want := []string{"enterprise", "free", "pro"}; !slices.Equal(plan.Tenants, want) {
		t.Errorf("tenants %v", plan.Tenants)
	}
	wantFeatures := []Feature{
		{Name: "default", Class: Background},
		{Name: "chat", Owner: "team-chat", Class: Realtime, CPU: &CPU{Weight: 10000}, Match: []Match{
			{Unit: "chat.service", Place: Place{"testdata/contract.yaml", 19, 9}},
			{Unit: "chat-free@*.service", Tenant: "free", Place: Place{"testdata/contract.yaml", 20, 9}},
		}},
		{Name: "batch_summarize", Class: Batch, CPU: &CPU{Weight: 10, MaxUsec: 150_000, PeriodUsec: 100_000}, Memory: &Memory{High: 2 << 30, Max: 3 << 30}},
	}
	if !reflect.DeepEqual(plan.Features, wantFeatures) {
		t.Errorf("features %+v", plan.Features)
	}
	var limits []string
	for _, b := range plan.Bulkheads {
		limits = append(limits, fmt.Sprintf("%s %s %s", b.Key, b.Limit, ErrnoName(b.Errno)))
	}
	wantLines(t, limits, []string{
		"feature_tenant_provider batch_summarize/free/deepseek 1 ECONNREFUSED",
		"feature_provider chat/deepseek 15 ECONNREFUSED",
		"tenant_provider free/qwen 2 ECONNREFUSED",
		"feature_tenant batch_summarize/free 2 ECONNREFUSED",
		"feature batch_summarize 5 EAGAIN",
		"feature chat 20 ECONNREFUSED",
		"feature default 100 ECONNREFUSED",
		"tenant enterprise 30 ECONNREFUSED",
		"tenant free 5 ECONNREFUSED",
		"tenant pro 15 ECONNREFUSED",
		"provider deepseek 30 ECONNREFUSED",
		"provider local 10 ECONNREFUSED",
		"provider postgres unlimited ECONNREFUSED",
		"provider qwen 15 ECONNREFUSED",
	})
	for _, s := range append(builtInProtect(), "ssh.service", "kubelet.service") {
		if n := len(slices.DeleteFunc(slices.Clone(plan.Protect), func(p string) bool { return p != s })); n != 1 {
			t.Errorf("protect has %s %d times", s, n)
		}
	}
	if !slices.IsSorted(plan.Protect) {
		t.Errorf("protect is not sorted: %v", plan.Protect)
	}
	if want := "/bulkhead.slice/bulkhead-batch_summarize.slice/bulkhead-batch_summarize-free.slice"; plan.Compartments[7].Slice != want {
		t.Errorf("slice of %+v, want %s", plan.Compartments[7], want)
	}
}

// The example that people start from is right and has nothing to warn of.
func TestExample(t *testing.T) {
	plan, warnings, err := Check("../../docs/policy-example.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if len(warnings) > 0 {
		t.Errorf("warnings: %v", warnings)
	}
	for _, p := range plan.Providers {
		if len(p.Hosts) > 0 {
			t.Errorf("provider %s has hosts, which the agent refuses", p.Name)
		}
	}
}

// routeLines are "feature/tenant -> provider: holds".
func routeLines(p *Plan) []string {
	var lines []string
	for _, r := range p.Routes {
		c := p.Compartments[r.Compartment]
		line := c.Feature + "/" + c.Tenant + " -> " + p.Providers[r.Provider].Name + ":"
		for _, h := range r.Holds {
			line += " " + strings.ReplaceAll(p.Bulkheads[h].Key.String(), " ", "=")
		}
		if r.CountOnly {
			line += " count only"
		}
		lines = append(lines, line)
	}
	return lines
}

// The whole matrix of a policy that has every scope, and other named for some
// routes and not for others.
func TestRoutes(t *testing.T) {
	const text = head + `
providers:
  p: {cidrs: [10.0.0.0/8], limits: {connections: 9}}
tenants:
  t: {providers: {p: {connections: 8}}}
  u: {providers: {other: {connections: unlimited}}}
features:
  f:
    class: batch
    providers: {p: {connections: 7}}
    tenants:
      t: {limits: {connections: 6}, providers: {p: {connections: 5}, other: {connections: 4}}}
  g: {class: batch, providers: {other: {connections: 0}}}
`
	plan, _ := compileText(t, text)
	wantLines(t, routeLines(plan), []string{
		"default/ -> other: count only",
		"default/ -> p: feature=default provider=p",
		"f/ -> other: count only",
		"f/ -> p: feature_provider=f/p feature=f provider=p",
		"f/t -> other: feature_tenant_provider=f/t/other feature_tenant=f/t feature=f tenant=t",
		"f/t -> p: feature_tenant_provider=f/t/p feature_provider=f/p tenant_provider=t/p feature_tenant=f/t feature=f tenant=t provider=p",
		"f/u -> other: tenant_provider=u/other feature=f tenant=u",
		"f/u -> p: feature_provider=f/p feature=f tenant=u provider=p",
		"g/ -> other: feature_provider=g/other feature=g",
		"g/ -> p: feature=g provider=p",
		"g/t -> other: feature_provider=g/other feature=g tenant=t",
		"g/t -> p: tenant_provider=t/p feature=g tenant=t provider=p",
		"g/u -> other: feature_provider=g/other tenant_provider=u/other feature=g tenant=u",
		"g/u -> p: feature=g tenant=u provider=p",
	})
	for i, r := range plan.Routes {
		if got := plan.Route(r.Compartment, r.Provider); i != int(r.Compartment)*len(plan.Providers)+int(r.Provider) || !reflect.DeepEqual(got, r) {
			t.Errorf("route %d is %+v", i, r)
		}
		if len(r.Holds) > MaxHolds {
			t.Errorf("route %d holds %d", i, len(r.Holds))
		}
		for j := 1; j < len(r.Holds); j++ {
			if plan.Bulkheads[r.Holds[j-1]].Scope >= plan.Bulkheads[r.Holds[j]].Scope {
				t.Errorf("route %d is not narrowest first", i)
			}
		}
	}
	if !slices.IsSortedFunc(plan.Bulkheads, func(a, b Bulkhead) int { return a.Key.Compare(b.Key) }) {
		t.Error("bulkheads are not sorted")
	}
}

// Limits of other apply to every route to it, default's included.
func TestOtherCapped(t *testing.T) {
	plan, _ := compileText(t, head+"providers:\n  other: {limits: {connections: 500}}\nfeatures:\n  f: {class: batch, limits: {connections: 3}}\n")
	wantLines(t, routeLines(plan), []string{
		"default/ -> other: feature=default provider=other",
		"f/ -> other: feature=f provider=other",
	})
	plan, _ = compileText(t, head+"providers:\n  other: {}\nfeatures:\n  default: {providers: {other: {connections: 0}}}\n")
	wantLines(t, routeLines(plan), []string{"default/ -> other: feature_provider=default/other feature=default"})
}

func TestShares(t *testing.T) {
	plan, _ := compileText(t, head+`
providers:
  p: {cidrs: [10.0.0.0/8], limits: {connections: 15}}
  other: {limits: {connections: 1000}}
tenants:
  t: {providers: {p: {connections: 7%, errno: EUSERS}}}
features:
  f: {class: batch, providers: {p: {connections: 50%}, other: {connections: "100%"}}, tenants: {t: {providers: {p: {connections: 99%}}}}}
`)
	got := map[string]Limit{}
	for _, b := range plan.Bulkheads {
		got[b.Key.String()] = b.Limit
		if b.Key.String() == "tenant_provider t/p" && b.Errno != 87 {
			t.Errorf("errno of a share is %d", b.Errno)
		}
	}
	for key, want := range map[string]Limit{
		"tenant_provider t/p": 1, "feature_provider f/p": 7, "feature_provider f/other": 1000, "feature_tenant_provider f/t/p": 14,
	} {
		if got[key] != want {
			t.Errorf("%s is %s, want %s", key, got[key], want)
		}
	}
}

func TestCPUAndMemory(t *testing.T) {
	for _, tc := range []struct {
		text   string
		cpu    *CPU
		memory *Memory
	}{
		{"{class: realtime}", &CPU{Weight: 10000}, nil},
		{"{class: timely}", &CPU{Weight: 1000}, nil},
		{"{class: batch}", &CPU{Weight: 1}, nil},
		{"{class: background}", &CPU{Idle: true}, nil},
		{"{}", &CPU{Idle: true}, nil},
		{"{class: realtime, cpu: none}", nil, nil},
		{"{class: batch, cpu: {}}", &CPU{Weight: 1}, nil},
		{"{class: batch, cpu: {weight: 10}}", &CPU{Weight: 10}, nil},
		{"{class: batch, cpu: {idle: true}}", &CPU{Idle: true}, nil},
		{"{class: background, cpu: {idle: false, weight: 3}}", &CPU{Weight: 3}, nil},
		{"{class: background, cpu: {weight: 3}}", &CPU{Weight: 3}, nil},
		{"{class: background, cpu: {max: 50%}}", &CPU{Idle: true, MaxUsec: 50_000, PeriodUsec: 100_000}, nil},
		{"{class: batch, cpu: {max: 1%}}", &CPU{Weight: 1, MaxUsec: 1_000, PeriodUsec: 100_000}, nil},
		{"{class: batch, cpu: {max: 10%, period: 10ms}}", &CPU{Weight: 1, MaxUsec: 1_000, PeriodUsec: 10_000}, nil},
		{"{class: batch, cpu: {max: 150%, period: 1s}}", &CPU{Weight: 1, MaxUsec: 1_500_000, PeriodUsec: 1_000_000}, nil},
		{"{class: batch, cpu: {max: 819200%}}", &CPU{Weight: 1, MaxUsec: 819_200_000, PeriodUsec: 100_000}, nil},
		{"{class: batch, cpu: {max: max}}", &CPU{Weight: 1}, nil},
		{"{class: batch, cpu: {max: 50%, burst: 50ms}}", &CPU{Weight: 1, MaxUsec: 50_000, PeriodUsec: 100_000, BurstUsec: 50_000}, nil},
		{"{class: batch, cpu: {burst: 1ms, period: 1s, max: 819200%}}", &CPU{Weight: 1, MaxUsec: 8_192_000_000, PeriodUsec: 1_000_000, BurstUsec: 1_000}, nil},
		{"{class: batch, cpu: {cpus: 0}}", &CPU{Weight: 1, CPUs: "0"}, nil},
		{"{class: batch, cpu: {cpus: \"7,2-3,1,3-4\", exclusive: true}}", &CPU{Weight: 1, CPUs: "1-4,7", Exclusive: true}, nil},
		{"{class: batch, cpu: {cpus: \"not 1,0\", exclusive: false}}", &CPU{Weight: 1, CPUs: "not 0-1"}, nil},
		{"{class: background, cpu: {cpus: 8191, uclamp_min: 1%, uclamp_max: 100%}}", &CPU{Idle: true, CPUs: "8191", UclampMin: 1, UclampMax: 100}, nil},
		{"{class: batch, memory: {max: 512Mi}}", &CPU{Weight: 1}, &Memory{Max: 512 << 20}},
		{"{class: batch, memory: {high: 1Mi, max: max}}", &CPU{Weight: 1}, &Memory{High: 1 << 20}},
		{"{class: batch, memory: {high: 2048Ki, max: 1024Ti}}", &CPU{Weight: 1}, &Memory{High: 2 << 20, Max: 1 << 50}},
		{"{class: batch, memory: {}, pids: {}}", &CPU{Weight: 1}, nil},
	} {
		plan, _ := compileText(t, head+"providers: {}\nfeatures: {f: "+tc.text+"}\n")
		if f := plan.Features[1]; !reflect.DeepEqual(f.CPU, tc.cpu) || !reflect.DeepEqual(f.Memory, tc.memory) {
			t.Errorf("%s: cpu %+v memory %+v, want %+v %+v", tc.text, f.CPU, f.Memory, tc.cpu, tc.memory)
		}
	}
}

// What happens without a slot, and when an idle one ends: as the policy says, and
// as the reference says where it does not.
func TestExhaustedAndIdle(t *testing.T) {
	const providers = "providers:\n  t: {cidrs: [10.0.0.0/8]}\n  u: {cidrs: [10.0.0.0/8], protocol: udp}\n  b: {cidrs: [11.0.0.0/8], protocol: [tcp, udp]%s}\nfeatures: {}\n"
	hashes := map[string]string{}
	for _, tc := range []struct {
		exhausted, idle string
		want            Exhausted
		wantIdle        time.Duration
	}{
		{"", "", ExhaustedAllow, 2 * time.Minute},
		{"exhausted: allow\n", ", idle: 120s", ExhaustedAllow, 2 * time.Minute}, // what is meant anyway, so the same plan
		{"exhausted: refuse\n", "", ExhaustedRefuse, 2 * time.Minute},
		{"", ", idle: 1s", ExhaustedAllow, time.Second},
		{"exhausted: refuse\n", ", idle: 24h", ExhaustedRefuse, 24 * time.Hour},
	} {
		plan, _ := compileText(t, head+tc.exhausted+fmt.Sprintf(providers, tc.idle))
		if plan.Exhausted != tc.want {
			t.Errorf("%q: exhausted is %s, want %s", tc.exhausted, plan.Exhausted, tc.want)
		}
		var idle []time.Duration
		for _, p := range plan.Providers {
			idle = append(idle, p.Idle)
		}
		if want := []time.Duration{0, 0, DefaultIdle, tc.wantIdle}; !slices.Equal(idle, want) {
			t.Errorf("%q: idle %v, want %v", tc.idle, idle, want)
		}
		what := fmt.Sprint(plan.Exhausted, idle)
		if first, ok := hashes[what]; ok && first != plan.Hash {
			t.Errorf("%s has two hashes", what)
		}
		hashes[what] = plan.Hash
	}
	seen := map[string]bool{}
	for _, h := range hashes {
		seen[h] = true
	}
	if len(hashes) != 4 || len(seen) != 4 {
		t.Errorf("%d different plans have %d hashes", len(hashes), len(seen))
	}
}

// The same policy is the same plan, byte for byte, however it is laid out.
func TestDeterministic(t *testing.T) {
	first, _, err := Check("testdata/contract.yaml")
	if err != nil {
		t.Fatal(err)
	}
	want, err := json.Marshal(first)
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		again, _, err := Check("testdata/contract.yaml")
		if err != nil {
			t.Fatal(err)
		}
		if got, _ := json.Marshal(again); string(got) != string(want) {
			t.Fatalf("compiled again, it is\n%s\nand was\n%s", got, want)
		}
	}
	const a = head + "providers: {p: {cidrs: [10.0.0.0/8, 11.0.0.0/8]}}\ntenants: {a: {}, b: {}}\nprotect: [x.service, y.service]\nfeatures: {f: {class: batch}}\n"
	const b = "kind: Policy\nfeatures:\n  f:\n    # a comment\n    class: \"batch\"\nprotect: [y.service, x.service, x.service]\ntenants:\n  b: {}\n  a: {}\n" +
		"providers:\n  p:\n    ports: [\"1-65535\"]\n    cidrs: [11.0.0.0/8, \"::ffff:10.0.0.0/104\", 10.0.0.0/8]\nmode: enforce\napiVersion: bulkhead/v1\n"
	planA, _ := compileText(t, a)
	planB, _ := compileText(t, strings.Replace(b, "    ports: [\"1-65535\"]\n", "", 1))
	if planA.Hash != planB.Hash {
		t.Errorf("layout changes the hash: %v", Diff(planA, planB))
	}
	planC, _ := compileText(t, b) // port 0 is left out
	if planA.Hash == planC.Hash {
		t.Error("other ports have the same hash")
	}
	if !strings.HasPrefix(planA.Hash, "sha256:") || len(planA.Hash) != 7+64 {
		t.Errorf("hash %q", planA.Hash)
	}
}

// What is stored beside the kernel's maps is read back as it was.
func TestJSONRoundTrip(t *testing.T) {
	for _, path := range []string{"testdata/contract.yaml", "../../docs/policy-example.yaml"} {
		plan, _, err := Check(path)
		if err != nil {
			t.Fatal(err)
		}
		roundTrip(t, plan)
	}
	for _, text := range []string{
		"providers: {}\nfeatures: {}\n",
		"exhausted: refuse\nproviders: {p: {hosts: [a.test], protocol: udp, idle: 24h}, q: {cidrs: [10.0.0.0/8], protocol: udp, idle: 1s}}\nfeatures: {}\n",
		"providers: {other: {limits: {connections: 0}}, p: {cidrs: [\"::/0\"], wide: true, protocol: [tcp, udp], ports: [53, 443]}}\n" +
			"tenants: {t: {}}\nfeatures: {f: {match: [{container: {name: \"<&>*\"}, tenant: t}, {cmdline: \"\\u2028\"}], cpu: none}}\n",
	} {
		plan, _ := compileText(t, head+text)
		roundTrip(t, plan)
	}
	var l Limit
	for _, bad := range []string{"-1", "1000001", "4294967295", `"5"`, "1.5", "1e3", "true"} {
		if err := json.Unmarshal([]byte(bad), &l); err == nil {
			t.Errorf("limit %s was read as %s", bad, l)
		}
	}
	if _, err := json.Marshal(Key{}); err == nil {
		t.Error("a key without a scope was written")
	}
	if err := json.Unmarshal([]byte(`{"scope": "node"}`), &Key{}); err == nil {
		t.Error("scope node was read")
	}
	for _, bad := range []string{"-1", "1.5", `"2m"`, "86401", "4294967296"} {
		if err := json.Unmarshal([]byte(`{"name": "p", "udp": true, "idle_sec": `+bad+`}`), &Provider{}); err == nil {
			t.Errorf("idle_sec %s was read", bad)
		}
	}
	for _, bad := range []time.Duration{-time.Second, time.Millisecond, 24*time.Hour + time.Second} {
		if text, err := json.Marshal(Provider{Name: "p", UDP: true, Idle: bad}); err == nil {
			t.Errorf("idle %s was written as %s", bad, text)
		}
	}
	if err := json.Unmarshal([]byte(`{"proto": "sctp"}`), &PortRange{}); err == nil {
		t.Error("proto sctp was read")
	}
}

func roundTrip(t *testing.T, plan *Plan) {
	t.Helper()
	text, err := json.Marshal(plan)
	if err != nil {
		t.Fatal(err)
	}
	var back Plan
	if err := json.Unmarshal(text, &back); err != nil {
		t.Fatal(err)
	}
	if again, _ := json.Marshal(&back); string(again) != string(text) {
		t.Errorf("wrote\n%s\nand then\n%s", text, again)
	}
	for i := range plan.Providers { // only places stay behind
		plan.Providers[i].Place = Place{}
	}
	for _, f := range plan.Features {
		for i := range f.Match {
			f.Match[i].Place = Place{}
		}
	}
	if !reflect.DeepEqual(&back, plan) {
		t.Errorf("read back\n%+v\nof\n%+v", back, *plan)
	}
	if h, _ := hash(&back); h != plan.Hash {
		t.Errorf("hash %s, was %s", h, plan.Hash)
	}
	if d := Diff(plan, &back); len(d) > 0 {
		t.Errorf("differs: %v", d)
	}
}

// The words of JSON are those of the contract.
func TestJSONWords(t *testing.T) {
	text, err := json.Marshal([]Bulkhead{
		{Key: Key{Scope: ScopeFeatureTenantProvider, Feature: "f", Tenant: "t", Provider: "p"}, Limit: 3, Errno: 11},
		{Key: Key{Scope: ScopeFeatureProvider, Feature: "f", Provider: "p"}, Limit: 0, Errno: 111},
		{Key: Key{Scope: ScopeTenantProvider, Tenant: "t", Provider: "p"}, Limit: Unlimited, Errno: 111},
		{Key: Key{Scope: ScopeFeatureTenant}}, {Key: Key{Scope: ScopeFeature}}, {Key: Key{Scope: ScopeTenant}}, {Key: Key{Scope: ScopeProvider}},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := `[{"scope":"feature_tenant_provider","feature":"f","tenant":"t","provider":"p","limit":3,"errno":11},` +
		`{"scope":"feature_provider","feature":"f","provider":"p","limit":0,"errno":111},` +
		`{"scope":"tenant_provider","tenant":"t","provider":"p","limit":null,"errno":111},` +
		`{"scope":"feature_tenant","limit":0,"errno":0},{"scope":"feature","limit":0,"errno":0},{"scope":"tenant","limit":0,"errno":0},{"scope":"provider","limit":0,"errno":0}]`
	if string(text) != want {
		t.Errorf("got  %s\nwant %s", text, want)
	}
	text, err = json.Marshal([]Provider{{Name: "other"}, {Name: "p", Hosts: []string{"a.test"}, Place: Place{"f", 1, 2}, UDP: true, Idle: 90 * time.Second}})
	if want := `[{"name":"other"},{"name":"p","hosts":["a.test"],"udp":true,"idle_sec":90}]`; err != nil || string(text) != want {
		t.Errorf("got  %s %v\nwant %s", text, err, want)
	}
	text, err = json.Marshal(&Plan{Mode: Observe, Exhausted: ExhaustedRefuse})
	if want := `{"hash":"","mode":"observe","exhausted":"refuse",`; err != nil || !strings.HasPrefix(string(text), want) {
		t.Errorf("got  %s %v\nwant %s...", text, err, want)
	}
	if text, _ := json.Marshal(PortRange{UDP, 53, 53, 1}); string(text) != `{"proto":"udp","first":53,"last":53,"provider":1}` {
		t.Errorf("port range %s", text)
	}
}

func TestFind(t *testing.T) {
	plan, _, err := Check("testdata/contract.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range plan.Compartments {
		if id, ok := plan.FindCompartment(c.Feature, c.Tenant); !ok || int(id) != i {
			t.Errorf("compartment %+v is found at %d, %v", c, id, ok)
		}
	}
	for _, c := range [][2]string{{"chatt", ""}, {"chat", "x"}, {"default", "free"}, {"", ""}} {
		if _, ok := plan.FindCompartment(c[0], c[1]); ok {
			t.Errorf("compartment %v is found", c)
		}
	}
	for i, p := range plan.Providers {
		if at, ok := plan.FindProvider(p.Name); !ok || int(at) != i {
			t.Errorf("provider %s is found at %d, %v", p.Name, at, ok)
		}
	}
	if _, ok := plan.FindProvider("x"); ok {
		t.Error("provider x is found")
	}
}

// A policy that is too large says by what.
func TestTooLarge(t *testing.T) {
	many := func(n int, format string) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, format, i)
		}
		return b.String()
	}
	odd := []string{}
	for port := 1; port < 65536; port += 2 {
		odd = append(odd, fmt.Sprint(port))
	}
	for _, tc := range []struct{ text, want string }{
		{"providers:\n" + many(1024, "  p%d: {cidrs: [10.0.0.0/8]}\n") + "features: {}\n",
			"the policy has too many providers: 1025, and the most is 1024"},
		{"providers: {}\ntenants: {a: {}, b: {}}\nfeatures:\n" + many(1366, "  f%d: {class: batch}\n"),
			"the policy has too many compartments (each feature, and each feature with each tenant): 4099, and the most is 4096"},
		{"providers:\n" + many(127, "  p%d: {cidrs: [10.0.0.0/8]}\n") + "features:\n" + many(128, "  f%d: {class: batch}\n"),
			"the policy has too many routes (compartments times providers): 16512, and the most is 16384"},
		{"features: {}\nproviders:\n  p:\n    ports: [" + strings.Join(odd, ", ") + "]\n    cidrs: [10.0.0.0/8, 10.1.0.0/16, 10.1.1.0/24, 11.0.0.0/8, 12.0.0.0/8, 13.0.0.0/8, 14.0.0.0/8, 15.0.0.0/8, 16.0.0.0/8]\n",
			"the policy has too many port ranges over all destinations: 294912, and the most is 262144"},
	} {
		f, err := Parse("p.yaml", []byte(head+tc.text))
		if err != nil {
			t.Fatal(err)
		}
		_, _, err = Compile(f)
		var errs Errors
		if !errors.As(err, &errs) || err.Error() != "p.yaml:1:1: "+tc.want {
			t.Errorf("got  %v\nwant %s", err, tc.want)
		}
	}
	// At the limit it compiles.
	plan, _ := compileText(t, head+"providers:\n"+many(127, "  p%d: {cidrs: [10.0.0.0/8]}\n")+"features:\n"+many(127, "  f%d: {class: batch}\n"))
	if len(plan.Routes) != MaxRoutes {
		t.Errorf("%d routes", len(plan.Routes))
	}
	// Destinations and bulkheads, without the text.
	f := &File{providers: []*provider{{placed: placed[string]{value: "p"}, ports: portsOf([]Proto{TCP}, []PortRange{{First: 1, Last: 2}})}}}
	for i := range MaxDestinations + 1 {
		f.providers[0].prefixes = append(f.providers[0].prefixes, placed[netip.Prefix]{value: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 32)})
	}
	if _, _, err := Compile(f); err == nil || !strings.Contains(err.Error(), "too many destinations: 65537, and the most is 65536") {
		t.Errorf("got %v", err)
	}
}

// 10,000 prefixes and 1,000 routes: the goal is well under 200 ms from text to plan.
func BenchmarkCheck(b *testing.B) {
	var text strings.Builder
	text.WriteString(head + "providers:\n")
	for p := range 19 {
		fmt.Fprintf(&text, "  p%d:\n    ports: [443, \"8000-8010\"]\n    limits: {connections: 30}\n    cidrs:\n", p)
		for i := range 527 {
			n := p*527 + i
			fmt.Fprintf(&text, "    - 10.%d.%d.0/24\n", n>>8, n&0xff)
		}
		fmt.Fprintf(&text, "    - 10.%d.0.0/16\n", p) // around some of them
	}
	text.WriteString("features:\n")
	for f := range 50 {
		fmt.Fprintf(&text, "  f%d: {class: batch, limits: {connections: 10}, providers: {p1: {connections: 5}}}\n", f)
	}
	data := []byte(text.String())
	file, err := Parse("p.yaml", data)
	if err != nil {
		b.Fatal(err)
	}
	b.Run("parse", func(b *testing.B) {
		for b.Loop() {
			if _, err := Parse("p.yaml", data); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("compile", func(b *testing.B) {
		for b.Loop() {
			plan, _, err := Compile(file)
			if err != nil || len(plan.Destinations) < 10_000 || len(plan.Routes) < 1_000 {
				b.Fatal(err, len(plan.Destinations), len(plan.Routes))
			}
		}
	})
}
