package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"bulkhead/internal/agent"
	"bulkhead/pkg/cgroup"
	"bulkhead/pkg/conn"
)

// finding is one row of doctor.
type finding struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Fatal  bool   `json:"fatal"` // without it no connection can be limited
	Detail string `json:"detail"`
	Cost   string `json:"cost,omitempty"`
	Cure   string `json:"cure,omitempty"`
}

func (a *app) doctorCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "say what this node allows, and what each shortfall costs",
		Long: `Looks at the kernel, its mounts and our capabilities, loads the kernel programs
once to see that they verify (nothing is attached), and looks at the CPU and
memory controllers. Each shortfall comes with its cost and its cure. Runs
without root too, and says what it could not look at.

Exit codes: 0 connections can be limited here (there may be lesser shortfalls),
1 they cannot.`,
		Example: `  bulkhead doctor
  bulkhead doctor -o json | jq '.[] | select(.ok | not)'`,
		Args: noArgs,
	}
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		findings := a.examine(cmd.Context())
		var err error
		if out.json() {
			err = writeJSON(a.stdout, findings)
		} else {
			err = a.printFindings(findings)
		}
		if err != nil {
			return err
		}
		for _, f := range findings {
			if f.Fatal && !f.OK {
				return &exitError{code: exitFailed}
			}
		}
		return nil
	}
	return cmd
}

func (a *app) examine(ctx context.Context) []finding {
	var out []finding
	tree, err := cgroup.Find(a.cgroupRoot)
	where := conn.Options{BPFFS: a.bpffs, CgroupRoot: a.cgroupRoot}
	if err == nil {
		where.CgroupRoot = tree.Dir
	}
	for _, f := range conn.Probe(ctx, where) {
		row := finding{Name: f.Name, OK: f.OK, Fatal: f.Fatal, Detail: f.Detail, Cost: f.Cost, Cure: f.Cure}
		if f.Name == "cgroup2" && err != nil {
			// It knows what there is and why it will not do.
			row.OK, row.Detail = false, err.Error()
		}
		out = append(out, row)
	}
	if slices.ContainsFunc(out, func(f finding) bool { return f.Name == "bpffs" && f.OK }) {
		out = append(out, persistence(a.bpffs))
	}
	if f, ok := room(where); ok {
		out = append(out, f)
	}
	if tree != nil {
		out = append(out, controllerFindings(tree)...)
	}
	return append(out, a.neighbours(ctx, where)...)
}

// persistence says whether the pins outlive the mount namespace that we are in.
func persistence(bpffs string) finding {
	f := finding{Name: "bpffs on the host", Cost: "limits end with this mount namespace: with the container, or the unit", Cure: agent.PrivateCure}
	switch agent.PinsPersist(bpffs) {
	case agent.Persists:
		f.OK, f.Detail = true, "process 1 has it mounted too"
	case agent.Private:
		f.Detail = "only this mount namespace has it"
	default:
		f.OK, f.Detail = true, "not known: process 1 of the host is not seen from here"
	}
	return f
}

// room says whether the table of connections has had room for all; ok is false if nothing
// is in force, or it cannot be read.
func room(where conn.Options) (f finding, ok bool) {
	r, err := conn.OpenReader(where)
	if err != nil {
		return f, false
	}
	defer r.Close()
	t, err := r.Totals()
	if err != nil {
		return f, false
	}
	f = finding{Name: "connection table", OK: t.SlotsFull == 0, Detail: fmt.Sprintf("room for %d", t.SlotsMax),
		Cost: "they were let through uncounted, or refused if the policy said exhausted: refuse",
		Cure: "bulkhead detach, then start the agent with a larger --max-connections"}
	if !f.OK {
		f.Detail = fmt.Sprintf("%d connections found no room or no memory since it was made; room for %d", t.SlotsFull, t.SlotsMax)
	}
	return f, true
}

func controllerFindings(tree *cgroup.Tree) []finding {
	m := tree.Manager
	out := []finding{{Name: "cgroup manager", OK: !m.Unreachable, Detail: m.Name + ": " + m.Why,
		Cost: "each of its daemon-reloads takes CPU and memory values back; connection limits work",
		Cure: "let the agent see /run/systemd of the host (in a container: mount it)"}}
	for _, c := range []struct{ name, cost string }{
		{"cpu", "CPU weights and quotas are not set; connection limits work"},
		{"cpuset", "features have no CPUs of their own (cpus); weights and quotas are not concerned, and connection limits work"},
		{"memory", "memory limits are not set; connection limits work"},
		{"pids", "limits of processes are not set; connection limits work"},
	} {
		f := finding{Name: c.name + " controller", OK: true, Detail: "available in " + tree.Dir, Cost: c.cost,
			Cure: "boot with systemd.unified_cgroup_hierarchy=1, so that cgroup v2 has all controllers"}
		if cond, missing := tree.Shortfall(c.name); missing {
			f.OK, f.Detail = false, cond.Message
			switch cond.Reason {
			case cgroup.ReasonControllerNotEnabled:
				f.Cure = "let the cgroups above pass it on (cgroup.subtree_control)"
			case cgroup.ReasonControllerNotInKernel:
				f.Cure = "run a kernel that has it, and boot without cgroup_disable=" + c.name
			}
		}
		out = append(out, f)
	}
	return out
}

// neighbours looks at who else is there: the agent, and programs of others on
// our hooks.
func (a *app) neighbours(ctx context.Context, where conn.Options) []finding {
	running := finding{Name: "agent", Cost: "limits stay in force as they are; nothing reloads, adopts or reconciles", Cure: "bulkhead agent --policy FILE"}
	if info, err := a.client().Info(ctx); err == nil {
		running.OK, running.Detail = true, fmt.Sprintf("pid %d, version %s", info.PID, info.Version)
	} else {
		running.Detail = err.Error()
		if errors.Is(err, os.ErrPermission) {
			running.Cost, running.Cure = "unknown", "run doctor as root"
		}
	}
	others := finding{Name: "other programs", OK: true, Detail: "none on our hooks",
		Cost: "they may refuse a connect before or after bulkhead looks", Cure: "see whose they are: bpftool cgroup tree"}
	programs, err := conn.Programs(where)
	if err != nil {
		others.OK, others.Detail = false, "not seen: "+err.Error()
		if os.Geteuid() != 0 {
			others.Detail = "not seen without root"
		}
		others.Cost, others.Cure = "unknown", "run doctor as root"
	}
	var foreign []string
	for _, p := range programs {
		if !p.Ours {
			foreign = append(foreign, strings.TrimSpace(fmt.Sprintf("%s %d %s", p.Hook, p.ID, p.Name)))
		}
	}
	if len(foreign) > 0 {
		others.OK, others.Detail = false, strings.Join(foreign, ", ")
	}
	return []finding{running, others}
}

func (a *app) printFindings(findings []finding) error {
	for _, f := range findings {
		mark := "ok"
		switch {
		case !f.OK && f.Fatal:
			mark = "FAIL"
		case !f.OK:
			mark = "short"
		}
		if _, err := fmt.Fprintf(a.stdout, "%-6s %-18s %s\n", mark, f.Name, f.Detail); err != nil {
			return err
		}
		if !f.OK {
			fmt.Fprintf(a.stdout, "%25s cost: %s\n%25s cure: %s\n", "", f.Cost, "", f.Cure)
		}
	}
	return nil
}
