package demo

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"
)

// The hidden commands.
const (
	supervisorCommand = "demo-supervisor"
	providerCommand   = "demo-provider"
	chatCommand       = "demo-chat"
	batchCommand      = "demo-batch"
)

// ChildCommands returns the names of the hidden commands that Run starts the
// binary with. Each takes flags of its own and is run by Child.
func ChildCommands() []string {
	return []string{supervisorCommand, providerCommand, chatCommand, batchCommand}
}

// Child runs the hidden command name with its arguments.
func Child(ctx context.Context, name string, args []string) error {
	switch name {
	case supervisorCommand:
		return supervise(ctx, args, os.Stdout)
	case providerCommand:
		return provide(ctx, args, os.Stdout)
	case chatCommand:
		return chat(ctx, args, os.Stdout)
	case batchCommand:
		return batch(ctx, args, os.Stdin, os.Stdout)
	}
	return fmt.Errorf("no such command of the demo: %q", name)
}

// callTimeout is the time limit of one attempt of both clients.
const callTimeout = 30 * time.Second

// provide serves calls, so many at once, in order of arrival. A call
// takes as long as its query says (?work=100ms), plus its time in the queue.
// It writes {} to out when it listens.
func provide(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet(providerCommand, flag.ContinueOnError)
	listen := flags.String("listen", providerAddr, "address")
	serveAtOnce := flags.Int("serve-at-once", 20, "calls worked on at one time")
	if err := flags.Parse(args); err != nil {
		return err
	}
	l, err := net.Listen("tcp", *listen)
	if err != nil {
		return err
	}
	srv := &http.Server{Handler: newProvider(*serveAtOnce), BaseContext: func(net.Listener) context.Context { return ctx }}
	if _, err := io.WriteString(out, "{}\n"); err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { srv.Close() })()
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// newProvider returns the provider's handler.
func newProvider(serveAtOnce int) http.Handler {
	// Senders that wait on a full channel are served first come, first served.
	places := make(chan struct{}, serveAtOnce)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		work, err := time.ParseDuration(r.URL.Query().Get("work"))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		select {
		case places <- struct{}{}:
			defer func() { <-places }()
		case <-r.Context().Done():
			return
		}
		select {
		case <-time.After(work):
			io.WriteString(w, "done\n")
		case <-r.Context().Done():
		}
	})
}

// call makes one call with an ordinary client and reads the answer.
func call(ctx context.Context, client *http.Client, base string, work time.Duration) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+"/?work="+url.QueryEscape(work.String()), nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("the provider answered %s", resp.Status)
	}
	return nil
}

// spread returns the provider's time for the i-th call: mean, give or take a
// fifth, spread evenly (the golden ratio's multiples fill an interval evenly
// however many are taken) and the same in every run.
func spread(mean time.Duration, i int) time.Duration {
	_, frac := math.Modf(float64(i) / math.Phi)
	return time.Duration(float64(mean) * (0.8 + 0.4*frac))
}

// chatReport is what chat measured.
type chatReport struct {
	// Latencies of the calls that were answered, sorted, from when each was due.
	Latencies []time.Duration `json:"latencies"`
	// Failed calls: refused, or broken off. Error is how the first of them did.
	Failed int    `json:"failed"`
	Error  string `json:"error,omitempty"`
}

// chat makes calls that are due at a fixed rate, however long the earlier
// ones take, does not try a call twice, and writes a chatReport.
func chat(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet(chatCommand, flag.ContinueOnError)
	base := flags.String("url", "", "the provider")
	rate := flags.Float64("rate", 0, "calls per second")
	calls := flags.Int("calls", 0, "calls in all")
	work := flags.Duration("work", 0, "the provider's mean time for a call")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *rate <= 0 {
		return errors.New("--rate must be above 0")
	}
	var (
		client = &http.Client{Timeout: callTimeout}
		report = chatReport{Latencies: []time.Duration{}}
		mu     sync.Mutex
		wg     sync.WaitGroup
		begin  = time.Now()
	)
	for i := range *calls {
		due := begin.Add(time.Duration(float64(i) / *rate * float64(time.Second)))
		select {
		case <-time.After(time.Until(due)):
		case <-ctx.Done():
			return ctx.Err()
		}
		wg.Go(func() {
			err := call(ctx, client, *base, spread(*work, i))
			took := time.Since(due)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				if report.Failed++; report.Failed == 1 {
					report.Error = err.Error()
				}
				return
			}
			report.Latencies = append(report.Latencies, took)
		})
	}
	wg.Wait()
	slices.Sort(report.Latencies)
	return json.NewEncoder(out).Encode(report)
}

