package conn

import (
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"bulkhead/pkg/policy"
)

// Kernel is the kernel side of one instance, held by its agent: there is one at a
// time for a pin directory. It is not safe for concurrent use; one goroutine owns
// it. Closing it leaves everything in force.
type Kernel struct {
	o      Options
	lock   *os.File
	root   uint64 // id of the cgroup that programs are attached to
	spec   *ebpf.CollectionSpec
	coll   *ebpf.Collection
	links  map[string]link.Link
	pinned bool

	word []byte // the mapped control word

	bulkheads *registry[policy.Key]
	traffic   *registry[trafficKey]

	plan   *policy.Plan
	at     indices
	tables *tables
	// inner are the maps of the generation in force; in is what each index of each
	// outer map has, so that unchanged ones are not written again.
	inner map[string]*ebpf.Map
	in    [2]map[string]*ebpf.Map

	known atomic.Pointer[inForce] // for Readers of this Kernel, in whatever goroutine

	predecessors []*predecessor // what other releases have left in force

	nowhere map[uint64]int     // rounds in which nothing led to a network namespace
	missing map[slotKey]uint64 // words of slots that the last complete dump lacked
}

// MaxSlots is how many slots there is room for.
func (k *Kernel) MaxSlots() uint32 { return k.coll.Maps[kernelMapSlots].MaxEntries() }

// outer maps, in the order in which a generation is built.
func outerMaps() []string {
	return []string{kernelMapPlans, kernelMapDests, kernelMapPorts, kernelMapRoutes, kernelMapComps}
}

// Open takes the instance's lock and takes over what is pinned, putting this
// build's programs under the links that exist, or loads anew; what a release of
// another layout has pinned stays in force until the first Apply. Anew, nothing is
// attached or pinned before the first Apply. On an error nothing is left behind and
// nothing in force has changed.
func Open(o Options) (_ *Kernel, err error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	root, err := inode(o.CgroupRoot)
	if err != nil {
		return nil, err
	}
	lock, err := o.lock()
	if err != nil {
		return nil, err
	}
	k := &Kernel{o: o, lock: lock, root: root, links: map[string]link.Link{}, inner: map[string]*ebpf.Map{}, missing: map[slotKey]uint64{}}
	k.in = [2]map[string]*ebpf.Map{{}, {}}
	defer func() {
		if err != nil {
			k.Close()
		}
	}()
	if err := o.removeStaging(); err != nil {
		return nil, err
	}

	k.spec, err = loadKernel()
	if err != nil {
		return nil, err
	}
	if o.MaxSlots != 0 {
		resize(k.spec, o.MaxSlots)
	}
	replace := map[string]*ebpf.Map{}
	if _, err := os.Stat(o.pins()); err == nil {
		replace, err = o.pinnedMaps(k.spec, nil)
		if err != nil {
			return nil, err
		}
		defer closeAll(replace) // the collection has clones
		for _, h := range hooks() {
			l, err := o.loadPinnedLink(h, root)
			if err != nil {
				return nil, err
			}
			if l != nil {
				k.links[h.name] = l
			}
		}
		k.pinned = true
	} else if err := o.alone(); err != nil {
		return nil, err
	}
	if k.predecessors, err = o.openPredecessors(); err != nil {
		return nil, err
	}
	for _, p := range k.predecessors {
		// There must be room for all that it has.
		if m := p.maps[kernelMapSlots]; m != nil && !k.pinned && m.MaxEntries() > k.spec.Maps[kernelMapSlots].MaxEntries {
			resize(k.spec, m.MaxEntries())
		}
	}
	if err := setConstants(k.spec); err != nil {
		return nil, err
	}
	k.coll, err = ebpf.NewCollectionWithOptions(k.spec, ebpf.CollectionOptions{MapReplacements: replace})
	if err != nil {
		return nil, explainLoad(err)
	}
	if k.word, err = mapControl(k.coll.Maps[kernelMapControl]); err != nil {
		return nil, err
	}
	b, t, err := readNames(k.coll.Maps)
	if err != nil {
		return nil, err
	}
	k.bulkheads = newRegistry("bulkheads", b, k.coll.Maps[kernelMapBulkheadNames],
		func(key policy.Key) any { n := bulkheadName(key); return &n },
		func(i uint32) error {
			return k.clear(i, kernelMapBulkheads, &kernelBulkhead{})
		})
	k.traffic = newRegistry("routes", t, k.coll.Maps[kernelMapTrafficNames],
		func(key trafficKey) any { n := trafficName(key); return &n },
		func(i uint32) error {
			return errors.Join(k.clear(i, kernelMapTraffic, &kernelTrafficCount{}), k.clear(i, kernelMapRefusals, &kernelRefusal{}))
		})

	// From here on the programs are ours, of this layout, and verified.
	for _, h := range hooks() {
		if l := k.links[h.name]; l != nil {
			if err := l.Update(k.coll.Programs[h.program]); err != nil {
				return nil, fmt.Errorf("put %s under its link: %w", h.program, err)
			}
		}
	}
	return k, nil
}

