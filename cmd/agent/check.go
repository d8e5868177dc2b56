package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"bulkhead/internal/agent"
	"bulkhead/pkg/policy"
)

func (a *app) checkCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check FILE|DIR",
		Short: "say everything that is wrong with a policy, with places",
		Long: `Reads a policy, a file or a directory of *.yaml, and prints every error and
every warning at once on stderr, as FILE:LINE:COL: message. Needs no root and
looks at nothing but the files.

Warnings are about what is legal and unwise, such as a limit of 1 (a serial
queue, not isolation), and about what the agent of this release refuses.

With -o json the compiled plan is printed on stdout: every compartment, every
bulkhead with its limit, every route, every destination.

Exit codes: 0 right (there may be warnings), 1 wrong or not readable.`,
		Example: `  bulkhead check policy.yaml
  bulkhead check -o json /etc/bulkhead | jq '.bulkheads[] | select(.limit != null)'`,
		Args: onePolicy,
	}
	out := outputFlag(cmd)
	cmd.RunE = func(_ *cobra.Command, args []string) error {
		plan, warnings, err := policy.Check(args[0])
		if err != nil {
			return err
		}
		verdict := "is right"
		for _, w := range agent.Unbuilt(plan) {
			verdict = "is right, but the agent of this release refuses it (see the warnings)"
			if at := (*policy.Error)(nil); errors.As(w, &at) {
				warnings = append(warnings, policy.Warning{File: at.File, Line: at.Line, Col: at.Col, Msg: "the agent of this release refuses this policy: " + at.Msg})
			}
		}
		slices.SortStableFunc(warnings, func(a, b policy.Warning) int {
			return cmp.Or(strings.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line), cmp.Compare(a.Col, b.Col))
		})
		a.printWarnings(warnings)
		if out.json() {
			return writeJSON(a.stdout, plan)
		}
		_, err = fmt.Fprintf(a.stdout, "%s %s: mode %s, %s, %s, %s, %s\n", args[0], verdict, plan.Mode,
			plural(len(plan.Features)-1, "feature")+" beside default", plural(len(plan.Tenants), "tenant"),
			plural(len(plan.Providers)-1, "provider"), plural(limits(plan), "limit"))
		return err
	}
	return cmd
}

func (a *app) printWarnings(warnings policy.Warnings) {
	for _, w := range warnings {
		fmt.Fprintf(a.stderr, "%s:%d:%d: warning: %s\n", w.File, w.Line, w.Col, w.Msg)
	}
}

func limits(plan *policy.Plan) (n int) {
	for _, b := range plan.Bulkheads {
		if b.Limit != policy.Unlimited {
			n++
		}
	}
	return n
}

func plural(n int, what string) string {
	switch {
	case n == 1:
		return "1 " + what
	case strings.HasSuffix(what, "s"):
		what += "e"
	}
	return fmt.Sprintf("%d %ss", n, what)
}
