package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"bulkhead/internal/agent"
	"bulkhead/pkg/cgroup"
	"bulkhead/pkg/conn"
	"bulkhead/pkg/policy"
)

const (
	// stopLimit is how long a running agent may take to answer, and to stop. It interrupts what it waits for.
	stopLimit = 15 * time.Second
	// quiet is after what time it is told what is going on.
	quiet = 2 * time.Second
)

func (a *app) detachCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "detach",
		Short: "remove everything: limits, pins, empty slices, changed values",
		Long: `Stops the agent of this instance if one runs, then removes the kernel programs and
their pins, puts back every CPU and memory value that a policy replaced in
cgroups of others, and removes our slices. Open connections are not touched.

A slice that still has processes stays, with the kernel's default values, and is
named with some of them; that is no failure. End them and run detach again.
Detaching twice is no error.`,
		Example: `  bulkhead detach`,
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			tree, where, err := a.instance()
			if err != nil {
				return err
			}
			if err := a.stopAgent(cmd.Context(), where); err != nil {
				return err
			}
			defer a.tellLater("putting back values and removing slices: still at it")()
			return a.detach(tree, where)
		},
	}
}

// stopAgent stops the agent that holds the pins, if one does, and waits for it.
func (a *app) stopAgent(ctx context.Context, where conn.Options) error {
	pid, ok := conn.Holder(where)
	if !ok {
		return nil
	}
	byHand := fmt.Sprintf("stop agent %d (kill -TERM %d), and detach again", pid, pid)
	late := time.Now().Add(stopLimit)
	defer a.tellLater(fmt.Sprintf("agent %d is still busy", pid))()
	info, err := a.client().Info(ctx)
	// One that has just been started answers when its policy is in force.
	for errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil && time.Now().Before(late) {
		if _, ok := conn.Holder(where); !ok {
			return nil
		}
		info, err = a.client().Info(ctx)
	}
	if errors.Is(err, agent.ErrNoAgent) {
		return fmt.Errorf("agent %d holds the pins in %s and does not answer on %s: name its --admin-socket, or %s", pid, where.BPFFS, a.adminSocket, byHand)
	}
	if err != nil {
		return fmt.Errorf("%w; %s", err, byHand)
	}
	// In another pid namespace its own number differs from ours, which is 0 then.
	if pid != 0 && info.PID != pid {
		return fmt.Errorf("agent %d holds the pins in %s, but agent %d answers on %s: name the right --admin-socket, or %s", pid, where.BPFFS, info.PID, a.adminSocket, byHand)
	}
	fmt.Fprintf(a.stdout, "stopping agent %d\n", info.PID)
	if _, err := a.client().Stop(ctx); err != nil {
		return err
	}
	poll := time.NewTicker(20 * time.Millisecond)
	defer poll.Stop()
	over := time.After(stopLimit)
	for {
		if _, ok := conn.Holder(where); !ok {
			return nil
		}
		select {
		case <-poll.C:
		case <-ctx.Done():
			return ctx.Err()
		case <-over:
			return fmt.Errorf("agent %d has not stopped within %v; %s", info.PID, stopLimit, byHand)
		}
	}
}

// tellLater says on stderr what is going on if it takes long, until the function that it returns is called.
func (a *app) tellLater(what string) (done func()) {
	t := time.AfterFunc(quiet, func() { fmt.Fprintln(a.stderr, what) })
	return func() { t.Stop() }
}

func (a *app) detach(tree *cgroup.Tree, where conn.Options) error {
	nothing := true
	err := conn.Detach(where)
	switch {
	case err == nil:
		nothing = false
		fmt.Fprintf(a.stdout, "removed the programs from %s and the pins in %s\n", where.CgroupRoot, filepath.Join(where.BPFFS, "bulkhead"))
	case !errors.Is(err, conn.ErrNotLoaded):
		return err
	}

	before, err := ours(tree)
	if err != nil {
		return err
	}
	left, conds, err := tree.Remove()
	if err != nil {
		return err
	}
	after, err := ours(tree)
	if err != nil {
		return err
	}
	for _, path := range before {
		if !slices.Contains(after, path) {
			nothing = false
			fmt.Fprintf(a.stdout, "removed cgroup %s\n", path)
		}
	}
	if len(left) > 0 {
		nothing = false
		if err := a.printLeft(tree, left); err != nil {
			return err
		}
	}
	if nothing {
		fmt.Fprintln(a.stdout, "nothing to remove")
	}
	if len(conds) > 0 {
		var failed []error
		for _, c := range conds {
			failed = append(failed, fmt.Errorf("%s: %s", c.Reason, c.Message))
		}
		return fmt.Errorf("not everything could be put back:\n%w", errors.Join(failed...))
	}
	return nil
}

// namedProcesses is how many processes of a slice that stays are named.
const namedProcesses = 5

// printLeft says which slices stay because of whom, and what to do. Those around
// them that have nobody else stay too, and go without saying.
func (a *app) printLeft(tree *cgroup.Tree, left []cgroup.Left) error {
	seen := map[string]bool{}
	for _, l := range left { // children first
		around := slices.ContainsFunc(left, func(o cgroup.Left) bool { return strings.HasPrefix(o.Path, l.Path+"/") })
		who, n, err := inhabitants(tree, l.Path, seen)
		if err != nil {
			return err
		}
		if around && n == 0 {
			continue
		}
		text := plural(n, "process") + " in it"
		if len(who) > 0 {
			text += ": " + strings.Join(who, ", ")
		}
		if more := n - len(who); more > 0 && len(who) > 0 {
			text += fmt.Sprintf(" and %d more", more)
		}
		if n == 0 {
			text = "others have made cgroups in it, or a process has just ended"
		}
		fmt.Fprintf(a.stdout, "left cgroup %s: %s\n", l.Path, text)
	}
	_, err := fmt.Fprintln(a.stdout, "what runs there goes on without limits, and its slices have the kernel's default values: end it, then run bulkhead detach again")
	return err
}

// inhabitants names some of the processes in a cgroup and below, but for cgroups
// in seen, to which it adds, and counts them all.
func inhabitants(tree *cgroup.Tree, path string, seen map[string]bool) (who []string, n int, err error) {
	all, err := tree.Walk()
	if err != nil {
		return nil, 0, err
	}
	for _, c := range all {
		if c.Path != path && !strings.HasPrefix(c.Path, path+"/") || seen[c.Path] {
			continue
		}
		seen[c.Path] = true
		// It may be gone by now, or threaded: then its processes are listed above it.
		text, err := os.ReadFile(filepath.Join(tree.Dir, c.Path, "cgroup.procs"))
		if err != nil {
			continue
		}
		for _, pid := range strings.Fields(string(text)) {
			n++
			comm, err := os.ReadFile(filepath.Join("/proc", pid, "comm"))
			if err != nil || len(who) == namedProcesses {
				continue // gone, or of another pid namespace
			}
			who = append(who, fmt.Sprintf("%s (%s)", pid, strings.TrimSuffix(string(comm), "\n")))
		}
	}
	return who, n, nil
}

// ours are the paths of the cgroups below our parent slice, and that itself.
func ours(tree *cgroup.Tree) ([]string, error) {
	all, err := tree.Walk()
	if err != nil {
		return nil, err
	}
	var out []string
	for _, c := range all {
		if policy.IsOurs(c.Path) {
			out = append(out, c.Path)
		}
	}
	return out, nil
}
