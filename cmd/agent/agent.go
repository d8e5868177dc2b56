package main

import (
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"bulkhead/internal/agent"
	"bulkhead/pkg/conn"
)

func (a *app) agentCommand() *cobra.Command {
	var o agent.Options
	cmd := &cobra.Command{
		Use:   "agent --policy FILE|DIR",
		Short: "bring a policy into force and keep it there",
		Long: `Loads the kernel programs, or takes over those that an earlier agent left in
force with all their counts, brings the policy into force, and stays: it serves
metrics, reloads the policy when its files change, adopts cgroups that appear,
and logs refusals, at most one a second on each route.

A reload is a transaction: a bad, empty or half-written policy changes nothing,
and the reason is logged with its place. SIGHUP and bulkhead reload reload at
once. A policy that is broken at the start is printed with every error, and
nothing is changed.

SIGTERM and SIGINT stop the agent and leave the limits in force, as does any
crash. bulkhead detach removes them.

The ready file is written once limits are in force and metrics can be scraped,
and removed at the end. Logs go to stderr: JSON, or text on a terminal.`,
		Example: `  bulkhead agent --policy /etc/bulkhead/policy.yaml
  bulkhead agent --policy /etc/bulkhead --web.listen-address 0.0.0.0:9779 --web.config.file web.yaml`,
		Args: noArgs,
	}
	flags := cmd.Flags()
	flags.StringVar(&o.Policy, "policy", "", "policy `FILE`, or a directory of *.yaml (required)")
	flags.StringArrayVar(&o.Listen, "web.listen-address", []string{"127.0.0.1:9779"}, "`ADDR` to serve metrics on; may be given several times")
	flags.StringVar(&o.WebConfig, "web.config.file", "", "`FILE` with TLS and users for metrics, as in the Prometheus exporter toolkit")
	flags.StringVar(&o.ReadyFile, "ready-file", "", "`FILE` to write when ready")
	flags.Uint32Var(&o.MaxConnections, "max-connections", conn.DefaultMaxSlots,
		"`N` open connections of all features together that there is room to count, 1024 to 4194304; 16 bytes of kernel memory each, and up to 256 more while it is open")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if o.Policy == "" {
			return wrongUse("--policy is missing")
		}
		if o.MaxConnections < conn.MinMaxSlots || o.MaxConnections > conn.MaxMaxSlots {
			return wrongUse("--max-connections %d: give %d to %d", o.MaxConnections, conn.MinMaxSlots, conn.MaxMaxSlots)
		}
		// Caught from the start: a SIGHUP that comes early must not end the agent.
		hangup := make(chan os.Signal, 1)
		signal.Notify(hangup, syscall.SIGHUP)
		defer signal.Stop(hangup)
		ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGTERM, syscall.SIGINT)
		defer stop()

		o.CgroupRoot, o.BPFFS, o.AdminSocket = a.cgroupRoot, a.bpffs, a.adminSocket
		var err error
		if o.Runtimes, err = a.sockets(); err != nil {
			return err
		}
		o.Hangup, o.Build, o.Log = hangup, build(), a.logger()
		return agent.Run(ctx, o)
	}
	return cmd
}

// logger logs to stderr, as text if that is a terminal.
func (a *app) logger() *slog.Logger {
	if f, ok := a.stderr.(*os.File); ok && terminal(f.Fd()) {
		return slog.New(slog.NewTextHandler(f, nil))
	}
	return slog.New(slog.NewJSONHandler(a.stderr, nil))
}
