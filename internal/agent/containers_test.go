package agent

import (
	"fmt"
	"strings"
	"testing"

	"bulkhead/internal/containers"
	"bulkhead/internal/containers/enginetest"
	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/cgroup"
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

// Who asks the runtimes begins when they have said which containers there are: what runs already is adopted before
// the agent is ready.
func TestRuntimesFollow(t *testing.T) {
	e := enginetest.New(t)
	e.Put("", "a", enginetest.Container{Name: "chat", Image: "box", PID: 11})
	plan, err := loaded(t, "apiVersion: bulkhead/v1\nkind: Policy\nmode: enforce\nproviders: {}\nfeatures:\n  chat: {class: realtime, match: [{container: {name: chat}}]}\n")
	if err != nil {
		t.Fatal(err)
	}
	tree, _ := testTree(t)
	a := keeping(t, tree, plan)
	a.runtimes = runtimes{sockets: []containers.Socket{{Runtime: containers.Docker, Path: e.Path, Named: true}}, log: a.log}
	a.runtimes.follow(t.Context(), plan)
	defer a.runtimes.close()
	if list := a.runtimes.watcher.Containers(); len(list) != 1 || list[0].Name != "chat" {
		t.Errorf("%+v", list)
	}

	// What becomes of them is published without anything else that is new.
	a.publish()
	a.placement.adopted = []cgroup.Adopted{{Compartment: 1, Cgroup: cgroup.Cgroup{ID: 5}}}
	for _, name := range []string{"chat", "talk"} {
		a.runtimes.found = cgroup.Containers{5: {Container: &cgroup.Container{Name: name}}}
		a.publishIfPlaced()
		if got := a.info.Load().Containers; len(got) != 1 || got[0].Name != name {
			t.Errorf("published %+v, want %s", got, name)
		}
	}
	if n := published(a, cgroup.ReasonRuntimeAway); n != 0 {
		t.Errorf("%+v", a.info.Load().Conditions)
	}
	e.Stop()
	kerneltest.Poll(t, "it is away", func() error {
		if s := a.runtimes.watcher.Runtimes(); s[0].Answers {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	a.publishIfPlaced()
	if r := a.info.Load().Runtimes; published(a, cgroup.ReasonRuntimeAway) != 1 || len(r) != 1 || r[0].Answers {
		t.Errorf("%+v, %+v", r, a.info.Load().Conditions)
	}
}
