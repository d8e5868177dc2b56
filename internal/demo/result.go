package demo

import (
	"fmt"
	"time"
)

// near is how far from a known figure still counts as the same.
const near = 0.1

// refusedWithin is the aim for a refusal, from submission to completion.
const refusedWithin = 5 * time.Millisecond

// Result is what the demo found. Its fields are only ever added to. Those before
// Seconds are the flood's, as they were when it was the only experiment, and
// empty where it was not asked for; Experiments has it like the others.
type Result struct {
	// ServeAtOnce is the number of calls that the flood's provider works on at
	// one time.
	ServeAtOnce int `json:"serve_at_once"`
	// ChatCallsPerSecond is the rate at which chat's calls are due.
	ChatCallsPerSecond float64 `json:"chat_calls_per_second"`
	ChatWorkMS         float64 `json:"chat_work_ms"`
	BatchWorkers       int     `json:"batch_workers"`
	BatchWorkMS        float64 `json:"batch_work_ms"`
	// Policy is the policy of the flood with bulkheads.
	Policy string `json:"policy"`
	// Phases are the runs of the flood, empty if it was left out.
	Phases []PhaseResult `json:"phases"`
	// Seconds is how long the demo took, its clean-up included.
	Seconds float64 `json:"seconds"`
	// Programs are the ordinary programs that the workloads were, with versions.
	Programs []string `json:"programs"`
	// Experiments are all that were asked for, the flood too.
	Experiments []ExperimentResult `json:"experiments"`
}

// ExperimentResult is what one experiment found.
type ExperimentResult struct {
	Name  string `json:"name"`
	Title string `json:"title"`
	// Setup is what runs, Measured what the figures are of, Key the one that
	// the runs are compared by: p50, p95 or p99.
	Setup    string `json:"setup"`
	Measured string `json:"measured"`
	Key      string `json:"key"`
	// Policy is the policy of the runs with bulkheads.
	Policy string `json:"policy"`
	// Skipped is why it was not done, with the cure.
	Skipped string      `json:"skipped,omitempty"`
	Runs    []RunResult `json:"runs"`
	// Verdict says in words what the runs show, Remarks where they missed the
	// aim.
	Verdict string   `json:"verdict,omitempty"`
	Remarks []string `json:"remarks,omitempty"`
}

// RunResult is one row of the table.
type RunResult struct {
	// Run is alone, without or with (bulkheads).
	Run string `json:"run"`
	// Percentiles of the calls that were answered.
	Percentiles
	// Failed calls were broken off or answered with an error, Refused those
	// whose connect was refused, which is the other way not to be answered. Error
	// is how the first of them did.
	Failed  int    `json:"failed"`
	Refused int    `json:"refused"`
	Error   string `json:"error,omitempty"`
	// RefusedP95 and RefusedMax are of the time that refusals took.
	RefusedP95 float64 `json:"refused_p95_ms,omitempty"`
	RefusedMax float64 `json:"refused_max_ms,omitempty"`
	// Ratio is the key figure as a multiple of that of the run to compare with,
	// which has 1; 0 if one of them answered nothing.
	Ratio float64 `json:"ratio,omitempty"`
	// KnownMS is the key figure that others found for this experiment.
	KnownMS float64 `json:"known_ms,omitempty"`
	// WallMS is the time of the process that made all calls, as seen from
	// outside.
	WallMS float64 `json:"wall_ms,omitempty"`
	// Load is what ran beside the calls, by its own count.
	Load *BatchResult `json:"load,omitempty"`
}

// PhaseResult is one run of the flood.
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

// BatchResult is what a load counted.
type BatchResult struct {
	CallsPerSecond float64 `json:"calls_per_second"`
	// Jobs is nil if none was answered.
	Jobs    *Percentiles `json:"jobs"`
	Done    int          `json:"done"`
	Refused int          `json:"refused"`
	// Failed attempts were not refused but broken off, the first with Error.
	Failed int    `json:"failed"`
	Error  string `json:"error,omitempty"`
}

// Percentiles of Calls latencies, in milliseconds; 0 if there were none.
type Percentiles struct {
	Calls int     `json:"calls"`
	P50   float64 `json:"p50_ms,omitempty"`
	P90   float64 `json:"p90_ms,omitempty"`
	P95   float64 `json:"p95_ms,omitempty"`
	P99   float64 `json:"p99_ms,omitempty"`
}

// at returns one of them.
func (p Percentiles) at(f figure) float64 {
	switch f {
	case 50:
		return p.P50
	case 95:
		return p.P95
	}
	return p.P99
}

func (f figure) String() string { return fmt.Sprintf("p%d", int(f)) }

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
		P95:   ms(percentile(sorted, 95)),
		P99:   ms(percentile(sorted, 99)),
	}
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// rows are an experiment's runs; the zero value stands for one that is not there.
type rows struct{ alone, without, with RunResult }

// pick returns the rows by name.
func pick(runs []RunResult) (r rows) {
	for _, run := range runs {
		switch runName(run.Run) {
		case alone:
			r.alone = run
		case without:
			r.without = run
		case with:
			r.with = run
		}
	}
	return r
}

