package conn

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"

	"bulkhead/internal/sockets"
	"bulkhead/pkg/policy"
)

// Adopted is what one Adopt did.
type Adopted struct {
	// Slots that connections have now and had not.
	Slots int
	// Unplaced are connections to a provider whose cgroup cannot be told, or is outside
	// of our root.
	Unplaced int
	// Errors are namespaces that could not be read; their connections are not adopted.
	Errors []error
	// Hidden says what kept network namespaces from being found, if anything did: want of
	// permission. Whether any has a connection to adopt is not known.
	Hidden error
}

// Adopt gives a slot to each connection, TCP or connected UDP, that has none and that the
// plan in force would have given one: those from before the attach, and those to what only
// this plan names. They are there already, so they take their places whatever the limits; a
// bulkhead that is over its limit then refuses newcomers until it is below. A connection
// belongs where a process that holds it is now, or, if none is found, where its socket
// was made.
//
// Those of MPTCP are left alone. The close of the others is noticed as any other. The
// kernel tells nothing else of those of TCP, so their bytes are shown while they are open
// and are in no sum; and their age is counted from now.
func (k *Kernel) Adopt(ctx context.Context, where Whereabouts) (Adopted, error) {
	if k.tables == nil {
		return Adopted{}, ErrNoPlan
	}
	protos := []policy.Proto{policy.TCP}
	if k.tables.gen.Udp != 0 {
		protos = append(protos, policy.UDP)
	}
	// Read before the dump: a socket that connects elsewhere after it was dumped has
	// another note by then, and is left alone.
	udp, err := k.udpSockets()
	if err != nil {
		return Adopted{}, err
	}
	dumps, hidden := readEvery(ctx, protos...)
	out := Adopted{Hidden: hidden}
	for _, d := range dumps {
		if !d.Complete {
			out.Errors = append(out.Errors, fmt.Errorf("%s: %w", d.Namespace, d.Err))
		}
	}
	for _, proto := range protos {
		if err := k.adoptAll(ctx, where, proto, dumps, udp, &out); err != nil {
			return out, err
		}
	}
	return out, nil
}

func readEvery(ctx context.Context, protos ...policy.Proto) ([]sockets.Dump, error) {
	var numbers []uint8
	for _, p := range protos {
		numbers = append(numbers, uint8(p))
	}
	return sockets.ReadEvery(ctx, numbers...)
}

// adoptAll adopts what was dumped of one protocol; udp are the notes of before the dump.
func (k *Kernel) adoptAll(ctx context.Context, where Whereabouts, proto policy.Proto, dumps []sockets.Dump, udp map[uint64]kernelUdpSocket, out *Adopted) error {
	f := k.known.Load()
	a := asked{plan: f.plan, where: where, proto: proto, part: func(provider uint32) uint32 {
		if proto != policy.UDP {
			return 0
		}
		return k.tables.routes[provider].Part
	}}
	// Read behind the dump: what the dump saw and our programs know has its slot by now,
	// or is closed.
	slots, err := readSlots(k.coll.Maps)
	if err != nil {
		return err
	}
	found, unplaced := strays(ctx, a, dumps, slots)
	out.Unplaced += unplaced
	n, err := k.take(ctx, f, found, udp)
	out.Slots += n
	return err
}

// take gives strays their slots, and returns how many have one now.
func (k *Kernel) take(ctx context.Context, f *inForce, found []stray, udp map[uint64]kernelUdpSocket) (int, error) {
	if len(found) == 0 {
		return 0, nil
	}
	var adopted []stray
	for _, s := range found {
		var err error
		s.tally = uint64(monotonic())
		if s.word, err = k.adopt(f, s, udp[s.Cookie].Connected); err != nil {
			return len(adopted), err
		}
		if s.word != 0 {
			adopted = append(adopted, s)
		}
	}
	ghosts, err := k.dropGhosts(ctx, adopted)
	return len(adopted) - ghosts, errors.Join(err, k.dropTwins())
}

// Existing says how many connections there are that Adopt would count if a plan came into
// force with everybody there, by bulkhead, without changing anything.
func Existing(ctx context.Context, o Options, plan *policy.Plan, where Whereabouts) (map[policy.Key]uint32, error) {
	a := asked{plan: plan, where: where, proto: policy.TCP, part: func(uint32) uint32 { return 0 }}
	dumps, _ := readEvery(ctx, a.proto)
	var slots []slot
	r, err := OpenReader(o)
	switch {
	case errors.Is(err, ErrNotLoaded) || errors.Is(err, ErrOtherRelease):
	case err != nil:
		return nil, err
	default:
		defer r.Close()
		if slots, err = readSlots(r.maps); err != nil {
			return nil, err
		}
	}
	found, _ := strays(ctx, a, dumps, slots)
	n := map[policy.Key]uint32{}
	for _, s := range found {
		for _, h := range plan.Route(s.compartment, s.provider).Holds {
			n[plan.Bulkheads[h].Key]++
		}
	}
	return n, nil
}

