package policy

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"
)

func lookup(p *Plan, addr string, port uint16, proto Proto) string {
	return p.Providers[p.Lookup(netip.MustParseAddr(addr), port, proto)].Name
}

func destLines(p *Plan) []string {
	var lines []string
	for _, d := range p.Destinations {
		lines = append(lines, d.Prefix.String()+": "+p.portsText(d.Ports))
	}
	return lines
}

// A longer prefix decides only for the ports that it has.
func TestLongerPrefixHidesNothing(t *testing.T) {
	plan, _ := compileText(t, head+`
providers:
  wide: {cidrs: [1.0.1.0/24], limits: {connections: 5}}
  narrow: {cidrs: [1.0.1.0/26], ports: [80], limits: {connections: 1}}
features: {}
`)
	wantLines(t, destLines(plan), []string{
		"1.0.1.0/24: tcp 0-65535 wide",
		"1.0.1.0/26: tcp 0-79 wide, tcp 80 narrow, tcp 81-65535 wide",
	})
	for _, tc := range []struct {
		addr  string
		port  uint16
		proto Proto
		want  string
	}{
		{"1.0.1.5", 443, TCP, "wide"}, {"1.0.1.5", 80, TCP, "narrow"}, {"1.0.1.5", 79, TCP, "wide"}, {"1.0.1.5", 81, TCP, "wide"},
		{"1.0.1.5", 0, TCP, "wide"}, {"1.0.1.5", 65535, TCP, "wide"}, {"1.0.1.64", 80, TCP, "wide"}, {"1.0.2.0", 80, TCP, "other"},
		{"1.0.1.5", 80, UDP, "other"}, {"1.0.0.255", 80, TCP, "other"}, {"::ffff:1.0.1.5", 80, TCP, "narrow"}, {"::1.0.1.5", 80, TCP, "other"},
	} {
		if got := lookup(plan, tc.addr, tc.port, tc.proto); got != tc.want {
			t.Errorf("%s %s:%d is %s, want %s", tc.proto, tc.addr, tc.port, got, tc.want)
		}
	}
}

// Between prefixes of one length the earlier provider has the port; a range is
// made of what is left.
func TestFileOrder(t *testing.T) {
	plan, _ := compileText(t, head+`
providers:
  a: {cidrs: [10.0.0.0/8], ports: [443, "8000-8010"]}
  b: {cidrs: [10.0.0.0/8, 10.0.0.0/8, "::ffff:10.0.0.0/104"], ports: ["400-8005"], protocol: [udp, tcp]}
  c: {cidrs: [10.0.0.0/8, 10.1.0.0/16], ports: ["8001-8020", 8021, 443]}
features: {}
`)
	wantLines(t, destLines(plan), []string{
		"10.0.0.0/8: tcp 400-442 b, tcp 443 a, tcp 444-7999 b, tcp 8000-8010 a, tcp 8011-8021 c, udp 400-8005 b",
		"10.1.0.0/16: tcp 400-442 b, tcp 443 c, tcp 444-7999 b, tcp 8000 a, tcp 8001-8021 c, udp 400-8005 b",
	})
	if p := plan.Providers; p[1].UDP || !p[2].UDP || p[3].UDP {
		t.Errorf("UDP is wrong: %+v", p)
	}
}

// ::/0 is IPv6, not IPv4, although the kernel holds IPv4 inside it.
func TestIPv6IsNotIPv4(t *testing.T) {
	for _, tc := range []struct {
		cidrs string
		want  []string
	}{
		{`["::/0"]`, []string{"0.0.0.0/0: nothing", "::/0: tcp 0-65535 p"}},
		{`["::/64"]`, []string{"0.0.0.0/0: nothing", "::/64: tcp 0-65535 p"}},
		{`["::/80"]`, []string{"0.0.0.0/0: nothing", "::/80: tcp 0-65535 p"}},
		{`["::fffe:0:0/95"]`, []string{"0.0.0.0/0: nothing", "::fffe:0:0/95: tcp 0-65535 p"}},
		{`["::/96"]`, []string{"::/96: tcp 0-65535 p"}},
		{`["2000::/3"]`, []string{"2000::/3: tcp 0-65535 p"}},
		{`["::ffff:0.0.0.0/96"]`, []string{"0.0.0.0/0: tcp 0-65535 p"}},
		{`["::/0", 0.0.0.0/0]`, []string{"0.0.0.0/0: tcp 0-65535 p", "::/0: tcp 0-65535 p"}},
		{`["::/0", 10.0.0.0/8]`, []string{"0.0.0.0/0: nothing", "10.0.0.0/8: tcp 0-65535 p", "::/0: tcp 0-65535 p"}},
	} {
		plan, _ := compileText(t, head+"providers: {p: {wide: true, cidrs: "+tc.cidrs+"}}\nfeatures: {}\n")
		wantLines(t, destLines(plan), tc.want)
		for _, d := range plan.Destinations {
			if d.Ports == nil {
				t.Errorf("%s: ports of %s are null in JSON", tc.cidrs, d.Prefix)
			}
		}
	}
	plan, _ := compileText(t, head+"providers: {p: {wide: true, cidrs: [\"::/0\"]}}\nfeatures: {}\n")
	for addr, want := range map[string]string{"::1": "p", "1.2.3.4": "other", "::ffff:1.2.3.4": "other", "fe80::1%eth0": "p"} {
		if got := lookup(plan, addr, 443, TCP); got != want {
			t.Errorf("%s is %s, want %s", addr, got, want)
		}
	}
	if got := plan.Lookup(netip.Addr{}, 443, TCP); got != 0 {
		t.Errorf("no address is provider %d", got)
	}
}

