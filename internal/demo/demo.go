package demo

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"bulkhead/pkg/cgroup"
)

// Errors that callers tell apart.
var (
	// ErrInterrupted: a signal or the caller's context ended the demo, and it
	// has cleaned up. The exit code for it is 130.
	ErrInterrupted = errors.New("the demo was interrupted")
	// ErrNotRoot: the demo makes namespaces and cgroups, which takes root.
	ErrNotRoot = errors.New("the demo makes namespaces and cgroups of its own, which takes root: run it with sudo")
	// ErrNoSuchExperiment: Options.Only has a name that is not in Experiments.
	ErrNoSuchExperiment = errors.New("no such experiment")
	// ErrNothingShown: no experiment can be done on this node.
	ErrNothingShown = errors.New("nothing was shown")
)

// Options are the ways to run the demo. The zero value is `bulkhead demo`.
type Options struct {
	// Binary is the bulkhead binary that is started again for every part;
	// "" is the running one.
	Binary string
	// CgroupRoot is the cgroup v2 directory in which the demo makes its own
	// cgroup; "" is the root of the tree.
	CgroupRoot string
	// JSON writes the Result as JSON instead of the table.
	JSON bool
	// Stdout gets the table or the JSON, Stderr the progress line, which is
	// rewritten in place if it is a terminal. nil is the process's own.
	Stdout, Stderr io.Writer

	// Only are the names of the experiments to do; none is all.
	Only []string
	// Keep leaves the flood with bulkheads running at the end, until ENTER or a
	// signal.
	Keep bool
	// Stdin is where ENTER comes from; nil is the process's own.
	Stdin io.Reader

	// scenario replaces the demo's sizes and runs in tests.
	scenario *scenario
}

// stopGrace is how long the supervisor may take to end its processes after it
// was asked to, before they are killed.
const stopGrace = 5 * time.Second

// Run runs the demo and writes its table. It needs root. It ends early on
// SIGINT, SIGTERM, SIGHUP or when ctx is done, with ErrInterrupted; on every way
// out it has first ended its processes and removed its cgroup.
func Run(ctx context.Context, o Options) error {
	if o.Stdout == nil {
		o.Stdout = os.Stdout
	}
	if o.Stderr == nil {
		o.Stderr = os.Stderr
	}
	if o.Stdin == nil {
		o.Stdin = os.Stdin
	}
	for _, name := range o.Only {
		if !slices.Contains(Experiments(), name) {
			return fmt.Errorf("%w: %q; there are: %s", ErrNoSuchExperiment, name, strings.Join(Experiments(), ", "))
		}
	}
	if os.Geteuid() != 0 {
		return ErrNotRoot
	}
	if o.Binary == "" {
		self, err := os.Executable()
		if err != nil {
			return fmt.Errorf("find the running binary, to start it again: %w", err)
		}
		o.Binary = self
	}

	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	// A reader that went away (`bulkhead demo | head`) must not end the process
	// before it has cleaned up: with a receiver the write fails instead.
	broken := make(chan os.Signal, 1)
	signal.Notify(broken, syscall.SIGPIPE)
	defer signal.Stop(broken)

	root, err := cgroup.Find(o.CgroupRoot)
	if err != nil {
		return err
	}
	d := &demo{Options: o, root: root, begin: time.Now(), skipped: map[string]string{}}
	if err := d.choose(ctx); err != nil {
		return err
	}
	err = d.runIn(ctx)
	if ctx.Err() != nil {
		// What failed, failed because it was ended; only a clean-up that
		// failed is news.
		left := (*leftoverError)(nil)
		switch {
		case d.kept && errors.As(err, &left):
			return left
		case d.kept:
			return nil // a signal is one of the ways to end it
		case errors.As(err, &left):
			return errors.Join(ErrInterrupted, left)
		}
		return ErrInterrupted
	}
	if err != nil || d.kept {
		return err
	}
	return d.show()
}

// demo is one run of the command.
type demo struct {
	Options
	root    *cgroup.Tree
	begin   time.Time
	sc      scenario
	skipped map[string]string // experiments, and why
	rows    []measurement
	kept    bool // the result has been shown, and the flood left running
}

// choose decides what is done on this node.
func (d *demo) choose(ctx context.Context) error {
	if d.scenario != nil {
		d.sc = *d.scenario
	} else {
		d.sc = theScenario()
		d.sc.Keep = d.Keep
	}
	d.sc.Tools = findTools(ctx, debianPostgres)
	if ctx.Err() != nil {
		return ErrInterrupted
	}
	if d.sc.Keep && d.sc.Tools.why(d.sc.Flood.about()) != "" {
		return fmt.Errorf("--keep leaves the flood running: %s", d.sc.Tools.why(d.sc.Flood.about()))
	}
	names := d.Only
	if len(names) == 0 {
		names = Experiments()
	}
	if d.scenario != nil {
		return nil
	}
	var able, reasons []string
	for _, name := range names {
		a := d.sc.find(name).about()
		reason := d.sc.Tools.why(a)
		if reason == "" && a.cpu {
			if c, short := d.root.Shortfall("cpu"); short {
				reason = c.Message + "; `make demo-vm` in bulkhead's sources shows it in a virtual machine"
			}
		}
		if reason != "" {
			d.skipped[name] = reason
			reasons = append(reasons, name+": "+reason)
			continue
		}
		able = append(able, name)
	}
	if len(able) == 0 {
		return fmt.Errorf("%w:\n%s", ErrNothingShown, strings.Join(reasons, "\n"))
	}
	d.sc.Runs = d.sc.steps(able)
	return nil
}