// newResult computes what is shown: of the experiments that were measured, and
// of those that were skipped, with why.
func newResult(sc scenario, measured []measurement, skipped map[string]string, took time.Duration) Result {
	r := Result{Phases: []PhaseResult{}, Seconds: took.Seconds(), Experiments: []ExperimentResult{}}
	var done []about
	for _, e := range sc.experiments() {
		a := e.about()
		var samples []measurement
		for _, m := range measured {
			if m.Experiment == a.name {
				samples = append(samples, m)
			}
		}
		if len(samples) == 0 && skipped[a.name] == "" {
			continue
		}
		er := ExperimentResult{Name: a.name, Title: a.title, Setup: a.setup, Measured: a.measured, Key: a.key.String(),
			Policy: a.policy, Skipped: skipped[a.name], Runs: newRuns(a, samples)}
		if len(er.Runs) > 0 {
			done = append(done, a)
		}
		if len(er.Runs) == len(a.runs) {
			er.Verdict = e.verdict(pick(er.Runs))
			er.Remarks = remarks(a, er.Runs)
		}
		r.Experiments = append(r.Experiments, er)
		if a.name == sc.Flood.about().name {
			r.ServeAtOnce, r.ChatCallsPerSecond, r.BatchWorkers = sc.Flood.ServeAtOnce, sc.Flood.ChatRate, sc.Flood.Workers
			r.ChatWorkMS, r.BatchWorkMS = ms(sc.Flood.ChatWork), ms(sc.Flood.BatchWork)
			r.Policy, r.Phases = a.policy, phases(er.Runs)
		}
	}
	r.Programs = sc.Tools.used(done)
	return r
}

// newRuns computes the rows of an experiment.
func newRuns(a about, samples []measurement) []RunResult {
	runs := []RunResult{}
	var base float64
	for _, m := range samples {
		s := m.Sample
		run := RunResult{Run: string(m.Run), Failed: s.Failed, Refused: len(s.Refused), Error: s.Error, WallMS: ms(s.Wall), Load: newLoad(s.Load)}
		if p := percentiles(s.Latencies); p != nil {
			run.Percentiles = *p
		}
		if len(s.Refused) > 0 {
			run.RefusedP95 = ms(percentile(s.Refused, 95))
			run.RefusedMax = ms(s.Refused[len(s.Refused)-1])
		}
		for _, info := range a.runs {
			if info.run == m.Run {
				run.KnownMS = info.known
				if info.base {
					base = run.at(a.key)
				}
			}
		}
		runs = append(runs, run)
	}
	for i := range runs {
		if base > 0 {
			runs[i].Ratio = runs[i].at(a.key) / base
		}
	}
	return runs
}

func newLoad(l *loadReport) *BatchResult {
	if l == nil {
		return nil
	}
	b := &BatchResult{Jobs: percentiles(l.Latencies), Done: l.Done, Refused: l.Refused, Failed: l.Failed, Error: l.Error}
	if l.Seconds > 0 {
		b.CallsPerSecond = float64(l.Done) / l.Seconds
	}
	return b
}

// phases are the flood's rows under the names that they have had from the
// beginning.
func phases(runs []RunResult) []PhaseResult {
	all := []PhaseResult{}
	for _, run := range runs {
		p := PhaseResult{ChatFailed: run.Failed + run.Refused, ChatError: run.Error, Slowdown: run.Ratio, Batch: run.Load}
		switch runName(run.Run) {
		case alone:
			p.Phase = "chat alone"
		case without:
			p.Phase = "flood, no bulkheads"
		case with:
			p.Phase = "flood, bulkheads"
		}
		if run.Calls > 0 {
			p.Chat = &run.Percentiles
		}
		all = append(all, p)
	}
	return all
}

// remarks say where the runs missed the aim.
func remarks(a about, runs []RunResult) []string {
	var all []string
	base := pick(runs).alone.at(a.key)
	add := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
	for _, run := range runs {
		key := run.at(a.key)
		for _, aim := range a.aims {
			switch {
			case aim.run != runName(run.Run) || run.Ratio == 0:
			case aim.atLeast > 0 && run.Ratio < aim.atLeast:
				add("%s bulkheads %s is %.2f times as long; the aim is at least %g times: this run missed it", run.Run, a.key, run.Ratio, aim.atLeast)
			case aim.atMost > 0 && run.Ratio > aim.atMost:
				add("%s bulkheads %s is %.2f times as long; the aim is at most %g times: this run missed it", run.Run, a.key, run.Ratio, aim.atMost)
			}
		}
		if k := run.KnownMS; k > 0 && run.Calls > 0 {
			// With bulkheads better than known is no miss, nor is what the machine
			// needs for the same calls alone.
			tooLong := key > k*(1+near) && (runName(run.Run) != with || base == 0 || key > base*(1+near))
			if tooLong || key < k*(1-near) && runName(run.Run) != with {
				add("%s bulkheads %s is %s ms; known are %s ms", run.Run, a.key, figures(key), figures(k))
			}
		}
		if runName(run.Run) == without {
			continue
		}
		if run.Failed > 0 || run.Refused > 0 && !a.refuses {
			add("%s: %d of the measured calls were not answered, the first: %s", run.Run, run.Failed+run.Refused, run.Error)
		}
		if a.refuses && runName(run.Run) == with && run.RefusedMax > ms(refusedWithin) {
			add("the slowest refusal took %s ms; the aim is under %g ms", figures(run.RefusedMax), ms(refusedWithin))
		}
	}
	return all
}
