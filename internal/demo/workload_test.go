package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// The provider works on so many calls at once and no more, and answers all.
func TestProviderQueues(t *testing.T) {
	const places, calls, work = 4, 24, 20 * time.Millisecond
	srv := httptest.NewServer(newProvider(places))
	defer srv.Close()
	begin := time.Now()
	var wg sync.WaitGroup
	for range calls {
		wg.Go(func() {
			if err := call(t.Context(), srv.Client(), srv.URL, work); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if took := time.Since(begin); took < calls/places*work {
		t.Errorf("%d calls of %v took %v: more than %d at once", calls, work, took, places)
	}
}

// A caller that gives up in the queue takes no place.
func TestProviderForgetsWhoLeft(t *testing.T) {
	h := newProvider(1)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(ctx, http.MethodPost, "/?work=1h", nil))
		})
	}
	cancel()
	wg.Wait()
	answer := httptest.NewRecorder()
	h.ServeHTTP(answer, httptest.NewRequest(http.MethodPost, "/?work=0s", nil))
	if answer.Body.String() != "done\n" {
		t.Errorf("answered %q", answer.Body)
	}
}

// freeAddr returns a loopback address that nobody listens at.
func freeAddr(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// A chat call that is refused has failed: it is counted, not tried again, and
// gives no latency.
func TestChatRefused(t *testing.T) {
	var out bytes.Buffer
	if err := chat(t.Context(), []string{"--url", "http://" + freeAddr(t), "--rate", "1000", "--calls", "7", "--work", "1ms"}, &out); err != nil {
		t.Fatal(err)
	}
	var r chatReport
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		t.Fatal(err)
	}
	if r.Failed != 7 || len(r.Latencies) != 0 || !strings.Contains(r.Error, "connection refused") {
		t.Errorf("%+v", r)
	}
}

// A slow answer does not put off the next call: with every answer held back
// until all calls have arrived, all calls arrive.
func TestChatDoesNotWait(t *testing.T) {
	const calls = 20
	var arrived sync.WaitGroup
	arrived.Add(calls)
	srv := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		arrived.Done()
		arrived.Wait()
	}))
	defer srv.Close()
	var out bytes.Buffer
	if err := chat(t.Context(), []string{"--url", srv.URL, "--rate", "500", "--calls", fmt.Sprint(calls)}, &out); err != nil {
		t.Fatal(err)
	}
	var r chatReport
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		t.Fatal(err)
	}
	// The first call was due 38 ms before the last one, so its latency shows
	// at least that.
	if len(r.Latencies) != calls || r.Latencies[calls-1] < 38*time.Millisecond {
		t.Errorf("%+v", r)
	}
}

// Batch outlives refusals and failures: it says that it floods while it is
// refused, and a job is over only when it is answered.
func TestBatchRetries(t *testing.T) {
	addr := freeAddr(t)
	in, mark := io.Pipe()
	reports, out := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := batch(t.Context(), []string{"--url", "http://" + addr, "--workers", "5", "--work", "1ms"}, in, out)
		out.CloseWithError(err)
		ended <- err
	}()
	dec := json.NewDecoder(reports)
	if err := dec.Decode(&struct{}{}); err != nil {
		t.Fatal(err)
	}
	io.WriteString(mark, measureMark+"\n")

	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	// The jobs from before the mark have no latency; the later ones do.
	const broken = 10
	var attempts, served atomic.Int64
	enough := make(chan struct{})
	provider := newProvider(5)
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if attempts.Add(1) <= broken {
			http.Error(w, "not now", http.StatusServiceUnavailable)
			return
		}
		provider.ServeHTTP(w, r)
		if served.Add(1) == 30 {
			close(enough)
		}
	})}
	defer srv.Close()
	go srv.Serve(l)
	<-enough
	mark.Close()
	var r batchReport
	if err := dec.Decode(&r); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if r.Done == 0 || len(r.Latencies) == 0 || int64(len(r.Latencies)) > served.Load() || r.Seconds <= 0 || r.Failed != broken {
		t.Errorf("%d were served; %+v", served.Load(), r)
	}
}

// What counts as a refusal, and when anything counts.
func TestAttempted(t *testing.T) {
	_, refused := net.Dial("tcp", freeAddr(t))
	if !errors.Is(refused, syscall.ECONNREFUSED) {
		t.Fatal(refused)
	}
	errs := []error{
		nil,
		refused,
		&net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.EPERM)},
		&net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ECONNRESET)},
	}
	var b flooder
	for _, err := range errs {
		b.attempted(err)
	}
	if b.report.Done+b.report.Refused+b.report.Failed != 0 {
		t.Errorf("counted before the mark: %+v", b.report)
	}
	b.measure(true)
	for _, err := range errs {
		b.attempted(err)
	}
	if b.report.Done != 1 || b.report.Refused != 2 || b.report.Failed != 1 || !strings.Contains(b.report.Error, "reset") {
		t.Errorf("%+v", b.report)
	}
}
