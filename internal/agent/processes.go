package agent

import (
	"log/slog"
	"time"

	"bulkhead/internal/procevents"
	"bulkhead/pkg/cgroup"
	"bulkhead/pkg/policy"
)

const (
	// verifyEvery is how often it is seen to it that processes are where they were put.
	verifyEvery = 5 * time.Second
	// passEvery is how often all processes are looked at although all events are told:
	// one that began to match in a way that is no event, say by a user that was made.
	passEvery = 5 * time.Minute
	// pollEvery and pollPass stand in for events.
	pollEvery = 100 * time.Millisecond
	pollPass  = 10 * time.Second
)

// Processes is what the agent does about processes that match by what they are.
type Processes struct {
	// Watch is "events" or "polling"; "" if no feature matches processes.
	Watch string `json:"watch"`
	// Moved is how many were moved into a compartment, Lost how many of these
	// were found elsewhere later.
	Moved uint64 `json:"moved"`
	Lost  uint64 `json:"lost"`
	// Skipped are looks at processes that match and were not moved, by reason.
	Skipped map[string]uint64 `json:"skipped"`
}

// processes places the processes of the plan in force: it has the placer, and
// who tells of processes.
type processes struct {
	tree   *cgroup.Tree
	log    *slog.Logger
	placer *cgroup.Placer

	events   *procevents.Listener
	poll     *time.Ticker
	nextPass time.Time
	verify   time.Time
}

// wake is ready when there is something to do: one of the two, or none.
func (p *processes) wake() (<-chan struct{}, <-chan time.Time) {
	if p.events != nil {
		return p.events.Wake(), nil
	}
	if p.poll != nil {
		return nil, p.poll.C
	}
	return nil, nil
}

// follow makes a plan the one by which processes are placed, and places all
// that there are. found are the containers that it names.
func (p *processes) follow(plan *policy.Plan, found cgroup.Containers) error {
	next := cgroup.NewPlacer(p.tree, plan)
	next.Containers(found)
	next.Follow(p.placer)
	p.placer = next
	if !next.Needed() {
		p.close()
		return nil
	}
	if p.events == nil && p.poll == nil {
		// Before the look at all: what begins meanwhile is told.
		events, err := procevents.Listen()
		if err != nil {
			p.startPolling(err)
		}
		p.events = events
	}
	return p.pass()
}

// contain tells which cgroups are those of containers that the plan names.
func (p *processes) contain(found cgroup.Containers) {
	if p.placer != nil {
		p.placer.Containers(found)
	}
}

func (p *processes) startPolling(why error) {
	p.log.Info("processes are looked for instead of being told of by the kernel", "every", pollEvery.String(), "reason", why.Error())
	p.poll = time.NewTicker(pollEvery)
}

func (p *processes) close() {
	if p.events != nil {
		p.events.Close()
	}
	if p.poll != nil {
		p.poll.Stop()
	}
	p.events, p.poll = nil, nil
}

// pass looks at all processes.
func (p *processes) pass() error {
	every := passEvery
	if p.events == nil {
		every = pollPass
	}
	p.nextPass, p.verify = time.Now().Add(every), time.Now().Add(verifyEvery)
	err := p.placer.Pass()
	p.tell()
	return err
}

// told looks at what the kernel told of.
func (p *processes) told() error {
	events, lost, err := p.events.Take()
	if err != nil {
		p.close()
		p.startPolling(err)
		return p.pass()
	}
	p.placer.Begin()
	for _, e := range events {
		switch e.What {
		case procevents.Fork:
			p.placer.Forked(e.PID, e.Child)
		default:
			p.placer.Look(e.PID)
		}
	}
	if lost {
		p.log.Info("more processes began than could be told of: all are looked at")
		return p.pass()
	}
	p.tell()
	return nil
}

// polled looks for what is new.
func (p *processes) polled(now time.Time) error {
	err := p.placer.Poll(now)
	p.tell()
	return err
}

// tick does from time to time what no event tells of.
func (p *processes) tick(now time.Time) error {
	if p.placer == nil || !p.placer.Needed() {
		return nil
	}
	if now.After(p.nextPass) {
		return p.pass()
	}
	if now.After(p.verify) {
		p.verify = now.Add(verifyEvery)
		p.placer.Verify()
		p.tell()
	}
	return nil
}

// tell logs the moves since it was called last: one line for those from one
// cgroup into one compartment, with the first pids.
func (p *processes) tell() {
	type way struct {
		compartment policy.Compartment
		from        string
	}
	pids := map[way][]int{}
	var ways []way
	for _, m := range p.placer.Moves() {
		w := way{m.Compartment, m.From}
		if pids[w] == nil {
			ways = append(ways, w)
		}
		pids[w] = append(pids[w], m.PID)
	}
	for _, w := range ways {
		p.log.Info("moved processes into their compartment", "processes", len(pids[w]), "pids", pids[w][:min(len(pids[w]), 10)], "from", w.from,
			slog.Group("compartment", "feature", w.compartment.Feature, "tenant", w.compartment.Tenant))
	}
}

// says is what is published.
func (p *processes) says() (s Processes, conds []cgroup.Condition) {
	s.Skipped = map[string]uint64{}
	for _, why := range cgroup.SkipReasons() {
		s.Skipped[why] = 0 // a series that is there from the beginning
	}
	if p.placer == nil {
		return s, nil
	}
	switch {
	case p.events != nil:
		s.Watch = "events"
	case p.poll != nil:
		s.Watch = "polling"
	}
	c := p.placer.Counts()
	s.Moved, s.Lost = c.Moved, c.Lost
	for why, n := range c.Skipped {
		s.Skipped[why] = n
	}
	return s, p.placer.Conditions()
}
