package conn

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"

	"bulkhead/pkg/policy"
)

// tables are a generation as the kernel will have it: pure data, computed before
// anything is written.
type tables struct {
	gen    kernelGen
	keys   []kernelDestKey
	dests  []kernelDest // parallel to keys
	ports  []kernelPortRange
	ids    []uint64 // cgroup ids
	comps  []uint32 // parallel to ids
	routes []kernelRoute
	plan   []kernelPlanChunk
}

// indices are where a plan's bulkheads and routes have their counts.
type indices struct {
	bulkheads []uint32 // parallel to Plan.Bulkheads
	traffic   []uint32 // parallel to Plan.Routes
}

// mapped is an address as the kernel programs see it: 16 bytes, IPv4 as
// ::ffff:a.b.c.d.
func mapped(p netip.Prefix) kernelDestKey {
	k := kernelDestKey{Prefixlen: uint32(p.Bits()), Addr: p.Addr().As16()}
	if p.Addr().Is4() {
		k.Prefixlen += 96
	}
	return k
}

// setNear sets the bits of every address in a prefix; struct gen in types.h says which
// bit that is.
func setNear(g *kernelGen, p netip.Prefix) {
	a := p.Addr().AsSlice()
	word := func(i int) uint32 { return uint32(a[i])<<8 | uint32(a[i+1]) }
	first, free := word(0), 16-p.Bits() // free: bits of the choosing word that the prefix leaves open
	near := g.Near[:len(g.Near)/2]
	if p.Addr().Is6() {
		near = g.Near[len(g.Near)/2:]
		first ^= word(2)
		free = 32 - p.Bits()
	}
	n := uint32(1)
	if free > 0 {
		n <<= min(free, 16)
	}
	// The open bits are the lowest, and zero in the address: or-ing them in for IPv4
	// and exclusive-or-ing them for IPv6 is the same thing.
	for i := range n {
		bit := (first ^ i) & 0xffff
		near[bit>>3] |= 1 << (bit & 7)
	}
}

// compute turns a plan into tables. generation is the number that users see.
func compute(plan *policy.Plan, at indices, generation uint32) (*tables, error) {
	t := &tables{gen: kernelGen{Generation: generation, Providers: uint32(len(plan.Providers))}}

	for _, d := range plan.Destinations {
		v := kernelDest{From: 1} // from > to: matches nothing
		for i, r := range d.Ports {
			pr := kernelPortRange{
				From:     uint32(r.Proto)<<16 | uint32(r.First),
				To:       uint32(r.Proto)<<16 | uint32(r.Last),
				Provider: r.Provider,
			}
			if i == 0 {
				v.From, v.To, v.Provider, v.More = pr.From, pr.To, pr.Provider, uint32(len(t.ports))
				continue
			}
			t.ports = append(t.ports, pr)
			v.N++
		}
		t.keys = append(t.keys, mapped(d.Prefix))
		t.dests = append(t.dests, v)
		if len(d.Ports) > 0 {
			setNear(&t.gen, d.Prefix)
		}
	}

	for _, p := range plan.Providers {
		if p.UDP {
			t.gen.Udp = 1
		}
	}

	if len(plan.Routes) != len(plan.Compartments)*len(plan.Providers) {
		return nil, fmt.Errorf("plan has %d routes for %d compartments and %d providers", len(plan.Routes), len(plan.Compartments), len(plan.Providers))
	}
	t.routes = make([]kernelRoute, len(plan.Routes))
	for i, r := range plan.Routes {
		k := kernelRoute{Traffic: at.traffic[i], N: uint16(len(r.Holds))}
		// A provider's number must outlive the generation, as the index of its route from
		// compartment 0 does; Forget keeps it while a slot names it.
		k.Part = at.traffic[i%len(plan.Providers)] + 1
		if len(r.Holds) > len(k.Holds) {
			return nil, fmt.Errorf("route %d holds %d bulkheads, at most %d", i, len(r.Holds), len(k.Holds))
		}
		if plan.Mode == policy.Observe {
			k.Flags |= uint16(kernelRouteFlagROUTE_OBSERVE)
		}
		if plan.Exhausted == policy.ExhaustedRefuse {
			k.Flags |= uint16(kernelRouteFlagROUTE_STRICT)
		}
		if r.CountOnly {
			k.Flags |= uint16(kernelRouteFlagROUTE_COUNT_ONLY)
		}
		for j, h := range r.Holds {
			b := plan.Bulkheads[h]
			k.Holds[j] = kernelHold{Bulkhead: at.bulkheads[h], Limit: uint32(b.Limit)}
			k.Err[j] = b.Errno
		}
		t.routes[i] = k
	}

	text, err := json.Marshal(plan)
	if err != nil {
		return nil, fmt.Errorf("plan as json: %w", err)
	}
	for len(text) > 0 {
		var c kernelPlanChunk
		n := min(len(text), len(c.Text))
		for i, b := range text[:n] {
			c.Text[i] = int8(b)
		}
		c.Used = uint32(n)
		t.plan = append(t.plan, c)
		text = text[n:]
	}
	return t, nil
}

// setMembers fills in who is in which compartment.
func (t *tables) setMembers(members []Member, compartments int) error {
	t.ids, t.comps = nil, nil
	seen := make(map[uint64]bool, len(members))
	var depths []uint8
	for _, m := range members {
		if m.Level < 1 || m.Level > 255 {
			return fmt.Errorf("cgroup %d: level %d is out of range", m.CgroupID, m.Level)
		}
		if seen[m.CgroupID] {
			return fmt.Errorf("cgroup %d is placed twice", m.CgroupID)
		}
		seen[m.CgroupID] = true
		c := m.Compartment
		if m.Protected {
			c = uint32(kernelConstantCOMPARTMENT_PROTECTED)
		} else if int(c) >= compartments {
			return fmt.Errorf("cgroup %d: no compartment %d", m.CgroupID, c)
		}
		t.ids = append(t.ids, m.CgroupID)
		t.comps = append(t.comps, c)
		if !slices.Contains(depths, uint8(m.Level)) {
			depths = append(depths, uint8(m.Level))
		}
	}
	if len(depths) > len(t.gen.Level) {
		return fmt.Errorf("%w: cgroups at %d different depths, at most %d", ErrFull, len(depths), len(t.gen.Level))
	}
	slices.Sort(depths)
	slices.Reverse(depths) // the deepest that the plan names decides
	t.gen.Level = [len(t.gen.Level)]uint8{}
	copy(t.gen.Level[:], depths)
	t.gen.Levels = uint32(len(depths))
	return nil
}