// setConstants tells the programs what this kernel and our capabilities allow. A branch
// that is constantly false is removed before its helpers are looked at, so one object
// loads everywhere.
func setConstants(spec *ebpf.CollectionSpec) error {
	number := map[bool]uint32{true: 1}
	for name, value := range map[string]uint32{
		kernelVarHaveRetval: number[HaveErrno()],
		kernelVarHaveComm:   number[haveComm()],
		kernelVarHomeMask:   spec.Maps[kernelMapHomes].MaxEntries - 1,
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("set constant %s: %w", name, err)
		}
	}
	return nil
}

// resize gives the maps of connections room for n: the hash has it, and homes, an eighth
// of that as a power of two, come on top.
func resize(spec *ebpf.CollectionSpec, n uint32) {
	spec.Maps[kernelMapSlots].MaxEntries = n
	spec.Maps[kernelMapUdpSockets].MaxEntries = n
	homes := uint32(1) << (bits.Len32(n) - 4)
	spec.Maps[kernelMapHomes].MaxEntries, spec.Maps[kernelMapCookies].MaxEntries = homes, homes
}

// haveComm says whether the programs may note the command of who connects; without,
// only its pid is known.
func haveComm() bool {
	return loads(
		asm.Mov.Reg(asm.R1, asm.RFP), asm.Add.Imm(asm.R1, -16), asm.Mov.Imm(asm.R2, 16),
		asm.FnGetCurrentComm.Call())
}

// HaveErrno says whether connect() can fail with the policy's errno: bpf_set_retval and
// bpf_get_retval, kernel 5.18. Before, it is EPERM.
func HaveErrno() bool {
	return loads(
		asm.FnGetRetval.Call(),
		asm.Mov.Imm(asm.R1, -int32(unix.ECONNREFUSED)), asm.FnSetRetval.Call())
}

// loads says whether this kernel takes the instructions in a connect program of ours. It
// is asked with the very calls that the programs make: a probe that calls a helper
// without its arguments is refused by newer kernels for that.
func loads(body ...asm.Instruction) bool {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "bh_probe", Type: ebpf.CGroupSockAddr, AttachType: ebpf.AttachCGroupInet4Connect, License: "Dual BSD/GPL",
		Instructions: append(body, asm.Mov.Imm(asm.R0, 1), asm.Return()),
	})
	if err != nil {
		return false
	}
	p.Close()
	return true
}

