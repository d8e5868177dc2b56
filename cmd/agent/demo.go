package main

import (
	"errors"

	"github.com/spf13/cobra"

	"bulkhead/internal/demo"
)

// exitInterrupted is 128 + SIGINT, as a shell reports it.
const exitInterrupted = 130

func (a *app) demoCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "see it work on this node, before and after, with nothing to configure",
		Long: `Starts a provider (an HTTP server that serves 20 calls at once and queues the
rest), a chat and a batch workload as processes of their own, and shows chat's
latency alone, beside a flood of batch calls, and beside the same flood under
bulkheads. Takes under a minute and root.

Everything runs in a network namespace and cgroups of its own, and is removed at
the end, after Ctrl-C too. The provider and the workloads know nothing of
bulkhead.`,
		Example: `  sudo bulkhead demo`,
		Args:    noArgs,
	}
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		err := demo.Run(cmd.Context(), demo.Options{
			CgroupRoot: a.cgroupRoot, JSON: out.json(), Stdout: a.stdout, Stderr: a.stderr,
		})
		if errors.Is(err, demo.ErrInterrupted) {
			return &exitError{exitInterrupted, err}
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
