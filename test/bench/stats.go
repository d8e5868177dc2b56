package main

import (
	"math"
	"sort"
)

// estimate is a median with its 95 % interval, from the order statistics (a binomial
// interval: no assumption on the shape of what was measured).
type estimate struct {
	Median float64 `json:"median"`
	Low    float64 `json:"low"`
	High   float64 `json:"high"`
}

// estimated is the estimate of one value a round.
func estimated(v []float64) estimate {
	half := 0.98 / math.Sqrt(float64(len(v))) // 1.96 * sqrt(0.5 * 0.5 / n)
	return estimate{quantile(v, 0.5), quantile(v, max(0, 0.5-half)), quantile(v, min(1, 0.5+half))}
}

// differences are a - b, round by round.
func differences(a, b []float64) []float64 {
	d := make([]float64, len(a))
	for i := range a {
		d[i] = a[i] - b[i]
	}
	return d
}

// ratios are a / b, round by round.
func ratios(a, b []float64) []float64 {
	r := make([]float64, len(a))
	for i := range a {
		r[i] = a[i] / b[i]
	}
	return r
}

// quantile is 0 of nothing.
func quantile(v []float64, q float64) float64 {
	if len(v) == 0 {
		return 0
	}
	s := append([]float64(nil), v...)
	sort.Float64s(s)
	return s[min(int(q*float64(len(s))), len(s)-1)]
}

func median(v []float64) float64 { return quantile(v, 0.5) }
