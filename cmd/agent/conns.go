package main

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/spf13/cobra"

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
}

func (a *app) connsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "conns",
		Short: "list the connections that hold a slot",
		Long: `Lists every connection that is counted now, oldest first: who made it, from which
compartment to which provider, where to, for how long, and how many IP bytes,
headers included, it has moved. The process is the one that connected; it may
have passed the socket on, or be gone. Works while the agent is down. Needs root.

A connection that was open before its limits were in force was found by the agent:
its process is the one that held it then, or 0 if none could be found, and its age
counts from that moment.`,
		Example: `  bulkhead conns
  bulkhead conns -o json | jq 'group_by(.feature) | map({(.[0].feature): length}) | add'`,
		Args: noArgs,
	}
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		_, where, err := a.instance()
		if err != nil {
			return err
		}
		snap, err := snapshot(cmd.Context(), where)
		if err != nil {
			return err
		}
		if out.json() {
			return writeJSON(a.stdout, connections(snap))
		}
		return table(a.stdout, connectionRows(connections(snap))...)
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

func connectionRows(list []connection) [][]string {
	rows := [][]string{{"PID", "COMMAND", "FEATURE", "TENANT", "PROVIDER", "ADDRESS", "PROTO", "AGE", "STATE", "SENT", "RECEIVED"}}
	for _, c := range list {
		tx, rx := "-", "-"
		if c.TxBytes != nil {
			tx, rx = size(*c.TxBytes), size(*c.RxBytes)
		}
		rows = append(rows, []string{fmt.Sprint(c.PID), dash(c.Command), c.Feature, dash(c.Tenant), c.Provider,
			c.Address.String(), c.Proto, age(time.Duration(c.AgeSeconds * float64(time.Second))), dash(c.State), tx, rx})
	}
	return rows
}
