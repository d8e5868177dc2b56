package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"bulkhead/pkg/conn"
)

// applied is how long a large plan takes, in milliseconds; medians over the rounds.
type applied struct {
	Name    string  `json:"name"`
	CIDRs   int     `json:"cidrs"`
	Routes  int     `json:"routes"`
	Compile float64 `json:"compile_ms"` // from text to plan
	First   float64 `json:"first_ms"`   // load, attach and pin included; measured once
	Apply   float64 `json:"apply_ms"`   // a plan that replaces another under the live programs
}

// applyTimes puts plans of growing size in force, over and over.
func (l *lab) applyTimes(rounds int) ([]applied, error) {
	defer l.end(len(l.stop))
	var all []applied
	for _, size := range []struct{ cidrs, features, providers int }{{10, 4, 4}, {1000, 9, 9}, {10000, 49, 19}} {
		a := applied{Name: fmt.Sprintf("%d cidrs, %d routes", size.cidrs, (size.features+1)*(size.providers+1)), CIDRs: size.cidrs}
		text := large(size.cidrs, size.features, size.providers)
		dir := filepath.Join(l.root, fmt.Sprintf("apply-%d", size.cidrs))
		if err := os.Mkdir(dir, 0o755); err != nil {
			return nil, err
		}
		l.stop = append(l.stop, func() { os.Remove(dir) })
		o, err := l.instance(dir)
		if err != nil {
			return nil, err
		}
		start := time.Now()
		k, err := conn.Open(o)
		if err != nil {
			return nil, err
		}
		l.stop = append(l.stop, func() { k.Close(); conn.Detach(o) })
		var compile, apply []float64
		for i := range rounds + 1 {
			progress("growth: apply %s: %d of %d", a.Name, i, rounds)
			if err := l.ctx.Err(); err != nil {
				return nil, err
			}
			begun := time.Now()
			plan, err := compiled(text)
			if err != nil {
				return nil, err
			}
			compile = append(compile, ms(begun))
			begun = time.Now()
			if _, err := k.Apply(plan, nil); err != nil {
				return nil, err
			}
			if i == 0 {
				a.First, a.Routes = ms(start), len(plan.Routes)
				continue
			}
			apply = append(apply, ms(begun))
		}
		a.Compile, a.Apply = median(compile), median(apply)
		all = append(all, a)
	}
	return all, nil
}

func ms(since time.Time) float64 { return float64(time.Since(since).Microseconds()) / 1e3 }

// large is a policy of n prefixes, spread over the providers.
func large(n, features, providers int) string {
	var b strings.Builder
	b.WriteString(head + "providers:\n")
	for p := range providers {
		fmt.Fprintf(&b, "  p%d: {limits: {connections: 100}, ports: [443], cidrs: [172.16.%d.0/24", p, p)
		for i := p; i < n; i += providers {
			fmt.Fprintf(&b, ", 10.%d.%d.%d/32", i>>8&255, i&255, i*7&255)
		}
		b.WriteString("]}\n")
	}
	b.WriteString("features:\n")
	for f := range features {
		fmt.Fprintf(&b, "  f%d: {class: batch, limits: {connections: 50}}\n", f)
	}
	return b.String()
}
