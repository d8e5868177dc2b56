package demo

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What is not there is named, with the cure, and only what needs it is kept
// from running.
func TestMissingTools(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	got := findTools(t.Context(), filepath.Join(t.TempDir(), "*"))
	for name, want := range map[tool]string{
		python:   "python3 is not installed: apt install python3",
		curl:     "curl is not installed: apt install curl",
		postgres: "PostgreSQL is not installed: apt install postgresql",
	} {
		if got.Missing[name] != want {
			t.Errorf("%s: %q, want %q", name, got.Missing[name], want)
		}
	}
	if len(got.Versions) != 0 {
		t.Errorf("versions %q", got.Versions)
	}
	delete(got.Missing, python)
	if why := got.why(theFlood().about()); why != "" {
		t.Errorf("flood: %s", why)
	}
	if why := got.why(theDatabase().about()); !strings.Contains(why, "apt install postgresql") {
		t.Errorf("database: %q", why)
	}
}

// Only what was used is named, in one order.
func TestUsedTools(t *testing.T) {
	got := tools{Versions: map[tool]string{curl: "c", python: "p", node: "n"}}
	for _, c := range []struct {
		all  []about
		want string
	}{
		{nil, ""},
		{[]about{theBounded().about()}, "c"},
		{[]about{theBounded().about(), theFlood().about(), theDatabase().about()}, "p n c"},
	} {
		if used := strings.Join(got.used(c.all), " "); used != c.want {
			t.Errorf("%q, want %q", used, c.want)
		}
	}
}

// A program that is there and does not do is named as that.
func TestUnfitTools(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	for name, script := range map[string]string{"python3": "exit 3", "curl": "echo curl 7.74.0 x"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	got := findTools(t.Context(), "")
	if m := got.Missing[python]; !strings.Contains(m, "does not run with its standard library") {
		t.Errorf("python: %q", m)
	}
	if m := got.Missing[curl]; !strings.Contains(m, "7.74.0 and 7.75 is needed") {
		t.Errorf("curl: %q", m)
	}
}

// Of PostgreSQL's releases the newest whole one is taken.
func TestNewestPostgres(t *testing.T) {
	root := t.TempDir()
	for dir, names := range map[string]string{"9": "initdb postgres psql", "15": "initdb postgres psql", "17": "psql"} {
		bin := filepath.Join(root, dir, "bin")
		if err := os.MkdirAll(bin, 0o755); err != nil {
			t.Fatal(err)
		}
		for _, name := range strings.Fields(names) {
			if err := os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\necho psql '(PostgreSQL)' "+dir+".4\n"), 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	p, version, err := findPostgres(t.Context(), filepath.Join(root, "*", "bin"))
	if err != nil || p.Bin != filepath.Join(root, "15", "bin") || !strings.HasPrefix(version, "PostgreSQL 15.4 ") {
		t.Errorf("%+v, %q, %v", p, version, err)
	}
}
