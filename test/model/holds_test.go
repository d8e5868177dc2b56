package model

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"bulkhead/pkg/policy"
)

// hold is what a slot from one compartment to one provider takes: there is one of
// each, so that equal pointers are the same traffic.
type hold struct {
	feature, tenant, provider string
	bulkheads                 []uint32 // indices into Plan.Bulkheads
}

func (h *hold) String() string {
	return fmt.Sprintf("%s/%s to %s", h.feature, h.tenant, h.provider)
}

// phase is what the kernel's side of a TCP socket looks like, as far as the results of
// calls tell.
type phase uint8

const (
	fresh      phase = iota // connect() runs the hook
	connecting              // EINPROGRESS was the last word
	connected
	stuck // the connect failed before its SYN: closed, and no event will come
	listening
)

// sock is one socket, whoever has it.
type sock struct {
	kind   Sock
	cookie uint64
	descs  int         // descriptors that lead to it
	owners map[int]int // of them, by process
	phase  phase
	dest   uint8 // of the last connect
	bound  bool

	slots map[*hold]bool  // what it holds; TCP at most one
	byUse string          // UDP: the provider whose slot its last connect took, or found
	tombs map[string]bool // UDP: providers whose slot reconciling may have freed, and whose entry may be there
	// sure: it holds exactly that. Else an event is under way, or operations are, and
	// only the sockets that exist can tell.
	sure bool
	busy int // operations under way

	// One operation at a time on a TCP socket, or one that several processes have.
	lock sync.RWMutex
}

func (s *sock) String() string { return fmt.Sprintf("%s socket %d", s.kind, s.cookie) }

// desc names a descriptor.
type desc struct{ w, l, d uint8 }

// flight is an operation under way, and what the counts were meanwhile.
type flight struct {
	op     Op
	sock   *sock
	key    desc
	life   int   // of the process
	want   *hold // what it takes if it is admitted; nil if it is not ours to refuse
	also   *hold // what a storm's other threads take
	before phase
	had    bool // UDP: it held just that, surely, so there is nothing to admit
	sure   bool // what it held was
	counts bool // in sock.busy

	least, most []int // of what was certainly, possibly held, by bulkhead
	plans       uint  // a bit for each plan that was in force meanwhile
	disturbed   bool  // peers did something to what is connected
}

// times is how often it may take what it takes.
func (f *flight) times() int {
	if f.op.Kind == Storm {
		return stormMost
	}
	return 1
}

// model is what all sockets hold.
type model struct {
	mu     sync.Mutex
	plan   *policy.Plan
	limits [][]policy.Limit // by plan and bulkhead
	holds  []*hold          // by compartment and provider; nil takes no slot
	errno  syscall.Errno    // of refusals

	descs   map[desc]*sock
	socks   map[*sock]bool
	copies  map[uint8]*sock // by number
	life    map[uint8]int   // a process's number counts up when it is killed
	inForce uint            // plans, by bit; two while they are being exchanged
	// While a process is being killed nothing of it is sure, and while a server hangs up
	// nothing that connects.
	dying   map[uint8]bool
	hanging bool
	// loose: a Reconcile has run beside operations, so what is stuck may be free.
	loose bool

	certain, possible []int // by bulkhead
	flights           map[*flight]bool

	full uint64 // connections that found no room for a slot, all in Exhaust

	ops      map[Kind]int
	outcomes map[string]int
}

func newModel(compiled []*policy.Plan, errno syscall.Errno) (*model, error) {
	m := &model{
		plan: compiled[0], errno: errno,
		descs: map[desc]*sock{}, socks: map[*sock]bool{}, copies: map[uint8]*sock{}, life: map[uint8]int{}, dying: map[uint8]bool{},
		inForce: 1, flights: map[*flight]bool{}, ops: map[Kind]int{}, outcomes: map[string]int{},
	}
	for _, p := range compiled {
		var limits []policy.Limit
		for i, b := range p.Bulkheads {
			if b.Key != m.plan.Bulkheads[i].Key {
				return nil, fmt.Errorf("plans differ in more than limits: %s", b.Key)
			}
			limits = append(limits, b.Limit)
		}
		m.limits = append(m.limits, limits)
	}
	for _, r := range m.plan.Routes {
		if r.CountOnly {
			m.holds = append(m.holds, nil)
			continue
		}
		c := m.plan.Compartments[r.Compartment]
		m.holds = append(m.holds, &hold{c.Feature, c.Tenant, m.plan.Providers[r.Provider].Name, r.Holds})
	}
	m.certain, m.possible = make([]int, len(m.plan.Bulkheads)), make([]int, len(m.plan.Bulkheads))
	return m, nil
}