// The edges: whole addresses, everything, zones.
func TestPrefixEdges(t *testing.T) {
	plan, _ := compileText(t, head+`
providers:
  link: {cidrs: ["fe80::/10"], wide: true}
  host4: {cidrs: [10.0.0.5/32], ports: [1, 65535]}
  host6: {cidrs: ["fd00::5/128"], ports: ["1-65535"]}
  all: {cidrs: [0.0.0.0/0], wide: true, ports: [443]}
features: {}
`)
	for _, tc := range []struct {
		addr string
		port uint16
		want string
	}{
		{"fe80::1", 5, "link"}, {"fe80::1%eth0", 5, "link"}, {"febf::1", 5, "link"}, {"fec0::1", 5, "other"},
		{"10.0.0.5", 1, "host4"}, {"10.0.0.5", 65535, "host4"}, {"10.0.0.5", 443, "all"}, {"10.0.0.5", 0, "other"}, {"10.0.0.4", 1, "other"},
		{"10.0.0.6", 443, "all"}, {"0.0.0.0", 443, "all"}, {"255.255.255.255", 443, "all"}, {"::ffff:255.255.255.255", 443, "all"},
		{"fd00::5", 1, "host6"}, {"fd00::5", 65535, "host6"}, {"fd00::5", 0, "other"}, {"fd00::4", 1, "other"}, {"::", 443, "other"},
	} {
		if got := lookup(plan, tc.addr, tc.port, TCP); got != tc.want {
			t.Errorf("%s port %d is %s, want %s", tc.addr, tc.port, got, tc.want)
		}
	}
}

// naive scans all rules: the longest prefix that covers the address and has the
// port; between equal ones the first.
func naive(providers []*provider, addr netip.Addr, port uint16, proto Proto) uint32 {
	addr = addr.Unmap().WithZone("")
	found, bits := uint32(0), -1
	for i, p := range providers {
		for _, x := range p.prefixes {
			prefix := x.value
			if prefix.Bits() <= bits || !prefix.Contains(addr) {
				continue
			}
			for _, r := range p.ports {
				if r.Proto == proto && r.First <= port && port <= r.Last {
					found, bits = uint32(i+1), prefix.Bits()
				}
			}
		}
	}
	return found
}

// kernelLookup is the kernel's way: one table of 128-bit keys, IPv4 at
// ::ffff:0:0/96.
func kernelLookup(p *Plan, addr netip.Addr, port uint16, proto Proto) uint32 {
	key := netip.AddrFrom16(addr.WithZone("").As16())
	best := -1
	var ports []PortRange
	for _, d := range p.Destinations {
		prefix := d.Prefix
		if prefix.Addr().Is4() {
			prefix = netip.PrefixFrom(netip.AddrFrom16(prefix.Addr().As16()), prefix.Bits()+96)
		}
		if prefix.Bits() > best && prefix.Contains(key) {
			best, ports = prefix.Bits(), d.Ports
		}
	}
	for _, r := range ports {
		if r.Proto == proto && r.First <= port && port <= r.Last {
			return r.Provider
		}
	}
	return 0
}

