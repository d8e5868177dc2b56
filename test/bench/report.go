package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// report is what one run gives. A section that was not run is absent.
type report struct {
	Machine    machine      `json:"machine"`
	Connect    []connectRow `json:"connect,omitempty"`
	Throughput []rateRow    `json:"throughput,omitempty"`
	Growth     []grownRow   `json:"growth,omitempty"`
	Applies    []applied    `json:"applies,omitempty"`
	Upkeep     []upkeepRow  `json:"upkeep,omitempty"`
	CPU        []cpuRow     `json:"cpu,omitempty"`
	// Missing are rows that were left out, with the reason.
	Missing []string `json:"missing,omitempty"`
}

// machine is what it ran on.
type machine struct {
	Kernel string `json:"kernel"`
	CPUs   int    `json:"cpus"`
	Model  string `json:"model"`
}

// print writes tables, or JSON.
func (r *report) print(out io.Writer, format string) error {
	if format == "json" {
		e := json.NewEncoder(out)
		e.SetIndent("", "  ")
		return e.Encode(r)
	}
	fmt.Fprintf(out, "kernel %s, %d CPUs, %s\n", r.Machine.Kernel, r.Machine.CPUs, r.Machine.Model)
	for _, t := range []struct {
		rows  int
		table func(io.Writer)
	}{
		{len(r.Connect), r.connectTable}, {len(r.Throughput), r.throughputTable},
		{len(r.Growth), r.growthTable}, {len(r.Applies), r.appliesTable}, {len(r.Upkeep), r.upkeepTable}, {len(r.CPU), r.cpuTable},
	} {
		if t.rows == 0 {
			continue
		}
		fmt.Fprintln(out)
		if err := printTable(out, format, tabwriter.AlignRight, t.table); err != nil {
			return err
		}
	}
	for _, m := range r.Missing {
		fmt.Fprintln(out, m)
	}
	return nil
}

// printTable writes what table writes, lines of cells that each end with a tab, the first
// of them the heads, in columns or, in markdown, as docs/benchmarks.md has them.
func printTable(out io.Writer, format string, flags uint, table func(io.Writer)) error {
	if format != "markdown" {
		w := tabwriter.NewWriter(out, 0, 0, 2, ' ', flags)
		table(w)
		return w.Flush()
	}
	var text strings.Builder
	table(&text)
	for i, line := range strings.Split(strings.TrimSuffix(text.String(), "\n"), "\n") {
		cells := strings.Split(strings.TrimSuffix(line, "\t"), "\t")
		if i == 1 {
			fmt.Fprintln(out, "|--"+strings.Repeat("|--:", len(cells)-1)+"|")
		}
		if _, err := fmt.Fprintf(out, "| %s |\n", strings.Join(cells, " | ")); err != nil {
			return err
		}
	}
	return nil
}

func (r *report) connectTable(w io.Writer) {
	fmt.Fprintln(w, "connect+close\tmedian us\tp99 us\tover none us\t95 %\tover empty us\t95 %\thooks ns: connect\tsockops\trelease\t")
	for _, c := range r.Connect {
		fmt.Fprintf(w, "%s\t%.2f\t%.2f\t%+.2f\t%+.2f to %+.2f\t%+.2f\t%+.2f to %+.2f\t%.0f\t%.0f\t%.0f\t\n", c.Name, c.Median/1e3, c.P99/1e3,
			c.OverNone.Median/1e3, c.OverNone.Low/1e3, c.OverNone.High/1e3,
			c.OverEmpty.Median/1e3, c.OverEmpty.Low/1e3, c.OverEmpty.High/1e3,
			c.Hooks["connect4"], c.Hooks["sockops"], c.Hooks["sock_release"])
	}
}

