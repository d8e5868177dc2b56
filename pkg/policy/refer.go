package policy

import (
	"slices"
	"strings"
)

// refer looks at what only the whole policy shows: names that nothing declares,
// and shares of limits that stand elsewhere.
func (p *parser) refer() {
	p.limits = map[string]*block{}
	for _, d := range p.file.providers {
		p.limits[d.value] = d.limits
	}
	if p.file.other != nil {
		p.limits[OtherProvider] = p.file.other.limits
	}
	for _, t := range p.file.tenants {
		p.pairs(join("tenants", t.value+".providers"), t.providers)
	}
	for _, f := range p.all() {
		path := join("features", f.value)
		p.pairs(join(path, "providers"), f.providers)
		for _, t := range f.tenants {
			p.reference("tenants", join(path, "tenants"), t.placed)
			p.pairs(join(path, "tenants."+t.value+".providers"), t.providers)
		}
		for _, m := range f.match {
			if m.Tenant != "" {
				p.reference("tenants", join(path, "match"), placed[string]{m.Tenant, m.tenantAt})
			}
		}
	}
	p.exclusive()
}

// exclusive checks that no feature names a CPU that is another's own. One that says
// "not 0" names none.
func (p *parser) exclusive() {
	for _, own := range p.file.features {
		if own.cpu == nil || !own.cpu.Exclusive {
			continue
		}
		for _, f := range p.file.features {
			if f == own || f.cpu == nil || f.cpu.CPUs == "" || f.cpu.Exclusive && comparePlaces(f.cpusAt, own.cpusAt) < 0 {
				continue
			}
			if both := f.cpu.On(nil).Both(own.cpu.On(nil)); len(both) > 0 {
				p.errs.add(f.cpusAt, "%s.cpu.cpus: %s is feature %s's own (exclusive, at %s); leave it out here, or there",
					join("features", f.value), both, own.value, own.cpusAt)
			}
		}
	}
}

func (p *parser) all() []*feature {
	all := slices.Clone(p.file.features)
	if p.file.deflt != nil {
		all = append(all, p.file.deflt)
	}
	return all
}

// reference checks that a name is declared. A name that cannot be one, and any
// name while the declarations could not be read, has its error already.
func (p *parser) reference(what, path string, ref placed[string]) bool {
	if _, ok := p.named[join(what, ref.value)]; ok || what == "providers" && ref.value == OtherProvider {
		return true
	}
	if p.unsure[what] || !validName.MatchString(ref.value) {
		return false
	}
	var known []string
	for n := range p.named {
		if rest, ok := strings.CutPrefix(n, what+"."); ok {
			known = append(known, rest)
		}
	}
	slices.Sort(known)
	p.errs.add(ref.at, "%s: there is no %s %s%s", path, strings.TrimSuffix(what, "s"), show(ref.value), didYouMean(ref.value, known))
	return false
}

func (p *parser) pairs(path string, pairs []pair) {
	for _, x := range pairs {
		if p.reference("providers", path, x.placed) && x.block.share > 0 && !x.block.bad {
			p.share(join(path, x.value), x)
		}
	}
}

// share turns a share into a number, rounded down.
func (p *parser) share(path string, x pair) {
	limits := p.limits[x.value]
	switch {
	case limits != nil && limits.bad:
		return // it has an error already
	case limits == nil || limits.limit == Unlimited:
		p.errs.add(x.block.at, "%s: %d%% of a provider without a limit; write a number, or give %s limits", path, x.block.share, x.value)
		return
	}
	n := uint64(limits.limit) * uint64(x.block.share) / 100
	if n == 0 {
		p.errs.add(x.block.at, "%s: %d%% of %d connections is none; write connections: 0 if that is meant, or a larger share", path, x.block.share, limits.limit)
		return
	}
	x.block.limit = Limit(n)
}
