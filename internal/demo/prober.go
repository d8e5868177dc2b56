package demo

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"
)

// callTimeout is the time limit of one call.
const callTimeout = 30 * time.Second

// call is one request that is to be made.
type call struct {
	// Due is when, from the beginning, however long the earlier ones take.
	Due time.Duration `json:"due"`
	URL string        `json:"url"`
	// Series names the calls that are counted together.
	Series string `json:"series"`
}

// outcome is what became of a call.
type outcome struct {
	Series string `json:"series"`
	// Took is the time from when the call was due to when its answer was read.
	Took time.Duration `json:"took"`
	// Error is "" for a call that was answered. Refused: what the application
	// called refused the connect.
	Error   string `json:"error,omitempty"`
	Refused bool   `json:"refused,omitempty"`
}

// probe makes the calls that it reads from in, a JSON array in order of time,
// each once, and writes what became of them to out, in the same order.
func probe(ctx context.Context, in io.Reader, out io.Writer) error {
	var calls []call
	if err := json.NewDecoder(in).Decode(&calls); err != nil {
		return fmt.Errorf("read the calls to make: %w", err)
	}
	var (
		outcomes = make([]outcome, len(calls))
		client   = newClient()
		wg       sync.WaitGroup
		begin    = time.Now()
	)
	for i, c := range calls {
		due := begin.Add(c.Due)
		select {
		case <-time.After(time.Until(due)):
		case <-ctx.Done():
			return ctx.Err()
		}
		wg.Go(func() {
			refused, err := get(ctx, client, c.URL)
			o := outcome{Series: c.Series, Took: time.Since(due), Refused: refused}
			if err != nil {
				o.Error = err.Error()
			}
			outcomes[i] = o
		})
	}
	wg.Wait()
	return json.NewEncoder(out).Encode(outcomes)
}

// newClient returns a client that opens a connection for each call.
func newClient() *http.Client {
	return &http.Client{Timeout: callTimeout, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       (&net.Dialer{Timeout: callTimeout}).DialContext,
	}}
}

// get makes one call and reads the answer. refused says that the application
// answered and what it called had refused the connect.
func get(ctx context.Context, client *http.Client, url string) (refused bool, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return false, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return false, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return false, err
	}
	if resp.StatusCode != http.StatusOK {
		return resp.StatusCode == http.StatusServiceUnavailable,
			fmt.Errorf("the application answered %s: %s", resp.Status, strings.TrimSpace(string(body)))
	}
	return false, nil
}

// spread returns the provider's time for the i-th call: mean, give or take a
// fifth, spread evenly (the golden ratio's multiples fill an interval evenly
// however many are taken) and the same in every run.
func spread(mean time.Duration, i int) time.Duration {
	_, frac := math.Modf(float64(i) / math.Phi)
	return time.Duration(float64(mean) * (0.8 + 0.4*frac))
}

// steady returns calls at a rate, in calls per second, for so long.
func steady(series string, rate float64, last time.Duration, url func(i int) string) []call {
	calls := make([]call, int(rate*last.Seconds()))
	for i := range calls {
		calls[i] = call{Due: time.Duration(float64(i) / rate * float64(time.Second)), URL: url(i), Series: series}
	}
	return calls
}

// warmFor is the time of warmUp's calls.
const warmFor = 500 * time.Millisecond

// warmUp returns calls that nobody counts: what a program does for the first
// time takes longer.
func warmUp(url string) []call {
	return steady("warm-up", 10, warmFor, func(int) string { return url })
}
