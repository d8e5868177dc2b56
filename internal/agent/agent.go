package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"bulkhead/internal/containers"
	"bulkhead/internal/metrics"
	"bulkhead/pkg/cgroup"
	"bulkhead/pkg/conn"
	"bulkhead/pkg/policy"
)

// Options are what an agent is told at its start.
type Options struct {
	Policy      string              // a file, or a directory of *.yaml
	CgroupRoot  string              // "": the true root, found by type
	BPFFS       string              // a bpf file system
	Runtimes    []containers.Socket // of the container runtimes to ask
	AdminSocket string
	// MaxConnections is how many open connections there is room to count, see
	// conn.Options.MaxSlots.
	MaxConnections uint32
	// Listen are the addresses of the metrics listener; WebConfig is the path of
	// its TLS and user configuration, or "".
	Listen    []string
	WebConfig string
	// ReadyFile is written, with the pid, once limits are in force and metrics
	// can be scraped, and removed at the end; "" for none.
	ReadyFile string
	// Hangup asks for a reload, as SIGHUP.
	Hangup <-chan os.Signal
	Build  metrics.Build
	Log    *slog.Logger
}

const (
	tickEvery      = time.Second
	reconcileEvery = 30 * time.Second
	// settleEvery is how long the first two rounds of reconciling wait, which free what
	// an agent that was killed while it took over from another release has left: slots
	// of connections that closed in that moment. Far longer than a connect that has its
	// slot may take to show in a dump, on a starved CPU too.
	settleEvery = 10 * time.Second
	// reconcileLimit bounds how long a reload may have to wait for reconciling.
	reconcileLimit = 10 * time.Second
)

// agent is the owner's state: only the goroutine of Run touches it, except for
// what is atomic.
type agent struct {
	o      Options
	log    *slog.Logger
	since  time.Time
	tree   *cgroup.Tree
	keeper *cgroup.Keeper
	kernel *conn.Kernel
	reader *conn.Reader

	plan       *policy.Plan // in force; nil if none is, or inherited and not known
	inherited  bool
	generation uint32
	placement  placement

	// plansBefore are those by which processes were moved that are to go back now.
	plansBefore []*policy.Plan

	applied, setup, values, unread, reconcile, pins, back, placing, containing []cgroup.Condition
	// setupAt is when what falls short of setup is tried again.
	setupAt    time.Time
	draining   string
	complaints map[string]string
	told       told

	tried    string // content hash that was tried last, "" if that is not known
	last     Outcome
	failures uint64

	reclaimed, reconcileErrors uint64
	corrected                  corrected

	info   atomic.Pointer[Info]
	groups atomic.Pointer[groups]
	// full is how many connections without a slot were told, fullTold when.
	full     uint64
	fullTold time.Time
	procs    processes
	runtimes runtimes
	watcher  *treeWatcher // nil if it cannot be had
	// unwatched: not all cgroups can be watched. lookedAt is when the tree was looked
	// at last, litter that it had cgroups of ours to remove.
	unwatched, litter bool
	lookedAt          time.Time
	// waitLook is when cgroups are looked at whose values wait, waitPause what was waited last.
	waitLook  <-chan time.Time
	waitPause time.Duration
	// expireAt is when UDP slots are looked at again.
	expireAt time.Time
	// detached: bulkhead detach has asked it to stop.
	detached atomic.Bool
}

// groups are the cgroups of the compartments, for readers.
type groups struct {
	plan *policy.Plan
	list []cgroup.Adopted
}

