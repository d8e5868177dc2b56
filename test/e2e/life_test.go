package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/conn"
	"bulkhead/pkg/policy"
)

// busy has a provider that clients fill and one that has room for all of them. What is
// adopted needs no slice, so that a detach leaves nothing of ours.
const busy = `
apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers:
  tight: {cidrs: [@1/32], ports: [8000], limits: {connections: 6}}
  roomy: {cidrs: [@2/32], ports: [8000], protocol: [tcp, udp], limits: {connections: 60}}
features:
  chat:  {class: realtime, cpu: none, match: [{cgroup: /apps/chat}]}
  batch: {class: batch, cpu: none, match: [{cgroup: /apps/batch}]}
`

// load is clients at work: one holds connections, the others connect and close as fast as
// they can, with more threads at tight than it has places for.
type load struct {
	n       *node
	holder  *kerneltest.Client
	tight   []int // what the holder has open
	roomy   []int
	storms  map[string]*kerneltest.Client // by provider
	servers [2]*kerneltest.Server
}

const (
	heldTight = 4
	heldRoomy = 11 // one of them is UDP
	held      = heldTight + heldRoomy
)

func (n *node) load() *load {
	n.t.Helper()
	l := &load{n: n, storms: map[string]*kerneltest.Client{}, servers: [2]*kerneltest.Server{n.serve(1), n.serve(2)}}
	l.holder = n.place(n.Mkdir("apps/chat"))
	for _, p := range []string{"tight", "roomy"} {
		l.storms[p] = n.place(n.Mkdir("apps/batch"))
	}
	return l
}

func (l *load) hold() {
	l.n.t.Helper()
	l.tight = dials(l.n.t, l.holder, l.n.addr(1), heldTight, 0)
	l.roomy = append(dials(l.n.t, l.holder, l.n.addr(2), heldRoomy-1, 0), l.holder.MustDial(kerneltest.UDP4, l.n.addr(2)))
}

func (l *load) storm() {
	l.n.t.Helper()
	l.storms["tight"].Storm(kerneltest.TCP4, l.n.addr(1), 3)
	l.storms["roomy"].Storm(kerneltest.TCP4, l.n.addr(2), 2)
}

// calm ends the storms. Nobody was refused who had room.
func (l *load) calm(mayRefuse bool) {
	l.n.t.Helper()
	tight, roomy := l.storms["tight"].Calm(), l.storms["roomy"].Calm()
	if len(roomy) != 1 || roomy[0] == 0 {
		l.n.t.Errorf("connects to the provider that has room: %v", roomy)
	}
	if mayRefuse {
		delete(tight, syscall.ECONNREFUSED)
	}
	if len(tight) != 1 || tight[0] == 0 {
		l.n.t.Errorf("connects to the provider that is full: %v", tight)
	}
	l.n.t.Logf("%d and %d connects", tight[0], roomy[0])
}

// release closes what is held.
func (l *load) release() {
	l.n.t.Helper()
	l.holder.Close(append(l.tight, l.roomy...)...)
	l.tight, l.roomy = nil, nil
}

// wantHeld fails unless what is held is counted, to the last one, and no limit was ever
// exceeded: peak is the most that there was at any moment.
func (n *node) wantHeld(want int) {
	n.t.Helper()
	s := n.status()
	if b := s.find("feature chat"); b.InUse != want {
		n.t.Errorf("chat has %d in use, want the %d that it holds", b.InUse, want)
	}
	for _, b := range s.Bulkheads {
		if b.Limit != nil && (b.Peak > *b.Limit || b.InUse > *b.Limit) {
			n.t.Errorf("%s: %d in use, %d at most, with a limit of %d", b.name(), b.InUse, b.Peak, *b.Limit)
		}
	}
	if c := s.condition("Counts"); c != nil {
		n.t.Errorf("condition %+v", c)
	}
}

