package policy

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/bmatcuk/doublestar/v4"
)

// warnings is what is legal and unwise in a policy that is right.
func (f *File) warnings() Warnings {
	var ws findings
	limits := map[string]Limit{}
	for _, d := range f.providers {
		limits[d.value] = Unlimited
		if d.limits != nil {
			limits[d.value] = d.limits.limit
		}
		ws.single(join("providers", d.value), d.limits)
		if d.idle > 0 && d.idle <= keepAlive {
			ws.add(d.idleAt, "providers.%s.idle: clients that keep a quiet connection alive send something every %s; "+
				"with an idle time no longer than that they lose their slot in between, and may be refused in mid-connection", d.value, timeText(keepAlive))
		}
	}
	limits[OtherProvider] = Unlimited
	if f.other != nil && f.other.limits != nil {
		limits[OtherProvider] = f.other.limits.limit
		ws.single("providers.other", f.other.limits)
	}
	for _, t := range f.tenants {
		ws.limits(join("tenants", t.value), t.limits, t.providers, limits)
	}
	for _, d := range f.features {
		path := join("features", d.value)
		ws.limits(path, d.limits, d.providers, limits)
		for _, t := range d.tenants {
			ws.limits(join(path, "tenants."+t.value), t.limits, t.providers, limits)
		}
		if d.classless {
			ws.add(d.at, "%s: has no class and gets background, the lowest: write one", path)
		}
		f.warnMatch(&ws, path, d)
		warnCPU(&ws, path, d)
	}
	if d := f.deflt; d != nil {
		ws.limits("features.default", d.limits, d.providers, limits)
	}
	f.warnExclusive(&ws)
	f.warnStranded(&ws)
	f.warnHidden(&ws)
	return ws.warnings()
}

// keepAlive is how often a QUIC endpoint sends something so that no middlebox
// forgets it (RFC 9000, 10.1.2).
const keepAlive = 30 * time.Second

func (ws *findings) single(path string, b *block) {
	if b != nil && b.limit == 1 {
		ws.add(b.at, "%s: a limit of 1 is a serial queue, not isolation: one slow call holds up all others", path)
	}
}

// limits warns of the limits that a feature or tenant has by itself and at
// providers.
func (ws *findings) limits(path string, own *block, pairs []pair, providers map[string]Limit) {
	ws.single(path, own)
	for _, x := range pairs {
		path := join(path, "providers."+x.value)
		ws.single(path, x.block)
		if most := providers[x.value]; x.block.limit != Unlimited && most != Unlimited && x.block.limit >= most {
			ws.add(x.block.at, "%s: %s is not below the provider's own limit of %s, so it bounds nothing more", path, x.block.limit, most)
		}
	}
}

// warnStranded warns where every feature has a cap at a provider and the caps
// together are less than its limit: some of it can never be used by a feature.
// While one feature has no cap there, it may use what the others leave.
func (f *File) warnStranded(ws *findings) {
	caps := map[string]uint64{}
	capped := map[string]int{}
	count := func(d *feature) {
		for _, x := range d.providers {
			if x.block.limit != Unlimited {
				caps[x.value] += uint64(x.block.limit)
				capped[x.value]++
			}
		}
	}
	for _, d := range f.features {
		count(d)
	}
	for _, p := range f.providers {
		if p.limits == nil || p.limits.limit == Unlimited || len(f.features) == 0 || capped[p.value] < len(f.features) {
			continue
		}
		sum, left := caps[p.value], "no feature"
		bounded := false
		if d := f.deflt; d != nil {
			for _, x := range d.providers {
				if x.value == p.value && x.block.limit != Unlimited {
					sum, bounded = sum+uint64(x.block.limit), true
				}
			}
			if !bounded && d.limits != nil && d.limits.limit != Unlimited {
				sum, bounded = sum+uint64(d.limits.limit), true
			}
		}
		if !bounded {
			left = "only the default feature"
		}
		if most := uint64(p.limits.limit); sum < most {
			ws.add(p.limits.at, "providers.%s: the features' caps add up to %d of %d: %s can use the other %d", p.value, sum, most, left, most-sum)
		}
	}
}

// warnHidden warns of destinations that an earlier provider with the same prefix
// has, whole or in part. A longer prefix is no reason: to carve a part out of a
// shorter one is what it is for, and it takes nothing but what it names.
func (f *File) warnHidden(ws *findings) {
	taken := map[netip.Prefix][]PortRange{} // Provider is an index into f.providers
	for i, p := range f.providers {
		own := p.portsAs(uint32(i))
		for _, x := range p.prefixes {
			if hidden := overlap(own, taken[x.value]); len(hidden) > 0 {
				f.warnTaken(ws, p, x, hidden)
			}
		}
		for _, x := range p.prefixes {
			taken[x.value] = fill(taken[x.value], own)
		}
	}
}

// warnTaken says which ports of p's prefix x go to whom.
func (f *File) warnTaken(ws *findings, p *provider, x placed[netip.Prefix], hidden []PortRange) {
	of := map[uint32][]string{} // ports
	var who []string
	where := "the file"
	for _, r := range hidden {
		first := f.providers[r.Provider]
		if of[r.Provider] == nil {
			who = append(who, first.value)
		}
		of[r.Provider] = append(of[r.Provider], r.String())
		if first.at.file != p.at.file {
			where = "the directory" // whose files are read by name
		}
	}
	path := join("providers", p.value)
	if countPorts(hidden) == countPorts(p.ports) {
		if len(who) == 1 {
			ws.add(x.at, "%s: %s never matches: provider %s, earlier in %s, has the same prefix and ports", path, x.value, who[0], where)
		} else {
			ws.add(x.at, "%s: %s never matches: providers %s, earlier in %s, have the same prefix and together its ports", path, x.value, strings.Join(who, ", "), where)
		}
		return
	}
	for _, i := range slices.Sorted(maps.Keys(of)) {
		ws.add(x.at, "%s: %s does not match %s: provider %s, earlier in %s, has the same prefix and these ports",
			path, x.value, strings.Join(of[i], ", "), f.providers[i].value, where)
	}
}

