package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
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

	// scenario replaces the demo's phases and sizes in tests.
	scenario *scenario
}

// scenario is how much of everything: what the supervisor is told.
type scenario struct {
	Phases      []phase       `json:"phases"`
	Seconds     float64       `json:"seconds"`       // chat's calls of one phase are due over this time
	ServeAtOnce int           `json:"serve_at_once"` // calls the provider works on at one time
	ChatRate    float64       `json:"chat_rate"`     // calls per second
	ChatWork    time.Duration `json:"chat_work"`     // the provider's time for a call: this, give or take a fifth
	ChatLimit   int           `json:"chat_limit"`    // connections
	Workers     int           `json:"workers"`       // batch calls tried at one time
	BatchWork   time.Duration `json:"batch_work"`    // as ChatWork
	BatchLimit  int           `json:"batch_limit"`   // connections
}

// phase is one of the three.
type phase string

const (
	chatAlone    phase = "chat alone"
	flood        phase = "flood, no bulkheads"
	floodLimited phase = "flood, bulkheads"
)

// theScenario is the demo's own. Chat needs 30 x 0.1 = 3 of the provider's 20
// places; batch's 60 workers would take three times what there is. 360 calls
// give a p99 with three above it. The limits add up to the provider's 20, and
// chat's 10 hold its 3 to 4 calls, the idle connections that net/http keeps and
// what comes due while a busy node holds chat up for a moment.
func theScenario() scenario {
	return scenario{
		Phases:      []phase{chatAlone, flood, floodLimited},
		Seconds:     12,
		ServeAtOnce: 20,
		ChatRate:    30,
		ChatWork:    100 * time.Millisecond,
		ChatLimit:   10,
		Workers:     60,
		BatchWork:   400 * time.Millisecond,
		BatchLimit:  10,
	}
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
	if os.Geteuid() != 0 {
		return ErrNotRoot
	}
	sc := theScenario()
	if o.scenario != nil {
		sc = *o.scenario
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

	begin := time.Now()
	rows, err := runIn(ctx, o, sc)
	if ctx.Err() != nil {
		// What failed, failed because it was ended; only a clean-up that
		// failed is news.
		if left := (*leftoverError)(nil); errors.As(err, &left) {
			return errors.Join(ErrInterrupted, left)
		}
		return ErrInterrupted
	}
	if err != nil {
		return err
	}
	r := newResult(sc, rows, time.Since(begin))
	if o.JSON {
		enc := json.NewEncoder(o.Stdout)
		enc.SetIndent("", "  ")
		return enc.Encode(r)
	}
	_, err = io.WriteString(o.Stdout, r.Text())
	return err
}

// leftoverError says what the demo could not remove.
type leftoverError struct{ err error }

func (e *leftoverError) Error() string { return "clean up after the demo: " + e.err.Error() }
func (e *leftoverError) Unwrap() error { return e.err }

// runIn makes the cgroup, runs the supervisor in it and removes it.
func runIn(ctx context.Context, o Options, sc scenario) (rows []measurement, err error) {
	root, err := cgroup.Find(o.CgroupRoot)
	if err != nil {
		return nil, err
	}
	if err := sweep(root.Dir); err != nil {
		return nil, err
	}
	t, err := makeTree(root.Dir, os.Getpid())
	if err != nil {
		return nil, err
	}
	defer func() {
		if rerr := t.remove(); rerr != nil {
			err = errors.Join(err, &leftoverError{rerr})
		}
	}()
	return runSupervisor(ctx, o, sc, t)
}

// runSupervisor starts the supervisor in namespaces of its own, shows its
// progress and returns its measurements once it has ended.
func runSupervisor(ctx context.Context, o Options, sc scenario, t *tree) ([]measurement, error) {
	// A parent-death signal follows the thread that forked, not the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	arg, err := json.Marshal(sc)
	if err != nil {
		return nil, err
	}
	group, err := os.Open(t.supervisor())
	if err != nil {
		return nil, err
	}
	defer group.Close()

	cmd := exec.CommandContext(ctx, o.Binary, supervisorCommand,
		"--binary", o.Binary, "--tree", t.dir, "--scenario", string(arg))
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = stopGrace
	cmd.Stderr = o.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		// Unshare, not clone: with CLONE_NEWNS here, package syscall makes
		// mount propagation private before the exec.
		Unshareflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET,
		Pdeathsig:    syscall.SIGKILL,
		// A session of its own, so that Ctrl-C reaches only the command, which
		// ends the rest in order.
		Setsid:      true,
		UseCgroupFD: true,
		CgroupFD:    int(group.Fd()),
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		if errors.Is(err, unix.EPERM) {
			return nil, fmt.Errorf("start %s in namespaces of its own: %w: it needs CAP_SYS_ADMIN and CAP_NET_ADMIN; in a container, run it privileged", o.Binary, err)
		}
		return nil, fmt.Errorf("start %s in namespaces and a cgroup of its own: %w", o.Binary, err)
	}

	p := newProgress(o.Stderr, sc)
	rows, done, failure := follow(json.NewDecoder(out), p)
	p.end()
	err = cmd.Wait()
	switch {
	case failure != "":
		return nil, errors.New(failure)
	case !done && err != nil:
		return nil, fmt.Errorf("the demo's supervisor ended early: %w", err)
	case !done:
		return nil, errors.New("the demo's supervisor ended early")
	}
	return rows, nil
}

// event is one line from the supervisor.
type event struct {
	// Phase begins: with Measuring, its measured part.
	Phase     phase `json:"phase,omitempty"`
	Measuring bool  `json:"measuring,omitempty"`
	// Measured ends a phase.
	Measured *measurement `json:"measured,omitempty"`
	// Done: everything is measured and taken down again.
	Done bool `json:"done,omitempty"`
	// Error ends the demo.
	Error string `json:"error,omitempty"`
}

// follow reads the supervisor's events to the end of its output.
func follow(events *json.Decoder, p *progress) (rows []measurement, done bool, failure string) {
	for {
		var e event
		if err := events.Decode(&e); err != nil {
			return rows, done, failure
		}
		switch {
		case e.Error != "":
			failure = e.Error
		case e.Done:
			done = true
		case e.Measured != nil:
			rows = append(rows, *e.Measured)
		default:
			p.phase(e.Phase, e.Measuring)
		}
	}
}
