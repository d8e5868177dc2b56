package demo

import (
	"context"
	"fmt"
	"os"
)

// The hidden commands.
const (
	supervisorCommand = "demo-supervisor"
	providerCommand   = "demo-provider"
	proberCommand     = "demo-prober"
)

// ChildCommands returns the names of the hidden commands that Run starts the
// binary with. Each takes flags of its own and is run by Child.
func ChildCommands() []string {
	return []string{supervisorCommand, providerCommand, proberCommand}
}

// Child runs the hidden command name with its arguments.
func Child(ctx context.Context, name string, args []string) error {
	switch name {
	case supervisorCommand:
		return supervise(ctx, args, os.Stdin, os.Stdout)
	case providerCommand:
		return provide(ctx, args, os.Stdout)
	case proberCommand:
		return probe(ctx, os.Stdin, os.Stdout)
	}
	return fmt.Errorf("no such command of the demo: %q", name)
}
