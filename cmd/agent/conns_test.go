package main

import (
	"os"
	"strings"
	"testing"

	"bulkhead/internal/agent"
	"bulkhead/pkg/cgroup"
)

// A connection is in the container of its process, unless another has the process's number by now.
func TestConnectionsInContainers(t *testing.T) {
	tree, err := cgroup.Find("")
	if err != nil {
		t.Fatal(err)
	}
	here, err := tree.Of(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	me := uint32(os.Getpid())
	list := []connection{{PID: me}, {PID: me, AgeSeconds: 1e6}, {PID: 0}, {PID: 1 << 30}}
	if err := inContainers(tree, []agent.AdoptedContainer{{CgroupID: here.ID, Runtime: "podman", Name: "chat"}}, list); err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"podman/chat", "", "", ""} {
		if list[i].Container != want {
			t.Errorf("%+v: want %q", list[i], want)
		}
	}
	for want, of := range map[string][]connection{"RECEIVED,CONTAINER": list, "SENT,RECEIVED": list[1:]} {
		if rows := connectionRows(of); !strings.HasSuffix(strings.Join(rows[0], ","), want) || len(rows[1]) != len(rows[0]) {
			t.Errorf("%v", rows)
		}
	}
}
