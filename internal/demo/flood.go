package demo

import (
	"fmt"
	"time"
)

// flood is sixty batch calls beside chat at one provider.
type flood struct {
	Seconds     float64       `json:"seconds"`       // chat's calls of one run are due over this time
	ServeAtOnce int           `json:"serve_at_once"` // calls the provider works on at one time
	ChatRate    float64       `json:"chat_rate"`     // calls per second
	ChatWork    time.Duration `json:"chat_work"`     // the provider's time for a call: this, give or take a fifth
	ChatLimit   int           `json:"chat_limit"`    // connections
	Workers     int           `json:"workers"`       // batch calls tried at one time
	BatchWork   time.Duration `json:"batch_work"`    // as ChatWork
	BatchLimit  int           `json:"batch_limit"`   // connections
}

// theFlood is the demo's own. Chat needs 30 x 0.1 = 3 of the provider's 20
// places; batch's 60 workers would take three times what there is. 300 calls
// give a p99 with three above it. The limits add up to the provider's 20, and
// chat's 10 hold its 3 to 4 calls and what comes due while a busy node holds
// chat up for a moment.
func theFlood() flood {
	return flood{
		Seconds:     10,
		ServeAtOnce: 20,
		ChatRate:    30,
		ChatWork:    100 * time.Millisecond,
		ChatLimit:   10,
		Workers:     60,
		BatchWork:   400 * time.Millisecond,
		BatchLimit:  10,
	}
}

const (
	floodPort = "8000"
	floodURL  = "http://" + loopback + ":" + floodPort
)

func (f flood) about() about {
	takes := f.lasts()
	return about{
		name:  "flood",
		title: "batch floods the provider that chat calls",
		setup: fmt.Sprintf("a provider that works on %d calls at once and queues the rest; chat, in node where it is installed, calls it %g times a second for about %d ms, %d batch workers make one call of about %d ms after another",
			f.ServeAtOnce, f.ChatRate, f.ChatWork.Milliseconds(), f.Workers, f.BatchWork.Milliseconds()),
		measured: "chat calls",
		key:      99,
		policy: fmt.Sprintf(policyHead+`providers:
  local: {cidrs: [%s/32], ports: [%s], limits: {connections: %d}}
features:
  chat:
    class: realtime
    providers: {local: {connections: %d}}
  batch:
    class: batch
    providers: {local: {connections: %d}}
`, loopback, floodPort, f.ServeAtOnce, f.ChatLimit, f.BatchLimit),
		runs:  []runInfo{{run: alone, takes: takes, base: true}, {run: without, takes: takes}, {run: with, takes: takes}},
		needs: []tool{python},
		likes: []tool{node},
		aims:  []aim{{run: without, atLeast: 5}, {run: with, atMost: 1.3}},
	}
}

func (f flood) lasts() time.Duration { return time.Duration(f.Seconds * float64(time.Second)) }

// setUp starts the provider, batch unless chat is to be alone, and chat.
func (f flood) setUp(g *stage) (batch *child, err error) {
	if err := g.provider(floodPort, f.ServeAtOnce); err != nil {
		return nil, err
	}
	if g.step.Run != alone {
		batch, err = g.ready("batch", role{feature: "batch"}, g.python("batch.py", floodURL, fmt.Sprint(f.Workers), fmt.Sprint(ms(f.BatchWork))))
		if err != nil {
			return nil, err
		}
	}
	return batch, g.nodeApp(role{feature: "chat"}, "chat="+floodURL)
}

// calls are chat's, for so long.
func (f flood) calls(last time.Duration) []call {
	return steady("chat", f.ChatRate, last, func(i int) string {
		return fmt.Sprintf("%s/chat?work=%s", webURL, spread(f.ChatWork, i))
	})
}

func (f flood) run(g *stage) (sample, error) {
	batch, err := f.setUp(g)
	if err != nil {
		return sample{}, err
	}
	if batch != nil {
		if err := g.begin(batch); err != nil {
			return sample{}, err
		}
	}
	if err := g.measuring(); err != nil {
		return sample{}, err
	}
	outcomes, err := g.probe(f.calls(f.lasts()))
	if err != nil {
		return sample{}, err
	}
	s := gather(outcomes, "chat")
	if batch != nil {
		s.Load, err = g.finish(batch)
	}
	return s, err
}

// stay keeps the flood and chat going until the end of the demo or enough.
func (f flood) stay(g *stage, begun func() error, enough <-chan struct{}) error {
	if _, err := f.setUp(g); err != nil {
		return err
	}
	if err := begun(); err != nil {
		return err
	}
	for {
		select {
		case <-enough:
			return nil
		default:
		}
		if _, err := g.probe(f.calls(time.Second)); err != nil {
			return err
		}
	}
}

func (f flood) verdict(r rows) string {
	text := fmt.Sprintf("Under the flood chat's p99 was %.1f times that of chat alone without bulkheads, and %.2f times with them.",
		r.without.Ratio, r.with.Ratio)
	if a, b := r.without.Load, r.with.Load; a != nil && b != nil {
		text += fmt.Sprintf(" Batch did %.1f calls/s in place of %.1f: %d of its connects were refused at once, and tried again later.",
			b.CallsPerSecond, a.CallsPerSecond, b.Refused)
	}
	return text
}