// holdOf is what a connection from a place takes; nil if nothing.
func (m *model) holdOf(p place, provider string, udp bool) *hold {
	if p.protected || udp && provider == policy.OtherProvider {
		return nil
	}
	c, ok := m.plan.FindCompartment(p.feature, p.tenant)
	at := slices.IndexFunc(m.plan.Providers, func(p policy.Provider) bool { return p.Name == provider })
	if !ok || at < 0 {
		return nil
	}
	return m.holds[int(c)*len(m.plan.Providers)+at]
}

// most is the highest limit that a bulkhead ever has.
func (m *model) most(b int) policy.Limit {
	var most policy.Limit
	for _, l := range m.limits {
		most = max(most, l[b])
	}
	return most
}

// add changes one of the two bounds, and what the operations under way have seen of it.
func (m *model) add(count []int, h *hold, n int) {
	for _, b := range h.bulkheads {
		count[b] += n
		for f := range m.flights {
			f.least[b] = min(f.least[b], m.certain[b])
			f.most[b] = max(f.most[b], m.possible[b])
		}
	}
}

// set says what a socket holds, and whether that is sure.
func (m *model) set(s *sock, slots map[*hold]bool, sure bool) {
	m.unsure(s)
	for h := range s.slots {
		m.add(m.possible, h, -1)
	}
	s.slots = slots
	for h := range slots {
		m.add(m.possible, h, 1)
		if sure {
			m.add(m.certain, h, 1)
		}
	}
	s.sure = sure
}

// unsure says that what a socket holds may end at any moment.
func (m *model) unsure(s *sock) {
	if !s.sure {
		return
	}
	s.sure = false
	for h := range s.slots {
		m.add(m.certain, h, -1)
	}
}

func just(h *hold) map[*hold]bool {
	if h == nil {
		return nil
	}
	return map[*hold]bool{h: true}
}

// begin notes that an operation starts; nil if it is not possible. It may take want, and
// a storm's other threads also.
func (m *model) begin(o Op, want, also *hold) *flight {
	m.mu.Lock()
	defer m.mu.Unlock()
	key := desc{o.W, o.L, o.D}
	s := m.descs[key]
	f := &flight{op: o, sock: s, key: key, life: m.life[o.W]}
	switch o.Kind {
	case Open:
		if s != nil {
			return nil
		}
	case Storm:
		f.sock, f.want = nil, want
		f.also = also
	case Accept:
		if s == nil || s.phase != listening || m.descs[desc{o.W, o.L2, o.D2}] != nil {
			return nil
		}
	default:
		if s == nil {
			return nil
		}
		fits := true
		switch o.Kind {
		case Connect, ConnectWait:
			fits = dests[o.Dest].Addr.Addr().Is6() == s.kind.v6only()
			f.want = want
		case Sendto:
			fits = s.kind.udp() && dests[o.Dest].Addr.Addr().Is6() == s.kind.v6only()
			f.want = want
		case Shutdown:
			// Of a connect under way it depends on the moment what the next one does.
			fits = !s.kind.udp() && s.phase != connecting
		case Bind:
			fits = !s.bound && s.phase == fresh
		case Listen:
			fits = !s.bound && s.phase == fresh && !s.kind.udp() && s.kind != TCPMapped
		case Reset:
			fits = !s.kind.udp()
		}
		if !fits {
			return nil
		}
		f.before = s.phase
		f.had = s.kind.udp() && s.sure && want != nil && s.slotTo(want.provider) != nil
		f.sure = s.sure
		f.counts = true
		s.busy++
	}
	m.ops[o.Kind]++
	for _, h := range []*hold{f.want, f.also} {
		if h != nil {
			m.add(m.possible, h, f.times())
		}
	}
	f.disturbed = m.hanging
	f.least, f.most, f.plans = slices.Clone(m.certain), slices.Clone(m.possible), m.inForce
	m.flights[f] = true
	if f.sock != nil {
		switch o.Kind {
		case Close, Reset:
			if s.descs > 1 {
				break
			}
			fallthrough
		case Connect, ConnectWait, Unspec, Shutdown:
			m.unsure(s)
		}
	}
	return f
}

