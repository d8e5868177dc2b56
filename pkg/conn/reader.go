package conn

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"bulkhead/internal/sockets"
	"bulkhead/pkg/policy"
)

// Reader reads what is pinned, with or without an agent. It writes nothing.
type Reader struct {
	o    Options
	maps map[string]*ebpf.Map
	// known is what the agent itself has put in force: to read it back from the maps
	// of a generation needs CAP_SYS_ADMIN. nil for everybody else.
	known *atomic.Pointer[inForce]
}

// OpenReader opens the pins of an instance; ErrNotLoaded if there are none, and
// ErrOtherRelease if they are of another layout.
func OpenReader(o Options) (*Reader, error) {
	if err := o.checkBPFFS(); err != nil {
		return nil, err
	}
	if _, err := os.Stat(o.pins()); err != nil {
		if others, _ := o.others(); errors.Is(err, os.ErrNotExist) && len(others) > 0 {
			return nil, fmt.Errorf("%s: %w (use the bulkhead that made it, or start this one's agent, which takes over)", others[0], ErrOtherRelease)
		}
		if errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("%s: %w (start the agent: bulkhead agent --policy FILE)", o.pins(), ErrNotLoaded)
		}
		if errors.Is(err, os.ErrPermission) {
			return nil, fmt.Errorf("%w (needs root)", err)
		}
		return nil, err
	}
	spec, err := loadKernel()
	if err != nil {
		return nil, err
	}
	maps, err := o.pinnedMaps(spec, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return nil, err
	}
	return &Reader{o: o, maps: maps}, nil
}

// Close closes the maps.
func (r *Reader) Close() error {
	closeAll(r.maps)
	return nil
}

// inForce is what a generation says of itself.
type inForce struct {
	gen     kernelGen
	plan    *policy.Plan
	members []Member
	// names of the counts, of a Kernel's own Readers only: nobody else gives names
	// while the Kernel is open, and to read them takes longer than all the rest.
	names *names
}

// inForce reads the generation in force: as one, though it may be flipped while it
// is read.
func (r *Reader) inForce() (*inForce, error) {
	if r.known != nil {
		if f := r.known.Load(); f != nil {
			return f, nil
		}
	}
	for range 10 {
		var before, after kernelControlWord
		if err := r.maps[kernelMapControl].Lookup(uint32(0), &before); err != nil {
			return nil, fmt.Errorf("read the control word: %w", err)
		}
		f, err := r.generationAt(uint32(before.Word & 1))
		if err2 := r.maps[kernelMapControl].Lookup(uint32(0), &after); err2 != nil {
			return nil, fmt.Errorf("read the control word: %w", err2)
		}
		// After a flip the index that was read is the one that is built next.
		if before == after {
			return f, err
		}
	}
	return nil, errors.New("read the generation in force: it changed ten times meanwhile")
}

// names are where the counts of what is. They are not to be changed.
func (r *Reader) names() (*names, error) {
	if r.known != nil {
		if f := r.known.Load(); f != nil {
			return f.names, nil
		}
	}
	b, t, err := readNames(r.maps)
	return &names{b, t}, err
}

// Plan reads the plan in force alone, which is much cheaper than a Snapshot.
func (r *Reader) Plan() (*policy.Plan, error) {
	f, err := r.inForce()
	if err != nil {
		return nil, err
	}
	return f.plan, nil
}

