package conn

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/policy"
)

// kindFor is the kind of socket that connects to an address.
func kindFor(a netip.Addr) kerneltest.Kind {
	if a.Is4() {
		return kerneltest.TCP4
	}
	return kerneltest.TCP6
}

// providersOf connects to every address from a compartment where every provider
// refuses, and returns each one's provider, from what it was refused by. No connect
// leaves the hook, so any address will do.
//
// The errno tells providers apart in one run; where the kernel has none, each connect
// has to be looked up in the counts.
func providersOf(in *instance, client *kerneltest.Client, addrs []netip.AddrPort) []string {
	in.Helper()
	got := make([]string, len(addrs))
	name := func(before, after map[policy.Key]Bulkhead) string {
		var names []string
		for k, a := range after {
			if k.Scope == policy.ScopeProvider && a.refused() != before[k].refused() {
				names = append(names, k.Provider)
			}
		}
		return strings.Join(names, "+")
	}
	byErrno := map[syscall.Errno]string{}
	for _, b := range in.k.plan.Bulkheads {
		if b.Scope == policy.ScopeProvider {
			byErrno[syscall.Errno(b.Errno)] = b.Provider
		}
	}
	distinct := HaveErrno() && len(byErrno) == len(in.k.plan.Providers)
	for _, kind := range []kerneltest.Kind{kerneltest.TCP4, kerneltest.TCP6} {
		var at []int
		var texts []string
		for i, a := range addrs {
			if kindFor(a.Addr()) == kind {
				at, texts = append(at, i), append(texts, a.String())
			}
		}
		if !distinct {
			for j, i := range at {
				before := in.counts()
				client.Probe(kind, texts[j:j+1])
				got[i] = name(before, in.counts())
			}
			continue
		}
		before := in.counts()
		for j, errno := range client.Probe(kind, texts) {
			got[at[j]] = byErrno[errno]
			if got[at[j]] == "" {
				in.Fatalf("connect to %s: %v, which no provider refuses with", texts[j], errno)
			}
		}
		// What each connect returned and what was counted must agree.
		counted := map[string]uint64{}
		for _, i := range at {
			counted[got[i]]++
		}
		for k, a := range in.counts() {
			if k.Scope == policy.ScopeProvider && a.refused()-before[k].refused() != counted[k.Provider] {
				in.Fatalf("%s counted %d refusals, connect returned its errno %d times", k, a.refused()-before[k].refused(), counted[k.Provider])
			}
		}
	}
	return got
}

// errnos that a policy may give, enough for a handful of providers.
func someErrnos() []string {
	return []string{"EPERM", "EAGAIN", "EACCES", "EBUSY", "EUSERS", "ENETDOWN", "ENETUNREACH", "ENOBUFS", "ETIMEDOUT", "EHOSTDOWN"}
}

// refusing is a policy of providers that all refuse, each with its errno; other too.
func refusing(blocks ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "providers:\n  other: {limits: {connections: 0, errno: ECONNREFUSED}}\n")
	for i, p := range blocks {
		fmt.Fprintf(&b, "  p%d: {%s, wide: true, limits: {connections: 0, errno: %s}}\n", i, p, someErrnos()[i])
	}
	b.WriteString("features:\n  f: {class: batch}\n")
	return b.String()
}

func TestMatching(t *testing.T) {
	runAll(t,
		test{"by hand", testDestinations},
		test{"property", testDestinationsProperty},
		test{"large plan", testLargePlan},
		test{"many ports", testManyPorts},
		test{"other is counted", testOtherIsCounted},
	)
}

