package demo

import (
	"bytes"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
)

// probed makes calls and returns what became of them.
func probed(t *testing.T, calls []call) []outcome {
	t.Helper()
	in, err := json.Marshal(calls)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := probe(t.Context(), bytes.NewReader(in), &out); err != nil {
		t.Fatal(err)
	}
	var outcomes []outcome
	if err := json.Unmarshal(out.Bytes(), &outcomes); err != nil {
		t.Fatal(err)
	}
	if len(outcomes) != len(calls) {
		t.Fatalf("%d outcomes of %d calls", len(outcomes), len(calls))
	}
	return outcomes
}

// A slow answer does not put off the next call: with every answer held back
// until all calls have arrived, all calls arrive.
func TestProberDoesNotWait(t *testing.T) {
	const calls = 20
	var arrived sync.WaitGroup
	arrived.Add(calls)
	srv := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		arrived.Done()
		arrived.Wait()
	}))
	defer srv.Close()
	outcomes := probed(t, steady("x", 500, calls*2*time.Millisecond, func(int) string { return srv.URL }))
	// The first call was due 38 ms before the last one, so its latency shows
	// at least that.
	if s := gather(outcomes, "x"); len(s.Latencies) != calls || s.Latencies[calls-1] < 38*time.Millisecond {
		t.Errorf("%+v", s)
	}
}

// A call is made once, and is answered, refused further on, or failed.
func TestProberTellsApart(t *testing.T) {
	var mu sync.Mutex
	seen := map[string]int{}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		seen[r.URL.Path]++
		mu.Unlock()
		switch r.URL.Path {
		case "/refused":
			http.Error(w, "full", http.StatusServiceUnavailable)
		case "/broken":
			http.Error(w, "bad luck", http.StatusBadGateway)
		case "/cut":
			panic(http.ErrAbortHandler)
		}
	}))
	defer srv.Close()
	o := probed(t, []call{{URL: srv.URL + "/fine"}, {URL: srv.URL + "/refused"}, {URL: srv.URL + "/broken"}, {URL: srv.URL + "/cut"}, {URL: "http://" + freeAddr(t)}})
	if o[0].Error != "" || o[0].Refused {
		t.Errorf("answered: %+v", o[0])
	}
	if !o[1].Refused || !strings.HasSuffix(o[1].Error, ": full") {
		t.Errorf("refused: %+v", o[1])
	}
	for _, i := range []int{2, 3, 4} {
		if o[i].Refused || o[i].Error == "" {
			t.Errorf("failed: %+v", o[i])
		}
	}
	if seen["/refused"] != 1 || seen["/broken"] != 1 {
		t.Errorf("calls: %v", seen)
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

// freeAddr returns a loopback address that nobody listens at.
func freeAddr(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", loopback+":0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}
