package e2e

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"bulkhead/internal/kerneltest"
)

// refusals are the log's lines of refusals by a provider.
func (n *node) refusals(provider string) (all []line) {
	n.t.Helper()
	for _, l := range n.lines() {
		if l.Msg == "refused" && l.Provider == provider {
			all = append(all, l)
		}
	}
	return all
}

// A client that tries again without pause costs a line a second, and every try is
// counted.
func TestRefusals(t *testing.T) {
	n := newNode(t)
	n.write(`
apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers:
  deepseek: {cidrs: [@1/32], ports: [8000], limits: {connections: 30}}
  qwen:     {cidrs: [@2/32], ports: [8000], limits: {connections: 0}}
features:
  batch: {class: batch, providers: {deepseek: {connections: 0, errno: EAGAIN}}}
`)
	n.start()
	client := n.client("batch")
	// As many as a machine does in three seconds, and enough on any.
	addrs := make([]string, 500)
	for i := range addrs {
		addrs[i] = n.addr(1)
	}
	start, tries := time.Now(), 0
	for tries < 20_000 && (tries < 2_000 || time.Since(start) < 3*time.Second) {
		wantDial(t, client, syscall.EAGAIN, addrs...)
		tries += len(addrs)
	}
	comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", client.PID))
	if err != nil {
		t.Fatal(err)
	}
	// Each route has lines of its own.
	wantDial(t, client, syscall.ECONNREFUSED, n.addr(2))
	n.logged(`"msg":"refused"`, "qwen")
	n.logged(`"msg":"refused"`, "deepseek")
	seconds := int(time.Since(start).Seconds()) + 1
	lines := n.refusals("deepseek")
	if len(lines) > seconds+1 {
		t.Errorf("%d refusals in %d s made %d lines", tries, seconds, len(lines))
	}
	l := lines[0]
	if l.PID != client.PID || l.Command != strings.TrimSpace(string(comm)) || l.Feature != "batch" || l.Remote != n.addr(1) ||
		l.Errno != "EAGAIN" || l.Limit == nil || *l.Limit != 0 ||
		l.Bulkhead.Scope != "feature_provider" || l.Bulkhead.Feature != "batch" || l.Bulkhead.Provider != "deepseek" {
		t.Errorf("the line says %s", l.text)
	}
	if l := n.refusals("qwen")[0]; l.Bulkhead.Scope != "provider" || l.Bulkhead.Provider != "qwen" || l.Errno != "ECONNREFUSED" {
		t.Errorf("the line says %s", l.text)
	}

	n.wantCounts(map[string]counts{
		"feature_provider batch/deepseek": {limit: 0, rejected: tries},
		"provider deepseek":               {limit: 30},
		"provider qwen":                   {limit: 0, rejected: 1},
	})
	rejected := series("rejected_total", "scope", "feature_provider", "feature_group", "batch", "tenant", "", "provider", "deepseek", "reason", "full")
	if got := n.scrape()[rejected]; got != float64(tries) {
		t.Errorf("rejected_total %v, want %d", got, tries)
	}
	// A refusal takes nothing.
	if s := n.status(); s.connections("batch", "deepseek") != 0 || len(n.conns()) != 0 {
		t.Errorf("connections_total %d, conns %v", s.connections("batch", "deepseek"), n.conns())
	}

	// Later ones are told again, with how many there were: every one is told of, in a line
	// of its own or in the number of one.
	more := 0
	kerneltest.Poll(t, "the next line", func() error {
		wantDial(t, client, syscall.EAGAIN, n.addr(1))
		more++
		if after := n.refusals("deepseek"); len(after) == len(lines) {
			return fmt.Errorf("still %d", len(lines))
		}
		return nil
	})
	if again := n.refusals("qwen"); len(again) != 1 {
		t.Errorf("one refusal made %d lines", len(again))
	}
	after := n.refusals("deepseek")
	sum := 0
	for _, l := range after {
		sum += 1 + l.More
	}
	if sum < tries || sum > tries+more {
		t.Errorf("the lines tell of %d refusals, there were %d and up to %d more", sum, tries, more)
	}
	if l := after[len(after)-1]; l.Total <= lines[len(lines)-1].Total || l.Total > tries+more {
		t.Errorf("total %d after %d, want at most %d", l.Total, lines[len(lines)-1].Total, tries+more)
	}
	wantWords(t, n.must("explain", "--from", fmt.Sprint(client.PID), "--to", n.addr(1)),
		fmt.Sprintf("pid %d (%s) to %s refused: feature_provider batch/deepseek", client.PID, strings.TrimSpace(string(comm)), n.addr(1)))
}