// Run brings the policy into force and keeps it there until ctx is done. Then
// it returns nil and leaves the limits in force.
//
// The error of a policy that is wrong is policy.Errors; then, as with any error
// before the limits are in force, nothing on the node has changed. Another
// agent on the same pins is a conn.BusyError. Only the ready file of an agent
// that is gone is removed first of all.
func Run(ctx context.Context, o Options) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	starting, err := startAlone(ctx, o.BPFFS)
	if err != nil {
		return err
	}
	defer starting.Close()
	// Asked before anything is changed or listened on: "address in use" would be
	// true, and hide why, and the ready file may be that agent's.
	if pid, ok := conn.Holder(conn.Options{BPFFS: o.BPFFS}); ok {
		return &conn.BusyError{Dir: filepath.Join(o.BPFFS, "bulkhead"), PID: pid}
	}
	// One that an agent left that was killed would say what is not true yet, and
	// go on saying so if the policy is refused.
	if err := removeReady(o.ReadyFile); err != nil {
		return err
	}
	tried := contentHash(o.Policy)
	plan, warnings, err := load(o.Policy)
	if err != nil {
		return err
	}
	a := &agent{o: o, log: o.Log, since: time.Now(), tried: tried, told: told{}, complaints: map[string]string{}, corrected: corrected{}}
	if a.tree, err = cgroup.Find(o.CgroupRoot); err != nil {
		return err
	}
	a.tree.Hold()
	// Who waits for systemd stops doing so when the agent is to stop.
	defer context.AfterFunc(ctx, a.tree.Interrupt)()
	a.procs = processes{tree: a.tree, log: a.log}
	defer func() { a.procs.close() }()
	a.runtimes = runtimes{sockets: o.Runtimes, log: a.log, finder: cgroup.NewContainerFinder(a.tree)}
	defer func() { a.runtimes.close() }()
	a.keeper = cgroup.NewKeeper(a.tree)
	where := conn.Options{CgroupRoot: a.tree.Dir, BPFFS: o.BPFFS}
	web, err := listenWeb(o.Listen, o.WebConfig)
	if err != nil {
		return err
	}
	defer web.close()
	admin, err := listenAdmin(ctx, o.AdminSocket)
	if err != nil {
		return err
	}
	defer admin.Close()

	if err := a.takeOver(ctx, where); err != nil {
		return err
	}
	where.MaxSlots = o.MaxConnections
	if a.kernel, err = conn.Open(where); err != nil {
		return err
	}
	defer a.kernel.Close()
	starting.Close() // who comes now finds the pins locked, and by whom
	// Who asks it to stop is heard from here on: a start may take its time.
	a.info.Store(&Info{Version: o.Build.Version, PID: os.Getpid(), Since: a.since, Policy: o.Policy, Generation: a.generation,
		Conditions: []cgroup.Condition{{Type: "Start", Status: "False", Reason: "Starting", Message: "the policy is being brought into force"}}})
	requests, failed := make(chan request), make(chan error, 2)
	defer a.answer(ctx, cancel, admin, requests, failed)()
	if n := a.kernel.MaxSlots(); o.MaxConnections != 0 && n != o.MaxConnections {
		a.log.Warn("the table of connections that is in force keeps its size; bulkhead detach and a new start change it",
			"max_connections", n, "asked_for", o.MaxConnections)
	}
	if err := a.commit(ctx, plan); err != nil {
		if ctx.Err() != nil {
			a.log.Info("stopped before the policy came into force", "reason", err.Error())
			return nil
		}
		return err
	}
	a.ended("start", warnings, nil)
	if PinsPersist(o.BPFFS) == Private {
		a.log.Warn("only this mount namespace has the bpf file system: the limits end with it", "bpffs", o.BPFFS, "cure", PrivateCure)
	}
	a.reader = a.kernel.Reader()
	if t, err := a.reader.Totals(); err == nil {
		a.full = t.SlotsFull // an agent before this one told of them
	}
	return a.serve(ctx, web, requests, failed)
}

// takeOver learns what an agent before this one left in force: which slices
// are still needed if this start fails, and which refusals were told.
func (a *agent) takeOver(ctx context.Context, where conn.Options) error {
	r, err := conn.OpenReader(where)
	if errors.Is(err, conn.ErrNotLoaded) {
		return nil
	}
	if errors.Is(err, conn.ErrOtherRelease) {
		// Counts are taken over all the same; only what a failed start would have to
		// keep is not known.
		a.inherited = true
		a.log.Info("taking over what another release has in force")
		return nil
	}
	if err != nil {
		return err
	}
	defer r.Close()
	s, err := r.Snapshot(ctx)
	if errors.Is(err, os.ErrPermission) {
		// Limits and counts are taken over all the same; only what a failed start
		// would have to keep is not known.
		a.inherited = true
		a.log.Warn("cannot read the plan in force, which needs CAP_SYS_ADMIN; refusals of before may be told again")
		return nil
	}
	if err != nil {
		return err
	}
	a.plan, a.generation = s.Plan, s.Generation
	a.told.news(s.Refusals)
	a.log.Info("taking over what is in force", "generation", s.Generation, "hash", s.Plan.Hash, "connections", len(s.Connections))
	return nil
}

// request is somebody's wish for a reload.
type request chan Outcome

