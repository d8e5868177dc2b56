// Command bench measures what bulkhead costs on the hot paths, as ratios within one
// run: `make bench`.
//
// Every configuration has a cgroup of its own with its own programs; one worker
// process is moved from one to the next, and the server is outside of all of them.
// Turns are short and many, so that a drift of the machine's speed reaches all alike,
// and what is compared are medians of the differences within a round, with the 95 %
// interval of that median. Everything happens in a network namespace of its own.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"os/exec"
	"runtime"
	"sort"
	"strings"
	"syscall"
	"text/tabwriter"

	"golang.org/x/sys/unix"
)

// result is one row: nanoseconds of processor time for one connect and close.
type result struct {
	Name   string  `json:"name"`
	Median float64 `json:"median_ns"`
	P99    float64 `json:"p99_of_rounds_ns"`
	// OverNone and OverEmpty are medians of the differences within a round, to no
	// programs at all and to empty programs on the same hooks.
	OverNone  float64 `json:"over_none_ns"`
	OverEmpty float64 `json:"over_empty_ns"`
	// OverEmptyLow and High are the 95 % interval of OverEmpty, from the order
	// statistics of the rounds (a binomial interval: no assumption on their shape).
	OverEmptyLow  float64 `json:"over_empty_low_ns"`
	OverEmptyHigh float64 `json:"over_empty_high_ns"`
	// Hooks are the median nanoseconds in each hook, by the kernel's statistics.
	Hooks map[string]float64 `json:"hooks_ns,omitempty"`
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == "worker" {
		work()
		return
	}
	rounds := flag.Int("rounds", 201, "turns of every configuration")
	connects := flag.Int("connects", 300, "connects in a turn")
	output := flag.String("o", "table", "table or json")
	only := flag.String("only", "", "comma-separated beginnings of the names of configurations to run; none and empty always run")
	flag.Parse()
	if err := run(*rounds, *connects, *output, *only); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(rounds, connects int, output, only string) error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("needs root: it attaches programs")
	}
	if os.Getenv("BULKHEAD_BENCH_INSIDE") == "" {
		return inside()
	}
	lab, err := newLab()
	if err != nil {
		return err
	}
	defer lab.close()
	var chosen []*configuration
	for _, c := range configurations() {
		if only == "" || c.name == "none" || c.name == "empty" || hasPrefix(c.name, strings.Split(only, ",")) {
			chosen = append(chosen, c)
		}
	}
	for _, c := range chosen {
		if err := lab.start(c); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	times := make([][]float64, len(chosen))
	for r := -1; r < rounds; r++ { // the first warms up
		for i := range chosen {
			j := (i + r + len(chosen)) % len(chosen) // nobody always follows the same one
			t, err := lab.turn(chosen[j], connects)
			if err != nil {
				return fmt.Errorf("%s: %w", chosen[j].name, err)
			}
			if r >= 0 {
				times[j] = append(times[j], float64(t.Nanoseconds())/float64(connects))
			}
		}
		fmt.Fprintf(os.Stderr, "\rround %d of %d ", r+1, rounds)
	}
	fmt.Fprintln(os.Stderr)
	hooks, err := hookMedians(lab, chosen, rounds, connects)
	if err != nil {
		return err
	}
	var results []result
	for i, c := range chosen {
		over := differences(times[i], times[1])
		half := 0.98 / math.Sqrt(float64(len(over))) // 1.96 * sqrt(0.5 * 0.5 / n)
		results = append(results, result{
			Name: c.name, Median: quantile(times[i], 0.5), P99: quantile(times[i], 0.99),
			OverNone:  quantile(differences(times[i], times[0]), 0.5),
			OverEmpty: quantile(over, 0.5), OverEmptyLow: quantile(over, max(0, 0.5-half)), OverEmptyHigh: quantile(over, min(1, 0.5+half)),
			Hooks: hooks[i],
		})
	}
	applies, err := lab.applyTimes(11)
	if err != nil {
		return err
	}
	return print(report{results, applies}, output)
}

// report is what one run gives.
type report struct {
	Connects []result  `json:"connects"`
	Applies  []applied `json:"applies"`
}

