package house

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
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

// The built-in protect list is the one that the reference names.
func TestBuiltInProtect(t *testing.T) {
	text, err := os.ReadFile("../../docs/policy.md")
	if err != nil {
		t.Fatal(err)
	}
	_, after, ok := strings.Cut(string(text), "The list is added to the built-in one:\n\n")
	if !ok {
		t.Fatal("docs/policy.md does not name the built-in list")
	}
	paragraph, _, _ := strings.Cut(after, "\n\n")
	var want []string
	for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(paragraph, -1) {
		want = append(want, m[1])
	}
	slices.Sort(want)
	f, err := policy.Parse("policy.yaml", []byte("apiVersion: bulkhead/v1\nkind: Policy\nmode: enforce\nproviders: {}\nfeatures: {}\n"))
	if err != nil {
		t.Fatal(err)
	}
	plan, _, err := policy.Compile(f)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(plan.Protect, want) {
		t.Errorf("built in: %v\ndocs/policy.md: %v", plan.Protect, want)
	}
}