// A refusal that an agent has told is not news to the one that carries on after it.
func TestRefusalsAreToldOnce(t *testing.T) {
	n := newNode(t)
	n.write(`
apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers:
  deepseek: {cidrs: [@1/32], ports: [8000], limits: {connections: 0}}
  qwen:     {cidrs: [@2/32], ports: [8000], limits: {connections: 0}}
features:
  batch: {class: batch}
`)
	a := n.start()
	client := n.client("batch")
	wantDial(t, client, syscall.ECONNREFUSED, n.addr(2))
	n.logged(`"msg":"refused"`, "qwen")
	told := len(n.refusals("qwen"))
	a.kill()
	n.start()
	before := len(n.refusals("deepseek"))
	wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))
	kerneltest.Poll(t, "the new agent tells of a new one", func() error {
		if len(n.refusals("deepseek")) == before {
			return fmt.Errorf("no line")
		}
		return nil
	})
	if now := len(n.refusals("qwen")); now > told {
		t.Errorf("one refusal made %d lines, %d of them before", now, told)
	}
}

// What finds no room to be counted is let through and told, at once, by log and status.
func TestNoRoom(t *testing.T) {
	n := newNode(t)
	n.write(`
apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers:
  deepseek: {cidrs: [@1/32], ports: [8000], limits: {connections: 2000}}
features:
  batch: {class: batch}
`)
	n.start("--max-connections", "1024")
	n.serve(1)
	client := n.client("batch")
	// How many fit depends on whose home is free, and they come on top of 1024.
	if fds := dials(t, client, n.addr(1), 1400, syscall.ECONNREFUSED); len(fds) != 1400 {
		t.Fatalf("%d of 1400 connects passed", len(fds))
	}
	n.logged(`"level":"WARN"`, "let through uncounted", "--max-connections", `"max_connections":1024`)
	uncounted := 1400 - n.status().find("provider deepseek").InUse
	if uncounted <= 0 || uncounted > 1400-1024 {
		t.Fatalf("%d of 1400 found no room for 1024", uncounted)
	}
	wantWords(t, n.must("status"), fmt.Sprintf("Slots: Full: %d connections", uncounted), "1024 at most")
	wantWords(t, n.must("doctor"), fmt.Sprintf("short  connection table   %d connections found no room", uncounted), "--max-connections")
	wantWords(t, n.must("explain", "--from", fmt.Sprint(client.PID), "--to", n.addr(1)),
		fmt.Sprintf("the table of connections has had no room or no memory for %d (room for 1024, ", uncounted), "one that finds none is let through uncounted")
}

// Where the policy would rather refuse, it is refused, told and counted as such.
func TestNoRoomRefused(t *testing.T) {
	n := newNode(t)
	n.write(`
apiVersion: bulkhead/v1
kind: Policy
mode: enforce
exhausted: refuse
providers:
  deepseek: {cidrs: [@1/32], ports: [8000], limits: {connections: 2000, errno: EAGAIN}}
features:
  batch: {class: batch}
`)
	n.start("--max-connections", "1024")
	n.serve(1)
	client := n.client("batch")
	// How many fit depends on whose home is free, and they come on top of 1024.
	passed := len(dials(t, client, n.addr(1), 1400, syscall.EAGAIN))
	if passed < 1024 || passed == 1400 {
		t.Fatalf("%d of 1400 connects passed", passed)
	}
	s := n.status()
	if b := s.find("provider deepseek"); b.InUse != passed || b.Rejected["exhausted"] != 1400-passed || b.Rejected["full"] != 0 {
		t.Errorf("%d passed: %+v", passed, b)
	}
	n.wantAgreement()
	n.logged(`"msg":"refused"`, `"reason":"exhausted"`, `"errno":"EAGAIN"`)
	wantWords(t, n.must("explain", "--from", fmt.Sprint(client.PID), "--to", n.addr(1)), "one that finds none is refused, on provider deepseek (exhausted: refuse)")
	client.Kill()
	n.wantNothing()
}
