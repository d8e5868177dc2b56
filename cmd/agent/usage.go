package main

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
)

// What a command line may be wrong in, said so that the thing and the cure are
// named. run adds where the help is.

// noArgs is cobra.NoArgs, which calls a surplus argument an unknown command.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return fmt.Errorf("%s takes no arguments; got %s", cmd.Name(), quoted(args))
}

// onePolicy wants the path of a policy.
func onePolicy(cmd *cobra.Command, args []string) error {
	if len(args) == 1 {
		return nil
	}
	got := "none"
	if len(args) > 1 {
		got = fmt.Sprintf("%d arguments: %s", len(args), quoted(args))
	}
	return fmt.Errorf("%s takes one FILE or DIR; got %s", cmd.Name(), got)
}

// aCommand wants what exec is to become.
func aCommand(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return nil
	}
	return fmt.Errorf("%s takes the command to become; got none: bulkhead exec --feature F -- CMD [ARG...]", cmd.Name())
}

func quoted(args []string) string {
	var q []string
	for _, a := range args {
		q = append(q, strconv.Quote(a))
	}
	return strings.Join(q, " ")
}

// flagError keeps what package strconv says of numbers to itself.
func flagError(_ *cobra.Command, err error) error {
	var number *strconv.NumError
	if errors.As(err, &number) {
		return errors.New(strings.TrimSuffix(err.Error(), number.Error()) + "not a whole number in range")
	}
	return err
}

// unknownCommand is what cobra says of a command that there is not, in one line.
func unknownCommand(root *cobra.Command, err error) error {
	var name string
	if n, _ := fmt.Sscanf(err.Error(), "unknown command %q", &name); n == 0 {
		return err
	}
	text := fmt.Sprintf("unknown command %q", name)
	if near := root.SuggestionsFor(name); len(near) > 0 {
		text += fmt.Sprintf("; did you mean %q?", near[0])
	}
	return errors.New(text)
}

// helpCommand is cobra's, but fails for what there is no help on.
func helpCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "help [COMMAND]",
		Short: "help about any command",
		RunE: func(cmd *cobra.Command, args []string) error {
			about, _, err := cmd.Root().Find(args)
			if err != nil {
				return &exitError{exitWrongUse, unknownCommand(cmd.Root(), err)}
			}
			return about.Help()
		},
	}
}
