package demo

import (
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"bulkhead/pkg/policy"
)

// The names are the contract of --only, each run is described once, and one of
// an experiment's runs is what the others are compared with.
func TestExperiments(t *testing.T) {
	want := []string{"flood", "slow", "tenants", "bounded", "cpu", "database"}
	if got := Experiments(); !slices.Equal(got, want) {
		t.Fatalf("%q, want %q", got, want)
	}
	sc := theScenario()
	var total time.Duration
	for _, e := range sc.experiments() {
		a := e.about()
		base := 0
		var runs []runName
		for _, r := range a.runs {
			runs = append(runs, r.run)
			total += r.takes + startTakes
			if r.base {
				base++
			}
		}
		if base != 1 || !slices.Contains(runs, without) || !slices.Contains(runs, with) {
			t.Errorf("%s: runs %v, %d to compare with", a.name, runs, base)
		}
		if a.key != 50 && a.key != 95 && a.key != 99 {
			t.Errorf("%s: the table has no %s", a.name, a.key)
		}
		if len(a.needs) == 0 || a.title == "" || a.setup == "" || a.measured == "" {
			t.Errorf("%+v", a)
		}
	}
	if total > 2*time.Minute {
		t.Errorf("all takes about %v, and two minutes are promised", total)
	}
	if got := sc.steps([]string{"cpu", "slow"}); !slices.Equal(got, []step{
		{"slow", alone}, {"slow", without}, {"slow", with}, {"cpu", alone}, {"cpu", without}, {"cpu", with}}) {
		t.Errorf("steps %v", got)
	}
}

// Every policy is without errors and is enforced, and warns of nothing but
// what is meant: a tenant that is to have one place.
func TestPolicies(t *testing.T) {
	for _, e := range theScenario().experiments() {
		a := e.about()
		plan, warnings := compile(t, a.policy)
		for _, w := range warnings {
			if a.name != "tenants" || !strings.Contains(w, "tenants.free.providers.route: a limit of 1") {
				t.Errorf("%s: warning %s", a.name, w)
			}
		}
		if plan.Mode != policy.Enforce {
			t.Errorf("%s: mode %s", a.name, plan.Mode)
		}
	}
}

func compile(t *testing.T, text string) (*policy.Plan, []string) {
	t.Helper()
	f, err := policy.Parse("demo.yaml", []byte(text))
	if err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	plan, warnings, err := policy.Compile(f)
	if err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	var texts []string
	for _, w := range warnings {
		texts = append(texts, w.String())
	}
	return plan, texts
}

// The policies cover the addresses that are called, and hold what the
// experiments say: the narrowest limit of each workload's route.
func TestLimits(t *testing.T) {
	sc := theScenario()
	for _, c := range []struct {
		policy, feature, tenant, provider, port string
		want                                    policy.Limit
	}{
		{sc.Flood.about().policy, "chat", "", "local", floodPort, 10},
		{sc.Flood.about().policy, "batch", "", "local", floodPort, 10},
		{sc.Slow.about().policy, "app", "", "slow", slowPort, 2},
		{sc.Slow.about().policy, "app", "", "healthy", healthyPort, policy.Unlimited},
		{sc.Tenants.about().policy, "api", "free", "route", routePort, 1},
		{sc.Tenants.about().policy, "api", "pro", "route", routePort, 3},
		{sc.Bounded.about().policy, "burst", "", "service", boundedPort, 8},
		{sc.Database.about().policy, "report", "", "postgres", databasePort, 5},
		{sc.Database.about().policy, "web", "", "postgres", databasePort, 5},
	} {
		plan, _ := compile(t, c.policy)
		p, ok := plan.FindProvider(c.provider)
		if !ok {
			t.Fatalf("no provider %s", c.provider)
		}
		addr := netip.MustParseAddrPort(loopback + ":" + c.port)
		covered := false
		for _, d := range plan.Destinations {
			for _, r := range d.Ports {
				covered = covered || d.Prefix == netip.PrefixFrom(addr.Addr(), 32) && r.Proto == policy.TCP &&
					r.First <= addr.Port() && addr.Port() <= r.Last && r.Provider == p
			}
		}
		if !covered {
			t.Errorf("%s is not %s in %+v", addr, c.provider, plan.Destinations)
		}
		id, ok := plan.FindCompartment(c.feature, c.tenant)
		if !ok {
			t.Fatalf("no compartment %s %s", c.feature, c.tenant)
		}
		limit := policy.Unlimited
		for _, h := range plan.Route(id, p).Holds {
			limit = min(limit, plan.Bulkheads[h].Limit)
		}
		if limit != c.want {
			t.Errorf("%s %s to %s: limit %v, want %v", c.feature, c.tenant, c.provider, limit, c.want)
		}
	}
	// Together no more than there are places, or queues would form with
	// bulkheads too.
	if f := sc.Flood; f.ChatLimit+f.BatchLimit > f.ServeAtOnce {
		t.Errorf("flood: limits above the %d places", f.ServeAtOnce)
	}
	if e := sc.Tenants; e.LimitA+e.LimitB > e.ServeAtOnce {
		t.Errorf("tenants: limits above the %d places", e.ServeAtOnce)
	}
}

