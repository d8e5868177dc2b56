package cgroup

import "path"

// Inherit gives each cgroup, by id, what the nearest at or above it has of named, as a
// process belongs to the deepest cgroup that is placed. Cgroups without any are left out.
// Parents stand before their children in all, as Walk returns them.
func Inherit[T any](all []Cgroup, named map[uint64]T) map[uint64]T {
	out := make(map[uint64]T, len(all))
	byPath := make(map[string]T, len(all))
	for _, c := range all {
		v, ok := named[c.ID]
		if !ok {
			v, ok = byPath[path.Dir(c.Path)]
		}
		if ok {
			byPath[c.Path], out[c.ID] = v, v
		}
	}
	return out
}
