package cgroup

import (
	"maps"
	"path"
)

// OwnUsage takes from the usage of each cgroup, by path, that of the cgroups of
// the same map nested in it: the kernel's usage_usec counts everything below (a
// tenant's slice lies in its feature's), so that a sum would count it twice. A
// sum over what is returned counts everything once. Status and metrics both say
// this.
func OwnUsage(total map[string]uint64) map[string]uint64 {
	out := maps.Clone(total)
	for inner, usage := range total {
		for p := path.Dir(inner); p != "/" && p != "."; p = path.Dir(p) {
			if _, ok := total[p]; ok {
				// Read a moment later, it may be more than what was read around it.
				out[p] -= min(out[p], usage)
				break
			}
		}
	}
	return out
}
