package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	systemd1 "github.com/coreos/go-systemd/v22/dbus"
	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"

	"bulkhead/pkg/policy"
)

const (
	// bootedDir exists exactly where systemd is the init that runs (sd_booted(3)).
	bootedDir = "/run/systemd/system"
	// privateSocket is systemd's own: it is there before the message bus is, and after.
	privateSocket = "/run/systemd/private"
	// grace is for how long what is taken back may ask systemd after Interrupt.
	grace = 5 * time.Second
	// unset gives a property of resource control back: systemd's CGROUP_WEIGHT_INVALID,
	// USEC_INFINITY and CGROUP_LIMIT_MAX are all this.
	unset = uint64(math.MaxUint64)
)

// controlDirs have the drop-ins of properties, a directory for each unit: those that are
// set for good, and those that are set until the next boot (systemctl(1), set-property).
var controlDirs = [...]string{"/etc/systemd/system.control", "/run/systemd/system.control"}

// Manager says through whom the cgroups of a tree are made: systemd where it runs this
// very tree and can be asked, else the files of the tree.
type Manager struct {
	Name string // "systemd" or "cgroupfs"
	// Why in words; and whether it is the files of a systemd that cannot be reached,
	// which takes back what is written there.
	Why         string
	Unreachable bool
}

func (t *Tree) manager() Manager {
	_, err := t.Get("/init.scope")
	its := err == nil && t.ID == rootID // systemd is in the tree, here or outside of a container
	booted, reachable := isDir(bootedDir), isSocket(privateSocket)
	switch {
	case its && booted && reachable:
		return Manager{Name: "systemd", Why: "it runs this tree; asked over " + privateSocket}
	case its:
		return Manager{Name: "cgroupfs", Unreachable: true, Why: "a systemd runs this tree that cannot be reached from here (no " + privateSocket + ")"}
	case booted:
		return Manager{Name: "cgroupfs", Why: "the root is no tree of systemd's"}
	}
	return Manager{Name: "cgroupfs", Why: "no systemd runs here"}
}

func isDir(p string) bool {
	info, err := os.Lstat(p)
	return err == nil && info.IsDir()
}

func isSocket(p string) bool {
	info, err := os.Stat(p)
	return err == nil && info.Mode()&os.ModeSocket != 0
}

// systemd is the Backend on a host that systemd runs: a slice of ours is a unit of the
// same name, its values are properties, and a command of exec is a scope. Properties are
// set for good: systemd has them in force before anything starts in the slice, after a
// reboot too. Values of units of others are properties until the next boot (units.go). Other
// cgroups of others, and files that systemd has no property for, are left to the files.
type systemd struct {
	files  cgroupfs
	socket string

	mu       sync.Mutex
	conn     *systemd1.Conn
	patience patience

	look  sync.Mutex
	units map[uint64]unit // by cgroup; none where it is no unit's

	// asking ends with Interrupt, and is for what brings something about. What takes it back goes on for the
	// grace, so that a start that is stopped leaves nothing.
	asking, givingBack context.Context
	interrupt          func()
}

func newSystemd(t *Tree, socket string, l limits) *systemd {
	b := &systemd{files: cgroupfs{t}, socket: socket, patience: patience{limits: l}}
	var stop, end context.CancelFunc
	b.asking, stop = context.WithCancel(context.Background())
	b.givingBack, end = context.WithCancel(context.Background())
	b.interrupt = func() {
		stop()
		time.AfterFunc(grace, end)
	}
	return b
}

func (b *systemd) t() *Tree { return b.files.t }

func (b *systemd) Interrupt() { b.interrupt() }

var (
	errStopping = errors.New("not waited for: the agent is stopping")
	// errRuns: systemd has answered, and its job takes its time.
	errRuns = errors.New("the job has not ended")
)

