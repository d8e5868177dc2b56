package agent

import (
	"cmp"
	"slices"
	"time"

	"bulkhead/internal/metrics"
	"bulkhead/pkg/cgroup"
	"bulkhead/pkg/policy"
)

// corrected counts values that were put back, since this agent runs.
type corrected map[compartmentName]uint64

// compartmentName is a compartment by its names, which outlive a plan.
type compartmentName struct{ feature, tenant string }

// list has each compartment of the plan, also with a count of 0: a series that appears with its first
// count hides that from rate(). Those that have left the plan keep theirs.
func (c corrected) list(plan *policy.Plan) []metrics.Corrected {
	all := map[compartmentName]uint64{{}: 0}
	for _, k := range plan.Compartments {
		if k.Slice != "" {
			all[compartmentName{k.Feature, k.Tenant}] = 0
		}
	}
	for name, n := range c {
		all[name] = n
	}
	var out []metrics.Corrected
	for name, n := range all {
		out = append(out, metrics.Corrected{Feature: name.feature, Tenant: name.tenant, Count: n})
	}
	slices.SortFunc(out, func(a, b metrics.Corrected) int {
		return cmp.Or(cmp.Compare(a.Feature, b.Feature), cmp.Compare(a.Tenant, b.Tenant))
	})
	return out
}

// setupEvery is how often it is tried again to have what slices lack, from the end of the attempt.
const setupEvery = time.Minute

// keep looks whether all values are as they were set, and puts back what others have changed. What fell short of
// bringing about the plan, or of taking back another one, is tried again.
func (a *agent) keep() {
	before := a.shortfalls()
	if len(a.setup) > 0 && !time.Now().Before(a.setupAt) {
		a.setUpAgain()
	}
	if len(a.unread) > 0 {
		a.settle(a.placement)
	}
	put := a.keeper.Check(time.Now())
	a.tellCorrected(put)
	a.values = a.keeper.Conditions()
	if len(a.back) > 0 {
		a.sendBack()
	}
	if len(put) > 0 || !slices.Equal(before, a.shortfalls()) {
		a.publish()
	}
}

// shortfalls are the conditions that keep looks after.
func (a *agent) shortfalls() []cgroup.Condition {
	return slices.Concat(a.setup, a.values, a.unread, a.back)
}

// setUpAgain tries to have what slices lack. What can be set by it is.
func (a *agent) setUpAgain() {
	conds, err := a.tree.EnsureSlices(a.plan)
	a.complain("make slices again", err)
	a.setupAt = time.Now().Add(setupEvery)
	if err == nil && !slices.Equal(conds, a.setup) {
		a.setup = conds
		a.keeper.Again()
		a.settle(a.placement)
	}
}

// sendBack sends back the processes that the plan in force does not place any more.
func (a *agent) sendBack() { a.back = a.tree.SendBack(a.plan, a.plansBefore...) }

// tellCorrected counts and logs what was put back.
func (a *agent) tellCorrected(put []cgroup.Correction) {
	for _, c := range put {
		a.corrected[compartmentName{c.Feature, c.Tenant}]++
		a.log.Warn("put back a value that somebody else had changed: change the policy, or stop who does",
			"cgroup", c.Path, "file", c.File, "was", c.Was, "put_back_to", c.Now, "feature", c.Feature, "tenant", c.Tenant)
	}
}