// countPorts counts the ports of ranges that are disjoint.
func countPorts(ranges []PortRange) (n int) {
	for _, r := range ranges {
		n += int(r.Last) - int(r.First) + 1
	}
	return n
}

// warnMatch warns of matches that never have an effect, because what they name
// is protected, or ours, or cannot be.
func (f *File) warnMatch(ws *findings, path string, d *feature) {
	protect := builtInProtect()
	for _, s := range f.protect {
		protect = append(protect, s.value)
	}
	for _, m := range d.match {
		for _, key := range slices.Sorted(maps.Keys(m.Container)) {
			if why := noContainer(key, m.Container[key]); why != "" {
				ws.add(m.containerAt[key], "%s.match: container.%s: %s matches nothing: %s", path, key, show(m.Container[key]), why)
			}
		}
		if IsOurs(m.Cgroup) {
			ws.add(m.at, "%s.match: %s is bulkhead's own: what is in it is in its compartment already, and nothing else is adopted there", path, m.Cgroup)
			continue
		}
		for _, s := range protect {
			var same bool
			switch {
			case strings.HasPrefix(s, "/"):
				same = m.Cgroup == s || strings.HasPrefix(m.Cgroup, s+"/")
			case m.Unit != "" && !isGlob(m.Unit):
				same, _ = doublestar.Match(s, m.Unit) // it was checked
			default:
				same = m.Unit == s
			}
			if same {
				ws.add(m.at, "%s.match: matches what is protected (%s), which is never refused", path, s)
				break
			}
		}
	}
}

// noContainer says why no container can be meant by a glob, "" if one may be. It was checked, and is not empty.
func noContainer(key, glob string) string {
	switch {
	case key == "name" && needs(glob, "/"):
		return "names have no slash; the one that docker inspect prints before them is not part of them"
	case key == "compose_service" && needs(glob, "/"):
		return "names of services have no slash"
	case key == "image" && needs(glob, "://"):
		return "references to images have no scheme; begin with the registry, ghcr.io/team/app"
	case key == "image" && (strings.ContainsRune("/:@", rune(glob[0])) || strings.HasSuffix(glob, ":") || strings.HasSuffix(glob, "@")):
		return "a part of the reference is empty"
	case key == "label" && strings.HasPrefix(glob, "="):
		return "every label has a key before the ="
	}
	return ""
}

// needs reports whether whatever matches a glob has a text in it. In brackets and braces it is one choice of several.
func needs(glob, text string) bool {
	depth := 0
	for i := range len(glob) {
		switch glob[i] {
		case '[', '{':
			depth++
		case ']', '}':
			depth--
		}
		if depth == 0 && strings.HasPrefix(glob[i:], text) {
			return true
		}
	}
	return false
}

// warnExclusive warns of CPUs that are called a feature's own and are not.
func (f *File) warnExclusive(ws *findings) {
	var free []string
	for _, d := range f.features {
		if d.cpu == nil {
			free = append(free, d.value)
		}
	}
	for _, d := range f.features {
		if d.cpu != nil && d.cpu.Exclusive && len(free) > 0 {
			ws.add(d.cpusAt, "%s.cpu.cpus: are not this feature's alone: cpu: none leaves %s on every CPU; give it another value, cpu: {} say, if that is not meant",
				join("features", d.value), strings.Join(free, ", "))
		}
	}
}

// warnCPU warns of quotas that do something else than what one hopes for.
func warnCPU(ws *findings, path string, d *feature) {
	if d.cpu != nil && d.cpu.MaxUsec > 0 && d.class == Realtime {
		ws.add(d.maxAt, "%s.cpu.max: a quota stalls a realtime feature for the rest of a period as soon as a burst has used it up, "+
			"long before its average reaches it; weights alone do not", path)
	}
	adopted := map[string]int{} // by tenant; 2 is several
	for _, m := range d.match {
		switch {
		case m.Container != nil || isGlob(m.Unit) || isGlob(m.Cgroup):
			adopted[m.Tenant] += 2
		case m.Unit != "" || m.Cgroup != "":
			adopted[m.Tenant]++
		}
	}
	for _, n := range adopted {
		if n < 2 {
			continue
		}
		if d.cpu != nil && d.cpu.MaxUsec > 0 && !d.cpuPerCgroup {
			ws.add(d.maxAt, "%s.cpu.max: applies to each cgroup that matches, not to all of them together; per: cgroup says that this is meant", path)
		}
		if d.memory != nil && !d.memoryPerCgroup {
			ws.add(d.memoryAt, "%s.memory: applies to each cgroup that matches, not to all of them together; per: cgroup says that this is meant", path)
		}
		if d.pids != nil && !d.pidsPerCgroup {
			ws.add(d.pidsAt, "%s.pids: applies to each cgroup that matches, not to all of them together; per: cgroup says that this is meant", path)
		}
		break
	}
}
