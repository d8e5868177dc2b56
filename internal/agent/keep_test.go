package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"bulkhead/internal/kerneltest"
	"bulkhead/internal/metrics"
	"bulkhead/pkg/cgroup"
	"bulkhead/pkg/policy"
)

// TestCorrected: every compartment has its count from the start, and keeps it when it leaves the policy.
func TestCorrected(t *testing.T) {
	plan := &policy.Plan{Compartments: []policy.Compartment{{Feature: "default"}, {Feature: "chat", Slice: "/c"}, {Feature: "chat", Tenant: "free", Slice: "/c/f"}}}
	c := corrected{}
	want := []metrics.Corrected{{}, {Feature: "chat"}, {Feature: "chat", Tenant: "free"}}
	if got := c.list(plan); !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	c[compartmentName{"chat", "free"}] = 2
	c[compartmentName{"gone", ""}] = 3
	c[compartmentName{}]++
	want = []metrics.Corrected{{Count: 1}, {Feature: "chat"}, {Feature: "chat", Tenant: "free", Count: 2}, {Feature: "gone", Count: 3}}
	if got := c.list(plan); !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// keeping is an agent that has a plan in force in a tree, as far as cgroups go.
func keeping(t *testing.T, tree *cgroup.Tree, plan *policy.Plan) *agent {
	t.Helper()
	a := &agent{log: slog.New(slog.DiscardHandler), tree: tree, keeper: cgroup.NewKeeper(tree), plan: plan, complaints: map[string]string{}, corrected: corrected{}}
	a.procs = processes{tree: tree, log: a.log}
	t.Cleanup(a.procs.close)
	return a
}

func published(a *agent, reason string) int {
	n := 0
	for _, c := range a.info.Load().Conditions {
		if c.Reason == reason {
			n++
		}
	}
	return n
}

// That the tree could not be read is told until it could, and then what could not be done is.
func TestUnreadTree(t *testing.T) {
	tree, apps := testTree(t)
	plan, err := loaded(t, "apiVersion: bulkhead/v1\nkind: Policy\nmode: enforce\nproviders: {}\nfeatures: {chat: {class: realtime}}\n")
	if err != nil {
		t.Fatal(err)
	}
	a := keeping(t, tree, plan)
	if err := errors.Join(os.Remove(apps), os.Remove(tree.Dir)); err != nil {
		t.Fatal(err)
	}
	a.settle(placement{})
	a.publish()
	for range 3 {
		a.keep()
		if n := published(a, cgroup.ReasonWriteFailed); n != 1 {
			t.Fatalf("%+v", a.info.Load().Conditions)
		}
	}
	if err := os.Mkdir(tree.Dir, 0o755); err != nil {
		t.Fatal(err)
	}
	a.keep()
	if n := published(a, cgroup.ReasonWriteFailed); n != 0 {
		t.Errorf("%+v", a.info.Load().Conditions)
	}
}

// A process that cannot go back to where it came from is tried again, and told until it has gone.
func TestSentBackLater(t *testing.T) {
	tree, apps := testTree(t)
	origin := filepath.Join(apps, "origin")
	if err := os.Mkdir(origin, 0o755); err != nil {
		t.Fatal(err)
	}
	mark := fmt.Sprintf("back-%d", os.Getpid())
	const head = "apiVersion: bulkhead/v1\nkind: Policy\nmode: enforce\nproviders: {}\nfeatures: "
	with, err1 := loaded(t, head+"{loose: {class: batch, match: [{cmdline: '"+mark+"$'}]}}\n")
	without, err2 := loaded(t, head+"{loose: {class: batch}}\n")
	_, err3 := tree.EnsureSlices(with)
	if err := errors.Join(err1, err2, err3); err != nil {
		t.Fatal(err)
	}
	cmd := inside(t, origin, "/bin/sh", "-c", "read -r x; :", mark)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer stdin.Close()
	a := keeping(t, tree, with)
	kerneltest.Poll(t, "it is moved", func() error {
		if err := a.procs.follow(with, nil); err != nil {
			return err
		}
		if slices.Contains(pidsIn(t, origin), cmd.Process.Pid) {
			return errors.New("it is where it was")
		}
		return nil
	})
	// Beside a threaded cgroup goes no process.
	threaded := filepath.Join(apps, "threaded")
	if err := errors.Join(os.Mkdir(threaded, 0o755), os.WriteFile(filepath.Join(threaded, "cgroup.type"), []byte("threaded"), 0)); err != nil {
		t.Fatal(err)
	}
	a.plansBefore, a.plan = []*policy.Plan{a.plan}, without
	a.sendBack()
	a.publish()
	for range 2 {
		a.keep()
		if n := published(a, cgroup.ReasonStays); n != 1 {
			t.Fatalf("%+v", a.info.Load().Conditions)
		}
	}
	if err := os.Remove(threaded); err != nil {
		t.Fatal(err)
	}
	a.keep()
	if n := published(a, cgroup.ReasonStays); n != 0 || !slices.Contains(pidsIn(t, origin), cmd.Process.Pid) {
		t.Errorf("%+v; back are %v", a.info.Load().Conditions, pidsIn(t, origin))
	}
	stdin.Close()
	_ = cmd.Wait()
	kerneltest.Poll(t, "remove "+origin, func() error { return os.Remove(origin) })
}

func TestPlansBefore(t *testing.T) {
	a, b := &policy.Plan{Mode: policy.Enforce}, &policy.Plan{Mode: policy.Observe}
	if got := plansBefore([]*policy.Plan{a}, b, false); !slices.Equal(got, []*policy.Plan{b}) {
		t.Errorf("all is back: %v", got)
	}
	before := []*policy.Plan{a}
	if before = plansBefore(before, b, true); !slices.Equal(before, []*policy.Plan{a, b}) {
		t.Errorf("something stays: %v", before)
	}
	for range 2 * mostBefore {
		before = plansBefore(before, a, true)
	}
	if before = plansBefore(before, b, true); len(before) != mostBefore || before[mostBefore-1] != b {
		t.Errorf("%d plans", len(before))
	}
}

// Each condition is published once, in the order in which they come, however many there are.
func TestDistinctConditions(t *testing.T) {
	const n = 50_000 // to compare each with all others would take minutes
	tree, _ := testTree(t)
	a := keeping(t, tree, &policy.Plan{})
	for i := range 2 * n {
		a.values = append(a.values, cgroup.Condition{Type: cgroup.TypeCPU, Message: strconv.Itoa(i % n)})
	}
	began := time.Now()
	a.publish()
	conds := a.info.Load().Conditions
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("%v for %d conditions", took, len(a.values))
	}
	if !slices.Equal(conds, a.values[:n]) {
		t.Errorf("%d conditions of %d", len(conds), n)
	}
}

