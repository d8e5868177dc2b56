package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"bulkhead/pkg/conn"
	"bulkhead/pkg/policy"
)

func (a *app) topCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "top",
		Short: "live view of bulkheads and traffic",
		Long: `Shows every second what the bulkheads hold and what passes: the fullest first,
with connections and refusals a second since the last view, and bytes a second
by compartment and provider. On a terminal it redraws; otherwise each view
follows the one before. Ctrl-C ends it. Works while the agent is down. Needs
root.`,
		Example: `  bulkhead top
  bulkhead top --count 2 --interval 10s`,
		Args: noArgs,
	}
	interval := cmd.Flags().Duration("interval", time.Second, "time between views, 100ms or more")
	views := cmd.Flags().Int("count", 0, "end after `N` views; 0 is never")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if *interval < 100*time.Millisecond {
			return wrongUse("--interval must be 100ms or more")
		}
		if *views < 0 {
			return wrongUse("--count %d: give the number of views, or 0 for no end", *views)
		}
		ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
		defer stop()
		_, where, err := a.instance()
		if err != nil {
			return err
		}
		r, err := conn.OpenReader(where)
		if err != nil {
			return err
		}
		defer r.Close()
		err = a.top(ctx, r, *interval, *views)
		if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
			return nil
		}
		return err
	}
	return cmd
}

func (a *app) top(ctx context.Context, r *conn.Reader, interval time.Duration, views int) error {
	f, ok := a.stdout.(*os.File)
	redraw := ok && terminal(f.Fd())
	tick := time.NewTicker(interval)
	defer tick.Stop()
	var last *conn.Snapshot
	for n := 1; ; n++ {
		snap, err := r.Snapshot(ctx)
		if err != nil {
			return err
		}
		var b strings.Builder
		if redraw {
			b.WriteString("\x1b[H\x1b[2J") // home, clear
		}
		if err := topView(&b, last, snap); err != nil {
			return err
		}
		if _, err := io.WriteString(a.stdout, b.String()); err != nil {
			return err
		}
		if last = snap; n == views {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// topView writes one view; last is the snapshot of the one before, or nil.
func topView(w io.Writer, last, now *conn.Snapshot) error {
	fmt.Fprintf(w, "%s  generation %d  mode %s  %d connections\n\n", now.Time.Format(time.TimeOnly), now.Generation, now.Plan.Mode, len(now.Connections))
	span := 0.0
	before := map[policy.Key]conn.Bulkhead{}
	bytesBefore := map[string]conn.Traffic{}
	if last != nil {
		span = now.Time.Sub(last.Time).Seconds()
		for _, b := range last.Bulkheads {
			before[b.Key] = b
		}
		for _, t := range last.Traffic {
			bytesBefore[named(t.Feature, t.Tenant)+" "+t.Provider] = t
		}
	}
	rate := func(before, now uint64) float64 {
		if span <= 0 || now < before {
			return 0
		}
		return float64(now-before) / span
	}

	list := slices.Clone(now.Bulkheads)
	slices.SortStableFunc(list, func(a, b conn.Bulkhead) int { return cmp.Compare(fullness(b), fullness(a)) })
	rows := [][]string{{"BULKHEAD", "IN USE", "LIMIT", "FULL", "CONNECTS/S", "REFUSED/S", "WOULD/S"}}
	for _, b := range list {
		full := "-"
		if b.Limit != policy.Unlimited {
			full = fmt.Sprintf("%.0f%%", fullness(b)*100)
		}
		o := before[b.Key]
		rows = append(rows, []string{b.Key.String(), fmt.Sprint(b.InUse), b.Limit.String(), full,
			fmt.Sprintf("%.1f", rate(o.Accepted, b.Accepted)),
			fmt.Sprintf("%.1f", rate(sum(o.Rejected), sum(b.Rejected))),
			fmt.Sprintf("%.1f", rate(sum(o.WouldReject), sum(b.WouldReject)))})
	}
	if err := table(w, rows...); err != nil {
		return err
	}
	fmt.Fprintln(w)
	rows = [][]string{{"COMPARTMENT", "PROVIDER", "CONNECTS/S", "SENT/S", "RECEIVED/S"}}
	for _, t := range now.Traffic {
		if t.Connections == 0 {
			continue
		}
		o := bytesBefore[named(t.Feature, t.Tenant)+" "+t.Provider]
		tx, rx := "-", "-"
		if t.Bytes {
			tx, rx = size(uint64(rate(o.TxBytes, t.TxBytes))), size(uint64(rate(o.RxBytes, t.RxBytes)))
		}
		rows = append(rows, []string{named(t.Feature, t.Tenant), t.Provider, fmt.Sprintf("%.1f", rate(o.Connections, t.Connections)), tx, rx})
	}
	return table(w, rows...)
}

// fullness sorts bulkheads: 1 is full. Unlimited ones come last.
func fullness(b conn.Bulkhead) float64 {
	switch {
	case b.Limit == policy.Unlimited:
		return 0
	case b.Limit == 0:
		return 1
	}
	return float64(b.InUse) / float64(b.Limit)
}