// The calls are what the setups say, in order of time, and are such that
// queues of the ideal lengths give the known figures.
func TestCalls(t *testing.T) {
	sc := theScenario()
	for name, calls := range map[string][]call{
		"flood": sc.Flood.calls(sc.Flood.lasts()), "slow": sc.Slow.calls(without), "tenants": sc.Tenants.calls(without),
		"slow alone": sc.Slow.calls(alone), "tenants alone": sc.Tenants.calls(alone),
	} {
		if !slices.IsSortedFunc(calls, func(a, b call) int { return int(a.Due - b.Due) }) {
			t.Errorf("%s: not in order of time", name)
		}
		for _, c := range calls {
			u, err := url.Parse(c.URL)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := time.ParseDuration(u.Query().Get("work")); err != nil {
				t.Errorf("%s: %v", c.URL, err)
			}
		}
	}
	if calls := sc.Flood.calls(sc.Flood.lasts()); len(calls) != 300 || calls[30].Due != time.Second {
		t.Errorf("flood: %d calls, the 31st due after %v", len(calls), calls[30].Due)
	}
	// What the calls to the healthy service would wait for a thread.
	var waits []time.Duration
	var slowBegan time.Duration
	busy := 0
	for _, c := range sc.Slow.calls(with) {
		switch c.Series {
		case "slow":
			if c.Due != slowBegan {
				busy = 0
			}
			slowBegan = c.Due
			busy++
		case "healthy":
			if busy != sc.Slow.Threads {
				t.Errorf("%d slow calls for %d threads", busy, sc.Slow.Threads)
			}
			waits = append(waits, slowBegan+sc.Slow.SlowWork-c.Due)
		}
	}
	slices.Sort(waits)
	if m := percentile(waits, 50); m != 1415*time.Millisecond {
		t.Errorf("slow: the calls wait %v, known are 1415 ms", m)
	}
	// What is measured is measured alone as often, and nothing else is.
	count := func(calls []call, series string) (n int) {
		for _, c := range calls {
			if c.Series == series {
				n++
			}
		}
		return n
	}
	for _, run := range []runName{alone, without, with} {
		if n := count(sc.Tenants.calls(run), "b"); n != sc.Tenants.Rounds*sc.Tenants.Calls {
			t.Errorf("tenants, %s: %d calls of B", run, n)
		}
		if n := count(sc.Slow.calls(run), "healthy"); n != sc.Slow.Rounds*sc.Slow.Calls {
			t.Errorf("slow, %s: %d calls to the healthy service", run, n)
		}
	}
	if n := count(sc.Slow.calls(alone), "slow"); n != 0 {
		t.Errorf("slow: %d slow calls beside those that are to be alone", n)
	}
}

// Each outcome is counted once, as what it was, and only its own series.
func TestGather(t *testing.T) {
	s := gather([]outcome{
		{Series: "a", Took: 3},
		{Series: "b", Took: 1},
		{Series: "a", Took: 2, Refused: true, Error: "full"},
		{Series: "a", Took: 1},
		{Series: "a", Took: 9, Error: " broken "},
		{Series: "a", Took: 9, Error: "broken again"},
	}, "a")
	if !slices.Equal(s.Latencies, []time.Duration{1, 3}) || !slices.Equal(s.Refused, []time.Duration{2}) || s.Failed != 2 || s.Error != "broken" {
		t.Errorf("%+v", s)
	}
	if s := gather([]outcome{{Series: "a", Refused: true, Error: "full"}}, "a"); s.Error != "full" || s.Failed != 0 {
		t.Errorf("%+v", s)
	}
}