// answer serves the admin socket, until the function is called that it returns.
func (a *agent) answer(ctx context.Context, stop func(), admin net.Listener, requests chan<- request, failed chan<- error) (end func()) {
	server := adminServer(asked{
		info: func() Info { return *a.info.Load() },
		stop: func() {
			a.detached.Store(true)
			stop()
		},
		reload: func(waiting context.Context) (Outcome, error) {
			reply := make(request, 1)
			select {
			case requests <- reply:
			case <-waiting.Done():
				return Outcome{}, waiting.Err()
			case <-ctx.Done():
				return Outcome{}, errors.New("the agent is stopping")
			}
			// Once it is taken it is answered.
			return <-reply, nil
		},
	}, a.log)
	var wg sync.WaitGroup
	wg.Go(func() { failed <- server.Serve(admin) })
	return func() {
		stop()
		// An answer that is being written (to the request to stop) is finished.
		grace, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = server.Shutdown(grace)
		wg.Wait()
	}
}

// serve runs everything that has to run beside the owner, and then the owner's
// loop.
func (a *agent) serve(ctx context.Context, web *webServer, requests <-chan request, failed chan error) (err error) {
	handler, err := metrics.Handler(metrics.New(a.o.Build, a.sources()))
	if err != nil {
		return fmt.Errorf("metrics: %w", err)
	}
	contents := make(chan string)
	ctx, end := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer end()
	wg.Go(func() { failed <- web.serve(handler, a.log) })
	wg.Go(func() { newWatcher(a.o.Policy, a.tried, a.log).run(ctx, contents) })
	defer web.close()
	if a.watcher, err = newTreeWatcher(a.tree.Dir); err != nil {
		a.log.Warn("cgroups are not watched, only looked for", "every", tickEvery.String(), "error", err.Error())
	} else {
		defer a.watcher.close()
	}
	a.watchTree()
	if err := a.ready(); err != nil {
		return err
	}
	defer func() {
		if err := removeReady(a.o.ReadyFile); err != nil {
			a.log.Warn("remove the ready file", "error", err.Error())
		}
	}()
	return a.loop(ctx, requests, contents, failed)
}

func (a *agent) loop(ctx context.Context, requests <-chan request, contents <-chan string, failed <-chan error) error {
	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	reconcile := time.NewTicker(settleEvery)
	defer reconcile.Stop()
	check := time.NewTicker(cgroup.CheckEvery)
	defer check.Stop()
	rounds := 0
	var (
		changed <-chan struct{}
		look    <-chan time.Time // when the tree is to be looked at; nil if nothing has happened
		apart   = lookApart
	)
	if a.watcher != nil {
		changed = a.watcher.wake
	}
	for {
		told, poll := a.procs.wake()
		select {
		case <-told:
			a.complain("place processes", a.procs.told()) // a tick publishes it
		case now := <-poll:
			a.complain("place processes", a.procs.polled(now))
		case <-changed:
			if look == nil {
				look = time.After(time.Until(a.lookedAt.Add(apart)))
			}
		case <-a.waitLook:
			a.setWaiting()
		case <-a.runtimes.wake():
			if look == nil {
				look = time.After(time.Until(a.lookedAt.Add(apart)))
			}
		case <-look:
			look = nil
			begin := time.Now()
			a.watchTree()
			apart = min(max(lookApart, time.Since(begin)), lookLatest)
		case <-ctx.Done():
			if a.detached.Load() {
				a.log.Info("stopped by bulkhead detach, which removes the limits", "generation", a.generation)
			} else {
				a.log.Info("stopped; the limits stay in force (bulkhead detach removes them)", "generation", a.generation)
			}
			return nil
		case err := <-failed:
			if errors.Is(err, http.ErrServerClosed) || errors.Is(err, net.ErrClosed) {
				continue
			}
			return fmt.Errorf("a listener failed; the limits stay in force: %w", err)
		case <-a.o.Hangup:
			a.reload(ctx, "SIGHUP")
		case reply := <-requests:
			reply <- a.reload(ctx, "request")
		case hash := <-contents:
			if hash != a.tried {
				a.reload(ctx, "file")
			}
		case <-tick.C:
			a.tick()
		case <-check.C:
			a.keep()
			check.Reset(cgroup.CheckEvery) // from its end: never sooner
		case <-reconcile.C:
			a.reconcileOnce(ctx)
			if rounds++; rounds == 2 {
				reconcile.Reset(reconcileEvery)
			}
		}
	}
}