func explainLoad(err error) error {
	var ve *ebpf.VerifierError
	switch {
	case errors.As(err, &ve) && effectiveCapabilities()&(1<<unix.CAP_PERFMON|1<<unix.CAP_SYS_ADMIN) == 0:
		// Without it the verifier forbids more, and older ones forbid what newer ones do not.
		return fmt.Errorf("load kernel programs on %s: %w (this kernel wants CAP_PERFMON beside CAP_BPF and CAP_NET_ADMIN, or root)", release(), ve)
	case errors.As(err, &ve):
		return fmt.Errorf("load kernel programs on %s: %w", release(), ve) // the last lines of its log
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("load kernel programs: %w (needs root, or CAP_BPF and CAP_NET_ADMIN)", err)
	}
	return fmt.Errorf("load kernel programs on %s: %w", release(), err)
}

func release() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return "this kernel"
	}
	return "kernel " + unix.ByteSliceToString(u.Release[:])
}

// mapControl maps the page of the control word. A store to it is atomic, which a
// map update of eight bytes is not promised to be.
func mapControl(m *ebpf.Map) ([]byte, error) {
	b, err := unix.Mmap(m.FD(), 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map the control word: %w", err)
	}
	return b, nil
}

func (k *Kernel) control() *uint64 { return (*uint64)(unsafe.Pointer(&k.word[0])) }

// clear zeroes an element that no route and no slot names.
func (k *Kernel) clear(i uint32, name string, zero any) error {
	if err := k.coll.Maps[name].Update(i, zero, ebpf.UpdateAny); err != nil {
		return fmt.Errorf("clear %s[%d]: %w", name, i, err)
	}
	return nil
}

// Apply puts a plan in force with one flip: every connect is judged by the
// generation before or by this one, never by a mix. It returns the number of the
// new generation. If that is 0 there was an error and the old one stays in force; an
// error with a number is of the cleaning up behind it.
//
// The first Apply on an instance attaches the programs too, and publishes the pins
// last, with one rename. Then it ends what a release of another layout has in force,
// whose slots and counts it takes over.
func (k *Kernel) Apply(plan *policy.Plan, members []Member) (uint32, error) {
	at, err := k.allocate(plan)
	if err != nil {
		return 0, err
	}
	if !k.pinned { // else it was done before the first attach
		for _, p := range k.predecessors {
			if err := k.carry(p); err != nil {
				return 0, err
			}
		}
	}
	now, err := k.generation()
	if err != nil {
		return 0, err
	}
	t, err := compute(plan, at, now.Generation+1)
	if err != nil {
		return 0, err
	}
	if err := t.setMembers(members, len(plan.Compartments)); err != nil {
		return 0, err
	}
	fresh, err := k.build(t, outerMaps())
	if err != nil {
		return 0, err
	}
	if t.gen.Udp != 0 {
		// What counts UDP must be there before the first slot that needs it.
		if err := k.attach(true); err != nil {
			closeAll(fresh)
			return 0, err
		}
	}
	if err := k.flip(t, fresh); err != nil {
		return 0, err
	}
	k.plan, k.at, k.tables = plan, at, t
	k.remember(members)
	if !k.pinned {
		if err := k.attach(t.gen.Udp != 0); err != nil {
			return 0, err
		}
		if err := k.publish(); err != nil {
			return 0, err
		}
	}
	// In force from here on, whatever else fails.
	if t.gen.Udp == 0 {
		err = k.detachUDP()
	}
	return t.gen.Generation, errors.Join(err, k.attach(t.gen.Udp != 0), k.succeedAll(), k.Forget())
}

// SetMembers changes who is in which compartment, within the generation in force.
// It does nothing if nothing would change.
func (k *Kernel) SetMembers(members []Member) error {
	if k.tables == nil {
		return ErrNoPlan
	}
	t := *k.tables
	if err := t.setMembers(members, len(k.plan.Compartments)); err != nil {
		return err
	}
	if slices.Equal(t.ids, k.tables.ids) && slices.Equal(t.comps, k.tables.comps) && t.gen == k.tables.gen {
		return nil
	}
	fresh, err := k.build(&t, []string{kernelMapComps})
	if err != nil {
		return err
	}
	if err := k.flip(&t, fresh); err != nil {
		return err
	}
	k.tables = &t
	k.remember(members)
	return nil
}

