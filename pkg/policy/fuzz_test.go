package policy

import (
	"encoding/json"
	"errors"
	"os"
	"testing"
	"time"
)

// Whatever a file holds: no panic; an error is Errors, each with a place in the
// file; and what is right compiles, to a plan that survives JSON.
func FuzzParse(f *testing.F) {
	for _, path := range []string{"testdata/contract.yaml", "../../docs/policy-example.yaml"} {
		text, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	for _, text := range []string{"", "---\n---\n", "a: &a [*a]", "{", "? {a: b}\n: c", "\xff", "- [", "!!map {}", "a: \"\\x\"", "%YAML 1.1\n---\n",
		head + "exhausted: refuse\nproviders: {p: {cidrs: [10.0.0.0/8], protocol: udp, idle: 1h30m}, q: {cidrs: [10.0.0.0/8], idle: -1500ms}}\nfeatures: {}\n",
		head + "exhausted: [allow]\nproviders: {p: {cidrs: [10.0.0.0/8], protocol: [udp], idle: 1h30}}\nfeatures: {f: {cpu: {max: 50%, period: 1s0ms}}}\n",
		head + "providers: {p: {cidrs: [\"::/0\"], wide: true, ports: [1-65535], protocol: [tcp, udp]}}\nfeatures: {f: {match: [{cmdline: \"(\"}]}}\n"} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		file, err := Parse("p", text)
		if err != nil {
			var errs Errors
			if !errors.As(err, &errs) || len(errs) == 0 {
				t.Fatalf("error of type %T: %v", err, err)
			}
			for _, e := range errs {
				if e.File != "p" || e.Line < 1 || e.Col < 1 || e.Msg == "" {
					t.Fatalf("error without a place: %#v", e)
				}
			}
			return
		}
		plan, warnings, err := Compile(file)
		if err != nil {
			return // too large
		}
		for _, w := range warnings {
			if w.File != "p" || w.Line < 1 || w.Col < 1 || w.Msg == "" {
				t.Fatalf("warning without a place: %#v", w)
			}
		}
		for _, d := range plan.Providers {
			if len(d.Hosts) > 0 && (d.Place.File != "p" || d.Place.Line < 1 || d.Place.Col < 1) {
				t.Fatalf("hosts without a place: %#v", d)
			}
			if d.UDP != (d.Idle != 0) || d.UDP && (d.Idle < MinIdle || d.Idle > MaxIdle || d.Idle%time.Second != 0) {
				t.Fatalf("idle: %#v", d)
			}
		}
		if plan.Exhausted != ExhaustedAllow && plan.Exhausted != ExhaustedRefuse {
			t.Fatalf("exhausted: %q", plan.Exhausted)
		}
		wrote, err := json.Marshal(plan)
		if err != nil {
			t.Fatal(err)
		}
		var back Plan
		if err := json.Unmarshal(wrote, &back); err != nil {
			t.Fatal(err)
		}
		if h, err := hash(&back); err != nil || h != plan.Hash {
			t.Fatalf("hash %s, %v, was %s", h, err, plan.Hash)
		}
	})
}
