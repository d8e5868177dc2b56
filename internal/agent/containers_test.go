package agent

import (
	"strings"
	"testing"

	"bulkhead/internal/containers"
)

// Of a runtime that answers it is told if it does not tell of changes, of one that does not answer that it is away.
func TestRuntimesAway(t *testing.T) {
	for _, tc := range []struct {
		state         containers.Runtime
		reason, words string
	}{
		{containers.Runtime{Runtime: "docker", Socket: "/d", Answers: true, Containers: 2}, "", ""},
		{containers.Runtime{Runtime: "podman", Socket: "/p", Answers: true, Error: "it does not tell of changes"}, "RuntimeNoEvents", "podman at /p come to their compartments seconds after their start"},
		{containers.Runtime{Runtime: "docker", Socket: "/d", Error: "hung"}, "RuntimeAway", "docker at /d does not answer"},
		{containers.Runtime{Runtime: "docker", Socket: "/d", Containers: 2}, "RuntimeAway", "it does not run"},
		{containers.Runtime{Runtime: "docker", Socket: "/d"}, "", ""},
	} {
		conds := runtimesAway([]containers.Runtime{tc.state}, nil)
		if tc.reason == "" {
			if len(conds) > 0 {
				t.Errorf("%+v: %+v", tc.state, conds)
			}
			continue
		}
		if len(conds) != 1 || conds[0].Type != "Placement" || conds[0].Reason != tc.reason || !strings.Contains(conds[0].Message, tc.words) || !strings.Contains(conds[0].Message, tc.state.Error) {
			t.Errorf("%+v: %+v, want %s %q", tc.state, conds, tc.reason, tc.words)
		}
	}
}
