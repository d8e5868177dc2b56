package main

import (
	"errors"
	"fmt"
	"io"
)

// errMissed is a limit that was missed, or could not be judged.
var errMissed = errors.New("missed")

// The limits: what a release must reach, all of it within one run.
const (
	// fiveOfNFT is how much of the overhead of nft's five rules five bulkheads may have.
	fiveOfNFT = 0.5
	// fiveOverEmpty is how much more than empty programs they may cost, as a part of a
	// whole connect: 0.6 us of the 8.3 us that a loopback connect takes on the machine
	// that the limit was set on.
	fiveOverEmpty = 0.073
	// noMatchOverEmpty is the same of a connect that matches no provider: 0.15 us of 8.3.
	noMatchOverEmpty = 0.018
	// Rates with our programs, as parts of that without; leastUntracked also of rates where
	// programs see packets, as parts of that with empty ones there.
	leastBulk, leastExchange, leastUntracked = 0.99, 0.97, 0.99
	// How much longer 95 of a hundred requests to a realtime handler may take beside
	// parsers than alone, and 99 of a hundred than in SCHED_FIFO.
	mostP95OfAlone, mostP99OfFIFO = 1.05, 1.15
	// mostP99OnSeveral is the latter on several CPUs. There alone is no measure: in virtual
	// time a CPU is slower while another is at work.
	mostP99OnSeveral = 1.2
	// leastIdle is how much of the machine the parsers must get while the handler is idle.
	leastIdle = 0.95
	// mostApply is how long 10,000 prefixes and 1,000 routes may take from text to in
	// force, in milliseconds.
	mostApply = 1000
	// mostUpkeep is the part of one CPU that an agent may take with upkeepCompartments and
	// upkeepProcesses that do nothing, and mostAdopted how many milliseconds a new cgroup may
	// wait, 95 of a hundred.
	mostUpkeep, upkeepCompartments, upkeepProcesses = 0.005, 200, 5000
	mostAdopted                                     = 100
	// mostSlot is what a slot may take of the kernel's memory, in bytes.
	mostSlot = 256
)

// verdict is one limit and what came of it.
type verdict struct {
	What     string
	Limit    string
	Measured string // "not measured" if so
	OK       bool
}

// check prints the verdicts; errMissed if any is bad.
func (r *report) check(out io.Writer, format string) error {
	missed := 0
	err := printTable(out, format, 0, func(w io.Writer) {
		fmt.Fprintln(w, "what\tlimit\tmeasured\t\t")
		for _, v := range verdicts(r) {
			word := "ok"
			if !v.OK {
				word = "MISSED"
				missed++
			}
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t\n", v.What, v.Limit, v.Measured, word)
		}
	})
	if err != nil {
		return err
	}
	if missed > 0 {
		return fmt.Errorf("%d limits %w", missed, errMissed)
	}
	return nil
}

// verdicts judges a report. What was not measured is not reached.
func verdicts(r *report) []verdict {
	all := connectVerdicts(r.Connect)
	all = append(all, rateVerdicts(r.Throughput)...)
	all = append(all, cpuVerdicts(r.CPU)...)
	all = append(all, slotVerdict(r.Growth), applyVerdict(r.Applies))
	return append(all, upkeepVerdicts(r.Upkeep)...)
}

func unmeasured(what, limit string) verdict {
	return verdict{What: what, Limit: limit, Measured: "not measured"}
}

