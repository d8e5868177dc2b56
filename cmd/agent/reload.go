package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"bulkhead/internal/agent"
)

func (a *app) reloadCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "reload",
		Short: "make the agent reload its policy, and wait for the result",
		Long: `Asks the agent on the admin socket to read its policy again, waits until it is in
force, and prints the new generation. If the policy is refused, the one before
stays in force; every error is printed with its place, and the exit code is 1.
Each reload makes a new generation, also of a policy that has not changed: slices,
matches and CPU and memory values are all brought about again. Needs root.`,
		Example: `  bulkhead check /etc/bulkhead/policy.yaml && bulkhead reload`,
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out, err := a.client().Reload(cmd.Context())
			if errors.Is(err, agent.ErrNoAgent) {
				return fmt.Errorf("%w: start one (bulkhead agent --policy FILE), or name its socket with --admin-socket", err)
			}
			if err != nil {
				return err
			}
			for _, w := range out.Warnings {
				fmt.Fprintf(a.stderr, "warning: %s\n", w)
			}
			if out.Error != "" {
				fmt.Fprintln(a.stderr, strings.TrimSuffix(out.Error, "\n"))
				return fmt.Errorf("the policy was refused; generation %d stays in force", out.Generation)
			}
			_, err = fmt.Fprintf(a.stdout, "generation %d is in force\n", out.Generation)
			return err
		},
	}
}