// show writes the result.
func (d *demo) show() error {
	r := newResult(d.sc, d.rows, d.skipped, time.Since(d.begin))
	if d.JSON {
		enc := json.NewEncoder(d.Stdout)
		enc.SetIndent("", "  ")
		return enc.Encode(r)
	}
	_, err := io.WriteString(d.Stdout, r.Text(d.kept))
	return err
}

// leftoverError says what the demo could not remove.
type leftoverError struct{ err error }

func (e *leftoverError) Error() string { return "clean up after the demo: " + e.err.Error() }
func (e *leftoverError) Unwrap() error { return e.err }

// runIn makes the cgroup, runs the supervisor in it and removes it.
func (d *demo) runIn(ctx context.Context) (err error) {
	if err := sweep(d.root.Dir); err != nil {
		return err
	}
	t, err := makeTree(d.root.Dir, os.Getpid())
	if err != nil {
		return err
	}
	defer func() {
		if rerr := t.remove(); rerr != nil {
			err = errors.Join(err, &leftoverError{rerr})
		}
	}()
	return d.runSupervisor(ctx, t)
}

// runSupervisor starts the supervisor in namespaces of its own, shows its
// progress and keeps its measurements, and returns once it has ended.
func (d *demo) runSupervisor(ctx context.Context, t *tree) error {
	// A parent-death signal follows the thread that forked, not the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	arg, err := json.Marshal(d.sc)
	if err != nil {
		return err
	}
	group, err := os.Open(t.supervisor())
	if err != nil {
		return err
	}
	defer group.Close()

	cmd := exec.CommandContext(ctx, d.Binary, supervisorCommand,
		"--binary", d.Binary, "--tree", t.dir, "--scenario", string(arg))
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = stopGrace
	cmd.Stderr = d.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		// Unshare, not clone: with CLONE_NEWNS here, package syscall makes
		// mount propagation private before the exec.
		Unshareflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC,
		Pdeathsig:    syscall.SIGKILL,
		// A session of its own, so that Ctrl-C reaches only the command, which
		// ends the rest in order.
		Setsid:      true,
		UseCgroupFD: true,
		CgroupFD:    int(group.Fd()),
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		if errors.Is(err, unix.EPERM) {
			return fmt.Errorf("start %s in namespaces of its own: %w: it needs CAP_SYS_ADMIN and CAP_NET_ADMIN; in a container, run it privileged", d.Binary, err)
		}
		return fmt.Errorf("start %s in namespaces and a cgroup of its own: %w", d.Binary, err)
	}

	done, failure := d.follow(json.NewDecoder(out), in)
	if !done {
		cancel() // an error here, and the supervisor may still run
	}
	err = cmd.Wait()
	switch {
	case failure != "":
		return errors.New(failure)
	case !done && err != nil:
		return fmt.Errorf("the demo's supervisor ended early: %w", err)
	case !done:
		return errors.New("the demo's supervisor ended early")
	}
	return nil
}

// event is one line from the supervisor.
type event struct {
	// Step begins: with Measuring, its measured part.
	Step      *step `json:"step,omitempty"`
	Measuring bool  `json:"measuring,omitempty"`
	// Measured ends a step.
	Measured *measurement `json:"measured,omitempty"`
	// Kept: the flood runs until a line comes in.
	Kept *kept `json:"kept,omitempty"`
	// Done: everything is measured and taken down again.
	Done bool `json:"done,omitempty"`
	// Error ends the demo.
	Error string `json:"error,omitempty"`
}

// kept is where the flood that was left running can be looked at.
type kept struct {
	PID   int      `json:"pid"`   // a process in its namespaces
	Node  string   `json:"node"`  // the cgroup that is the node
	Flags []string `json:"flags"` // of bulkhead's commands
	Pins  string   `json:"pins"`  // in the mount namespace
}

// follow reads the supervisor's events to the end of its output.
func (d *demo) follow(events *json.Decoder, in io.Writer) (done bool, failure string) {
	p := newProgress(d.Stderr, d.sc)
	defer func() { p.end() }()
	for {
		var e event
		if err := events.Decode(&e); err != nil {
			return done, failure
		}
		switch {
		case e.Error != "":
			failure = e.Error
		case e.Done:
			done = true
		case e.Measured != nil:
			d.rows = append(d.rows, *e.Measured)
		case e.Kept != nil:
			p.end()
			if err := d.stay(*e.Kept, in); err != nil {
				failure = err.Error()
				return done, failure
			}
		case e.Step != nil:
			p.step(*e.Step, e.Measuring)
		}
	}
}

// stay shows the result and how to look at what was left running, and tells
// the supervisor when ENTER was pressed.
func (d *demo) stay(k kept, in io.Writer) error {
	d.kept = true
	if err := d.show(); err != nil {
		return err
	}
	fmt.Fprint(d.Stderr, k.text(d.Binary))
	go func() {
		// Without a terminal or at the end of the input only a signal ends it.
		if bufio.NewScanner(d.Stdin).Scan() {
			io.WriteString(in, "\n")
		}
	}()
	return nil
}
