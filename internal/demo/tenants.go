package demo

import (
	"fmt"
	"time"
)

// tenants is a route that two tenants share, of which one floods it.
type tenants struct {
	ServeAtOnce int           `json:"serve_at_once"` // calls the route's end works on at one time
	Work        time.Duration `json:"work"`          // its time for a call
	Workers     int           `json:"workers"`       // of tenant A: calls tried at one time
	LimitA      int           `json:"limit_a"`       // connections
	LimitB      int           `json:"limit_b"`
	Calls       int           `json:"calls"` // of tenant B, in a round
	// Step is the time between two calls of a round, Apart between two rounds.
	Step   time.Duration `json:"step"`
	Rounds int           `json:"rounds"`
	Apart  time.Duration `json:"apart"`
}

// theTenants is the demo's own. Sixty calls of 100 ms, four at a time, are 1.5
// s, behind which the first of B's takes another 100 ms.
func theTenants() tenants {
	return tenants{
		ServeAtOnce: 4,
		Work:        100 * time.Millisecond,
		Workers:     60,
		LimitA:      1,
		LimitB:      3,
		Calls:       5,
		Step:        10 * time.Millisecond,
		Rounds:      3,
		Apart:       2 * time.Second,
	}
}

const (
	routePort = "8003"
	routeURL  = "http://" + loopback + ":" + routePort
)

func (e tenants) about() about {
	return about{
		name:  "tenants",
		title: "tenant A floods the route that tenant B uses",
		setup: fmt.Sprintf("a route that serves %d calls at once, of %d ms each; tenant A keeps %d calls on it, tenant B sends %d within %d ms, %d times",
			e.ServeAtOnce, e.Work.Milliseconds(), e.Workers, e.Calls, (time.Duration(e.Calls-1) * e.Step).Milliseconds(), e.Rounds),
		measured: "calls of tenant B",
		key:      50,
		policy: fmt.Sprintf(policyHead+`providers:
  route: {cidrs: [%s/32], ports: [%s], limits: {connections: %d}}
tenants:
  free: {providers: {route: {connections: %d}}}        # tenant A
  pro:  {providers: {route: {connections: %d}}}        # tenant B
features:
  api:
    class: timely
    tenants: {free: {}, pro: {}}
`, loopback, routePort, e.ServeAtOnce, e.LimitA, e.LimitB),
		runs:  []runInfo{{run: alone, takes: e.lasts(alone), base: true}, {run: without, takes: e.lasts(without), known: 1594}, {run: with, takes: e.lasts(with), known: 103}},
		needs: []tool{python},
		aims:  asAlone,
	}
}

// apart is the time between two rounds: without tenant A nothing has to
// settle between them.
func (e tenants) apart(run runName) time.Duration {
	if run == alone {
		return 3 * e.Work
	}
	return e.Apart
}

func (e tenants) lasts(run runName) time.Duration {
	return warmFor + time.Duration(e.Rounds)*e.apart(run)
}

// calls are tenant B's.
func (e tenants) calls(run runName) []call {
	all := warmUp(webURL + "/api?work=0s")
	for round := range e.Rounds {
		for i := range e.Calls {
			all = append(all, call{Due: warmFor + time.Duration(round)*e.apart(run) + time.Duration(i)*e.Step, URL: webURL + "/api?work=" + e.Work.String(), Series: "b"})
		}
	}
	return all
}

func (e tenants) run(g *stage) (sample, error) {
	if err := g.provider(routePort, e.ServeAtOnce); err != nil {
		return sample{}, err
	}
	if err := g.app(role{feature: "api", tenant: "pro"}, 0, "--retry", "api="+routeURL); err != nil {
		return sample{}, err
	}
	var a *child
	if g.step.Run != alone {
		var err error
		a, err = g.ready("tenant A", role{feature: "api", tenant: "free"},
			g.python("batch.py", routeURL, fmt.Sprint(e.Workers), fmt.Sprint(ms(e.Work))))
		if err != nil {
			return sample{}, err
		}
		if err := g.begin(a); err != nil {
			return sample{}, err
		}
	}
	if err := g.measuring(); err != nil {
		return sample{}, err
	}
	outcomes, err := g.probe(e.calls(g.step.Run))
	if err != nil {
		return sample{}, err
	}
	s := gather(outcomes, "b")
	if a != nil {
		s.Load, err = g.finish(a)
	}
	return s, err
}

func (e tenants) verdict(r rows) string {
	return fmt.Sprintf("Half of tenant B's calls took more than %s ms behind tenant A's flood, and %s ms where A has %d of the route's %d places and B has %d; without A they take %s ms.",
		figures(r.without.P50), figures(r.with.P50), e.LimitA, e.ServeAtOnce, e.LimitB, figures(r.alone.P50))
}