// batchReport is what batch measured, from the mark to the end of its input.
type batchReport struct {
	Seconds float64 `json:"seconds"`
	// Done are the jobs that were answered, Refused the connects that were
	// refused, Failed the attempts that failed in another way, in that time.
	// Error is how the first of the Failed did.
	Done    int    `json:"done"`
	Refused int    `json:"refused"`
	Failed  int    `json:"failed"`
	Error   string `json:"error,omitempty"`
	// Latencies of all jobs that were begun in that time, sorted: from the
	// first attempt to the answer, however much later.
	Latencies []time.Duration `json:"latencies"`
}

// measureMark is the line of input that makes batch begin to measure.
const measureMark = "measure"

// An ordinary client's wait after a refusal: doubled each time up to a cap, and
// half of it random so that the workers spread out.
const (
	firstBackoff = 50 * time.Millisecond
	lastBackoff  = 400 * time.Millisecond
)

// batch keeps workers busy with one job after another. It writes {} to out
// when every worker has had an answer or a refusal, measures from the line
// measureMark of in to its end, finishes what it is at and writes a batchReport.
func batch(ctx context.Context, args []string, in io.Reader, out io.Writer) error {
	flags := flag.NewFlagSet(batchCommand, flag.ContinueOnError)
	base := flags.String("url", "", "the provider")
	workers := flags.Int("workers", 0, "jobs tried at one time")
	work := flags.Duration("work", 0, "the provider's mean time for a call")
	if err := flags.Parse(args); err != nil {
		return err
	}
	b := &flooder{
		client: &http.Client{Timeout: callTimeout},
		base:   *base,
		work:   *work,
		stop:   make(chan struct{}),
		report: batchReport{Latencies: []time.Duration{}},
	}
	var all, begun sync.WaitGroup
	begun.Add(*workers)
	for range *workers {
		all.Go(func() { b.worker(ctx, sync.OnceFunc(begun.Done)) })
	}
	begun.Wait()
	if _, err := io.WriteString(out, "{}\n"); err != nil {
		return err
	}
	for lines := bufio.NewScanner(in); lines.Scan(); {
		if lines.Text() == measureMark {
			b.measure(true)
		}
	}
	b.measure(false)
	close(b.stop)
	all.Wait()
	slices.Sort(b.report.Latencies)
	return json.NewEncoder(out).Encode(b.report)
}

// flooder is the state that batch's workers share.
type flooder struct {
	client *http.Client
	base   string
	work   time.Duration
	stop   chan struct{} // closed: begin no more jobs

	mu        sync.Mutex
	measuring bool
	since     time.Time
	jobs      int
	report    batchReport
}

// measure begins or ends the measured time.
func (b *flooder) measure(on bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if on {
		b.since = time.Now()
	} else if b.measuring {
		b.report.Seconds = time.Since(b.since).Seconds()
	}
	b.measuring = on
}

// worker does one job after another. It calls first when it has had an answer
// or an error.
func (b *flooder) worker(ctx context.Context, first func()) {
	defer first()
	for ctx.Err() == nil {
		select {
		case <-b.stop:
			return
		default:
		}
		b.mu.Lock()
		counts, work := b.measuring, spread(b.work, b.jobs)
		b.jobs++
		b.mu.Unlock()

		begin := time.Now()
		for backoff := firstBackoff; ; backoff = min(2*backoff, lastBackoff) {
			err := call(ctx, b.client, b.base, work)
			if ctx.Err() != nil {
				return
			}
			b.attempted(err)
			first()
			if err == nil {
				break
			}
			select {
			case <-time.After(backoff/2 + rand.N(backoff/2)):
			case <-ctx.Done():
				return
			}
		}
		if counts {
			b.mu.Lock()
			b.report.Latencies = append(b.report.Latencies, time.Since(begin))
			b.mu.Unlock()
		}
	}
}

// attempted counts one attempt.
func (b *flooder) attempted(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case !b.measuring:
	case err == nil:
		b.report.Done++
	// EPERM is what a refusal looks like before Linux 5.18.
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.EPERM):
		b.report.Refused++
	default:
		if b.report.Failed++; b.report.Failed == 1 {
			b.report.Error = err.Error()
		}
	}
}