// One matcher for IPv4, IPv4 in IPv6, and IPv6; the longest prefix that has the port.
func testDestinations(in *instance) {
	t := in.T
	cg := in.Mkdir("f")
	client := in.start(cg)
	for _, c := range []struct {
		name      string
		providers []string
		want      map[string]string // address -> provider
	}{
		{"IPv4, also in IPv6", []string{"cidrs: [127.0.0.0/8]"}, map[string]string{
			"127.0.0.1:80": "p0", "127.255.255.255:65535": "p0", "128.0.0.1:80": "other", "126.255.255.255:80": "other",
			"[::ffff:127.0.0.1]:80": "p0", "[::ffff:127.0.0.2]:1": "p0", "[::ffff:126.255.255.255]:80": "other",
			// Looks like it and is not: deprecated IPv4-compatible, and a part of the mapped prefix.
			"[::127.0.0.1]:80": "other", "[::1:ffff:127.0.0.1]:80": "other", "[fd00::ffff:127.0.0.1]:80": "other",
		}},
		{"IPv4 written as IPv6", []string{`cidrs: ["::ffff:10.0.0.0/104"]`}, map[string]string{
			"10.1.2.3:80": "p0", "[::ffff:10.1.2.3]:80": "p0", "11.0.0.0:80": "other",
		}},
		{"IPv6", []string{`cidrs: ["fd00:20::/64"]`}, map[string]string{
			"[fd00:20::1]:80": "p0", "[fd00:20::ffff:ffff:ffff:ffff]:1": "p0", "[fd00:20:0:1::]:80": "other", "[fd00:1f::1]:80": "other",
			"10.0.0.1:80": "other",
		}},
		{"a zone is ignored", []string{`cidrs: ["fe80::/10"]`}, map[string]string{
			"[fe80::1%lo]:80": "p0", "[febf::1%lo]:80": "p0", "[fec0::1]:80": "other",
		}},
		{"::/0 is not IPv4, 0.0.0.0/0 is not IPv6", []string{`cidrs: ["::/0"], ports: [1]`, "cidrs: [0.0.0.0/0], ports: [2]"}, map[string]string{
			"[::1]:1": "p0", "[fd00::1]:1": "p0", "127.0.0.1:1": "other", "[::ffff:127.0.0.1]:1": "other",
			"127.0.0.1:2": "p1", "[::ffff:8.8.8.8]:2": "p1", "[::1]:2": "other",
		}},
		{"/32 and /128 beside all", []string{`cidrs: [0.0.0.0/0, "::/0"]`, `cidrs: [10.0.0.1/32, "fd00::1/128"]`}, map[string]string{
			"10.0.0.1:1": "p1", "10.0.0.0:1": "p0", "10.0.0.2:1": "p0", "[fd00::1]:9": "p1", "[fd00::2]:9": "p0", "[fd00::]:9": "p0",
		}},
		{"a longer prefix does not hide a wider rule for other ports",
			[]string{"cidrs: [1.0.1.0/24]", "cidrs: [1.0.1.0/26], ports: [80]"}, map[string]string{
				"1.0.1.5:80": "p1", "1.0.1.5:443": "p0", "1.0.1.5:79": "p0", "1.0.1.5:81": "p0", "1.0.1.64:80": "p0", "1.0.2.5:80": "other",
			}},
		{"three deep", []string{"cidrs: [10.0.0.0/8], ports: [1-1000]", "cidrs: [10.1.0.0/16], ports: [500-600]", "cidrs: [10.1.1.0/24], ports: [550, 2000]"}, map[string]string{
			"10.1.1.1:550": "p2", "10.1.1.1:2000": "p2", "10.1.1.1:549": "p1", "10.1.1.1:551": "p1", "10.1.1.1:600": "p1", "10.1.1.1:601": "p0",
			"10.1.1.1:1": "p0", "10.1.1.1:1001": "other", "10.1.2.1:550": "p1", "10.1.2.1:2000": "other", "10.2.0.0:550": "p0",
		}},
		{"several ranges and both ends of the ports", []string{"cidrs: [127.0.0.0/8], ports: [1, 80, 443, 8000-8010, 65535]"}, map[string]string{
			"127.0.0.1:1": "p0", "127.0.0.1:2": "other", "127.0.0.1:79": "other", "127.0.0.1:80": "p0", "127.0.0.1:81": "other",
			"127.0.0.1:442": "other", "127.0.0.1:443": "p0", "127.0.0.1:7999": "other", "127.0.0.1:8000": "p0", "127.0.0.1:8005": "p0",
			"127.0.0.1:8010": "p0", "127.0.0.1:8011": "other", "127.0.0.1:65534": "other", "127.0.0.1:65535": "p0", "127.0.0.1:0": "other",
		}},
		{"all ports, 0 too", []string{"cidrs: [127.0.0.0/8]"}, map[string]string{"127.0.0.1:0": "p0", "127.0.0.1:65535": "p0"}},
		{"one length: the first in the file", []string{"cidrs: [127.0.0.0/8], ports: [1-100]", "cidrs: [127.0.0.0/8], ports: [50-200]"}, map[string]string{
			"127.0.0.1:50": "p0", "127.0.0.1:100": "p0", "127.0.0.1:101": "p1", "127.0.0.1:200": "p1", "127.0.0.1:201": "other",
		}},
		{"UDP only is not TCP", []string{"cidrs: [127.0.0.0/8], protocol: udp", "cidrs: [127.0.0.0/9], protocol: [tcp, udp], ports: [80]"}, map[string]string{
			"127.0.0.1:79": "other", "127.0.0.1:80": "p1", "127.200.0.1:80": "other",
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			plan := planOf(t, refusing(c.providers...))
			in.apply(plan, member(t, plan, cg, "f", ""))
			texts := keysOf(c.want)
			var addrs []netip.AddrPort
			for _, a := range texts {
				addrs = append(addrs, netip.MustParseAddrPort(a))
			}
			for i, got := range providersOf(in, client, addrs) {
				want := c.want[texts[i]]
				if got != want {
					t.Errorf("%s is of %s, want %s", texts[i], got, want)
				}
				if p := plan.Providers[plan.Lookup(addrs[i].Addr(), addrs[i].Port(), policy.TCP)].Name; p != want {
					t.Errorf("%s is of %s by the plan, want %s", texts[i], p, want)
				}
			}
		})
	}
}

