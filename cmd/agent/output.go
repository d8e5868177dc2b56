package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"bulkhead/pkg/conn"
	"bulkhead/pkg/policy"
)

// format is the value of -o: one of a few words, refused when it is parsed.
type format struct {
	value   string
	choices []string
}

func (f *format) String() string { return f.value }
func (f *format) Type() string   { return strings.Join(f.choices, "|") }
func (f *format) Set(s string) error {
	if !slices.Contains(f.choices, s) {
		return fmt.Errorf("must be %s", strings.Join(f.choices, " or "))
	}
	f.value = s
	return nil
}

func (f *format) json() bool { return f.value == "json" }

// outputFlag gives a command -o table|json.
func outputFlag(cmd *cobra.Command) *format {
	f := &format{value: "table", choices: []string{"table", "json"}}
	cmd.Flags().VarP(f, "output", "o", "output format")
	return f
}

func writeJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// table writes rows in aligned columns.
func table(w io.Writer, rows ...[]string) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, r := range rows {
		fmt.Fprintln(tw, strings.Join(r, "\t"))
	}
	return tw.Flush()
}

// dash stands for an empty cell.
func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// named joins the names of a feature and a tenant.
func named(feature, tenant string) string {
	if tenant == "" {
		return feature
	}
	return feature + "/" + tenant
}

func count(n uint64) string { return fmt.Sprint(n) }

// size is a number of bytes for people.
func size(n uint64) string {
	const unit = 1024
	if n < unit {
		return fmt.Sprintf("%d B", n)
	}
	v, i := float64(n)/unit, 0
	for v >= unit && i < 4 {
		v, i = v/unit, i+1
	}
	return fmt.Sprintf("%.1f %ciB", v, "KMGTP"[i])
}

// age is a duration for people: two significant parts at most.
func age(d time.Duration) string {
	switch {
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	}
	return strings.TrimSuffix(d.Round(time.Second).String(), "0s")
}

// sum adds up the counts by reason.
func sum(m map[string]uint64) (n uint64) {
	for _, v := range m {
		n += v
	}
	return n
}

// terminal reports whether fd is one.
func terminal(fd uintptr) bool {
	_, err := unix.IoctlGetTermios(int(fd), unix.TCGETS)
	return err == nil
}

// snapshot reads what is in force; conn.ErrNotLoaded if nothing is.
func snapshot(ctx context.Context, where conn.Options) (*conn.Snapshot, error) {
	r, err := conn.OpenReader(where)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return r.Snapshot(ctx)
}

func planInForce(where conn.Options) (*policy.Plan, error) {
	r, err := conn.OpenReader(where)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return r.Plan()
}

// limitText is a limit and what connect() fails with above it.
func limitText(b policy.Bulkhead) string {
	if b.Limit == policy.Unlimited {
		return b.Limit.String()
	}
	return b.Limit.String() + " (" + policy.ErrnoName(b.Errno) + ")"
}
