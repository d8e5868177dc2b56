package cgroup

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/bmatcuk/doublestar/v4"

	"bulkhead/pkg/policy"
)

// What mayMatch leaves out does not match.
func TestMayMatch(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	text := func(of []string) string {
		var b strings.Builder
		for range random.IntN(7) {
			b.WriteString(of[random.IntN(len(of))])
		}
		return b.String()
	}
	matched := 0
	for range 300_000 {
		glob := text([]string{"/", "a", "b", "*", "**", "/**", "**/", "/**/", "?", "[ab]", "[^a]", "{a,b}", "{/a,}", `\*`, `\a`, `\`, "["})
		name := text([]string{"/", "a", "b", "*", "/a", "/b"})
		ok, err := doublestar.Match(glob, name)
		if ok && err == nil {
			matched++
			if !mayMatch(glob, name) {
				t.Errorf("%q matches %q", glob, name)
			}
		}
	}
	if matched < 1000 {
		t.Errorf("only %d of the globs matched", matched)
	}
}

// What it costs to say which of 600 cgroups 200 features adopt.
func BenchmarkAdopt(b *testing.B) {
	var features []policy.Feature
	all := []Cgroup{{Path: "/", ID: 1}, {Path: "/apps", ID: 2, Level: 1}}
	for i := range 200 {
		features = append(features, feature(fmt.Sprintf("f%d", i), nil, nil, policy.Match{Cgroup: fmt.Sprintf("/apps/*w%d", i)}))
		for j := range 3 {
			all = append(all, Cgroup{Path: fmt.Sprintf("/apps/%dw%d", j, i), ID: uint64(len(all) + 1), Level: 2})
		}
	}
	p := plan(policy.Enforce, nil, features...)
	for b.Loop() {
		if n := len(Adopt(p, all, nil)); n != 600 {
			b.Fatalf("%d are adopted", n)
		}
	}
}
