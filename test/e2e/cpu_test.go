package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"bulkhead/internal/kerneltest"
)

// missing is a controller that cgroup v2 does not have here, "" if it has them all.
func (n *node) missing() string {
	for _, c := range []string{"cpu", "memory"} {
		if !hasWord(filepath.Join(n.Cgroup.Path, "cgroup.controllers"), c) {
			return c
		}
	}
	return ""
}

// needControllers skips a test where a kernel has no cpu or memory controller on cgroup
// v2, unless they are required.
func (n *node) needControllers() {
	n.t.Helper()
	c := n.missing()
	if c == "" {
		return
	}
	for _, required := range strings.Split(os.Getenv("BULKHEAD_REQUIRE"), ",") {
		if required == "cpu" || required == "memory" {
			n.t.Fatalf("BULKHEAD_REQUIRE=%s: the %s controller is not on cgroup v2", os.Getenv("BULKHEAD_REQUIRE"), c)
		}
	}
	n.t.Skipf("this kernel lacks: the %s controller on cgroup v2", c)
}

// wantValues compares control files of a cgroup.
func wantValues(t testing.TB, cgroup string, want map[string]string) {
	t.Helper()
	for file, w := range want {
		got, err := os.ReadFile(filepath.Join(cgroup, file))
		if err != nil || strings.TrimSpace(string(got)) != w {
			t.Errorf("%s of %s is %q (%v), want %q", file, cgroup, strings.TrimSpace(string(got)), err, w)
		}
	}
}

// defaults are the kernel's.
func defaults() map[string]string {
	return map[string]string{"cpu.weight": "100", "cpu.idle": "0", "cpu.max": "max 100000", "memory.high": "max", "memory.max": "max"}
}

const weighed = `
apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers: {}
features:
  chat:   {class: realtime}
  embed:  {class: timely, cpu: none}
  batch:  {class: batch, cpu: {weight: 10, max: 150%, burst: 50ms}, memory: {high: 1Gi, max: 2Gi}}
  parse:  {class: batch, match: [{cgroup: /apps/parse}], cpu: {weight: 7, max: 50%}, memory: {max: 3Gi}}
  nights: {class: background}
`

