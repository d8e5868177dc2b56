package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"bulkhead/internal/kerneltest"
)

// capped is a policy with one limit, for chat at deepseek.
func capped(limit int) string {
	return fmt.Sprintf(`
apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers:
  deepseek: {cidrs: [@1/32], ports: [8000], limits: {connections: 100}}
features:
  chat: {class: realtime, cpu: none, providers: {deepseek: {connections: %d}}}
`, limit)
}

const cappedName = "feature_provider chat/deepseek"

// wantLimit waits until capped's limit and the generation are in force.
func (n *node) wantLimit(limit, generation int) {
	n.t.Helper()
	kerneltest.Poll(n.t, fmt.Sprintf("limit %d is in force", limit), func() error {
		s, m := n.status(), n.scrape()
		got, g := *s.find(cappedName).Limit, int(m[series("policy_generation")])
		if got != limit || s.Generation != generation || g != generation {
			return fmt.Errorf("limit %d, generation %d, metric %d, want %d and %d", got, s.Generation, g, limit, generation)
		}
		return nil
	})
}

// Every way to reload: SIGHUP, the command, and the file alone.
func TestReload(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	n.write(capped(5))
	a := n.start()
	client := n.client("chat")
	fds := dials(t, client, n.addr(1), 6, syscall.ECONNREFUSED)
	n.wantLimit(5, 1)

	// On request also if nothing has changed.
	a.signal(syscall.SIGHUP)
	n.wantLimit(5, 2)
	if out := n.must("reload"); out != "generation 3 is in force\n" {
		t.Errorf("reload printed %q", out)
	}
	n.wantLimit(5, 3)

	// A lowered cap cuts nobody: it refuses until the count has fallen below it.
	n.write(capped(3))
	n.wantLimit(3, 4)
	wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))
	n.wantCounts(map[string]counts{cappedName: {3, 5, 5, 5, 2}})
	client.Close(fds[0], fds[1])
	wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))
	client.Close(fds[2])
	wantDial(t, client, 0, n.addr(1))

	m := n.scrape()
	if m[series("policy_last_reload_successful")] != 1 || m[series("policy_reload_failures_total")] != 0 {
		t.Errorf("last_reload_successful %v, reload_failures_total %v", m[series("policy_last_reload_successful")], m[series("policy_reload_failures_total")])
	}
	// Every write was read once.
	if s := n.status(); s.Generation != 4 || s.Agent.PID != a.Process.Pid {
		t.Errorf("generation %d of agent %d", s.Generation, s.Agent.PID)
	}
}

// A ConfigMap is replaced by renaming a link two steps away from the file.
func TestConfigMap(t *testing.T) {
	n := newNode(t)
	dir := filepath.Join(n.dir, "config")
	put := func(i int) {
		t.Helper()
		version := fmt.Sprintf("..v%d", i)
		real := filepath.Join(dir, version)
		tmp := filepath.Join(dir, "..data_tmp")
		for _, err := range []error{
			os.MkdirAll(real, 0o755),
			os.WriteFile(filepath.Join(real, "policy.yaml"), []byte(n.text(capped(10+i))), 0o644),
			os.Symlink(version, tmp),
			os.Rename(tmp, filepath.Join(dir, "..data")),
			os.RemoveAll(filepath.Join(dir, fmt.Sprintf("..v%d", i-1))),
		} {
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	put(0)
	n.policy = filepath.Join(dir, "policy.yaml")
	if err := os.Symlink("..data/policy.yaml", n.policy); err != nil {
		t.Fatal(err)
	}
	n.start()
	n.wantLimit(10, 1)
	for i := 1; i <= 20; i++ {
		put(i)
		kerneltest.Poll(t, "the swap is noticed", func() error {
			if g := n.scrape()[series("policy_generation")]; g != float64(1+i) {
				return fmt.Errorf("generation %v, want %d", g, 1+i)
			}
			return nil
		})
	}
	n.wantLimit(30, 21)
	if failures := n.scrape()[series("policy_reload_failures_total")]; failures != 0 {
		t.Errorf("reload_failures_total %v", failures)
	}
}

// A policy that is not whole, or wrong, changes nothing, says so and where.
func TestBadReload(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	n.write(capped(2))
	a := n.start()
	client := n.client("chat")
	dials(t, client, n.addr(1), 2, 0)
	hash := n.status().PolicyHash
	state := n.state()
	good := n.text(capped(2))

	failures := 0.0
	for i, bad := range []struct{ name, text, word string }{
		{"half of it", good[:len(good)/2], "policy.yaml:"},
		{"empty", "", "policy.yaml:1:1: "},
		{"only a comment", "# later\n", "policy.yaml:1:1: "},
		{"unknown key", strings.Replace(good, "limits:", "limit:", 1), "policy.yaml:6:"},
		{"names", strings.Replace(good, "cidrs: ["+n.net+"1/32]", "hosts: [api.example.com]", 1), "names are not built yet"},
	} {
		t.Logf("%s", bad.name)
		if err := os.WriteFile(n.policy, []byte(bad.text), 0o644); err != nil {
			t.Fatal(err)
		}
		if i == 0 { // by the file alone
			kerneltest.Poll(t, "the file is read", func() error {
				if n.scrape()[series("policy_last_reload_successful")] != 0 {
					return fmt.Errorf("policy_last_reload_successful is not 0")
				}
				return nil
			})
		} else {
			r := n.run("reload")
			wantResult(t, r, 1, bad.word, "stays in force")
		}
		// Once, or twice if the agent saw the file before it was asked.
		m := n.scrape()
		before := failures
		failures = m[series("policy_reload_failures_total")]
		if m[series("policy_last_reload_successful")] != 0 || failures <= before || failures > before+2 {
			t.Errorf("last_reload_successful %v, reload_failures_total %v after %v", m[series("policy_last_reload_successful")], failures, before)
		}
		s := n.status()
		if s.Generation != 1 || s.PolicyHash != hash || s.Agent.PID != a.Process.Pid {
			t.Errorf("generation %d, %s, agent %d; want 1, %s, %d", s.Generation, s.PolicyHash, s.Agent.PID, hash, a.Process.Pid)
		}
		if c := s.condition("Reload"); c == nil || !strings.Contains(c.Message, bad.word) {
			t.Errorf("condition %+v, want one with %q", c, bad.word)
		}
		n.logged("the policy was refused", bad.word)
		wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))
		n.wantState(state)
	}

	n.write(capped(3))
	n.wantLimit(3, 2)
	kerneltest.Poll(t, "all is well again", func() error {
		if m := n.scrape(); m[series("policy_last_reload_successful")] != 1 {
			return fmt.Errorf("last_reload_successful is not 1")
		}
		return nil
	})
	if c := n.status().condition("Reload"); c != nil {
		t.Errorf("condition %+v stays", c)
	}
	n.wantCounts(map[string]counts{cappedName: {3, 2, 2, 2, 5}})
}