// randomAddr is near one of few addresses, so that prefixes overlap often.
func randomAddr(r *rand.Rand) netip.Addr {
	bases := []string{"10.0.0.0", "10.0.255.255", "127.0.0.1", "255.255.255.255", "fd00::", "fd00::ffff:0:0", "::1", "::ffff:0:0", "2001:db8::1"}
	a := netip.MustParseAddr(bases[r.IntN(len(bases))])
	if a.Is4() {
		b := a.As4()
		b[r.IntN(4)] ^= byte(1 << r.IntN(8))
		return netip.AddrFrom4(b)
	}
	b := a.As16()
	b[r.IntN(16)] ^= byte(1 << r.IntN(8))
	b[r.IntN(16)] ^= byte(1 << r.IntN(8))
	return netip.AddrFrom16(b)
}

// randomPolicy has some providers with some prefixes and ports.
func randomPolicy(r *rand.Rand) string {
	var blocks []string
	for range 1 + r.IntN(len(someErrnos())) {
		var cidrs, ports []string
		for range 1 + r.IntN(8) {
			a := randomAddr(r).Unmap()
			p := netip.PrefixFrom(a, r.IntN(a.BitLen()+1)).Masked()
			cidrs = append(cidrs, `"`+p.String()+`"`)
		}
		for range r.IntN(6) {
			first := 1 + r.IntN(64)
			last := min(first+r.IntN(1<<r.IntN(17)), 65535)
			ports = append(ports, fmt.Sprintf(`"%d-%d"`, first, last))
		}
		block := "cidrs: [" + strings.Join(cidrs, ", ") + "]"
		if len(ports) > 0 {
			block += ", ports: [" + strings.Join(ports, ", ") + "]"
		}
		switch r.IntN(4) {
		case 0:
			block += ", protocol: udp"
		case 1:
			block += ", protocol: [tcp, udp]"
		}
		blocks = append(blocks, block)
	}
	return refusing(blocks...)
}

