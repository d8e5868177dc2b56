package policy

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// What the first two keys of a policy must say.
const (
	apiVersion = "bulkhead/v1"
	kind       = "Policy"
)

// Parse reads a policy from one file's content; name is what messages call it.
// The error is Errors: everything that is wrong.
func Parse(name string, data []byte) (*File, error) {
	return parse([]source{{name, data}})
}

type source struct {
	name string
	data []byte
}

// parser reads the files of one policy.
type parser struct {
	file File
	errs findings
	// There is a providers, tenants, features or mode; with an error in it what
	// it names may be incomplete.
	has, unsure map[string]bool
	// Where "providers.NAME" and the like were first named, over all files.
	named map[string]place
	// The limit blocks of the providers that have one, by name.
	limits map[string]*block
}

func parse(sources []source) (*File, error) {
	p := &parser{has: map[string]bool{}, unsure: map[string]bool{}, named: map[string]place{}}
	p.file.start = place{file: sources[0].name, line: 1, col: 1}
	for i, s := range sources {
		r := &reader{file: s.name, order: i, errs: &p.errs, refused: map[*yaml.Node]bool{}}
		if root := r.tree(s.data); root != nil {
			if i == 0 {
				p.file.start = r.of(root)
			}
			p.policy(r, root)
		} else {
			p.unsure["providers"], p.unsure["tenants"], p.unsure["features"], p.unsure["mode"] = true, true, true, true
		}
	}
	for _, key := range []string{"mode", "providers", "features"} {
		if !p.has[key] && !p.unsure[key] {
			p.errs.add(p.file.start, "%s is missing; %s", key, map[string]string{
				"mode":      "write mode: enforce, or mode: observe to try the policy first",
				"providers": "write providers: {} if there are none",
				"features":  "write features: {} if there are none",
			}[key])
		}
	}
	p.refer()
	if err := p.errs.err(); err != nil {
		return nil, err
	}
	return &p.file, nil
}

// policy reads one file.
func (p *parser) policy(r *reader, root *yaml.Node) {
	seen := map[string]bool{}
	ok := r.mapping(root, "", "a mapping with apiVersion, kind, mode, providers and features",
		[]string{"apiVersion", "kind", "mode", "exhausted", "protect", "providers", "tenants", "features"},
		func(key string, k, v *yaml.Node) {
			seen[key], p.has[key] = true, true
			switch key {
			case "apiVersion":
				r.choice(v, key, []string{apiVersion})
			case "kind":
				r.choice(v, key, []string{kind})
			case "mode":
				agreed(r, v, key, &p.file.mode, Enforce, Observe)
			case "exhausted":
				agreed(r, v, key, &p.file.exhausted, ExhaustedAllow, ExhaustedRefuse)
			case "protect":
				r.list(v, key, "a list of units and cgroup paths", func(path string, v *yaml.Node) { p.protect(r, path, v) })
			case "providers":
				p.names(r, v, key, "providers", func(name, path string, k, v *yaml.Node) { p.provider(r, name, path, k, v) })
			case "tenants":
				p.names(r, v, key, "tenants", func(name, path string, k, v *yaml.Node) { p.tenant(r, name, path, k, v) })
			case "features":
				p.names(r, v, key, "features", func(name, path string, k, v *yaml.Node) { p.feature(r, name, path, k, v) })
			}
		})
	if !ok {
		p.unsure["providers"], p.unsure["tenants"], p.unsure["features"], p.unsure["mode"] = true, true, true, true
		return
	}
	if !seen["apiVersion"] {
		r.errs.add(r.of(root), "apiVersion is missing; write apiVersion: %s", apiVersion)
	}
	if !seen["kind"] {
		r.errs.add(r.of(root), "kind is missing; write kind: %s", kind)
	}
}

// agreed reads a word that every file of a directory may say, and all that do say
// the same.
func agreed[T ~string](r *reader, v *yaml.Node, key string, is *placed[T], words ...T) {
	var choices []string
	for _, w := range words {
		choices = append(choices, string(w))
	}
	s, ok := r.choice(v, key, choices)
	switch {
	case !ok:
	case is.value == "":
		*is = placed[T]{T(s), r.of(v)}
	case is.value != T(s):
		r.fail(v, key, "is %s here and %s at %s", s, is.value, is.at)
	}
}