// Slices have the values that the policy says, through reloads, and cgroups of others
// get theirs back.
func TestCPU(t *testing.T) {
	n := newNode(t)
	n.needControllers()
	parse := n.Mkdir("apps/parse").Path
	originals := map[string]string{"cpu.weight": "333", "cpu.idle": "0", "cpu.max": "max 100000", "memory.high": "max", "memory.max": fmt.Sprint(5 << 30)}
	for _, c := range []string{"+cpu", "+memory"} {
		for _, dir := range []string{n.Cgroup.Path, filepath.Dir(parse)} {
			if err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte(c), 0); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, file := range []string{"cpu.weight", "memory.max"} {
		if err := os.WriteFile(filepath.Join(parse, file), []byte(originals[file]), 0); err != nil {
			t.Fatal(err)
		}
	}
	n.Mkdir("login")
	before := n.state()
	n.write(weighed)
	n.start()
	if s := n.status(); s.condition("CPU") != nil || s.condition("Memory") != nil {
		t.Errorf("conditions %+v", s.Conditions)
	}
	wantValues(t, n.slice("chat"), map[string]string{"cpu.weight": "10000", "cpu.idle": "0", "cpu.max": "max 100000", "memory.max": "max"})
	wantValues(t, n.slice("embed"), defaults())
	batch := map[string]string{"cpu.weight": "10", "cpu.idle": "0", "cpu.max": "150000 100000", "cpu.max.burst": "50000", "memory.high": fmt.Sprint(1 << 30), "memory.max": fmt.Sprint(2 << 30)}
	wantValues(t, n.slice("batch"), batch)
	wantValues(t, n.slice("nights"), map[string]string{"cpu.idle": "1"})
	adopted := map[string]string{"cpu.weight": "7", "cpu.max": "50000 100000", "memory.high": "max", "memory.max": fmt.Sprint(3 << 30)}
	wantValues(t, parse, adopted)
	for _, c := range n.status().Compartments {
		for _, m := range c.Cgroups {
			weight, max := 0, quota{}
			if m.CPU.Weight != nil {
				weight = *m.CPU.Weight
			}
			if m.CPU.Max != nil {
				max = *m.CPU.Max
			}
			got := fmt.Sprint(m.Path, weight, max, m.CPU.Idle)
			want := map[string]string{
				"/bulkhead.slice/bulkhead-chat.slice":   "10000 {0 0 0} false",
				"/bulkhead.slice/bulkhead-embed.slice":  "100 {0 0 0} false",
				"/bulkhead.slice/bulkhead-batch.slice":  "10 {150000 100000 50000} false",
				"/bulkhead.slice/bulkhead-parse.slice":  "7 {50000 100000 0} false",
				"/bulkhead.slice/bulkhead-nights.slice": "0 {0 0 0} true",
				"/apps/parse":                           "7 {50000 100000 0} false",
			}[m.Path]
			if got != m.Path+want {
				t.Errorf("status says %s, want %s", got, want)
			}
		}
	}

	// A reload changes them, and who leaves, or stops asking, gets the defaults.
	stays := n.client("embed")
	n.write(strings.NewReplacer("weight: 10, max: 150%, burst: 50ms", "weight: 20", "high: 1Gi, max: 2Gi", "max: 1Gi",
		"  embed:  {class: timely, cpu: none}\n", "", "match: [{cgroup: /apps/parse}], ", "", "class: background", "class: timely").Replace(weighed))
	n.must("reload")
	wantValues(t, n.slice("batch"), map[string]string{"cpu.weight": "20", "cpu.max": "max 100000", "cpu.max.burst": "0", "memory.high": "max", "memory.max": fmt.Sprint(1 << 30)})
	wantValues(t, n.slice("nights"), map[string]string{"cpu.weight": "1000", "cpu.idle": "0"})
	wantValues(t, parse, originals)
	wantValues(t, n.slice("embed"), defaults())
	stays.Kill()
	kerneltest.Poll(t, "the slice that left is removed", func() error {
		if _, err := os.Stat(n.slice("embed")); err == nil {
			return fmt.Errorf("%s is there", n.slice("embed"))
		}
		return nil
	})

	// Detach restores, also what an agent had changed that was killed.
	n.write(weighed)
	n.must("reload")
	wantValues(t, parse, adopted)
	n.must("detach")
	wantValues(t, parse, originals)
	n.wantState(before)
}

const own = `
apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers: {}
features:
  chat:  {class: realtime, cpu: {cpus: 0, exclusive: true}}
  embed: {class: timely, cpu: none}
  batch: {class: batch, match: [{cgroup: /apps/parse}]}
`

// A feature's own CPUs are nobody else's of the policy's, status and plan say what each
// has and what a node does not have, and it all goes back.
func TestOwnCPUs(t *testing.T) {
	n := newNode(t)
	n.needControllers()
	if !hasWord(filepath.Join(n.Cgroup.Path, "cgroup.controllers"), "cpuset") {
		// Without: told, and the rest holds.
		n.write(own)
		n.start()
		wantValues(t, n.slice("chat"), map[string]string{"cpu.weight": "10000"})
		if c := n.status().condition("CPUSet"); c == nil || !strings.Contains(c.Message, "cpuset controller") {
			t.Errorf("condition %+v", c)
		}
		return
	}
	if runtime.NumCPU() < 2 {
		t.Skip("this machine lacks: a second CPU")
	}
	parse := n.Mkdir("apps/parse").Path
	for _, dir := range []string{n.Cgroup.Path, filepath.Dir(parse)} {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+cpu +cpuset"), 0); err != nil {
			t.Fatal(err)
		}
	}
	before := n.state()
	n.write(own)
	if p := n.planned(n.policy); len(p.Conditions) > 0 || !strings.Contains(p.text, "cpus 0 exclusive") {
		t.Errorf("plan: %+v\n%s", p.Conditions, p.text)
	}
	n.start()
	wantValues(t, n.slice("chat"), map[string]string{"cpuset.cpus": "0", "cpuset.cpus.effective": "0"})
	wantValues(t, n.slice("embed"), map[string]string{"cpuset.cpus": ""})
	for _, dir := range []string{n.slice("batch"), parse} {
		if cpus, err := os.ReadFile(filepath.Join(dir, "cpuset.cpus.effective")); err != nil || strings.HasPrefix(string(cpus), "0") {
			t.Errorf("%s runs on %q, %v", dir, cpus, err)
		}
	}
	s := n.status()
	for _, c := range s.Compartments {
		for _, m := range c.Cgroups {
			if m.CPU.CPUs == nil || c.Feature == "chat" && *m.CPU.CPUs != "0" || c.Feature == "batch" && strings.HasPrefix(*m.CPU.CPUs, "0") {
				t.Errorf("status of %s: %+v", m.Path, m.CPU)
			}
		}
	}
	if c := s.condition("CPUSet"); c != nil {
		t.Errorf("condition %+v", c)
	}

	n.write(strings.Replace(own, "cpus: 0,", "cpus: 8000,", 1))
	p := n.planned(n.policy)
	n.must("reload")
	c := n.status().condition("CPUSet")
	if c == nil || c.Reason != "CPUsNotThere" || !strings.Contains(c.Message, "CPU 8000") {
		t.Errorf("condition %+v", c)
	} else if len(p.Conditions) != 1 || p.Conditions[0] != *c {
		t.Errorf("plan said %+v, status %+v", p.Conditions, c)
	}
	n.must("detach")
	n.wantState(before)
}

