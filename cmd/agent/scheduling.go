package main

import (
	"bulkhead/pkg/cgroup"
	"bulkhead/pkg/policy"
)

// scheduling finds what makes weights and quotas count for less than they say. It asks for every thread of the
// compartments, so it is done here, when somebody wants to know, and not by the agent.
func (s *status) scheduling(tree *cgroup.Tree) error {
	var paths []string
	for _, c := range s.Compartments {
		for _, m := range c.Cgroups {
			paths = append(paths, m.Path)
		}
	}
	threads, err := tree.Realtime(paths)
	if err != nil {
		return err
	}
	weighed := false
	for _, c := range s.Compartments {
		for i, m := range c.Cgroups {
			c.Cgroups[i].RealtimeThreads = len(threads[m.Path])
			// Where no value can be set, none counts for less.
			if m.CPU.Weight == nil && !m.CPU.Idle {
				continue
			}
			weighed = true
			if t := threads[m.Path]; len(t) > 0 {
				s.Conditions = append(s.Conditions, tree.Unweighed(m.Path, t))
			}
		}
	}
	if c, on := cgroup.Unscheduled(cgroup.SchedExtDir); on && weighed {
		s.Conditions = append(s.Conditions, c)
	}
	s.Conditions = append(s.Conditions, throttled(s.Compartments)...)
	return nil
}

// throttledShare is the part of the periods from which on a quota is said to stall a realtime feature.
const throttledShare = 0.01

// throttled are the cgroups of realtime features that have run out of their quota in more than one of a hundred periods:
// far below its average, a burst has used up what a period has, and the callers wait for the next.
func throttled(all []compartment) []cgroup.Condition {
	var out []cgroup.Condition
	for _, c := range all {
		for _, m := range c.Cgroups {
			n, of := m.CPU.NrThrottled, m.CPU.NrPeriods
			if c.Class != policy.Realtime || m.CPU.Max == nil || float64(n) <= throttledShare*float64(of) {
				continue
			}
			out = append(out, shortfall(cgroup.TypeScheduling, cgroup.ReasonThrottled,
				"the quota of realtime feature %s ran out in %d of %d periods (%.1f %%) in cgroup %s, and its callers waited for the rest of each: raise features.%s.cpu.max in the policy (or the quota that its unit has), or leave it out and let the weight do",
				c.Feature, n, of, 100*float64(n)/float64(of), m.Path, c.Feature))
		}
	}
	return out
}