// names reads a mapping from names to what they are, of which every file of a
// directory may have a part.
func (p *parser) names(r *reader, v *yaml.Node, path, what string, visit func(name, path string, k, v *yaml.Node)) {
	if v.Kind == yaml.SequenceNode && len(v.Content) == 0 && !r.refused[v] {
		return // [] is what many write for "none", and can mean nothing else
	}
	ok := r.mapping(v, path, "a mapping from names to "+what+" ({} for none)", nil, func(name string, k, v *yaml.Node) {
		path := join(path, name)
		if first, again := p.named[path]; again {
			r.errs.add(r.of(k), "%s is already at %s", path, first)
			return
		}
		p.named[path] = r.of(k)
		visit(name, path, k, v)
	})
	if !ok {
		p.unsure[what] = true
	}
}

func (p *parser) protect(r *reader, path string, v *yaml.Node) {
	s, ok := r.text(v, path, "a unit (a glob) or a cgroup path that starts with /")
	if !ok {
		return
	}
	var err error
	if strings.HasPrefix(s, "/") {
		if err = checkCgroup(s); err == nil && isGlob(s) {
			err = fmt.Errorf("%s has a wildcard; a protected cgroup is one path (and everything below it)", show(s))
		}
	} else {
		err = checkUnit(s)
	}
	if err != nil {
		r.fail(v, path, "%v", err)
		return
	}
	p.file.protect = append(p.file.protect, placed[string]{s, r.of(v)})
}

func (p *parser) provider(r *reader, name, path string, k, v *yaml.Node) {
	d := &provider{placed: placed[string]{name, r.of(k)}}
	if name == OtherProvider {
		p.file.other = d
		r.mapping(v, path, "a mapping with limits",
			providerKeys(), func(key string, k, v *yaml.Node) {
				if key == "limits" {
					d.limits = r.limits(v, join(path, key), false)
					return
				}
				r.errs.add(r.of(k), "%s: other cannot have %s: it is every destination that no provider has; it may only have limits", path, key)
			})
		return
	}
	p.file.providers = append(p.file.providers, d)

	before := len(*r.errs)
	var protos []Proto
	var ports []PortRange
	var wide, named, unsure bool // unsure: there is an error in protocol
	var idle *yaml.Node
	var tooWides []finding
	ok := r.mapping(v, path, "a mapping with hosts or cidrs, and ports, protocol, limits",
		providerKeys(), func(key string, k, v *yaml.Node) {
			path := join(path, key)
			switch key {
			case "hosts":
				named, d.hostsAt = true, r.of(v)
				r.filled(v, path, "a list of host names", func(path string, v *yaml.Node) {
					host, ok := checked(r, v, path, "a host name", parseHost)
					if ok && !slices.Contains(d.hosts, host) {
						d.hosts = append(d.hosts, host)
					}
				})
			case "cidrs":
				named = true
				r.filled(v, path, "a list of prefixes such as 10.0.0.0/24", func(path string, v *yaml.Node) {
					prefix, ok := checked(r, v, path, "a prefix such as 10.0.0.0/24", parsePrefix)
					if ok && tooWide(prefix) {
						tooWides = append(tooWides, finding{r.of(v), fmt.Sprintf(
							"%s: %s is wider than /%d; write wide: true at the provider if it is meant", path, show(v.Value),
							map[bool]int{true: shortest4, false: shortest6}[prefix.Addr().Is4()])})
					}
					if ok {
						d.prefixes = append(d.prefixes, placed[netip.Prefix]{prefix, r.of(v)})
					}
				})
			case "ports":
				r.filled(v, path, "a list of ports (leave ports out for all)", func(path string, v *yaml.Node) {
					if first, last, ok := r.ports(v, path); ok {
						ports = append(ports, PortRange{First: first, Last: last})
					}
				})
			case "protocol":
				before := len(*r.errs)
				protos = r.protocols(v, path)
				unsure = len(*r.errs) > before
			case "idle":
				idle, d.idleAt = v, r.of(v)
				d.idle = r.time(v, path, wantIdle, MinIdle, MaxIdle)
			case "wide":
				wide, _ = r.boolean(v, path)
			case "limits":
				d.limits = r.limits(v, path, false)
			}
		})
	if ok && !named && len(*r.errs) == before { // not if it is only misspelt
		r.errs.add(r.of(k), "%s: needs hosts or cidrs: it would match nothing", path)
	}
	if idle != nil && !unsure && !slices.Contains(protos, UDP) {
		r.fail(idle, path, "idle without udp: it ends the slots of UDP sockets, and a TCP connection's slot ends with the connection; "+
			"write protocol: udp or [tcp, udp], or leave idle out")
	}
	if !wide {
		*r.errs = append(*r.errs, tooWides...)
	}
	if len(protos) == 0 {
		protos = []Proto{TCP}
	}
	if len(ports) == 0 {
		ports = []PortRange{{First: 0, Last: 65535}}
	}
	d.ports = portsOf(protos, ports)
}

