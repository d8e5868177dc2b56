package policy

import (
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"
)

// The largest plan. The numbers bound the time of a reload and the memory of the
// maps that are built from a plan; a policy that needs more is an error that
// names the limit.
const (
	MaxProviders    = 1024 // with other
	MaxCompartments = 4096
	MaxRoutes       = 16384
	MaxBulkheads    = 16384
	MaxDestinations = 65536
	MaxPortRanges   = 262144 // over all destinations
)

// Check is Load and Compile: all that there is to say of a policy.
func Check(path string) (*Plan, Warnings, error) {
	f, err := Load(path)
	if err != nil {
		return nil, nil, err
	}
	return Compile(f)
}

// Compile turns a policy into a Plan. What Load and Parse return is right, so
// the error is only ever that the plan would be too large; it is Errors.
func Compile(f *File) (*Plan, Warnings, error) {
	plan, err := f.plan()
	if err != nil {
		return nil, nil, Errors{{File: f.start.file, Line: f.start.line, Col: f.start.col, Msg: err.Error()}}
	}
	return plan, f.warnings(), nil
}

func tooMany(what string, n, most int) error {
	return fmt.Errorf("the policy has too many %s: %d, and the most is %d", what, n, most)
}

func (f *File) plan() (*Plan, error) {
	p := &Plan{Mode: f.mode.value, Exhausted: f.exhausted.value, Tenants: []string{}}
	if p.Exhausted == "" {
		p.Exhausted = ExhaustedAllow
	}
	p.Protect = builtInProtect()
	for _, s := range f.protect {
		p.Protect = append(p.Protect, s.value)
	}
	slices.Sort(p.Protect)
	p.Protect = slices.Compact(p.Protect)

	p.Providers = []Provider{{Name: OtherProvider}}
	for _, d := range f.providers {
		one := Provider{
			Name:  d.value,
			Hosts: d.hosts,
			UDP:   slices.ContainsFunc(d.ports, func(r PortRange) bool { return r.Proto == UDP }),
		}
		if len(d.hosts) > 0 {
			one.Place = d.hostsAt.public()
		}
		if one.UDP {
			one.Idle = cmp.Or(d.idle, DefaultIdle)
		}
		p.Providers = append(p.Providers, one)
	}
	for _, t := range f.tenants {
		p.Tenants = append(p.Tenants, t.value)
	}
	slices.Sort(p.Tenants)

	compartments := 1 + len(f.features)*(1+len(p.Tenants))
	for _, c := range []struct {
		what    string
		n, most int
	}{
		{"providers", len(p.Providers), MaxProviders},
		{"compartments (each feature, and each feature with each tenant)", compartments, MaxCompartments},
		{"routes (compartments times providers)", compartments * len(p.Providers), MaxRoutes},
	} {
		if c.n > c.most {
			return nil, tooMany(c.what, c.n, c.most)
		}
	}

	deflt := Feature{Name: DefaultFeature, Class: Background}
	if f.deflt != nil {
		deflt.Owner = f.deflt.owner
	}
	p.Features = []Feature{deflt}
	p.Compartments = []Compartment{{Feature: DefaultFeature, Class: Background}}
	for _, d := range f.features {
		feature := Feature{Name: d.value, Owner: d.owner, Class: d.class, CPU: d.cpu, Memory: d.memory, Pids: d.pids}
		for _, m := range d.match {
			feature.Match = append(feature.Match, m.Match)
		}
		p.Features = append(p.Features, feature)
		slice := ParentSlice + "/bulkhead-" + d.value + ".slice"
		p.Compartments = append(p.Compartments, Compartment{Feature: d.value, Class: d.class, Slice: slice})
		for _, t := range p.Tenants {
			p.Compartments = append(p.Compartments, Compartment{
				Feature: d.value, Tenant: t, Class: d.class,
				Slice: slice + "/bulkhead-" + d.value + "-" + t + ".slice",
			})
		}
	}

	p.Bulkheads = f.bulkheads()
	if n := len(p.Bulkheads); n > MaxBulkheads {
		return nil, tooMany("bulkheads", n, MaxBulkheads)
	}
	p.Routes = routes(p.Compartments, p.Providers, p.Bulkheads)

	var err error
	if p.Destinations, err = destinations(f.providers, MaxDestinations, MaxPortRanges); err != nil {
		return nil, err
	}
	p.Hash, err = hash(p)
	return p, err
}

