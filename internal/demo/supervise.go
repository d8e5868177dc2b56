package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// providerAddr is in the demo's own network namespace.
	providerAddr = "127.0.0.1:8000"
	// privateDir is where the supervisor mounts what only its own mount
	// namespace sees. The kernel makes this directory (kernel/bpf/inode.c), so
	// the demo makes none, and the node's pins are out of its sight.
	privateDir = "/sys/fs/bpf"
)

// How long a part may take before the demo gives up on it.
const (
	readyTimeout = 60 * time.Second
	floodTimeout = 60 * time.Second
	stopTimeout  = 10 * time.Second
)

// policyText is the policy of the last phase.
func (sc scenario) policyText() string {
	host, port, _ := strings.Cut(providerAddr, ":")
	return fmt.Sprintf(`apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers:
  local: {cidrs: [%s/32], ports: [%s], limits: {connections: %d}}
features:
  chat:
    class: realtime
    providers: {local: {connections: %d}}
  batch:
    class: batch
    providers: {local: {connections: %d}}
`, host, port, sc.ServeAtOnce, sc.ChatLimit, sc.BatchLimit)
}

// supervise is the demo-supervisor command. What it has to say, errors too, it
// writes to out as events, so it returns only the errors of that.
func supervise(ctx context.Context, args []string, out io.Writer) error {
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
	s := &supervisor{binary: *binary, tree: tree{dir: *dir}, events: json.NewEncoder(out)}
	if err := json.Unmarshal([]byte(*scenarioArg), &s.scenario); err != nil {
		return fmt.Errorf("read --scenario: %w", err)
	}
	s.ctx, s.fail = context.WithCancelCause(ctx)
	err := s.run()
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
	children []*child

	// ctx ends with the demo; its cause is what ended it. fail ends it.
	ctx  context.Context
	fail context.CancelCauseFunc
}

func (s *supervisor) run() error {
	if err := mountPrivate(); err != nil {
		return err
	}
	if err := loopbackUp(); err != nil {
		return err
	}
	s.tree.goFirst()
	provider, err := s.start("the provider", s.tree.supervisor(), providerCommand,
		"--listen", providerAddr, "--serve-at-once", fmt.Sprint(s.scenario.ServeAtOnce))
	if err != nil {
		return err
	}
	if err := s.read(provider, &struct{}{}, readyTimeout); err != nil {
		return err
	}
	s.needs(provider)
	for _, p := range s.scenario.Phases {
		if err := s.phase(p); err != nil {
			return fmt.Errorf("phase %q: %w", p, err)
		}
	}
	return nil
}

// phase runs one phase and reports what it measured.
func (s *supervisor) phase(p phase) (err error) {
	if err := s.events.Encode(event{Phase: p}); err != nil {
		return err
	}
	workload := func(_ string, args ...string) []string { return args }
	if p == floodLimited {
		a := s.agentFlags()
		stop, err := s.startAgent(a)
		if err != nil {
			return err
		}
		defer func() {
			if err == nil {
				err = stop()
			}
		}()
		workload = func(feature string, args ...string) []string {
			argv := append([]string{"exec", "--feature", feature}, a...)
			return append(append(argv, "--", s.binary), args...)
		}
	}

	var batch *child
	if p != chatAlone {
		batch, err = s.start("batch", s.tree.apps(), workload("batch", batchCommand,
			"--url", "http://"+providerAddr, "--workers", fmt.Sprint(s.scenario.Workers),
			"--work", s.scenario.BatchWork.String())...)
		if err != nil {
			return err
		}
		if err := s.read(batch, &struct{}{}, floodTimeout); err != nil {
			return err
		}
	}

	m := measurement{Phase: p}
	chat, err := s.start("chat", s.tree.apps(), workload("chat", chatCommand,
		"--url", "http://"+providerAddr, "--rate", fmt.Sprint(s.scenario.ChatRate),
		"--calls", fmt.Sprint(int(s.scenario.ChatRate*s.scenario.Seconds)),
		"--work", s.scenario.ChatWork.String())...)
	if err != nil {
		return err
	}
	if batch != nil {
		if _, err := io.WriteString(batch.stdin, measureMark+"\n"); err != nil {
			return s.why(fmt.Errorf("tell batch to measure: %w", err))
		}
	}
	if err := s.events.Encode(event{Phase: p, Measuring: true}); err != nil {
		return err
	}
	scheduled := time.Duration(s.scenario.Seconds * float64(time.Second))
	if err := s.read(chat, &m.Chat, scheduled+callTimeout+stopTimeout); err != nil {
		return err
	}
	if err := s.await(chat, stopTimeout); err != nil {
		return err
	}
	if batch != nil {
		// The end of its input tells batch to finish the jobs it is at.
		batch.stdin.Close()
		m.Batch = &batchReport{}
		if err := s.read(batch, m.Batch, callTimeout+stopTimeout); err != nil {
			return err
		}
		if err := s.await(batch, stopTimeout); err != nil {
			return err
		}
	}
	return s.events.Encode(event{Measured: &m})
}

// agentFlags are the flags that every bulkhead command of the demo takes.
func (s *supervisor) agentFlags() []string {
	return []string{
		"--cgroup-root", s.tree.node(),
		"--bpffs", filepath.Join(privateDir, "bpffs"),
		"--admin-socket", filepath.Join(privateDir, "agent.sock"),
	}
}