func providerKeys() []string {
	return []string{"hosts", "cidrs", "ports", "protocol", "idle", "wide", "limits"}
}

// filled is a list that must have an item: an empty one could be read as none
// or as all.
func (r *reader) filled(v *yaml.Node, path, want string, visit func(path string, v *yaml.Node)) {
	if r.list(v, path, want, visit) && len(v.Content) == 0 {
		r.fail(v, path, "is an empty list; write %s", want)
	}
}

// checked reads a text in a notation of its own.
func checked[T any](r *reader, v *yaml.Node, path, want string, parse func(string) (T, error)) (T, bool) {
	var value T
	s, ok := r.text(v, path, want)
	if !ok {
		return value, false
	}
	value, err := parse(s)
	if err != nil {
		r.fail(v, path, "%v", err)
		return value, false
	}
	return value, true
}

func (r *reader) ports(v *yaml.Node, path string) (first, last uint16, ok bool) {
	if v.Kind != yaml.ScalarNode || r.refused[v] || v.ShortTag() == "!!null" {
		r.wrong(v, path, wantPort)
		return 0, 0, false
	}
	first, last, err := parsePorts(v.Value)
	if err != nil {
		r.fail(v, path, "%v", err)
		return 0, 0, false
	}
	return first, last, true
}

func (r *reader) protocols(v *yaml.Node, path string) []Proto {
	var protos []Proto
	one := func(path string, v *yaml.Node) {
		if s, ok := r.choice(v, path, []string{TCP.String(), UDP.String()}); ok {
			proto := TCP
			if s == UDP.String() {
				proto = UDP
			}
			protos = append(protos, proto)
		}
	}
	if v.Kind == yaml.SequenceNode {
		r.filled(v, path, "tcp, udp or [tcp, udp]", one)
	} else {
		one(path, v)
	}
	return protos
}

// limits reads a limit block. shares says whether a share of the provider's
// limit may stand in it.
func (r *reader) limits(n *yaml.Node, path string, shares bool) *block {
	b := &block{at: r.of(n), errno: DefaultErrno}
	before := len(*r.errs)
	var connections, errno *yaml.Node
	ok := r.mapping(n, path, "a limit block such as {connections: 20}", []string{"connections", "errno"},
		func(key string, k, v *yaml.Node) {
			switch key {
			case "connections":
				connections, b.at = v, r.of(v)
				b.limit, b.share = r.limit(v, join(path, key), shares)
			case "errno":
				errno = v
				if s, ok := r.choice(v, join(path, key), errnoNames()); ok {
					b.errno, _ = errnoByName(s)
				}
			}
		})
	switch {
	case !ok:
	case connections == nil && errno != nil:
		r.fail(errno, path, "errno without connections: there is no limit that could refuse with it")
	case connections == nil && len(*r.errs) == before:
		r.fail(n, path, "connections is missing; an absent limit is no block at all, or connections: unlimited")
	case errno != nil && b.limit == Unlimited && b.share == 0 && len(*r.errs) == before:
		r.fail(errno, path, "errno with connections: unlimited: nothing is refused with it")
	}
	b.bad = !ok || len(*r.errs) > before
	return b
}

var shareLike = regexp.MustCompile(`^[^%]*[0-9][^%]*%$`)