func (r *Reader) generationAt(idx uint32) (*inForce, error) {
	f := &inForce{}
	if err := r.maps[kernelMapGens].Lookup(idx, &f.gen); err != nil {
		return nil, fmt.Errorf("read the generation in force: %w", err)
	}
	inner := func(name string) (*ebpf.Map, error) {
		var m *ebpf.Map
		if err := r.maps[name].Lookup(idx, &m); err != nil {
			if errors.Is(err, unix.EPERM) {
				return nil, fmt.Errorf("open %s of the generation in force: %w (needs CAP_SYS_ADMIN)", name, err)
			}
			return nil, fmt.Errorf("open %s of the generation in force: %w", name, err)
		}
		return m, nil
	}
	plans, err := inner(kernelMapPlans)
	if err != nil {
		return nil, err
	}
	defer plans.Close()
	var b strings.Builder
	var c kernelPlanChunk
	for i := range plans.MaxEntries() {
		if err := plans.Lookup(i, &c); err != nil {
			return nil, fmt.Errorf("read the plan in force: %w", err)
		}
		for _, x := range c.Text[:min(int(c.Used), len(c.Text))] {
			b.WriteByte(byte(x))
		}
	}
	f.plan = new(policy.Plan)
	if err := json.Unmarshal([]byte(b.String()), f.plan); err != nil {
		return nil, fmt.Errorf("read the plan in force: %w", err)
	}
	comps, err := inner(kernelMapComps)
	if err != nil {
		return nil, err
	}
	defer comps.Close()
	err = readHash(comps, func(id uint64, comp *uint32) error {
		m := Member{CgroupID: id, Compartment: *comp}
		if *comp == uint32(kernelConstantCOMPARTMENT_PROTECTED) {
			m = Member{CgroupID: id, Protected: true}
		}
		f.members = append(f.members, m)
		return nil
	})
	if err != nil {
		return nil, err
	}
	sortMembers(f.members)
	return f, nil
}

func sortMembers(m []Member) {
	slices.SortFunc(m, func(a, b Member) int { return cmp.Compare(a.CgroupID, b.CgroupID) })
}

// slotKey names an entry: a socket's cookie, and the number of its provider for UDP.
type slotKey struct {
	cookie uint64
	part   uint32
}

// slot is an entry of homes or of the hash.
type slot struct{ kernelSlot }

func (s *slot) key() slotKey { return slotKey{s.Cookie, s.Part} }

func (s *slot) released() bool { return s.Word&uint64(kernelConstantSLOT_RELEASED) != 0 }

// admission names the admission, released or not.
func (s *slot) admission() uint64 { return s.Word &^ uint64(kernelConstantSLOT_RELEASED) }

func (s *slot) has(flag kernelSlotFlag) bool { return s.Flags&uint8(flag) != 0 }

func (s *slot) remote() netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(s.Addr).Unmap(), s.Port)
}

// readSlots reads every slot. Entries that come and go meanwhile may or may not be
// there.
func readSlots(maps map[string]*ebpf.Map) ([]slot, error) {
	all, err := readHomes(maps[kernelMapHomes])
	if err != nil {
		return nil, err
	}
	guests, err := readGuests(maps)
	return append(all, guests...), err
}

// readGuests reads those that are in the hash.
func readGuests(maps map[string]*ebpf.Map) (all []slot, err error) {
	err = readHash(maps[kernelMapSlots], func(_ kernelSlotKey, s *kernelSlot) error {
		all = append(all, slot{*s})
		return nil
	})
	return all, err
}

// readHomes reads the array of slots through a mapping: nearly all of it is free, which
// one word of each says.
func readHomes(m *ebpf.Map) (all []slot, err error) {
	const size = unsafe.Sizeof(kernelSlot{})
	b, err := unix.Mmap(m.FD(), 0, int(m.MaxEntries())*int(size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", m, err)
	}
	defer unix.Munmap(b)
	type words [size / 8]uint64
	for i := range m.MaxEntries() {
		home := (*words)(unsafe.Pointer(&b[uintptr(i)*size]))
		for range 4 {
			var copied words
			// One after the other, as atomic loads are: the word is of what follows if it
			// is still the same behind it.
			for j := range home {
				if j == 1 && copied[0] == 0 {
					break
				}
				copied[j] = atomic.LoadUint64(&home[j])
			}
			if copied[0] == 0 || copied[0]&uint64(kernelConstantSLOT_CLAIMED) != 0 {
				break // free, or not yet
			}
			if after := atomic.LoadUint64(&home[0]); (after^copied[0])&^uint64(kernelConstantSLOT_RELEASED) == 0 {
				all = append(all, slot{*(*kernelSlot)(unsafe.Pointer(&copied))})
				break
			}
		}
	}
	return all, nil
}

// readHash calls each for every entry of a hash map, reading in batches.
func readHash[K, V any](m *ebpf.Map, each func(K, *V) error) error {
	const batch = 1024 // far more than the longest chain of a bucket, or the kernel says ENOSPC
	var cursor ebpf.MapBatchCursor
	keys, values := make([]K, batch), make([]V, batch)
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		for i := range n {
			if err := each(keys[i], &values[i]); err != nil {
				return fmt.Errorf("%s[%v]: %w", m, keys[i], err)
			}
		}
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read %s: %w", m, err)
		}
	}
}

