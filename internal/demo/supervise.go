package demo

import (
	"bufio"
	"context"
	"embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// privateDir is where the supervisor mounts what only its own mount
// namespace sees. The kernel makes this directory (kernel/bpf/inode.c), so
// the demo makes none, and the node's pins are out of its sight.
const privateDir = "/sys/fs/bpf"

// How long a part may take before the demo gives up on it.
const (
	readyTimeout = 60 * time.Second
	floodTimeout = 60 * time.Second
	stopTimeout  = 10 * time.Second
)

// scripts are the workloads, ordinary programs for python3 and node.
//
//go:embed workloads
var scripts embed.FS

// supervise is the demo-supervisor command. What it has to say, errors too, it
// writes to out as events, so it returns only the errors of that.
func supervise(ctx context.Context, args []string, in io.Reader, out io.Writer) error {
	// A parent-death signal follows the thread that forked, not the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()

	flags := flag.NewFlagSet(supervisorCommand, flag.ContinueOnError)
	binary := flags.String("binary", "", "the bulkhead binary")
	dir := flags.String("tree", "", "the demo's cgroup")
	scenarioArg := flags.String("scenario", "", "JSON")
	if err := flags.Parse(args); err != nil {
		return err
	}
	s := &supervisor{binary: *binary, tree: tree{dir: *dir}, events: json.NewEncoder(out), env: childEnv(os.Environ())}
	if err := json.Unmarshal([]byte(*scenarioArg), &s.scenario); err != nil {
		return fmt.Errorf("read --scenario: %w", err)
	}
	s.ctx, s.fail = context.WithCancelCause(ctx)
	err := s.run(in)
	s.killAll()
	if err != nil {
		return s.events.Encode(event{Error: err.Error()})
	}
	return s.events.Encode(event{Done: true})
}

// supervisor owns the processes of the demo. Its methods run on one goroutine,
// on one thread.
type supervisor struct {
	binary   string
	tree     tree
	scenario scenario
	events   *json.Encoder
	env      []string // of its children
	children []*child

	// ctx ends with the demo; its cause is what ended it. fail ends it.
	ctx  context.Context
	fail context.CancelCauseFunc
}

func (s *supervisor) run(in io.Reader) error {
	if err := mountPrivate(); err != nil {
		return err
	}
	if err := writeScripts(); err != nil {
		return err
	}
	if err := loopbackUp(); err != nil {
		return err
	}
	s.tree.goFirst()
	for _, st := range s.scenario.Runs {
		if err := s.step(st); err != nil {
			return fmt.Errorf("%s, %s: %w", st.Experiment, st.Run, err)
		}
	}
	if s.scenario.Keep {
		return s.keep(in)
	}
	return nil
}

// step does one run of one experiment and reports what it measured.
func (s *supervisor) step(st step) error {
	if err := s.events.Encode(event{Step: &st}); err != nil {
		return err
	}
	e := s.scenario.find(st.Experiment)
	if e == nil {
		return errors.New("no such experiment")
	}
	g := &stage{supervisor: s, step: st}
	if st.Run == with {
		if err := s.startAgent(g, e.about().policy); err != nil {
			return err
		}
	}
	m := measurement{Experiment: st.Experiment, Run: st.Run}
	var err error
	if m.Sample, err = e.run(g); err != nil {
		return err
	}
	if err := g.end(); err != nil {
		return err
	}
	return s.events.Encode(event{Measured: &m})
}

// keep runs the flood with bulkheads and without measuring until a line
// comes in.
func (s *supervisor) keep(in io.Reader) error {
	g := &stage{supervisor: s, step: step{"flood", with}}
	if err := s.events.Encode(event{Step: &g.step}); err != nil {
		return err
	}
	if err := s.startAgent(g, s.scenario.Flood.about().policy); err != nil {
		return err
	}
	lines := make(chan struct{})
	go func() {
		if bufio.NewScanner(in).Scan() {
			close(lines)
		}
	}()
	begun := func() error {
		pins, err := filepath.Glob(filepath.Join(privateDir, "bpffs", "bulkhead", "v*"))
		if err != nil || len(pins) != 1 {
			return fmt.Errorf("the agent's pins: %q, %v", pins, err)
		}
		return s.events.Encode(event{Kept: &kept{PID: os.Getpid(), Node: s.tree.node(), Flags: s.agentFlags(), Pins: pins[0]}})
	}
	if err := s.scenario.Flood.stay(g, begun, lines); err != nil {
		return err
	}
	return g.end()
}

// agentFlags are the flags that every bulkhead command of the demo takes.
func (s *supervisor) agentFlags() []string {
	return []string{
		"--cgroup-root", s.tree.node(),
		"--bpffs", filepath.Join(privateDir, "bpffs"),
		"--admin-socket", filepath.Join(privateDir, "agent.sock"),
	}
}

// startAgent starts the agent of a stage with a policy and returns when it is
// ready.
func (s *supervisor) startAgent(g *stage, policyText string) error {
	policy := filepath.Join(privateDir, "policy.yaml")
	ready := filepath.Join(privateDir, "ready")
	if err := os.Remove(ready); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.WriteFile(policy, []byte(policyText), 0o600); err != nil {
		return err
	}
	agent, err := s.start(program{name: "the agent", cgroup: s.tree.agent(), argv: append([]string{s.binary, "agent",
		"--policy", policy, "--ready-file", ready, "--web.listen-address", "127.0.0.1:9779"}, s.agentFlags()...)})
	if err != nil {
		return err
	}
	if err := s.awaitFile(agent, ready, readyTimeout); err != nil {
		return err
	}
	s.needs(agent)
	g.agent = agent
	return nil
}

// stopAgent ends the agent and takes its programs and slices away again.
func (s *supervisor) stopAgent(agent *child) error {
	agent.stopped.Store(true)
	if err := agent.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return s.why(fmt.Errorf("stop the agent: %w", err))
	}
	if err := s.await(agent, stopTimeout); err != nil {
		return err
	}
	detach, err := s.start(program{name: "bulkhead detach", cgroup: s.tree.agent(),
		argv: append([]string{s.binary, "detach"}, s.agentFlags()...)})
	if err != nil {
		return err
	}
	return s.await(detach, stopTimeout)
}