// wantNothing waits until no bulkhead has anything in use and no slot is left.
func (n *node) wantNothing() {
	n.t.Helper()
	kerneltest.Poll(n.t, "nothing is in use", func() error {
		var faults []error
		for _, b := range n.status().Bulkheads {
			if b.InUse != 0 {
				faults = append(faults, fmt.Errorf("%s: %d", b.name(), b.InUse))
			}
		}
		if c := n.conns(); len(c) != 0 {
			faults = append(faults, fmt.Errorf("conns %+v", c))
		}
		return errors.Join(faults...)
	})
}

// sampler reads the counts again and again, whatever the agent does.
type sampler struct {
	stop  chan struct{}
	done  sync.WaitGroup
	n     int
	wrong map[string]int
}

// sample samples until the sampler ends: no bulkhead is above its limit, and chat has
// between low and high.
func (n *node) sample(low, high uint32) *sampler {
	n.t.Helper()
	r, err := conn.OpenReader(conn.Options{CgroupRoot: n.Cgroup.Path, BPFFS: n.BPFFS})
	if err != nil {
		n.t.Fatal(err)
	}
	s := &sampler{stop: make(chan struct{}), wrong: map[string]int{}}
	s.done.Go(func() {
		defer r.Close()
		every := time.NewTicker(5 * time.Millisecond)
		defer every.Stop()
		for {
			snap, err := r.Snapshot(context.Background())
			s.n++
			if err != nil {
				s.wrong[err.Error()]++
				return
			}
			for _, b := range snap.Bulkheads {
				if b.Limit != policy.Unlimited && b.InUse > uint32(b.Limit) {
					s.wrong[fmt.Sprintf("%s: %d in use with a limit of %d", b.Key, b.InUse, b.Limit)]++
				}
				if b.Scope == policy.ScopeFeature && b.Feature == "chat" && (b.InUse < low || b.InUse > high) {
					s.wrong[fmt.Sprintf("chat: %d in use, want %d to %d", b.InUse, low, high)]++
				}
			}
			select {
			case <-s.stop:
				return
			case <-every.C:
			}
		}
	})
	return s
}

func (s *sampler) end(t testing.TB) {
	t.Helper()
	close(s.stop)
	s.done.Wait()
	t.Logf("%d samples", s.n)
	for what, n := range s.wrong {
		t.Errorf("%s: in %d of %d samples", what, n, s.n)
	}
}

// wantUnmended fails if a count had to be put right.
func (n *node) wantUnmended() {
	n.t.Helper()
	for _, l := range n.lines() {
		if strings.Contains(l.Msg, "freed slots") {
			n.t.Errorf("the agent had to mend: %s", l.text)
		}
	}
}

const (
	killRounds = 100
	// Where a machine is emulated there are fewer, and still some.
	killRoundsLeast = 5
)

// Killed and started again, a hundred times, at any moment of its start and of its work,
// with clients at work all the time: no count drifts, no limit is exceeded, nobody is
// refused who had room, and no counter falls.
func TestKilledUnderLoad(t *testing.T) {
	n := newNode(t)
	n.write(busy)
	l := n.load()
	begun := time.Now()
	a := n.start()
	startTakes := time.Since(begun)
	l.hold()
	samples := n.sample(held-2, held)
	l.storm()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d, a start takes %v", seed, startTakes)
	random := rand.New(rand.NewPCG(seed, 0))
	upTo := func(d time.Duration) time.Duration { return time.Duration(random.Int64N(int64(d))) }
	before := n.scrape()
	round, ready := 0, 0
	for ; round < killRounds && (round < killRoundsLeast || time.Since(begun) < killTime); round++ {
		// The moment is what is random, so there is nothing to wait for.
		if round%2 == 0 {
			time.Sleep(upTo(startTakes * 3 / 2))
		} else {
			a.waitReady()
			ready++
			after := n.scrape()
			neverBack(t, before, after)
			before = after
			if random.IntN(2) == 0 {
				a.signal(syscall.SIGHUP)
			}
			time.Sleep(upTo(50 * time.Millisecond))
		}
		a.kill()
		if round%4 < 2 { // without an agent, and with one that starts
			l.holder.Close(l.roomy[:2]...)
			l.roomy = append(l.roomy[2:], dials(t, l.holder, n.addr(2), 2, 0)...)
		}
		n.wantHeld(held)
		a = n.begin()
		if round%4 >= 2 {
			l.holder.Close(l.roomy[0])
			l.roomy = append(l.roomy[1:], dials(t, l.holder, n.addr(2), 1, 0)...)
		}
	}
	t.Logf("%d rounds, %d of them from ready on, in %v", round, ready, time.Since(begun))
	a.waitReady()
	samples.end(t)
	l.calm(true)
	neverBack(t, before, n.scrape())
	n.wantHeld(held)
	n.wantAgreement()
	l.release()
	n.wantNothing()
	n.wantUnmended()
}

