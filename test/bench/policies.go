package main

import (
	"fmt"
	"strings"

	"bulkhead/pkg/policy"
)

const head = "apiVersion: bulkhead/v1\nkind: Policy\nmode: enforce\n"

// Policies for few bulkheads. The worker is feature f, or default where there is none. A
// feature and a provider are counted also without a limit, so two is the least.
const (
	elsewhere = head + "providers: {p: {cidrs: [10.0.0.0/8]}}\nfeatures: {f: {class: batch}}\n"
	counted   = head + "providers: {p: {cidrs: [127.0.0.1/32]}}\nfeatures: {f: {class: batch}}\n"
	single    = head + "providers: {p: {cidrs: [127.0.0.1/32], limits: {connections: 1000}}}\nfeatures: {}\n"

	udpElsewhere = head + "providers: {p: {cidrs: [10.0.0.0/8], protocol: udp}}\nfeatures: {f: {class: batch}}\n"
	udpCounted   = head + "providers: {p: {cidrs: [127.0.0.1/32], protocol: udp}}\nfeatures: {f: {class: batch}}\n"
)

// size is how large a policy is. The zero value has five bulkheads on the worker's route
// (feature and provider, tenant and provider, feature, tenant, provider) and 6 routes.
type size struct {
	features, providers int  // more of them, each with a limit
	prefixes            int  // of one more provider, around the destination
	seven               bool // all bulkheads that a route can have
	flat                bool // no tenants, so two bulkheads less
	held                bool // a UDP provider without limit, for those who hold many slots
}

// text is the policy. The worker is feature f and tenant t. Nothing on its route is ever
// full.
func (z size) text() string {
	var b strings.Builder
	b.WriteString(head + "providers:\n  p: {cidrs: [127.0.0.1/32], ports: [9000-9099], limits: {connections: 1000}}\n")
	if z.held {
		fmt.Fprintf(&b, "  held: {cidrs: [127.0.0.1/32], ports: [%d], protocol: udp}\n", heldPort)
	}
	for i := range z.providers {
		fmt.Fprintf(&b, "  p%d: {cidrs: [172.16.%d.0/24], ports: [443], limits: {connections: 100}}\n", i, i)
	}
	if z.prefixes > 0 {
		fmt.Fprintf(&b, "  near: {ports: [443], cidrs: [%s]}\n", scattered(127, z.prefixes))
	}
	tenant := ""
	if z.seven {
		tenant = ", tenants: {t: {limits: {connections: 500}, providers: {p: {connections: 400}}}}"
	}
	limit := "900"
	if z.held {
		limit = "unlimited" // counted all the same; a limit cannot be larger than what is held
	}
	if !z.flat {
		fmt.Fprintf(&b, "tenants: {t: {limits: {connections: %s}, providers: {p: {connections: 800}}}}\n", limit)
	}
	fmt.Fprintf(&b, "features:\n  f: {class: batch, limits: {connections: %s}, providers: {p: {connections: 600}}%s}\n", limit, tenant)
	for i := range z.features {
		fmt.Fprintf(&b, "  f%d: {class: batch, limits: {connections: 50}}\n", i)
	}
	return b.String()
}

// routed is a size with that many routes, which must be a product that it can make.
func routed(routes int) (size, error) {
	for _, z := range []size{{features: 1}, {features: 1, providers: 18}, {features: 11, providers: 38}, {features: 61, providers: 78}} {
		if (1+2*(1+z.features))*(2+z.providers) == routes {
			return z, nil
		}
	}
	return size{}, fmt.Errorf("no policy of %d routes: there are 10, 100, 1000 and 10000", routes)
}

// far is a policy of n prefixes that the destination is not among.
func far(n int) string {
	return head + "providers: {p: {ports: [443], cidrs: [" + scattered(10, n) + "]}}\nfeatures: {f: {class: batch}}\n"
}

// scattered are n addresses of a /8 as prefixes, evenly and in no order, so that a trie
// over them is as deep as it gets.
func scattered(first byte, n int) string {
	var b strings.Builder
	for i := range n {
		x := uint32(i+1) * 10368889 & 0xffffff // odd, so no two are the same
		fmt.Fprintf(&b, "%s%d.%d.%d.%d/32", []string{"", ", "}[min(i, 1)], first, x>>16, x>>8&255, x&255)
	}
	return b.String()
}

func compiled(text string) (*policy.Plan, error) {
	f, err := policy.Parse("bench", []byte(text))
	if err != nil {
		return nil, err
	}
	plan, _, err := policy.Compile(f)
	return plan, err
}

// rules are a packet filter's, which are there during the turns of one configuration.
type rules struct {
	program string // that loads them; the row is left out where there is none
	load    []string
	input   string
	unload  [][]string
}

// nftRules are n rules that each count the connections to the server, as n limits on one
// route would need.
func nftRules(n int) *rules {
	var b strings.Builder
	b.WriteString("table ip bench {\n")
	for i := range n {
		fmt.Fprintf(&b, " set s%d { type ipv4_addr . inet_service; size 65535; flags dynamic; }\n", i)
	}
	b.WriteString(" chain c { type filter hook output priority 0;\n")
	for i := range n {
		fmt.Fprintf(&b, "  tcp dport %d ct state new add @s%d { ip daddr . tcp dport ct count over %d } reject with tcp reset\n", connectPort, i, 500+i)
	}
	b.WriteString(" }\n}\n")
	return &rules{"nft", []string{"nft", "-f", "-"}, b.String(), [][]string{{"nft", "delete", "table", "ip", "bench"}}}
}

// iptablesRules are the same with the connlimit match.
func iptablesRules(n int) *rules {
	var b strings.Builder
	b.WriteString("*filter\n")
	for i := range n {
		fmt.Fprintf(&b, "-A OUTPUT -p tcp --dport %d --syn -m connlimit --connlimit-above %d --connlimit-mask 32 --connlimit-daddr -j REJECT --reject-with tcp-reset\n", connectPort, 500+i)
	}
	b.WriteString("COMMIT\n")
	// Without its chain the table has no hook: an empty one costs, too.
	return &rules{"iptables-nft", []string{"iptables-nft-restore", "--noflush"}, b.String(),
		[][]string{{"iptables-nft", "-F", "OUTPUT"}, {"iptables-nft", "-X", "OUTPUT"}}}
}