// stubborn is a back end that has a controller only later.
type stubborn struct {
	cgroup.Backend
	dir string
	has bool
}

func (b *stubborn) Ensure(p string, _ []string) ([]cgroup.Condition, error) {
	if !b.has {
		dir := filepath.Join(b.dir, p)
		err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "pids.max"), []byte("max\n"), 0o644))
		return []cgroup.Condition{{Type: cgroup.TypeCPU, Status: "False", Reason: cgroup.ReasonControllerNotEnabled}}, err
	}
	return nil, os.WriteFile(filepath.Join(b.dir, p, "cpu.weight"), []byte("100\n"), 0o644)
}

func (b *stubborn) Set(p string, values []cgroup.Value) error {
	for _, v := range values {
		if err := os.WriteFile(filepath.Join(b.dir, p, v.File), []byte(v.Value+"\n"), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func (b *stubborn) Restore(map[string][]cgroup.Value) []cgroup.Condition { return nil }

// What slices lack is tried again after a minute, not before, and values that can be set then are.
func TestSetUpAgain(t *testing.T) {
	dir := t.TempDir()
	for _, file := range []string{"cgroup.controllers", "cgroup.subtree_control"} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte("cpu memory pids\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	b := &stubborn{dir: dir}
	tree := &cgroup.Tree{Dir: dir, Mount: dir, ID: 1, Backend: b}
	plan, err := loaded(t, "apiVersion: bulkhead/v1\nkind: Policy\nmode: enforce\nproviders: {}\nfeatures: {chat: {class: realtime, cpu: {weight: 900}}}\n")
	if err != nil {
		t.Fatal(err)
	}
	a := keeping(t, tree, plan)
	if a.setup, err = tree.EnsureSlices(plan); err != nil {
		t.Fatal(err)
	}
	a.setupAt = time.Now().Add(setupEvery)
	a.settle(placement{})
	a.publish()
	weight := filepath.Join(dir, "bulkhead.slice/bulkhead-chat.slice/cpu.weight")
	b.has = true
	a.keep()
	if n := published(a, cgroup.ReasonControllerNotEnabled); n != 1 {
		t.Errorf("before its time: %+v", a.info.Load().Conditions)
	}
	a.setupAt = time.Now()
	a.keep()
	if n := published(a, cgroup.ReasonControllerNotEnabled); n != 0 {
		t.Errorf("%+v", a.info.Load().Conditions)
	}
	if text, err := os.ReadFile(weight); err != nil || string(text) != "900\n" {
		t.Errorf("the weight is %q (%v)", text, err)
	}
}
