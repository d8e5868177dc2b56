package main

import (
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"time"
)

// good is a report that just reaches every limit.
func good() *report {
	at := func(m float64) estimate { return estimate{m, m - 50, m + 50} }
	r := &report{
		Connect: []connectRow{
			{Name: rowNone, Median: 8300},
			{Name: rowFive, OverNone: at(1200), OverEmpty: at(605)},
			{Name: rowNFT5, OverNone: at(2400)},
			{Name: rowNoMatch, OverEmpty: estimate{160, 149, 900}},
			{Name: rowRoutes(10), OverEmpty: at(600)}, {Name: rowRoutes(10000), OverEmpty: at(690)},
			{Name: rowPrefixes(10), OverEmpty: at(600)}, {Name: rowPrefixes(10000), OverEmpty: at(510)},
		},
		Throughput: []rateRow{
			{Traffic: trafficBulk, Name: rowCounted, Ratio: estimate{0.98, 0.97, 0.99}},
			{Traffic: trafficExchange, Name: rowCounted, Ratio: estimate{0.96, 0.95, 0.97}},
			{Traffic: trafficBulk, Name: rowUntracked, Ratio: estimate{0.99, 0.98, 1}},
			{Traffic: trafficExchange, Name: rowUntracked, Ratio: estimate{0.98, 0.97, 0.99}},
			{Traffic: trafficBulk, Name: rowBesideUDP, Ratio: estimate{0.97, 0.96, 0.98}}, {Traffic: trafficBulk, Name: rowPackets, Ratio: estimate{0.98, 0, 0}},
			{Traffic: trafficExchange, Name: rowBesideUDP, Ratio: estimate{0.97, 0.96, 0.9703}}, {Traffic: trafficExchange, Name: rowPackets, Ratio: estimate{0.98, 0, 0}},
			{Traffic: trafficDatagrams, Name: rowBesideUDP, Ratio: estimate{0.97, 0.96, 0.98}}, {Traffic: trafficDatagrams, Name: rowPackets, Ratio: estimate{0.98, 0, 0}},
		},
		Applies: []applied{{CIDRs: 10, Routes: 25, Compile: 9000}, {CIDRs: 10000, Routes: 1000, Compile: 400, Apply: 600}},
		Upkeep: []upkeepRow{
			{Match: byCgroup, Compartments: 50, Processes: 1000, Idle: 0.9, Scraped: 0.9},
			{Match: byCgroup, Compartments: 200, Processes: 5000, Idle: 0.004, Scraped: 0.005, Adopted: 100, AdoptedP95: 100, AdoptedMax: 300},
			{Match: byExe, Compartments: 200, Processes: 5000, Idle: 0.005, Scraped: 0.004},
		},
		Growth: []grownRow{{What: "routes", Count: 10}, {What: whatSlots, Count: 1000, BytesPerSlot: 900}, {What: whatSlots, Count: 100000, BytesPerSlot: 256}},
	}
	for _, k := range []string{"6.1.0", "6.12.0"} {
		r.CPU = append(r.CPU, cpuRow{Kernel: k, Parsers: 8, Case: caseAlone, P95: 2, P99: 2},
			cpuRow{Kernel: k, Parsers: 8, Case: caseBatch, P95: 2.1, P99: 2.3, Idle: 0.95}, cpuRow{Kernel: k, Parsers: 8, Case: caseBackground, P95: 2, P99: 2.2, Idle: 1},
			cpuRow{Kernel: k, Parsers: 8, Case: caseFIFO, P95: 2, P99: 2})
	}
	return r
}