// stray is a connection that is to be adopted.
type stray struct {
	sockets.Socket
	netns       uint64
	provider    uint32
	part        uint32 // of its slot's key
	compartment uint32
	cgroup      uint64 // where it belongs
	pid         uint32
	comm        string
	word, tally uint64 // of its slot, once it has one
}

// Whereabouts says who is where. Here cgroups are numbers; who knows them as directories
// fills it in.
type Whereabouts struct {
	// Of is the id of the cgroup that a process is in; false if it is gone, or not below
	// the root.
	Of func(pid uint32) (id uint64, ok bool)
	// Members has every cgroup below the root, by id: the Member that is nearest at or
	// above it, or one of compartment 0.
	Members map[uint64]Member
}

// asked is what strays are looked for: by a plan and who is where, of a protocol, and the
// number that a provider has in slots.
type asked struct {
	plan  *policy.Plan
	where Whereabouts
	proto policy.Proto
	part  func(provider uint32) uint32
}

// sighting is what two looks at the namespaces of strays saw.
type sighting struct {
	seen   map[uint64]bool // cookies of sockets that are open, in either
	unsure map[uint64]bool // cookies of namespaces: a look was not complete
}

// look looks for strays in their namespaces; a second time for those that it did not see,
// since a dump of a busy table may pass one by.
func look(ctx context.Context, all []stray) sighting {
	s := sighting{map[uint64]bool{}, map[uint64]bool{}}
	remotes := make(map[uint64]netip.AddrPort, len(all))
	for _, a := range all {
		remotes[a.Cookie] = a.Remote
	}
	for range 2 {
		wanted := map[uint64]struct{}{}
		for _, a := range all {
			if !s.seen[a.Cookie] {
				wanted[a.netns] = struct{}{}
			}
		}
		if len(wanted) == 0 {
			break
		}
		for _, d := range sockets.ReadAll(ctx, wanted, all[0].Proto) {
			delete(wanted, d.Cookie)
			if !d.Complete {
				s.unsure[d.Cookie] = true
			}
			for cookie, so := range d.Sockets {
				// One that is closed and says goodbye has no inode any more (sock_orphan,
				// include/net/sock.h).
				s.seen[cookie] = s.seen[cookie] || remotes[cookie] == so.Remote && (opened(so.State) || so.Inode != 0)
			}
		}
		for netns := range wanted {
			s.unsure[netns] = true
		}
	}
	return s
}

// dropGhosts gives back what was adopted of sockets that closed before their slot was
// there: no hook will. It returns how many.
func (k *Kernel) dropGhosts(ctx context.Context, adopted []stray) (n int, err error) {
	alive := look(ctx, adopted)
	for _, a := range adopted {
		if alive.seen[a.Cookie] || alive.unsure[a.netns] {
			continue
		}
		s := slot{kernelSlot{Cookie: a.Cookie, Part: a.part, Word: a.word, Tally: a.tally}}
		done, err := k.retire(&s)
		if err != nil {
			return n, err
		}
		if !done {
			continue // its close has done it
		}
		n++
		s.Word |= uint64(kernelConstantSLOT_RELEASED)
		if err := k.bury(&s); err != nil {
			return n, err
		}
	}
	return n, nil
}

// strays are the connections of dumps that have none of the slots, which were read behind
// the dumps, and that a plan would have given one.
func strays(ctx context.Context, a asked, dumps []sockets.Dump, slots []slot) (all []stray, unplaced int) {
	have := make(map[slotKey]bool, len(slots))
	for _, s := range slots {
		have[s.key()] = true
	}
	var found []stray
	for _, d := range dumps {
		// What an incomplete dump did see is there.
		found = append(found, candidates(a, d, have)...)
	}
	if len(found) == 0 {
		return nil, 0
	}
	identify(found, a.where.Of)
	// What is seen again now, and had no slot in between, has none: on a busy node most
	// of what was found had one and is closed.
	alive := look(ctx, found)
	for _, s := range found {
		if !alive.seen[s.Cookie] {
			continue
		}
		c, ok := a.where.Members[s.cgroup]
		if !ok {
			unplaced++
			continue
		}
		if c.Protected || a.plan.Route(c.Compartment, s.provider).CountOnly {
			continue
		}
		s.compartment = c.Compartment
		all = append(all, s)
	}
	return all, unplaced
}

