package cgroup

import (
	"fmt"
	"path"
	"strings"
	"time"
)

// limits bound the waiting for systemd. The owner of the tree does nothing else meanwhile.
type limits struct {
	// request bounds one request and the job that it makes. While systemd reloads or executes itself again nobody
	// answers: below a second mostly, 11 to 38 s in an emulated machine beside 4 to 16 busy processes.
	request time.Duration
	// effect bounds the wait for what an answered request brings about. The longest that was measured is 0.3 s, in that
	// machine beside 16 busy processes.
	effect time.Duration
	// vain is how much of each window waits may take that run out.
	vain, window time.Duration
}

// usualLimits are those outside of tests.
func usualLimits() limits {
	return limits{request: 20 * time.Second, effect: 2 * time.Second, vain: 5 * time.Second, window: 30 * time.Second}
}

// patience keeps account of waits that ran out, so that what systemd does not bring about is not waited for again with
// each unit. A wait that ends well is not counted: that is work.
type patience struct {
	limits
	since  time.Time // the window began
	spent  time.Duration
	ranOut map[effect]vain
	// silent is when systemd has last left a request without an answer; zero if it has answered since.
	silent time.Time
}

// effect is what is waited for: a controller in the children of a cgroup, a file of a cgroup, or the job of a unit.
type effect struct{ at, what string }

// vain is a wait that ran out: until when it is not waited for again, and why it did.
type vain struct {
	until time.Time
	cause cause
}

// cause is why something is not in force.
type cause struct{ reason, text string }

// known is the cause of a wait that has just run out, for this or for one that it would need: a controller that a cgroup
// is not given cannot be passed on by it.
func (p *patience) known(at, file string, now time.Time) (effect, cause, bool) {
	controller, _, _ := strings.Cut(file, ".")
	kinds := []effect{{at, file}}
	for ; controller != "" && at != "/"; at = path.Dir(at) {
		kinds = append(kinds, effect{path.Dir(at), controller})
	}
	for _, e := range kinds {
		if v, ok := p.ranOut[e]; ok && now.Before(v.until) {
			return e, v.cause, true
		}
	}
	return effect{}, cause{}, false
}

// left is how long a wait may last that begins now.
func (p *patience) left(most time.Duration, now time.Time) time.Duration {
	if now.Sub(p.since) >= p.window {
		return min(most, p.vain)
	}
	return max(0, min(most, p.vain-p.spent))
}

// ran out: it was waited for in vain.
func (p *patience) inVain(e effect, why cause, took time.Duration, now time.Time) {
	if now.Sub(p.since) >= p.window {
		p.since, p.spent = now, 0
	}
	p.spent += took
	if p.ranOut == nil || len(p.ranOut) > 1<<12 {
		p.ranOut = map[effect]vain{}
	}
	p.ranOut[e] = vain{now.Add(p.window), why}
}

// came: what is waited for does come.
func (p *patience) came(at, file string) {
	controller, _, _ := strings.Cut(file, ".")
	delete(p.ranOut, effect{at, file})
	delete(p.ranOut, effect{path.Dir(at), controller})
}

// asks is how long the next request may take. After one that was not answered the next ones fail at once, and then one
// finds out whether it answers again.
func (p *patience) asks(now time.Time) (time.Duration, error) {
	switch {
	case p.silent.IsZero():
		return p.request, nil
	case now.Sub(p.silent) < p.request:
		return 0, fmt.Errorf("it is not asked again yet: it left a request without an answer %v ago", now.Sub(p.silent).Round(time.Second))
	}
	return p.effect, nil
}