func TestLimits(t *testing.T) {
	if err := good().check(io.Discard, "table"); err != nil {
		t.Fatalf("what reaches every limit: %v: %+v", err, verdicts(good()))
	}
	for _, c := range []struct {
		name  string
		spoil func(*report)
		want  string // in the one verdict that is bad
	}{
		{"half of nft's", func(r *report) { r.Connect[1].OverNone.Median = 1201 }, "nft's five rules"},
		{"nft costs nothing", func(r *report) { r.Connect[2].OverNone.Median = -5 }, "nft's five rules"},
		{"no nft", func(r *report) { r.Connect[2].Name = "" }, "nft's five rules"},
		{"over empty", func(r *report) { r.Connect[1].OverEmpty.Median = 606 }, "over empty"},
		{"no match", func(r *report) { r.Connect[3].OverEmpty.Low = 150 }, "no match over empty"},
		{"untracked beside UDP", func(r *report) { r.Throughput[6].Ratio.High = 0.9700 }, "request/response, TCP, untracked, programs for UDP"},
		{"no empty programs", func(r *report) { r.Throughput[9].Name = "" }, "UDP, untracked, programs for UDP"},
		{"apply", func(r *report) { r.Applies[1].Apply = 601 }, "apply 10000"},
		{"no large plan", func(r *report) { r.Applies = r.Applies[:1] }, "apply 10000"},
		{"routes", func(r *report) { r.Connect[5].OverEmpty = estimate{701, 651, 751} }, "10000 routes"},
		{"routes, cheaper", func(r *report) { r.Connect[5].OverEmpty = estimate{500, 450, 549} }, "10000 routes"},
		{"prefixes", func(r *report) { r.Connect[7].OverEmpty = estimate{701, 651, 751} }, "10000 prefixes"},
		{"no prefixes", func(r *report) { r.Connect = r.Connect[:7] }, "10000 prefixes"},
		{"bulk", func(r *report) { r.Throughput[0].Ratio.High = 0.9899 }, "bulk TCP, bytes counted"},
		{"small", func(r *report) { r.Throughput[1].Ratio.High = 0.9699 }, "response, TCP, bytes counted"},
		{"bulk untracked", func(r *report) { r.Throughput[2].Ratio.High = 0.9899 }, "bulk TCP, untracked"},
		{"small untracked", func(r *report) { r.Throughput[3].Ratio.High = 0.9899 }, "response, TCP, untracked"},
		{"no small untracked", func(r *report) { r.Throughput[3].Name = "" }, "response, TCP, untracked"},
		{"p95", func(r *report) { r.CPU[5].P95 = 2.11 }, "6.12.0, 0 CPUs, 8 parsers: realtime beside batch: p95"},
		{"p95, the other class", func(r *report) { r.CPU[2].P95 = 2.11 }, "6.1.0, 0 CPUs, 8 parsers: realtime beside background: p95"},
		{"p99", func(r *report) { r.CPU[1].P99 = 2.31 }, "6.1.0, 0 CPUs, 8 parsers: realtime beside batch: p99"},
		{"no class", func(r *report) { r.CPU = slices.Delete(r.CPU, 6, 7) }, "6.12.0, 0 CPUs, 8 parsers: realtime beside background"},
		{"not work-conserving", func(r *report) { r.CPU[5].Idle = 0.94 }, "realtime beside batch: the parsers' part"},
		{"many parsers on two CPUs", func(r *report) {
			r.CPU = append(r.CPU, cpuRow{CPUs: 2, Case: caseAlone, P95: 1, P99: 1}, cpuRow{CPUs: 2, Case: caseFIFO, P95: 4, P99: 5},
				cpuRow{CPUs: 2, Case: caseBatch, P95: 9, P99: 6, Idle: 1}, cpuRow{CPUs: 2, Case: caseBackground, P95: 9, P99: 6.1, Idle: 1})
		}, "2 CPUs, 0 parsers: realtime beside background: p99"},
		{"left alone", func(r *report) { r.Upkeep[1].Idle = 0.0051 }, "by cgroup: left alone"},
		{"scraped", func(r *report) { r.Upkeep[2].Scraped = 0.0051 }, "by exe: scraped"},
		{"slow adoption", func(r *report) { r.Upkeep[1].AdoptedP95 = 101 }, "adopted"},
		{"no adoption", func(r *report) { r.Upkeep[1].Adopted = 0 }, "adopted"},
		{"no CPU", func(r *report) { r.CPU = nil }, "cpu:"},
		{"slot", func(r *report) { r.Growth[2].BytesPerSlot = 257 }, "slot"},
		{"no slots", func(r *report) { r.Growth = r.Growth[:1] }, "slot"},
	} {
		r := good()
		c.spoil(r)
		bad := 0
		for _, v := range verdicts(r) {
			if v.OK {
				continue
			}
			bad++
			if !strings.Contains(v.What, c.want) {
				t.Errorf("%s: missed %s, want one about %q", c.name, v.What, c.want)
			}
			if v.Limit == "" || v.Measured == "" {
				t.Errorf("%s: a verdict without limit or measure: %+v", c.name, v)
			}
		}
		if bad == 0 {
			t.Errorf("%s: no limit missed", c.name)
		}
		if err := r.check(io.Discard, "table"); !errors.Is(err, errMissed) {
			t.Errorf("%s: %v, want %v", c.name, err, errMissed)
		}
	}
}

// Nothing measured is nothing reached.
func TestEmptyReport(t *testing.T) {
	for _, v := range verdicts(&report{}) {
		if v.OK {
			t.Errorf("%s is ok", v.What)
		}
	}
}

func TestEstimated(t *testing.T) {
	var v []float64
	for i := range 101 {
		v = append(v, float64((i*37)%101)) // 0 to 100 in no order
	}
	// 0.5 +- 0.98/sqrt(101) of 101 values.
	if got, want := estimated(v), (estimate{50, 40, 60}); got != want {
		t.Errorf("got %v, want %v", got, want)
	}
	if got, want := estimated([]float64{3}), (estimate{3, 3, 3}); got != want {
		t.Errorf("of one: got %v, want %v", got, want)
	}
	if got := median(ratios([]float64{2, 9, 4}, []float64{1, 3, 4})); got != 2 {
		t.Errorf("median of 2, 3, 1 is %v", got)
	}
	if got := median(differences([]float64{2, 9, 4}, []float64{1, 3, 4})); got != 1 {
		t.Errorf("median of 1, 6, 0 is %v", got)
	}
}

