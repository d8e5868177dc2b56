package conn

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"bulkhead/pkg/policy"
)

// An agent of another release, newer or older, may have left maps of another layout, in
// a directory of their own beside ours. Its programs stay attached while ours come into
// force, so that both judge each connect: there is no moment without limits, and none in
// which one map counts a connection twice. Then each of its slots gets one of ours, and
// its programs go. A start that is killed in between is finished by the next: nothing here
// does harm when it is done again.
//
// What a field means is the same in every layout, wherever it stands; where, the other
// release has written into its map layout.

// layoutTypes are the structures whose fields are described.
func layoutTypes() map[string]reflect.Type {
	return map[string]reflect.Type{
		"slot": reflect.TypeFor[kernelSlot](), "udp_socket": reflect.TypeFor[kernelUdpSocket](),
		"bulkhead": reflect.TypeFor[kernelBulkhead](), "traffic_count": reflect.TypeFor[kernelTrafficCount](),
		"bulkhead_name": reflect.TypeFor[kernelBulkheadName](), "traffic_name": reflect.TypeFor[kernelTrafficName](),
	}
}

// layout is where fields are, by name: "slot.Word".
type layout map[string]kernelLayoutField

// ownLayout is this build's.
func ownLayout() layout {
	l := layout{}
	for name, t := range layoutTypes() {
		for i := range t.NumField() {
			f := t.Field(i)
			if !f.IsExported() || strings.HasPrefix(f.Name, "Pad") {
				continue
			}
			field := kernelLayoutField{Offset: uint32(f.Offset), Size: uint32(f.Type.Size())}
			setText(field.Name[:], name+"."+f.Name)
			l[name+"."+f.Name] = field
		}
	}
	return l
}

// writeLayout describes our maps.
func writeLayout(m *ebpf.Map) error {
	at := uint32(0)
	for _, f := range ownLayout() {
		if err := m.Update(at, &f, ebpf.UpdateAny); err != nil {
			return fmt.Errorf("describe the layout: %w", err)
		}
		at++
	}
	return nil
}

// decode fills in a structure of ours, named as in layoutTypes, from one of that layout.
// A field that is longer there loses its high bytes, one that is missing is zero.
func (l layout) decode(name string, raw []byte, into any) {
	v := reflect.ValueOf(into).Elem()
	out := unsafe.Slice((*byte)(v.Addr().UnsafePointer()), v.Type().Size())
	for i := range v.NumField() {
		f := v.Type().Field(i)
		from, ok := l[name+"."+f.Name]
		if !ok || int(from.Offset+from.Size) > len(raw) {
			continue
		}
		n := min(uintptr(from.Size), f.Type.Size())
		copy(out[f.Offset:f.Offset+n], raw[from.Offset:])
	}
}

// predecessor is what another release has in force.
type predecessor struct {
	dir    string
	layout layout
	maps   map[string]*ebpf.Map
}

// others are the directories of other layouts.
func (o Options) others() ([]string, error) {
	entries, err := os.ReadDir(o.dir())
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("pin directory: %w%s", err, needsRoot(err))
	}
	var dirs []string
	for _, e := range entries {
		if dir := filepath.Join(o.dir(), e.Name()); strings.HasPrefix(e.Name(), "v") && dir != o.pins() {
			dirs = append(dirs, dir)
		}
	}
	return dirs, nil
}

// openPredecessor opens what can be taken over, or says why it cannot.
func openPredecessor(dir string) (_ *predecessor, err error) {
	p := &predecessor{dir: dir, layout: layout{}, maps: map[string]*ebpf.Map{}}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	for _, name := range []string{kernelMapLayout, kernelMapHomes, kernelMapSlots, kernelMapUdpSockets, kernelMapBulkheads,
		kernelMapTraffic, kernelMapTotals, kernelMapBulkheadNames, kernelMapTrafficNames} {
		m, err := ebpf.LoadPinnedMap(filepath.Join(dir, name), nil)
		if errors.Is(err, os.ErrNotExist) && name != kernelMapLayout {
			continue // that release has none
		}
		if err != nil {
			return nil, fmt.Errorf("%w: %s is of a release that this one cannot take over (%s: %w); go on with that release, or end its limits with `bulkhead detach`",
				ErrForeign, dir, name, err)
		}
		p.maps[name] = m
	}
	m := p.maps[kernelMapLayout]
	for i := range m.MaxEntries() {
		var f kernelLayoutField
		if err := m.Lookup(i, &f); err != nil {
			return nil, fmt.Errorf("%w: layout of %s: %w", ErrForeign, dir, err)
		}
		if name := text(f.Name[:]); name != "" {
			p.layout[name] = f
		}
	}
	for _, need := range []string{"slot.Word", "slot.Cookie", "slot.Traffic", "slot.N", "slot.Bulkheads", "traffic_name.Provider", "bulkhead_name.Scope"} {
		if _, ok := p.layout[need]; !ok {
			return nil, fmt.Errorf("%w: layout of %s lacks %s: it is of a release that this one cannot take over", ErrForeign, dir, need)
		}
	}
	return p, nil
}