// Observe touches neither CPU nor memory.
func TestObserveCPU(t *testing.T) {
	n := newNode(t)
	n.needControllers()
	n.write(weighed)
	n.start()
	n.write(strings.Replace(weighed, "mode: enforce", "mode: observe", 1))
	n.must("reload")
	for _, feature := range []string{"chat", "batch", "nights"} {
		for file, want := range defaults() {
			got, err := os.ReadFile(filepath.Join(n.slice(feature), file))
			if err == nil && strings.TrimSpace(string(got)) != want {
				t.Errorf("%s of %s is %s", file, feature, got)
			}
		}
	}
}

// A memory limit below what is used now is told and not set: it would kill at once.
func TestMemoryBelowUse(t *testing.T) {
	n := newNode(t)
	n.needControllers()
	n.serve(1)
	text := func(max string) string {
		return fmt.Sprintf("apiVersion: bulkhead/v1\nkind: Policy\nmode: enforce\nproviders: {}\nfeatures: {batch: {class: batch, memory: {max: %s}}}\n", max)
	}
	n.write(text("1Gi"))
	n.start()
	client := n.client("batch")
	// Not the agent's own file, which it would apply meanwhile.
	next := filepath.Join(n.dir, "next.yaml")
	if err := os.WriteFile(next, []byte(text("1Mi")), 0o644); err != nil {
		t.Fatal(err)
	}
	r := n.run("plan", next)
	wantResult(t, r, 2)
	wantWords(t, r.stdout, "/bulkhead.slice/bulkhead-batch.slice uses", "will not be set")
	n.write(text("1Mi"))
	n.must("reload")
	wantValues(t, n.slice("batch"), map[string]string{"memory.max": fmt.Sprint(1 << 30)})
	if c := n.status().condition("Memory"); c == nil || c.Reason != "BelowUse" || !strings.Contains(c.Message, "bulkhead-batch.slice") {
		t.Errorf("condition %+v", c)
	}
	n.wantRun(1, nil, "status", "--check")
	client.MustDial(kerneltest.TCP4, n.addr(1)) // it lives

	n.write(text("2Gi"))
	n.must("reload")
	wantValues(t, n.slice("batch"), map[string]string{"memory.max": fmt.Sprint(2 << 30)})
	if c := n.status().condition("Memory"); c != nil {
		t.Errorf("condition %+v stays", c)
	}
}

// Where a controller is missing connection limits hold, and nothing pretends.
func TestControllersTold(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	n.write(strings.Replace(weighed, "providers: {}", "providers: {deepseek: {cidrs: [@1/32], limits: {connections: 2}}}", 1))
	before := n.planned(n.policy)
	n.start()
	s := n.status()
	var told []string
	var conds []condition
	for _, c := range s.Conditions {
		if c.Type == "CPU" || c.Type == "Memory" {
			conds = append(conds, c)
			told = append(told, strings.ToLower(c.Type))
			if c.Status != "False" || c.Reason == "" || !strings.Contains(c.Message, "connection limits work") {
				t.Errorf("condition %+v", c)
			}
		}
	}
	var want []string
	for _, c := range []string{"cpu", "memory"} {
		if !hasWord(filepath.Join(n.Cgroup.Path, "cgroup.controllers"), c) {
			want = append(want, c)
		}
	}
	if slices.Sort(told); !slices.Equal(told, want) {
		t.Errorf("told that %v is missing, want %v", told, want)
	}
	code := 0
	if len(want) > 0 {
		code = 1
	}
	n.wantRun(code, nil, "status", "--check")

	// plan says the same: beforehand, at each value, and when it is in force.
	for _, p := range []planned{before, n.planned(n.policy)} {
		if !slices.Equal(p.Conditions, conds) {
			t.Errorf("plan's conditions %+v, want status's %+v", p.Conditions, conds)
		}
		wantWords(t, p.text, messages(conds)...)
	}
	for _, c := range before.Changes {
		if c.What != "cpu" && c.What != "memory" {
			continue
		}
		if said := strings.Contains(c.Note, "cannot be set on this node"); said != slices.Contains(want, c.What) {
			t.Errorf("plan says of %s %s: %q", c.What, c.Name, c.Note)
		}
	}
	observed := filepath.Join(n.dir, "observe.yaml")
	n.save(observed, strings.Replace(weighed, "mode: enforce", "mode: observe", 1))
	if p := n.planned(observed); len(p.Conditions) > 0 {
		t.Errorf("observe sets nothing, so nothing falls short: %+v", p.Conditions)
	}
	for _, c := range s.Compartments {
		for _, m := range c.Cgroups {
			if slices.Contains(want, "cpu") && (m.CPU.Weight != nil || m.CPU.Max != nil || m.CPU.Idle) {
				t.Errorf("%s: %+v without a cpu controller", m.Path, m.CPU)
			}
		}
	}
	dials(t, n.client("batch"), n.addr(1), 3, syscall.ECONNREFUSED)
	n.wantCounts(map[string]counts{"provider deepseek": {2, 2, 2, 2, 1}})
}

