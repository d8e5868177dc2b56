package demo

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Text returns the result for people.
func (r Result) Text(kept bool) string {
	var b strings.Builder
	fmt.Fprintf(&b, "The workloads are programs of %s.\n\n", strings.Join(r.Programs, ", "))
	b.WriteString(r.table())
	b.WriteString("\nms from submission to completion of the calls that were answered; ratio of the figure marked *.\n")
	missed := false
	for _, e := range r.Experiments {
		if e.Skipped != "" {
			continue // the table says why
		}
		fmt.Fprintf(&b, "\n%s: %s.\n", e.Name, e.Title)
		fmt.Fprintf(&b, "  %s.\n", upper(e.Setup))
		if len(r.Experiments) == 1 {
			fmt.Fprintf(&b, "  The policy:\n\n%s\n", indent(e.Policy, "    "))
		}
		if e.Verdict != "" {
			fmt.Fprintf(&b, "  %s\n", e.Verdict)
		}
		for _, remark := range e.Remarks {
			missed = true
			fmt.Fprintf(&b, "  ! %s\n", upper(remark))
		}
	}
	if missed {
		b.WriteString("\nWhat else runs on a node shows in these times: where an aim was missed, try it on an idle one.\n")
	}
	if kept {
		fmt.Fprintf(&b, "\nTook %.0f s.\n", r.Seconds)
	} else {
		fmt.Fprintf(&b, "\nTook %.0f s; everything it made on this node is removed.\n", r.Seconds)
	}
	if len(r.Experiments) > 1 {
		b.WriteString("With --only NAME one experiment shows its policy; -o json has everything.\n")
	}
	b.WriteString("Next: write a policy of your own, try it with `bulkhead check FILE`, and read README.md.\n")
	return b.String()
}

func (r Result) table() string {
	const row = "%-10s %-21s %-9s %8s %8s %8s %9s %9s %7s %8s  %s\n"
	var b strings.Builder
	fmt.Fprintf(&b, row, "", "measured", "bulkheads", "p50", "p95", "p99", "ratio", "answered", "failed", "refused", "known")
	for _, e := range r.Experiments {
		if e.Skipped != "" {
			fmt.Fprintf(&b, "%-10s skipped: %s\n", e.Name, e.Skipped)
			continue
		}
		name, measured := e.Name, e.Measured
		for _, run := range e.Runs {
			cells := []any{name, measured, run.Run}
			for _, f := range []figure{50, 95, 99} {
				cell := "-"
				if run.Calls > 0 {
					cell = figures(run.at(f))
				}
				if f.String() == e.Key && run.Calls > 0 {
					cell += "*"
				} else {
					cell += " "
				}
				cells = append(cells, cell)
			}
			ratio, known := "-", ""
			if run.Ratio > 0 {
				ratio = fmt.Sprintf("%.2f", run.Ratio)
			}
			if run.KnownMS > 0 {
				known = e.Key + " " + figures(run.KnownMS)
			}
			cells = append(cells, ratio, fmt.Sprint(run.Calls), fmt.Sprint(run.Failed), fmt.Sprint(run.Refused), known)
			b.WriteString(strings.TrimRight(fmt.Sprintf(row, cells...), " \n") + "\n")
			name, measured = "", ""
		}
	}
	return b.String()
}

// figures gives milliseconds the digits that mean something.
func figures(ms float64) string {
	switch {
	case ms < 1:
		return fmt.Sprintf("%.2f", ms)
	case ms < 10:
		return fmt.Sprintf("%.1f", ms)
	}
	return fmt.Sprintf("%.0f", ms)
}

func upper(s string) string { return strings.ToUpper(s[:1]) + s[1:] }

func indent(text, by string) string {
	return by + strings.ReplaceAll(strings.TrimSuffix(text, "\n"), "\n", "\n"+by) + "\n"
}

// text says how to look at what was left running.
func (k kept) text(binary string) string {
	enter := fmt.Sprintf("nsenter --target %d --mount --net", k.PID)
	var b strings.Builder
	b.WriteString("\nThe flood is running with bulkheads. For a look, as root in another terminal:\n\n")
	for _, command := range []string{"status", "conns", "top"} {
		fmt.Fprintf(&b, "  %s %s %s %s\n", enter, binary, command, strings.Join(k.Flags, " "))
	}
	for _, m := range []string{"bulkhead_names", "bulkheads"} {
		fmt.Fprintf(&b, "  %s bpftool map dump pinned %s\n", enter, filepath.Join(k.Pins, m))
	}
	fmt.Fprintf(&b, "  bpftool cgroup tree %s\n", k.Node)
	b.WriteString("\nENTER or Ctrl-C ends it and removes everything.\n")
	return b.String()
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
