package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// program is a process to start.
type program struct {
	name string // for errors
	argv []string
	// cgroup is the directory it starts in.
	cgroup string
	// first: it goes before everything else on the processor. For what stands
	// for another machine or measures, and works little.
	first bool
	// oneCPU keeps it and its children on one processor.
	oneCPU bool
	// user runs it; nil is root.
	user *syscall.Credential
}

// child is one process of the demo.
type child struct {
	name   string
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	output *os.File
	stdout *json.Decoder // of output
	stderr tail
	done   chan struct{} // closed when it has ended, with err set
	err    error
	// stopped: its end is what the supervisor wants.
	stopped atomic.Bool
}

// start starts a program. It dies with the supervisor.
func (s *supervisor) start(p program) (*child, error) {
	if s.ctx.Err() != nil {
		return nil, context.Cause(s.ctx)
	}
	group, err := os.Open(p.cgroup)
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

	c := &child{name: p.name, cmd: exec.Command(p.argv[0], p.argv[1:]...), output: r, stdout: json.NewDecoder(r), done: make(chan struct{})}
	c.cmd.Env = s.env
	c.cmd.Dir = "/"
	c.cmd.Stdout = w
	c.cmd.Stderr = &c.stderr
	c.cmd.WaitDelay = time.Second
	c.cmd.SysProcAttr = &syscall.SysProcAttr{
		Pdeathsig:   syscall.SIGKILL,
		UseCgroupFD: true,
		CgroupFD:    int(group.Fd()),
		Credential:  p.user,
	}
	if c.stdin, err = c.cmd.StdinPipe(); err == nil {
		err = p.as(c.cmd.Start)
	}
	if err != nil {
		r.Close()
		return nil, fmt.Errorf("start %s: %w", p.name, err)
	}
	s.children = append(s.children, c)
	go func() {
		c.err = c.cmd.Wait()
		close(c.done)
	}()
	return c, nil
}

// as forks with what the program is to inherit of this thread, which the
// supervisor is locked to: sched(7), sched_setaffinity(2).
func (p program) as(fork func() error) error {
	if p.first {
		// Kernels and containers that refuse it show the same, with more noise.
		fifo := &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1}
		if unix.SchedSetAttr(0, fifo, 0) == nil {
			defer unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_NORMAL}, 0)
		}
	}
	if p.oneCPU {
		var all, one unix.CPUSet
		if err := unix.SchedGetaffinity(0, &all); err != nil {
			return err
		}
		for cpu := 0; one.Count() == 0; cpu++ {
			if all.IsSet(cpu) {
				one.Set(cpu)
			}
		}
		if err := unix.SchedSetaffinity(0, &one); err != nil {
			return err
		}
		defer unix.SchedSetaffinity(0, &all)
	}
	return fork()
}

// childEnv is what the demo's processes get of the environment env: nothing
// that would send an ordinary client or psql elsewhere.
func childEnv(env []string) []string {
	var kept []string
	for _, e := range env {
		name, _, _ := strings.Cut(e, "=")
		if strings.HasPrefix(name, "PG") || strings.HasPrefix(name, "PYTHON") || strings.HasPrefix(name, "NODE_") ||
			strings.HasSuffix(strings.ToLower(name), "_proxy") || name == "LC_ALL" || name == "TMPDIR" {
			continue
		}
		kept = append(kept, e)
	}
	return append(kept, "no_proxy=*", "NO_PROXY=*", "LC_ALL=C", "TMPDIR="+privateDir)
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
	return s.awaitThat(c, timeout, func() bool {
		_, err := os.Stat(path)
		return err == nil
	})
}

// awaitText waits for c to write text to stderr.
func (s *supervisor) awaitText(c *child, text string, timeout time.Duration) error {
	return s.awaitThat(c, timeout, func() bool { return strings.Contains(c.stderr.String(), text) })
}

// awaitThat waits for c to bring something about.
func (s *supervisor) awaitThat(c *child, timeout time.Duration, holds func() bool) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	late := time.After(timeout)
	for !holds() {
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
	return nil
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
