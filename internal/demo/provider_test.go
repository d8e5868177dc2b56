package demo

import (
	"context"
	"net/http"
	"net/http/httptest"
	"sync"
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
			if _, err := get(t.Context(), srv.Client(), srv.URL+"/?work="+work.String()); err != nil {
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
			h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(ctx, http.MethodGet, "/?work=1h", nil))
		})
	}
	cancel()
	wg.Wait()
	answer := httptest.NewRecorder()
	h.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/?work=0s", nil))
	if answer.Body.String() != "done\n" {
		t.Errorf("answered %q", answer.Body)
	}
}