// bulkheads are one for every limit block, and one for every feature, tenant
// and provider also without: there is always something to count on. other has
// one only if the policy says so.
func (f *File) bulkheads() []Bulkhead {
	var all []Bulkhead
	add := func(k Key, b *block) {
		if b != nil {
			all = append(all, Bulkhead{Key: k, Limit: b.limit, Errno: b.errno})
		} else {
			all = append(all, Bulkhead{Key: k, Limit: Unlimited, Errno: DefaultErrno})
		}
	}
	for _, d := range f.providers {
		add(Key{Scope: ScopeProvider, Provider: d.value}, d.limits)
	}
	if f.other != nil && f.other.limits != nil {
		add(Key{Scope: ScopeProvider, Provider: OtherProvider}, f.other.limits)
	}
	for _, t := range f.tenants {
		add(Key{Scope: ScopeTenant, Tenant: t.value}, t.limits)
		for _, x := range t.providers {
			add(Key{Scope: ScopeTenantProvider, Tenant: t.value, Provider: x.value}, x.block)
		}
	}
	features := f.features
	if f.deflt == nil {
		add(Key{Scope: ScopeFeature, Feature: DefaultFeature}, nil)
	} else {
		features = append(slices.Clone(features), f.deflt)
	}
	for _, d := range features {
		add(Key{Scope: ScopeFeature, Feature: d.value}, d.limits)
		for _, x := range d.providers {
			add(Key{Scope: ScopeFeatureProvider, Feature: d.value, Provider: x.value}, x.block)
		}
		for _, t := range d.tenants {
			if t.limits != nil {
				add(Key{Scope: ScopeFeatureTenant, Feature: d.value, Tenant: t.value}, t.limits)
			}
			for _, x := range t.providers {
				add(Key{Scope: ScopeFeatureTenantProvider, Feature: d.value, Tenant: t.value, Provider: x.value}, x.block)
			}
		}
	}
	slices.SortFunc(all, func(a, b Bulkhead) int { return a.Key.Compare(b.Key) })
	return all
}

// Compare orders keys by scope, feature, tenant and provider.
func (k Key) Compare(other Key) int {
	return cmp.Or(cmp.Compare(k.Scope, other.Scope), cmp.Compare(k.Feature, other.Feature),
		cmp.Compare(k.Tenant, other.Tenant), cmp.Compare(k.Provider, other.Provider))
}

// keys are the seven bulkheads that can be on a route, in its order; without a
// tenant those of tenants are missing.
func keys(c Compartment, provider string) []Key {
	if c.Tenant == "" {
		return []Key{
			{Scope: ScopeFeatureProvider, Feature: c.Feature, Provider: provider},
			{Scope: ScopeFeature, Feature: c.Feature},
			{Scope: ScopeProvider, Provider: provider},
		}
	}
	return []Key{
		{Scope: ScopeFeatureTenantProvider, Feature: c.Feature, Tenant: c.Tenant, Provider: provider},
		{Scope: ScopeFeatureProvider, Feature: c.Feature, Provider: provider},
		{Scope: ScopeTenantProvider, Tenant: c.Tenant, Provider: provider},
		{Scope: ScopeFeatureTenant, Feature: c.Feature, Tenant: c.Tenant},
		{Scope: ScopeFeature, Feature: c.Feature},
		{Scope: ScopeTenant, Tenant: c.Tenant},
		{Scope: ScopeProvider, Provider: provider},
	}
}

func routes(compartments []Compartment, providers []Provider, bulkheads []Bulkhead) []Route {
	index := make(map[Key]uint32, len(bulkheads))
	for i, b := range bulkheads {
		index[b.Key] = uint32(i)
	}
	all := make([]Route, 0, len(compartments)*len(providers))
	for c, compartment := range compartments {
		for p, provider := range providers {
			route := Route{Compartment: uint32(c), Provider: uint32(p)}
			named := p != 0 // a limit block names the provider for this route
			for _, k := range keys(compartment, provider.Name) {
				if i, ok := index[k]; ok {
					route.Holds = append(route.Holds, i)
					named = named || k.Provider != ""
				}
			}
			if !named {
				route.Holds, route.CountOnly = nil, true
			}
			all = append(all, route)
		}
	}
	return all
}

// hash is of the plan's JSON without a hash.
func hash(p *Plan) (string, error) {
	unnamed := *p
	unnamed.Hash = ""
	text, err := json.Marshal(&unnamed)
	if err != nil {
		return "", fmt.Errorf("hash of the plan: %w", err)
	}
	return fmt.Sprintf("sha256:%x", sha256.Sum256(text)), nil
}

// FindCompartment is the id of a feature's compartment, or, with a tenant, of
// the tenant's in it. The default feature has none with tenants.
func (p *Plan) FindCompartment(feature, tenant string) (id uint32, ok bool) {
	i := slices.IndexFunc(p.Compartments, func(c Compartment) bool { return c.Feature == feature && c.Tenant == tenant })
	return uint32(max(i, 0)), i >= 0
}

// FindProvider is the index of a provider.
func (p *Plan) FindProvider(name string) (index uint32, ok bool) {
	i := slices.IndexFunc(p.Providers, func(d Provider) bool { return d.Name == name })
	return uint32(max(i, 0)), i >= 0
}

// Route is the route of a compartment to a provider, both of this plan: an id
// of another one may panic. The caller must not change what it holds.
func (p *Plan) Route(compartment, provider uint32) Route {
	return p.Routes[int(compartment)*len(p.Providers)+int(provider)]
}
