package demo

import (
	"bufio"
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// bounded is more calls at one time than a service has places, made by curl.
type bounded struct {
	ServeAtOnce int           `json:"serve_at_once"`
	Work        time.Duration `json:"work"`  // the service's time for a call
	Calls       int           `json:"calls"` // at once
}

func theBounded() bounded {
	return bounded{ServeAtOnce: 8, Work: 100 * time.Millisecond, Calls: 200}
}

const (
	boundedPort = "8004"
	boundedURL  = "http://" + loopback + ":" + boundedPort
	// nobodysURL is where no one listens: a refusal that has nothing to do with
	// bulkheads.
	nobodysURL = "http://" + loopback + ":8005"
)

func (e bounded) about() about {
	queue := time.Duration(1+(e.Calls-1)/e.ServeAtOnce) * e.Work
	return about{
		name:  "bounded",
		title: "refusing at once instead of queueing without end",
		setup: fmt.Sprintf("a service of %d places, calls of %d ms, and curl with %d of them at once",
			e.ServeAtOnce, e.Work.Milliseconds(), e.Calls),
		measured: "calls by curl",
		key:      95,
		policy: fmt.Sprintf(policyHead+`providers:
  service: {cidrs: [%s/32], ports: [%s], limits: {connections: %d}}
features:
  burst: {class: timely}
`, loopback, boundedPort, e.ServeAtOnce),
		runs:    []runInfo{{run: alone, takes: e.Work, base: true}, {run: without, takes: queue, known: 2400}, {run: with, takes: e.Work, known: 100}},
		needs:   []tool{curl},
		refuses: true,
		aims:    asAlone,
	}
}

func (e bounded) run(g *stage) (sample, error) {
	if err := g.provider(boundedPort, e.ServeAtOnce); err != nil {
		return sample{}, err
	}
	if err := g.measuring(); err != nil {
		return sample{}, err
	}
	argv := append([]string{g.scenario.Tools.Curl, "--silent", "--parallel", "--parallel-immediate", "--parallel-max", fmt.Sprint(e.Calls),
		"--write-out", curlFormat}, e.calls(g.step.Run)...)
	out, wall, err := g.whole("curl", role{feature: "burst"}, argv)
	if err != nil {
		return sample{}, err
	}
	s, err := curlSample(out)
	if err == nil && len(s.Latencies)+len(s.Refused)+s.Failed != e.Calls {
		err = fmt.Errorf("curl told of %d calls, want %d", len(s.Latencies)+len(s.Refused)+s.Failed, e.Calls)
	}
	s.Wall = wall
	return s, err
}

// calls are curl's arguments for them. Those that have a place alone come with
// others that no bulkhead refuses: curl begins all calls before it sends the
// first request, so the time for that is in each.
func (e bounded) calls(run runName) []string {
	to := func(url string, n int) []string {
		return []string{"--output", "/dev/null", fmt.Sprintf("%s/[1-%d]?work=%s", url, n, e.Work)}
	}
	if run == alone {
		return append(to(boundedURL, e.ServeAtOnce), to(nobodysURL, e.Calls-e.ServeAtOnce)...)
	}
	return to(boundedURL, e.Calls)
}

// curlFormat makes curl write a line for each call: its exit code, which is 7
// for a connect that failed, the answer's status, the seconds it took, and
// the error.
const curlFormat = `call %{exitcode} %{http_code} %{time_total} %{errormsg}\n`

// curlSample reads what curl wrote with curlFormat.
func curlSample(out []byte) (sample, error) {
	s := sample{Latencies: []time.Duration{}}
	for lines := bufio.NewScanner(bytes.NewReader(out)); lines.Scan(); {
		f := strings.SplitN(lines.Text(), " ", 5)
		if f[0] != "call" {
			continue
		}
		if len(f) < 5 {
			return s, fmt.Errorf("curl wrote %q: curl 7.75 or later is needed", lines.Text())
		}
		seconds, err := strconv.ParseFloat(f[3], 64)
		if err != nil {
			return s, fmt.Errorf("curl wrote %q: %w", lines.Text(), err)
		}
		took := time.Duration(seconds * float64(time.Second))
		switch {
		case f[1] == "0" && f[2] == "200":
			s.Latencies = append(s.Latencies, took)
		case f[1] == "7":
			if s.Refused = append(s.Refused, took); s.Error == "" {
				s.Error = f[4]
			}
		default:
			if s.Failed++; s.Failed == 1 {
				s.Error = fmt.Sprintf("exit code %s, status %s: %s", f[1], f[2], f[4])
			}
		}
	}
	slices.Sort(s.Latencies)
	slices.Sort(s.Refused)
	return s, nil
}

func (e bounded) verdict(r rows) string {
	text := fmt.Sprintf("Without a bound all %d queue and 95 of 100 are done after %s ms; with it %d are done, 95 of 100 of them within %s ms",
		r.without.Calls, figures(r.without.P95), r.with.Calls, figures(r.with.P95))
	if r.with.RefusedP95 > 0 {
		text += fmt.Sprintf(", and %d are refused, 95 of 100 of them within %s ms", r.with.Refused, figures(r.with.RefusedP95))
	}
	text += fmt.Sprintf(". The same %d take %s ms where curl's other calls go to a port that nobody listens on", r.alone.Calls, figures(r.alone.P95))
	return text + fmt.Sprintf(". As seen from outside curl ran for %s and %s ms.", figures(r.without.WallMS), figures(r.with.WallMS))
}
