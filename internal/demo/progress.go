package demo

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// startTakes is a first guess at the time that a run takes besides the measured
// part; those that were seen replace it.
const startTakes = time.Second

// progress shows which run is on and how long it all still takes: one line
// that is rewritten on a terminal, else a line for each run.
type progress struct {
	w       io.Writer
	sc      scenario
	updates chan progressUpdate
	ended   chan struct{}
	once    sync.Once
}

type progressUpdate struct {
	step      step
	measuring bool
}

func newProgress(w io.Writer, sc scenario) *progress {
	p := &progress{w: w, sc: sc, updates: make(chan progressUpdate), ended: make(chan struct{})}
	go p.show(isTerminal(w))
	return p
}

// step says that a run, or the measured part of it, begins.
func (p *progress) step(s step, measuring bool) { p.updates <- progressUpdate{s, measuring} }

// end removes the line. Nothing may be said after it.
func (p *progress) end() {
	p.once.Do(func() { close(p.updates) })
	<-p.ended
}

func (p *progress) show(rewrite bool) {
	defer close(p.ended)
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	est := newEstimate(p.sc)
	var now progressUpdate
	// Errors are nothing to stop for: nobody watches.
	for {
		select {
		case u, ok := <-p.updates:
			if !ok {
				if rewrite {
					fmt.Fprint(p.w, "\r\x1b[K")
				}
				return
			}
			if !u.measuring {
				est.next(time.Now())
				if !rewrite {
					fmt.Fprintln(p.w, p.line(est, u, time.Now()))
				}
			}
			now = u
		case <-tick.C:
		}
		if rewrite && now.step.Experiment != "" {
			fmt.Fprint(p.w, "\r\x1b[K"+p.line(est, now, time.Now()))
		}
	}
}

func (p *progress) line(est *estimate, u progressUpdate, now time.Time) string {
	if est.nth >= len(p.sc.Runs) {
		return fmt.Sprintf("%s: starting, to keep", u.step.Experiment)
	}
	name := map[runName]string{alone: "alone", without: "without bulkheads", with: "with bulkheads"}[u.step.Run]
	left := est.left(now).Round(time.Second)
	return fmt.Sprintf("[%d/%d] %s, %s; about %.0f s left", est.nth+1, len(p.sc.Runs), u.step.Experiment, name, left.Seconds())
}

// estimate is how long the runs take.
type estimate struct {
	takes []time.Duration // of each run, the measured part
	nth   int             // the run that is on; -1 before the first
	since time.Time       // when it began
	extra time.Duration   // a run's time besides, in the mean of those that were seen
}

func newEstimate(sc scenario) *estimate {
	e := &estimate{nth: -1, extra: startTakes}
	for _, s := range sc.Runs {
		e.takes = append(e.takes, sc.info(s).takes)
	}
	return e
}

// next says that the next run begins.
func (e *estimate) next(now time.Time) {
	if e.nth >= 0 && e.nth < len(e.takes) {
		seen := max(now.Sub(e.since)-e.takes[e.nth], 0)
		e.extra += (seen - e.extra) / time.Duration(e.nth+1)
	}
	e.nth++
	e.since = now
}

// left is how long the runs still take.
func (e *estimate) left(now time.Time) time.Duration {
	var left time.Duration
	for i := max(e.nth, 0); i < len(e.takes); i++ {
		left += e.takes[i] + e.extra
		if i == e.nth {
			left = max(left-now.Sub(e.since), 0)
		}
	}
	return left
}
