package cgroup

import (
	"errors"
	"fmt"
	"path"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"bulkhead/pkg/policy"
)

// Cgroups that moved processes are in say in their names which compartment it is
// and where they came from, so that they can go back, however often the agent was
// restarted in between:
//
//	match-<origin>-<feature>[-<tenant>].scope            in the compartment's slice
//	bulkhead-match-<origin>-<feature>[-<tenant>]         in a unit with Delegate=yes
//
// The origin is the id of the cgroup that they were in.
var (
	matchLeaf = regexp.MustCompile(`^match-([0-9]+)-([a-z0-9_]+)(?:-([a-z0-9_]+))?\.scope$`)
	matchSub  = regexp.MustCompile(`^bulkhead-match-([0-9]+)-([a-z0-9_]+)(?:-([a-z0-9_]+))?$`)
)

// isMatchLeaf is true of a leaf in a slice of ours.
func isMatchLeaf(p string) bool { return matchLeaf.MatchString(path.Base(p)) && isSlice(path.Dir(p)) }

// isMatchSub is true of a cgroup of ours in a unit of somebody else's. Who has that
// unit could make one of the name, to be counted as somebody else: ours is root's.
func isMatchSub(c Cgroup) bool {
	return c.Owner == 0 && matchSub.MatchString(path.Base(c.Path)) && innermostUnit(path.Dir(c.Path)) != ""
}

func isPlace(c Cgroup) bool { return isMatchLeaf(c.Path) || isMatchSub(c) }

// partsOf is what the name of such a cgroup says: where its processes came from, and
// the slice of their compartment.
func partsOf(c Cgroup) (origin uint64, slice string) {
	m := matchLeaf.FindStringSubmatch(path.Base(c.Path))
	if m == nil {
		m = matchSub.FindStringSubmatch(path.Base(c.Path))
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
func originOf(c Cgroup) uint64 {
	if !isPlace(c) {
		return c.ID
	}
	origin, _ := partsOf(c)
	return origin
}

// leafIn is where processes of the compartment with a slice go that were in the cgroup
// with an id: into the slice, or with a unit, into that. As a unit its name must be the
// only one.
func leafIn(slice, unit string, origin uint64) string {
	name := strings.TrimSuffix(strings.TrimPrefix(path.Base(slice), "bulkhead-"), ".slice")
	if unit != "" {
		return path.Join(unit, fmt.Sprintf("bulkhead-match-%d-%s", origin, name))
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

// SendBack moves the processes that were moved into compartments whose slice keep says
// no to back to where they came from: to the unit if it is one's, to the tree's root if
// that is gone. Those that cannot go stay, and are told. Of cgroups in units it removes
// those that nobody is in.
func (t *Tree) SendBack(keep func(slice string) bool) []Condition {
	all, err := t.Walk()
	if err != nil {
		return nil
	}
	byID := make(map[uint64]string, len(all))
	for _, c := range all {
		byID[c.ID] = c.Path
	}
	var conds []Condition
	for _, c := range all {
		if !isPlace(c) {
			continue
		}
		origin, slice := partsOf(c)
		if !keep(slice) {
			to, ok := byID[origin]
			switch {
			case ok:
			case isMatchSub(c):
				to = path.Dir(c.Path)
			default:
				to = "/"
			}
			if err := t.moveAll(c.Path, to); err != nil {
				conds = append(conds, shortfall(TypePlacement, ReasonStays, "processes of %s do not go back to cgroup %s: %v", c.Path, to, err))
			}
		}
		if isMatchSub(c) {
			_ = unix.Rmdir(t.path(c.Path))
		}
	}
	return conds
}

// moveAll moves all processes of a cgroup, though they go on forking.
func (t *Tree) moveAll(from, to string) error {
	for range passes {
		pids, err := t.pids(from)
		if err != nil || len(pids) == 0 {
			return nil
		}
		for _, pid := range pids {
			if pid == 0 {
				return fmt.Errorf("processes of another pid namespace are in it") // "0" would be ourselves
			}
			if err := t.write(to, "cgroup.procs", strconv.Itoa(pid)); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("process %s: %w", names([]int{pid}), err)
			}
		}
	}
	return fmt.Errorf("they fork faster than they can be moved")
}