// A file that is saved in two steps, again and again, never leaves a moment without
// limits, and at the end the last one is in force.
func TestHalfWritten(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	n.write(capped(2))
	n.start()
	client := n.client("chat")
	dials(t, client, n.addr(1), 2, 0)
	refused := 0
	for i := range 100 {
		text := n.text(capped(1 + i%2))
		f, err := os.Create(n.policy)
		if err != nil {
			t.Fatal(err)
		}
		for _, half := range []string{text[:len(text)/2], text[len(text)/2:]} {
			wantDial(t, client, syscall.ECONNREFUSED, n.addr(1), n.addr(1), n.addr(1))
			refused += 3
			if _, err := f.WriteString(half); err != nil {
				t.Fatal(err)
			}
		}
		f.Close()
	}
	n.must("reload")
	n.wantCounts(map[string]counts{cappedName: {2, 2, 2, 2, refused}})
	s, m := n.status(), n.scrape()
	if s.Generation > 102 || m[series("policy_reload_failures_total")] > 100 {
		t.Errorf("100 saves made generation %d and %v failures", s.Generation, m[series("policy_reload_failures_total")])
	}
}

var atPlace = regexp.MustCompile(`(?m)^/.*\.yaml:(\d+):\d+: `)

// wrong has faults in the lines that wrongLines lists.
const wrong = `apiVersion: bulkhead/v1
kind: Policy
mode: strict
providers:
  deepseek: {cidrs: [@1/33], ports: [8000], limits: {connections: 010}}
features:
  chat: {class: realtime, limits: {connections: -1}}
  batch: {class: batch, providers: {deepsek: {connections: 5}}, colour: red}
`

var wrongLines = []string{"3", "5", "5", "7", "8", "8"}

// wantPlaces fails unless text has one line for each fault of wrong, with its place.
func wantPlaces(t testing.TB, text string) {
	t.Helper()
	var lines []string
	for _, m := range atPlace.FindAllStringSubmatch(text, -1) {
		lines = append(lines, m[1])
	}
	if !slices.Equal(lines, wrongLines) {
		t.Errorf("errors in lines %v, want %v:\n%s", lines, wrongLines, text)
	}
}

// An agent that gets a bad policy at its start says all that is wrong and leaves nothing.
func TestBadStart(t *testing.T) {
	n := newNode(t)
	before := n.state()
	n.write(wrong)
	// One that an agent left that was killed.
	if err := os.WriteFile(n.ready, []byte("4711\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	r := n.wantRun(1, []string{"deepseek"}, n.agentCommand()...)
	wantPlaces(t, r.stderr)
	n.wantState(before)
	n.wantDetached()
	if _, err := os.Stat(n.ready); err == nil {
		t.Error("it is ready, or somebody was")
	}

	// An agent that is restarted with one leaves the limits as they are.
	n.serve(1)
	n.write(capped(2))
	n.start().kill()
	client := n.client("chat")
	dials(t, client, n.addr(1), 2, 0)
	before = n.state()
	n.write(wrong)
	wantPlaces(t, n.run(n.agentCommand()...).stderr)
	n.wantState(before)
	wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))
}

// hooks are where bulkhead may attach programs.
func hooks() []ebpf.AttachType {
	return []ebpf.AttachType{
		ebpf.AttachCGroupInet4Connect, ebpf.AttachCGroupInet6Connect, ebpf.AttachCGroupUDP4Sendmsg, ebpf.AttachCGroupUDP6Sendmsg,
		ebpf.AttachCGroupSockOps, ebpf.AttachCgroupInetSockRelease, ebpf.AttachCGroupInetEgress, ebpf.AttachCGroupInetIngress,
	}
}

// attached are the ids of the programs on a cgroup itself; none if it is gone.
func attached(t testing.TB, cgroup string) (ids []ebpf.ProgramID) {
	t.Helper()
	dir, err := os.Open(cgroup)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	for _, h := range hooks() {
		all, err := link.QueryPrograms(link.QueryOptions{Target: int(dir.Fd()), Attach: h})
		if err != nil {
			t.Fatalf("programs on %s of %s: %v", h, cgroup, err)
		}
		for _, p := range all.Programs {
			ids = append(ids, p.ID)
		}
	}
	return ids
}

// wantDetached fails if a program is on the node's cgroup root.
func (n *node) wantDetached() {
	n.t.Helper()
	if ids := attached(n.t, n.Cgroup.Path); len(ids) > 0 {
		n.t.Errorf("programs %v are attached", ids)
	}
}