// remember keeps what is in force for this Kernel's Readers.
func (k *Kernel) remember(members []Member) {
	f := &inForce{gen: k.tables.gen, plan: k.plan}
	for _, m := range members {
		m.Level = 0 // as they are read back: the maps do not keep it
		if m.Protected {
			m.Compartment = 0
		}
		f.members = append(f.members, m)
	}
	sortMembers(f.members)
	if was := k.known.Load(); was != nil && k.tables.gen.Generation == was.gen.Generation {
		f.names = was.names // only members have changed
	} else {
		f.names = k.names()
	}
	k.known.Store(f)
}

// names is a copy of the registries.
func (k *Kernel) names() *names {
	return &names{maps.Clone(k.bulkheads.at), maps.Clone(k.traffic.at)}
}

// Plan is the plan that this Kernel has applied last, nil before the first Apply.
func (k *Kernel) Plan() *policy.Plan { return k.plan }

// allocate finds the index of every bulkhead and route of a plan.
func (k *Kernel) allocate(plan *policy.Plan) (at indices, err error) {
	for _, b := range plan.Bulkheads {
		i, err := k.bulkheads.index(b.Key)
		if err != nil {
			return at, err
		}
		at.bulkheads = append(at.bulkheads, i)
	}
	for _, r := range plan.Routes {
		i, err := k.traffic.index(routeKey(plan, r))
		if err != nil {
			return at, err
		}
		at.traffic = append(at.traffic, i)
	}
	return at, nil
}

func routeKey(plan *policy.Plan, r policy.Route) trafficKey {
	c := plan.Compartments[r.Compartment]
	return trafficKey{c.Feature, c.Tenant, plan.Providers[r.Provider].Name}
}

// generation reads the generation in force.
func (k *Kernel) generation() (g kernelGen, err error) {
	idx := uint32(atomic.LoadUint64(k.control()) & 1)
	if err := k.coll.Maps[kernelMapGens].Lookup(idx, &g); err != nil {
		return g, fmt.Errorf("read the generation in force: %w", err)
	}
	return g, nil
}

// build makes the inner maps named, filled.
func (k *Kernel) build(t *tables, names []string) (fresh map[string]*ebpf.Map, err error) {
	fresh = map[string]*ebpf.Map{}
	defer func() {
		if err != nil {
			closeAll(fresh)
		}
	}()
	for _, name := range names {
		var keys, values any
		var n int
		switch name {
		case kernelMapDests:
			keys, values, n = t.keys, t.dests, len(t.keys)
		case kernelMapPorts:
			keys, values, n = upTo(len(t.ports)), t.ports, len(t.ports)
		case kernelMapRoutes:
			keys, values, n = upTo(len(t.routes)), t.routes, len(t.routes)
		case kernelMapPlans:
			keys, values, n = upTo(len(t.plan)), t.plan, len(t.plan)
		case kernelMapComps:
			keys, values, n = t.ids, t.comps, len(t.ids)
		}
		spec := k.spec.Maps[name].InnerMap.Copy()
		spec.MaxEntries = uint32(max(n, 1))
		m, err := ebpf.NewMap(spec)
		if err != nil {
			return nil, fmt.Errorf("make %s with %d entries: %w", name, n, err)
		}
		fresh[name] = m
		if n == 0 {
			continue
		}
		if _, err := m.BatchUpdate(keys, values, nil); err != nil {
			return nil, fmt.Errorf("fill %s with %d entries: %w", name, n, err)
		}
	}
	return fresh, nil
}

func upTo(n int) []uint32 {
	s := make([]uint32, n)
	for i := range s {
		s[i] = uint32(i)
	}
	return s
}

