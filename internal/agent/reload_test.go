package agent

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"bulkhead/pkg/cgroup"
	"bulkhead/pkg/conn"
	"bulkhead/pkg/policy"
)

const aPolicy = `apiVersion: bulkhead/v1
kind: Policy
mode: enforce
protect: [/app/guard, /bulkhead.slice/bulkhead-quiet.slice]
providers:
  local: {cidrs: [127.0.0.1/32], ports: [8000], limits: {connections: 10}}
tenants:
  free: {limits: {connections: 5}}
features:
  chat:
    class: realtime
    match: [{cgroup: "/app/*"}]
    limits: {connections: 4}
  quiet: {class: background}
`

func loaded(t *testing.T, text string) (*policy.Plan, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "policy.yaml")
	write(t, path, text)
	plan, _, err := Load(path)
	return plan, err
}

// TestLoadRefuses: nothing that would only half work comes into force.
func TestLoadRefuses(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"empty", "", ""},
		{"half", aPolicy[:len(aPolicy)/2], ""},
		{"names", strings.Replace(aPolicy, "cidrs: [127.0.0.1/32]", "hosts: [api.example.com]", 1), "provider local: names are not built yet"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, err := loaded(t, c.text); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
	if _, _, err := load(filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	if _, err := loaded(t, aPolicy); err != nil {
		t.Errorf("a right policy: %v", err)
	}
}

// TestPipe: a FIFO in the policy's place is refused at once. To open it would wait for
// somebody to write, and reload, SIGTERM and all that the owner does with it.
func TestPipe(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "policy.yaml")
	must(t, unix.Mkfifo(pipe, 0o600))
	for _, path := range []string{pipe, dir} {
		refused := make(chan error)
		go func() {
			contentHash(path)
			_, _, err := load(path)
			refused <- err
		}()
		select {
		case err := <-refused:
			if err == nil || !strings.Contains(err.Error(), "is not a regular file") {
				t.Errorf("%s: %v", path, err)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("%s: still reading", path)
		}
	}
}

// TestPlace: slices and adopted cgroups become members of their compartments,
// and protection wins over both.
func TestPlace(t *testing.T) {
	plan, err := loaded(t, aPolicy)
	must(t, err)
	all := []cgroup.Cgroup{
		{Path: "/", ID: 10, Level: 2},
		{Path: "/app", ID: 11, Level: 3},
		{Path: "/app/guard", ID: 12, Level: 4},
		{Path: "/app/web", ID: 13, Level: 4},
		{Path: "/bulkhead.slice", ID: 20, Level: 3},
		{Path: "/bulkhead.slice/bulkhead-chat.slice", ID: 21, Level: 4},
		{Path: "/bulkhead.slice/bulkhead-chat.slice/bulkhead-chat-free.slice", ID: 22, Level: 5},
		{Path: "/bulkhead.slice/bulkhead-chat.slice/exec-1.scope", ID: 23, Level: 5},
		{Path: "/bulkhead.slice/bulkhead-quiet.slice", ID: 24, Level: 4},
		{Path: "/bulkhead.slice/bulkhead-quiet.slice/bulkhead-quiet-free.slice", ID: 25, Level: 5},
		{Path: "/ssh.service", ID: 30, Level: 3},
	}
	quietFree, _ := plan.FindCompartment("quiet", "free")
	chat, _ := plan.FindCompartment("chat", "")
	free, _ := plan.FindCompartment("chat", "free")
	got := place(plan, all, nil)
	want := []conn.Member{
		{CgroupID: 12, Level: 4, Protected: true},
		{CgroupID: 13, Level: 4, Compartment: chat},
		{CgroupID: 21, Level: 4, Compartment: chat},
		{CgroupID: 22, Level: 5, Compartment: free},
		{CgroupID: 24, Level: 4, Protected: true},
		{CgroupID: 25, Level: 5, Compartment: quietFree},
		{CgroupID: 30, Level: 3, Protected: true},
	}
	slices.SortFunc(got.members, func(a, b conn.Member) int { return int(a.CgroupID) - int(b.CgroupID) })
	if !slices.Equal(got.members, want) {
		t.Errorf("members:\n got %+v\nwant %+v", got.members, want)
	}
	// What is protected is in no compartment's CPU time, as it is in none in status.
	for _, g := range got.groups {
		if g.ID == 24 || g.ID == 12 || g.ID == 30 {
			t.Errorf("%s is protected and in a compartment", g.Path)
		}
	}
	if len(got.groups) != 4 {
		t.Errorf("groups %+v", got.groups)
	}
	if got.missing {
		t.Error("no slice is missing")
	}
	if !place(plan, slices.Delete(slices.Clone(all), 6, 7), nil).missing {
		t.Error("the tenant's slice is missing")
	}
}

// TestTellFull: what is new is told, at once and then not oftener than it says.
func TestTellFull(t *testing.T) {
	var out bytes.Buffer
	a := &agent{log: slog.New(slog.NewJSONHandler(&out, nil)), full: 3}
	now := time.Now()
	for _, c := range []struct {
		full  uint64
		after time.Duration
		want  string
	}{
		{3, 0, ""},
		{5, 0, `"connections":2,"max_connections":1024}`},
		{9, tellFullEvery / 2, ""},
		{9, tellFullEvery, `"connections":4,`},
		{9, 3 * tellFullEvery, ""},
	} {
		out.Reset()
		a.tellFull(conn.Totals{SlotsFull: c.full, SlotsMax: 1024}, now.Add(c.after))
		if (c.want == "") != (out.Len() == 0) || !strings.Contains(out.String(), c.want) {
			t.Errorf("%d after %v: %q, want %q", c.full, c.after, &out, c.want)
		}
	}
}

// TestTotalsApart: a line counts its own kind only.
func TestTotalsApart(t *testing.T) {
	for observed, want := range map[bool]string{false: `"msg":"refused"`, true: `"msg":"would be refused"`} {
		var out bytes.Buffer
		logRefusal(slog.New(slog.NewJSONHandler(&out, nil)), newRefusal{Refusal: conn.Refusal{Observed: observed, Total: 8, Refused: 5, WouldRefuse: 3}, more: 6})
		total := map[bool]string{false: `"total":5,"more":6}`, true: `"total":3,"more":6}`}[observed]
		if !strings.Contains(out.String(), want) || !strings.Contains(out.String(), total) {
			t.Errorf("want %s and %s in %s", want, total, &out)
		}
	}
}

// TestRefusalsAreTold: each once, oldest first, whatever the clock's jitter, and
// with how many there were that are not told.
func TestRefusalsAreTold(t *testing.T) {
	at := time.Now()
	r := func(feature string, after time.Duration, total uint64) conn.Refusal {
		return conn.Refusal{Feature: feature, Provider: "p", Time: at.Add(after), Total: total}
	}
	told := told{}
	for i, step := range []struct {
		read []conn.Refusal // newest first
		want []string
	}{
		{[]conn.Refusal{r("a", 2*time.Millisecond, 1), r("b", 0, 5)}, []string{"b 4", "a 0"}},
		{[]conn.Refusal{r("a", 2*time.Millisecond, 1), r("b", 0, 5)}, nil},
		// Others were refused meanwhile and not told of; the same one is read,
		// at a time that differs by the clocks' jitter.
		{[]conn.Refusal{r("a", 3*time.Millisecond, 40), r("b", 0, 5)}, nil},
		{[]conn.Refusal{r("a", time.Second, 41), r("b", 0, 5)}, []string{"a 39"}},
		// The route left the policy and has come back.
		{[]conn.Refusal{r("a", 3*time.Second, 2), r("b", 0, 5)}, []string{"a 1"}},
	} {
		var got []string
		for _, n := range told.news(step.read) {
			got = append(got, fmt.Sprint(n.Feature, " ", n.more))
		}
		if !slices.Equal(got, step.want) {
			t.Errorf("step %d: told %v, want %v", i, got, step.want)
		}
	}
}

// A cgroup that left its compartment is not gone: only one that does not exist any more is.
func TestDeparted(t *testing.T) {
	at := func(compartment uint32, id uint64, path string) cgroup.Adopted {
		return cgroup.Adopted{Compartment: compartment, Cgroup: cgroup.Cgroup{Path: path, ID: id}}
	}
	removed, again := at(1, 2, "/again"), at(1, 3, "/again") // made again under its path
	left, moved, covered, nested := at(1, 4, "/left"), at(1, 5, "/moved"), at(1, 6, "/a/covered"), at(2, 7, "/a/nested")
	around := at(1, 8, "/a")
	all := []cgroup.Cgroup{{Path: "/", ID: 1}, around.Cgroup, covered.Cgroup, nested.Cgroup, again.Cgroup, left.Cgroup, moved.Cgroup}
	adopted := []cgroup.Adopted{around, again, at(2, 5, "/moved")}
	ended, out, elsewhere := departed([]cgroup.Adopted{removed, left, moved, covered, nested}, adopted, all)
	for what, c := range map[string]struct{ got, want []cgroup.Adopted }{
		"gone": {ended, []cgroup.Adopted{removed}}, "matched by nothing": {out, []cgroup.Adopted{left}}, "of another": {elsewhere, []cgroup.Adopted{moved, nested}},
	} {
		if !slices.Equal(c.got, c.want) {
			t.Errorf("%s: %+v, want %+v", what, c.got, c.want)
		}
	}
}
