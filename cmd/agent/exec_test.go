package main

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"bulkhead/pkg/policy"
)

// TestFind: what is wrong with a command has env(1)'s codes.
func TestFind(t *testing.T) {
	dir := t.TempDir()
	for name, mode := range map[string]os.FileMode{"plain": 0o644, "tool": 0o755} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"), mode); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir)
	for _, c := range []struct {
		name string
		code int
	}{
		{"tool", 0},
		{filepath.Join(dir, "tool"), 0},
		{"plain", exitNotExecutable},
		{filepath.Join(dir, "plain"), exitNotExecutable},
		{dir, exitNotExecutable},
		{"none", exitNotFound},
		{filepath.Join(dir, "none"), exitNotFound},
		{filepath.Join(dir, "tool", "below"), exitNotFound},
		{"", exitNotFound},
	} {
		path, err := find(c.name)
		code := 0
		if e := (*exitError)(nil); errors.As(err, &e) {
			code = e.code
		}
		if code != c.code || code == 0 && path != filepath.Join(dir, "tool") {
			t.Errorf("find(%q): %q, code %d (%v), want %d", c.name, path, code, err, c.code)
		}
	}
}

// TestSliceOf: only what the policy names is a place.
func TestSliceOf(t *testing.T) {
	path := file(t, strings.Replace(rightPolicy, "features:", "tenants: {free: {limits: {connections: 2}}}\nfeatures:", 1))
	plan, _, err := policy.Check(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ feature, tenant, slice, says string }{
		{"chat", "", "/bulkhead.slice/bulkhead-chat.slice", ""},
		{"chat", "free", "/bulkhead.slice/bulkhead-chat.slice/bulkhead-chat-free.slice", ""},
		{"chta", "", "", `did you mean "chat"?`},
		{"something", "", "", "there are: chat"},
		{"chat", "fre", "", `did you mean "free"?`},
		{"default", "", "", "without bulkhead exec"},
	} {
		slice, err := sliceOf(plan, c.feature, c.tenant)
		if slice != c.slice || (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s/%s: %q, %v", c.feature, c.tenant, slice, err)
		}
	}
}

func TestEnvironment(t *testing.T) {
	who := identity{name: "www", home: "/srv", shell: ""}
	got := who.environment([]string{"HOME=/home/a", "LANG=C", "USER=a", "SHELL=/bin/zsh", "LOGNAME=a", "HOMEPAGE=x"})
	want := []string{"LANG=C", "SHELL=/bin/zsh", "HOMEPAGE=x", "HOME=/srv", "LOGNAME=www", "USER=www"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