// flip makes a generation, with the inner maps in fresh and otherwise those in
// force, the one in force, by one store. It owns fresh.
func (k *Kernel) flip(t *tables, fresh map[string]*ebpf.Map) error {
	next := map[string]*ebpf.Map{}
	for name, m := range k.inner {
		next[name] = m
	}
	for name, m := range fresh {
		next[name] = m
	}
	word := atomic.LoadUint64(k.control())
	idx := uint32(^word & 1)

	// The kernel waits, at each update of a map of maps, for the programs that run
	// (maybe_wait_bpf_programs, since 4.20). The first update is of plans, which no
	// program reads: once it is back, no program that began under the generation
	// before last, which was at this index, can be running, and the rest may change.
	if k.in[idx][kernelMapPlans] == next[kernelMapPlans] {
		k.in[idx][kernelMapPlans] = nil // only to wait
	}
	for _, name := range outerMaps() {
		if next[name] == k.in[idx][name] {
			continue
		}
		if err := k.coll.Maps[name].Update(idx, next[name], ebpf.UpdateAny); err != nil {
			closeAll(fresh)
			k.in[idx] = map[string]*ebpf.Map{} // unknown now: write it all next time
			return fmt.Errorf("write %s of the new generation: %w", name, err)
		}
		k.in[idx][name] = next[name]
	}
	if err := k.coll.Maps[kernelMapGens].Update(idx, &t.gen, ebpf.UpdateAny); err != nil {
		closeAll(fresh)
		k.in[idx] = map[string]*ebpf.Map{}
		return fmt.Errorf("write the new generation: %w", err)
	}
	atomic.StoreUint64(k.control(), (word>>1+1)<<1|uint64(idx))

	for name, m := range fresh {
		if old := k.inner[name]; old != nil {
			old.Close() // the index that is out of force keeps it until it is written
		}
		k.inner[name] = m
	}
	return nil
}

// wait returns when every program that ran has ended.
func (k *Kernel) wait() error {
	idx := uint32(atomic.LoadUint64(k.control()) & 1)
	if err := k.coll.Maps[kernelMapPlans].Update(idx, k.inner[kernelMapPlans], ebpf.UpdateAny); err != nil {
		return fmt.Errorf("wait for running programs: %w", err)
	}
	return nil
}

// attach attaches what is not attached yet; the UDP hooks only if udp.
func (k *Kernel) attach(udp bool) (err error) {
	var made []string
	defer func() {
		if err != nil {
			for _, name := range made {
				os.Remove(filepath.Join(k.o.pins(), name))
				k.links[name].Close()
				delete(k.links, name)
			}
		}
	}()
	for _, h := range hooks() {
		if k.links[h.name] != nil || !h.needed(udp) {
			continue
		}
		l, err := k.attachHook(h)
		if err != nil {
			return err
		}
		k.links[h.name] = l
		made = append(made, h.name)
		if k.pinned {
			if err := l.Pin(filepath.Join(k.o.pins(), h.name)); err != nil {
				return fmt.Errorf("pin %s: %w", h.name, err)
			}
		}
	}
	return nil
}

// attachHook attaches a program, if that takes nobody else's away. One that is attached
// above with BPF_F_ALLOW_OVERRIDE runs no more where another is attached below
// (compute_effective_progs in kernel/bpf/cgroup.c), and the kernel says nothing.
func (k *Kernel) attachHook(h hook) (link.Link, error) {
	before, err := k.o.effective(h)
	if err != nil {
		return nil, err
	}
	l, err := link.AttachCgroup(link.CgroupOptions{Path: k.o.CgroupRoot, Attach: h.attach, Program: k.coll.Programs[h.program]})
	if err != nil {
		return nil, fmt.Errorf("attach %s to %s: %w%s", h.program, k.o.CgroupRoot, err, attachHint(err, before))
	}
	after, err := k.o.effective(h)
	replaced := difference(before, after)
	if err == nil && len(replaced) == 0 {
		return l, nil
	}
	err = errors.Join(err, l.Detach(), l.Close())
	if err != nil {
		return nil, fmt.Errorf("attach %s to %s: %w", h.program, k.o.CgroupRoot, err)
	}
	again, err := k.o.effective(h)
	if err != nil {
		return nil, err
	}
	if len(difference(replaced, again)) == len(replaced) {
		return k.attachHook(h) // they went by themselves, just then
	}
	return nil, fmt.Errorf("%w: at %s, %s of somebody else is attached above %s so that any program below takes its place (BPF_F_ALLOW_OVERRIDE), and ours would: attach it with BPF_F_ALLOW_MULTI, or give another --cgroup-root",
		ErrInTheWay, h.label(), describePrograms(replaced), k.o.CgroupRoot)
}