// Random rules over few addresses and ports, so that they overlap: Lookup, and
// the kernel's way, are the naive scan.
func TestLookupIsTheNaiveScan(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))

	address := func() netip.Addr {
		bits := func() byte { return []byte{0, 1, 2, 0x80, 0xff}[rnd.IntN(5)] }
		switch rnd.IntN(3) {
		case 0:
			return netip.AddrFrom4([4]byte{10, bits(), bits(), bits()})
		case 1:
			return netip.AddrFrom16([16]byte{0: 0xfd, 1: bits(), 14: bits(), 15: bits()})
		}
		// In and around where the kernel holds IPv4.
		return netip.AddrFrom16([16]byte{10: 0xff, 11: []byte{0xff, 0xfe, 0}[rnd.IntN(3)], 12: 10, 13: bits(), 14: bits(), 15: bits()})
	}
	prefix := func() netip.Prefix {
		a := address()
		if rnd.IntN(10) == 0 {
			a = netip.IPv6Unspecified()
		}
		p := netip.PrefixFrom(a, rnd.IntN(a.BitLen()+1)).Masked()
		p, err := parsePrefix(p.String()) // IPv4 in IPv6 becomes IPv4
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	port := func() uint16 {
		if edge := rnd.IntN(8); edge < 2 {
			return uint16(edge * 65535)
		}
		return uint16(rnd.IntN(24))
	}
	for round := range 400 {
		var providers []*provider
		for i := range 1 + rnd.IntN(8) {
			p := &provider{placed: placed[string]{value: fmt.Sprint("p", i)}}
			for range 1 + rnd.IntN(6) {
				p.prefixes = append(p.prefixes, placed[netip.Prefix]{value: prefix()})
			}
			var ranges []PortRange
			for range 1 + rnd.IntN(4) {
				a, b := port(), port()
				ranges = append(ranges, PortRange{First: min(a, b), Last: max(a, b)})
			}
			protos := [][]Proto{{TCP}, {UDP}, {UDP, TCP}}[rnd.IntN(3)]
			p.ports = portsOf(protos, ranges)
			providers = append(providers, p)
		}
		plan, _, err := Compile(&File{mode: placed[Mode]{value: Enforce}, providers: providers})
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range plan.Destinations {
			checkDestination(t, d)
		}
		for range 200 {
			addr, port, proto := address(), port(), []Proto{TCP, UDP}[rnd.IntN(2)]
			if rnd.IntN(3) == 0 { // an address at the edge of a prefix
				d := plan.Destinations[rnd.IntN(len(plan.Destinations))]
				addr = d.Prefix.Addr()
				if rnd.IntN(2) == 0 && addr.Prev().IsValid() {
					addr = addr.Prev()
				}
			}
			want := naive(providers, addr, port, proto)
			if got := plan.Lookup(addr, port, proto); got != want {
				t.Fatalf("round %d: Lookup(%s, %d, %s) = %d, want %d in\n%s", round, addr, port, proto, got, want, strings.Join(destLines(plan), "\n"))
			}
			if got := kernelLookup(plan, addr, port, proto); got != want {
				t.Fatalf("round %d: the kernel finds %d for %s %d %s, want %d in\n%s", round, got, addr, port, proto, want, strings.Join(destLines(plan), "\n"))
			}
			mapped := netip.AddrFrom16(addr.As16())
			if got := plan.Lookup(mapped, port, proto); got != want {
				t.Fatalf("round %d: Lookup(%s) = %d, and %d for %s", round, mapped, got, want, addr)
			}
		}
	}
}

// checkDestination holds what the type promises: masked, disjoint, sorted, and
// no two neighbours that could be one.
func checkDestination(t *testing.T, d Destination) {
	t.Helper()
	if d.Prefix != d.Prefix.Masked() || d.Prefix.Addr().Is4In6() && d.Prefix.Bits() >= 96 {
		t.Fatalf("prefix %s", d.Prefix)
	}
	for i, r := range d.Ports {
		if r.First > r.Last {
			t.Fatalf("%s: %+v", d.Prefix, r)
		}
		if i == 0 {
			continue
		}
		last := d.Ports[i-1]
		if last.Proto > r.Proto || last.Proto == r.Proto && last.Last >= r.First {
			t.Fatalf("%s: %+v before %+v", d.Prefix, last, r)
		}
		if last.Proto == r.Proto && last.Provider == r.Provider && last.Last+1 == r.First {
			t.Fatalf("%s: %+v and %+v are one", d.Prefix, last, r)
		}
	}
}

func TestFill(t *testing.T) {
	r := func(first, last uint16, p uint32) PortRange { return PortRange{TCP, first, last, p} }
	for _, tc := range []struct{ first, second, want []PortRange }{
		{nil, []PortRange{r(1, 2, 1)}, []PortRange{r(1, 2, 1)}},
		{[]PortRange{r(1, 2, 1)}, nil, []PortRange{r(1, 2, 1)}},
		{[]PortRange{r(0, 65535, 1)}, []PortRange{r(0, 65535, 2)}, []PortRange{r(0, 65535, 1)}},
		{[]PortRange{r(5, 5, 1)}, []PortRange{r(0, 65535, 2)}, []PortRange{r(0, 4, 2), r(5, 5, 1), r(6, 65535, 2)}},
		{[]PortRange{r(0, 0, 1), r(65535, 65535, 1)}, []PortRange{r(0, 65535, 2)}, []PortRange{r(0, 0, 1), r(1, 65534, 2), r(65535, 65535, 1)}},
		{[]PortRange{r(5, 9, 1)}, []PortRange{r(1, 5, 1), r(9, 20, 2)}, []PortRange{r(1, 9, 1), r(10, 20, 2)}},
		{[]PortRange{r(5, 9, 1)}, []PortRange{{UDP, 5, 9, 1}}, []PortRange{r(5, 9, 1), {UDP, 5, 9, 1}}},
		{[]PortRange{{UDP, 5, 9, 1}}, []PortRange{r(5, 9, 1), {UDP, 9, 10, 2}}, []PortRange{r(5, 9, 1), {UDP, 5, 9, 1}, {UDP, 10, 10, 2}}},
	} {
		first := append([]PortRange(nil), tc.first...)
		if got := fill(tc.first, tc.second); !reflect.DeepEqual(got, tc.want) {
			t.Errorf("fill(%v, %v) = %v, want %v", tc.first, tc.second, got, tc.want)
		}
		if !reflect.DeepEqual(first, tc.first) {
			t.Errorf("fill changed %v into %v", first, tc.first)
		}
	}
}