// end notes what came of an operation. It is an error if that was not legal.
func (m *model) end(f *flight, a answer, answered bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.flights, f)
	if f.sock != nil && m.dying[f.op.W] {
		defer m.unsure(f.sock)
	}
	if f.counts {
		f.sock.busy--
	}
	for _, h := range []*hold{f.want, f.also} {
		if h != nil {
			m.add(m.possible, h, -f.times())
		}
	}
	if !answered || m.life[f.op.W] != f.life {
		m.outcomes["killed"]++
		return nil // its process is gone, and with it the descriptor
	}
	if a.errno == fault {
		return fmt.Errorf("%s: the worker could not", f.op)
	}
	m.outcomes[fmt.Sprintf("%s %s", f.op.Kind, errnoName(a.errno))]++
	s := f.sock
	switch f.op.Kind {
	case Storm:
		if a.errno != 0 {
			return fmt.Errorf("%s: %w", f.op, a.errno)
		}
		if a.pid == 0 {
			return nil
		}
		m.outcomes["storm refused"] += a.pid
		if f.also == nil || f.want == nil {
			f.want = cmp.Or(f.want, f.also)
			return m.refused(f)
		}
		// Either may be the one.
		if err := m.refused(f); err != nil {
			f.want = f.also
			return m.refused(f)
		}
	case Open, Accept:
		if a.errno != 0 {
			return fmt.Errorf("%s: %w", f.op, a.errno)
		}
		key := f.key
		fresh := &sock{kind: f.op.Sock, cookie: a.cookie, owners: map[int]int{}, sure: true}
		if f.op.Kind == Accept {
			key = desc{f.op.W, f.op.L2, f.op.D2}
			fresh.phase = connected
		}
		m.socks[fresh] = true
		m.attach(fresh, key)
	case Close, Reset:
		if a.errno != 0 {
			return fmt.Errorf("%s: %w", f.op, a.errno)
		}
		m.detach(f.key)
	case Bind:
		s.bound = a.errno == 0
	case Listen:
		s.bound = true
		if a.errno == 0 {
			s.phase = listening
		}
	case Shutdown:
		// The slot of a connection goes when the peer has closed too.
		switch s.phase {
		case stuck:
			m.set(s, s.slots, !m.loose)
		case listening:
			s.phase = fresh
		}
	case Unspec:
		if a.errno != 0 {
			return fmt.Errorf("%s: %w", f.op, a.errno)
		}
		switch {
		case s.kind.udp():
			m.set(s, s.slots, !m.loose) // no event
		case s.phase == stuck:
			m.set(s, s.slots, !m.loose) // neither
		default:
			s.phase = fresh
			m.set(s, nil, true)
		}
	case Connect, ConnectWait, Sendto:
		if s.kind.udp() {
			return m.endUDP(f, a.errno)
		}
		return m.endTCP(f, a.errno)
	}
	return nil
}

// endTCP is the result of a TCP connect().
func (m *model) endTCP(f *flight, errno syscall.Errno) error {
	s := f.sock
	if f.before == connecting {
		// The hook does not run until the attempt before is over and has been told.
		switch errno {
		case unix.EALREADY, unix.EINPROGRESS, unix.EISCONN:
		case 0:
			s.phase = connected
		case m.errno:
			return fmt.Errorf("%s: refused, but a connect was under way", f.op)
		default:
			s.phase = fresh
			m.set(s, nil, true)
		}
		return nil
	}
	switch errno {
	case unix.EISCONN, unix.EALREADY, unix.EINVAL:
		// It is connected, has been, or was shut down: no hook.
		m.set(s, s.slots, f.sure && !f.disturbed && !(m.loose && f.before == stuck))
		return nil
	case m.errno:
		s.phase = fresh
		m.set(s, nil, true)
		return m.refused(f)
	case 0:
		s.phase, s.dest = connected, f.op.Dest
		m.set(s, just(f.want), !f.disturbed)
	case unix.EINPROGRESS:
		s.phase, s.dest = connecting, f.op.Dest
		m.set(s, just(f.want), false)
	case unix.ENETUNREACH, unix.EADDRNOTAVAIL:
		s.phase = stuck
		m.set(s, just(f.want), !m.loose)
	case unix.ECONNREFUSED, unix.ECONNRESET, unix.ETIMEDOUT:
		s.phase = fresh
		m.set(s, nil, true)
	default:
		return fmt.Errorf("%s: %w", f.op, errno)
	}
	return m.admitted(f)
}

// endUDP is the result of a UDP connect() or sendto(). The hook comes first in both, so
// whatever else fails, it was admitted.
//
// There is one slot for each (socket, provider), of the compartment that took it. What a
// connect took, or found, the next one to another provider ends; what only sends took
// stays until the last close. A connect that is refused changes nothing.
func (m *model) endUDP(f *flight, errno syscall.Errno) error {
	s := f.sock
	refused := errno == m.errno
	if refused && f.had {
		return fmt.Errorf("%s: refused, though %s had the slot", f.op, s)
	}
	slots := maps.Clone(s.slots)
	if f.want != nil && !refused {
		// A Reconcile beside it may have freed the slot that another of those that share
		// the socket had taken; then this one has.
		if h := s.slotTo(f.want.provider); h == nil || h != f.want && m.loose {
			if slots == nil {
				slots = map[*hold]bool{}
			}
			slots[f.want] = true
		}
		delete(s.tombs, f.want.provider)
	}
	if f.op.Kind != Sendto && !refused {
		to := ""
		if f.want != nil {
			to = f.want.provider
		}
		if s.byUse != "" && s.byUse != to {
			delete(slots, s.slotTo(s.byUse))
		}
		s.byUse = to
	}
	m.set(s, slots, s.busy == 0 && !m.loose)
	if refused {
		return m.refused(f)
	}
	return m.admitted(f)
}

