package policy

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// head is lines 1 to 3 of most policies here.
const head = "apiVersion: bulkhead/v1\nkind: Policy\nmode: enforce\n"

// parseErrors are the lines of what Parse says of a policy.
func parseErrors(t *testing.T, text string) []string {
	t.Helper()
	f, err := Parse("p.yaml", []byte(text))
	if err == nil {
		return nil
	}
	if f != nil {
		t.Error("Parse returned a policy and an error")
	}
	var errs Errors
	if !errors.As(err, &errs) {
		t.Fatalf("Parse returned %T, want Errors: %v", err, err)
	}
	var lines []string
	for _, e := range errs {
		lines = append(lines, e.Error())
	}
	return lines
}

func compileText(t *testing.T, text string) (*Plan, Warnings) {
	t.Helper()
	f, err := Parse("p.yaml", []byte(text))
	if err != nil {
		t.Fatalf("Parse:\n%v\nof:\n%s", err, text)
	}
	plan, warnings, err := Compile(f)
	if err != nil {
		t.Fatalf("Compile: %v", err)
	}
	return plan, warnings
}

func wantLines(t *testing.T, got, want []string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("got:\n\t%s\nwant:\n\t%s", strings.Join(got, "\n\t"), strings.Join(want, "\n\t"))
	}
}