// readArray reads an array map's first n elements. Only what names lead to is of
// interest, so n is the highest index named plus one.
func readArray[T any](m *ebpf.Map, n uint32) ([]T, error) {
	if n == 0 {
		return nil, nil
	}
	keys, values := make([]uint32, n), make([]T, n)
	var cursor ebpf.MapBatchCursor
	if _, err := m.BatchLookup(&cursor, keys, values, nil); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, fmt.Errorf("read %d elements of %s: %w", n, m, err)
	}
	return values, nil
}

func top[K comparable](at map[K]uint32) (n uint32) {
	for _, i := range at {
		n = max(n, i+1)
	}
	return n
}

func invert[K comparable](at map[K]uint32) map[uint32]K {
	names := make(map[uint32]K, len(at))
	for k, i := range at {
		names[i] = k
	}
	return names
}

// Snapshot reads everything once. The counts of one bulkhead are of one moment;
// different ones may be microseconds apart, since connects go on.
func (r *Reader) Snapshot(ctx context.Context) (*Snapshot, error) {
	f, err := r.inForce()
	if err != nil {
		return nil, err
	}
	at, err := r.names()
	if err != nil {
		return nil, err
	}
	bulkheadAt, trafficAt := at.bulkheads, at.traffic
	s := &Snapshot{Time: time.Now(), Generation: f.gen.Generation, Plan: f.plan, Members: f.members}
	if s.Bulkheads, err = r.bulkheads(f.plan, bulkheadAt); err != nil {
		return nil, err
	}
	if s.Refusals, err = r.refusals(bulkheadAt, trafficAt); err != nil {
		return nil, err
	}

	slots, err := readSlots(r.maps)
	if err != nil {
		return nil, err
	}
	live := map[uint64]sockets.Socket{}
	wanted := map[uint64]struct{}{}
	for _, sl := range slots {
		wanted[sl.Netns] = struct{}{}
	}
	if len(wanted) > 0 {
		for _, d := range sockets.ReadAll(ctx, wanted, protocols(slots)...) {
			for cookie, so := range d.Sockets {
				live[cookie] = so
			}
			if _, asked := wanted[d.Cookie]; asked && !d.Complete {
				s.Unseen = append(s.Unseen, fmt.Sprintf("%d: %v", d.Cookie, d.Err))
			}
		}
	}
	sums, after, err := r.sums(top(trafficAt), live)
	if err != nil {
		return nil, err
	}

	traffic := make(map[uint32]*Traffic, len(trafficAt))
	countOnly := countOnlyRoutes(f.plan)
	for k, i := range trafficAt {
		traffic[i] = &Traffic{
			Feature: k.feature, Tenant: k.tenant, Provider: k.provider,
			Connections: sums[i].Connections, TxBytes: sums[i].TxBytes, RxBytes: sums[i].RxBytes,
			Bytes: !countOnly[k] || sums[i].TxBytes+sums[i].RxBytes > 0,
		}
	}
	names := invert(bulkheadAt)
	admissions := make(map[slotKey]uint64, len(slots))
	for _, sl := range slots {
		admissions[sl.key()] = sl.admission()
	}
	now := monotonic()
	for _, sl := range after {
		c := Connection{
			Cookie: sl.Cookie, Netns: sl.Netns, PID: sl.Pid, Comm: command(sl.Pid, sl.Comm[:]),
			Remote: sl.remote(), Proto: policy.Proto(sl.Proto), Age: time.Duration(now - int64(sl.BornNs)),
		}
		t := traffic[sl.Traffic]
		so, seen := live[sl.Cookie]
		// The socket that was dumped belongs to this admission only if it was there
		// before the dump.
		if seen && admissions[sl.key()] == sl.admission() {
			c.State, c.TxBytes, c.RxBytes = so.State.String(), so.TxBytes, so.RxBytes
			c.Idle = min(so.LastSent, so.LastReceived)
			if c.Proto == policy.UDP {
				c.Idle = max(0, time.Duration(now-int64(sl.Tally)))
			}
			// Nobody reads the bytes of one that was adopted when it closes, and a sum
			// never falls.
			if t != nil && !sl.has(kernelSlotFlagSLOT_ADOPTED) {
				t.TxBytes += so.TxBytes
				t.RxBytes += so.RxBytes
			}
		}
		if sl.released() {
			continue // given back; it stays only until its bytes are counted
		}
		if t != nil {
			c.Feature, c.Tenant, c.Provider = t.Feature, t.Tenant, t.Provider
		}
		for i := range min(int(sl.N), len(sl.Bulkheads)) {
			if k, ok := names[sl.Bulkheads[i]]; ok {
				c.Bulkheads = append(c.Bulkheads, k)
			}
		}
		s.Connections = append(s.Connections, c)
	}
	slices.SortFunc(s.Connections, func(a, b Connection) int {
		return cmp.Or(-cmp.Compare(a.Age, b.Age), cmp.Compare(a.Cookie, b.Cookie))
	})
	for _, t := range traffic {
		s.Traffic = append(s.Traffic, *t)
	}
	slices.SortFunc(s.Traffic, func(a, b Traffic) int {
		return cmp.Or(strings.Compare(a.Feature, b.Feature), strings.Compare(a.Tenant, b.Tenant), strings.Compare(a.Provider, b.Provider))
	})
	if s.Totals, err = r.Totals(); err != nil {
		return nil, err
	}
	s.Totals.Slots = uint64(len(after))
	return s, nil
}