func (p *predecessor) close() { closeAll(p.maps) }

// each calls f with every key and value of a map, whatever they are, reading in batches.
func (p *predecessor) each(name string, f func(key, value []byte)) error {
	m := p.maps[name]
	if m == nil {
		return nil
	}
	const batch = 1024 // see readHash
	array := func(size uint32) reflect.Value {
		t := reflect.SliceOf(reflect.ArrayOf(int(size), reflect.TypeFor[byte]()))
		return reflect.MakeSlice(t, batch, batch)
	}
	keys, values := array(m.KeySize()), array(m.ValueSize())
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys.Interface(), values.Interface(), nil)
		for i := range n {
			f(keys.Index(i).Bytes(), values.Index(i).Bytes())
		}
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read %s of %s: %w", name, p.dir, err)
		}
	}
}

// slots are those that hold something or whose bytes are still to be counted.
func (p *predecessor) slots() (all []slot, err error) {
	add := func(_, raw []byte) {
		var s slot
		p.layout.decode("slot", raw, &s.kernelSlot)
		if s.Word != 0 && s.Word&uint64(kernelConstantSLOT_CLAIMED) == 0 {
			all = append(all, s)
		}
	}
	err = errors.Join(p.each(kernelMapHomes, add), p.each(kernelMapSlots, add))
	return all, err
}

// names are the indices of counts there.
func (p *predecessor) names() (*names, error) {
	n := &names{map[policy.Key]uint32{}, map[trafficKey]uint32{}}
	return n, errors.Join(
		p.each(kernelMapBulkheadNames, func(at, raw []byte) {
			var b kernelBulkheadName
			p.layout.decode("bulkhead_name", raw, &b)
			// A scope that we do not know is none of our plan's.
			if k, err := b.key(); err == nil {
				n.bulkheads[k] = binary.NativeEndian.Uint32(at)
			}
		}),
		p.each(kernelMapTrafficNames, func(at, raw []byte) {
			var t kernelTrafficName
			p.layout.decode("traffic_name", raw, &t)
			n.traffic[t.key()] = binary.NativeEndian.Uint32(at)
		}))
}

// carry raises our counts, of names that we have, to theirs: before our programs are
// attached, and again when theirs are gone, so that no count ever falls. What happens
// between the first reading and our attaching is lost to them.
func (k *Kernel) carry(p *predecessor) error {
	theirs, err := p.names()
	if err != nil {
		return err
	}
	raw := func(name string, at uint32) ([]byte, error) {
		m := p.maps[name]
		if m == nil {
			return nil, nil
		}
		b := make([]byte, m.ValueSize())
		return b, m.Lookup(at, &b)
	}
	b, err := k.raiser(kernelMapBulkheads)
	if err != nil {
		return err
	}
	defer b.close()
	for key, from := range theirs.bulkheads {
		at, ok := k.bulkheads.at[key]
		if !ok {
			continue
		}
		v, err := raw(kernelMapBulkheads, from)
		if err != nil {
			return fmt.Errorf("read the counts of %s: %w", key, err)
		}
		var c kernelBulkhead
		p.layout.decode("bulkhead", v, &c)
		b.peak(at, c.Peak)
		b.raise(at, unsafe.Offsetof(c.Accepted), c.Accepted)
		for i := range c.Rejected {
			b.raise(at, unsafe.Offsetof(c.Rejected)+8*uintptr(i), c.Rejected[i])
			b.raise(at, unsafe.Offsetof(c.WouldReject)+8*uintptr(i), c.WouldReject[i])
		}
	}
	t, err := k.raiser(kernelMapTraffic)
	if err != nil {
		return err
	}
	defer t.close()
	for key, from := range theirs.traffic {
		at, ok := k.traffic.at[key]
		if !ok {
			continue
		}
		v, err := raw(kernelMapTraffic, from)
		if err != nil {
			return fmt.Errorf("read the traffic of %v: %w", key, err)
		}
		var c kernelTrafficCount
		p.layout.decode("traffic_count", v, &c)
		t.raise(at, unsafe.Offsetof(c.Connections), c.Connections)
		t.raise(at, unsafe.Offsetof(c.TxBytes), c.TxBytes)
		t.raise(at, unsafe.Offsetof(c.RxBytes), c.RxBytes)
	}
	totals, err := k.raiser(kernelMapTotals)
	if err != nil {
		return err
	}
	defer totals.close()
	for i := range uint32(kernelTotalTOTALS) {
		v, err := raw(kernelMapTotals, i)
		if err == nil && len(v) == 8 {
			totals.raise(i, 0, binary.NativeEndian.Uint64(v))
		}
	}
	return nil
}

