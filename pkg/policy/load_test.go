package policy

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// write puts files, by name, into a new directory.
func write(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func loadErrors(t *testing.T, dir, path string) []string {
	t.Helper()
	_, err := Load(path)
	var lines []string
	if err != nil {
		lines = strings.Split(strings.ReplaceAll(err.Error(), dir+"/", ""), "\n")
	}
	return lines
}

// A directory is one policy, in the order of the files' names; what is hidden,
// elsewhere or not YAML is no part of it.
func TestDirectory(t *testing.T) {
	dir := write(t, map[string]string{
		"10-base.yaml":     "apiVersion: bulkhead/v1\nkind: Policy\nmode: observe\nprotect: [a.service]\nproviders: {b: {cidrs: [10.0.0.0/8]}}\ntenants: {t: {}}\nfeatures: {}\n",
		"20-more.yml":      "apiVersion: bulkhead/v1\nkind: Policy\nmode: observe\nprotect: [b.service]\nproviders: {a: {cidrs: [10.0.0.0/8]}}\n",
		"30-teams.yaml":    "apiVersion: bulkhead/v1\nkind: Policy\nexhausted: refuse\nfeatures: {z: {class: batch, providers: {a: {connections: 3}}, tenants: {t: {limits: {connections: 2}}}}}\n",
		"40-teams.yaml":    "apiVersion: bulkhead/v1\nkind: Policy\nexhausted: refuse\nfeatures: {default: {limits: {connections: 7}}, y: {class: batch}}\n",
		"note.txt":         "not: [valid",
		".10-hidden.yaml":  "not: [valid",
		"..data/x.yaml":    "not: [valid",
		"below/other.yaml": "not: [valid",
		"30-old.yaml.bak":  "not: [valid",
		"#20-more.yml#":    "not: [valid",
		"20-more.yml~":     "not: [valid",
		"sub.yaml/x.yaml":  "not: [valid",
	})
	if err := os.Rename(filepath.Join(dir, "40-teams.yaml"), filepath.Join(dir, ".real")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(".real", filepath.Join(dir, "40-teams.yaml")); err != nil {
		t.Fatal(err)
	}
	plan, warnings, err := Check(dir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, w := range warnings {
		got = append(got, strings.TrimPrefix(w.String(), dir+"/"))
	}
	wantLines(t, got, []string{"20-more.yml:5:25: providers.a: 10.0.0.0/8 never matches: provider b, earlier in the directory, has the same prefix and ports"})
	got = nil
	for _, p := range plan.Providers {
		got = append(got, p.Name)
	}
	for _, f := range plan.Features {
		got = append(got, f.Name)
	}
	wantLines(t, got, []string{"other", "b", "a", "default", "z", "y"})
	if p := strings.Join(plan.Protect, " "); !strings.HasPrefix(p, "a.service b.service bulkhead.service") {
		t.Errorf("protect %s", p)
	}
	if plan.Mode != Observe {
		t.Errorf("mode %s", plan.Mode)
	}
	if plan.Exhausted != ExhaustedRefuse {
		t.Errorf("exhausted %s", plan.Exhausted)
	}
}

// What contradicts names both places; all errors of all files come in one run,
// in the order of the files.
func TestDirectoryContradictions(t *testing.T) {
	dir := write(t, map[string]string{
		"a.yaml": head + "providers:\n  p: {cidrs: [10.0.0.0/8]}\n  other: {limits: {connections: 5}}\ntenants:\n  t: {}\nfeatures:\n  f: {class: batch}\n  default: {}\nexhausted: allow\n",
		"b.yaml": "apiVersion: bulkhead/v1\nkind: Policy\nmode: observe\nproviders:\n  p: {cidrs: [10.0.0.0/8]}\n  other: {limits: {connections: 5}}\ntenants:\n  t: {}\nfeatures:\n  f: {class: batch}\n  default: {}\n  g: {clas: batch}\nexhausted: refuse\n",
		"c.yaml": "kind: Policies\nfeatures:\n  h: {providers: {q: {connections: 1}}}\n",
	})
	wantLines(t, loadErrors(t, dir, dir), []string{
		"b.yaml:3:7: mode: is observe here and enforce at a.yaml:3:7",
		"b.yaml:5:3: providers.p is already at a.yaml:5:3",
		"b.yaml:6:3: providers.other is already at a.yaml:6:3",
		"b.yaml:8:3: tenants.t is already at a.yaml:8:3",
		"b.yaml:10:3: features.f is already at a.yaml:10:3",
		"b.yaml:11:3: features.default is already at a.yaml:11:3",
		`b.yaml:12:7: features.g: unknown key "clas"; did you mean "class"?`,
		"b.yaml:13:12: exhausted: is refuse here and allow at a.yaml:12:12",
		"c.yaml:1:1: apiVersion is missing; write apiVersion: bulkhead/v1",
		`c.yaml:1:7: kind: "Policies" is not Policy; did you mean "Policy"?`,
		`c.yaml:3:19: features.h.providers: there is no provider "q"; there are: other, p`,
	})
}

// What one file lacks only because another could not be read is no error of its own.
func TestDirectoryWithABrokenFile(t *testing.T) {
	dir := write(t, map[string]string{
		"a.yaml": "apiVersion: bulkhead/v1\nkind: Policy\nfeatures: {f: {class: batch, limits: {connections: 0x1}, providers: {p: {connections: 3}}}}\n",
		"b.yaml": head + "providers: {p: [}\n",
		"c.yaml": "",
	})
	wantLines(t, loadErrors(t, dir, dir), []string{
		`a.yaml:3:52: features.f.limits.connections: "0x1" is not a plain number from 0 to 1000000, or unlimited (digits only: no sign, fraction, exponent, unit or leading zero)`,
		"b.yaml:4:14: not valid YAML: did not find expected node content",
		"c.yaml:1:1: the file is empty: a policy has apiVersion, kind, mode, providers and features",
	})
}

func TestDirectoryMissing(t *testing.T) {
	dir := write(t, map[string]string{
		"a.yaml": "apiVersion: bulkhead/v1\nkind: Policy\n",
		"b.yaml": "apiVersion: bulkhead/v1\nkind: Policy\n",
	})
	wantLines(t, loadErrors(t, dir, dir), []string{
		"a.yaml:1:1: mode is missing; write mode: enforce, or mode: observe to try the policy first",
		"a.yaml:1:1: providers is missing; write providers: {} if there are none",
		"a.yaml:1:1: features is missing; write features: {} if there are none",
	})
}

// What cannot be read is an error of the file system and never an empty policy.
func TestUnreadable(t *testing.T) {
	dir := write(t, map[string]string{"empty/.keep": "", "fifo/a.yaml": "x", "link/a.yaml": "x"})
	if _, err := Load(filepath.Join(dir, "none.yaml")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	wantLines(t, loadErrors(t, dir, filepath.Join(dir, "empty")), []string{
		"read policy: empty has no *.yaml file: an empty directory is not an empty policy",
	})
	if err := syscall.Mkfifo(filepath.Join(dir, "fifo", "b.yaml"), 0o644); err != nil {
		t.Fatal(err)
	}
	wantLines(t, loadErrors(t, dir, filepath.Join(dir, "fifo")), []string{"read policy: fifo/b.yaml is not a regular file"})
	if err := os.Symlink("nowhere", filepath.Join(dir, "link", "b.yaml")); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(filepath.Join(dir, "link")); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "link/b.yaml is a link to nothing") {
		t.Errorf("a link to nothing: %v", err)
	}
	large := filepath.Join(dir, "large.yaml")
	if err := os.WriteFile(large, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(large, 1<<40); err != nil { // sparse
		t.Fatal(err)
	}
	wantLines(t, loadErrors(t, dir, large), []string{"large.yaml:1:1: the file is larger than 8388608 bytes: a policy is not"})
}

// A ConfigMap is replaced while it is read, over and over: Load never sees
// files of two versions, nor files that are missing.
func TestConfigMapSwap(t *testing.T) {
	dir := t.TempDir()
	put := func(version int) error {
		to := filepath.Join(dir, fmt.Sprintf("..v%d", version))
		if err := os.Mkdir(to, 0o755); err != nil {
			return err
		}
		// Every file has the version in it, and a mix does not compile.
		files := map[string]string{
			"a.yaml": head + fmt.Sprintf("providers: {p%d: {cidrs: [10.0.0.0/8]}}\n", version),
			"b.yaml": "apiVersion: bulkhead/v1\nkind: Policy\n" + fmt.Sprintf("features: {f: {class: batch, providers: {p%d: {connections: 3}}}}\n", version),
		}
		for name, text := range files {
			if err := os.WriteFile(filepath.Join(to, name), []byte(text), 0o644); err != nil {
				return err
			}
		}
		next := filepath.Join(dir, "..data_tmp")
		if err := os.Symlink(filepath.Base(to), next); err != nil {
			return err
		}
		if err := os.Rename(next, filepath.Join(dir, "..data")); err != nil {
			return err
		}
		if version == 0 {
			return nil
		}
		return os.RemoveAll(filepath.Join(dir, fmt.Sprintf("..v%d", version-1)))
	}
	if err := put(0); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a.yaml", "b.yaml"} {
		if err := os.Symlink("..data/"+name, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	const swaps = 100
	done := make(chan error, 1)
	go func() {
		for version := 1; version <= swaps; version++ {
			if err := put(version); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	loads, seen := 0, map[string]bool{}
	for {
		f, err := Load(dir)
		if err != nil {
			t.Fatalf("load %d: %v", loads, err)
		}
		loads++
		seen[f.providers[0].value] = true
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			if f, err = Load(dir); err != nil || f.providers[0].value != fmt.Sprint("p", swaps) {
				t.Fatalf("the last: %v", err)
			}
			t.Logf("%d loads saw %d of %d versions", loads, len(seen), swaps)
			return
		default:
		}
	}
}