func attachHint(err error, there []ebpf.ProgramID) string {
	if !errors.Is(err, unix.EPERM) {
		return ""
	}
	if len(there) == 0 {
		return " (needs CAP_NET_ADMIN)"
	}
	return fmt.Sprintf(" (%s of somebody else is attached there or above and allows no others: attach it with BPF_F_ALLOW_MULTI; `bpftool cgroup tree` shows where)", describePrograms(there))
}

// difference is what a has and b has not.
func difference(a, b []ebpf.ProgramID) []ebpf.ProgramID {
	return slices.DeleteFunc(slices.Clone(a), func(id ebpf.ProgramID) bool { return slices.Contains(b, id) })
}

func (k *Kernel) detachUDP() error {
	for _, h := range slices.Backward(hooks()) {
		l := k.links[h.name]
		if l == nil || !h.udp {
			continue
		}
		if err := detachLink(filepath.Join(k.o.pins(), h.name)); err != nil {
			return fmt.Errorf("detach %s: %w", h.name, err)
		}
		l.Close()
		delete(k.links, h.name)
	}
	return nil
}

// publish pins what was loaded: aside, then with one rename in its place.
func (k *Kernel) publish() (err error) {
	defer func() {
		if err != nil {
			for name, l := range k.links {
				l.Close()
				delete(k.links, name)
			}
		}
	}()
	if err := writeLayout(k.coll.Maps[kernelMapLayout]); err != nil {
		return err
	}
	if err := k.pinAll(); err != nil {
		return err
	}
	k.pinned = true
	return nil
}

// pinAll makes the pin directory.
func (k *Kernel) pinAll() (err error) {
	aside := filepath.Join(k.o.dir(), staging+strconv.Itoa(os.Getpid()))
	if err := os.Mkdir(aside, 0o700); err != nil {
		return fmt.Errorf("pin directory: %w", err)
	}
	defer func() {
		if err != nil {
			os.RemoveAll(aside)
		}
	}()
	for name, p := range k.pinnable() {
		if err := p.Pin(filepath.Join(aside, name)); err != nil {
			return fmt.Errorf("pin %s: %w", name, err)
		}
	}
	if err := os.Rename(aside, k.o.pins()); err != nil {
		return fmt.Errorf("publish the pins: %w", err)
	}
	return nil
}

// pinner is a map or a link.
type pinner interface {
	Pin(path string) error
	Unpin() error
}

// pinnable is all that outlives this process, by the name of its pin.
func (k *Kernel) pinnable() map[string]pinner {
	all := map[string]pinner{}
	for name, m := range k.coll.Maps {
		if isPinned(name) {
			all[name] = m
		}
	}
	for name, l := range k.links {
		all[name] = l
	}
	return all
}