func (r *reader) limit(v *yaml.Node, path string, shares bool) (limit Limit, share uint32) {
	want := fmt.Sprintf("a plain number from 0 to %d, or unlimited", MaxLimit)
	if shares {
		want = fmt.Sprintf("a plain number from 0 to %d, a share of the provider's limit from 1%% to 100%%, or unlimited", MaxLimit)
	}
	if v.Kind == yaml.ScalarNode && !r.refused[v] {
		switch {
		case v.Value == "unlimited":
			return Unlimited, 0
		case shareLike.MatchString(v.Value) && !shares:
			r.fail(v, path, "%s: a share is one of a provider's limit, so it may stand only under providers of a tenant or feature; write %s", show(v.Value), want)
			return 0, 0
		case shareLike.MatchString(v.Value):
			pct, err := parsePercent(v.Value, 100, want)
			if err != nil {
				r.fail(v, path, "%v", err)
			}
			return 0, uint32(pct)
		}
	}
	n, _ := r.number(v, path, want, 0, uint64(MaxLimit))
	return Limit(n), 0
}

// pairs reads a mapping from providers to limit blocks.
func (r *reader) pairs(v *yaml.Node, path string) []pair {
	var pairs []pair
	r.mapping(v, path, "a mapping from providers to limit blocks", nil, func(name string, k, v *yaml.Node) {
		pairs = append(pairs, pair{placed[string]{name, r.of(k)}, r.limits(v, join(path, name), true)})
	})
	return pairs
}

func (p *parser) tenant(r *reader, name, path string, k, v *yaml.Node) {
	p.file.tenants = append(p.file.tenants, r.tenant(name, path, k, v))
}

// tenant reads a tenant, or what a feature says of one.
func (r *reader) tenant(name, path string, k, v *yaml.Node) *tenant {
	t := &tenant{placed: placed[string]{name, r.of(k)}}
	r.mapping(v, path, "a mapping with limits and providers ({} for neither)", []string{"limits", "providers"},
		func(key string, k, v *yaml.Node) {
			switch path := join(path, key); key {
			case "limits":
				t.limits = r.limits(v, path, false)
			case "providers":
				t.providers = r.pairs(v, path)
			}
		})
	return t
}

func (p *parser) feature(r *reader, name, path string, k, v *yaml.Node) {
	f := &feature{placed: placed[string]{name, r.of(k)}, class: Background, classless: true}
	var cpu, memory, pids *yaml.Node
	if name == DefaultFeature {
		p.file.deflt = f
	} else {
		p.file.features = append(p.file.features, f)
	}
	r.mapping(v, path, "a mapping ({} if there is nothing to say)",
		[]string{"owner", "class", "match", "cpu", "memory", "pids", "limits", "providers", "tenants"},
		func(key string, k, v *yaml.Node) {
			path := join(path, key)
			if name == DefaultFeature && !slices.Contains([]string{"owner", "limits", "providers"}, key) {
				r.errs.add(r.of(k), "%s: default cannot have %s: it is everything that no feature matches, "+
					"sshd, the kubelet and the database too; it may have limits, providers and owner", join("features", name), key)
				return
			}
			switch key {
			case "owner":
				f.owner, _ = r.text(v, path, "a text, such as a team's name")
			case "class":
				f.classless = false
				if s, ok := r.choice(v, path, []string{string(Realtime), string(Timely), string(Batch), string(Background)}); ok {
					f.class = Class(s)
				}
			case "match":
				r.list(v, path, "a list of mappings such as {unit: chat.service}", func(path string, v *yaml.Node) {
					if item, ok := r.match(v, path); ok {
						f.match = append(f.match, item)
					}
				})
			case "cpu":
				cpu = v
			case "memory":
				memory = v
			case "pids":
				pids = v
			case "limits":
				f.limits = r.limits(v, path, false)
			case "providers":
				f.providers = r.pairs(v, path)
			case "tenants":
				r.mapping(v, path, "a mapping from tenants to limits and providers", nil, func(name string, k, v *yaml.Node) {
					f.tenants = append(f.tenants, r.tenant(name, join(path, name), k, v))
				})
			}
		})
	if name == DefaultFeature {
		return
	}
	f.cpu = defaultCPU(f.class)
	if cpu != nil {
		r.cpu(f, cpu, join(path, "cpu"))
	}
	if memory != nil {
		r.memory(f, memory, join(path, "memory"))
	}
	if pids != nil {
		r.pids(f, pids, join(path, "pids"))
	}
}

