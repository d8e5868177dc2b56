package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"bulkhead/internal/agent"
	"bulkhead/internal/containers"
	"bulkhead/pkg/cgroup"
	"bulkhead/pkg/conn"
	"bulkhead/pkg/policy"
)

// Exit codes. plan and exec have others, see there.
const (
	exitFailed   = 1
	exitWrongUse = 2
)

func main() {
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

// app is what the commands of one run share.
type app struct {
	stdout, stderr io.Writer

	cgroupRoot  string
	bpffs       string
	adminSocket string
	runtimes    []string // --container-runtime

	// begun: the command line was right and the command has started, so that
	// an error is a failure and not wrong use.
	begun bool
}

// exitError ends the program with a code; with an err it is printed first.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// wrongUse is an error of the command line that only the command itself sees.
func wrongUse(format string, args ...any) error {
	return &exitError{exitWrongUse, fmt.Errorf(format, args...)}
}

func run(args []string, stdout, stderr io.Writer) int {
	a := &app{stdout: stdout, stderr: stderr}
	root := a.root()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteC()
	if err == nil {
		return 0
	}
	code := exitFailed
	var e *exitError
	switch {
	case errors.As(err, &e):
		code = e.code
		if e.err == nil {
			return code
		}
	case !a.begun:
		code = exitWrongUse
	}
	if code == exitWrongUse {
		switch cmd.Name() {
		case "plan": // 2 says that there are changes
			code = exitFailed
		case "exec": // 2 may be the command's own
			code = exitExec
		}
		if cmd == root {
			err = unknownCommand(root, err)
		}
		err = fmt.Errorf("%s; see %s --help", strings.Join(strings.Fields(err.Error()), " "), cmd.CommandPath())
	}
	if errors.Is(err, conn.ErrNoBPFFS) {
		err = fmt.Errorf("%w, or name one with --bpffs", err)
	}
	a.printError(err)
	return code
}

// printError prints an error, one line for each fault. Faults of a policy start
// with their place, which editors and terminals make a link of.
func (a *app) printError(err error) {
	var faults policy.Errors
	if errors.As(err, &faults) {
		fmt.Fprintln(a.stderr, faults)
		s := "s"
		if len(faults) == 1 {
			s = ""
		}
		fmt.Fprintf(a.stderr, "bulkhead: the policy has %d error%s\n", len(faults), s)
		return
	}
	for _, line := range strings.Split(err.Error(), "\n") {
		fmt.Fprintf(a.stderr, "bulkhead: %s\n", line)
	}
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "bulkhead",
		Short: "keeps one workload's flood out of another's connections and CPU",
		Long: `bulkhead gives every feature, tenant tier and provider on this node its own
bounded share of connections and CPU, for any process in any language, without
changing it. One policy says who may have how much; kernel programs refuse the
connection over a limit at once; slices keep the CPU fair.

Start with:

  bulkhead demo                          see it work here, with nothing to configure
  bulkhead doctor                        see what this node allows
  bulkhead check policy.yaml             see whether a policy is right
  bulkhead plan policy.yaml              see what it would change here
  bulkhead agent --policy policy.yaml    bring it into force

Limits stay in force when the agent stops; bulkhead detach removes them.
Exit codes: 0 done, 1 failed, 2 wrong use, where a command does not say otherwise.`,
		SilenceErrors:              true,
		SilenceUsage:               true,
		SuggestionsMinimumDistance: 2,
		PersistentPreRunE: func(*cobra.Command, []string) error {
			_, err := a.sockets()
			a.begun = true
			return err
		},
	}
	flags := root.PersistentFlags()
	flags.StringVar(&a.cgroupRoot, "cgroup-root", "", "cgroup v2 `DIR` that confines everything, programs and slices (default: the root of the hierarchy, found by type)")
	flags.StringVar(&a.bpffs, "bpffs", "/sys/fs/bpf", "bpf file system; pins go to `DIR`/bulkhead")
	flags.StringArrayVar(&a.runtimes, "container-runtime", nil, "`RUNTIME=SOCKET` of a container runtime to ask, for features that match containers: docker, podman or containerd; may be given several times, and none asks nobody (default: those of root that run, at docker=/run/docker.sock, podman=/run/podman/podman.sock, containerd=/run/containerd/containerd.sock)")
	flags.StringVar(&a.adminSocket, "admin-socket", "/run/bulkhead/agent.sock", "`PATH` of the agent's admin socket")
	root.AddCommand(
		a.agentCommand(), a.checkCommand(), a.planCommand(), a.reloadCommand(), a.execCommand(),
		a.statusCommand(), a.topCommand(), a.connsCommand(), a.explainCommand(),
		a.doctorCommand(), a.detachCommand(), a.demoCommand(), a.versionCommand(),
	)
	root.AddCommand(a.demoChildren()...)
	// Or cobra takes the flag behind --help for its value when it looks for the
	// command.
	root.InitDefaultHelpFlag()
	root.SetHelpCommand(helpCommand())
	root.SetFlagErrorFunc(flagError)
	return root
}

// instance finds the cgroup tree and says where the pins of this instance are.
func (a *app) instance() (*cgroup.Tree, conn.Options, error) {
	tree, err := cgroup.Find(a.cgroupRoot)
	if err != nil {
		return nil, conn.Options{}, err
	}
	if _, err := os.Stat(a.bpffs); err != nil {
		return nil, conn.Options{}, fmt.Errorf("--bpffs: %w (mount one: mount -t bpf bpf %s)", err, a.bpffs)
	}
	return tree, conn.Options{CgroupRoot: tree.Dir, BPFFS: a.bpffs}, nil
}

// sockets are the container runtimes to ask.
func (a *app) sockets() ([]containers.Socket, error) {
	s, err := containers.ParseSockets(a.runtimes)
	if err != nil {
		return nil, wrongUse("--container-runtime %w", err)
	}
	return s, nil
}

func (a *app) client() *agent.Client { return agent.NewClient(a.adminSocket) }
