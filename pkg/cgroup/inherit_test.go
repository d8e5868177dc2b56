package cgroup

import (
	"maps"
	"testing"
)

// TestInherit: the nearest at or above decides, and what is above the first named has none.
func TestInherit(t *testing.T) {
	all := []Cgroup{{Path: "/", ID: 1}, {Path: "/a", ID: 2}, {Path: "/a/b", ID: 3}, {Path: "/a/b/c", ID: 4}, {Path: "/a/x", ID: 5}, {Path: "/ab", ID: 6}}
	for _, c := range []struct {
		named, want map[uint64]string
	}{
		{nil, map[uint64]string{}},
		{map[uint64]string{2: "f", 4: "g"}, map[uint64]string{2: "f", 3: "f", 4: "g", 5: "f"}},
		{map[uint64]string{1: "r", 3: "f"}, map[uint64]string{1: "r", 2: "r", 3: "f", 4: "f", 5: "r", 6: "r"}},
		{map[uint64]string{99: "gone"}, map[uint64]string{}},
	} {
		if got := Inherit(all, c.named); !maps.Equal(got, c.want) {
			t.Errorf("of %v: got %v, want %v", c.named, got, c.want)
		}
	}
}