// The weights of the classes (design by measurement: a handler beside eight
// parsers on one CPU reaches what SCHED_FIFO gets with 10000 to 1 or cpu.idle,
// and does not with 1000 to 10).
func defaultCPU(c Class) *CPU {
	switch c {
	case Realtime:
		return &CPU{Weight: 10000}
	case Timely:
		return &CPU{Weight: 1000}
	case Batch:
		return &CPU{Weight: 1}
	}
	return &CPU{Idle: true}
}

// cpu reads what a feature says of CPU over its class.
func (r *reader) cpu(f *feature, v *yaml.Node, path string) {
	const want = "none, or a mapping with weight, idle, max, period, burst, cpus, exclusive, uclamp_min, uclamp_max"
	if v.Kind == yaml.ScalarNode {
		if s, ok := r.text(v, path, want); ok && s != "none" {
			r.fail(v, path, "%s is not %s", show(s), want)
		} else if ok {
			f.cpu = nil
		}
		return
	}
	var idleAt, weightAt, periodAt, burstAt, exclusiveAt, minAt *yaml.Node
	var idle, exclusive, noCPUs bool
	var weight, pct, periodUsec, burstUsec, clampMin, clampMax uint64
	var cpus string
	keys := []string{"weight", "idle", "max", "period", "burst", "cpus", "exclusive", "uclamp_min", "uclamp_max", "per"}
	r.mapping(v, path, want, keys, func(key string, k, v *yaml.Node) {
		switch path := join(path, key); key {
		case "weight":
			if n, ok := r.number(v, path, "a plain number from 1 to 10000", 1, 10000); ok {
				weight, weightAt = n, v
			}
		case "idle":
			if b, ok := r.boolean(v, path); ok {
				idle, idleAt = b, v
			}
		case "max":
			f.maxAt = r.of(v)
			pct = r.united(v, path, wantCPUPercent, parseCPUPercent)
		case "period":
			periodAt = v
			periodUsec = uint64(r.time(v, path, wantPeriod, minPeriod, maxPeriod) / time.Microsecond)
		case "burst":
			burstAt = v
			burstUsec = uint64(r.time(v, path, wantBurst, time.Millisecond, maxBurst) / time.Microsecond)
		case "cpus":
			f.cpusAt = r.of(v)
			cpus = r.cpus(v, path)
			noCPUs = cpus == ""
		case "exclusive":
			exclusiveAt = v
			exclusive, _ = r.boolean(v, path)
		case "uclamp_min":
			minAt = v
			clampMin = r.united(v, path, wantUclamp, parseUclamp)
		case "uclamp_max":
			clampMax = r.united(v, path, wantUclamp, parseUclamp)
		case "per":
			f.cpuPerCgroup = r.per(v, path)
		}
	})
	switch {
	case idle && weightAt != nil:
		r.fail(idleAt, path, "idle: true and a weight exclude each other: an idle cgroup has no weight")
	case idle:
		f.cpu = &CPU{Idle: true}
	case weightAt != nil:
		f.cpu = &CPU{Weight: uint32(weight)}
	case idleAt != nil && f.cpu.Idle:
		r.fail(idleAt, path, "idle: false needs a weight: class %s has none but idle", f.class)
	}
	switch {
	case periodAt != nil && pct == 0:
		r.fail(periodAt, path, "period without a max: there is no quota that it could be the period of")
	case pct > 0:
		if periodAt == nil {
			periodUsec = cpuPeriodUsec
		}
		quota := pct * periodUsec / 100
		if quota < minQuotaUsec && periodUsec > 0 {
			r.fail(periodAt, path, "max of %d%% in this period is %d us; the kernel's smallest quota is %d us, so write a longer period", pct, quota, minQuotaUsec)
		}
		if burstUsec > quota && quota > 0 {
			r.fail(burstAt, path, "burst of %d us is above the quota, %d us a period, and the kernel takes none that is; write at most that", burstUsec, quota)
		}
		f.cpu.MaxUsec, f.cpu.PeriodUsec, f.cpu.BurstUsec = quota, periodUsec, burstUsec
	}
	switch {
	case burstAt != nil && pct == 0:
		r.fail(burstAt, path, "burst without a max: there is no quota that could be left over")
	case exclusive && cpus == "" && !noCPUs:
		r.fail(exclusiveAt, path, "exclusive without cpus: name the CPUs that are this feature's own")
	case exclusive && strings.HasPrefix(cpus, allBut):
		r.fail(exclusiveAt, path, "exclusive with %s: name the CPUs that are this feature's own, so that others keep the rest of any node", show(cpus))
	}
	if clampMin > clampMax && clampMax > 0 {
		r.fail(minAt, path, "uclamp_min is above uclamp_max, which holds: write at most %d%%", clampMax)
	}
	f.cpu.CPUs, f.cpu.Exclusive = cpus, exclusive
	f.cpu.UclampMin, f.cpu.UclampMax = uint32(clampMin), uint32(clampMax)
}

