package agent

import (
	"slices"
	"testing"

	"bulkhead/internal/metrics"
	"bulkhead/pkg/policy"
)

// TestCorrected: every compartment has its count from the start, and keeps it when it leaves the policy.
func TestCorrected(t *testing.T) {
	plan := &policy.Plan{Compartments: []policy.Compartment{{Feature: "default"}, {Feature: "chat", Slice: "/c"}, {Feature: "chat", Tenant: "free", Slice: "/c/f"}}}
	c := corrected{}
	want := []metrics.Corrected{{}, {Feature: "chat"}, {Feature: "chat", Tenant: "free"}}
	if got := c.list(plan); !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	c[compartmentName{"chat", "free"}] = 2
	c[compartmentName{"gone", ""}] = 3
	c[compartmentName{}]++
	want = []metrics.Corrected{{Count: 1}, {Feature: "chat"}, {Feature: "chat", Tenant: "free", Count: 2}, {Feature: "gone", Count: 3}}
	if got := c.list(plan); !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}
