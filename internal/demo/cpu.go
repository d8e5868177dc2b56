package demo

import (
	"fmt"
	"time"
)

// cpu is an application that needs a few milliseconds for an answer, beside JSON parsers, which
// take all of the processor that they get.
type cpu struct {
	Parsers int           `json:"parsers"`
	Records int           `json:"records"` // that the application parses for an answer
	Seconds float64       `json:"seconds"`
	Apart   time.Duration `json:"apart"` // between two calls
}

// theCPU is the demo's own. A document of 300 records takes 1 to 2 ms, and
// the answer around it as long again; the calls are so far apart that the
// handler's fair share, a ninth, suffices for them.
func theCPU() cpu {
	return cpu{Parsers: 8, Records: 300, Seconds: 6, Apart: 50 * time.Millisecond}
}

func (e cpu) about() about {
	takes := time.Duration(e.Seconds * float64(time.Second))
	return about{
		name:  "cpu",
		title: "a handler beside parsers on one processor",
		setup: fmt.Sprintf("an application that answers after 2 to 4 ms of work, a call every %d ms, and %d processes that parse JSON; all on one CPU",
			e.Apart.Milliseconds(), e.Parsers),
		measured: "calls to the handler",
		key:      95,
		policy: policyHead + `providers: {}
features:
  chat:  {class: realtime}
  parse: {class: background}
`,
		runs:  []runInfo{{run: alone, takes: takes, base: true}, {run: without, takes: takes}, {run: with, takes: takes}},
		needs: []tool{python},
		cpu:   true,
		aims:  []aim{{run: without, atLeast: 3}, {run: with, atMost: 1.3}},
	}
}

func (e cpu) run(g *stage) (sample, error) {
	if err := g.app(role{feature: "chat", oneCPU: true}, 1, fmt.Sprintf("chat=parse:%d", e.Records)); err != nil {
		return sample{}, err
	}
	if g.step.Run != alone {
		for range e.Parsers {
			if _, err := g.ready("a parser", role{feature: "parse", oneCPU: true}, g.python("parse.py")); err != nil {
				return sample{}, err
			}
		}
	}
	if err := g.measuring(); err != nil {
		return sample{}, err
	}
	outcomes, err := g.probe(steady("chat", 1/e.Apart.Seconds(), time.Duration(e.Seconds*float64(time.Second)),
		func(int) string { return webURL + "/chat" }))
	if err != nil {
		return sample{}, err
	}
	return gather(outcomes, "chat"), nil
}

func (e cpu) verdict(r rows) string {
	return fmt.Sprintf("Beside the parsers the handler's p95 was %.1f times that alone in one cgroup, and %.2f times with bulkheads.",
		r.without.Ratio, r.with.Ratio)
}