// call makes a request, with a new connection if systemd has closed the one before, as it
// does at each daemon-reexec.
func (b *systemd) call(ctx context.Context, f func(ctx context.Context, c *systemd1.Conn) error) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	limit, err := b.patience.asks(time.Now())
	if err != nil {
		return fmt.Errorf("ask systemd: %w", err)
	}
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		err := b.connect(limited)
		if err == nil {
			err = f(limited, b.conn)
		}
		away := err != nil && b.away(err)
		if err == nil || errors.Is(err, errRuns) || !away && limited.Err() == nil {
			b.patience.silent = time.Time{}
			return err
		}
		select {
		case <-limited.Done():
			if ctx.Err() != nil {
				return fmt.Errorf("ask systemd: %w", errStopping)
			}
			b.drop() // what it answers later is no answer to what is asked next
			b.patience.silent = time.Now()
			return fmt.Errorf("ask systemd: no answer within %v: %w", limit, err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// away reports whether systemd has gone for a moment, and drops the connection then.
func (b *systemd) away(err error) bool {
	cut := errors.Is(err, dbus.ErrClosed) || errors.Is(err, io.EOF)
	for _, e := range []error{unix.ECONNREFUSED, unix.ECONNRESET, unix.EPIPE, unix.ENOENT} {
		cut = cut || errors.Is(err, e)
	}
	if b.conn != nil && (cut || !b.conn.Connected()) {
		b.drop()
		cut = true
	}
	return cut
}

func (b *systemd) drop() {
	if b.conn != nil {
		b.conn.Close()
		b.conn = nil
	}
}

// connect makes the connection, if there is none. Who accepts it need not answer, and the library waits for that without
// an end; but not on what is closed.
func (b *systemd) connect(ctx context.Context) error {
	if b.conn != nil {
		return nil
	}
	// Its lifetime is not that of the one request.
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	inTime := context.AfterFunc(ctx, end)
	c, err := systemd1.NewConnection(func() (*dbus.Conn, error) {
		c, err := dbus.Dial("unix:path="+b.socket, dbus.WithContext(life))
		if err != nil {
			return nil, err
		}
		if err := c.Auth([]dbus.Auth{dbus.AuthExternal(strconv.Itoa(os.Getuid()))}); err != nil {
			c.Close()
			return nil, err
		}
		return c, nil
	})
	if !inTime() && err == nil {
		c.Close()
		err = ctx.Err()
	}
	if err != nil {
		end()
		return err
	}
	b.conn = c
	return nil
}

// job makes a request that systemd answers with a job, and waits for its end. A job that has just not ended in time is
// not asked for again.
func (b *systemd) job(ctx context.Context, name string, f func(ctx context.Context, c *systemd1.Conn, done chan<- string) error) error {
	e, began := effect{name, "job"}, time.Now()
	if v, ok := b.patience.ranOut[e]; ok && began.Before(v.until) {
		return fmt.Errorf("%s: %w, and is not asked for again yet", name, errRuns)
	}
	err := b.call(ctx, func(limited context.Context, c *systemd1.Conn) error {
		done := make(chan string, 1)
		if err := f(limited, c, done); err != nil {
			return err
		}
		var late <-chan time.Time
		if b.patience.left(b.patience.effect, time.Now()) == 0 {
			late = time.After(b.patience.effect) // enough has been waited for in vain
		}
		// The end is not told to who has lost the connection.
		look := time.NewTicker(100 * time.Millisecond)
		defer look.Stop()
		for {
			select {
			case result := <-done:
				if result != "done" {
					return fmt.Errorf("%s: the job ended with %q", name, result)
				}
				return nil
			case <-look.C:
				if !c.Connected() {
					return fmt.Errorf("%s: %w", name, dbus.ErrClosed)
				}
			case <-late:
				return fmt.Errorf("%s: %w", name, errRuns)
			case <-limited.Done():
				if ctx.Err() != nil {
					return errStopping
				}
				return fmt.Errorf("%s: %w", name, errRuns)
			}
		}
	})
	if errors.Is(err, errRuns) {
		b.patience.inVain(e, cause{}, time.Since(began), time.Now())
	}
	return err
}

// unitOf is the unit of a slice of ours.
func unitOf(p string) string { return path.Base(p) }

func (b *systemd) Ensure(p string, controllers []string) ([]Condition, error) {
	var conds []Condition
	parent := "/"
	for _, name := range strings.Split(strings.TrimPrefix(path.Clean("/"+p), "/"), "/") {
		parent = path.Join(parent, name)
		if err := b.start(parent); err != nil {
			return conds, err
		}
		for _, c := range controllers {
			cond, ok := b.account(parent, c)
			if !ok {
				conds = append(conds, cond)
			}
		}
	}
	return conds, nil
}

// start sees to it that systemd has the slice as its own, also one whose directory is
// there already.
func (b *systemd) start(p string) error {
	unit := unitOf(p)
	active := false
	err := b.call(b.asking, func(ctx context.Context, c *systemd1.Conn) error {
		state, err := c.GetUnitPropertyContext(ctx, unit, "ActiveState")
		active = err == nil && state.Value.Value() == "active"
		return err
	})
	if err == nil && active && b.t().has(p, "cgroup.procs") {
		return nil
	}
	err = b.job(b.asking, "start "+unit, func(ctx context.Context, c *systemd1.Conn, done chan<- string) error {
		_, err := c.StartUnitContext(ctx, unit, "fail", done)
		return err
	})
	if err == nil {
		err = b.await(b.asking, p, "", func() bool { return b.t().has(p, "cgroup.procs") })
	}
	if err != nil {
		return fmt.Errorf("start %s: %w", unit, err)
	}
	return nil
}

// account has systemd turn a controller on for a slice: it does as soon as the slice has a
// property that needs it.
func (b *systemd) account(p, controller string) (Condition, bool) {
	file, property := "", systemd1.Property{}
	switch controller {
	case "cpu": // CPUAccounting does not need it
		file, property = "cpu.weight", set("CPUWeight", uint64(parentWeight))
	case "memory":
		file, property = "memory.max", set("MemoryAccounting", true)
	case "pids":
		file, property = "pids.max", set("TasksAccounting", true)
	case cpuset: // all there are, until the values are set
		n, err := b.t().nodeCPUs()
		if err != nil {
			return shortfall(TypeCPUSet, ReasonControllerNotEnabled, "cpuset is not available in %s: %v", unitOf(p), err), false
		}
		file, property = "cpuset.cpus", set("AllowedCPUs", cpuMask(n.possible))
	}
	if file == "" || b.t().has(p, file) {
		return Condition{}, true
	}
	if _, missing := b.t().Shortfall(controller); missing {
		return Condition{}, true // told for the whole tree
	}
	err := b.property(b.asking, p, property)
	if err == nil {
		err = b.await(b.asking, p, file, func() bool { return b.t().has(p, file) })
	}
	var u *unmet
	switch {
	case err == nil:
		return Condition{}, true
	case errors.As(err, &u) && u.what == controller: // told once for all that are there
		return shortfall(typeOf(controller), u.cause.reason, "%s is not available below cgroup %s: systemd does not turn it on there: %s", controller, b.t().path(u.at), u.cause.text), false
	}
	return shortfall(typeOf(controller), ReasonControllerNotEnabled, "%s is not available in %s: systemd does not turn it on: %v", controller, unitOf(p), err), false
}

func set(name string, value any) systemd1.Property {
	return systemd1.Property{Name: name, Value: dbus.MakeVariant(value)}
}

// property sets properties of a slice of ours, for good; until the next boot where /etc
// cannot be written.
func (b *systemd) property(ctx context.Context, p string, properties ...systemd1.Property) error {
	return b.call(ctx, func(ctx context.Context, c *systemd1.Conn) error {
		err := c.SetUnitPropertiesContext(ctx, unitOf(p), false, properties...)
		var answer dbus.Error
		if errors.As(err, &answer) && answer.Name == "System.Error.EROFS" {
			err = c.SetUnitPropertiesContext(ctx, unitOf(p), true, properties...)
		}
		return err
	})
}

// properties are what systemd calls a value; none if it has no name for it.
func properties(v Value) ([]systemd1.Property, error) {
	number := func(s string) (uint64, error) {
		if s == "max" {
			return unset, nil
		}
		return strconv.ParseUint(s, 10, 64)
	}
	one := func(name string) ([]systemd1.Property, error) {
		n, err := number(v.Value)
		return []systemd1.Property{set(name, n)}, err
	}
	switch v.File {
	case "cpu.weight":
		return one("CPUWeight")
	case "cpu.idle":
		if v.Value == "1" {
			return []systemd1.Property{set("CPUWeight", uint64(0))}, nil // CGROUP_WEIGHT_IDLE, since 252
		}
		return []systemd1.Property{set("CPUWeight", uint64(parentWeight))}, nil
	case "memory.high":
		return one("MemoryHigh")
	case "memory.max":
		return one("MemoryMax")
	case "pids.max":
		return one("TasksMax")
	case "cpuset.cpus":
		cpus, err := policy.ParseCPUs(v.Value)
		return []systemd1.Property{set("AllowedCPUs", cpuMask(cpus))}, err
	case "cpu.max":
		quota, period, _ := strings.Cut(v.Value, " ")
		q, err := number(quota)
		if err != nil {
			return nil, err
		}
		n, err := number(period)
		if err != nil || q == unset {
			return []systemd1.Property{set("CPUQuotaPerSecUSec", unset), set("CPUQuotaPeriodUSec", unset)}, err
		}
		// The policy knows whole percents only, and so does systemd where it keeps it (252).
		return []systemd1.Property{set("CPUQuotaPerSecUSec", q*1_000_000/n), set("CPUQuotaPeriodUSec", n)}, nil
	}
	return nil, nil
}

// cpuMask has a bit for each CPU, the lowest first; none gives the property back.
func cpuMask(cpus policy.CPUSet) []byte {
	mask := []byte{}
	for _, n := range cpus {
		for n/8 >= len(mask) {
			mask = append(mask, 0)
		}
		mask[n/8] |= 1 << (n % 8)
	}
	return mask
}

func (b *systemd) Set(p string, values []Value) error {
	if !isSlice(p) {
		u, ok, err := b.unitAt(p)
		if err != nil {
			return fmt.Errorf("set values of %s: %w", p, err)
		}
		for _, v := range values {
			named, err := properties(v)
			if err == nil && ok && len(named) > 0 {
				err = b.setUnit(p, u, v, named)
			} else if err == nil {
				err = b.files.Set(p, []Value{v})
			}
			if err != nil {
				return fmt.Errorf("set %s of %s to %q: %w", v.File, p, v.Value, err)
			}
		}
		return nil
	}
	for _, v := range values {
		// Given back, AllowedCPUs leaves the list in force in the cgroup (252): until the
		// slice goes it allows all.
		if v == noCPUs() {
			if now, err := b.t().read(p, v.File); err == nil && now != "" {
				if v, err = b.t().everyCPU(); err != nil {
					return err
				}
			}
		}
		holds := func() bool {
			now, err := b.t().read(p, v.File)
			return err == nil && same(v, now)
		}
		if holds() {
			continue
		}
		named, err := properties(v)
		if err == nil && len(named) == 0 {
			err = b.files.Set(p, []Value{v})
		} else if err == nil {
			if err = b.property(b.asking, p, named...); err == nil {
				err = b.awaitValue(p, unitOf(p), v, named, holds)
			}
		}
		if err != nil {
			return fmt.Errorf("set %s of %s to %q: %w", v.File, unitOf(p), v.Value, err)
		}
	}
	return nil
}

// ours are the properties that a slice of ours may have, and the names of their drop-ins.
var ours = []struct{ property, dropIn string }{
	{"CPUWeight", "CPUWeight"},
	{"CPUQuotaPerSecUSec", "CPUQuota"},
	{"CPUQuotaPeriodUSec", "CPUQuotaPeriodSec"},
	{"MemoryHigh", "MemoryHigh"},
	{"MemoryMax", "MemoryMax"},
	{"TasksMax", "TasksMax"},
}

// accounting are those that turn a controller on. They give way with the slice.
var accounting = []string{"MemoryAccounting", "TasksAccounting"}

// cpusDropIn is that of AllowedCPUs, which unset does not give back.
const cpusDropIn = "AllowedCPUs"

func (b *systemd) Release(all []Cgroup) {
	for _, c := range slices.Backward(all) {
		if isSlice(c.Path) && b.controlled(c.Path) {
			var back []systemd1.Property
			for _, o := range ours {
				back = append(back, set(o.property, unset))
			}
			_ = b.property(b.givingBack, c.Path, back...)
			_ = b.property(b.givingBack, c.Path, set("AllowedCPUs", cpuMask(nil))) // systemd 244, so by itself
			b.forget(c.Path)
		}
	}
	// Slices that nothing has started since the machine did.
	for _, control := range controlDirs {
		dirs, _ := filepath.Glob(filepath.Join(control, "bulkhead*.slice.d"))
		for _, dir := range dirs {
			p := slicePathOf(strings.TrimSuffix(filepath.Base(dir), ".d"))
			if isSlice(p) && !b.t().has(p, "cgroup.procs") {
				b.forget(p)
			}
		}
	}
}

// slicePathOf is where systemd has the slice of a name: a-b.slice is in a.slice
// (systemd.slice(5)).
func slicePathOf(unit string) string {
	name, p := strings.TrimSuffix(unit, ".slice"), "/"
	for i, c := range name + "-" {
		if c == '-' {
			p = path.Join(p, name[:i]+".slice")
		}
	}
	return p
}

// dropIns are the directories of a slice's properties.
func dropIns(p string) []string {
	var dirs []string
	for _, control := range controlDirs {
		dirs = append(dirs, filepath.Join(control, unitOf(p)+".d"))
	}
	return dirs
}

// controlled reports whether properties of a slice have been set.
func (b *systemd) controlled(p string) bool { return slices.ContainsFunc(dropIns(p), isDir) }

// forget removes what is left of properties: as they are given back one by one, a file
// that says "nothing" for each. Those of others stay.
func (b *systemd) forget(p string) {
	names := append(slices.Clone(accounting), cpusDropIn)
	for _, o := range ours {
		names = append(names, o.dropIn)
	}
	for _, dir := range dropIns(p) {
		for _, name := range names {
			_ = os.Remove(filepath.Join(dir, "50-"+name+".conf"))
		}
		_ = os.Remove(dir) // if that was all
	}
}

func (b *systemd) Remove(p string) error {
	if !isSlice(p) {
		// A scope: systemd removes it with its last process.
		if pids, err := b.t().pids(p); err == nil && len(pids) > 0 {
			return fmt.Errorf("remove cgroup %s: %w", p, ErrBusy)
		}
		return nil
	}
	// To stop a slice is to stop all that is in it, so it must be empty. What starts in
	// that moment has a job of its own, and with "fail" ours is refused.
	events, err := b.t().read(p, "cgroup.events")
	if err == nil && !strings.Contains(events, "populated 0") {
		return fmt.Errorf("remove %s: %w", unitOf(p), ErrBusy)
	}
	err = b.job(b.givingBack, "stop "+unitOf(p), func(ctx context.Context, c *systemd1.Conn, done chan<- string) error {
		_, err := c.StopUnitContext(ctx, unitOf(p), "fail", done)
		return err
	})
	if err == nil {
		b.forget(p)
		err = b.await(b.givingBack, p, "", func() bool { return !b.t().has(p, "cgroup.procs") })
	}
	if err != nil {
		if b.t().has(p, "cgroup.procs") {
			err = fmt.Errorf("%w: %v", ErrBusy, err)
		}
		return fmt.Errorf("remove %s: %w", unitOf(p), err)
	}
	return nil
}

// Enter makes a scope: systemd moves the process.
func (b *systemd) Enter(slice string) (string, error) {
	if slice == policy.ParentSlice {
		return "", fmt.Errorf("enter cgroup %s: not the slice of a compartment", slice)
	}
	var err error
	for try := range enterTries {
		name := leafNameOf(try)
		err = b.job(b.asking, "start "+name, func(ctx context.Context, c *systemd1.Conn, done chan<- string) error {
			_, err := c.StartTransientUnitContext(ctx, name, "fail", []systemd1.Property{
				systemd1.PropDescription("command of bulkhead exec"), systemd1.PropSlice(unitOf(slice)),
				set("PIDs", []uint32{0}), // the asker, in whatever pid namespace
				set("CollectMode", "inactive-or-failed"),
			}, done)
			return err
		})
		var answer dbus.Error
		if errors.As(err, &answer) && answer.Name == "org.freedesktop.systemd1.UnitExists" {
			continue // of another pid namespace, or still being removed
		}
		if err != nil {
			break
		}
		leaf := path.Join(slice, name)
		now, err := procCgroup("self")
		// A private namespace shows another beginning of the path.
		if err == nil && now != leaf && !(b.t().Namespaced && strings.HasSuffix(now, leaf)) {
			err = fmt.Errorf("the process is in %s: another program moves processes too", now)
		}
		if err != nil {
			return "", fmt.Errorf("enter cgroup %s: %w", leaf, err)
		}
		return leaf, nil
	}
	if errors.Is(err, unix.EACCES) {
		err = fmt.Errorf("%w (needs root)", err)
	}
	return "", fmt.Errorf("enter %s: %w", unitOf(slice), err)
}

// Move has systemd make a scope of the process. One that comes later is put into the
// scope that is there by its file: it is delegated to us, as systemd moves nobody into a
// scope that is not.
func (b *systemd) Move(leaf string, pid int) error {
	if !isMatchLeaf(leaf) {
		return b.files.Move(leaf, pid) // in a unit that is delegated, where systemd makes nothing
	}
	unit, slice := unitOf(leaf), path.Dir(leaf)
	var err error
	for range enterTries {
		if b.t().has(leaf, "cgroup.procs") {
			if err = b.t().write(leaf, "cgroup.procs", strconv.Itoa(pid)); err == nil || !gone(err) {
				break
			}
		}
		err = b.job(b.asking, "start "+unit, func(ctx context.Context, c *systemd1.Conn, done chan<- string) error {
			_, err := c.StartTransientUnitContext(ctx, unit, "fail", []systemd1.Property{
				systemd1.PropDescription("processes that match bulkhead's policy"), systemd1.PropSlice(unitOf(slice)),
				set("PIDs", []uint32{uint32(pid)}),
				// Delegated, but without controllers: Delegate= would have systemd turn on all
				// that there are, up to the root.
				set("DelegateControllers", []string{}),
				set("CollectMode", "inactive-or-failed"),
			}, done)
			return err
		})
		var answer dbus.Error
		if errors.As(err, &answer) && answer.Name == "org.freedesktop.systemd1.UnitExists" {
			continue // made, or ended, in this moment
		}
		break
	}
	if err != nil {
		return fmt.Errorf("move it to %s: %w", unit, err)
	}
	return nil
}
