package demo

import (
	"fmt"
	"time"
)

// slow is an application whose few threads, and connections, are shared by two
// services it depends on, of which one has become slow.
type slow struct {
	Threads  int           `json:"threads"`
	SlowWork time.Duration `json:"slow_work"` // the slow service's time for a call
	Limit    int           `json:"limit"`     // connections to the slow service
	Rounds   int           `json:"rounds"`    // each: a slow call for every thread, then calls to the healthy service
	Calls    int           `json:"calls"`     // to the healthy service, of each round
	// First is when the first of those is due after the slow calls, Apart the
	// time between two of them.
	First time.Duration `json:"first"`
	Apart time.Duration `json:"apart"`
}

// theSlow is the demo's own. The middle one of the nine calls comes 85 ms
// after the slow ones: it waits 1415 ms for the first thread that is free.
func theSlow() slow {
	return slow{
		Threads:  5,
		SlowWork: 1500 * time.Millisecond,
		Limit:    2,
		Rounds:   3,
		Calls:    9,
		First:    45 * time.Millisecond,
		Apart:    10 * time.Millisecond,
	}
}

const (
	healthyPort, slowPort = "8001", "8002"
	healthyURL            = "http://" + loopback + ":" + healthyPort
	slowURL               = "http://" + loopback + ":" + slowPort
)

// pause is the time between the end of a round's slow calls and the next round.
func (e slow) pause() time.Duration { return e.SlowWork / 6 }

func (e slow) round() time.Duration { return e.SlowWork + e.pause() }

// quietRound is a round without slow calls, which nothing has to wait for.
func (e slow) quietRound() time.Duration {
	return e.First + time.Duration(e.Calls)*e.Apart + e.pause()
}

func (e slow) about() about {
	takes := 2*warmFor + time.Duration(e.Rounds)*e.round()
	quiet := 2*warmFor + time.Duration(e.Rounds)*e.quietRound()
	return about{
		name:  "slow",
		title: "a slow service holds the pool that a healthy one needs",
		setup: fmt.Sprintf("an application with %d threads, each with a connection, calls two services; one takes %d ms for a call, and %d calls to it come just before those to the other",
			e.Threads, e.SlowWork.Milliseconds(), e.Threads),
		measured: "calls to the healthy",
		key:      50,
		policy: fmt.Sprintf(policyHead+`providers:
  healthy: {cidrs: [%s/32], ports: [%s]}
  slow:    {cidrs: [%s/32], ports: [%s]}
features:
  app:
    class: realtime
    providers: {slow: {connections: %d}}
`, loopback, healthyPort, loopback, slowPort, e.Limit),
		runs:  []runInfo{{run: alone, takes: quiet, base: true}, {run: without, takes: takes, known: 1415}, {run: with, takes: takes, known: 2.3}},
		needs: []tool{python},
		aims:  asAlone,
	}
}

// calls are those of all rounds: the slow ones too, unless the healthy
// service's are to be alone.
func (e slow) calls(run runName) []call {
	// The pool makes a thread when none is idle: all are there before it counts.
	var all []call
	for range e.Threads {
		all = append(all, call{URL: webURL + "/healthy?work=100ms", Series: "warm-up"})
	}
	for _, c := range warmUp(webURL + "/healthy?work=0s") {
		c.Due += warmFor
		all = append(all, c)
	}
	apart, busy := e.round(), e.Threads
	if run == alone {
		apart, busy = e.quietRound(), 0
	}
	for round := range e.Rounds {
		begin := 2*warmFor + time.Duration(round)*apart
		for range busy {
			all = append(all, call{Due: begin, URL: webURL + "/slow?work=" + e.SlowWork.String(), Series: "slow"})
		}
		for i := range e.Calls {
			all = append(all, call{Due: begin + e.First + time.Duration(i)*e.Apart, URL: webURL + "/healthy?work=0s", Series: "healthy"})
		}
	}
	return all
}

func (e slow) run(g *stage) (sample, error) {
	for _, port := range []string{healthyPort, slowPort} {
		if err := g.provider(port, 100); err != nil {
			return sample{}, err
		}
	}
	if err := g.app(role{feature: "app"}, e.Threads, "healthy="+healthyURL, "slow="+slowURL); err != nil {
		return sample{}, err
	}
	if err := g.measuring(); err != nil {
		return sample{}, err
	}
	outcomes, err := g.probe(e.calls(g.step.Run))
	if err != nil {
		return sample{}, err
	}
	s := gather(outcomes, "healthy")
	if g.step.Run != alone {
		others := gather(outcomes, "slow")
		s.Load = &loadReport{Done: len(others.Latencies), Refused: len(others.Refused), Failed: others.Failed, Latencies: others.Latencies}
	}
	return s, nil
}

func (e slow) verdict(r rows) string {
	return fmt.Sprintf("Half of the calls to the healthy service took more than %s ms behind the slow one, and %s ms with %d connections for it, where they take %s ms with no slow calls at all: %d of %d calls to the slow one were refused at once.",
		figures(r.without.P50), figures(r.with.P50), e.Limit, figures(r.alone.P50), r.with.Load.Refused, r.with.Load.Refused+r.with.Load.Done+r.with.Load.Failed)
}
