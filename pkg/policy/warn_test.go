package policy

import "testing"

func TestWarnings(t *testing.T) {
	const provider = head + "providers:\n  p: {cidrs: [10.0.0.0/8], limits: {connections: 10}}\n" // lines 1 to 5
	for _, tc := range []struct {
		name, text string
		want       []string
	}{
		{"nothing", provider + "features: {f: {class: batch}}\n", nil},
		{"a limit of 1", head + "providers:\n  p: {cidrs: [10.0.0.0/8], limits: {connections: 1}}\n  other: {limits: {connections: 1}}\n" +
			"tenants: {t: {limits: {connections: 1}}}\nfeatures:\n  f: {class: batch, limits: {connections: 1}, tenants: {t: {limits: {connections: 1}}}}\n  default: {limits: {connections: 1}}\n", []string{
			"p.yaml:5:50: providers.p: a limit of 1 is a serial queue, not isolation: one slow call holds up all others",
			"p.yaml:6:33: providers.other: a limit of 1 is a serial queue, not isolation: one slow call holds up all others",
			"p.yaml:7:37: tenants.t: a limit of 1 is a serial queue, not isolation: one slow call holds up all others",
			"p.yaml:9:43: features.f: a limit of 1 is a serial queue, not isolation: one slow call holds up all others",
			"p.yaml:9:83: features.f.tenants.t: a limit of 1 is a serial queue, not isolation: one slow call holds up all others",
			"p.yaml:10:35: features.default: a limit of 1 is a serial queue, not isolation: one slow call holds up all others",
		}},
		{"a share that comes to 1", provider + "features: {f: {class: batch, providers: {p: {connections: 15%}}}, g: {class: batch}}\n", []string{
			"p.yaml:6:59: features.f.providers.p: a limit of 1 is a serial queue, not isolation: one slow call holds up all others",
		}},
		{"0 and 2 are not 1", provider + "features: {f: {class: batch, limits: {connections: 0}}, g: {class: batch, limits: {connections: 2}}}\n", nil},
		{"not below the provider's", provider + "tenants: {t: {providers: {p: {connections: 11}}}}\nfeatures:\n" +
			"  f: {class: batch, providers: {p: {connections: 10}}, tenants: {t: {providers: {p: {connections: 100%}}}}}\n" +
			"  g: {class: batch, providers: {p: {connections: 9}, other: {connections: 2000}}}\n" +
			"  h: {class: batch, providers: {p: {connections: unlimited}}}\n", []string{
			"p.yaml:6:44: tenants.t.providers.p: 11 is not below the provider's own limit of 10, so it bounds nothing more",
			"p.yaml:8:50: features.f.providers.p: 10 is not below the provider's own limit of 10, so it bounds nothing more",
			"p.yaml:8:99: features.f.tenants.t.providers.p: 10 is not below the provider's own limit of 10, so it bounds nothing more",
		}},
		{"stranded", provider + "features:\n  f: {class: batch, providers: {p: {connections: 3}}}\n  g: {class: batch, providers: {p: {connections: 40%}}}\n", []string{
			"p.yaml:5:50: providers.p: the features' caps add up to 7 of 10: only the default feature can use the other 3",
		}},
		{"stranded for default too", provider + "features:\n  f: {class: batch, providers: {p: {connections: 3}}}\n  default: {limits: {connections: 2}}\n", []string{
			"p.yaml:5:50: providers.p: the features' caps add up to 5 of 10: no feature can use the other 5",
		}},
		{"default uses the rest", provider + "features:\n  f: {class: batch, providers: {p: {connections: 3}}}\n  default: {limits: {connections: 2}, providers: {p: {connections: 7}}}\n", nil},
		{"a feature without a cap uses the rest", provider + "features:\n  f: {class: batch, providers: {p: {connections: 3}}}\n  g: {class: batch}\n", nil},
		{"caps that add up", provider + "features:\n  f: {class: batch, providers: {p: {connections: 5}}}\n  g: {class: batch, providers: {p: {connections: 50%}}}\n", nil},
		{"hidden whole", head + "providers:\n  p: {cidrs: [10.0.0.0/8, \"fd00::/16\"]}\n  q:\n    cidrs:\n    - 10.0.0.0/8\n    - \"::ffff:10.0.0.0/104\"\n    - \"fd00::/16\"\n    - 10.1.0.0/16\n    ports: [443, 8000-8010]\n" +
			"features: {}\n", []string{
			"p.yaml:8:7: providers.q: 10.0.0.0/8 never matches: provider p, earlier in the file, has the same prefix and ports",
			"p.yaml:9:7: providers.q: 10.0.0.0/8 never matches: provider p, earlier in the file, has the same prefix and ports",
			"p.yaml:10:7: providers.q: fd00::/16 never matches: provider p, earlier in the file, has the same prefix and ports",
		}},
		{"hidden by two together", head + "providers:\n  p: {cidrs: [10.0.0.0/8], ports: [1-100]}\n  q: {cidrs: [10.0.0.0/8], ports: [101-200]}\n  r: {cidrs: [10.0.0.0/8], ports: [50-150]}\nfeatures: {}\n", []string{
			"p.yaml:7:15: providers.r: 10.0.0.0/8 never matches: providers p, q, earlier in the file, have the same prefix and together its ports",
		}},
		{"hidden in part", head + "providers:\n  p: {cidrs: [10.0.0.0/8], ports: [443, 8000-8010]}\n  q: {cidrs: [10.0.0.0/8], ports: [80], protocol: udp}\n" +
			"  r: {cidrs: [9.0.0.0/8, 10.0.0.0/8], ports: [1-8005], protocol: [tcp, udp]}\n  s: {cidrs: [10.0.0.0/8]}\nfeatures: {}\n", []string{
			"p.yaml:7:26: providers.r: 10.0.0.0/8 does not match tcp 443, tcp 8000-8005: provider p, earlier in the file, has the same prefix and these ports",
			"p.yaml:7:26: providers.r: 10.0.0.0/8 does not match udp 80: provider q, earlier in the file, has the same prefix and these ports",
			"p.yaml:8:15: providers.s: 10.0.0.0/8 does not match tcp 443, tcp 8000-8010: provider p, earlier in the file, has the same prefix and these ports",
			"p.yaml:8:15: providers.s: 10.0.0.0/8 does not match tcp 1-442, tcp 444-7999: provider r, earlier in the file, has the same prefix and these ports",
		}},
		{"not hidden", head + "providers:\n  p: {cidrs: [10.0.0.0/8, 10.0.0.0/8]}\n  longer: {cidrs: [10.1.0.0/16, 10.0.0.0/9]}\n  shorter: {cidrs: [10.0.0.0/7], wide: true}\n" +
			"  udp: {cidrs: [10.0.0.0/8], protocol: udp, ports: [53]}\n  other6: {cidrs: [\"a00::/16\"], ports: [54]}\n  beside: {cidrs: [10.0.0.0/8], protocol: udp, ports: [52, 54]}\nfeatures: {}\n", nil},
		{"a short idle time", head + "providers:\n  p: {cidrs: [10.0.0.0/8], protocol: udp, idle: 30s}\n  q: {cidrs: [11.0.0.0/8], idle: 31s, protocol: [tcp, udp]}\n" +
			"  r: {cidrs: [12.0.0.0/8], idle: 1s, protocol: [tcp, udp]}\n  s: {cidrs: [13.0.0.0/8], protocol: udp}\nfeatures: {}\n", []string{
			"p.yaml:5:49: providers.p.idle: clients that keep a quiet connection alive send something every 30s; with an idle time no longer than that they lose their slot in between, and may be refused in mid-connection",
			"p.yaml:7:34: providers.r.idle: clients that keep a quiet connection alive send something every 30s; with an idle time no longer than that they lose their slot in between, and may be refused in mid-connection",
		}},
		{"no class", provider + "features:\n  f: {}\n  default: {}\n", []string{
			"p.yaml:7:3: features.f: has no class and gets background, the lowest: write one",
		}},
		{"protected", provider + "protect: [/a/b, mine.service]\nfeatures:\n  f:\n    class: batch\n    match:\n" +
			"    - {unit: sshd.service}\n    - {unit: systemd-journald.service}\n    - {unit: \"sshd@*.service\"}\n    - {unit: mine.service}\n" +
			"    - {cgroup: /a/b}\n    - {cgroup: /a/b/c}\n    - {cgroup: /a/bc}\n    - {unit: chat.service}\n", []string{
			"p.yaml:11:7: features.f.match: matches what is protected (sshd.service), which is never refused",
			"p.yaml:12:7: features.f.match: matches what is protected (systemd-*.service), which is never refused",
			"p.yaml:13:7: features.f.match: matches what is protected (sshd@*.service), which is never refused",
			"p.yaml:14:7: features.f.match: matches what is protected (mine.service), which is never refused",
			"p.yaml:15:7: features.f.match: matches what is protected (/a/b), which is never refused",
			"p.yaml:16:7: features.f.match: matches what is protected (/a/b), which is never refused",
		}},
		{"containers that cannot be", provider + "features:\n  f:\n    class: batch\n    match:\n" +
			"    - {container: {name: /a, image: \"https://ghcr.io/**\"}}\n    - {container: {image: \"docker://{a,b}\", label: \"=x\"}}\n    - container:\n        compose_service: shop/*\n        image: \":1\"\n" +
			"    - {container: {image: \"nginx:\", name: \"*/b\"}, cgroup: /bulkhead.slice}\n", []string{
			`p.yaml:10:26: features.f.match: container.name: "/a" matches nothing: names have no slash; the one that docker inspect prints before them is not part of them`,
			`p.yaml:10:37: features.f.match: container.image: "https://ghcr.io/**" matches nothing: references to images have no scheme; begin with the registry, ghcr.io/team/app`,
			`p.yaml:11:27: features.f.match: container.image: "docker://{a,b}" matches nothing: references to images have no scheme; begin with the registry, ghcr.io/team/app`,
			`p.yaml:11:52: features.f.match: container.label: "=x" matches nothing: every label has a key before the =`,
			`p.yaml:13:26: features.f.match: container.compose_service: "shop/*" matches nothing: names of services have no slash`,
			`p.yaml:14:16: features.f.match: container.image: ":1" matches nothing: a part of the reference is empty`,
			"p.yaml:15:7: features.f.match: /bulkhead.slice is bulkhead's own: what is in it is in its compartment already, and nothing else is adopted there",
			`p.yaml:15:27: features.f.match: container.image: "nginx:" matches nothing: a part of the reference is empty`,
			`p.yaml:15:43: features.f.match: container.name: "*/b" matches nothing: names have no slash; the one that docker inspect prints before them is not part of them`,
		}},
		{"containers that may be", provider + "features:\n  f:\n    class: batch\n    match:\n" +
			"    - {container: {name: \"{/a,a}\", image: \"**:*\", label: \"a=/x://y\", compose_service: \"[a/]*\"}}\n" +
			"    - {container: {name: \"**\", image: \"localhost:5000/a@sha256:*\", label: \"*=\"}}\n    - {container: {image: \"ghcr.io/a/\"}}\n", nil},
		{"our own slices", provider + "features:\n  f:\n    class: batch\n    match:\n    - {cgroup: /bulkhead.slice}\n    - {cgroup: /bulkhead.slice/bulkhead-f.slice/x}\n    - {cgroup: /bulkhead.slices}\n", []string{
			"p.yaml:10:7: features.f.match: /bulkhead.slice is bulkhead's own: what is in it is in its compartment already, and nothing else is adopted there",
			"p.yaml:11:7: features.f.match: /bulkhead.slice/bulkhead-f.slice/x is bulkhead's own: what is in it is in its compartment already, and nothing else is adopted there",
		}},
		{"a quota for realtime", provider + "features:\n  f: {class: realtime, cpu: {max: 50%}}\n  g: {class: batch, cpu: {max: 50%}}\n", []string{
			"p.yaml:7:35: features.f.cpu.max: a quota stalls a realtime feature for the rest of a period as soon as a burst has used it up, long before its average reaches it; weights alone do not",
		}},
		{"CPUs that are not its own", provider + "features:\n  a: {class: realtime, cpu: {cpus: 0, exclusive: true}}\n  b: {class: batch, cpu: none}\n  c: {class: batch, cpu: {cpus: 1}}\n", []string{
			"p.yaml:7:36: features.a.cpu.cpus: are not this feature's alone: cpu: none leaves b on every CPU; give it another value, cpu: {} say, if that is not meant",
		}},
		{"CPUs of its own", provider + "features:\n  a: {class: realtime, cpu: {cpus: 0, exclusive: true}}\n  b: {class: batch}\n", nil},
		{"several cgroups", provider + "tenants: {t: {}}\nfeatures:\n" +
			"  a: {class: batch, cpu: {max: 50%}, memory: {max: 1Gi}, pids: {max: 9}, match: [{unit: \"a@*.service\"}]}\n" +
			"  b: {class: batch, cpu: {max: 50%}, match: [{unit: a.service}, {cgroup: /b}]}\n" +
			"  c: {class: batch, memory: {max: 1Gi}, match: [{container: {name: x}}]}\n" +
			"  d: {class: batch, cpu: {max: 50%, per: cgroup}, memory: {max: 1Gi, per: cgroup}, match: [{unit: \"a@*.service\"}]}\n" +
			"  e: {class: batch, cpu: {max: 50%}, match: [{unit: a.service}, {unit: b.service, tenant: t}]}\n" +
			"  f: {class: batch, cpu: {max: 50%}, match: [{exe: /bin/a}, {exe: /bin/b}]}\n" +
			"  g: {class: batch, cpu: {weight: 5}, match: [{unit: \"a@*.service\"}]}\n", []string{
			"p.yaml:8:32: features.a.cpu.max: applies to each cgroup that matches, not to all of them together; per: cgroup says that this is meant",
			"p.yaml:8:46: features.a.memory: applies to each cgroup that matches, not to all of them together; per: cgroup says that this is meant",
			"p.yaml:8:64: features.a.pids: applies to each cgroup that matches, not to all of them together; per: cgroup says that this is meant",
			"p.yaml:9:32: features.b.cpu.max: applies to each cgroup that matches, not to all of them together; per: cgroup says that this is meant",
			"p.yaml:10:29: features.c.memory: applies to each cgroup that matches, not to all of them together; per: cgroup says that this is meant",
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, warnings := compileText(t, tc.text)
			var lines []string
			for _, w := range warnings {
				lines = append(lines, w.String())
			}
			wantLines(t, lines, tc.want)
		})
	}
}