func TestErrors(t *testing.T) {
	const none = "providers: {}\nfeatures: {}\n"
	for _, tc := range []struct {
		name, text string
		want       []string
	}{
		// The whole file.
		{"empty", "", []string{"p.yaml:1:1: the file is empty: a policy has apiVersion, kind, mode, providers and features"}},
		{"only comments", "# nothing\n\n", []string{"p.yaml:1:1: the file is empty: a policy has apiVersion, kind, mode, providers and features"}},
		{"only a marker", "---\n", []string{"p.yaml:1:1: the file is empty: a policy has apiVersion, kind, mode, providers and features"}},
		{"a list", "- a\n", []string{"p.yaml:1:1: a policy is a mapping with apiVersion, kind, mode, providers and features; this is a list"}},
		{"a text", "hello\n", []string{"p.yaml:1:1: a policy is a mapping with apiVersion, kind, mode, providers and features; this is a text"}},
		{"cut off after the mode", head, []string{
			"p.yaml:1:1: providers is missing; write providers: {} if there are none",
			"p.yaml:1:1: features is missing; write features: {} if there are none",
		}},
		{"cut off after features", head + "providers: {}\nfeatures:\n", []string{
			"p.yaml:5:10: features: is empty; write a mapping from names to features ({} for none)",
		}},
		{"no head", none, []string{
			"p.yaml:1:1: apiVersion is missing; write apiVersion: bulkhead/v1",
			"p.yaml:1:1: kind is missing; write kind: Policy",
			"p.yaml:1:1: mode is missing; write mode: enforce, or mode: observe to try the policy first",
		}},
		{"another head", "apiversion: bulkhead/v1\nkind: Polcy\nmode: enforced\n" + none, []string{
			`p.yaml:1:1: unknown key "apiversion"; did you mean "apiVersion"?`,
			"p.yaml:1:1: apiVersion is missing; write apiVersion: bulkhead/v1",
			`p.yaml:2:7: kind: "Polcy" is not Policy; did you mean "Policy"?`,
			`p.yaml:3:7: mode: "enforced" is not enforce or observe; did you mean "enforce"?`,
		}},
		{"another version", "apiVersion: bulkhead/v2\nkind: Policy\nmode: observe\n" + none, []string{
			`p.yaml:1:13: apiVersion: "bulkhead/v2" is not bulkhead/v1; did you mean "bulkhead/v1"?`,
		}},
		{"a second document", head + none + "---\n" + head, []string{
			"p.yaml:7:1: a second document: a file holds one policy (put the rest into a file of its own in the same directory)",
		}},
		{"not UTF-8", head + "pro\xffviders: {}\n", []string{"p.yaml:4:4: not UTF-8 text"}},
		{"a zero byte", head + "providers: {}\x00\n", []string{"p.yaml:4:14: not valid YAML: control characters are not allowed"}},
		{"wrong types", head + "providers: [a]\nfeatures: x\nprotect: {}\ntenants: 5\n", []string{
			"p.yaml:4:12: providers: needs a mapping from names to providers ({} for none); this is a list",
			"p.yaml:5:11: features: needs a mapping from names to features ({} for none); this is a text",
			"p.yaml:6:10: protect: needs a list of units and cgroup paths; this is a mapping",
			"p.yaml:7:10: tenants: needs a mapping from names to tenants ({} for none); this is a number",
		}},

		// Syntax.
		{"tab", head + "providers: {}\nfeatures:\n\tchat: {}\n", []string{
			"p.yaml:6:1: not valid YAML: found character that cannot start any token (indent with spaces, not with tabs)",
		}},
		{"indentation", head + "providers: {}\nfeatures:\n  chat:\n    class: batch\n   limits: {connections: 3}\n  d: {}\n", []string{
			"p.yaml:8:4: not valid YAML: did not find expected key",
		}},
		{"a brace not closed", head + "providers: {}\nfeatures:\n  chat: {class: batch\n  d: {}\n", []string{
			"p.yaml:6:17: not valid YAML: did not find expected ',' or '}'",
		}},
		{"a quote not closed", head + "providers: {}\nfeatures:\n  chat: {owner: \"x}\n  d: {}\n", []string{
			"p.yaml:6:17: not valid YAML: found unexpected end of stream",
		}},
		{"a quote not closed behind what is not ASCII", head + "# grün grün\nproviders: {}\nfeatures:\n  chat: {owner: ü, class: \"x}\n", []string{
			"p.yaml:7:27: not valid YAML: found unexpected end of stream",
		}},
		{"the same construct, right before", head + "providers: {a: {cidrs: [10.0.0.0/8]}}\ntenants: {a: [1}\n", []string{
			"p.yaml:5:15: not valid YAML: did not find expected ',' or ']'",
		}},
		{"a star", head + "protect: [*.service]\n" + none, []string{
			"p.yaml:4:11: not valid YAML: did not find expected alphabetic or numeric character (quote text that starts with one of *&!%@`)",
		}},
		{"a percent sign", head + "protect: [%h.service]\n" + none, []string{
			"p.yaml:4:11: not valid YAML: found character that cannot start any token (quote text that starts with one of *&!%@`)",
		}},
		{"not ours", head + "providers: {}\nfeatures:\n  c: {class: &a batch, owner: *a}\n  d: {class: !!str batch}\n  e: {<<: {class: batch}}\n", []string{
			"p.yaml:6:14: anchors (&a) are not part of the language: write the value out where it is needed",
			"p.yaml:6:31: aliases (*a) are not part of the language: write the value out",
			"p.yaml:7:14: tags (!!str) are not part of the language: leave it out",
			`p.yaml:8:7: features.e: unknown key "<<"; there are: owner, class, match, cpu, memory, pids, limits, providers, tenants`,
		}},
		{"keys that are none", head + "? [a]\n: 1\n5: 1\n" + none, []string{
			"p.yaml:4:3: a key is a text; this is a list",
			`p.yaml:6:1: unknown key "5"; there are: apiVersion, kind, mode, exhausted, protect, providers, tenants, features`,
		}},

		// Keys and names.
		{"features twice", head + none + "features: {}\n", []string{
			`p.yaml:6:1: duplicate key "features": it is already at p.yaml:5:1`,
		}},
		{"a feature twice", head + "providers: {}\nfeatures:\n  chat: {class: realtime}\n  chat: {class: batch}\n", []string{
			`p.yaml:7:3: features: duplicate key "chat": it is already at p.yaml:6:3`,
		}},
		{"a provider twice", head + "providers:\n  a: {cidrs: [10.0.0.0/8]}\n  a: {cidrs: [10.0.0.0/8]}\nfeatures: {}\n", []string{
			`p.yaml:6:3: providers: duplicate key "a": it is already at p.yaml:5:3`,
		}},
		{"a limit twice", head + "providers: {}\nfeatures:\n  default: {limits: {connections: 5, connections: 6}}\n", []string{
			`p.yaml:6:38: features.default.limits: duplicate key "connections": it is already at p.yaml:6:22`,
		}},
		{"names", head + "providers: {}\nfeatures:\n  Chat: {class: batch}\n  a-b: {class: batch}\n  " + strings.Repeat("a", 41) + ": {class: batch}\n  \"\": {class: batch}\n", []string{
			`p.yaml:6:3: features: "Chat" is not a name: a name is 1 to 40 of a-z, 0-9 and _`,
			`p.yaml:7:3: features: "a-b" is not a name: a name is 1 to 40 of a-z, 0-9 and _`,
			`p.yaml:8:3: features: "` + strings.Repeat("a", 41) + `" is not a name: a name is 1 to 40 of a-z, 0-9 and _`,
			`p.yaml:9:3: features: "" is not a name: a name is 1 to 40 of a-z, 0-9 and _`,
		}},
		{"references", head + "providers:\n  deepseek: {cidrs: [10.0.0.0/8]}\ntenants:\n  free: {providers: {depseek: {connections: 2}}}\nfeatures:\n" +
			"  c: {class: batch, match: [{unit: c.service, tenant: fre}], providers: {qwen: {connections: 3}}}\n" +
			"  d: {class: batch, tenants: {paid: {providers: {deepsek: {connections: 2}}}}}\n" +
			"  default: {providers: {x: {connections: 2}}}\n", []string{
			`p.yaml:7:22: tenants.free.providers: there is no provider "depseek"; did you mean "deepseek"?`,
			`p.yaml:9:55: features.c.match: there is no tenant "fre"; did you mean "free"?`,
			`p.yaml:9:74: features.c.providers: there is no provider "qwen"; there are: deepseek`,
			`p.yaml:10:31: features.d.tenants: there is no tenant "paid"; there are: free`,
			`p.yaml:10:50: features.d.tenants.paid.providers: there is no provider "deepsek"; did you mean "deepseek"?`,
			`p.yaml:11:25: features.default.providers: there is no provider "x"; there are: deepseek`,
		}},
		{"references to what is wrong itself are not told again", head + "providers:\n  Deepseek: {cidrs: [10.0.0.0/8]}\n  b: {cidrs: [10.0.0.0/8], limits: {connections: x}}\nfeatures:\n" +
			"  c: {class: batch, providers: {Deepseek: {connections: 3}, b: {connections: 50%}}}\n", []string{
			`p.yaml:5:3: providers: "Deepseek" is not a name: a name is 1 to 40 of a-z, 0-9 and _`,
			`p.yaml:6:50: providers.b.limits.connections: "x" is not a plain number from 0 to 1000000, or unlimited`,
			`p.yaml:8:33: features.c.providers: "Deepseek" is not a name: a name is 1 to 40 of a-z, 0-9 and _`,
		}},
		{"references to what could not be read", head + "providers: 5\nfeatures:\n  c: {class: batch, providers: {a: {connections: 3}}}\n", []string{
			"p.yaml:4:12: providers: needs a mapping from names to providers ({} for none); this is a number",
		}},
		{"a value for the terminal", head + "providers: {}\nfeatures:\n  c: {class: \"\\e[31mred" + strings.Repeat("x", 200) + "\"}\n", []string{
			`p.yaml:6:14: features.c.class: "\x1b[31mred` + strings.Repeat("x", 72) + `..." is not realtime, timely, batch or background`,
		}},

		// Providers.
		{"prefixes", head + "providers:\n  a:\n    cidrs:\n    - 10.0.0.5\n    - 10.0.0.5/8\n    - fe80::1%eth0/64\n    - 10.0.0.0/7\n    - \"fe80::/10\"\n    - 1.2.3\n" +
			"    - \"::1\"\n    - 010.0.0.0/8\n    - 10/8\n    - 10.0.0.0/33\n    - 10.0.0.0/08\n    - \"\"\n    - 5\n    - \"::ffff:10.0.0.1/104\"\n    - \"::ffff:10.0.0.1\"\n    - \" 10.0.0.0/8\"\nfeatures: {}\n", []string{
			`p.yaml:7:7: providers.a.cidrs[0]: "10.0.0.5" has no length; write "10.0.0.5/32"`,
			`p.yaml:8:7: providers.a.cidrs[1]: "10.0.0.5/8" has bits beyond its length; write "10.0.0.0/8" or "10.0.0.5/32"`,
			`p.yaml:9:7: providers.a.cidrs[2]: "fe80::1%eth0/64" has a zone; leave it out: addresses match in every zone`,
			`p.yaml:10:7: providers.a.cidrs[3]: "10.0.0.0/7" is wider than /8; write wide: true at the provider if it is meant`,
			`p.yaml:11:7: providers.a.cidrs[4]: "fe80::/10" is wider than /16; write wide: true at the provider if it is meant`,
			`p.yaml:12:7: providers.a.cidrs[5]: "1.2.3" is not a prefix such as 10.0.0.0/24 or "fd00:20::/64"`,
			`p.yaml:13:7: providers.a.cidrs[6]: "::1" has no length; write "::1/128"`,
			`p.yaml:14:7: providers.a.cidrs[7]: "010.0.0.0/8" is not a prefix such as 10.0.0.0/24 or "fd00:20::/64"`,
			`p.yaml:15:7: providers.a.cidrs[8]: "10/8" is not a prefix such as 10.0.0.0/24 or "fd00:20::/64"`,
			`p.yaml:16:7: providers.a.cidrs[9]: "10.0.0.0/33" is not a prefix such as 10.0.0.0/24 or "fd00:20::/64"`,
			`p.yaml:17:7: providers.a.cidrs[10]: "10.0.0.0/08" is not a prefix such as 10.0.0.0/24 or "fd00:20::/64"`,
			`p.yaml:18:7: providers.a.cidrs[11]: is empty; write a prefix such as 10.0.0.0/24`,
			`p.yaml:19:7: providers.a.cidrs[12]: needs a prefix such as 10.0.0.0/24; 5 is a number (quote it if it is meant as text)`,
			`p.yaml:20:7: providers.a.cidrs[13]: "::ffff:10.0.0.1/104" has bits beyond its length; write "10.0.0.0/8" or "10.0.0.1/32"`,
			`p.yaml:21:7: providers.a.cidrs[14]: "::ffff:10.0.0.1" has no length; write "10.0.0.1/32"`,
			`p.yaml:22:7: providers.a.cidrs[15]: " 10.0.0.0/8" is not a prefix such as 10.0.0.0/24 or "fd00:20::/64"`,
		}},
		{"hosts", head + "providers:\n  a:\n    hosts:\n    - \"*.x.test\"\n    - 10.0.0.1\n    - https://x\n    - x:443\n    - a..b\n    - 1.2.3\n    - 10.0.0.0/8\n    - " +
			strings.Repeat("a", 64) + ".test\n    - -a.test\nfeatures: {}\n", []string{
			`p.yaml:7:7: providers.a.hosts[0]: "*.x.test" is a wildcard, which cannot be looked up; name each host`,
			`p.yaml:8:7: providers.a.hosts[1]: "10.0.0.1" is an address; write it under cidrs as "10.0.0.1/32"`,
			`p.yaml:9:7: providers.a.hosts[2]: "https://x" is not a host name; write the name alone, and a port under ports`,
			`p.yaml:10:7: providers.a.hosts[3]: "x:443" is not a host name; write the name alone, and a port under ports`,
			`p.yaml:11:7: providers.a.hosts[4]: "a..b" is not a host name`,
			`p.yaml:12:7: providers.a.hosts[5]: "1.2.3" is not a host name`,
			`p.yaml:13:7: providers.a.hosts[6]: "10.0.0.0/8" is a prefix; write it under cidrs`,
			`p.yaml:14:7: providers.a.hosts[7]: "` + strings.Repeat("a", 64) + `.test" is not a host name`,
			`p.yaml:15:7: providers.a.hosts[8]: "-a.test" is not a host name`,
		}},
		{"ports", head + "providers:\n  a:\n    cidrs: [10.0.0.0/8]\n    ports: [0, 65536, 010, \"8010-8000\", 1e3, \"80,81\", http, ~, 80.5, -1, \"0-80\", 1-, [80]]\nfeatures: {}\n", []string{
			`p.yaml:7:13: providers.a.ports[0]: "0" is not a port from 1 to 65535 or a range such as "8000-8010"`,
			`p.yaml:7:16: providers.a.ports[1]: "65536" is out of range; write a port from 1 to 65535 or a range such as "8000-8010"`,
			`p.yaml:7:23: providers.a.ports[2]: "010" is not a port from 1 to 65535 or a range such as "8000-8010"`,
			`p.yaml:7:28: providers.a.ports[3]: "8010-8000" runs backwards; write "8000-8010"`,
			`p.yaml:7:41: providers.a.ports[4]: "1e3" is not a port from 1 to 65535 or a range such as "8000-8010"`,
			`p.yaml:7:46: providers.a.ports[5]: "80,81" is not a port from 1 to 65535 or a range such as "8000-8010"`,
			`p.yaml:7:55: providers.a.ports[6]: "http" is not a port from 1 to 65535 or a range such as "8000-8010"`,
			`p.yaml:7:61: providers.a.ports[7]: is empty; write a port from 1 to 65535 or a range such as "8000-8010"`,
			`p.yaml:7:64: providers.a.ports[8]: "80.5" is not a port from 1 to 65535 or a range such as "8000-8010"`,
			`p.yaml:7:70: providers.a.ports[9]: "-1" is not a port from 1 to 65535 or a range such as "8000-8010"`,
			`p.yaml:7:74: providers.a.ports[10]: "0-80" is not a port from 1 to 65535 or a range such as "8000-8010"`,
			`p.yaml:7:82: providers.a.ports[11]: "1-" is not a port from 1 to 65535 or a range such as "8000-8010"`,
			`p.yaml:7:86: providers.a.ports[12]: needs a port from 1 to 65535 or a range such as "8000-8010"; this is a list`,
		}},
		{"providers", head + "providers:\n  a: {cidrs: [], ports: 443, protocol: icmp, wide: yes}\n  b: {}\n  c:\n  d: {ports: [1]}\n" +
			"  e: {cidrs: [10.0.0.0/8], ports: [], protocol: []}\n  f: {cidrs: [10.0.0.0/8], protocol: [tcp, sctp], wide: \"true\"}\n" +
			"  g: {cidr: [10.0.0.0/8]}\nfeatures: {}\n", []string{
			"p.yaml:5:14: providers.a.cidrs: is an empty list; write a list of prefixes such as 10.0.0.0/24",
			"p.yaml:5:25: providers.a.ports: needs a list of ports (leave ports out for all); this is a number",
			`p.yaml:5:40: providers.a.protocol: "icmp" is not tcp or udp`,
			"p.yaml:5:52: providers.a.wide: needs true or false; this is a text",
			"p.yaml:6:3: providers.b: needs hosts or cidrs: it would match nothing",
			"p.yaml:7:5: providers.c: is empty; write a mapping with hosts or cidrs, and ports, protocol, limits",
			"p.yaml:8:3: providers.d: needs hosts or cidrs: it would match nothing",
			"p.yaml:9:35: providers.e.ports: is an empty list; write a list of ports (leave ports out for all)",
			"p.yaml:9:49: providers.e.protocol: is an empty list; write tcp, udp or [tcp, udp]",
			`p.yaml:10:44: providers.f.protocol[1]: "sctp" is not tcp or udp`,
			"p.yaml:10:57: providers.f.wide: needs true or false; this is a text",
			`p.yaml:11:7: providers.g: unknown key "cidr"; did you mean "cidrs"?`,
		}},
		{"exhausted", head + none + "exhausted: refused\n", []string{
			`p.yaml:6:12: exhausted: "refused" is not allow or refuse; did you mean "refuse"?`,
		}},
		{"exhausted, empty", head + none + "exhausted:\n", []string{"p.yaml:6:11: exhausted: is empty; write allow or refuse"}},
		{"exhausted, a yes", head + none + "exhausted: true\n", []string{
			"p.yaml:6:12: exhausted: needs allow or refuse; true is a yes or no (quote it if it is meant as text)",
		}},
		{"exhausted, elsewhere", head + "providers: {p: {cidrs: [10.0.0.0/8], exhausted: refuse}}\nfeatures: {}\n", []string{
			`p.yaml:4:38: providers.p: unknown key "exhausted"; there are: hosts, cidrs, ports, protocol, idle, wide, limits`,
		}},
		{"idle without udp", head + "providers:\n" +
			"  a: {cidrs: [10.0.0.0/8], idle: 2m}\n" +
			"  b: {cidrs: [10.0.0.0/8], idle: 600, protocol: tcp}\n" +
			"  c: {cidrs: [10.0.0.0/8], idle: 2m, protocol: [tcp]}\n" +
			"  d: {cidrs: [10.0.0.0/8], idle: 2m, protocol: upd}\n" + // one error is enough
			"  other: {idle: 2m}\nfeatures: {}\n", []string{
			"p.yaml:5:34: providers.a: idle without udp: it ends the slots of UDP sockets, and a TCP connection's slot ends with the connection; write protocol: udp or [tcp, udp], or leave idle out",
			`p.yaml:6:34: providers.b.idle: "600" is missing its unit; write a time from 1s to 24h in whole seconds, such as 30s, 2m or 1h30m`,
			"p.yaml:6:34: providers.b: idle without udp: it ends the slots of UDP sockets, and a TCP connection's slot ends with the connection; write protocol: udp or [tcp, udp], or leave idle out",
			"p.yaml:7:34: providers.c: idle without udp: it ends the slots of UDP sockets, and a TCP connection's slot ends with the connection; write protocol: udp or [tcp, udp], or leave idle out",
			`p.yaml:8:48: providers.d.protocol: "upd" is not tcp or udp; did you mean "udp"?`,
			"p.yaml:9:11: providers.other: other cannot have idle: it is every destination that no provider has; it may only have limits",
		}},
		{"idle twice", head + "providers: {a: {cidrs: [10.0.0.0/8], protocol: udp, idle: 2m, idle: 3m}}\nfeatures: {}\n", []string{
			`p.yaml:4:63: providers.a: duplicate key "idle": it is already at p.yaml:4:53`,
		}},
		{"other", head + "providers:\n  other: {cidrs: [10.0.0.0/8], limits: {}, x: 1}\nfeatures: {}\n", []string{
			"p.yaml:5:11: providers.other: other cannot have cidrs: it is every destination that no provider has; it may only have limits",
			"p.yaml:5:40: providers.other.limits: connections is missing; an absent limit is no block at all, or connections: unlimited",
			`p.yaml:5:44: providers.other: unknown key "x"; there are: hosts, cidrs, ports, protocol, idle, wide, limits`,
		}},

		// Limits.
		{"limit blocks", head + "providers: {}\nfeatures:\n" +
			"  a: {class: batch, limits: {errno: EAGAIN}}\n" +
			"  b: {class: batch, limits: {connections: unlimited, errno: EAGAIN}}\n" +
			"  c: {class: batch, limits: {connections: 3, errno: EGAIN}}\n" +
			"  d: {class: batch, limits: 5}\n" +
			"  e: {class: batch, limits: {connection: 5}}\n" +
			"  f: {class: batch, limits: {}}\n" +
			"  g: {class: batch, limits: }\n", []string{
			"p.yaml:6:37: features.a.limits: errno without connections: there is no limit that could refuse with it",
			"p.yaml:7:61: features.b.limits: errno with connections: unlimited: nothing is refused with it",
			`p.yaml:8:53: features.c.limits.errno: "EGAIN" is not EPERM, EAGAIN, EACCES, EBUSY, EUSERS, EADDRNOTAVAIL, ENETDOWN, ENETUNREACH, ENOBUFS, ETIMEDOUT, ECONNREFUSED, EHOSTDOWN, EHOSTUNREACH or EDQUOT; did you mean "EAGAIN"?`,
			"p.yaml:9:29: features.d.limits: needs a limit block such as {connections: 20}; this is a number",
			`p.yaml:10:30: features.e.limits: unknown key "connection"; did you mean "connections"?`,
			"p.yaml:11:29: features.f.limits: connections is missing; an absent limit is no block at all, or connections: unlimited",
			"p.yaml:12:29: features.g.limits: is empty; write a limit block such as {connections: 20}",
		}},
		{"shares", head + "providers:\n  a: {cidrs: [10.0.0.0/8], limits: {connections: 10}}\n  b: {cidrs: [10.0.0.0/8]}\n" +
			"  c: {cidrs: [10.0.0.0/8], limits: {connections: 50%}}\nfeatures:\n" +
			"  c: {class: batch, providers: {a: {connections: 9%}, b: {connections: 50%}, other: {connections: 50%}}}\n" +
			"  d: {class: batch, limits: {connections: \"50%\"}, providers: {a: {connections: 101%}, b: {connections: 0%}, other: {connections: 5.5%}}}\n", []string{
			`p.yaml:7:50: providers.c.limits.connections: "50%": a share is one of a provider's limit, so it may stand only under providers of a tenant or feature; write a plain number from 0 to 1000000, or unlimited`,
			"p.yaml:9:50: features.c.providers.a: 9% of 10 connections is none; write connections: 0 if that is meant, or a larger share",
			"p.yaml:9:72: features.c.providers.b: 50% of a provider without a limit; write a number, or give b limits",
			"p.yaml:9:99: features.c.providers.other: 50% of a provider without a limit; write a number, or give other limits",
			`p.yaml:10:43: features.d.limits.connections: "50%": a share is one of a provider's limit, so it may stand only under providers of a tenant or feature; write a plain number from 0 to 1000000, or unlimited`,
			`p.yaml:10:80: features.d.providers.a.connections: "101%" is out of range; write a plain number from 0 to 1000000, a share of the provider's limit from 1% to 100%, or unlimited`,
			`p.yaml:10:104: features.d.providers.b.connections: "0%" is not a plain number from 0 to 1000000, a share of the provider's limit from 1% to 100%, or unlimited`,
			`p.yaml:10:130: features.d.providers.other.connections: "5.5%" is not a plain number from 0 to 1000000, a share of the provider's limit from 1% to 100%, or unlimited`,
		}},

		// Features.
		{"default", head + "providers: {}\nfeatures:\n  default: {match: [], cpu: none, owner: x}\n", []string{
			"p.yaml:6:13: features.default: default cannot have match: it is everything that no feature matches, sshd, the kubelet and the database too; it may have limits, providers and owner",
			"p.yaml:6:24: features.default: default cannot have cpu: it is everything that no feature matches, sshd, the kubelet and the database too; it may have limits, providers and owner",
		}},
		{"default, the rest", head + "providers: {}\nfeatures:\n  default: {memory: {}, tenants: {}, class: batch}\n", []string{
			"p.yaml:6:13: features.default: default cannot have memory: it is everything that no feature matches, sshd, the kubelet and the database too; it may have limits, providers and owner",
			"p.yaml:6:25: features.default: default cannot have tenants: it is everything that no feature matches, sshd, the kubelet and the database too; it may have limits, providers and owner",
			"p.yaml:6:38: features.default: default cannot have class: it is everything that no feature matches, sshd, the kubelet and the database too; it may have limits, providers and owner",
		}},
		{"class and owner", head + "providers: {}\nfeatures:\n  a: {class: real-time, owner: 5}\n  b: {class: , owner: ''}\n  c:\n", []string{
			`p.yaml:6:14: features.a.class: "real-time" is not realtime, timely, batch or background; did you mean "realtime"?`,
			"p.yaml:6:32: features.a.owner: needs a text, such as a team's name; 5 is a number (quote it if it is meant as text)",
			"p.yaml:7:14: features.b.class: is empty; write realtime, timely, batch or background",
			"p.yaml:7:23: features.b.owner: is empty; write a text, such as a team's name",
			"p.yaml:8:5: features.c: is empty; write a mapping ({} if there is nothing to say)",
		}},
		{"cpu", head + "providers: {}\nfeatures:\n" +
			"  a: {class: batch, cpu: {weight: 0}}\n" +
			"  b: {class: batch, cpu: {weight: 5, idle: true}}\n" +
			"  c: {cpu: {idle: false}}\n" +
			"  d: {class: batch, cpu: {max: 150}}\n" +
			"  e: {class: batch, cpu: {max: 0%}}\n" +
			"  f: {class: batch, cpu: {max: 1.5%}}\n" +
			"  g: {class: batch, cpu: {period: 100ms}}\n" +
			"  h: {class: batch, cpu: {max: 5%, period: 10ms}}\n" +
			"  i: {class: batch, cpu: {max: 5%, period: 100}}\n" +
			"  j: {class: batch, cpu: {max: 5%, period: 2s}}\n" +
			"  k: {class: batch, cpu: {max: 5%, period: -5s}}\n" +
			"  l: {class: batch, cpu: nono}\n" +
			"  m: {class: batch, cpu: {per: host}}\n" +
			"  n: {class: batch, cpu: 5}\n" +
			"  o: {class: batch, cpu: {max: 900000%}}\n" +
			"  p: {class: batch, cpu: {weight: 10001}}\n" +
			"  q: {class: batch, cpu: {max: 5%, period: \"600\"}}\n" +
			"  r: {class: batch, cpu: {max: 5%, period: 1h30}}\n" +
			"  s: {class: batch, cpu: {max: 5%, period: 0ms}}\n" +
			"  t: {class: batch, cpu: {burst: 5ms}}\n" +
			"  u: {class: batch, cpu: {max: 5%, burst: 6ms}}\n" +
			"  v: {class: batch, cpu: {max: max, burst: 6ms}}\n" +
			"  w: {class: batch, cpu: {max: 5%, burst: 5}}\n" +
			"  x: {class: batch, cpu: {max: 5%, burst: 0s}}\n", []string{
			"p.yaml:6:35: features.a.cpu.weight: 0 is out of range; write a plain number from 1 to 10000",
			"p.yaml:7:44: features.b.cpu: idle: true and a weight exclude each other: an idle cgroup has no weight",
			"p.yaml:8:19: features.c.cpu: idle: false needs a weight: class background has none but idle",
			`p.yaml:9:32: features.d.cpu.max: "150" is missing its unit; write a share of one CPU from 1% to 819200% (150% is one and a half CPUs), or max`,
			`p.yaml:10:32: features.e.cpu.max: "0%" is not a share of one CPU from 1% to 819200% (150% is one and a half CPUs), or max`,
			`p.yaml:11:32: features.f.cpu.max: "1.5%" is not a share of one CPU from 1% to 819200% (150% is one and a half CPUs), or max`,
			"p.yaml:12:35: features.g.cpu: period without a max: there is no quota that it could be the period of",
			"p.yaml:13:44: features.h.cpu: max of 5% in this period is 500 us; the kernel's smallest quota is 1000 us, so write a longer period",
			`p.yaml:14:44: features.i.cpu.period: "100" is missing its unit; write a time from 1ms to 1s, such as 100ms`,
			`p.yaml:15:44: features.j.cpu.period: "2s" is out of range; write a time from 1ms to 1s, such as 100ms`,
			`p.yaml:16:44: features.k.cpu.period: "-5s" is out of range; write a time from 1ms to 1s, such as 100ms`,
			`p.yaml:17:26: features.l.cpu: "nono" is not none, or a mapping with weight, idle, max, period, burst, cpus, exclusive, uclamp_min, uclamp_max`,
			`p.yaml:18:32: features.m.cpu.per: "host" is not cgroup, which is all there is: a limit applies to each cgroup of a compartment`,
			"p.yaml:19:26: features.n.cpu: needs none, or a mapping with weight, idle, max, period, burst, cpus, exclusive, uclamp_min, uclamp_max; 5 is a number (quote it if it is meant as text)",
			`p.yaml:20:32: features.o.cpu.max: "900000%" is out of range; write a share of one CPU from 1% to 819200% (150% is one and a half CPUs), or max`,
			"p.yaml:21:35: features.p.cpu.weight: 10001 is out of range; write a plain number from 1 to 10000",
			`p.yaml:22:44: features.q.cpu.period: "600" is missing its unit; write a time from 1ms to 1s, such as 100ms`,
			`p.yaml:23:44: features.r.cpu.period: "1h30" is missing its unit; write a time from 1ms to 1s, such as 100ms`,
			`p.yaml:24:44: features.s.cpu.period: "0ms" is out of range; write a time from 1ms to 1s, such as 100ms`,
			"p.yaml:25:34: features.t.cpu: burst without a max: there is no quota that could be left over",
			"p.yaml:26:43: features.u.cpu: burst of 6000 us is above the quota, 5000 us a period, and the kernel takes none that is; write at most that",
			"p.yaml:27:44: features.v.cpu: burst without a max: there is no quota that could be left over",
			`p.yaml:28:43: features.w.cpu.burst: "5" is missing its unit; write a time from 1ms up to the quota of a period, such as 50ms`,
			`p.yaml:29:43: features.x.cpu.burst: "0s" is out of range; write a time from 1ms up to the quota of a period, such as 50ms`,
		}},
		{"cpus", head + "providers: {}\nfeatures:\n" +
			"  a: {class: batch, cpu: {cpus: 3-1}}\n" +
			"  b: {class: batch, cpu: {cpus: \"0-3, 6\"}}\n" +
			"  c: {class: batch, cpu: {cpus: 8192}}\n" +
			"  d: {class: batch, cpu: {cpus: 010}}\n" +
			"  e: {class: batch, cpu: {cpus: [0, 1]}}\n" +
			"  f: {class: batch, cpu: {cpus: \"\"}}\n" +
			"  g: {class: batch, cpu: {cpus: not}}\n" +
			"  h: {class: batch, cpu: {exclusive: true}}\n" +
			"  i: {class: batch, cpu: {cpus: not 0, exclusive: true}}\n" +
			"  j: {class: batch, cpu: {cpus: \"4-6,5\", exclusive: true}}\n" +
			"  k: {class: batch, cpu: {cpus: \"0-4,6\"}}\n" +
			"  l: {class: batch, cpu: {cpus: 6, exclusive: true}}\n" +
			"  m: {class: batch, cpu: {cpus: not 5}}\n" +
			"  n: {class: batch, cpu: {cpus: bad, exclusive: true}}\n", []string{
			`p.yaml:6:33: features.a.cpu.cpus: "3-1" runs backwards; write "1-3"`,
			`p.yaml:7:33: features.b.cpu.cpus: "0-3, 6" is not a list of CPUs such as "0-3,6", or "not 0" for all but those`,
			`p.yaml:8:33: features.c.cpu.cpus: "8192" is out of range; write numbers from 0 to 8191`,
			`p.yaml:9:33: features.d.cpu.cpus: "010" is not a list of CPUs such as "0-3,6", or "not 0" for all but those`,
			`p.yaml:10:33: features.e.cpu.cpus: needs a list of CPUs such as "0-3,6", or "not 0" for all but those; this is a list`,
			`p.yaml:11:33: features.f.cpu.cpus: "" is not a list of CPUs such as "0-3,6", or "not 0" for all but those`,
			`p.yaml:12:33: features.g.cpu.cpus: "not" is not a list of CPUs such as "0-3,6", or "not 0" for all but those`,
			"p.yaml:13:38: features.h.cpu: exclusive without cpus: name the CPUs that are this feature's own",
			`p.yaml:14:51: features.i.cpu: exclusive with "not 0": name the CPUs that are this feature's own, so that others keep the rest of any node`,
			"p.yaml:16:33: features.k.cpu.cpus: 4,6 is feature j's own (exclusive, at p.yaml:15:33); leave it out here, or there",
			"p.yaml:16:33: features.k.cpu.cpus: 6 is feature l's own (exclusive, at p.yaml:17:33); leave it out here, or there",
			"p.yaml:17:33: features.l.cpu.cpus: 6 is feature j's own (exclusive, at p.yaml:15:33); leave it out here, or there",
			`p.yaml:19:33: features.n.cpu.cpus: "bad" is not a list of CPUs such as "0-3,6", or "not 0" for all but those`,
		}},
		{"uclamp", head + "providers: {}\nfeatures:\n" +
			"  a: {class: batch, cpu: {uclamp_min: 50}}\n" +
			"  b: {class: batch, cpu: {uclamp_max: 0%}}\n" +
			"  c: {class: batch, cpu: {uclamp_max: 101%}}\n" +
			"  d: {class: batch, cpu: {uclamp_min: 50%, uclamp_max: 49%}}\n", []string{
			`p.yaml:6:39: features.a.cpu.uclamp_min: "50" is missing its unit; write a share of the largest CPU at its highest frequency from 1% to 100%`,
			`p.yaml:7:39: features.b.cpu.uclamp_max: "0%" is not a share of the largest CPU at its highest frequency from 1% to 100%`,
			`p.yaml:8:39: features.c.cpu.uclamp_max: "101%" is out of range; write a share of the largest CPU at its highest frequency from 1% to 100%`,
			"p.yaml:9:39: features.d.cpu: uclamp_min is above uclamp_max, which holds: write at most 49%",
		}},
		{"memory", head + "providers: {}\nfeatures:\n" +
			"  a: {class: batch, memory: {high: 2Gi, max: 1Gi}}\n" +
			"  b: {class: batch, memory: {high: 2147483648}}\n" +
			"  c: {class: batch, memory: {high: 2G}}\n" +
			"  d: {class: batch, memory: {high: 1.5Gi}}\n" +
			"  e: {class: batch, memory: {max: 1Ki}}\n" +
			"  f: {class: batch, memory: {max: 9999999999999999Ti}}\n" +
			"  g: {class: batch, memory: 2Gi}\n" +
			"  h: {class: batch, memory: {max: 0}}\n" +
			"  i: {class: batch, memory: {max: 1025Ti}}\n" +
			"  j: {class: batch, pids: {max: 0}}\n" +
			"  k: {class: batch, pids: {max: 4194305}}\n" +
			"  l: {class: batch, pids: 12}\n", []string{
			"p.yaml:6:29: features.a.memory: high is above max: processes would be killed at max before high slows them down",
			`p.yaml:7:36: features.b.memory.high: "2147483648" is missing its unit; write a size such as 512Mi or 2Gi (Ki, Mi, Gi, Ti), or max`,
			`p.yaml:8:36: features.c.memory.high: "2G" is not a size such as 512Mi or 2Gi (Ki, Mi, Gi, Ti), or max`,
			`p.yaml:9:36: features.d.memory.high: "1.5Gi" is not a size such as 512Mi or 2Gi (Ki, Mi, Gi, Ti), or max`,
			`p.yaml:10:35: features.e.memory.max: "1Ki" is out of range; write a size from 1Mi to 1024Ti, or max`,
			`p.yaml:11:35: features.f.memory.max: "9999999999999999Ti" is out of range; write a size from 1Mi to 1024Ti, or max`,
			"p.yaml:12:29: features.g.memory: needs a mapping with high and max; this is a text",
			`p.yaml:13:35: features.h.memory.max: "0" is missing its unit; write a size such as 512Mi or 2Gi (Ki, Mi, Gi, Ti), or max`,
			`p.yaml:14:35: features.i.memory.max: "1025Ti" is out of range; write a size from 1Mi to 1024Ti, or max`,
			"p.yaml:15:33: features.j.pids.max: 0 is out of range; write a plain number of processes and threads from 1 to 4194304, or max",
			"p.yaml:16:33: features.k.pids.max: 4194305 is out of range; write a plain number of processes and threads from 1 to 4194304, or max",
			"p.yaml:17:27: features.l.pids: needs a mapping with max; this is a number",
		}},
		{"match", head + "tenants: {free: {}}\nproviders: {}\nfeatures:\n  a:\n    class: batch\n    match:\n" +
			"    - {unit: chat, cgroup: x, exe: python, cmdline: \"(\", user: a b, container: {}}\n" +
			"    - {container: {nme: x, label: x}}\n" +
			"    - {cmdline: 5}\n" +
			"    - {user: 010}\n" +
			"    - {user: 4294967295}\n" +
			"    - {unt: x.service}\n" +
			"    - {tenant: free}\n" +
			"    - {}\n" +
			"    - {unit: \"[.service\", exe: \"/usr/{a\", cgroup: \"/a[\"}\n" +
			"    - {cgroup: /}\n" +
			"    - {cgroup: /a/}\n" +
			"    - {unit: a/b.service}\n" +
			"    - chat.service\n" +
			"    - {container: {name: x}, user: root}\n" +
			"    - {container: {name: x}, exe: /bin/x}\n" +
			"    - {container: {name: x}, cmdline: x}\n" +
			"    - {container: {name: \"[\", image: \"{a\"}}\n", []string{
			`p.yaml:10:14: features.a.match[0].unit: "chat" has no unit type; write "chat.service"`,
			`p.yaml:10:28: features.a.match[0].cgroup: "x" does not start with /; write the path below the cgroup root, as in /proc/PID/cgroup`,
			`p.yaml:10:36: features.a.match[0].exe: "python" is compared with the full path and would match nothing; write "**/python"`,
			"p.yaml:10:53: features.a.match[0].cmdline: \"(\" is not a regular expression (RE2): missing closing ): `(`",
			`p.yaml:10:64: features.a.match[0].user: "a b" is not a user's name or number`,
			"p.yaml:10:80: features.a.match[0].container: is empty; write one of name, image, label, compose_service",
			`p.yaml:11:20: features.a.match[1].container: unknown key "nme"; did you mean "name"?`,
			`p.yaml:11:35: features.a.match[1].container.label: "x" has no =; write "key=value", or "x=*" for any value`,
			"p.yaml:12:17: features.a.match[2].cmdline: needs a regular expression; 5 is a number (quote it if it is meant as text)",
			`p.yaml:13:14: features.a.match[3].user: "010" is not a user's name or plain number from 0 to 4294967294 (digits only: no sign, fraction, exponent, unit or leading zero)`,
			"p.yaml:14:14: features.a.match[4].user: 4294967295 is out of range; write a user's name or plain number from 0 to 4294967294",
			`p.yaml:15:8: features.a.match[5]: unknown key "unt"; did you mean "unit"?`,
			"p.yaml:16:7: features.a.match[6]: needs at least one of unit, cgroup, exe, cmdline, user, container: it would match everything",
			"p.yaml:17:7: features.a.match[7]: needs at least one of unit, cgroup, exe, cmdline, user, container: it would match everything",
			`p.yaml:18:14: features.a.match[8].unit: "[.service" is not a glob: a bracket, a brace or a backslash is not closed`,
			`p.yaml:18:32: features.a.match[8].exe: "/usr/{a" is not a glob: a bracket, a brace or a backslash is not closed`,
			`p.yaml:18:51: features.a.match[8].cgroup: "/a[" is not a glob: a bracket, a brace or a backslash is not closed`,
			`p.yaml:19:16: features.a.match[9].cgroup: "/" is the whole machine; processes in the root cgroup are never refused`,
			`p.yaml:20:16: features.a.match[10].cgroup: "/a/" is not clean; write "/a"`,
			`p.yaml:21:14: features.a.match[11].unit: "a/b.service" is not a unit: a unit has neither / nor spaces`,
			"p.yaml:22:7: features.a.match[12]: needs a mapping such as {unit: chat.service}; this is a text",
			"p.yaml:23:7: features.a.match[13]: container goes with unit, cgroup and tenant, not with exe, cmdline or user: a container is adopted as a whole, and no process is moved out of one",
			"p.yaml:24:7: features.a.match[14]: container goes with unit, cgroup and tenant, not with exe, cmdline or user: a container is adopted as a whole, and no process is moved out of one",
			"p.yaml:25:7: features.a.match[15]: container goes with unit, cgroup and tenant, not with exe, cmdline or user: a container is adopted as a whole, and no process is moved out of one",
			`p.yaml:26:26: features.a.match[16].container.name: "[" is not a glob: a bracket, a brace or a backslash is not closed`,
			`p.yaml:26:38: features.a.match[16].container.image: "{a" is not a glob: a bracket, a brace or a backslash is not closed`,
		}},
		{"protect", head + "protect: [ssh, /a/../b, a/b, /, \"/x*\", /sys/fs/cgroup/x, \"[.service\", 5, ~]\n" + none, []string{
			`p.yaml:4:11: protect[0]: "ssh" has no unit type; write "ssh.service"`,
			`p.yaml:4:16: protect[1]: "/a/../b" is not clean; write "/b"`,
			`p.yaml:4:25: protect[2]: "a/b" is not a unit: a unit has neither / nor spaces`,
			`p.yaml:4:30: protect[3]: "/" is the whole machine; processes in the root cgroup are never refused`,
			`p.yaml:4:33: protect[4]: "/x*" has a wildcard; a protected cgroup is one path (and everything below it)`,
			`p.yaml:4:40: protect[5]: "/sys/fs/cgroup/x" has the mount point in it; write the path below the cgroup root, as in /proc/PID/cgroup`,
			`p.yaml:4:58: protect[6]: "[.service" is not a glob: a bracket, a brace or a backslash is not closed`,
			`p.yaml:4:71: protect[7]: needs a unit (a glob) or a cgroup path that starts with /; 5 is a number (quote it if it is meant as text)`,
			`p.yaml:4:74: protect[8]: is empty; write a unit (a glob) or a cgroup path that starts with /`,
		}},
	} {
		t.Run(tc.name, func(t *testing.T) { wantLines(t, parseErrors(t, tc.text), tc.want) })
	}
}