// raiser writes counts that programs add to meanwhile.
type raiser struct {
	mapped []byte
	size   uintptr // of an element
}

func (k *Kernel) raiser(name string) (*raiser, error) {
	m := k.coll.Maps[name]
	size := int(m.ValueSize()+7) &^ 7
	b, err := unix.Mmap(m.FD(), 0, (int(m.MaxEntries())*size+os.Getpagesize()-1)&^(os.Getpagesize()-1), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", name, err)
	}
	return &raiser{b, uintptr(size)}, nil
}

func (r *raiser) close() { unix.Munmap(r.mapped) }

func (r *raiser) at(i uint32, offset uintptr) *uint64 {
	return (*uint64)(unsafe.Pointer(&r.mapped[uintptr(i)*r.size+offset]))
}

// raise makes a count at least least.
func (r *raiser) raise(i uint32, offset uintptr, least uint64) {
	p := r.at(i, offset)
	for {
		if now := atomic.LoadUint64(p); now >= least || atomic.CompareAndSwapUint64(p, now, least) {
			return
		}
	}
}

// peak raises a peak, which is in one word with what is in use.
func (r *raiser) peak(i, least uint32) {
	p := r.at(i, 0)
	for {
		now := atomic.LoadUint64(p)
		if uint32(now>>32) >= least || atomic.CompareAndSwapUint64(p, now, now&0xffffffff|uint64(least)<<32) {
			return
		}
	}
}

// succeed gives each slot of a predecessor one of ours, and then ends it: its programs,
// its pins. Ours are attached.
func (k *Kernel) succeed(p *predecessor) error {
	// A connect that began before ours were attached is theirs alone.
	if err := k.wait(); err != nil {
		return err
	}
	theirs, err := p.names()
	if err != nil {
		return err
	}
	if err := k.importSlots(p, theirs); err != nil {
		return err
	}
	aside, err := k.putAside(p)
	if err != nil {
		return err
	}
	entries, err := os.ReadDir(aside)
	if err != nil {
		return fmt.Errorf("pins of the release before: %w", err)
	}
	// What takes slots goes first, as in Detach.
	if err := detachAll(aside, entries); err != nil {
		return err
	}
	if err := k.carry(p); err != nil {
		return err
	}
	if err := os.RemoveAll(aside); err != nil {
		return fmt.Errorf("remove the pins of the release before: %w", err)
	}
	return nil
}

// putAside makes a predecessor nobody's: a start that is killed from here on leaves what
// the next removes, and not maps that say of closed connections that they are open.
func (k *Kernel) putAside(p *predecessor) (string, error) {
	aside := filepath.Join(k.o.dir(), staging+filepath.Base(p.dir)+"-"+strconv.Itoa(os.Getpid()))
	if err := os.Rename(p.dir, aside); err != nil {
		return "", fmt.Errorf("put the pins of the release before aside: %w", err)
	}
	return aside, nil
}