// startAgent starts the agent with the demo's policy and returns when it is
// ready. stop ends it and takes its programs and slices away again.
func (s *supervisor) startAgent(common []string) (stop func() error, err error) {
	policy := filepath.Join(privateDir, "policy.yaml")
	ready := filepath.Join(privateDir, "ready")
	if err := os.WriteFile(policy, []byte(s.scenario.policyText()), 0o600); err != nil {
		return nil, err
	}
	agent, err := s.start("the agent", s.tree.agent(), append([]string{"agent",
		"--policy", policy, "--ready-file", ready, "--web.listen-address", "127.0.0.1:9779"}, common...)...)
	if err != nil {
		return nil, err
	}
	if err := s.awaitFile(agent, ready, readyTimeout); err != nil {
		return nil, err
	}
	s.needs(agent)
	return func() error {
		agent.stopped.Store(true)
		if err := agent.cmd.Process.Signal(syscall.SIGTERM); err != nil {
			return s.why(fmt.Errorf("stop the agent: %w", err))
		}
		if err := s.await(agent, stopTimeout); err != nil {
			return err
		}
		detach, err := s.start("bulkhead detach", s.tree.agent(), append([]string{"detach"}, common...)...)
		if err != nil {
			return err
		}
		return s.await(detach, stopTimeout)
	}, nil
}

// child is one process of the demo.
type child struct {
	name   string
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	stdout *json.Decoder
	stderr tail
	done   chan struct{} // closed when it has ended, with err set
	err    error
	// stopped: its end is what the supervisor wants.
	stopped atomic.Bool
}

// start starts the binary in a cgroup. It dies with the supervisor.
func (s *supervisor) start(name, cgroup string, args ...string) (*child, error) {
	if s.ctx.Err() != nil {
		return nil, context.Cause(s.ctx)
	}
	group, err := os.Open(cgroup)
	if err != nil {
		return nil, err
	}
	defer group.Close()
	// A pipe of our own: Wait closes the one of StdoutPipe before it is read.
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer w.Close()

	c := &child{name: name, cmd: exec.Command(s.binary, args...), stdout: json.NewDecoder(r), done: make(chan struct{})}
	c.cmd.Stdout = w
	c.cmd.Stderr = &c.stderr
	c.cmd.WaitDelay = time.Second
	c.cmd.SysProcAttr = &syscall.SysProcAttr{
		Pdeathsig:   syscall.SIGKILL,
		UseCgroupFD: true,
		CgroupFD:    int(group.Fd()),
	}
	if c.stdin, err = c.cmd.StdinPipe(); err == nil {
		err = c.cmd.Start()
	}
	if err != nil {
		r.Close()
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	s.children = append(s.children, c)
	go func() {
		c.err = c.cmd.Wait()
		close(c.done)
	}()
	return c, nil
}

// needs ends the demo if c ends before it is stopped.
func (s *supervisor) needs(c *child) {
	go func() {
		<-c.done
		if !c.stopped.Load() {
			s.fail(c.ended())
		}
	}()
}

// killAll kills the children and waits for them.
func (s *supervisor) killAll() {
	for _, c := range s.children {
		c.stopped.Store(true)
		// An error means that it has ended already.
		_ = c.cmd.Process.Kill()
	}
	for _, c := range s.children {
		<-c.done
	}
}

// read decodes the next JSON value of c's output into v.
func (s *supervisor) read(c *child, v any, timeout time.Duration) error {
	got := make(chan error, 1)
	go func() { got <- c.stdout.Decode(v) }()
	select {
	case err := <-got:
		if err == nil {
			return nil
		}
		// The end of the output comes with the end of the process, and that
		// says more.
		if err := s.await(c, stopTimeout); err != nil {
			return err
		}
		return fmt.Errorf("%s ended without a report: %w", c.name, err)
	case <-s.ctx.Done():
		return context.Cause(s.ctx)
	case <-time.After(timeout):
		return c.late(timeout)
	}
}

// await waits for c to end, and well.
func (s *supervisor) await(c *child, timeout time.Duration) error {
	select {
	case <-c.done:
		if c.err != nil {
			return s.why(c.ended())
		}
		return nil
	case <-s.ctx.Done():
		return context.Cause(s.ctx)
	case <-time.After(timeout):
		return c.late(timeout)
	}
}

// awaitFile waits for c to make a file.
func (s *supervisor) awaitFile(c *child, path string, timeout time.Duration) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	late := time.After(timeout)
	for {
		if _, err := os.Stat(path); err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-c.done:
			return s.why(c.ended())
		case <-s.ctx.Done():
			return context.Cause(s.ctx)
		case <-late:
			return c.late(timeout)
		}
	}
}

// why returns what ended the demo, if that was first, else err.
func (s *supervisor) why(err error) error {
	if cause := context.Cause(s.ctx); cause != nil {
		return cause
	}
	return err
}

// ended says how c ended, with the end of what it wrote to stderr. Only after
// done.
func (c *child) ended() error {
	how := "exit status 0"
	if c.err != nil {
		how = c.err.Error()
	}
	return c.with(fmt.Errorf("%s ended early: %s", c.name, how))
}

func (c *child) late(after time.Duration) error {
	return c.with(fmt.Errorf("%s was not done within %v", c.name, after))
}

func (c *child) with(err error) error {
	if text := c.stderr.String(); text != "" {
		return fmt.Errorf("%w; its stderr:\n%s", err, text)
	}
	return err
}

// tailSize is how much of a child's stderr is kept, in bytes.
const tailSize = 4096

// tail keeps the end of what is written to it.
type tail struct {
	mu  sync.Mutex
	buf []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, p...)
	t.buf = t.buf[max(0, len(t.buf)-tailSize):]
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.TrimSpace(t.buf))
}

// mountPrivate mounts a tmpfs for the demo's files and in it a bpffs for the
// agent's pins. Both end with the mount namespace.
func mountPrivate() error {
	if err := unix.Mount("bulkhead-demo", privateDir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
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