// A number is what everybody reads, or an error: YAML would make 8 of 010 and 0
// of nothing. In every place where a number may stand.
func TestNumbersArePlain(t *testing.T) {
	places := []string{
		"providers: {a: {cidrs: [10.0.0.0/8], limits: {connections: %s}}}\nfeatures: {}\n",
		"providers: {other: {limits: {connections: %s}}}\nfeatures: {}\n",
		"tenants: {t: {limits: {connections: %s}}}\nproviders: {}\nfeatures: {}\n",
		"tenants: {t: {providers: {other: {connections: %s}}}}\nproviders: {}\nfeatures: {}\n",
		"providers: {}\nfeatures: {f: {limits: {connections: %s}}}\n",
		"providers: {}\nfeatures: {f: {providers: {other: {connections: %s}}}}\n",
		"providers: {}\ntenants: {t: {}}\nfeatures: {f: {tenants: {t: {limits: {connections: %s}}}}}\n",
		"providers: {}\ntenants: {t: {}}\nfeatures: {f: {tenants: {t: {providers: {other: {connections: %s}}}}}}\n",
		"providers: {}\nfeatures: {default: {limits: {connections: %s}}}\n",
	}
	bad := []string{"010", "0o10", "0x10", "0b1", "1_000", "1e3", "10.5", "10.0", "null", "~", "", "-1", "-0", "+5", `"10"`, "'10'",
		"1000001", "18446744073709551616", "0010", "00", "true", ".inf", ".nan", "[5]", "{a: 5}", "5 0", "10,5]", "five", "190:20:30", "2001-01-01", "!!int 5", "Unlimited", "5 %", "٥"}
	good := map[string]Limit{"0": 0, "1": 1, "10": 10, "1000000": MaxLimit, "unlimited": Unlimited}
	for _, p := range places {
		for _, b := range bad {
			text := head + fmt.Sprintf(p, b)
			lines := parseErrors(t, text)
			if len(lines) == 0 {
				t.Errorf("accepted:\n%s", text)
			}
		}
		for g, want := range good {
			plan, _ := compileText(t, head+fmt.Sprintf(p, g))
			found := slices.ContainsFunc(plan.Bulkheads, func(b Bulkhead) bool { return b.Limit == want })
			if !found {
				t.Errorf("no bulkhead has %v in:\n%s", want, fmt.Sprintf(p, g))
			}
		}
	}
	// The exact words, once.
	for value, want := range map[string]string{
		"010":     `"010" is not a plain number from 0 to 1000000, or unlimited (digits only: no sign, fraction, exponent, unit or leading zero)`,
		"1e3":     `"1e3" is not a plain number from 0 to 1000000, or unlimited (digits only: no sign, fraction, exponent, unit or leading zero)`,
		"null":    `is empty; write a plain number from 0 to 1000000, or unlimited`,
		"":        `is empty; write a plain number from 0 to 1000000, or unlimited`,
		`"10"`:    `"10" is in quotes; write a plain number from 0 to 1000000, or unlimited, without quotes`,
		"1000001": `1000001 is out of range; write a plain number from 0 to 1000000, or unlimited`,
		"five":    `"five" is not a plain number from 0 to 1000000, or unlimited`,
	} {
		got := parseErrors(t, head+"providers: {}\nfeatures: {f: {limits: {connections: "+value+"}}}\n")
		wantLines(t, got, []string{"p.yaml:5:38: features.f.limits.connections: " + want})
	}
}

