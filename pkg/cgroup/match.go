package cgroup

import (
	"os/user"
	"path"
	"regexp"
	"strconv"
	"strings"

	"github.com/bmatcuk/doublestar/v4"

	"bulkhead/pkg/policy"
)

// item is one item of a plan's match lists, ready to be compared. Items stand
// in the order of the file, in which the first that matches wins.
type item struct {
	policy.Match
	feature     string
	compartment uint32 // index into Plan.Compartments
	cmdline     *regexp.Regexp
	// nth is which of the items about containers this is.
	nth int
	// uid is whom User names; known is false for a name that this node does not
	// know, which matches nobody.
	uid   uint32
	known bool
}

// itemsOf are the items of a plan that can be matched.
func itemsOf(plan *policy.Plan) []item {
	type name struct{ feature, tenant string }
	ids := make(map[name]uint32, len(plan.Compartments))
	for i, c := range plan.Compartments {
		ids[name{c.Feature, c.Tenant}] = uint32(i)
	}
	var out []item
	containers := 0
	for _, f := range plan.Features {
		for _, m := range f.Match {
			id, ok := ids[name{f.Name, m.Tenant}]
			if !ok {
				continue
			}
			it := item{Match: m, feature: f.Name, compartment: id}
			if m.Cmdline != "" {
				re, err := regexp.Compile(m.Cmdline)
				if err != nil {
					continue // the policy was checked: a plan of another release
				}
				it.cmdline = re
			}
			if m.User != "" {
				it.uid, it.known = uidOf(m.User)
			}
			if len(m.Container) > 0 {
				it.nth = containers
				containers++
			}
			out = append(out, it)
		}
	}
	return out
}

// uidOf resolves a user's name or number, by this node's user database.
func uidOf(name string) (uint32, bool) {
	if n, err := strconv.ParseUint(name, 10, 32); err == nil {
		return uint32(n), true
	}
	u, err := user.Lookup(name)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseUint(u.Uid, 10, 32)
	return uint32(n), err == nil
}

// matchesCgroup compares the keys that are about cgroups with one cgroup.
func (it item) matchesCgroup(p string) bool {
	// Where a unit's name would be that of a control file, systemd puts "_" before it.
	if name := strings.TrimPrefix(path.Base(p), "_"); it.Unit != "" && !(isUnit(name) && match(it.Unit, name)) {
		return false
	}
	return it.Cgroup == "" || match(it.Cgroup, p)
}

// around reports whether the keys that are about cgroups hold for a cgroup, or
// for one that it is in.
func (it item) around(p string) bool {
	if it.Unit == "" && it.Cgroup == "" {
		return true
	}
	for ; p != "/" && p != "."; p = path.Dir(p) {
		if it.matchesCgroup(p) {
			return true
		}
	}
	return false
}

// match takes a name as it is before it takes it as a glob: unit names have
// backslashes of their own (foo\x2dbar.service). A trailing slash means nothing.
func match(glob, name string) bool {
	if glob == name {
		return true
	}
	glob = strings.TrimSuffix(glob, "/")
	if !mayMatch(glob, name) {
		return false
	}
	ok, err := doublestar.Match(glob, name)
	return ok && err == nil
}

// mayMatch is false of most names that a glob does not match: those that do not begin or end
// as it does. Hundreds of globs are compared with hundreds of cgroups at each look.
func mayMatch(glob, name string) bool {
	special := func(c byte) bool {
		return c == '*' || c == '?' || c == '[' || c == ']' || c == '{' || c == '}' || c == '\\'
	}
	first, last := 0, len(glob)-1
	for first < len(glob) && !special(glob[first]) {
		first++
	}
	if first == len(glob) {
		return glob == name
	}
	for !special(glob[last]) {
		last--
	}
	begin, end := glob[:first], glob[last+1:]
	// "/a/**" matches "/a", and "**/a" matches "a".
	if strings.HasPrefix(glob[first:], "**") {
		begin = strings.TrimSuffix(begin, "/")
	}
	if strings.HasSuffix(glob[:last+1], "**") {
		end = strings.TrimPrefix(end, "/")
	}
	return strings.HasPrefix(name, begin) && strings.HasSuffix(name, end)
}

// isUnit reports whether a directory's name is that of a unit.
func isUnit(name string) bool {
	for _, t := range unitTypes {
		if strings.HasSuffix(name, t.suffix) && name != t.suffix {
			return true
		}
	}
	return false
}

// innermostUnit is the deepest unit that a cgroup is or is in and that has processes
// which somebody manages, "" if there is none. A slice only groups.
func innermostUnit(p string) string {
	for ; p != "/" && p != "."; p = path.Dir(p) {
		if name := path.Base(p); isUnit(name) && !strings.HasSuffix(name, ".slice") {
			return p
		}
	}
	return ""
}