// sums reads the kernel's sums of closed connections and the slots that are not in
// them yet. A connection's bytes are in its socket until it closes and in the sum from
// then on, so a socket that was dumped before counts only if its slot was there both
// before and after the sums were read. If one of them went in between, it is unknown
// whether the sums have it, and they are read again; on a node where that happens
// every time, the snapshot lacks the bytes of connections that closed just then.
func (r *Reader) sums(n uint32, live map[uint64]sockets.Socket) ([]kernelTrafficCount, []slot, error) {
	before, err := readSlots(r.maps)
	for range 5 {
		if err != nil {
			return nil, nil, err
		}
		sums, err := readArray[kernelTrafficCount](r.maps[kernelMapTraffic], n)
		if err != nil {
			return nil, nil, err
		}
		after, err := readSlots(r.maps)
		if err != nil {
			return nil, nil, err
		}
		still := make(map[slotKey]bool, len(after))
		for _, s := range after {
			still[s.key()] = true
		}
		settled := true
		for _, s := range before {
			if _, dumped := live[s.Cookie]; dumped && !still[s.key()] {
				settled = false
			}
		}
		if settled {
			return sums, after, nil
		}
		before = after
	}
	sums, err := readArray[kernelTrafficCount](r.maps[kernelMapTraffic], n)
	return sums, before, err
}

// protocols are those of the slots, so that nothing is dumped for nobody.
func protocols(slots []slot) []uint8 {
	var p []uint8
	for _, s := range slots {
		if !slices.Contains(p, s.Proto) {
			p = append(p, s.Proto)
		}
	}
	slices.Sort(p)
	return p
}

func countOnlyRoutes(plan *policy.Plan) map[trafficKey]bool {
	only := map[trafficKey]bool{}
	for _, r := range plan.Routes {
		if r.CountOnly {
			only[routeKey(plan, r)] = true
		}
	}
	return only
}

func (r *Reader) bulkheads(plan *policy.Plan, at map[policy.Key]uint32) ([]Bulkhead, error) {
	counts, err := readArray[kernelBulkhead](r.maps[kernelMapBulkheads], top(at))
	if err != nil {
		return nil, err
	}
	limits := make(map[policy.Key]policy.Limit, len(plan.Bulkheads))
	for _, b := range plan.Bulkheads {
		limits[b.Key] = b.Limit
	}
	all := make([]Bulkhead, 0, len(at))
	for k, i := range at {
		limit, ok := limits[k]
		c := counts[i]
		if !ok && c.InUse == 0 {
			continue // about to be forgotten
		}
		if !ok {
			limit = policy.Unlimited
		}
		all = append(all, Bulkhead{
			Key: k, Limit: limit, InUse: c.InUse, Peak: c.Peak, Accepted: c.Accepted,
			Rejected: byReason(c.Rejected[:]), WouldReject: byReason(c.WouldReject[:]), Draining: !ok,
		})
	}
	slices.SortFunc(all, func(a, b Bulkhead) int { return a.Key.Compare(b.Key) })
	return all, nil
}