func (r *report) throughputTable(w io.Writer) {
	fmt.Fprintln(w, "traffic\tconfiguration\tunit\ta second\ta second of CPU\tratio\t95 %\t")
	for _, t := range r.Throughput {
		fmt.Fprintf(w, "%s\t%s\t%s\t%.0f\t%.0f\t%.4f\t%.4f to %.4f\t\n", t.Traffic, t.Name, t.Unit, t.PerSecond, t.PerCPUSecond, t.Ratio.Median, t.Ratio.Low, t.Ratio.High)
	}
}

func (r *report) growthTable(w io.Writer) {
	fmt.Fprintln(w, "growth\tmaps KiB\tslots map KiB\tB a slot\tB a UDP socket\tconnect over none us\t95 %\tfill s\tsnapshot ms\tstart ms\treload ms\tscrape ms\tscrape KiB\tagent RSS MiB\tCPU %: idle\tscraped\t")
	for _, g := range r.Growth {
		perSlot, perUDP := "", ""
		if g.BytesPerSlot > 0 {
			perSlot, perUDP = fmt.Sprintf("%.0f", g.BytesPerSlot), fmt.Sprintf("%.0f", g.BytesPerUDP)
		}
		fmt.Fprintf(w, "%s\t%.0f\t%.0f\t%s\t%s\t%+.2f\t%+.2f to %+.2f\t%.1f\t%.1f\t%.0f\t%.0f\t%.1f\t%.0f\t%.0f\t%.2f\t%.2f\t\n", g.Name, g.KernelBytes/1024, g.SlotsBytes/1024, perSlot, perUDP,
			g.OverNone.Median/1e3, g.OverNone.Low/1e3, g.OverNone.High/1e3, g.Fill,
			g.Snapshot, g.Start, g.Reload, g.Scrape, g.ScrapeBytes/1024, g.RSS/(1<<20), g.IdleCPU*100, g.ScrapedCPU*100)
	}
}

func (r *report) appliesTable(w io.Writer) {
	fmt.Fprintln(w, "apply a plan\tcompile ms\tfirst ms, with load and attach\tagain ms\t")
	for _, a := range r.Applies {
		fmt.Fprintf(w, "%s\t%.0f\t%.0f\t%.0f\t\n", a.Name, a.Compile, a.First, a.Apply)
	}
}

func (r *report) upkeepTable(w io.Writer) {
	fmt.Fprintf(w, "agent's CPU %%\tleft alone\tscraped each %d s\tand %d programs a second\tready ms\tRSS MiB\tadopted after ms: p50\tp95\tmax\t\n", upkeepScrape, upkeepForks)
	for _, u := range r.Upkeep {
		p50, p95, most := "", "", ""
		if u.Adopted > 0 {
			p50, p95, most = fmt.Sprintf("%.1f", u.AdoptedP50), fmt.Sprintf("%.1f", u.AdoptedP95), fmt.Sprintf("%.1f", u.AdoptedMax)
		}
		fmt.Fprintf(w, "%s\t%.2f\t%.2f\t%.2f\t%.0f\t%.0f\t%s\t%s\t%s\t\n", u.Name, u.Idle*100, u.Scraped*100, u.Forks*100, u.Ready, u.RSS/(1<<20), p50, p95, most)
	}
}

func (r *report) cpuTable(w io.Writer) {
	fmt.Fprintln(w, "CPU\tCPUs\tparsers\thandler\trequests\tp50 ms\tp95 ms\tp99 ms\tp95 x alone\tp99 x SCHED_FIFO\tdocuments/s\tof the machine, handler idle\t")
	fifo := map[cpuRow]float64{}
	for _, c := range r.CPU {
		if c.Case == caseFIFO {
			fifo[c.run()] = c.P99
		}
	}
	for _, c := range r.CPU {
		times := "-"
		if of := fifo[c.run()]; of > 0 {
			times = fmt.Sprintf("%.2f", c.P99/of)
		}
		fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%d\t%.2f\t%.2f\t%.2f\t%.2f\t%s\t%.0f\t%.3f\t\n",
			c.Kernel, c.CPUs, c.beside(), c.Case, c.Requests, c.P50, c.P95, c.P99, c.TimesAlone, times, c.Documents, c.Idle)
	}
}