// slotTo is what a socket holds at a provider, nil if nothing.
func (s *sock) slotTo(provider string) *hold {
	for h := range s.slots {
		if h.provider == provider {
			return h
		}
	}
	return nil
}

// refused checks a refusal: some bulkhead may have been full.
func (m *model) refused(f *flight) error {
	if f.want == nil {
		return fmt.Errorf("%s (%s): refused, where nothing is limited", f.op, f.op.Sock)
	}
	var err error
	for _, b := range f.want.bulkheads {
		limit := m.least(f.plans, b)
		if policy.Limit(f.most[b]-1) >= limit { // itself apart
			return nil
		}
		err = errors.Join(err, fmt.Errorf("%s of %d had at most %d in use", m.plan.Bulkheads[b].Key, limit, f.most[b]-1))
	}
	return fmt.Errorf("%s: refused with room everywhere:\n%w", f.op, err)
}

// admitted checks an admission: no bulkhead was certainly full.
func (m *model) admitted(f *flight) error {
	if f.want == nil || f.had {
		return nil
	}
	for _, b := range f.want.bulkheads {
		if limit := m.greatest(f.plans, b); policy.Limit(f.least[b]) >= limit {
			return fmt.Errorf("%s: admitted, but %s of %d had at least %d in use", f.op, m.plan.Bulkheads[b].Key, limit, f.least[b])
		}
	}
	return nil
}

// least and greatest are the limits of a bulkhead over some plans.
func (m *model) least(plans uint, b uint32) policy.Limit {
	least := policy.Unlimited
	for i, l := range m.limits {
		if plans>>i&1 == 1 {
			least = min(least, l[b])
		}
	}
	return least
}

func (m *model) greatest(plans uint, b uint32) policy.Limit {
	var greatest policy.Limit
	for i, l := range m.limits {
		if plans>>i&1 == 1 {
			greatest = max(greatest, l[b])
		}
	}
	return greatest
}

// attach and detach keep who has a socket. The last descriptor's close frees what it
// holds.
func (m *model) attach(s *sock, key desc) {
	m.descs[key] = s
	s.descs++
	s.owners[int(key.w)]++
}

func (m *model) detach(key desc) {
	s := m.descs[key]
	delete(m.descs, key)
	if s.owners[int(key.w)]--; s.owners[int(key.w)] == 0 {
		delete(s.owners, int(key.w))
	}
	m.drop(s)
}

func (m *model) drop(s *sock) {
	if s.descs--; s.descs == 0 {
		m.set(s, nil, true)
		delete(m.socks, s)
	}
}

// copied is the process of a copy, beyond those of the workers.
func copied(n uint8) int { return 1000 + int(n) }

// killing and killed are before and after the death of a process.
func (m *model) killing(w uint8) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dying[w] = true
	for key, s := range m.descs {
		if key.w == w && s.descs == s.owners[int(w)] {
			m.unsure(s)
		}
	}
}

func (m *model) killed(w uint8) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for key := range m.descs {
		if key.w == w {
			m.detach(key)
		}
	}
	m.life[w]++
	delete(m.dying, w)
}

// flipping and flipped are before and after a plan comes in force.
func (m *model) flipping(plan uint8) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.inForce |= 1 << plan
	for f := range m.flights {
		f.plans |= m.inForce
	}
}

func (m *model) flipped(plan uint8) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.inForce = 1 << plan
}

// disturb says that a server does something to what is connected to it, until calm.
func (m *model) disturb(d destination) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.hanging = true
	for f := range m.flights {
		f.disturbed = true
	}
	for s := range m.socks {
		if !s.kind.udp() && (s.phase == connected || s.phase == connecting) && dests[s.dest].Addr == d.Addr {
			m.unsure(s)
		}
	}
}

func (m *model) calm() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.hanging = false
}

// reconciling says that what nothing shows may be freed from now on.
func (m *model) reconciling() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.loose = true
	for s := range m.socks {
		if s.phase == stuck || s.kind.udp() {
			m.unsure(s)
		}
	}
}

func errnoName(e syscall.Errno) string {
	if e == 0 {
		return "ok"
	}
	return unix.ErrnoName(e)
}