// planned is what plan says of a policy, in both ways.
type planned struct {
	text    string
	Changes []struct {
		Kind, What, Name, Note string
	}
	Conditions []condition
}

func (n *node) planned(policy string) (p planned) {
	n.t.Helper()
	r := n.run("plan", "-o", "json", policy)
	if err := json.Unmarshal([]byte(r.stdout), &p); err != nil || p.Conditions == nil {
		n.t.Fatalf("plan -o json: %v, %s", err, r)
	}
	p.text = n.run("plan", policy).stdout
	return p
}

func messages(conds []condition) (all []string) {
	for _, c := range conds {
		all = append(all, c.Type+": "+c.Reason+": "+c.Message)
	}
	return all
}

// Processor time belongs to one compartment: a tenant's is not its feature's too,
// though the kernel counts it in both slices. Status and metrics say the same.
func TestCPUTime(t *testing.T) {
	n := newNode(t)
	n.write(tenanted)
	n.start()
	const work = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"
	n.must("exec", "--feature", "chat", "--", "sh", "-c", work)
	n.must("exec", "--feature", "chat", "--tenant", "free", "--", "sh", "-c", work)

	kernel := func(slice string) uint64 {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(slice, "cpu.stat"))
		if err != nil {
			t.Fatal(err)
		}
		var usage uint64
		if _, err := fmt.Sscanf(string(text), "usage_usec %d", &usage); err != nil {
			t.Fatalf("%v in %s", err, text)
		}
		return usage
	}
	// The last instructions of what has ended may still be on their way.
	kerneltest.Poll(t, "status and metrics say what the kernel says", func() error {
		feature := kernel(n.slice("chat"))
		tenant := kernel(filepath.Join(n.slice("chat"), "bulkhead-chat-free.slice"))
		if tenant == 0 || feature <= tenant {
			return fmt.Errorf("the kernel counted %d for the feature and %d for its tenant", feature, tenant)
		}
		want := map[string]uint64{"": feature - tenant, "free": tenant}
		told, scraped := map[string]uint64{}, map[string]uint64{}
		for _, c := range n.status().Compartments {
			for _, m := range c.Cgroups {
				if c.Feature == "chat" {
					told[c.Tenant] += m.CPU.UsageUsec
				}
			}
		}
		metrics := n.scrape()
		for tenant := range want {
			s := series("cpu_usage_seconds_total", "feature_group", "chat", "tenant", tenant)
			scraped[tenant] = uint64(math.Round(metrics[s] * 1e6))
		}
		if !maps.Equal(told, want) || !maps.Equal(scraped, want) {
			return fmt.Errorf("status says %v, metrics say %v, want %v", told, scraped, want)
		}
		return nil
	})
}

// The CPU time of a cgroup that is adopted while the agent runs is its feature's from then
// on, also on hosts whose cpu controller is elsewhere: the kernel counts it anyway.
func TestCPUTimeOfAdopted(t *testing.T) {
	n := newNode(t)
	n.write("apiVersion: bulkhead/v1\nkind: Policy\nmode: enforce\nproviders: {}\nfeatures:\n  late: {class: batch, match: [{cgroup: /late}]}\n")
	n.start()
	late := n.Mkdir("late")
	work := exec.Command("sh", "-c", "echo 0 > "+late.Path+"/cgroup.procs; i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done")
	if out, err := work.CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	kerneltest.Poll(t, "metrics have its CPU time", func() error {
		text, err := os.ReadFile(filepath.Join(late.Path, "cpu.stat"))
		if err != nil {
			t.Fatal(err)
		}
		var usage uint64
		if _, err := fmt.Sscanf(string(text), "usage_usec %d", &usage); err != nil || usage == 0 {
			t.Fatalf("%v in %s", err, text)
		}
		s := series("cpu_usage_seconds_total", "feature_group", "late", "tenant", "")
		if told := uint64(math.Round(n.scrape()[s] * 1e6)); told != usage {
			return fmt.Errorf("metrics say %d us, the kernel %d", told, usage)
		}
		return nil
	})
}