// candidates are the connections of a dump that have no slot and that some compartment's
// route would give one.
func candidates(a asked, d sockets.Dump, have map[slotKey]bool) []stray {
	slotted := make([]bool, len(a.plan.Providers))
	for _, r := range a.plan.Routes {
		slotted[r.Provider] = slotted[r.Provider] || !r.CountOnly
	}
	listened := map[uint16]bool{}
	for _, s := range d.Sockets {
		if s.Proto == uint8(a.proto) && s.State == sockets.Listen {
			listened[s.Local.Port()] = true
		}
	}
	var all []stray
	for _, s := range d.Sockets {
		if s.Proto != uint8(a.proto) || !opened(s.State) {
			continue // no descriptor holds it any more, or it is no connection
		}
		if s.Subflow {
			continue // no hook would tell of its end: the release of MPTCP's is another socket's
		}
		if listened[s.Local.Port()] {
			continue // accepted, not made
		}
		p := a.plan.Lookup(s.Remote.Addr(), s.Remote.Port(), a.proto)
		if !slotted[p] || a.proto == policy.UDP && p == 0 || have[slotKey{s.Cookie, a.part(p)}] {
			continue
		}
		all = append(all, stray{Socket: s, netns: d.Cookie, provider: p, part: a.part(p), cgroup: s.Cgroup})
	}
	return all
}

// opened says of a connection's state that some descriptor holds it.
func opened(s sockets.State) bool {
	return s == sockets.Established || s == sockets.SynSent || s == sockets.CloseWait
}

// identify finds a process that holds each socket, and its cgroup.
func identify(all []stray, of func(pid uint32) (uint64, bool)) {
	wanted := make(map[string]int, len(all)) // "socket:[INODE]" -> index
	for i, s := range all {
		if s.Inode != 0 {
			wanted[fmt.Sprintf("socket:[%d]", s.Inode)] = i
		}
	}
	processes, _ := os.ReadDir("/proc")
	for _, p := range processes {
		pid, err := strconv.ParseUint(p.Name(), 10, 32)
		if err != nil || len(wanted) == 0 {
			continue
		}
		dir := filepath.Join("/proc", p.Name())
		fds, _ := os.ReadDir(filepath.Join(dir, "fd")) // it may be gone, or not ours to look at
		for _, fd := range fds {
			link, _ := os.Readlink(filepath.Join(dir, "fd", fd.Name()))
			i, ok := wanted[link]
			if !ok {
				continue
			}
			delete(wanted, link)
			all[i].pid, all[i].comm = uint32(pid), command(uint32(pid), nil)
			if id, ok := of(uint32(pid)); ok {
				all[i].cgroup = id
			}
		}
	}
}

// adopt runs the program that does it, and notes the slot's word, 0 if it has one already
// or there is no room. connected is what is noted of a UDP socket.
func (k *Kernel) adopt(f *inForce, s stray, connected uint32) (uint64, error) {
	r := k.tables.routes[s.compartment*uint32(len(f.plan.Providers))+s.provider]
	in := kernelAdopt{
		Slot: kernelSlot{
			Cookie: s.Cookie, Part: s.part, Netns: s.netns, BornNs: s.tally, Addr: s.Remote.Addr().As16(), Port: s.Remote.Port(),
			Pid: s.pid, Proto: s.Proto, Flags: uint8(kernelSlotFlagSLOT_ADOPTED), Traffic: r.Traffic, N: uint8(r.N), Generation: f.gen.Generation,
		},
		Was: connected,
	}
	if s.part != 0 {
		in.Slot.Tally, in.Connected = s.tally, 1
	}
	for i, h := range r.Holds[:r.N] {
		in.Slot.Bulkheads[i] = h.Bulkhead
	}
	setText(in.Slot.Comm[:], s.comm)
	out, err := k.runAdopt(&in)
	if err != nil || out.Done == 0 {
		return 0, err
	}
	return out.Slot.Word, nil
}

// dropTwins retires what was adopted of a socket that has connected elsewhere in that
// very moment and has a slot of its own.
func (k *Kernel) dropTwins() error {
	slots, err := readSlots(k.coll.Maps)
	if err != nil {
		return err
	}
	own := map[uint64]bool{}
	for _, s := range slots {
		if s.Part == 0 && !s.has(kernelSlotFlagSLOT_ADOPTED) {
			own[s.Cookie] = true
		}
	}
	for _, s := range slots {
		if !own[s.Cookie] || !s.has(kernelSlotFlagSLOT_ADOPTED) || s.released() {
			continue
		}
		if _, err := k.retire(&s); err != nil {
			return err
		}
		s.Word |= uint64(kernelConstantSLOT_RELEASED)
		if err := k.bury(&s); err != nil {
			return err
		}
	}
	return nil
}
