package main

import (
	"errors"
	"strings"

	"github.com/spf13/cobra"

	"bulkhead/internal/demo"
)

// exitInterrupted is 128 + SIGINT, as a shell reports it.
const exitInterrupted = 130

func (a *app) demoCommand() *cobra.Command {
	var only []string
	var keep bool
	cmd := &cobra.Command{
		Use:   "demo [--only NAME,...] [--keep]",
		Short: "see it work on this node, before and after, with nothing to configure",
		Long: `Shows six experiments, each without and with bulkheads, in one table:

  flood     batch floods the provider that chat calls
  slow      a slow service holds the pool that a healthy one needs
  tenants   tenant A floods the route that tenant B uses
  bounded   refusing at once instead of queueing without end
  cpu       a handler beside parsers, where cgroup v2 has the cpu controller
  database  a report takes the connections of PostgreSQL

The workloads are ordinary programs (python3 with its standard library, node
where it is installed, curl, psql) in processes of their own that know nothing of
bulkhead. What an experiment needs and is not installed is named, and the
experiment skipped. Takes under two minutes, and root.

Everything runs in namespaces and cgroups of its own, and is removed at the
end, after Ctrl-C too. With --keep the flood with bulkheads is left running until
ENTER or Ctrl-C, and what to look at it with is written to stderr.`,
		Example: `  sudo bulkhead demo
  sudo bulkhead demo --only flood,tenants -o json
  sudo bulkhead demo --only flood --keep`,
		Args: noArgs,
	}
	out := outputFlag(cmd)
	cmd.Flags().StringSliceVar(&only, "only", nil, "`NAMES` of the experiments to do, comma-separated: "+strings.Join(demo.Experiments(), ", "))
	cmd.Flags().BoolVar(&keep, "keep", false, "leave the flood with bulkheads running at the end")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if cmd.Flags().Changed("only") && len(only) == 0 {
			return wrongUse("--only is empty: give names, or leave it out for all")
		}
		err := demo.Run(cmd.Context(), demo.Options{
			CgroupRoot: a.cgroupRoot, JSON: out.json(), Only: only, Keep: keep, Stdout: a.stdout, Stderr: a.stderr,
		})
		switch {
		case errors.Is(err, demo.ErrInterrupted):
			return &exitError{exitInterrupted, err}
		case errors.Is(err, demo.ErrNoSuchExperiment):
			return wrongUse("--only: %w", err)
		}
		return err
	}
	return cmd
}

// demoChildren are the processes of the demo: this binary again, under names
// that are nobody else's business.
func (a *app) demoChildren() []*cobra.Command {
	var all []*cobra.Command
	for _, name := range demo.ChildCommands() {
		all = append(all, &cobra.Command{
			Use:                name,
			Short:              "a part of bulkhead demo",
			Hidden:             true,
			DisableFlagParsing: true,
			RunE: func(cmd *cobra.Command, args []string) error {
				return demo.Child(cmd.Context(), name, args)
			},
		})
	}
	return all
}