// A time has units, and what has none is an error, not a guess: in both places
// where one may stand.
func TestTimesHaveUnits(t *testing.T) {
	const (
		idle   = "providers: {a: {cidrs: [10.0.0.0/8], protocol: [tcp, udp], idle: %s}}\nfeatures: {}\n"
		period = "providers: {}\nfeatures: {f: {class: batch, cpu: {max: 900%%, period: %s}}}\n"

		isNot      = "is not a time from 1s to 24h in whole seconds, such as 30s, 2m or 1h30m"
		outOfRange = "is out of range; write a time from 1s to 24h in whole seconds, such as 30s, 2m or 1h30m"
		missing    = "is missing its unit; write a time from 1s to 24h in whole seconds, such as 30s, 2m or 1h30m"
	)
	for value, want := range map[string]string{
		"600": missing, `"600"`: missing, "1h30": missing, "-600": missing, "+5": missing, "010": missing, "0x10": missing, "1_000": missing,
		"1e3": missing, "10.5": missing, "5": missing, "2m30": missing, `"1 5"`: missing, "00": missing, "190:20:30": missing,
		"0": outOfRange, `"0"`: outOfRange, "0s": outOfRange, "0h": outOfRange, "-5s": outOfRange, "-0s": outOfRange, "-1h30m": outOfRange,
		"999ms": outOfRange, "24h1s": outOfRange, "86401s": outOfRange, "25h": outOfRange, "999999h": outOfRange,
		"1d": isNot, "1w": isNot, "2min": isNot, "2M": isNot, "2 m": isNot, "1.5h": isNot, "+5s": isNot, "1m1h": isNot, "1m1m": isNot, "01m": isNot,
		"1500ms": isNot, "1s1ms": isNot, "5us": isNot, "5ns": isNot, "9999999999h": isNot, "m": isNot, `"-"`: isNot, "''": isNot, "true": isNot, "2h-5m": isNot,
		"max": isNot, "unlimited": isNot, "none": isNot, "٥s": isNot,
	} {
		got := parseErrors(t, head+fmt.Sprintf(idle, value))
		wantLines(t, got, []string{fmt.Sprintf("p.yaml:4:66: providers.a.idle: %q %s", strings.Trim(value, `"'`), want)})
	}
	for value, want := range map[string]string{
		"":       "p.yaml:4:66: providers.a.idle: is empty; write a time from 1s to 24h in whole seconds, such as 30s, 2m or 1h30m",
		"~":      "p.yaml:4:66: providers.a.idle: is empty; write a time from 1s to 24h in whole seconds, such as 30s, 2m or 1h30m",
		"[2m]":   "p.yaml:4:66: providers.a.idle: needs a time from 1s to 24h in whole seconds, such as 30s, 2m or 1h30m; this is a list",
		"{s: 2}": "p.yaml:4:66: providers.a.idle: needs a time from 1s to 24h in whole seconds, such as 30s, 2m or 1h30m; this is a mapping",
		"!!s 60": "p.yaml:4:66: tags (!!s) are not part of the language: leave it out",
	} {
		wantLines(t, parseErrors(t, head+fmt.Sprintf(idle, value)), []string{want})
	}
	for value, want := range map[string]time.Duration{
		"1s": time.Second, "30s": 30 * time.Second, "2m": 2 * time.Minute, "90s": 90 * time.Second, "1m30s": 90 * time.Second, `"1h30m"`: 90 * time.Minute,
		"1h0m5s": time.Hour + 5*time.Second, "24h": 24 * time.Hour, "86400s": 24 * time.Hour, "2000ms": 2 * time.Second,
	} {
		plan, _ := compileText(t, head+fmt.Sprintf(idle, value))
		if got := plan.Providers[1].Idle; got != want {
			t.Errorf("idle %s is %s, want %s", value, got, want)
		}
	}

	for _, bad := range []string{"600", `"600"`, "1h30", "0", "0s", "-5s", "1d", "2s", "1001ms", "1m", "500us", "1.5ms", ""} {
		if got := parseErrors(t, head+fmt.Sprintf(period, bad)); len(got) != 1 || !strings.HasPrefix(got[0], "p.yaml:5:") {
			t.Errorf("period %s: %v", bad, got)
		}
	}
	for value, want := range map[string]uint64{"1ms": 1_000, "100ms": 100_000, "1s": 1_000_000, "1000ms": 1_000_000} {
		plan, _ := compileText(t, head+fmt.Sprintf(period, value))
		if got := plan.Features[1].CPU.PeriodUsec; got != want {
			t.Errorf("period %s is %d us, want %d", value, got, want)
		}
	}
}

