package house

import (
	"fmt"
	"os"
	"regexp"
	"testing"

	"bulkhead/pkg/policy"
)

// Every policy that a document shows compiles as it stands.
func TestExamples(t *testing.T) {
	whole := regexp.MustCompile("(?s)```yaml\n(apiVersion: .*?)```")
	for file, want := range map[string]int{"README.md": 1} {
		text, err := os.ReadFile("../../" + file)
		if err != nil {
			t.Fatal(err)
		}
		found := whole.FindAllSubmatch(text, -1)
		if len(found) != want {
			t.Errorf("%s: %d whole policies, want %d", file, len(found), want)
		}
		for i, m := range found {
			f, err := policy.Parse(fmt.Sprintf("%s, policy %d", file, i+1), m[1])
			if err != nil {
				t.Error(err)
				continue
			}
			if _, warnings, err := policy.Compile(f); err != nil || len(warnings) > 0 {
				t.Errorf("%v %v", err, warnings)
			}
		}
	}
}