// Killed in its very first start, an agent leaves limits that hold or none at all, and the
// next one begins as if it had not been.
func TestKilledFirstStart(t *testing.T) {
	n := newNode(t)
	n.write(busy)
	n.serve(1)
	client := n.place(n.Mkdir("apps/batch"))
	before := n.state()
	begun := time.Now()
	n.start().kill()
	startTakes := time.Since(begun)
	n.must("detach")
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d, a start takes %v", seed, startTakes)
	random := rand.New(rand.NewPCG(seed, 0))
	inForce := 0
	for range 12 {
		a := n.begin()
		time.Sleep(time.Duration(random.Int64N(int64(startTakes))))
		a.kill()
		if pins, _ := filepath.Glob(filepath.Join(n.BPFFS, "bulkhead", "v*")); len(pins) > 0 {
			inForce++
			fds := dials(t, client, n.addr(1), 7, syscall.ECONNREFUSED)
			if len(fds) != 6 {
				t.Errorf("%d of 7 passed, want 6", len(fds))
			}
			client.Close(fds...)
		} else {
			// The kernel lets go of links by and by.
			kerneltest.Poll(t, "nothing is attached", func() error {
				if ids := attached(t, n.Cgroup.Path); len(ids) > 0 {
					return fmt.Errorf("programs %v", ids)
				}
				return nil
			})
		}
		b := n.start()
		fds := dials(t, client, n.addr(1), 7, syscall.ECONNREFUSED)
		if len(fds) != 6 {
			t.Errorf("%d of 7 passed, want 6", len(fds))
		}
		client.Close(fds...)
		b.kill()
		n.must("detach")
		n.wantState(before)
	}
	t.Logf("%d of 12 were killed with their limits in force", inForce)
}

// Of two agents that are started at the very same moment one wins, from nothing and over
// what a killed one has left, and the other says who.
func TestTwoAgentsAtOnce(t *testing.T) {
	n := newNode(t)
	n.write(busy)
	for round := range 20 {
		var all [2]*agent
		args := n.agentCommand()
		if round%2 == 1 {
			// With nothing but the pins in common.
			other := *n
			other.socket, other.ready, other.metrics = n.socket+".other", n.ready+".other", n.net+"98:9779"
			all[1] = other.begin()
			all[0] = n.begin()
		} else {
			all[0], all[1] = n.begin(args[1:1]...), n.begin()
		}
		var loser, winner *agent
		select {
		case <-all[0].ended:
			loser, winner = all[0], all[1]
		case <-all[1].ended:
			loser, winner = all[1], all[0]
		case <-time.After(commandLimit):
			t.Fatal("both run")
		}
		if code := loser.end(); code != 1 {
			t.Errorf("round %d: the loser's exit code is %d", round, code)
		}
		winner.waitReady()
		text, err := os.ReadFile(n.log)
		if err != nil {
			t.Fatal(err)
		}
		last := ""
		for line := range strings.Lines(string(text)) {
			if !strings.HasPrefix(line, "{") {
				last = line
			}
		}
		if want := fmt.Sprintf("another agent already runs on %s: pid %d\n", filepath.Join(n.BPFFS, "bulkhead"), winner.Process.Pid); !strings.HasSuffix(last, want) {
			t.Errorf("round %d: the loser said %q, want %q", round, last, want)
		}
		if s := winner.n.status(); s.Agent.PID != winner.Process.Pid || s.Generation == 0 {
			t.Errorf("round %d: agent %+v, generation %d", round, s.Agent, s.Generation)
		}
		winner.kill()
		if round%4 < 2 {
			winner.n.must("detach")
		}
	}
}

