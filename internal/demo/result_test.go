package demo

import (
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestPercentile(t *testing.T) {
	numbers := func(n int) []time.Duration {
		s := make([]time.Duration, n)
		for i := range s {
			s[i] = time.Duration(i + 1)
		}
		return s
	}
	for _, c := range []struct{ n, p, want int }{
		{1, 1, 1}, {1, 50, 1}, {1, 99, 1}, {1, 100, 1},
		{2, 50, 1}, {2, 51, 2}, {3, 50, 2},
		{100, 50, 50}, {100, 99, 99}, {100, 100, 100},
		{101, 99, 100}, {200, 99, 198}, {300, 99, 297}, {300, 90, 270}, {200, 95, 190},
	} {
		if got := percentile(numbers(c.n), c.p); got != time.Duration(c.want) {
			t.Errorf("percentile %d of 1..%d is %d, want %d", c.p, c.n, got, c.want)
		}
	}
}

// The definition, on random samples: at least p in 100 are at or below it,
// and fewer than that are below it.
func TestPercentileDefinition(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for range 2000 {
		sorted := make([]time.Duration, 1+random.IntN(400))
		for i := range sorted {
			sorted[i] = time.Duration(random.IntN(50))
		}
		slices.Sort(sorted)
		p := 1 + random.IntN(100)
		v := percentile(sorted, p)
		atMost, below := 0, 0
		for _, d := range sorted {
			if d <= v {
				atMost++
			}
			if d < v {
				below++
			}
		}
		if atMost*100 < p*len(sorted) || below*100 >= p*len(sorted) {
			t.Fatalf("percentile %d of %v is %d", p, sorted, v)
		}
	}
}

// same returns a measurement of calls that all took so many milliseconds.
func same(name string, run runName, ms int, load *loadReport) measurement {
	d := time.Duration(ms) * time.Millisecond
	return measurement{name, run, sample{Latencies: []time.Duration{d, d, d}, Load: load}}
}

// words returns text with one space between words.
func words(r Result) string { return strings.Join(strings.Fields(r.Text(false)), " ") }

func wantAll(t *testing.T, text string, all ...string) {
	t.Helper()
	for _, want := range all {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

func batchOf(refused int) *loadReport {
	return &loadReport{Seconds: 2, Done: 81, Refused: refused, Latencies: []time.Duration{1500 * time.Millisecond}}
}

// The flood is compared with chat alone, and its phases keep their names and
// fields in JSON.
func TestFloodResult(t *testing.T) {
	sc := theScenario()
	measured := []measurement{
		same("flood", alone, 100, nil),
		same("flood", without, 725, batchOf(0)),
		same("flood", with, 104, batchOf(1234)),
	}
	r := newResult(sc, measured, nil, 36*time.Second)
	text := words(r)
	wantAll(t, text,
		"batch: class: batch providers: {local: {connections: 10}}",
		"flood chat calls alone 100 100 100* 1.00 3 0 0",
		" without 725 725 725* 7.25 3 0 0",
		" with 104 104 104* 1.04 3 0 0",
		"7.2 times that of chat alone without bulkheads, and 1.04 times with them",
		"Batch did 40.5 calls/s in place of 40.5: 1234 of its connects were refused",
		"Took 36 s; everything it made on this node is removed")
	if strings.Contains(text, "missed") {
		t.Errorf("claims that it missed the aim:\n%s", text)
	}
	if text := r.Text(true); strings.Contains(text, "is removed") {
		t.Errorf("claims that all is removed while the flood runs:\n%s", text)
	}

	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var doc struct {
		ServeAtOnce int `json:"serve_at_once"`
		Phases      []struct {
			Phase string `json:"phase"`
			Chat  struct {
				Calls                          int
				P50_ms, P90_ms, P95_ms, P99_ms float64
			} `json:"chat"`
			ChatFailed *int    `json:"chat_failed"`
			Slowdown   float64 `json:"slowdown"`
			Batch      *struct {
				CallsPerSecond float64 `json:"calls_per_second"`
				Jobs           *struct{ Calls int }
				Refused        int
			} `json:"batch"`
		} `json:"phases"`
	}
	if err := json.Unmarshal(b, &doc); err != nil {
		t.Fatal(err)
	}
	if doc.ServeAtOnce != 20 || len(doc.Phases) != 3 {
		t.Fatalf("%s", b)
	}
	for i, want := range []string{"chat alone", "flood, no bulkheads", "flood, bulkheads"} {
		if p := doc.Phases[i]; p.Phase != want || p.Chat.Calls != 3 || p.Chat.P99_ms < 100 || p.Chat.P95_ms != p.Chat.P90_ms || p.ChatFailed == nil || p.Slowdown < 1 {
			t.Errorf("phase %d: %+v", i, p)
		}
	}
	if p := doc.Phases[2].Batch; doc.Phases[0].Batch != nil || p == nil || p.CallsPerSecond != 40.5 || p.Refused != 1234 || p.Jobs.Calls != 1 {
		t.Errorf("batch: %+v", p)
	}

	measured[2] = same("flood", with, 140, batchOf(1234))
	wantAll(t, words(newResult(sc, measured, nil, time.Second)), "With bulkheads p99 is 1.40 times as long; the aim is at most 1.3 times: this run missed it")
	measured[1] = same("flood", without, 499, batchOf(0))
	wantAll(t, words(newResult(sc, measured, nil, time.Second)), "the aim is at least 5 times: this run missed it")
	measured[2].Sample = sample{Failed: 3, Error: "too bad", Load: batchOf(0)}
	text = words(newResult(sc, measured, nil, time.Second))
	wantAll(t, text, "with - - - - 0 3 0", "With: 3 of the measured calls were not answered, the first: too bad")
}

// A known figure counts as met within a tenth, and with bulkheads when it is
// better, or when the same calls take as long alone.
func TestKnownFigures(t *testing.T) {
	sc := theScenario()
	for _, c := range []struct {
		alone, without, with int
		remarks              []string
	}{
		{2, 1415, 2, nil},
		{2, 1550, 1, nil},
		{2, 1600, 2, []string{"without bulkheads p50 is 1600 ms; known are 1415 ms"}},
		{2, 1200, 2, []string{"without bulkheads p50 is 1200 ms; known are 1415 ms"}},
		{8, 1415, 9, []string{"with bulkheads p50 is 1.12 times as long; the aim is at most 1.1 times: this run missed it", "with bulkheads p50 is 9.0 ms; known are 2.3 ms"}},
		{10, 1415, 11, nil},
		{10, 1600, 11, []string{"without bulkheads p50 is 1600 ms; known are 1415 ms"}},
	} {
		load := &loadReport{Done: 2, Refused: 3}
		r := newResult(sc, []measurement{same("slow", alone, c.alone, nil), same("slow", without, c.without, load), same("slow", with, c.with, load)}, nil, time.Second)
		if e := r.Experiments[0]; !slices.Equal(e.Remarks, c.remarks) {
			t.Errorf("%d, %d and %d ms: %q, want %q", c.alone, c.without, c.with, e.Remarks, c.remarks)
		}
		if len(r.Phases) != 0 {
			t.Errorf("phases without a flood: %+v", r.Phases)
		}
	}
}

// Refusals are what bounded is to show, if they are quick.
func TestRefusals(t *testing.T) {
	sc := theScenario()
	bounded := func(refusal time.Duration) ExperimentResult {
		// Alone it is no bulkhead that refuses.
		alone8 := same("bounded", alone, 100, nil)
		alone8.Sample.Refused = []time.Duration{13 * time.Millisecond}
		s := same("bounded", with, 100, nil)
		s.Sample.Refused = []time.Duration{time.Millisecond, refusal}
		return newResult(sc, []measurement{alone8, same("bounded", without, 2400, nil), s}, nil, time.Second).Experiments[0]
	}
	if e := bounded(4 * time.Millisecond); len(e.Remarks) != 0 || !strings.Contains(e.Verdict, "2 are refused, 95 of 100 of them within 4.0 ms") {
		t.Errorf("%+v", e)
	}
	if e := bounded(6 * time.Millisecond); len(e.Remarks) != 1 || !strings.Contains(e.Remarks[0], "6.0 ms; the aim is under 5 ms") {
		t.Errorf("%q", e.Remarks)
	}
	s := same("slow", with, 2, &loadReport{})
	s.Sample.Refused, s.Sample.Error = []time.Duration{1}, "full"
	if e := newResult(sc, []measurement{same("slow", alone, 2, nil), same("slow", without, 1415, &loadReport{}), s}, nil, time.Second).Experiments[0]; len(e.Remarks) != 1 || !strings.Contains(e.Remarks[0], "1 of the measured calls were not answered, the first: full") {
		t.Errorf("a refused call of slow: %q", e.Remarks)
	}
}

// An experiment that is skipped has a row that says why; one that was not asked
// for has none.
func TestSkipped(t *testing.T) {
	r := newResult(theScenario(), nil, map[string]string{"cpu": "no controller"}, time.Second)
	if len(r.Experiments) != 1 || r.Experiments[0].Skipped != "no controller" {
		t.Fatalf("%+v", r.Experiments)
	}
	wantAll(t, words(r), "cpu skipped: no controller")
}

// The whole database gone is no division by zero, and is told in the verdict.
func TestDatabaseResult(t *testing.T) {
	gone := measurement{"database", without, sample{Failed: 20, Error: "too many clients"}}
	r := newResult(theScenario(), []measurement{gone, same("database", with, 30, nil)}, nil, time.Second)
	e := r.Experiments[0]
	if e.Runs[0].Ratio != 0 || e.Runs[1].Ratio != 1 || len(e.Remarks) != 0 || !strings.Contains(e.Verdict, "20 of 20 queries of the web feature failed. With 5 connections for the report 0 failed") {
		t.Errorf("%+v", e)
	}
	if _, err := json.Marshal(r); err != nil {
		t.Error(err)
	}
}

// The commands that are shown for a look name the processes' namespaces, the
// node and the pins.
func TestKeptText(t *testing.T) {
	text := kept{PID: 42, Node: "/cg/node", Flags: []string{"--bpffs", "/p"}, Pins: "/p/bulkhead/v1"}.text("/bin/bulkhead")
	wantAll(t, text, "nsenter --target 42 --mount --net /bin/bulkhead status --bpffs /p\n", "bulkhead top --bpffs /p\n",
		"bpftool map dump pinned /p/bulkhead/v1/bulkheads\n", "bpftool cgroup tree /cg/node\n", "ENTER or Ctrl-C")
}

// What is left is the sum of what the runs still take, and the guess at what
// they take besides becomes what was seen.
func TestEstimate(t *testing.T) {
	sc := theScenario()
	sc.Runs = sc.steps([]string{"flood"})
	e := newEstimate(sc)
	now := time.Unix(0, 0)
	e.next(now)
	if want := 3 * (10*time.Second + startTakes); e.left(now) != want {
		t.Errorf("%v, want %v", e.left(now), want)
	}
	if want := 3*(10*time.Second+startTakes) - 5*time.Second; e.left(now.Add(5*time.Second)) != want {
		t.Errorf("%v, want %v", e.left(now.Add(5*time.Second)), want)
	}
	now = now.Add(11 * time.Second)
	e.next(now)
	if want := 2 * 11 * time.Second; e.left(now) != want {
		t.Errorf("%v, want %v: the first took 1 s besides", e.left(now), want)
	}
	if e.left(now.Add(time.Hour)) != 11*time.Second {
		t.Errorf("%v in a run that is late", e.left(now.Add(time.Hour)))
	}
}

func TestTail(t *testing.T) {
	var s tail
	long := strings.Repeat("x", tailSize)
	for _, p := range []string{"first\n", long, "last\n"} {
		if n, err := s.Write([]byte(p)); n != len(p) || err != nil {
			t.Fatal(n, err)
		}
	}
	if got := s.String(); len(got) != tailSize-1 || strings.Contains(got, "first") || !strings.HasSuffix(got, "xlast") {
		t.Errorf("%d bytes, ends %q", len(got), got[len(got)-10:])
	}
}

// Nothing of the user's settings sends a client elsewhere.
func TestChildEnv(t *testing.T) {
	got := childEnv([]string{"PATH=/bin", "PGHOST=elsewhere", "http_proxy=http://p", "HTTPS_PROXY=http://p", "PYTHONPATH=/x", "no_proxy=none", "LC_ALL=de_DE"})
	if !slices.Equal(got, []string{"PATH=/bin", "no_proxy=*", "NO_PROXY=*", "LC_ALL=C", "TMPDIR=" + privateDir}) {
		t.Errorf("%q", got)
	}
}