// cpus reads a list of CPUs. YAML takes one alone for a number.
func (r *reader) cpus(v *yaml.Node, path string) string {
	if v.Kind != yaml.ScalarNode || r.refused[v] || v.ShortTag() == "!!null" {
		r.wrong(v, path, wantCPUs)
		return ""
	}
	list, err := parseCPUs(v.Value)
	if err != nil {
		r.fail(v, path, "%v", err)
	}
	return list
}

// united reads a value that has a unit. YAML takes one without for a number.
func (r *reader) united(v *yaml.Node, path, want string, parse func(string) (uint64, error)) uint64 {
	if v.Kind == yaml.ScalarNode && decimal.MatchString(v.Value) && !r.refused[v] {
		r.fail(v, path, "%s is missing its unit; write %s", show(v.Value), want)
		return 0
	}
	value, _ := checked(r, v, path, want, parse)
	return value
}

// time reads a time. YAML takes one without unit for a number.
func (r *reader) time(v *yaml.Node, path, want string, least, most time.Duration) time.Duration {
	if v.Kind != yaml.ScalarNode || r.refused[v] || v.ShortTag() == "!!null" {
		r.wrong(v, path, want)
		return 0
	}
	d, err := parseTime(v.Value, want, least, most)
	if err != nil {
		r.fail(v, path, "%v", err)
	}
	return d
}

// per reads what a limit applies to. Each cgroup is all there is.
func (r *reader) per(v *yaml.Node, path string) bool {
	s, ok := r.text(v, path, "cgroup")
	if ok && s != "cgroup" {
		r.fail(v, path, "%s is not cgroup, which is all there is: a limit applies to each cgroup of a compartment", show(s))
	}
	return ok && s == "cgroup"
}

func (r *reader) memory(f *feature, v *yaml.Node, path string) {
	var m Memory
	r.mapping(v, path, "a mapping with high and max", []string{"high", "max", "per"}, func(key string, k, v *yaml.Node) {
		switch path := join(path, key); key {
		case "high":
			m.High = r.united(v, path, wantSize, parseSize)
		case "max":
			m.Max = r.united(v, path, wantSize, parseSize)
		case "per":
			f.memoryPerCgroup = r.per(v, path)
		}
	})
	f.memoryAt = r.of(v)
	if m.High > m.Max && m.Max > 0 {
		r.fail(v, path, "high is above max: processes would be killed at max before high slows them down")
	}
	if m != (Memory{}) {
		f.memory = &m
	}
}

func (r *reader) pids(f *feature, v *yaml.Node, path string) {
	max := uint64(0)
	r.mapping(v, path, "a mapping with max", []string{"max", "per"}, func(key string, k, v *yaml.Node) {
		switch path := join(path, key); key {
		case "max":
			if v.Kind != yaml.ScalarNode || v.Value != "max" {
				max, _ = r.number(v, path, "a plain number of processes and threads from 1 to 4194304, or max", 1, maxPids)
			}
		case "per":
			f.pidsPerCgroup = r.per(v, path)
		}
	})
	f.pidsAt = r.of(v)
	if max != 0 {
		f.pids = &Pids{Max: max}
	}
}