// The sizes are what their names say, and every policy compiles.
func TestPolicies(t *testing.T) {
	for _, n := range []int{10, 100, 1000, 10000} {
		z, err := routed(n)
		if err != nil {
			t.Fatal(err)
		}
		plan, err := compiled(z.text())
		if err != nil {
			t.Fatalf("%d routes: %v", n, err)
		}
		if len(plan.Routes) != n {
			t.Errorf("%d routes, want %d", len(plan.Routes), n)
		}
	}
	for _, n := range []int{10, 100, 1000} {
		plan, err := compiled(size{features: n - 2, flat: true}.text())
		if err != nil {
			t.Fatal(err)
		}
		if len(plan.Compartments) != n {
			t.Errorf("%d compartments, want %d", len(plan.Compartments), n)
		}
	}
	for _, n := range []int{1, 10, 10000} {
		plan, err := compiled(size{prefixes: n}.text())
		if err != nil {
			t.Fatal(err)
		}
		if got := len(plan.Destinations); got != n+1 {
			t.Errorf("%d destinations, want %d and the server's", got, n)
		}
	}
	for holds, text := range map[int]string{5: size{held: true}.text(), 7: size{seven: true}.text(), 2: single} {
		plan, err := compiled(text)
		if err != nil {
			t.Fatal(err)
		}
		most := 0
		for _, r := range plan.Routes {
			if plan.Providers[r.Provider].Name == "p" {
				most = max(most, len(r.Holds))
			}
		}
		if most != holds {
			t.Errorf("%d bulkheads on a route, want %d, of\n%s", most, holds, text)
		}
	}
	for _, text := range []string{elsewhere, counted, udpElsewhere, udpCounted, far(10000)} {
		if _, err := compiled(text); err != nil {
			t.Error(err)
		}
	}
}

func TestRequests(t *testing.T) {
	report := "Running 1s test @ http://127.0.0.1:9005/\n  1 threads and 16 connections\n  11234 requests in 1.10s, 4.02MB read\nRequests/sec:  10212.72\n"
	if n, err := requests(report); err != nil || n != 11234 {
		t.Errorf("%v, %v", n, err)
	}
	for _, bad := range []string{"", "Running 1s test", report + "  Socket errors: connect 0, read 1, write 0, timeout 0\n"} {
		if n, err := requests(bad); err == nil {
			t.Errorf("%q gives %v", bad, n)
		}
	}
}

func TestCPURows(t *testing.T) {
	rows, log, err := cpuRows(strings.NewReader("6.1 | goos: linux\n6.1 | "+`{"kernel":"6.1.0-x","case":"alone","requests":240,"p95_ms":2.5}`+"\n6.1  6.1.0-x  ok\n"), func(cpuRow) {})
	if err != nil || len(rows) != 1 || rows[0].P95 != 2.5 || rows[0].Case != caseAlone || rows[0].Kernel != "6.1.0-x" {
		t.Errorf("%v, %v", rows, err)
	}
	if !strings.Contains(log, "goos") {
		t.Errorf("log is %q", log)
	}
	if _, _, err := cpuRows(strings.NewReader("6.1 | {not JSON\n"), func(cpuRow) {}); err == nil {
		t.Error("no error of what is not JSON")
	}
}

func TestMarkdown(t *testing.T) {
	var out strings.Builder
	r := &report{Applies: []applied{{Name: "one", Compile: 1, First: 2, Apply: 3}, {Name: "two"}}}
	if err := r.print(&out, "markdown"); err != nil {
		t.Fatal(err)
	}
	want := "\n| apply a plan | compile ms | first ms, with load and attach | again ms |\n|--|--:|--:|--:|\n| one | 1 | 2 | 3 |\n| two | 0 | 0 | 0 |\n"
	if !strings.HasSuffix(out.String(), want) {
		t.Errorf("got\n%swant\n%s", &out, want)
	}
}

func TestAdoptions(t *testing.T) {
	log := `{"time":"2026-01-01T00:00:00.0125Z","level":"INFO","msg":"adopted a cgroup","cgroup":"/apps/a","id":7}
not JSON
{"time":"2026-01-01T00:00:01Z","level":"INFO","msg":"adopted a cgroup","cgroup":"/apps/other"}
`
	made := map[string]time.Time{"/apps/a": time.Date(2026, 1, 1, 0, 0, 0, 10e6, time.UTC)}
	if took, err := adoptions(made, strings.NewReader(log)); err != nil || !slices.Equal(took, []float64{2.5}) {
		t.Errorf("%v, %v", took, err)
	}
	made["/apps/b"] = time.Time{}
	if took, err := adoptions(made, strings.NewReader(log)); err == nil {
		t.Errorf("no error of one that was not adopted: %v", took)
	}
}
