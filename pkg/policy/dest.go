package policy

import (
	"cmp"
	"net/netip"
	"slices"
	"sort"
)

// portsOf is every range for every protocol, sorted and disjoint.
func portsOf(protos []Proto, ranges []PortRange) []PortRange {
	var all []PortRange
	for _, proto := range protos {
		for _, r := range ranges {
			r.Proto = proto
			all = append(all, r)
		}
	}
	slices.SortFunc(all, func(a, b PortRange) int {
		return cmp.Or(cmp.Compare(a.Proto, b.Proto), cmp.Compare(a.First, b.First))
	})
	return mergePorts(all)
}

// mergePorts makes one of neighbours of one protocol and provider that touch or overlap.
func mergePorts(sorted []PortRange) []PortRange {
	var merged []PortRange
	for _, r := range sorted {
		if n := len(merged) - 1; n >= 0 && merged[n].Proto == r.Proto && merged[n].Provider == r.Provider &&
			uint32(r.First) <= uint32(merged[n].Last)+1 {
			merged[n].Last = max(merged[n].Last, r.Last)
			continue
		}
		merged = append(merged, r)
	}
	return merged
}

// fill gives the ports that first leaves free to what second says of them. Both
// are sorted and disjoint, and so is what it returns.
func fill(first, second []PortRange) []PortRange {
	switch {
	case len(first) == 0:
		return second
	case len(second) == 0:
		return first
	}
	all := slices.Clone(first)
	i := 0
	for _, s := range second {
		// from is 32 bits wide, because one past the last port is no port.
		from := uint32(s.First)
		for i < len(first) && (first[i].Proto < s.Proto || first[i].Proto == s.Proto && first[i].Last < s.First) {
			i++
		}
		for j := i; j < len(first) && first[j].Proto == s.Proto && first[j].First <= s.Last; j++ {
			if from < uint32(first[j].First) {
				all = append(all, PortRange{s.Proto, uint16(from), first[j].First - 1, s.Provider})
			}
			from = uint32(first[j].Last) + 1
		}
		if from <= uint32(s.Last) {
			all = append(all, PortRange{s.Proto, uint16(from), s.Last, s.Provider})
		}
	}
	slices.SortFunc(all, func(a, b PortRange) int {
		return cmp.Or(cmp.Compare(a.Proto, b.Proto), cmp.Compare(a.First, b.First))
	})
	return mergePorts(all)
}

// portsAs are a provider's ports with its index in them.
func (p *provider) portsAs(index uint32) []PortRange {
	own := slices.Clone(p.ports)
	for i := range own {
		own[i].Provider = index
	}
	return own
}

// overlap is what of own the ports of taken have already, with taken's providers.
// Both are sorted and disjoint, and so is what it returns.
func overlap(own, taken []PortRange) []PortRange {
	var both []PortRange
	for i, j := 0, 0; i < len(own) && j < len(taken); {
		a, b := own[i], taken[j]
		if a.Proto == b.Proto && a.First <= b.Last && b.First <= a.Last {
			both = append(both, PortRange{a.Proto, max(a.First, b.First), min(a.Last, b.Last), b.Provider})
		}
		if cmp.Or(cmp.Compare(a.Proto, b.Proto), cmp.Compare(a.Last, b.Last)) < 0 {
			i++
		} else {
			j++
		}
	}
	return both
}

// destinations compiles the providers' prefixes and ports; ranges is how many
// port ranges all destinations may have together. Providers[i] of the plan is
// providers[i-1] here.
func destinations(providers []*provider, most, ranges int) ([]Destination, error) {
	byPrefix := map[netip.Prefix][]uint32{}
	for i, p := range providers {
		for _, x := range p.prefixes {
			has := byPrefix[x.value]
			if n := len(has); n == 0 || has[n-1] != uint32(i+1) { // twice in one provider
				byPrefix[x.value] = append(has, uint32(i+1))
			}
		}
	}
	// The kernel holds IPv4 as ::ffff:0:0/96, where a shorter IPv6 prefix would
	// match all of IPv4. An empty 0.0.0.0/0 cuts it off.
	mapped := netip.MustParseAddr("::ffff:0:0")
	all4 := netip.MustParsePrefix("0.0.0.0/0")
	for prefix := range byPrefix {
		if prefix.Bits() <= 96 && prefix.Contains(mapped) {
			if _, ok := byPrefix[all4]; !ok {
				byPrefix[all4] = nil
			}
			break
		}
	}
	if len(byPrefix) > most {
		return nil, tooMany("destinations", len(byPrefix), most)
	}
	prefixes := make([]netip.Prefix, 0, len(byPrefix))
	for prefix := range byPrefix {
		prefixes = append(prefixes, prefix)
	}
	slices.SortFunc(prefixes, comparePrefixes)

	own := make([][]PortRange, len(providers)+1)
	for i, p := range providers {
		own[i+1] = p.portsAs(uint32(i + 1))
	}
	dests := make([]Destination, 0, len(prefixes))
	total := 0
	var covering []int // destinations that cover the one at hand, shortest first
	for i, prefix := range prefixes {
		ports := []PortRange{}
		for _, p := range byPrefix[prefix] {
			ports = fill(ports, own[p])
		}
		for len(covering) > 0 {
			c := dests[covering[len(covering)-1]]
			if c.Prefix.Bits() <= prefix.Bits() && c.Prefix.Contains(prefix.Addr()) {
				// What still shorter prefixes say is in it already.
				ports = fill(ports, c.Ports)
				break
			}
			covering = covering[:len(covering)-1]
		}
		covering = append(covering, i)
		dests = append(dests, Destination{Prefix: prefix, Ports: ports})
		if total += len(ports); total > ranges {
			return nil, tooMany("port ranges over all destinations", total, ranges)
		}
	}
	return dests, nil
}

// comparePrefixes puts a prefix directly before all that it covers.
func comparePrefixes(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
}

// Lookup is the provider of proto:port at an address, an index into
// Plan.Providers; 0 is other. It does what the kernel does with Destinations, in
// plain Go. IPv4 in IPv6 is IPv4, a zone is ignored, and an address that is none
// matches nothing.
func (p *Plan) Lookup(addr netip.Addr, port uint16, proto Proto) (provider uint32) {
	d, ok := p.destination(addr)
	if !ok {
		return 0
	}
	ports := d.Ports
	i := sort.Search(len(ports), func(i int) bool {
		return ports[i].Proto > proto || ports[i].Proto == proto && ports[i].Last >= port
	})
	if i < len(ports) && ports[i].Proto == proto && ports[i].First <= port {
		return ports[i].Provider
	}
	return 0
}

// destination is the one with the longest prefix that covers an address.
func (p *Plan) destination(addr netip.Addr) (Destination, bool) {
	addr = addr.Unmap()
	if !addr.IsValid() {
		return Destination{}, false
	}
	for bits := addr.BitLen(); bits >= 0; bits-- {
		prefix := netip.PrefixFrom(addr, bits).Masked() // it drops a zone
		i, ok := slices.BinarySearchFunc(p.Destinations, prefix, func(d Destination, want netip.Prefix) int {
			return comparePrefixes(d.Prefix, want)
		})
		if ok {
			return p.Destinations[i], true
		}
	}
	return Destination{}, false
}
