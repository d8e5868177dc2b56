package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// connectRow is the processor time of connect and close in one configuration, in
// nanoseconds.
type connectRow struct {
	Name   string  `json:"name"`
	Median float64 `json:"median_ns"`
	// P99 is of single connects: the median over turns of the 99th percentile within one.
	P99 float64 `json:"p99_single_ns"`
	// OverNone and OverEmpty are differences within a round, to no programs at all and to
	// empty programs on the same hooks.
	OverNone  estimate `json:"over_none_ns"`
	OverEmpty estimate `json:"over_empty_ns"`
	// Hooks are the median nanoseconds in each hook, by the kernel's statistics.
	Hooks map[string]float64 `json:"hooks_ns,omitempty"`
}

// Names of rows that limits are about.
const (
	rowNone, rowEmpty = "none", "empty"
	rowFive           = "5 bulkheads"
	rowNoMatch        = "no match"
	rowNFT5           = "nft ct count, 5 rules"
)

func rowRoutes(n int) string   { return fmt.Sprintf("5 bulkheads, %d routes", n) }
func rowPrefixes(n int) string { return fmt.Sprintf("5 bulkheads, %d prefixes", n) }

// connectConfigurations are all rows; the first two are what the others are compared with.
func connectConfigurations() ([]*configuration, error) {
	five := size{}.text()
	all := []*configuration{
		{name: rowNone},
		{name: rowEmpty, empty: true},
		{name: rowNoMatch, policy: elsewhere},
		{name: "no match, 10000 prefixes", policy: far(10000)},
		{name: "counted, no limit", policy: counted},
		{name: "1 limit, 2 bulkheads", policy: single},
		{name: rowFive, policy: five},
		{name: "7 bulkheads", policy: size{seven: true}.text()},
		{name: "5 bulkheads, observe", policy: strings.Replace(five, "enforce", "observe", 1)},
	}
	for _, n := range []int{10, 1000, 10000} {
		z, err := routed(n)
		if err != nil {
			return nil, err
		}
		all = append(all, &configuration{name: rowRoutes(n), policy: z.text()})
	}
	for _, n := range []int{10, 1000, 10000} {
		all = append(all, &configuration{name: rowPrefixes(n), policy: size{prefixes: n}.text()})
	}
	all = append(all,
		&configuration{name: "nft ct count, 1 rule", rules: nftRules(1)},
		&configuration{name: rowNFT5, rules: nftRules(5)},
		&configuration{name: "iptables connlimit, 1 rule", rules: iptablesRules(1)},
		&configuration{name: "iptables connlimit, 5 rules", rules: iptablesRules(5)})
	return all, nil
}

// connectSection measures rounds turns of so many connects.
func (l *lab) connectSection(rounds, connects int, only string) (rows []connectRow, missing []string, err error) {
	defer l.end(len(l.stop))
	all, err := connectConfigurations()
	if err != nil {
		return nil, nil, err
	}
	var chosen []*configuration
	for i, c := range all {
		if i < 2 || only == "" || hasPrefix(c.name, strings.Split(only, ",")) {
			chosen = append(chosen, c)
		}
	}
	progress("connect: load programs")
	chosen, missing, err = l.startAll(chosen)
	if err != nil {
		return nil, nil, err
	}
	times, p99 := make([][]float64, len(chosen)), make([][]float64, len(chosen))
	err = l.rounds("connect", rounds, chosen, func(round, i int) error {
		t, err := l.turn(chosen[i], "connect", connects)
		if err == nil && round >= 0 {
			times[i] = append(times[i], t[0]/float64(connects))
		}
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	err = l.rounds("connect, one by one", max(1, rounds/8), chosen, func(round, i int) error {
		t, err := l.turn(chosen[i], "singles", connects)
		if err == nil && round >= 0 {
			p99[i] = append(p99[i], quantile(t, 0.99))
		}
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	hooks := make([]map[string][]float64, len(chosen))
	err = l.rounds("connect, time in hooks", max(1, rounds/20), chosen, func(round, i int) error {
		if len(chosen[i].programs) == 0 {
			return nil
		}
		t, err := l.hookTimes(chosen[i], connects)
		if err != nil || round < 0 {
			return err
		}
		if hooks[i] == nil {
			hooks[i] = map[string][]float64{}
		}
		for hook, ns := range t {
			hooks[i][hook] = append(hooks[i][hook], ns)
		}
		return nil
	})
	if err != nil {
		return nil, nil, err
	}
	for i, c := range chosen {
		row := connectRow{
			Name: c.name, Median: median(times[i]), P99: median(p99[i]), Hooks: map[string]float64{},
			OverNone: estimated(differences(times[i], times[0])), OverEmpty: estimated(differences(times[i], times[1])),
		}
		for hook, ns := range hooks[i] {
			row.Hooks[hook] = median(ns)
		}
		rows = append(rows, row)
	}
	return rows, missing, nil
}

// hookTimes are the nanoseconds that one connect and close spent in each hook, by the
// kernel's own statistics, in a turn of its own since they cost something themselves.
func (l *lab) hookTimes(c *configuration, n int) (map[string]float64, error) {
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		return nil, fmt.Errorf("bpf statistics: %w", err)
	}
	defer stats.Close()
	before := map[string]time.Duration{}
	for hook, p := range c.programs {
		s, err := p.Stats()
		if err != nil {
			return nil, err
		}
		before[hook] = s.Runtime
	}
	if _, err := l.turn(c, "connect", n); err != nil {
		return nil, err
	}
	times := map[string]float64{}
	for hook, p := range c.programs {
		s, err := p.Stats()
		if err != nil {
			return nil, err
		}
		times[hook] = float64((s.Runtime - before[hook]).Nanoseconds()) / float64(warmUp+n)
	}
	return times, nil
}

func hasPrefix(s string, prefixes []string) bool {
	for _, p := range prefixes {
		if strings.HasPrefix(s, p) {
			return true
		}
	}
	return false
}