// scriptPath is where a workload's script is.
func scriptPath(name string) string { return filepath.Join(privateDir, "workloads", name) }

// writeScripts writes the workloads' scripts to the private directory.
func writeScripts() error { return os.CopyFS(privateDir, scripts) }

// mountPrivate mounts a tmpfs for the demo's files and in it a bpffs for the
// agent's pins. Both end with the mount namespace.
func mountPrivate() error {
	// 0711: PostgreSQL's user must come to its directory.
	if err := unix.Mount("bulkhead-demo", privateDir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0711"); err != nil {
		if errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("mount a tmpfs at %s: %w: this needs a kernel with CONFIG_BPF_SYSCALL, and sysfs at /sys", privateDir, err)
		}
		return fmt.Errorf("mount a tmpfs at %s: %w", privateDir, err)
	}
	bpffs := filepath.Join(privateDir, "bpffs")
	if err := os.Mkdir(bpffs, 0o700); err != nil {
		return err
	}
	if err := unix.Mount("bpf", bpffs, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return fmt.Errorf("mount a bpffs: %w: in a container, run it privileged", err)
	}
	// PostgreSQL keeps shared memory there, which must not outlive it.
	err := unix.Mount("bulkhead-demo", "/dev/shm", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=1777")
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("mount a tmpfs at /dev/shm: %w", err)
	}
	return nil
}

// loopbackUp turns on lo, which a new network namespace has but down.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("turn on the loopback interface: %w", err)
	}
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq("lo")
	if err == nil {
		ifr.SetUint16(unix.IFF_UP)
		err = unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr)
	}
	if err != nil {
		return fmt.Errorf("turn on the loopback interface: %w", err)
	}
	return nil
}
