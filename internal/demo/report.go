package demo

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// The aim: chat's p99 with the flood, as a multiple of chat's p99 alone.
const (
	aimWith    = 1.3 // at most, with bulkheads
	aimWithout = 5.0 // at least, without
)

// measurement is what the workloads of one phase measured.
type measurement struct {
	Phase phase        `json:"phase"`
	Chat  chatReport   `json:"chat"`
	Batch *batchReport `json:"batch,omitempty"` // nil: no batch in this phase
}

// Result is what the demo found. Its fields are only ever added to.
type Result struct {
	// ServeAtOnce is the number of calls that the provider works on at one time.
	ServeAtOnce int `json:"serve_at_once"`
	// ChatCallsPerSecond is the rate at which chat's calls are due.
	ChatCallsPerSecond float64 `json:"chat_calls_per_second"`
	ChatWorkMS         float64 `json:"chat_work_ms"`
	BatchWorkers       int     `json:"batch_workers"`
	BatchWorkMS        float64 `json:"batch_work_ms"`
	// Policy is the policy of the phase with bulkheads.
	Policy string        `json:"policy"`
	Phases []PhaseResult `json:"phases"`
	// Seconds is how long the demo took, its clean-up included.
	Seconds float64 `json:"seconds"`
}

// PhaseResult is one row of the table.
type PhaseResult struct {
	Phase string `json:"phase"`
	// Chat is nil if no call was answered.
	Chat *Percentiles `json:"chat"`
	// ChatFailed calls were refused or broken off, the first with ChatError.
	ChatFailed int    `json:"chat_failed"`
	ChatError  string `json:"chat_error,omitempty"`
	// Slowdown is chat's p99 divided by that of chat alone; 0 if there is none.
	Slowdown float64 `json:"slowdown,omitempty"`
	// Batch is nil where no batch ran.
	Batch *BatchResult `json:"batch,omitempty"`
}

// BatchResult is batch's part of a row.
type BatchResult struct {
	CallsPerSecond float64 `json:"calls_per_second"`
	// Jobs is nil if none was answered.
	Jobs    *Percentiles `json:"jobs"`
	Refused int          `json:"refused"`
	// Failed attempts were not refused but broken off, the first with Error.
	Failed int    `json:"failed"`
	Error  string `json:"error,omitempty"`
}

// Percentiles of Calls latencies, in milliseconds.
type Percentiles struct {
	Calls int     `json:"calls"`
	P50   float64 `json:"p50_ms"`
	P90   float64 `json:"p90_ms"`
	P99   float64 `json:"p99_ms"`
}

// percentile returns the smallest of sorted that at least p in 100 of them do
// not exceed (the nearest rank), so it is always one that was measured. sorted
// must not be empty; p is 1 to 100.
func percentile(sorted []time.Duration, p int) time.Duration {
	rank := (p*len(sorted) + 99) / 100
	return sorted[rank-1]
}

// percentiles returns nil for no latencies.
func percentiles(sorted []time.Duration) *Percentiles {
	if len(sorted) == 0 {
		return nil
	}
	return &Percentiles{
		Calls: len(sorted),
		P50:   ms(percentile(sorted, 50)),
		P90:   ms(percentile(sorted, 90)),
		P99:   ms(percentile(sorted, 99)),
	}
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// newResult computes the table.
func newResult(sc scenario, rows []measurement, took time.Duration) Result {
	r := Result{
		ServeAtOnce:        sc.ServeAtOnce,
		ChatCallsPerSecond: sc.ChatRate,
		ChatWorkMS:         ms(sc.ChatWork),
		BatchWorkers:       sc.Workers,
		BatchWorkMS:        ms(sc.BatchWork),
		Policy:             sc.policyText(),
		Seconds:            took.Seconds(),
	}
	for _, m := range rows {
		p := PhaseResult{Phase: string(m.Phase), Chat: percentiles(m.Chat.Latencies), ChatFailed: m.Chat.Failed, ChatError: m.Chat.Error}
		if m.Batch != nil {
			p.Batch = &BatchResult{Jobs: percentiles(m.Batch.Latencies), Refused: m.Batch.Refused, Failed: m.Batch.Failed, Error: m.Batch.Error}
			if m.Batch.Seconds > 0 {
				p.Batch.CallsPerSecond = float64(m.Batch.Done) / m.Batch.Seconds
			}
		}
		r.Phases = append(r.Phases, p)
	}
	if alone := r.phase(chatAlone); alone != nil && alone.Chat != nil {
		for i, p := range r.Phases {
			if p.Chat != nil {
				r.Phases[i].Slowdown = p.Chat.P99 / alone.Chat.P99
			}
		}
	}
	return r
}

// phase returns the row of a phase, or nil.
func (r Result) phase(name phase) *PhaseResult {
	for i := range r.Phases {
		if r.Phases[i].Phase == string(name) {
			return &r.Phases[i]
		}
	}
	return nil
}

// Text returns the result for people.
func (r Result) Text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "One provider that works on %d calls at once and queues the rest. Chat calls it %g times a second\n"+
		"for about %g ms; batch has %d workers that each make one call of about %g ms after another.\n\n",
		r.ServeAtOnce, r.ChatCallsPerSecond, r.ChatWorkMS, r.BatchWorkers, r.BatchWorkMS)
	if r.phase(floodLimited) != nil {
		fmt.Fprintf(&b, "The policy of %q:\n\n%s\n", floodLimited, indent(r.Policy, "  "))
	}
	b.WriteString(r.table())
	b.WriteString("\n")
	for _, p := range r.Phases {
		if p.ChatFailed > 0 {
			fmt.Fprintf(&b, "%s: chat calls that failed: %d, the first with: %s\n", p.Phase, p.ChatFailed, p.ChatError)
		}
		if p.Batch != nil && p.Batch.Failed > 0 {
			fmt.Fprintf(&b, "%s: batch attempts that failed without being refused: %d, the first with: %s\n", p.Phase, p.Batch.Failed, p.Batch.Error)
		}
	}
	b.WriteString(r.verdict())
	fmt.Fprintf(&b, "Took %.0f s; everything it made on this node is removed.\n", r.Seconds)
	b.WriteString("Next: write a policy of your own, try it with `bulkhead check FILE`, and read README.md.\n")
	return b.String()
}