// Repin pins again what somebody has removed by hand, and says whether anything was.
// While this process lives, its links and maps are in force without their pins. The
// lock is taken again if its directory is gone; somebody else who has it then is a
// BusyError.
func (k *Kernel) Repin() (bool, error) {
	if !k.pinned {
		return false, nil
	}
	entries, err := os.ReadDir(k.o.pins())
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return false, fmt.Errorf("pin directory: %w", err)
	}
	missing := k.pinnable()
	for _, e := range entries {
		delete(missing, e.Name())
	}
	if len(missing) == 0 {
		return false, nil
	}
	if err := k.o.checkBPFFS(); err != nil {
		return false, err
	}
	if err := k.relock(); err != nil {
		return false, err
	}
	for name, p := range missing {
		// Or it would take itself for pinned: it remembers its path.
		if err := p.Unpin(); err != nil {
			return false, fmt.Errorf("pin %s again: %w", name, err)
		}
	}
	if len(entries) == 0 {
		// With one rename, as at first: a start never finds half of it.
		if err := os.Remove(k.o.pins()); err != nil && !errors.Is(err, os.ErrNotExist) {
			return false, fmt.Errorf("pin directory: %w", err)
		}
		return true, k.pinAll()
	}
	for name, p := range missing {
		if err := p.Pin(filepath.Join(k.o.pins(), name)); err != nil {
			return true, fmt.Errorf("pin %s again: %w", name, err)
		}
	}
	return true, nil
}

// relock takes the lock again if the directory that it is of has been removed.
func (k *Kernel) relock() error {
	held, err := k.lock.Stat()
	if err != nil {
		return fmt.Errorf("pin directory: %w", err)
	}
	if there, err := os.Stat(k.o.dir()); err == nil && os.SameFile(held, there) {
		return nil
	}
	lock, err := k.o.lock()
	if err != nil {
		return err
	}
	k.lock.Close()
	k.lock = lock
	return nil
}

// Forget frees the indices of bulkheads and routes that the plan in force does not
// name and that no slot holds. Apply does it; what was held then is forgotten by a
// later call.
func (k *Kernel) Forget() error {
	if k.plan == nil {
		return nil
	}
	bulkheads := make(map[policy.Key]bool, len(k.plan.Bulkheads))
	for _, b := range k.plan.Bulkheads {
		bulkheads[b.Key] = true
	}
	routes := make(map[trafficKey]bool, len(k.plan.Routes))
	for _, r := range k.plan.Routes {
		routes[routeKey(k.plan, r)] = true
	}
	if len(bulkheads) == len(k.bulkheads.at) && len(routes) == len(k.traffic.at) {
		return nil
	}
	if err := k.wait(); err != nil {
		return err
	}
	slots, err := readSlots(k.coll.Maps)
	if err != nil {
		return err
	}
	heldB, heldT := map[uint32]bool{}, map[uint32]bool{}
	for _, s := range slots {
		heldT[s.Traffic] = true
		if s.Part != 0 {
			heldT[s.Part-1] = true
		}
		for i := range min(int(s.N), len(s.Bulkheads)) {
			heldB[s.Bulkheads[i]] = true
		}
	}
	err = errors.Join(
		k.bulkheads.retire(func(key policy.Key) bool { return bulkheads[key] }, heldB),
		k.traffic.retire(func(key trafficKey) bool { return routes[key] }, heldT))
	f := *k.known.Load()
	f.names = k.names()
	k.known.Store(&f)
	return err
}

// Close ends this process's hold. Programs, limits and counts stay in force if they
// were ever applied; else everything is gone.
func (k *Kernel) Close() error {
	if k.word != nil {
		unix.Munmap(k.word)
		k.word = nil
	}
	for _, l := range k.links {
		l.Close()
	}
	for _, p := range k.predecessors {
		p.close()
	}
	closeAll(k.inner)
	if k.coll != nil {
		k.coll.Close()
	}
	if !k.pinned {
		os.Remove(k.o.dir()) // ours; it stays if there is anything in it
	}
	return k.lock.Close()
}

// Reader reads what this Kernel has loaded, before and after it is pinned, in any
// goroutine. It shares the maps: close the Kernel, not the Reader.
func (k *Kernel) Reader() *Reader { return &Reader{o: k.o, maps: k.coll.Maps, known: &k.known} }
