package cgroup

import (
	"maps"
	"testing"
)

// TestOwnUsage: whatever is nested in what, each is counted once.
func TestOwnUsage(t *testing.T) {
	total := map[string]uint64{"/b/chat": 100, "/b/chat/free": 30, "/b/chat/pro": 20, "/pods/a": 50, "/pods/a/x/y": 10, "/pods/a/x/y/z": 4, "/pods/ab": 7, "/b/odd": 1, "/b/odd/free": 2}
	want := map[string]uint64{"/b/chat": 50, "/b/chat/free": 30, "/b/chat/pro": 20, "/pods/a": 40, "/pods/a/x/y": 6, "/pods/a/x/y/z": 4, "/pods/ab": 7, "/b/odd": 0, "/b/odd/free": 2}
	if got := OwnUsage(total); !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if total["/b/chat"] != 100 {
		t.Error("it changed what it was given")
	}
}
