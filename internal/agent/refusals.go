package agent

import (
	"log/slog"
	"time"

	"bulkhead/pkg/conn"
	"bulkhead/pkg/policy"
)

// apart is the least time between two refusals that the kernel tells of on one
// route (one a second), less what converting its clock to ours may differ from
// one reading to the next.
const apart = 500 * time.Millisecond

// told remembers the refusals that were logged, by route.
type told map[route]conn.Refusal

type route struct{ feature, tenant, provider string }

// newRefusal is one that was not told before, and how many more there were on its route
// since the one that was told last, which have no line of their own.
type newRefusal struct {
	conn.Refusal
	more uint64
}

// news returns the refusals that were not told before, oldest first, and
// remembers them. A route's entry in the kernel stays until the next one, so
// every reading sees it again.
func (t told) news(refusals []conn.Refusal) []newRefusal {
	var out []newRefusal
	for i := len(refusals) - 1; i >= 0; i-- { // newest first
		r := refusals[i]
		key := route{r.Feature, r.Tenant, r.Provider}
		last, ok := t[key]
		if ok && (r.Total == last.Total || r.Time.Sub(last.Time) < apart) {
			continue
		}
		t[key] = r
		more := r.Total - 1
		if last.Total < r.Total { // else the route was forgotten meanwhile, and is new
			more -= last.Total
		}
		out = append(out, newRefusal{r, more})
	}
	return out
}

// logRefusal writes the one line that a refusal gets.
func logRefusal(log *slog.Logger, r newRefusal) {
	// The route's own total has both kinds in one; the bulkhead's are apart.
	msg, limit, total := "refused", any(uint32(r.Limit)), r.Refused
	if r.Observed {
		msg, total = "would be refused", r.WouldRefuse
	}
	if r.Limit == policy.Unlimited {
		limit = nil
	}
	log.Warn(msg,
		"pid", r.PID, "command", r.Comm,
		"feature", r.Feature, "tenant", r.Tenant, "provider", r.Provider,
		"remote", r.Remote.String(), "proto", r.Proto.String(),
		slog.Group("bulkhead",
			"scope", r.Bulkhead.Scope.String(), "feature", r.Bulkhead.Feature,
			"tenant", r.Bulkhead.Tenant, "provider", r.Bulkhead.Provider),
		"limit", limit, "reason", r.Reason, "errno", policy.ErrnoName(r.Errno),
		"at", r.Time.Format(time.RFC3339Nano), "total", total, "more", r.more)
}
