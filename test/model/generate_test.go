package model

import (
	"cmp"
	"maps"
	"math/rand/v2"
	"slices"
)

// forks is how many copies of descriptors there may be at a time.
const forks = 3

// generator makes rounds of operations. It knows which descriptors there are, and
// nothing of results: the same seed gives the same operations, whatever becomes of
// them.
type generator struct {
	r       *rand.Rand
	workers int
	has     map[desc]made
	forked  [forks]bool
	cut     bool
	plan    uint8
}

// made is a socket that a descriptor leads to, as far as a generator knows.
type made struct {
	kind   Sock
	used   bool // an operation on it has been made
	listen bool
}

func newGenerator(seed uint64, workers int) *generator {
	return &generator{r: rand.New(rand.NewPCG(seed, 0)), workers: workers, has: map[desc]made{}}
}

func (g *generator) n(n int) int       { return g.r.IntN(n) }
func (g *generator) one(in int) bool   { return g.r.IntN(in) == 0 }
func (g *generator) worker() uint8     { return uint8(g.n(g.workers)) }
func (g *generator) lane() uint8       { return uint8(g.n(lanes)) }
func (g *generator) descriptor() uint8 { return uint8(g.n(descs)) }

// round is what is done before the next quiet point.
func (g *generator) round() []Op {
	var ops []Op
	for range g.n(12) {
		if o, ok := g.share(); ok {
			ops = append(ops, o)
		}
	}
	if g.one(10) {
		ops = append(ops, Op{Kind: Exhaust})
	}
	n := g.workers * lanes * (5 + g.n(50))
	beside := g.n(8)
	for i := range n {
		if g.n(n) < beside {
			ops = append(ops, g.beside())
		}
		w, l := uint8(i%g.workers), uint8(i/g.workers%lanes)
		ops = append(ops, g.thread(w, l))
	}
	if g.cut && g.one(2) {
		ops, g.cut = append(ops, Op{Kind: Mend}), false
	}
	quiet := Op{Kind: Quiet}
	if g.one(3) {
		quiet.Arg = 1
	}
	return append(ops, quiet)
}

// share makes one more descriptor of a socket.
func (g *generator) share() (Op, bool) {
	if len(g.has) == 0 {
		return Op{}, false
	}
	// Sorted, because a map has another order each time.
	all := slices.SortedFunc(maps.Keys(g.has), func(a, b desc) int {
		return cmp.Or(cmp.Compare(a.w, b.w), cmp.Compare(a.l, b.l), cmp.Compare(a.d, b.d))
	})
	key := all[g.n(len(all))]
	o := Op{Kind: Dup, W: key.w, L: key.l, D: key.d, W2: g.worker(), L2: g.lane(), D2: g.descriptor()}
	from := g.has[key]
	target := desc{o.W, o.L2, o.D2}
	switch g.n(5) {
	case 0:
		o.Kind, o.D2 = Fork, uint8(g.n(forks))
		if g.forked[o.D2] {
			return o, false
		}
		g.forked[o.D2] = true
		return o, true
	case 1, 2:
		o.Kind, target.w = Pass, o.W2
		if o.W == o.W2 {
			return o, false
		}
	}
	if _, busy := g.has[target]; busy {
		return o, false
	}
	g.has[target] = from
	return o, true
}

// beside is what is done to processes, servers and policies meanwhile.
func (g *generator) beside() Op {
	for {
		switch g.n(10) {
		case 0, 1:
			o := Op{Kind: Kill, W: g.worker()}
			for key := range g.has {
				if key.w == o.W {
					delete(g.has, key)
				}
			}
			return o
		case 2:
			return Op{Kind: Move, W: g.worker(), Arg: uint8(g.n(len(cgroups)))}
		case 3:
			return Op{Kind: Members, Arg: uint8(g.n(len(cgroups)))}
		case 4:
			g.plan = uint8(g.n(len(plans)))
			return Op{Kind: Reload, Arg: g.plan}
		case 5:
			g.cut = !g.cut
			if g.cut {
				return Op{Kind: Cut}
			}
			return Op{Kind: Mend}
		case 6:
			return Op{Kind: Hangup, Arg: uint8(g.n(len(dests)))}
		case 7:
			return Op{Kind: HangupRST, Arg: uint8(g.n(len(dests)))}
		case 8:
			if g.one(3) {
				return Op{Kind: Reconcile}
			}
		case 9:
			if n := g.n(forks); g.forked[n] {
				g.forked[n] = false
				return Op{Kind: EndFork, D2: uint8(n)}
			}
		}
	}
}

// thread is an operation of one thread.
func (g *generator) thread(w, l uint8) Op {
	key := desc{w, l, g.descriptor()}
	o := Op{W: w, L: l, D: key.d}
	if g.one(60) {
		o.Kind, o.Sock = Storm, Sock(1+g.n(int(UDPMapped)))
		o.Dest, o.D2 = g.dest(made{kind: o.Sock}), g.dest(made{kind: o.Sock})
		if g.one(2) {
			o.Dest = roomy(o.Sock)
		}
		if !g.one(4) {
			o.D2 = o.Dest
		}
		return o
	}
	m, ok := g.has[key]
	if !ok {
		o.Kind, o.Sock = Open, Sock(1+g.n(int(UDPMapped)))
		g.has[key] = made{kind: o.Sock}
		return o
	}
	o.Sock = m.kind
	tcp := []Kind{Connect, Connect, Connect, Connect, ConnectWait, ConnectWait, Unspec, Unspec, Shutdown, Close, Close, Reset, Reset}
	unused := append(tcp[:8:8], Bind, Listen)
	listener := []Kind{Accept, Accept, Accept, Connect, Unspec, Shutdown, Close}
	udp := []Kind{Connect, Connect, Connect, Sendto, Sendto, Sendto, Sendto, Sendto, Unspec, Close, Close, Bind}
	switch {
	case m.kind.udp():
		o.Kind = udp[g.n(len(udp))]
	case m.listen:
		o.Kind = listener[g.n(len(listener))]
	case !m.used:
		o.Kind = unused[g.n(len(unused))]
	default:
		o.Kind = tcp[g.n(len(tcp))]
	}
	m.used, m.listen = true, m.listen || o.Kind == Listen
	g.has[key] = m
	switch o.Kind {
	case Close, Reset:
		delete(g.has, key)
	case Accept:
		o.L2, o.D2 = l, g.descriptor()
		target := desc{w, l, o.D2}
		if _, busy := g.has[target]; busy {
			o.Kind = Connect
			break
		}
		g.has[target] = made{kind: m.kind, used: true}
	}
	if o.Kind == Connect || o.Kind == ConnectWait || o.Kind == Sendto {
		o.Arg = uint8(g.n(2))
		o.Dest = g.dest(m)
	}
	return o
}

// roomy is the destination where most storms are not refused.
func roomy(s Sock) uint8 {
	return uint8(slices.IndexFunc(dests, func(d destination) bool {
		return d.Provider == "roomy" && d.Addr.Addr().Is6() == s.v6only()
	}))
}

// dest is one that the socket has addresses for.
func (g *generator) dest(m made) uint8 {
	for {
		if d := g.n(len(dests)); dests[d].Addr.Addr().Is6() == m.kind.v6only() {
			return uint8(d)
		}
	}
}