// reconcileOnce compares slots with sockets.
func (a *agent) reconcileOnce(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, reconcileLimit)
	defer cancel()
	r, err := a.kernel.Reconcile(limited)
	if ctx.Err() != nil {
		return // interrupted by the end, not by a fault
	}
	errs := r.Errors
	if err != nil {
		errs = append(errs, err)
	}
	a.reclaimed += uint64(r.Reclaimed)
	a.reconcileErrors += uint64(len(errs))
	if r.Reclaimed > 0 {
		a.log.Info("freed slots whose connections are gone", "slots", r.Reclaimed)
	}
	a.complain("compare all slots with their sockets", errors.Join(errs...))
	a.reconcile = nil
	if len(errs) > 0 {
		a.reconcile = []cgroup.Condition{condition("Namespaces", "NotRead", errors.Join(errs...))}
	}
	a.publish()
}

// publish makes what the owner knows readable for others.
func (a *agent) publish() {
	procs, placing := a.procs.says()
	a.placing = placing
	state, adopted, containing := a.runtimes.state(a.placement.adopted)
	a.containing = containing
	conds := slices.Concat(a.applied, a.setup, a.values, a.unread, a.reconcile, a.pins, a.back, a.placing, a.containing)
	if a.draining != "" {
		conds = append(conds, cgroup.Condition{Type: "Slices", Status: "False", Reason: "Draining",
			Message: "not in the policy any more, and still with processes: " + a.draining})
	}
	if a.last.Error != "" {
		conds = append(conds, cgroup.Condition{Type: "Reload", Status: "False", Reason: "Refused", Message: a.last.Error})
	}
	a.info.Store(&Info{
		Version: a.o.Build.Version, PID: os.Getpid(), Since: a.since, Policy: a.o.Policy,
		Generation: a.generation, PolicyHash: a.plan.Hash, Conditions: cgroup.Distinct(conds),
		LastReload: a.last, ReloadFailures: a.failures,
		SlotsReclaimed: a.reclaimed, ReconcileErrors: a.reconcileErrors,
		Processes: procs, Runtimes: state, Containers: adopted,
		ValuesCorrected: a.corrected.list(a.plan),
	})
}

// sources is where the metrics come from: what is published, and what the
// kernel holds.
func (a *agent) sources() metrics.Sources {
	return metrics.Sources{
		Connections: a.reader.Snapshot,
		CPU: func(context.Context) ([]metrics.Cgroup, error) {
			g := a.groups.Load()
			return readCPU(a.tree, g)
		},
		Agent: func() metrics.Agent {
			i := a.info.Load()
			return metrics.Agent{
				Generation: i.Generation, LastReload: i.LastReload.Time, LastReloadSuccessful: i.LastReload.Error == "",
				ReloadFailures: i.ReloadFailures, SlotsReclaimed: i.SlotsReclaimed, ReconcileErrors: i.ReconcileErrors,
				ProcessesMoved: i.Processes.Moved, MembershipLost: i.Processes.Lost, ProcessesSkipped: i.Processes.Skipped,
				ValuesCorrected: i.ValuesCorrected, Runtimes: runtimesUp(i.Runtimes),
			}
		},
	}
}

func readCPU(tree *cgroup.Tree, g *groups) ([]metrics.Cgroup, error) {
	var out []metrics.Cgroup
	for _, c := range g.list {
		stat, err := tree.Used(c.Path)
		if errors.Is(err, cgroup.ErrGone) {
			continue
		}
		if err != nil {
			return nil, err
		}
		k := g.plan.Compartments[c.Compartment]
		out = append(out, metrics.Cgroup{Feature: k.Feature, Tenant: k.Tenant, ID: c.ID, Path: c.Path, Stat: stat})
	}
	return out, nil
}

// ready writes the ready file in one step: who waits for it never reads half.
func (a *agent) ready() error {
	if a.o.ReadyFile == "" {
		return nil
	}
	tmp := a.o.ReadyFile + "." + strconv.Itoa(os.Getpid())
	err := os.WriteFile(tmp, []byte(strconv.Itoa(os.Getpid())+"\n"), 0o644)
	if err == nil {
		err = os.Rename(tmp, a.o.ReadyFile)
	}
	if err != nil {
		_ = os.Remove(tmp)
		return fmt.Errorf("ready file: %w (the limits are in force)", err)
	}
	return nil
}

func removeReady(path string) error {
	if path == "" {
		return nil
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("--ready-file: %w%s", err, needsRoot(err))
	}
	// Better said now than when the limits are in force.
	if _, err := os.Stat(filepath.Dir(path)); err != nil {
		return fmt.Errorf("--ready-file: %w (make the directory first)", err)
	}
	return nil
}