// What a user may write in more than one way.
func TestAccepted(t *testing.T) {
	for _, text := range []string{
		head + "providers: []\nfeatures: []\ntenants: []\n",
		head + "providers: {}\nfeatures: {}\ntenants: {}\nprotect: []\n",
		"\ufeff" + head + "providers: {}\nfeatures: {}\n",
		strings.ReplaceAll(head+"providers: {}\nfeatures: {}\n", "\n", "\r\n"),
		"---\n" + head + "providers: {}\nfeatures: {}\n...\n",
		head + "providers: {a: {cidrs: [10.0.0.0/8], ports: [443, \"80\", 8000-8010, \"1-65535\"], protocol: [udp, tcp]}}\nfeatures: {}\n",
		head + "providers: {a: {cidrs: [0.0.0.0/0, \"::/0\"], wide: true}}\nfeatures: {}\n",
		head + "providers: {a: {hosts: [localhost, A.Example.Test., xn--bcher-kva.example, _srv.x.test]}}\nfeatures: {}\n",
		head + "providers: {other: {}}\nfeatures: {default: {}}\n",
		head + "providers: {}\nfeatures: {a: {class: batch, cpu: {}, memory: {}, match: [], providers: {}, tenants: {}}}\n",
		head + "providers: {}\nfeatures: {a: {class: batch, cpu: {idle: false, max: max, per: cgroup}, memory: {high: max, max: 1Ti, per: cgroup}}}\n",
		head + `providers: {}
features:
  a:
    class: batch
    match:
      - {unit: "chat*"}
      - {unit: "chat@*.service", user: 0}
      - {cgroup: "/kubepods.slice/**/cri-*.scope", user: www-data}
      - {exe: "/usr/bin/python3*", cmdline: '(?i)worker --queue=\w+'}
      - {exe: "**/node"}
      - {container: {name: "chat-*", image: "ghcr.io/**", label: "app=chat", compose_service: chat}}
      - {container: {name: "*"}, unit: "docker-*.scope", cgroup: "/system.slice/**"}
`,
	} {
		if got := parseErrors(t, text); got != nil {
			t.Errorf("refused:\n%s\n%s", strings.Join(got, "\n"), text)
		}
	}
}