// Detach while clients are at work: it removes everything, nobody is refused from then on,
// and a later start counts what is open, to the last one.
func TestDetachUnderLoad(t *testing.T) {
	n := newNode(t)
	n.write(busy)
	l := n.load()
	before := n.state()
	l.hold()
	l.storm()
	// With what is adopted tight can have more than its limit.
	wantFound := func() {
		t.Helper()
		if b := n.status().find("feature chat"); b.InUse != held {
			t.Errorf("chat has %d in use, want the %d that it holds", b.InUse, held)
		}
	}
	for round := range 4 {
		a := n.start()
		wantFound()
		ids := attached(t, n.Cgroup.Path)
		if round%2 == 1 {
			a.kill()
		}
		n.must("detach")
		n.wantDetached()
		n.wantState(before)
		l.calm(true)
		wantGone(t, ids)
		l.storm()
		dials(t, l.holder, n.addr(1), 20, 0)
		l.calm(false)
		l.holder.Kill()
		l.holder = n.place(n.Mkdir("apps/chat"))
		l.hold()
		l.storm()
	}
	n.start()
	wantFound()
	l.calm(true)
	wantFound()
	l.release()
	n.wantNothing()
	n.wantUnmended()
}

// Fifty reloads while clients are at work, between two policies that agree on what these
// clients may do and on little else: every connect is judged by one of them.
func TestReloadUnderLoad(t *testing.T) {
	n := newNode(t)
	// Other numbers for all that has one, another errno, a provider more, UDP or not.
	other := strings.NewReplacer(
		"providers:\n", "providers:\n  first: {cidrs: [@3/32], limits: {connections: 0}}\n",
		"features:\n", "features:\n  early: {class: timely, cpu: none, limits: {connections: 1}, providers: {roomy: {connections: 0}}}\n",
		"limits: {connections: 6}", "limits: {connections: 6, errno: EAGAIN}",
		"limits: {connections: 60}", "limits: {connections: 50}",
	).Replace(busy)
	n.write(busy)
	l := n.load()
	n.start()
	l.hold()
	samples := n.sample(held, held)
	l.storm()
	const reloads = 50
	for i := range reloads {
		n.write([]string{other, busy}[i%2])
		n.must("reload")
	}
	samples.end(t)
	// Every reload is one generation: those that were asked for, and a few that the agent
	// began itself before it was asked.
	made := 0
	for _, line := range n.lines() {
		if line.Msg == "the policy is in force" {
			made++
			wantWords(t, line.text, fmt.Sprintf(`"generation":%d,`, made))
		}
	}
	if s := n.status(); s.Generation != made || made < 1+reloads {
		t.Errorf("generation %d, %d reloads in the log, %d asked for", s.Generation, made-1, reloads)
	}
	n.wantHeld(held)
	tight, roomy := l.storms["tight"].Calm(), l.storms["roomy"].Calm()
	if len(roomy) != 1 || roomy[0] == 0 {
		t.Errorf("connects to the provider that has room: %v", roomy)
	}
	if len(tight) != 3 || tight[0] == 0 || tight[syscall.ECONNREFUSED] == 0 || tight[syscall.EAGAIN] == 0 {
		t.Errorf("connects to the provider that is full: %v", tight)
	}
	if failures := n.scrape()[series("policy_reload_failures_total")]; failures != 0 {
		t.Errorf("%v reloads failed", failures)
	}
	n.wantAgreement()
	l.release()
	n.wantNothing()
	n.wantUnmended()
}