// randomDestination is an address at or near the edge of one of a plan's prefixes, and
// a port at or near the edge of one of its ranges.
func randomDestination(r *rand.Rand, plan *policy.Plan) netip.AddrPort {
	a, port := randomAddr(r), uint16(r.Uint32())
	if len(plan.Destinations) > 0 && r.IntN(4) != 0 {
		d := plan.Destinations[r.IntN(len(plan.Destinations))]
		b := d.Prefix.Addr().AsSlice()
		if r.IntN(2) == 0 { // the last address of it
			for i := d.Prefix.Bits(); i < len(b)*8; i++ {
				b[i/8] |= 1 << (7 - i%8)
			}
		}
		a, _ = netip.AddrFromSlice(b)
		switch r.IntN(4) {
		case 0:
			a = a.Next()
		case 1:
			a = a.Prev()
		}
		if !a.IsValid() {
			a = randomAddr(r)
		}
		if len(d.Ports) > 0 && r.IntN(4) != 0 {
			p := d.Ports[r.IntN(len(d.Ports))]
			port = []uint16{p.First - 1, p.First, p.First + (p.Last-p.First)/2, p.Last, p.Last + 1}[r.IntN(5)]
		}
	}
	if a.Is4() && r.IntN(2) == 0 {
		a = netip.AddrFrom16(a.As16()) // the same address on an IPv6 socket
	}
	// The kernel takes :: for ::1, and 0.0.0.0 for 127.0.0.1, only after the hook, except
	// that IPv6 does it before.
	if a.Is6() && a.IsUnspecified() {
		a = netip.IPv6Loopback()
	}
	return netip.AddrPortFrom(a, port)
}

// The kernel finds for every connect the provider that the plan says, for random
// policies and addresses.
func testDestinationsProperty(in *instance) {
	t := in.T
	const plans, connects = 40, 300
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	cg := in.Mkdir("f")
	client := in.start(cg)
	seen := map[string]int{}
	for i := range plans {
		text := randomPolicy(r)
		plan := planOf(t, text)
		in.apply(plan, member(t, plan, cg, "f", ""))
		addrs := make([]netip.AddrPort, connects)
		for j := range addrs {
			addrs[j] = randomDestination(r, plan)
		}
		for j, got := range providersOf(in, client, addrs) {
			want := plan.Providers[plan.Lookup(addrs[j].Addr(), addrs[j].Port(), policy.TCP)].Name
			if got != want {
				t.Fatalf("seed %d, plan %d: %s is of %s, want %s\n%s", seed, i, addrs[j], got, want, text)
			}
			seen[got]++
		}
	}
	t.Logf("connects by provider: %v", seen)
	if seen["other"] == 0 || seen["p0"] == 0 || seen["p3"] == 0 {
		t.Errorf("the random policies hit only %v", seen)
	}
}

// Ten thousand prefixes and a thousand routes are applied, and lookups stay right.
func testLargePlan(in *instance) {
	t := in.T
	const providers, features, perProvider = 99, 9, 102
	var b strings.Builder
	b.WriteString("providers:\n  other: {limits: {connections: 0}}\n")
	n := 0
	for p := range providers {
		var cidrs []string
		for range perProvider {
			// Pairs of a /24 and a /28 in it, of different providers.
			a := netip.AddrFrom4([4]byte{10, byte(n / 2 >> 8), byte(n / 2), 0})
			cidrs = append(cidrs, fmt.Sprintf("%s/%d", a, 24+n%2*4))
			n++
		}
		fmt.Fprintf(&b, "  p%d: {cidrs: [%s], ports: [%d, %d], limits: {connections: 0}}\n", p, strings.Join(cidrs, ", "), 1+p%2, 10+p%2)
	}
	b.WriteString("features:\n")
	for f := range features {
		fmt.Fprintf(&b, "  f%d: {class: batch}\n", f)
	}
	plan := planOf(t, b.String())
	if len(plan.Destinations) < 10_000 || len(plan.Routes) < 1_000 {
		t.Fatalf("%d destinations and %d routes", len(plan.Destinations), len(plan.Routes))
	}
	cg := in.Mkdir("f")
	start := time.Now()
	in.apply(plan, member(t, plan, cg, "f8", ""))
	t.Logf("%d destinations and %d routes applied in %s", len(plan.Destinations), len(plan.Routes), time.Since(start))
	start = time.Now()
	in.apply(plan, member(t, plan, cg, "f8", ""))
	t.Logf("and again in %s", time.Since(start))

	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	client := in.start(cg)
	want := map[string]uint64{}
	var texts []string
	for range 1000 {
		a := randomDestination(r, plan)
		if !a.Addr().Is4() {
			continue
		}
		texts = append(texts, a.String())
		want[plan.Providers[plan.Lookup(a.Addr(), a.Port(), policy.TCP)].Name]++
	}
	for i, errno := range client.Probe(kerneltest.TCP4, texts) {
		wantErrno(t, errno, errnoSeen(syscall.ECONNREFUSED), texts[i])
	}
	for k, c := range in.counts() {
		if k.Scope == policy.ScopeProvider && c.refused() != want[k.Provider] {
			t.Errorf("%s refused %d, want %d", k, c.refused(), want[k.Provider])
		}
	}
	if len(want) < providers/2 {
		t.Errorf("only %d providers were hit", len(want))
	}
}

