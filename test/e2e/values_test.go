package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
)

// set writes a control file of a cgroup.
func set(t testing.TB, cgroup, file, value string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(cgroup, file), []byte(value), 0); err != nil {
		t.Fatal(err)
	}
}

// What somebody else changes of our values is put back, counted in status and metrics, and told; and he who insists is
// not chased.
func TestValuesPutBack(t *testing.T) {
	n := newNode(t)
	n.needControllers()
	parse := n.Mkdir("apps/parse").Path
	for _, dir := range []string{n.Cgroup.Path, filepath.Dir(parse)} {
		set(t, dir, "cgroup.subtree_control", "+cpu +memory")
	}
	n.write(weighed)
	n.start()
	count := func(feature string) (status, metric int) {
		t.Helper()
		for _, c := range n.status().Compartments {
			if c.Feature == feature && c.ValuesCorrected != nil {
				status += *c.ValuesCorrected
			}
		}
		return status, int(n.scrape()[series("cgroup_values_corrected_total", "feature_group", feature, "tenant", "")])
	}
	corrected := func(what string, want map[string]int) {
		t.Helper()
		kerneltest.Poll(t, what, func() error {
			for feature, w := range want {
				if s, m := count(feature); s != w || m != w {
					return fmt.Errorf("%s: %d in status, %d in the metric, want %d", feature, s, m, w)
				}
			}
			return nil
		})
	}
	corrected("nothing at first", map[string]int{"chat": 0, "batch": 0, "parse": 0})
	set(t, n.slice("batch"), "cpu.max", "max")
	set(t, n.slice("batch"), "memory.max", "max")
	set(t, parse, "cpu.weight", "8")
	set(t, filepath.Dir(n.slice("chat")), "cpu.weight", "3000")
	changed := time.Now()
	put := func(was string) (at []time.Time) {
		t.Helper()
		for _, l := range n.lines() {
			if !strings.Contains(l.text, `"was":"`+was+`"`) {
				continue
			}
			var x struct{ Time time.Time }
			if err := json.Unmarshal([]byte(l.text), &x); err != nil {
				t.Fatal(err)
			}
			at = append(at, x.Time)
		}
		return at
	}
	corrected("put back", map[string]int{"chat": 0, "batch": 2, "parse": 1})
	if at := put("8"); len(at) != 1 || at[0].Sub(changed) > 15*time.Second { // ten, and what a busy machine takes
		t.Errorf("changed at %v, put back at %v", changed, at)
	}
	wantValues(t, n.slice("batch"), map[string]string{"cpu.max": "150000 100000", "memory.max": fmt.Sprint(2 << 30)})
	wantValues(t, parse, map[string]string{"cpu.weight": "7"})
	wantValues(t, filepath.Dir(n.slice("chat")), map[string]string{"cpu.weight": "100"})
	if s := n.status(); s.Agent.ValuesCorrected == nil || *s.Agent.ValuesCorrected != 4 {
		t.Errorf("the agent says %+v, want 4 with the slice around all", s.Agent)
	}
	wantWords(t, n.must("status"), "4 values of cgroups: changed by somebody else")
	n.logged("put back", `"cgroup":"/apps/parse"`, `"file":"cpu.weight"`, `"was":"8"`, `"put_back_to":"7"`, `"feature":"parse"`)

	// Another agent that writes whenever it sees our value.
	stop, ended := make(chan struct{}), make(chan int)
	go func() {
		writes := 0
		for {
			select {
			case <-stop:
				ended <- writes
				return
			case <-time.After(20 * time.Millisecond):
			}
			if now, err := os.ReadFile(filepath.Join(parse, "cpu.weight")); err == nil && strings.TrimSpace(string(now)) == "7" {
				_ = os.WriteFile(filepath.Join(parse, "cpu.weight"), []byte("9"), 0)
				writes++
			}
		}
	}()
	kerneltest.PollFor(t, time.Minute, "it is put back three times more", func() error {
		if s, _ := count("parse"); s < 4 {
			return fmt.Errorf("%d", s)
		}
		return nil
	})
	close(stop)
	if writes := <-ended; writes < 3 || writes > 5 {
		t.Errorf("the other one wrote %d times", writes)
	}
	var last time.Time
	for _, at := range put("9") {
		if between := at.Sub(last); between < 10*time.Second {
			t.Errorf("put back twice within %v", between)
		}
		last = at
	}
	n.must("detach")
	wantValues(t, parse, map[string]string{"cpu.weight": "100", "cpu.max": "max 100000", "memory.max": "max"})
}