func TestDidYouMean(t *testing.T) {
	known := []string{"connections", "errno", "cpu", "deepseek"}
	for in, want := range map[string]string{
		"conections": "connections", "connection": "connections", "Connections": "connections", "upc": "", "cup": "cpu",
		"erno": "errno", "depseek": "deepseek", "": "", "xyz": "", "deepseek ": "deepseek",
	} {
		got := nearest(in, known)
		if want != "" {
			want = fmt.Sprintf("; did you mean %q?", want)
		}
		if got != want {
			t.Errorf("nearest(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestErrnosAreThoseOfLinux(t *testing.T) {
	for name, want := range linuxErrnos() {
		got, ok := errnoByName(name)
		if !ok || got != want {
			t.Errorf("errno %s is %d (%v), want %d", name, got, ok, want)
		}
		if ErrnoName(want) != name {
			t.Errorf("ErrnoName(%d) = %s, want %s", want, ErrnoName(want), name)
		}
	}
	if n := len(errnos()); n != len(linuxErrnos()) {
		t.Errorf("%d errnos, and the test knows %d", n, len(linuxErrnos()))
	}
	if got := ErrnoName(5); got != "5" {
		t.Errorf("ErrnoName(5) = %s", got)
	}
}

// A quote that is never closed, at the start of a large file, is the most
// expensive fault to find the place of: looking is bounded, and a place there is.
func TestFaultInALargeFile(t *testing.T) {
	text := head + "providers: {}\nfeatures:\n  a: {owner: \"x}\n" + strings.Repeat("  # a line of a large policy\n", 100_000)
	got := parseErrors(t, text)
	wantLines(t, got, []string{"p.yaml:6:1: not valid YAML: found unexpected end of stream"})
	text = head + strings.Repeat("#\n", MaxFileSize/2)
	wantLines(t, parseErrors(t, text), []string{"p.yaml:1:1: the file is larger than 8388608 bytes: a policy is not"})
}