// As many ranges of ports as one prefix can have: two providers with every second port, of
// both protocols. Each port is found, and nothing of what is beside it.
func testManyPorts(in *instance) {
	t := in.T
	const ranges = 2 * 65535
	var ports [2][]string
	for port := 1; port < 1<<16; port++ {
		ports[port%2] = append(ports[port%2], strconv.Itoa(port))
	}
	var b strings.Builder
	b.WriteString("providers:\n")
	for i, list := range ports {
		fmt.Fprintf(&b, "  p%d: {cidrs: [127.0.0.0/8], ports: [%s], protocol: [tcp, udp], limits: {connections: 0}}\n", i, strings.Join(list, ", "))
	}
	b.WriteString("features:\n  f: {class: batch}\n")
	plan := planOf(t, b.String())
	if n := len(plan.Destinations[0].Ports); n != ranges {
		t.Fatalf("%d ranges, want %d", n, ranges)
	}
	cg := in.Mkdir("f")
	in.apply(plan, member(t, plan, cg, "f", ""))
	client := in.start(cg)
	addrs := []string{"127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:32767", "127.0.0.1:32768", "127.0.0.1:65534", "127.0.0.1:65535"}
	want := [2]uint64{3, 3}
	for port := 3; port < 1<<16-2; port += 127 {
		addrs = append(addrs, fmt.Sprintf("127.0.0.1:%d", port))
		want[port%2]++
	}
	for _, kind := range []kerneltest.Kind{kerneltest.TCP4, kerneltest.UDP4} {
		before := in.counts()
		for i, errno := range client.Probe(kind, addrs) {
			wantErrno(t, errno, errnoSeen(syscall.ECONNREFUSED), string(kind)+" "+addrs[i])
		}
		after := in.counts()
		for i, w := range want {
			p := provider("p" + strconv.Itoa(i))
			if n := after[p].refused() - before[p].refused(); n != w {
				t.Errorf("%s: %s refused %d, want %d", kind, p, n, w)
			}
		}
	}
}

// Connections to nobody are counted by who makes them, wherever a plan has its route to
// other, and hold nothing.
func testOtherIsCounted(in *instance) {
	client, _ := two(in)
	stranger := in.start(in.Mkdir("stranger"))
	moved := planOf(in, `
providers:
  n: {cidrs: [127.9.0.0/16]}
  p: {cidrs: [127.1.0.0/16]}
features:
  a: {class: batch}
  f: {class: batch}
`)
	want := 0
	for i := range 2 {
		if i == 1 {
			in.apply(moved, member(in, moved, in.Mkdir("f"), "f", ""))
		}
		for range 5 {
			client.MustDial(kerneltest.TCP4, "127.3.0.1:80")
			want++
			client.MustDial(kerneltest.TCP6, "[::ffff:127.3.0.1]:80")
			want++
		}
		stranger.MustDial(kerneltest.TCP4, "127.3.0.1:80")
		if n := in.traffic("f", "", "other").Connections; int(n) != want {
			in.Errorf("plan %d: %d connections of f to other, want %d", i, n, want)
		}
		if n := in.traffic("default", "", "other").Connections; int(n) != i+1 {
			in.Errorf("plan %d: %d connections of default to other, want %d", i, n, i+1)
		}
		for k, b := range in.counts() {
			if b.InUse != 0 || b.Accepted != 0 {
				in.Errorf("plan %d: %s has %d in use and accepted %d", i, k, b.InUse, b.Accepted)
			}
		}
	}
}