func (r Result) table() string {
	const row = "%-20s %6s %6s %6s %8s %7s   %6s %6s %8s %8s\n"
	var b strings.Builder
	fmt.Fprintf(&b, "%-20s    %-36s    %s\n", "", "chat calls, ms", "batch jobs, ms")
	fmt.Fprintf(&b, row, "", "p50", "p90", "p99", "x alone", "failed", "p50", "p99", "calls/s", "refused")
	for _, p := range r.Phases {
		cells := []any{p.Phase, "-", "-", "-", "-", fmt.Sprint(p.ChatFailed), "-", "-", "-", "-"}
		if c := p.Chat; c != nil {
			cells[1], cells[2], cells[3] = whole(c.P50), whole(c.P90), whole(c.P99)
		}
		if p.Slowdown > 0 {
			cells[4] = fmt.Sprintf("%.2f", p.Slowdown)
		}
		if t := p.Batch; t != nil {
			if t.Jobs != nil {
				cells[6], cells[7] = whole(t.Jobs.P50), whole(t.Jobs.P99)
			}
			cells[8], cells[9] = fmt.Sprintf("%.1f", t.CallsPerSecond), fmt.Sprint(t.Refused)
		}
		fmt.Fprintf(&b, row, cells...)
	}
	return b.String()
}

// verdict says in words what the rows show, and whether that is the aim.
func (r Result) verdict() string {
	without, with := r.phase(flood), r.phase(floodLimited)
	if without == nil || with == nil || without.Slowdown == 0 || with.Slowdown == 0 || without.Batch == nil || with.Batch == nil {
		return ""
	}
	var b strings.Builder
	fmt.Fprintf(&b, "Under the flood chat's p99 was %.1f times that of chat alone without bulkheads, and %.2f times with them.\n",
		without.Slowdown, with.Slowdown)
	fmt.Fprintf(&b, "Batch did %.1f calls/s in place of %.1f: %d of its connects were refused at once, and tried again later.\n",
		with.Batch.CallsPerSecond, without.Batch.CallsPerSecond, with.Batch.Refused)
	if without.Slowdown < aimWithout || with.Slowdown > aimWith {
		fmt.Fprintf(&b, "The aim is at least %g times without and at most %g times with: this run missed it. Try it on an idle node.\n",
			aimWithout, aimWith)
	}
	return b.String()
}

func whole(v float64) string { return fmt.Sprintf("%.0f", v) }

func indent(text, by string) string {
	return by + strings.ReplaceAll(strings.TrimSuffix(text, "\n"), "\n", "\n"+by) + "\n"
}

// progress shows which phase runs: one line that is rewritten on a terminal,
// else a line for each phase.
type progress struct {
	w       io.Writer
	sc      scenario
	updates chan progressUpdate
	ended   chan struct{}
}

type progressUpdate struct {
	phase     phase
	measuring bool
}

func newProgress(w io.Writer, sc scenario) *progress {
	p := &progress{w: w, sc: sc, updates: make(chan progressUpdate), ended: make(chan struct{})}
	go p.show(isTerminal(w))
	return p
}

// phase says that a phase, or the measured part of it, begins.
func (p *progress) phase(name phase, measuring bool) { p.updates <- progressUpdate{name, measuring} }

// end removes the line.
func (p *progress) end() {
	close(p.updates)
	<-p.ended
}

func (p *progress) show(rewrite bool) {
	defer close(p.ended)
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	var (
		now   progressUpdate
		since time.Time
		nth   int
	)
	// Errors are nothing to stop for: nobody watches.
	for {
		select {
		case u, ok := <-p.updates:
			if !ok {
				if rewrite {
					fmt.Fprint(p.w, "\r\x1b[K")
				}
				return
			}
			if u.phase != now.phase {
				nth++
				if !rewrite {
					fmt.Fprintf(p.w, "[%d/%d] %s, %g s\n", nth, len(p.sc.Phases), u.phase, p.sc.Seconds)
				}
			}
			now, since = u, time.Now()
		case <-tick.C:
		}
		if !rewrite || now.phase == "" {
			continue
		}
		state := "starting"
		if now.measuring {
			state = fmt.Sprintf("%.0f of %g s", min(time.Since(since).Seconds(), p.sc.Seconds), p.sc.Seconds)
		}
		fmt.Fprintf(p.w, "\r\x1b[K[%d/%d] %s: %s", nth, len(p.sc.Phases), now.phase, state)
	}
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