func connectVerdicts(rows []connectRow) (all []verdict) {
	row := map[string]*connectRow{}
	for i := range rows {
		row[rows[i].Name] = &rows[i]
	}
	none, five, nft := row[rowNone], row[rowFive], row[rowNFT5]

	what, limit := "connect: overhead of five bulkheads, as a part of nft's five rules", fmt.Sprintf("%.2f", fiveOfNFT)
	switch {
	case five == nil || nft == nil:
		all = append(all, unmeasured(what, limit))
	default:
		part := five.OverNone.Median / nft.OverNone.Median
		all = append(all, verdict{what, limit, fmt.Sprintf("%.2f (%+.2f of %+.2f us)", part, five.OverNone.Median/1e3, nft.OverNone.Median/1e3),
			nft.OverNone.Median > 0 && part <= fiveOfNFT})
	}

	what, limit = "connect: five bulkheads over empty programs, as a part of a connect", fmt.Sprintf("%.1f %%", fiveOverEmpty*100)
	switch {
	case none == nil || five == nil:
		all = append(all, unmeasured(what, limit))
	default:
		part := five.OverEmpty.Median / none.Median
		all = append(all, verdict{what, limit, fmt.Sprintf("%.1f %% (%+.2f us of %.2f us)", part*100, five.OverEmpty.Median/1e3, none.Median/1e3), part <= fiveOverEmpty})
	}

	// What is measured is about as small as the noise, so only an interval that is wholly
	// above is a miss.
	what, limit = "connect: no match over empty programs, as a part of a connect", fmt.Sprintf("%.1f %%", noMatchOverEmpty*100)
	switch no := row[rowNoMatch]; {
	case none == nil || no == nil:
		all = append(all, unmeasured(what, limit))
	default:
		e := no.OverEmpty
		all = append(all, verdict{what, limit, fmt.Sprintf("%.1f %% (%+.2f us, %+.2f to %+.2f, of %.2f us)",
			e.Median/none.Median*100, e.Median/1e3, e.Low/1e3, e.High/1e3, none.Median/1e3), e.Low/none.Median <= noMatchOverEmpty})
	}

	for _, grown := range []struct {
		what string
		name func(int) string
	}{{"routes", rowRoutes}, {"prefixes", rowPrefixes}} {
		what, limit := "connect: 10000 "+grown.what+" cost what 10 do", "intervals that meet"
		few, many := row[grown.name(10)], row[grown.name(10000)]
		if few == nil || many == nil {
			all = append(all, unmeasured(what, limit))
			continue
		}
		a, b := few.OverEmpty, many.OverEmpty
		all = append(all, verdict{what, limit,
			fmt.Sprintf("over empty %+.2f to %+.2f us, and %+.2f to %+.2f us", a.Low/1e3, a.High/1e3, b.Low/1e3, b.High/1e3),
			a.Low <= b.High && b.Low <= a.High})
	}
	return all
}

// rateVerdicts are misses only if the whole interval is below the limit.
func rateVerdicts(rows []rateRow) (all []verdict) {
	for _, l := range []struct {
		traffic, name string
		least         float64
	}{
		{trafficBulk, rowCounted, leastBulk},
		{trafficExchange, rowCounted, leastExchange},
		{trafficBulk, rowUntracked, leastUntracked},
		{trafficExchange, rowUntracked, leastUntracked},
	} {
		v := unmeasured("throughput: "+l.traffic+", "+l.name+", as a part of without", fmt.Sprintf("%.2f", l.least))
		for _, r := range rows {
			if r.Traffic == l.traffic && r.Name == l.name {
				v.Measured = fmt.Sprintf("%.4f (%.4f to %.4f)", r.Ratio.Median, r.Ratio.Low, r.Ratio.High)
				v.OK = r.Ratio.High >= l.least
			}
		}
		all = append(all, v)
	}
	for _, traffic := range []string{trafficBulk, trafficExchange, trafficDatagrams} {
		v := unmeasured("throughput: "+traffic+", "+rowBesideUDP+", as a part of empty programs", fmt.Sprintf("%.2f", leastUntracked))
		var ours, empty *estimate
		for i, r := range rows {
			switch {
			case r.Traffic == traffic && r.Name == rowBesideUDP:
				ours = &rows[i].Ratio
			case r.Traffic == traffic && r.Name == rowPackets:
				empty = &rows[i].Ratio
			}
		}
		if ours != nil && empty != nil && empty.Median > 0 {
			m := empty.Median
			v.Measured = fmt.Sprintf("%.4f (%.4f to %.4f)", ours.Median/m, ours.Low/m, ours.High/m)
			v.OK = ours.High/m >= leastUntracked
		}
		all = append(all, v)
	}
	return all
}

// cpuLimit is how large a figure may be, as a multiple of another.
type cpuLimit struct {
	what        string
	x, of, most float64
}

