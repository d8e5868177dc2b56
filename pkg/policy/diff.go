package policy

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// ChangeKind says what happens to the thing that a Change names.
type ChangeKind string

// The three kinds.
const (
	Added   ChangeKind = "add"
	Removed ChangeKind = "remove"
	Changed ChangeKind = "change"
)

// Change is one difference between two plans, in words for people and tools.
type Change struct {
	Kind ChangeKind `json:"kind"`
	// What is the sort of thing: mode, exhausted, protect, provider, hosts, idle,
	// destination, tenant, feature, order (of the features), owner, class, match,
	// cpu, memory, pids or limit.
	What string `json:"what"`
	// Name is which one: a name, a prefix, or for a limit its scope and names,
	// "feature_provider chat/deepseek". It is empty for mode,
	// exhausted and order.
	Name string `json:"name,omitempty"`
	// Old and New are its values, "" where there is none. A limit is a number or
	// "unlimited", and has its errno behind it unless that is the default.
	Old string `json:"old,omitempty"`
	New string `json:"new,omitempty"`
}

// String is one line: "change limit feature chat: 20 -> 25".
func (c Change) String() string {
	line := string(c.Kind) + " " + c.What
	if c.Name != "" {
		line += " " + c.Name
	}
	switch {
	case c.Kind == Changed:
		line += ": " + c.Old + " -> " + c.New
	case c.Old+c.New != "":
		line += ": " + c.Old + c.New
	}
	return line
}

// whats is the order of changes.
func whats() []string {
	return []string{"mode", "exhausted", "protect", "provider", "hosts", "idle", "destination", "tenant", "feature", "order",
		"owner", "class", "match", "cpu", "memory", "pids", "limit"}
}

// Diff is everything in which a new plan differs from the old one, sorted by
// What in the order above, then by Name (destinations by prefix, limits by key).
// old is nil if no plan is in force. Two plans of one Hash have no difference.
func Diff(old, new *Plan) []Change {
	if old == nil {
		old = &Plan{}
	}
	var changes []Change
	for _, what := range whats() {
		before, after := facts(old, what), facts(new, what)
		if what == "order" {
			before, after = orders(old, new)
		}
		both := maps.Clone(before)
		maps.Copy(both, after)
		for _, name := range slices.SortedFunc(maps.Keys(both), compareFacts) {
			o, had := before[name]
			n, has := after[name]
			c := Change{What: what, Name: name.text, Old: o, New: n}
			switch {
			case !had:
				c.Kind = Added
			case !has:
				c.Kind = Removed
			case o != n:
				c.Kind = Changed
			default:
				continue
			}
			changes = append(changes, c)
		}
	}
	return changes
}

// fact names one thing that a plan says; order sorts before text.
type fact struct{ order, text string }

func compareFacts(a, b fact) int {
	return cmp.Or(cmp.Compare(a.order, b.order), cmp.Compare(a.text, b.text))
}

// facts is what a plan says of one sort of thing, as text.
func facts(p *Plan, what string) map[fact]string {
	said := map[fact]string{}
	say := func(name, value string) { said[fact{text: name}] = value }
	for _, f := range p.Features {
		switch what {
		case "feature":
			say(f.Name, "")
		case "owner":
			if f.Owner != "" {
				say(f.Name, f.Owner)
			}
		case "class":
			say(f.Name, string(f.Class))
		case "match":
			if len(f.Match) > 0 {
				say(f.Name, matchText(f.Match))
			}
		case "cpu":
			if f.CPU != nil {
				say(f.Name, f.CPU.String())
			}
		case "memory":
			if f.Memory != nil {
				say(f.Name, f.Memory.String())
			}
		case "pids":
			if f.Pids != nil {
				say(f.Name, f.Pids.String())
			}
		}
	}
	switch what {
	case "mode":
		if p.Mode != "" {
			say("", string(p.Mode))
		}
	case "exhausted":
		if p.Mode != "" { // a plan of an earlier release says nothing else
			say("", string(cmp.Or(p.Exhausted, ExhaustedAllow)))
		}
	case "protect":
		for _, s := range p.Protect {
			say(s, "")
		}
	case "provider":
		for _, d := range p.Providers {
			say(d.Name, "")
		}
	case "hosts":
		for _, d := range p.Providers {
			if len(d.Hosts) > 0 {
				say(d.Name, strings.Join(d.Hosts, " "))
			}
		}
	case "idle":
		for _, d := range p.Providers {
			if d.Idle > 0 {
				say(d.Name, timeText(d.Idle))
			}
		}
	case "destination":
		for _, d := range p.Destinations {
			order := fmt.Sprintf("%3d %x %3d", d.Prefix.Addr().BitLen(), d.Prefix.Addr().AsSlice(), d.Prefix.Bits())
			said[fact{order, d.Prefix.String()}] = p.portsText(d.Ports)
		}
	case "tenant":
		for _, t := range p.Tenants {
			say(t, "")
		}
	case "limit":
		for _, b := range p.Bulkheads {
			// Those that every plan has, without a limit, say nothing.
			implied := b.Limit == Unlimited && b.Provider != OtherProvider &&
				(b.Scope == ScopeFeature || b.Scope == ScopeTenant || b.Scope == ScopeProvider)
			if implied {
				continue
			}
			value := b.Limit.String()
			if b.Errno != DefaultErrno && b.Limit != Unlimited {
				value += " " + ErrnoName(b.Errno)
			}
			said[fact{strconv.Itoa(int(b.Scope)), b.Key.String()}] = value
		}
	}
	return said
}

