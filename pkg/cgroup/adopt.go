package cgroup

import (
	"path"
	"slices"
	"strings"

	"bulkhead/pkg/policy"
)

// Adopted is an existing cgroup that belongs to a compartment: it and
// everything below it, down to the next adopted cgroup.
type Adopted struct {
	Compartment uint32 // index into Plan.Compartments
	Cgroup
}

// Adopt returns the cgroups of a walk that the plan's match items name, sorted
// as the walk is. Only items whose keys are all about cgroups (unit, cgroup, container)
// take part: the others are for a Placer. The first item that matches wins, in
// the order of the file; containers are those that a ContainerFinder has found. A cgroup is left out if its nearest adopted ancestor belongs to the
// same compartment, which covers it. The tree's root, our own slices, and what
// is Protected, at and below, are never adopted: a wide glob must neither lock
// anybody out of sshd nor give it the values of a batch job.
func Adopt(plan *policy.Plan, all []Cgroup, containers Containers) []Adopted {
	items := slices.DeleteFunc(itemsOf(plan), item.OfProcess)

	var out []Adopted
	protected := make(map[string]bool) // at and below
	for _, c := range Protected(plan, all) {
		protected[c.Path] = true
	}
	inside := map[string]uint32{} // compartment in force at and below a path
	root := uint64(rootID)
	for _, c := range all {
		if c.Path == "/" {
			root = c.ID
		}
		if protected[path.Dir(c.Path)] {
			protected[c.Path] = true
		}
		if c.Path == "/" || policy.IsOurs(c.Path) || protected[c.Path] {
			continue
		}
		around, covered := inside[path.Dir(c.Path)]
		if covered {
			inside[c.Path] = around
		}
		if isMatchSub(c, root) { // a Placer made it
			_, slice := partsOf(c)
			if i := slices.IndexFunc(plan.Compartments, func(k policy.Compartment) bool { return k.Slice == slice }); i > 0 {
				out = append(out, Adopted{uint32(i), c})
				inside[c.Path] = uint32(i)
				continue
			}
		}
		for _, it := range items {
			if !it.matchesCgroup(c.Path) || !it.matchesContainerOf(containers[c.ID]) {
				continue
			}
			if !covered || around != it.compartment {
				out = append(out, Adopted{it.compartment, c})
				inside[c.Path] = it.compartment
			}
			break
		}
	}
	return out
}

// Diff says which adopted cgroups appeared and which disappeared. A cgroup
// that was removed and made again, or came to another compartment, did both.
func Diff(before, after []Adopted) (appeared, gone []Adopted) {
	missing := func(from, in []Adopted) []Adopted {
		have := make(map[Adopted]bool, len(in))
		for _, a := range in {
			have[a] = true
		}
		var out []Adopted
		for _, a := range from {
			if !have[a] {
				out = append(out, a)
			}
		}
		return out
	}
	return missing(after, before), missing(before, after)
}

// Protected returns the cgroups of a walk that a plan's protect list names:
// units by a glob over the directory's own name wherever it lies
// (/system.slice/ssh.service, /system.slice/system-foo.slice/foo@1.service),
// cgroups by a path or glob that starts with "/". A cgroup below one that is
// listed is left out: whoever protects the upper protects it too.
func Protected(plan *policy.Plan, all []Cgroup) []Cgroup {
	var out []Cgroup
	inside := map[string]bool{}
	for _, c := range all {
		if inside[path.Dir(c.Path)] && c.Path != "/" {
			inside[c.Path] = true
			continue
		}
		if protects(plan, c.Path) {
			inside[c.Path] = true
			out = append(out, c)
		}
	}
	return out
}

// protects reports whether the protect list names this very cgroup.
func protects(plan *policy.Plan, p string) bool {
	return slices.ContainsFunc(plan.Protect, func(pattern string) bool {
		if strings.HasPrefix(pattern, "/") {
			return match(pattern, p)
		}
		return match(pattern, path.Base(p))
	})
}
