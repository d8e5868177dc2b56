package main

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"bulkhead/internal/agent"
	"bulkhead/pkg/cgroup"
	"bulkhead/pkg/conn"
	"bulkhead/pkg/policy"
)

// connection is one row of conns -o json.
type connection struct {
	PID        uint32         `json:"pid"`
	Command    string         `json:"command"`
	Feature    string         `json:"feature"`
	Tenant     string         `json:"tenant"`
	Provider   string         `json:"provider"`
	Address    netip.AddrPort `json:"address"`
	Proto      string         `json:"proto"`
	AgeSeconds float64        `json:"age_seconds"`
	State      string         `json:"state"`    // "" if the socket could not be looked at
	TxBytes    *uint64        `json:"tx_bytes"` // null if the socket could not be looked at
	RxBytes    *uint64        `json:"rx_bytes"`
	Bulkheads  []policy.Key   `json:"bulkheads"`
	// Container is RUNTIME/NAME of the one that its process is in, if container matches it; known
	// while the agent runs and the process does.
	Container string `json:"container,omitempty"`
}

func (a *app) connsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "conns",
		Short: "list the connections that hold a slot",
		Long: `Lists every connection that is counted now, oldest first: who made it, from which
compartment to which provider, where to, for how long, and how many IP bytes,
headers included, it has moved. The process is the one that connected; it may
have passed the socket on, or be gone. While the agent runs it says in which container
the process is, of those that the policy matches. Works while the agent is down. Needs
root.

A connection that was open before its limits were in force was found by the agent:
its process is the one that held it then, or 0 if none could be found, and its age
counts from that moment.`,
		Example: `  bulkhead conns
  bulkhead conns -o json | jq 'group_by(.feature) | map({(.[0].feature): length}) | add'`,
		Args: noArgs,
	}
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		tree, where, err := a.instance()
		if err != nil {
			return err
		}
		snap, err := snapshot(cmd.Context(), where)
		if err != nil {
			return err
		}
		list := connections(snap)
		// Without an agent nobody knows of containers.
		if info, err := a.client().Info(cmd.Context()); err == nil && len(info.Containers) > 0 {
			if err := inContainers(tree, info.Containers, list); err != nil {
				return err
			}
		}
		if out.json() {
			return writeJSON(a.stdout, list)
		}
		return table(a.stdout, connectionRows(list)...)
	}
	return cmd
}

func connections(snap *conn.Snapshot) []connection {
	out := []connection{}
	for _, c := range snap.Connections {
		row := connection{
			PID: c.PID, Command: c.Comm, Feature: c.Feature, Tenant: c.Tenant, Provider: c.Provider,
			Address: c.Remote, Proto: c.Proto.String(), AgeSeconds: c.Age.Seconds(), State: c.State, Bulkheads: c.Bulkheads,
		}
		if c.State != "" {
			row.TxBytes, row.RxBytes = &c.TxBytes, &c.RxBytes
		}
		out = append(out, row)
	}
	return out
}

// inContainers says of each connection in which container its process is.
func inContainers(tree *cgroup.Tree, known []agent.AdoptedContainer, list []connection) error {
	all, err := tree.Walk()
	if err != nil {
		return err
	}
	names := map[uint64]string{}
	for _, k := range known {
		names[k.CgroupID] = k.Runtime + "/" + k.Name
	}
	names = cgroup.Inherit(all, names)
	type process struct {
		container string
		age       time.Duration
	}
	processes := map[uint32]process{}
	for i := range list {
		c := &list[i]
		p, seen := processes[c.PID]
		if !seen {
			if g, err := tree.Of(int(c.PID)); err == nil && names[g.ID] != "" {
				if age, err := cgroup.Age(int(c.PID)); err == nil {
					p = process{names[g.ID], age}
				}
			}
			processes[c.PID] = p
		}
		// One that is younger than the connection is another, which has its pid by now.
		if p.age.Seconds() >= c.AgeSeconds {
			c.Container = p.container
		}
	}
	return nil
}

func connectionRows(list []connection) [][]string {
	rows := [][]string{{"PID", "COMMAND", "FEATURE", "TENANT", "PROVIDER", "ADDRESS", "PROTO", "AGE", "STATE", "SENT", "RECEIVED"}}
	// Last, and only where there are any, so that the others stay where they are.
	contained := slices.ContainsFunc(list, func(c connection) bool { return c.Container != "" })
	if contained {
		rows[0] = append(rows[0], "CONTAINER")
	}
	for _, c := range list {
		tx, rx := "-", "-"
		if c.TxBytes != nil {
			tx, rx = size(*c.TxBytes), size(*c.RxBytes)
		}
		row := []string{fmt.Sprint(c.PID), dash(c.Command), c.Feature, dash(c.Tenant), c.Provider,
			c.Address.String(), c.Proto, age(time.Duration(c.AgeSeconds * float64(time.Second))), dash(c.State), tx, rx}
		if contained {
			row = append(row, dash(c.Container))
		}
		rows = append(rows, row)
	}
	return rows
}
