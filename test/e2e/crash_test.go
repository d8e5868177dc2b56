package e2e

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"bulkhead/internal/kerneltest"
)

// neverBack fails if a counter of the kernel's is smaller than before, or gone.
func neverBack(t testing.TB, before, after map[string]float64) {
	t.Helper()
	for _, name := range []string{"accepted_total", "rejected_total", "would_reject_total", "connections_total", "bytes_total"} {
		seen := 0
		for s, was := range before {
			if !strings.HasPrefix(s, "bulkhead_"+name+"{") {
				continue
			}
			seen++
			if is, ok := after[s]; !ok || is < was {
				t.Errorf("%s was %v and is %v (there: %t)", s, was, is, ok)
			}
		}
		if seen == 0 {
			t.Errorf("no series of %s", name)
		}
	}
}

// Without an agent limits hold, counts are right, and the next one carries on with them.
func TestKilledAgent(t *testing.T) {
	n := newNode(t)
	echo := kerneltest.Serve(t, n.addr(1), kerneltest.Echo)
	n.write(shares)
	a := n.start()
	client := n.client("batch")
	fds := dials(t, client, echo.Addr, 13, syscall.ECONNREFUSED)
	const volume = 10 << 20
	client.Exchange(fds[0], volume>>16, 1<<16)
	before := n.scrape()
	sent := series("bytes_total", "feature_group", "batch", "tenant", "", "provider", "deepseek", "direction", "tx")
	if before[sent] < volume || before[sent] > 1.1*volume {
		t.Errorf("%v bytes sent, want %d and headers", before[sent], volume)
	}
	a.kill()

	wantDial(t, client, syscall.ECONNREFUSED, echo.Addr)
	n.wantCounts(map[string]counts{"feature_provider batch/deepseek": {12, 12, 12, 12, 2}, "provider deepseek": {20, 12, 12, 12, 0}})
	client.Close(fds[10], fds[11])
	n.wantCounts(map[string]counts{"feature_provider batch/deepseek": {12, 10, 12, 12, 2}, "provider deepseek": {20, 10, 12, 12, 0}})
	dials(t, client, echo.Addr, 1, 0)
	if s := n.status(); s.Agent.Running || s.find("feature_provider batch/deepseek").InUse != 11 {
		t.Errorf("agent %+v, %+v", s.Agent, s.find("feature_provider batch/deepseek"))
	}
	// And who is new comes in the same way.
	late := n.client("batch")
	dials(t, late, echo.Addr, 1, 0)
	wantDial(t, late, syscall.ECONNREFUSED, echo.Addr)

	generation := n.status().Generation
	n.start()
	n.wantCounts(map[string]counts{"feature_provider batch/deepseek": {12, 12, 12, 14, 3}, "provider deepseek": {20, 12, 12, 14, 0}})
	after := n.scrape()
	neverBack(t, before, after)
	if after[sent] > 1.01*before[sent]+10_000 {
		t.Errorf("%v bytes sent before, %v after: the same bytes were counted again", before[sent], after[sent])
	}
	if g := n.status().Generation; g < generation {
		t.Errorf("generation %d after %d", g, generation)
	}
	n.wantAgreement()
	wantDial(t, late, syscall.ECONNREFUSED, echo.Addr)
	late.Kill()
	client.Close(fds[:10]...)
	kerneltest.Poll(t, "all but one are given back", func() error {
		if b := n.status().find("feature_provider batch/deepseek"); b.InUse != 1 {
			return fmt.Errorf("in_use %d", b.InUse)
		}
		return nil
	})
}

// Killed at any moment, of its start and of a reload, it leaves limits and counts as
// they are.
func TestKilledAtAnyMoment(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	n.write(shares)
	n.start().kill()
	client := n.client("batch")
	dials(t, client, n.addr(1), 12, 0)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	refused := 0
	for range 8 {
		os.Remove(n.ready)
		a := n.begin()
		// Somewhere between its first instruction and some way into its reloads.
		deadline := time.Now().Add(time.Duration(random.IntN(400)) * time.Millisecond)
		for time.Now().Before(deadline) {
			wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))
			refused++
			if _, err := os.Stat(n.ready); err == nil {
				a.signal(syscall.SIGHUP)
			}
		}
		a.kill()
		wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))
		refused++
		n.wantCounts(map[string]counts{"feature_provider batch/deepseek": {12, 12, 12, 12, refused}, "provider deepseek": {20, 12, 12, 12, 0}})
	}
	n.start()
	n.wantCounts(map[string]counts{"feature_provider batch/deepseek": {12, 12, 12, 12, refused}, "provider deepseek": {20, 12, 12, 12, 0}})
	n.wantAgreement()
}

// SIGTERM stops the agent in order, and it says that limits stay.
func TestStoppedAgent(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	n.write(shares)
	a := n.start()
	client := n.client("batch")
	dials(t, client, n.addr(1), 12, 0)
	a.signal(syscall.SIGTERM)
	if code := a.end(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	n.logged("the limits stay in force", "detach")
	for _, path := range []string{n.ready, n.socket} {
		if _, err := os.Stat(path); err == nil {
			t.Errorf("%s is still there", path)
		}
	}
	wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))
	n.wantCounts(map[string]counts{"feature_provider batch/deepseek": {12, 12, 12, 12, 1}})
}

// A second agent on the same pins gives way and names the first, which does not notice.
func TestSecondAgent(t *testing.T) {
	n := newNode(t)
	n.write(shares)
	a := n.start()
	before, hash := n.state(), n.status().PolicyHash
	pid := fmt.Sprint(a.Process.Pid)
	words := []string{"another agent", "pid " + pid}
	n.wantRun(1, words, n.agentCommand()...)
	// Also if its policy is no good, the first is ready and stays so.
	bad := filepath.Join(n.dir, "bad.yaml")
	n.save(bad, wrong)
	n.wantRun(1, words, append(n.agentCommand(), "--policy", bad)...)
	if text, err := os.ReadFile(n.ready); err != nil || strings.TrimSpace(string(text)) != pid {
		t.Errorf("the ready file has %q (%v), want %s", text, err, pid)
	}
	other := *n
	other.socket += ".other"
	other.wantRun(1, words, "agent", "--policy", n.policy, "--web.listen-address", n.net+"98:9779")

	n.wantState(before)
	s := n.status()
	if s.Agent.PID != a.Process.Pid || s.Generation != 1 || s.PolicyHash != hash {
		t.Errorf("the first agent: %+v, generation %d, %s", s.Agent, s.Generation, s.PolicyHash)
	}
	n.must("reload")
}