func cpuVerdicts(rows []cpuRow) (all []verdict) {
	var runs []cpuRow
	row := map[cpuRow]cpuRow{} // by run and case
	for _, r := range rows {
		if r.Case == caseAlone {
			runs = append(runs, r.run())
		}
		row[r.named(r.Case)] = r
	}
	idle := fmt.Sprintf("%.2f", leastIdle)
	if len(runs) == 0 {
		return []verdict{unmeasured("cpu: realtime beside parsers", fmt.Sprintf("%.2f and %.2f", mostP95OfAlone, mostP99OfFIFO))}
	}
	for _, run := range runs {
		alone, fifo := row[run.named(caseAlone)], row[run.named(caseFIFO)]
		for _, name := range []string{caseBatch, caseBackground} {
			r, ok := row[run.named(name)]
			what := fmt.Sprintf("cpu: %s, %d CPUs, %s parsers: %s: ", run.Kernel, run.CPUs, run.beside(), name)
			limits := []cpuLimit{
				{"p95, as a multiple of alone", r.P95, alone.P95, mostP95OfAlone},
				{"p99, as a multiple of SCHED_FIFO's", r.P99, fifo.P99, mostP99OfFIFO},
			}
			if run.CPUs > 1 {
				limits = []cpuLimit{{"p99, as a multiple of SCHED_FIFO's", r.P99, fifo.P99, mostP99OnSeveral}}
			}
			for _, l := range limits {
				v := unmeasured(what+l.what, fmt.Sprintf("%.2f", l.most))
				if ok && l.of > 0 {
					v.Measured = fmt.Sprintf("%.2f (%.2f of %.2f ms)", l.x/l.of, l.x, l.of)
					v.OK = l.x/l.of <= l.most
				}
				all = append(all, v)
			}
			v := unmeasured(what+"the parsers' part of the machine with the handler idle", idle)
			if ok {
				v.Measured, v.OK = fmt.Sprintf("%.3f", r.Idle), r.Idle >= leastIdle
			}
			all = append(all, v)
		}
	}
	return all
}

// slotVerdict is about the largest number of slots that there is.
func slotVerdict(rows []grownRow) verdict {
	v := unmeasured("growth: kernel memory of a slot", fmt.Sprintf("%d bytes", mostSlot))
	for _, r := range rows {
		if r.What == whatSlots {
			v.Measured = fmt.Sprintf("%.0f bytes (of %d)", r.BytesPerSlot, r.Count)
			v.OK = r.BytesPerSlot > 0 && r.BytesPerSlot <= mostSlot
		}
	}
	return v
}

// applyVerdict is about the largest plan that there is.
func applyVerdict(rows []applied) verdict {
	v := unmeasured("growth: apply 10000 prefixes and 1000 routes", fmt.Sprintf("%d ms", mostApply))
	for _, a := range rows {
		if a.CIDRs >= 10000 && a.Routes >= 1000 {
			v.Measured = fmt.Sprintf("%.0f ms (compile %.0f, apply %.0f)", a.Compile+a.Apply, a.Compile, a.Apply)
			v.OK = a.Compile+a.Apply <= mostApply
		}
	}
	return v
}

func upkeepVerdicts(rows []upkeepRow) (all []verdict) {
	for _, match := range []string{byCgroup, byExe} {
		what := fmt.Sprintf("upkeep: %d compartments, %d processes, by %s: ", upkeepCompartments, upkeepProcesses, match)
		alone := unmeasured(what+"left alone, of one CPU", fmt.Sprintf("%.1f %%", mostUpkeep*100))
		scraped := unmeasured(what+"scraped, of one CPU", alone.Limit)
		adopted := unmeasured(what+"p95 from mkdir to adopted", fmt.Sprintf("%d ms", mostAdopted))
		for _, r := range rows {
			if r.Match != match || r.Compartments < upkeepCompartments || r.Processes < upkeepProcesses {
				continue
			}
			alone.Measured, alone.OK = fmt.Sprintf("%.2f %%", r.Idle*100), r.Idle <= mostUpkeep
			scraped.Measured, scraped.OK = fmt.Sprintf("%.2f %%", r.Scraped*100), r.Scraped <= mostUpkeep
			if r.Adopted > 0 {
				adopted.Measured, adopted.OK = fmt.Sprintf("%.1f ms (max %.1f)", r.AdoptedP95, r.AdoptedMax), r.AdoptedP95 <= mostAdopted
			}
		}
		all = append(all, alone, scraped)
		if match == byCgroup {
			all = append(all, adopted)
		}
	}
	return all
}
