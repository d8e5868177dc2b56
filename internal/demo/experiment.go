package demo

import (
	"slices"
	"strings"
	"time"
)

// experiment is one thing that the demo shows. Its values are how much of
// everything; they go to the supervisor as JSON.
type experiment interface {
	// about describes the experiment.
	about() about
	// run does one of its runs. Everything that it starts through the stage is
	// ended when it has returned.
	run(*stage) (sample, error)
	// verdict says in a sentence what the rows show; every row is there and its
	// key figure too, unless all of its calls failed.
	verdict(rows) string
}

// about is what there is to say of an experiment before it is run.
type about struct {
	name  string
	title string
	// setup is what runs, for the reader of the table.
	setup string
	// measured is what the figures are of.
	measured string
	// key is the figure that the runs are compared by.
	key figure
	// policy is in force in the runs with bulkheads.
	policy string
	runs   []runInfo
	needs  []tool
	// likes are tools that are used where they are.
	likes []tool
	// cpu: it needs the cpu controller on cgroup v2.
	cpu bool
	// refuses: in the run with bulkheads refusals are what is to be shown.
	refuses bool
	// aims are the limits of the ratio of two runs' key figures.
	aims []aim
}

// runInfo is one run of an experiment.
type runInfo struct {
	run runName
	// takes is how long it is measured.
	takes time.Duration
	// base: the other runs' key figures are given as multiples of this one's.
	base bool
	// known is the key figure that is known of this experiment, in
	// milliseconds; 0 if there is none.
	known float64
}

// runName says what is different about a run.
type runName string

const (
	alone   runName = "alone"
	without runName = "without"
	with    runName = "with"
)

// figure is a percentile.
type figure int

// aim is a limit on a run's ratio; 0 is none.
type aim struct {
	run             runName
	atLeast, atMost float64
}

// asAlone is the aim of the experiments whose known figures are times of
// calls that wait for nothing: what the machine needs for those is in them,
// so they are held against the same calls alone on this machine.
var asAlone = []aim{{run: with, atMost: 1 + near}}

// sample is what one run measured.
type sample struct {
	// Latencies of the calls that were answered, sorted, from submission to
	// completion.
	Latencies []time.Duration `json:"latencies"`
	// Refused are the latencies of the calls whose connect was refused, sorted.
	Refused []time.Duration `json:"refused,omitempty"`
	// Failed calls were broken off or answered with an error. Error is how the
	// first of them did, or of the refused if none did.
	Failed int    `json:"failed"`
	Error  string `json:"error,omitempty"`
	// Load is what ran beside the calls, if that counts.
	Load *loadReport `json:"load,omitempty"`
	// Wall is the time of the process that made the calls, where it is one for
	// all of them.
	Wall time.Duration `json:"wall,omitempty"`
}

// loadReport is what a load counted of itself while the calls were measured.
type loadReport struct {
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

// measurement is the sample of one run.
type measurement struct {
	Experiment string  `json:"experiment"`
	Run        runName `json:"run"`
	Sample     sample  `json:"sample"`
}

// scenario is how much of everything: what the supervisor is told.
type scenario struct {
	Flood    flood    `json:"flood"`
	Slow     slow     `json:"slow"`
	Tenants  tenants  `json:"tenants"`
	Bounded  bounded  `json:"bounded"`
	CPU      cpu      `json:"cpu"`
	Database database `json:"database"`
	// Runs are done in this order.
	Runs []step `json:"runs"`
	// Keep leaves the flood with bulkheads running at the end.
	Keep  bool  `json:"keep"`
	Tools tools `json:"tools"`
}

// step is one run of one experiment.
type step struct {
	Experiment string  `json:"experiment"`
	Run        runName `json:"run"`
}

// experiments are all, in the order in which they are shown.
func (sc scenario) experiments() []experiment {
	return []experiment{sc.Flood, sc.Slow, sc.Tenants, sc.Bounded, sc.CPU, sc.Database}
}

// find returns the experiment with a name, or nil.
func (sc scenario) find(name string) experiment {
	for _, e := range sc.experiments() {
		if e.about().name == name {
			return e
		}
	}
	return nil
}

// info returns what is said of a step.
func (sc scenario) info(s step) runInfo {
	for _, r := range sc.find(s.Experiment).about().runs {
		if r.run == s.Run {
			return r
		}
	}
	return runInfo{run: s.Run}
}

// steps are all runs of the experiments with these names.
func (sc scenario) steps(names []string) []step {
	var all []step
	for _, e := range sc.experiments() {
		if a := e.about(); slices.Contains(names, a.name) {
			for _, r := range a.runs {
				all = append(all, step{a.name, r.run})
			}
		}
	}
	return all
}

// Experiments returns the names of the experiments, in the order in which they
// are shown.
func Experiments() []string {
	var names []string
	for _, e := range theScenario().experiments() {
		names = append(names, e.about().name)
	}
	return names
}

// theScenario is the demo's own sizes, without runs.
func theScenario() scenario {
	return scenario{
		Flood:    theFlood(),
		Slow:     theSlow(),
		Tenants:  theTenants(),
		Bounded:  theBounded(),
		CPU:      theCPU(),
		Database: theDatabase(),
	}
}

// policyHead begins the policy of every experiment.
const policyHead = "apiVersion: bulkhead/v1\nkind: Policy\nmode: enforce\n"

// loopback is where everything is, in the demo's own network namespace.
const loopback = "127.0.0.1"

// webURL is where the measured web application listens.
const (
	webPort = "8080"
	webURL  = "http://" + loopback + ":" + webPort
)

// gather turns the outcomes of one series into a sample.
func gather(outcomes []outcome, series string) sample {
	s := sample{Latencies: []time.Duration{}}
	var refusal string
	for _, o := range outcomes {
		switch {
		case o.Series != series:
		case o.Error == "":
			s.Latencies = append(s.Latencies, o.Took)
		case o.Refused:
			s.Refused = append(s.Refused, o.Took)
			if refusal == "" {
				refusal = o.Error
			}
		default:
			if s.Failed++; s.Failed == 1 {
				s.Error = o.Error
			}
		}
	}
	if s.Error == "" {
		s.Error = refusal
	}
	s.Error = strings.TrimSpace(s.Error)
	slices.Sort(s.Latencies)
	slices.Sort(s.Refused)
	return s
}