// match reads one item.
func (r *reader) match(n *yaml.Node, path string) (matchItem, bool) {
	item := matchItem{at: r.of(n)}
	item.Place = item.at.public()
	before := len(*r.errs)
	keys := 0
	set := func(field *string, v *yaml.Node, path, want string, check func(string) error) {
		keys++
		*field, _ = checked(r, v, path, want, func(s string) (string, error) { return s, check(s) })
	}
	ok := r.mapping(n, path, "a mapping such as {unit: chat.service}",
		[]string{"unit", "cgroup", "exe", "cmdline", "user", "container", "tenant"}, func(key string, k, v *yaml.Node) {
			switch path := join(path, key); key {
			case "unit":
				set(&item.Unit, v, path, "a unit such as chat.service (a glob)", checkUnit)
			case "cgroup":
				set(&item.Cgroup, v, path, "a path below the cgroup root (a glob)", func(s string) error {
					if err := checkCgroup(s); err != nil {
						return err
					}
					return checkGlob(s)
				})
			case "exe":
				set(&item.Exe, v, path, "the path of an executable (a glob)", checkPathGlob)
			case "cmdline":
				set(&item.Cmdline, v, path, "a regular expression", checkRegexp)
			case "user":
				keys++
				item.User = r.user(v, path)
			case "container":
				keys++
				item.Container, item.containerAt = r.container(v, path)
			case "tenant":
				item.tenantAt = r.of(v)
				item.Tenant, _ = checked(r, v, path, "the name of a tenant", func(s string) (string, error) {
					if !validName.MatchString(s) {
						return "", fmt.Errorf("%s is not a name: a name is 1 to 40 of a-z, 0-9 and _", show(s))
					}
					return s, nil
				})
			}
		})
	if ok && keys == 0 && len(*r.errs) == before {
		r.fail(n, path, "needs at least one of unit, cgroup, exe, cmdline, user, container: it would match everything")
	}
	if item.Container != nil && item.OfProcess() && len(*r.errs) == before {
		r.fail(n, path, "container goes with unit, cgroup and tenant, not with exe, cmdline or user: a container is adopted as a whole, and no process is moved out of one")
	}
	return item, ok && len(*r.errs) == before
}

func checkRegexp(s string) error {
	if _, err := regexp.Compile(s); err != nil {
		return fmt.Errorf("%s is not a regular expression (RE2): %s", show(s),
			strings.TrimPrefix(err.Error(), "error parsing regexp: "))
	}
	return nil
}

// user reads a user's name or number.
func (r *reader) user(v *yaml.Node, path string) string {
	const want = "a user's name or number"
	if v.Kind == yaml.ScalarNode && v.ShortTag() == "!!int" {
		// (uid_t)-1 means "no user" to the kernel.
		if _, ok := r.number(v, path, "a user's name or plain number from 0 to 4294967294", 0, 1<<32-2); ok {
			return v.Value
		}
		return ""
	}
	s, _ := checked(r, v, path, want, func(s string) (string, error) {
		if !userName.MatchString(s) && !decimal.MatchString(s) {
			return "", fmt.Errorf("%s is not %s", show(s), want)
		}
		return s, nil
	})
	return s
}

// The keys of container, each a glob.
var containerKeys = []string{"name", "image", "label", "compose_service"}

// container reads the globs and where each stands.
func (r *reader) container(v *yaml.Node, path string) (map[string]string, map[string]place) {
	globs, at := map[string]string{}, map[string]place{}
	ok := r.mapping(v, path, "a mapping with name, image, label or compose_service", containerKeys, func(key string, k, v *yaml.Node) {
		s, ok := checked(r, v, join(path, key), "a glob", func(s string) (string, error) { return s, checkGlob(s) })
		if ok && key == "label" && !strings.Contains(s, "=") {
			r.fail(v, join(path, key), "%s has no =; write \"key=value\", or %q for any value", show(s), s+"=*")
		}
		globs[key], at[key] = s, r.of(v)
	})
	if ok && len(v.Content) == 0 {
		r.fail(v, path, "is empty; write one of %s", strings.Join(containerKeys, ", "))
	}
	return globs, at
}
