package cgroup

import (
	"fmt"
	"path"
	"regexp"
	"strconv"
	"strings"

	"bulkhead/pkg/policy"
)

// Cgroups that moved processes are in say in their names which compartment it is
// and where they came from, so that they can go back, however often the agent was
// restarted in between:
//
//	match-<origin>-<feature>[-<tenant>].scope            in the compartment's slice
//	bulkhead-match-<origin>-<feature>[-<tenant>]         in a unit with Delegate=yes
//
// The origin is the id of the cgroup that they were in. A unit may be below the roots of two agents, one of which is in the
// other's: so where the root is not the true one, its id and a dot are before the origin, and each agent knows its own. Slices
// need none, as each agent has them in its own root; and two agents with one root there are not (conn.ErrForeign).
var (
	matchLeaf = regexp.MustCompile(`^match-([0-9]+)-([a-z0-9_]+)(?:-([a-z0-9_]+))?\.scope$`)
	matchSub  = regexp.MustCompile(`^bulkhead-match-(?:([0-9]+)\.)?([0-9]+)-([a-z0-9_]+)(?:-([a-z0-9_]+))?$`)
)

// isMatchLeaf is true of a leaf in a slice of ours.
func isMatchLeaf(p string) bool { return matchLeaf.MatchString(path.Base(p)) && isSlice(path.Dir(p)) }

// isMatchSub is true of a cgroup in a unit of somebody else's that is of the agent with a root. Who has that
// unit could make one of the name, to be counted as somebody else: ours is root's.
func isMatchSub(c Cgroup, root uint64) bool {
	m := matchSub.FindStringSubmatch(path.Base(c.Path))
	return m != nil && m[1] == rootMark(root) && c.Owner == 0 && innermostUnit(path.Dir(c.Path)) != ""
}

// rootMark names a root that is not the true one.
func rootMark(root uint64) string {
	if root == rootID {
		return ""
	}
	return strconv.FormatUint(root, 10)
}

func isPlace(c Cgroup, root uint64) bool { return isMatchLeaf(c.Path) || isMatchSub(c, root) }

// partsOf is what the name of such a cgroup says: where its processes came from, and
// the slice of their compartment.
func partsOf(c Cgroup) (origin uint64, slice string) {
	m := matchLeaf.FindStringSubmatch(path.Base(c.Path))
	if m == nil {
		m = matchSub.FindStringSubmatch(path.Base(c.Path))[1:]
	}
	origin, _ = strconv.ParseUint(m[1], 10, 64)
	slice = path.Join(policy.ParentSlice, "bulkhead-"+m[2]+".slice")
	if m[3] != "" {
		slice = path.Join(slice, "bulkhead-"+m[2]+"-"+m[3]+".slice")
	}
	return origin, slice
}

// originOf is the id of the cgroup that a process in c is in as long as nobody moves
// it: c itself, or where those of a cgroup of ours came from.
func originOf(c Cgroup, root uint64) uint64 {
	if !isPlace(c, root) {
		return c.ID
	}
	origin, _ := partsOf(c)
	return origin
}

// leafIn is where processes of the compartment with a slice go that were in the cgroup
// with an id: into the slice, or with a unit, into that. As a unit its name must be the
// only one.
func (t *Tree) leafIn(slice, unit string, origin uint64) string {
	name := strings.TrimSuffix(strings.TrimPrefix(path.Base(slice), "bulkhead-"), ".slice")
	if unit != "" {
		mark := rootMark(t.ID)
		if mark != "" {
			mark += "."
		}
		return path.Join(unit, fmt.Sprintf("bulkhead-match-%s%d-%s", mark, origin, name))
	}
	return path.Join(slice, fmt.Sprintf("match-%d-%s.scope", origin, name))
}

// delegated reports whether systemd has given a unit's cgroup away, to make cgroups in
// it: it says so in an attribute (since 236, and also in user.delegate since 251).
func (t *Tree) delegated(p string) bool {
	for _, attr := range []string{"user.delegate", "trusted.delegate"} {
		if v, err := getxattr(t.path(p), attr); err == nil && v == "1" {
			return true
		}
	}
	return false
}

// sliceAround is the slice of ours that a cgroup is or is in, "" if there is none.
func sliceAround(p string) string {
	for ; policy.IsOurs(p); p = path.Dir(p) {
		if isSlice(p) {
			return p
		}
	}
	return ""
}