// importSlots makes our slots of theirs. A socket's release runs their program first and
// then ours, in the order of attaching. So if theirs still holds after ours is there, ours
// will be given back too; if it does not, that may have been before, and we give it back.
func (k *Kernel) importSlots(p *predecessor, theirs *names) error {
	slots, err := p.slots()
	if err != nil {
		return err
	}
	bulkheads, traffic := invert(theirs.bulkheads), invert(theirs.traffic)
	var ours []slot
	held := map[slotKey]slot{}
	for _, s := range slots {
		in, err := k.translate(p, s, bulkheads, traffic)
		if err != nil {
			return err
		}
		out, err := k.runAdopt(in)
		if err != nil {
			return err
		}
		if out.Done != 0 {
			ours = append(ours, slot{out.Slot})
			held[slotKey{s.Cookie, out.Slot.Part}] = s
		}
	}
	now, err := p.slots()
	if err != nil {
		return err
	}
	alive := make(map[uint64]bool, len(now)) // by word
	released := map[uint64]bool{}
	for _, s := range now {
		alive[s.admission()] = true
		released[s.admission()] = s.released()
	}
	for _, s := range ours {
		was := held[s.key()]
		if alive[was.admission()] && released[was.admission()] == was.released() {
			continue
		}
		if !s.released() {
			if _, err := k.retire(&s); err != nil {
				return err
			}
			s.Word |= uint64(kernelConstantSLOT_RELEASED)
		}
		if !alive[was.admission()] {
			if err := k.bury(&s); err != nil {
				return err
			}
		}
	}
	return nil
}

// translate is a slot of theirs in our indices. What no plan of ours names is named.
func (k *Kernel) translate(p *predecessor, s slot, bulkheads map[uint32]policy.Key, traffic map[uint32]trafficKey) (*kernelAdopt, error) {
	in := &kernelAdopt{Slot: s.kernelSlot}
	in.Slot.Word &= uint64(kernelConstantSLOT_RELEASED)
	in.Slot.N = 0
	for _, from := range s.Bulkheads[:min(int(s.N), len(s.Bulkheads))] {
		key, ok := bulkheads[from]
		if !ok || s.released() {
			continue
		}
		at, err := k.bulkheads.index(key)
		if err != nil {
			return nil, err
		}
		in.Slot.Bulkheads[in.Slot.N] = at
		in.Slot.N++
	}
	name, ok := traffic[s.Traffic]
	if !ok {
		return nil, fmt.Errorf("%w: a slot of %s names route %d, which has no name", ErrForeign, p.dir, s.Traffic)
	}
	at, err := k.traffic.index(name)
	if err != nil {
		return nil, err
	}
	in.Slot.Traffic = at
	if s.Part != 0 {
		// As computed for our own routes: from the index of the first compartment's.
		at, err := k.traffic.index(trafficKey{feature: policy.DefaultFeature, provider: name.provider})
		if err != nil {
			return nil, err
		}
		in.Slot.Part = at + 1
		if m := p.maps[kernelMapUdpSockets]; m != nil {
			raw := make([]byte, m.ValueSize())
			if m.Lookup(s.Cookie, &raw) == nil {
				var u kernelUdpSocket
				p.layout.decode("udp_socket", raw, &u)
				if u.Connected == s.Part {
					in.Connected = 1
				}
			}
		}
	}
	return in, nil
}

// runAdopt runs the program that puts a slot.
func (k *Kernel) runAdopt(in *kernelAdopt) (out kernelAdopt, err error) {
	if _, err := k.coll.Programs[kernelProgBhAdopt].Run(&ebpf.RunOptions{Context: in, ContextOut: &out}); err != nil {
		return out, fmt.Errorf("adopt socket %d: %w", in.Slot.Cookie, err)
	}
	return out, nil
}

// openPredecessors opens all that other releases have left.
func (o Options) openPredecessors() (all []*predecessor, err error) {
	dirs, err := o.others()
	if err != nil {
		return nil, err
	}
	slices.Sort(dirs)
	for _, dir := range dirs {
		p, err := openPredecessor(dir)
		if err != nil {
			for _, p := range all {
				p.close()
			}
			return nil, err
		}
		all = append(all, p)
	}
	return all, nil
}

// succeedAll ends every predecessor, once ours is in force.
func (k *Kernel) succeedAll() error {
	var errs []error
	var left []*predecessor
	for _, p := range k.predecessors {
		if err := k.succeed(p); err != nil {
			errs = append(errs, fmt.Errorf("take over from the release before: %w", err))
			left = append(left, p)
			continue
		}
		p.close()
	}
	k.predecessors = left
	return errors.Join(errs...)
}
