package demo

import (
	"net/netip"
	"testing"

	"bulkhead/pkg/policy"
)

// The demo's policy has neither errors nor warnings, is enforced, covers the
// provider's address, and leaves chat a place however many connections batch
// holds: the limits are no more than the places.
func TestPolicy(t *testing.T) {
	sc := theScenario()
	f, err := policy.Parse("demo.yaml", []byte(sc.policyText()))
	if err != nil {
		t.Fatal(err)
	}
	plan, warnings, err := policy.Compile(f)
	if err != nil || len(warnings) > 0 {
		t.Fatalf("%v, warnings %v", err, warnings)
	}
	if plan.Mode != policy.Enforce {
		t.Errorf("mode %s", plan.Mode)
	}
	local, ok := plan.FindProvider("local")
	if !ok {
		t.Fatal("no provider local")
	}
	addr := netip.MustParseAddrPort(providerAddr)
	covered := false
	for _, d := range plan.Destinations {
		for _, p := range d.Ports {
			covered = covered || d.Prefix == netip.PrefixFrom(addr.Addr(), 32) && p.Proto == policy.TCP &&
				p.First <= addr.Port() && addr.Port() <= p.Last && p.Provider == local
		}
	}
	if !covered {
		t.Errorf("%s is not the provider's in %+v", addr, plan.Destinations)
	}
	// The narrowest limits of each feature's route to the provider.
	limits := map[string]policy.Limit{}
	for _, feature := range []string{"chat", "batch"} {
		c, ok := plan.FindCompartment(feature, "")
		if !ok {
			t.Fatalf("no compartment %s", feature)
		}
		limits[feature] = policy.Unlimited
		for _, h := range plan.Route(c, local).Holds {
			limits[feature] = min(limits[feature], plan.Bulkheads[h].Limit)
		}
	}
	if limits["chat"] != 10 || limits["batch"] != 10 || int(limits["chat"]+limits["batch"]) > sc.ServeAtOnce {
		t.Errorf("limits %v at a provider with %d places", limits, sc.ServeAtOnce)
	}
}
