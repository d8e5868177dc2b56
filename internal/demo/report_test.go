package demo

import (
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
		{101, 99, 100}, {200, 99, 198}, {300, 99, 297}, {300, 90, 270},
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

// The times of the calls are spread over a fifth to each side, evenly in any
// stretch of them, and their mean is the mean.
func TestSpread(t *testing.T) {
	const n, mean = 300, 100 * time.Millisecond
	var sum time.Duration
	quarters := map[time.Duration]int{}
	for i := range n {
		d := spread(mean, i)
		if d < 80*time.Millisecond || d >= 120*time.Millisecond {
			t.Fatalf("call %d takes %v", i, d)
		}
		sum += d
		quarters[(d-80*time.Millisecond)/(10*time.Millisecond)]++
	}
	if off := (sum/n - mean).Abs(); off > time.Millisecond {
		t.Errorf("mean %v", sum/n)
	}
	for q, k := range quarters {
		if k < 70 || k > 80 {
			t.Errorf("%d of %d calls in quarter %d", k, n, q)
		}
	}
}

// same returns a row whose chat calls all took d.
func same(p phase, d time.Duration, b *batchReport) measurement {
	return measurement{Phase: p, Chat: chatReport{Latencies: []time.Duration{d, d, d}}, Batch: b}
}

// words returns text with one space between words.
func words(r Result) string { return strings.Join(strings.Fields(r.Text()), " ") }

func TestResult(t *testing.T) {
	sc := theScenario()
	batch := func(refused int) *batchReport {
		return &batchReport{Seconds: 2, Done: 81, Refused: refused, Latencies: []time.Duration{1500 * time.Millisecond}}
	}
	rows := []measurement{
		same(chatAlone, 100*time.Millisecond, nil),
		same(flood, 725*time.Millisecond, batch(0)),
		same(floodLimited, 104*time.Millisecond, batch(1234)),
	}
	text := words(newResult(sc, rows, 36*time.Second))
	for _, want := range []string{
		"batch: class: batch providers: {local: {connections: 10}}",
		"chat alone 100 100 100 1.00 0 - - - -",
		"flood, no bulkheads 725 725 725 7.25 0 1500 1500 40.5 0",
		"flood, bulkheads 104 104 104 1.04 0 1500 1500 40.5 1234",
		"7.2 times that of chat alone without bulkheads, and 1.04 times with them",
		"1234 of its connects were refused",
		"Took 36 s",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if strings.Contains(text, "missed") {
		t.Errorf("claims that it missed the aim:\n%s", text)
	}

	rows[2] = same(floodLimited, 140*time.Millisecond, batch(1234))
	if text := words(newResult(sc, rows, time.Second)); !strings.Contains(text, "this run missed it") {
		t.Errorf("does not say that 1.40 misses the aim:\n%s", text)
	}
	rows[2].Chat = chatReport{Failed: 3, Error: "too bad"}
	if text := words(newResult(sc, rows, time.Second)); !strings.Contains(text, "flood, bulkheads - - - - 3 1500") || !strings.Contains(text, "chat calls that failed: 3, the first with: too bad") || strings.Contains(text, "times with them") {
		t.Errorf("a phase without answered calls:\n%s", text)
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