// orders is the order of the features that both plans have, in which they match:
// that one is added or removed is told by itself.
func orders(old, new *Plan) (before, after map[fact]string) {
	order := func(p, other *Plan) map[fact]string {
		var names []string
		for _, f := range p.Features {
			if slices.ContainsFunc(other.Features, func(o Feature) bool { return o.Name == f.Name }) {
				names = append(names, f.Name)
			}
		}
		return map[fact]string{{}: strings.Join(names, " ")}
	}
	return order(old, new), order(new, old)
}

// portsText names the providers: their numbers differ between plans.
func (p *Plan) portsText(ports []PortRange) string {
	if len(ports) == 0 {
		return "nothing"
	}
	var texts []string
	for _, r := range ports {
		texts = append(texts, r.String()+" "+p.Providers[r.Provider].Name)
	}
	return strings.Join(texts, ", ")
}

// String is the values as a policy writes them: "weight 10000, max 150%".
func (c *CPU) String() string {
	text := "idle"
	if !c.Idle {
		text = fmt.Sprintf("weight %d", c.Weight)
	}
	if c.MaxUsec > 0 && c.PeriodUsec > 0 {
		text += fmt.Sprintf(", max %d%% of %dms", c.MaxUsec*100/c.PeriodUsec, c.PeriodUsec/1000)
	}
	if c.BurstUsec > 0 {
		text += fmt.Sprintf(", burst %dms", c.BurstUsec/1000)
	}
	if c.CPUs != "" {
		text += ", cpus " + c.CPUs
	}
	if c.Exclusive {
		text += " exclusive"
	}
	if c.UclampMin > 0 {
		text += fmt.Sprintf(", uclamp_min %d%%", c.UclampMin)
	}
	if c.UclampMax > 0 {
		text += fmt.Sprintf(", uclamp_max %d%%", c.UclampMax)
	}
	return text
}

// String is the values as a policy writes them: "high 2Gi, max 3Gi".
func (m *Memory) String() string {
	return "high " + sizeText(m.High) + ", max " + sizeText(m.Max)
}

// String is the value as a policy writes it: "max 500".
func (p *Pids) String() string { return "max " + strconv.FormatUint(p.Max, 10) }

func sizeText(bytes uint64) string {
	if bytes == 0 {
		return "max"
	}
	units := []string{"", "Ki", "Mi", "Gi", "Ti"}
	i := 0
	for i < len(units)-1 && bytes%1024 == 0 {
		bytes, i = bytes/1024, i+1
	}
	return strconv.FormatUint(bytes, 10) + units[i]
}

// String is the item as a policy writes it: "{unit: chat.service, tenant: free}".
func (m Match) String() string {
	var keys []string
	for _, k := range []struct{ key, value string }{
		{"unit", m.Unit}, {"cgroup", m.Cgroup}, {"exe", m.Exe}, {"cmdline", m.Cmdline}, {"user", m.User},
	} {
		if k.value != "" {
			keys = append(keys, k.key+": "+k.value)
		}
	}
	for _, k := range slices.Sorted(maps.Keys(m.Container)) {
		keys = append(keys, "container."+k+": "+m.Container[k])
	}
	if m.Tenant != "" {
		keys = append(keys, "tenant: "+m.Tenant)
	}
	return "{" + strings.Join(keys, ", ") + "}"
}

func matchText(items []Match) string {
	var texts []string
	for _, m := range items {
		texts = append(texts, m.String())
	}
	return strings.Join(texts, " ")
}