// status says what a weight and a quota come to where they are, and what makes them count for less.
func TestScheduling(t *testing.T) {
	n := newNode(t)
	n.needControllers()
	n.write("apiVersion: bulkhead/v1\nkind: Policy\nmode: enforce\nproviders: {}\nfeatures:\n" +
		"  chat:  {class: realtime, cpu: {weight: 900, max: 50%}}\n  parse: {class: batch, cpu: {weight: 100}}\n  empty: {class: timely}\n")
	n.start()
	chat, parse := n.client("chat"), n.client("parse")
	// A quota around everything, which no cgroup of a compartment shows.
	set(t, n.Cgroup.Path, "cpu.max", "150000 100000")
	of := func(s *status, feature string) (m member) {
		t.Helper()
		for _, c := range s.Compartments {
			if c.Feature == feature && c.Tenant == "" {
				m = c.Cgroups[0]
			}
		}
		return m
	}
	s := n.status()
	for feature, want := range map[string]string{
		"chat":  "0.50 /bulkhead.slice/bulkhead-chat.slice 0.90 of 1000 beside 1 in /bulkhead.slice, 0 realtime",
		"parse": "1.50 / 0.10 of 1000 beside 1 in /bulkhead.slice, 0 realtime",
	} {
		m := of(s, feature)
		if m.EffectiveCPU == nil || m.WeightShare == nil {
			t.Errorf("%s: %+v", feature, m)
			continue
		}
		if got := fmt.Sprintf("%.2f %s %.2f of %d beside %d in %s, %d realtime", *m.EffectiveCPU, m.EffectiveCPUFrom, *m.WeightShare, m.WeightSum, m.Siblings, m.CompetesIn, m.RealtimeThreads); got != want {
			t.Errorf("%s: %s, want %s", feature, got, want)
		}
	}
	wantWords(t, n.must("status"), "900 (0.90 of /bulkhead.slice)", "150% (of /)")

	// A realtime thread is named, is no matter for --check, and stays as it is.
	fifo := unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 5}
	if err := unix.SchedSetAttr(parse.PID, &fifo, 0); err != nil {
		t.Fatal(err)
	}
	s = n.status()
	if c := s.condition("Scheduling"); c == nil || c.Reason != "RealtimeThreads" || !strings.Contains(c.Message, n.slice("parse")) || !strings.Contains(c.Message, fmt.Sprint(parse.PID)) {
		t.Errorf("condition %+v", c)
	}
	if m := of(s, "parse"); m.RealtimeThreads != 1 {
		t.Errorf("%+v, want one realtime thread", m)
	}
	n.wantRun(0, nil, "status", "--check")
	if now, err := unix.SchedGetAttr(parse.PID, 0); err != nil || now.Policy != unix.SCHED_FIFO {
		t.Errorf("its policy is %+v (%v)", now, err)
	}
	if err := unix.SchedSetAttr(parse.PID, &unix.SchedAttr{Size: unix.SizeofSchedAttr}, 0); err != nil {
		t.Fatal(err)
	}

	// Half a processor is not enough for one who computes.
	args := n.args("exec", "--feature", "chat", "--", "sh", "-c", "while :; do :; done")
	spin := exec.Command(args[0], args[1:]...)
	if err := spin.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = spin.Process.Signal(syscall.SIGKILL)
		_ = spin.Wait()
	}()
	kerneltest.Poll(t, "the quota stalls chat", func() error {
		c := n.status().condition("Scheduling")
		if c == nil || c.Reason != "Throttled" || !strings.Contains(c.Message, "features.chat.cpu.max") {
			return fmt.Errorf("condition %+v", c)
		}
		return nil
	})
	n.wantRun(0, nil, "status", "--check")
	chat.Kill()
	parse.Kill()
}