func reason(r uint8) string {
	switch kernelReason(r) {
	case kernelReasonREASON_CONTENDED:
		return "contended"
	case kernelReasonREASON_EXHAUSTED:
		return "exhausted"
	}
	return "full"
}

func byReason(n []uint64) map[string]uint64 {
	m := make(map[string]uint64, len(n))
	for i, c := range n {
		m[reason(uint8(i))] = c
	}
	return m
}

// Refusals are the last ones told on each route, newest first. It is cheap: the
// agent asks once a second.
func (r *Reader) Refusals() ([]Refusal, error) {
	at, err := r.names()
	if err != nil {
		return nil, err
	}
	return r.refusals(at.bulkheads, at.traffic)
}

func (r *Reader) refusals(bulkheadAt map[policy.Key]uint32, trafficAt map[trafficKey]uint32) ([]Refusal, error) {
	raw, err := readArray[kernelRefusal](r.maps[kernelMapRefusals], top(trafficAt))
	if err != nil {
		return nil, err
	}
	counts, err := readArray[kernelBulkhead](r.maps[kernelMapBulkheads], top(bulkheadAt))
	if err != nil {
		return nil, err
	}
	names := invert(bulkheadAt)
	now, mono := time.Now(), monotonic()
	var all []Refusal
	for k, i := range trafficAt {
		f := raw[i]
		if f.AtNs == 0 || f.AtNs != f.ClaimedNs {
			continue // none yet, or one is being written
		}
		var refused, would uint64
		if _, ok := names[f.Bulkhead]; ok { // it may have left the policy
			for i := range counts[f.Bulkhead].Rejected {
				refused += counts[f.Bulkhead].Rejected[i]
				would += counts[f.Bulkhead].WouldReject[i]
			}
		}
		all = append(all, Refusal{
			Refused: refused, WouldRefuse: would,
			Time:  now.Add(-time.Duration(mono - int64(f.AtNs))),
			Total: f.Total, Feature: k.feature, Tenant: k.tenant, Provider: k.provider,
			PID: f.Pid, Comm: command(f.Pid, f.Comm[:]),
			Remote: netip.AddrPortFrom(netip.AddrFrom16(f.Addr).Unmap(), f.Port), Proto: policy.Proto(f.Proto),
			Bulkhead: names[f.Bulkhead], Limit: policy.Limit(f.Limit), Reason: reason(f.Reason), Errno: f.Err, Observed: f.Observed != 0,
		})
	}
	slices.SortFunc(all, func(a, b Refusal) int { return b.Time.Compare(a.Time) })
	return all, nil
}

// Totals are those of a Snapshot, but for Slots, which is 0. It is cheap: the agent asks
// once a second.
func (r *Reader) Totals() (Totals, error) {
	n, err := readArray[uint64](r.maps[kernelMapTotals], uint32(kernelTotalTOTALS))
	if err != nil {
		return Totals{}, err
	}
	return Totals{
		SlotsFull: n[kernelTotalTOTAL_SLOTS_FULL], Underflow: n[kernelTotalTOTAL_UNDERFLOW],
		RefusedEarlier: n[kernelTotalTOTAL_REFUSED_EARLIER], Uncounted: n[kernelTotalTOTAL_UNCOUNTED], SlotsMax: uint64(r.maps[kernelMapSlots].MaxEntries()),
	}, nil
}

// command is what the kernel noted of a process, or, where it may not, what the process
// is called now.
func command(pid uint32, noted []int8) string {
	if c := text(noted); c != "" {
		return c
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil {
		return ""
	}
	return strings.TrimSuffix(string(b), "\n")
}

// monotonic is the clock of bpf_ktime_get_ns, in nanoseconds.
func monotonic() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0 // cannot fail with this clock
	}
	return ts.Nano()
}