// hookMedians measures the hooks of every configuration, in turns again.
func hookMedians(lab *lab, chosen []*configuration, rounds, connects int) ([]map[string]float64, error) {
	samples := make([]map[string][]float64, len(chosen))
	for range rounds/20 + 1 {
		for i, c := range chosen {
			if len(c.programs) == 0 {
				continue
			}
			times, err := lab.hookTimes(c, connects)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", c.name, err)
			}
			if samples[i] == nil {
				samples[i] = map[string][]float64{}
			}
			for hook, t := range times {
				samples[i][hook] = append(samples[i][hook], t)
			}
		}
	}
	medians := make([]map[string]float64, len(chosen))
	for i, s := range samples {
		medians[i] = map[string]float64{}
		for hook, v := range s {
			medians[i][hook] = quantile(v, 0.5)
		}
	}
	return medians, nil
}

func hasPrefix(s string, prefixes []string) bool {
	for _, p := range prefixes {
		if strings.HasPrefix(s, p) {
			return true
		}
	}
	return false
}

func differences(a, b []float64) []float64 {
	d := make([]float64, len(a))
	for i := range a {
		d[i] = a[i] - b[i]
	}
	return d
}

func quantile(v []float64, q float64) float64 {
	s := append([]float64(nil), v...)
	sort.Float64s(s)
	return s[min(int(q*float64(len(s))), len(s)-1)]
}

func print(all report, output string) error {
	results := all.Connects
	if output == "json" {
		e := json.NewEncoder(os.Stdout)
		e.SetIndent("", "  ")
		return e.Encode(all)
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "connect+close\tmedian us\tp99 of rounds us\tover none us\tover empty us\t95 %\tratio to empty\tin hooks ns: connect\tsockops\trelease\t")
	for _, r := range results {
		fmt.Fprintf(w, "%s\t%.2f\t%.2f\t%+.2f\t%+.2f\t%+.2f to %+.2f\t%.3f\t%.0f\t%.0f\t%.0f\t\n", r.Name, r.Median/1e3, r.P99/1e3, r.OverNone/1e3, r.OverEmpty/1e3,
			r.OverEmptyLow/1e3, r.OverEmptyHigh/1e3, 1+r.OverEmpty/results[1].Median, r.Hooks["connect4"], r.Hooks["sockops"], r.Hooks["sock_release"])
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Println()
	w = tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "apply a plan\tcompile ms\tfirst ms, with load and attach\tagain ms\t")
	for _, a := range all.Applies {
		fmt.Fprintf(w, "%s\t%.0f\t%.0f\t%.0f\t\n", a.Name, a.Compile, a.First, a.Apply)
	}
	return w.Flush()
}

// inside runs the same again in namespaces of its own.
func inside() error {
	c := exec.Command("/proc/self/exe", os.Args[1:]...)
	c.Env = append(os.Environ(), "BULKHEAD_BENCH_INSIDE=1")
	c.Stdout, c.Stderr = os.Stdout, os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	return c.Run()
}

// work connects and closes as often as its standard input says, and answers with
// the nanoseconds of processor time that took: loopback's packets are handled within
// the calls, and what else the machine does is not counted.
func work() {
	const listener = 3 // inherited
	runtime.LockOSThread()
	var all, one unix.CPUSet
	if unix.SchedGetaffinity(0, &all) == nil {
		for i := range 1024 {
			if all.IsSet(i) {
				one.Zero()
				one.Set(i) // the last, which has fewer interrupts than the first
			}
		}
		unix.SchedSetaffinity(0, &one) // without, there is more noise and nothing else
	}
	for {
		var n int
		if _, err := fmt.Scan(&n); err != nil {
			return
		}
		var start int64
		for i := range warmUp + n {
			if i == warmUp {
				start = threadTime()
			}
			fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
			if err != nil {
				fmt.Println("socket:", err)
				return
			}
			if err := syscall.Connect(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: port}); err != nil {
				fmt.Println("connect:", err)
				return
			}
			// The worker also takes the connection off the server's queue, so that no
			// wake-up is measured and no memory grows cold. The listening socket was
			// made outside of the measured cgroups, and so is what it accepts.
			peer, _, err := syscall.Accept(listener)
			if err != nil {
				fmt.Println("accept:", err)
				return
			}
			// A reset leaves no TIME_WAIT, so that ports do not run out.
			syscall.SetsockoptLinger(fd, syscall.SOL_SOCKET, syscall.SO_LINGER, &syscall.Linger{Onoff: 1})
			syscall.Close(fd)
			syscall.Close(peer)
		}
		fmt.Println(threadTime() - start)
	}
}

// warmUp is the number of connects of a turn that come before the measured ones: the
// first meet caches that the configuration before has filled.
const warmUp = 30

func threadTime() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		return 0 // cannot fail with this clock
	}
	return t.Nano()
}
