package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"bulkhead/pkg/policy"
)

// These tests run the built binary as a user would; none needs root or touches
// the node.

func TestMain(m *testing.M) {
	code, err := withBinary(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// binaryVariable tells the tests where the binary is.
const binaryVariable = "BULKHEAD_TEST_BINARY"

func withBinary(m *testing.M) (int, error) {
	dir, err := os.MkdirTemp("", "bulkhead-cli-")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(dir)
	binary := filepath.Join(dir, "bulkhead")
	if out, err := exec.Command("go", "build", "-o", binary, ".").CombinedOutput(); err != nil {
		return 1, fmt.Errorf("go build: %w\n%s", err, out)
	}
	if err := os.Setenv(binaryVariable, binary); err != nil {
		return 1, err
	}
	return m.Run(), nil
}

type result struct {
	code           int
	stdout, stderr string
}

// start runs the binary on an instance that does not exist.
func start(t *testing.T, args ...string) result {
	t.Helper()
	none := filepath.Join(t.TempDir(), "none")
	at := slices.Index(args, "--")
	if at < 0 {
		at = len(args)
	}
	args = slices.Insert(slices.Clone(args), at, "--bpffs", none, "--admin-socket", filepath.Join(none, "agent.sock"))
	cmd := exec.Command(os.Getenv(binaryVariable), args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if _, err := os.Stat(none); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("bulkhead %v made something at %s", args, none)
	}
	return result{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

const rightPolicy = `apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers:
  local: {cidrs: [127.0.0.1/32], ports: [8000], limits: {connections: 10}}
features:
  chat: {class: realtime, limits: {connections: 4}}
`

// brokenPolicy has faults in three places.
const brokenPolicy = `apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers:
  local: {cidrs: [127.0.0.1/33], ports: [8000]}
features:
  chat: {class: realtiem, limits: {connections: 010}}
`

func file(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestExitCodes holds section "exit codes" of the contract.
func TestExitCodes(t *testing.T) {
	right, broken := file(t, rightPolicy), file(t, brokenPolicy)
	for _, c := range []struct {
		args []string
		code int
		says string // on stderr
	}{
		{[]string{"agent", "--policy", "x", "--max-connections", "5"}, 2, "--max-connections 5: give 1024 to 4194304; see bulkhead agent --help"},
		{[]string{"stauts"}, 2, `unknown command "stauts"; did you mean "status"?; see bulkhead --help`},
		{[]string{"nonsense", "--check"}, 2, `unknown command "nonsense"; see bulkhead --help`},
		{[]string{"help", "stauts"}, 2, `unknown command "stauts"; did you mean "status"?`},
		{[]string{"status", "--nonsense"}, 2, "unknown flag: --nonsense; see bulkhead status --help"},
		{[]string{"status", "surplus"}, 2, `status takes no arguments; got "surplus"; see bulkhead status --help`},
		{[]string{"agent", "policy.yaml"}, 2, `agent takes no arguments; got "policy.yaml"`},
		{[]string{"status", "-o", "yaml"}, 2, "table or json"},
		{[]string{"agent"}, 2, "--policy is missing; see bulkhead agent --help"},
		{[]string{"check"}, 2, "check takes one FILE or DIR; got none; see bulkhead check --help"},
		{[]string{"check", "a", "b"}, 2, "check takes one FILE or DIR; got 2 arguments"},
		{[]string{"explain", "--to", "nowhere"}, 2, `--to "nowhere": not HOST:PORT`},
		{[]string{"explain", "--to", ":443"}, 2, "not HOST:PORT"},
		{[]string{"explain", "--to", "::1:443"}, 2, "brackets, [::1]:443"},
		{[]string{"explain", "--to", "host:99999"}, 2, "1-65535"},
		{[]string{"explain", "--to", "host:0"}, 2, "1-65535"},
		{[]string{"explain", "--to", "host:https"}, 2, "1-65535"},
		{[]string{"top", "--interval", "1ms"}, 2, "100ms"},
		{[]string{"demo", "--only", ""}, 2, "--only is empty: give names, or leave it out for all; see bulkhead demo --help"},
		{[]string{"agent", "--policy", "x", "--max-connections", "-1"}, 2, "not a whole number in range"},
		{[]string{"top", "--count", "-1"}, 2, "--count -1: give the number of views"},
		{[]string{"top", "--count", "x"}, 2, `invalid argument "x" for "--count" flag: not a whole number in range`},

		{[]string{"check", right}, 0, ""},
		{[]string{"check", broken}, 1, "the policy has 3 errors"},
		{[]string{"check", "/no/such/policy"}, 1, "no such file"},
		{[]string{"agent", "--policy", broken}, 1, "the policy has 3 errors"},
		{[]string{"agent", "--policy", right, "--cgroup-root", "/etc"}, 1, "cgroup root /etc"},
		{[]string{"reload"}, 1, "bulkhead agent --policy FILE"},
		{[]string{"version"}, 0, ""},

		// plan says 2 for changes, so nothing else may.
		{[]string{"plan"}, 1, "plan takes one FILE or DIR; got none"},
		{[]string{"plan", "--nonsense", right}, 1, "unknown flag"},
		{[]string{"plan", broken}, 1, "the policy has 3 errors"},

		// exec is as env(1): whatever is wrong with us is 125.
		{[]string{"exec"}, 125, "exec takes the command to become; got none"},
		{[]string{"exec", "--nonsense", "--", "true"}, 125, "unknown flag"},
		{[]string{"exec", "--", "true"}, 125, "--feature is missing"},
		{[]string{"exec", "--feature", "chat", "--tenant", "", "--", "true"}, 125, "--tenant is empty"},
		{[]string{"exec", "--feature", "chat", "--cgroup-root", "/etc", "--", "true"}, 125, "cgroup root /etc"},
	} {
		t.Run(strings.Join(c.args, " "), func(t *testing.T) {
			r := start(t, c.args...)
			if r.code != c.code || !strings.Contains(r.stderr, c.says) {
				t.Errorf("exit code %d, want %d; stderr:\n%s", r.code, c.code, r.stderr)
			}
			if c.code != 0 && r.stdout != "" {
				t.Errorf("stdout: %s", r.stdout)
			}
			lines := strings.Split(strings.TrimSuffix(r.stderr, "\n"), "\n")
			if last := lines[len(lines)-1]; c.code != 0 && !strings.HasPrefix(last, "bulkhead: ") {
				t.Errorf("the last line is %q", last)
			}
			if c.code == 2 && len(lines) != 1 {
				t.Errorf("wrong use takes %d lines:\n%s", len(lines), r.stderr)
			}
		})
	}
}

// TestCheckSaysEverything: all faults in one run, each with its place; also at
// the agent's start.
func TestCheckSaysEverything(t *testing.T) {
	path := file(t, brokenPolicy)
	for _, args := range [][]string{{"check", path}, {"agent", "--policy", path}, {"plan", path}} {
		r := start(t, args...)
		for _, place := range []string{":5:19: ", ":7:17: ", ":7:49: "} {
			if !strings.Contains(r.stderr, path+place) {
				t.Errorf("%v: no error at %s:\n%s", args, place, r.stderr)
			}
		}
	}
}

// TestCheckJSON: what it prints is the plan, byte for byte the same each time.
func TestCheckJSON(t *testing.T) {
	path := file(t, rightPolicy)
	one, two := start(t, "check", path, "-o", "json"), start(t, "check", "--output=json", path)
	if one.stdout != two.stdout {
		t.Error("two runs differ")
	}
	var got policy.Plan
	if err := json.Unmarshal([]byte(one.stdout), &got); err != nil {
		t.Fatal(err)
	}
	want, _, err := policy.Check(path)
	if err != nil {
		t.Fatal(err)
	}
	if changes := policy.Diff(want, &got); len(changes) > 0 || got.Hash != want.Hash {
		t.Errorf("differs from the plan: %v", changes)
	}
}

// TestCheckTellsOfTheAgent: what this release refuses is right, and told.
func TestCheckTellsOfTheAgent(t *testing.T) {
	path := file(t, strings.NewReplacer("cidrs: [127.0.0.1/32]", "hosts: [api.example.com]", "connections: 4", "connections: 1").Replace(rightPolicy))
	r := start(t, "check", path)
	for _, want := range []string{
		path + ":5:18: warning: the agent of this release refuses this policy: provider local: names are not built yet",
	} {
		if r.code != 0 || !strings.Contains(r.stderr, want) {
			t.Errorf("exit code %d, no %q on stderr:\n%s", r.code, want, r.stderr)
		}
	}
	if !strings.Contains(r.stdout, path+" is right, but the agent of this release refuses it") {
		t.Errorf("stdout:\n%s", r.stdout)
	}
	last := 0
	for _, line := range strings.Split(strings.TrimSpace(r.stderr), "\n") {
		var at int
		if fmt.Sscanf(strings.TrimPrefix(line, path), ":%d:", &at); at < last {
			t.Errorf("warnings are not in the order of the file:\n%s", r.stderr)
		}
		last = at
		if !strings.HasPrefix(line, path+":") {
			t.Errorf("a line without a place: %s", line)
		}
	}
	r = start(t, "agent", "--policy", path)
	if r.code != 1 || !strings.Contains(r.stderr, "provider local: names are not built yet") {
		t.Errorf("agent: exit code %d, stderr:\n%s", r.code, r.stderr)
	}
}

// TestHelpTeaches: every command of the contract has a text and an example.
func TestHelpTeaches(t *testing.T) {
	commands := []string{"agent", "check", "plan", "reload", "exec", "status", "top", "conns", "explain", "doctor", "detach", "demo", "version"}
	root := start(t, "--help")
	for _, name := range commands {
		if !strings.Contains(root.stdout, "\n  "+name+" ") {
			t.Errorf("%s is not in the list of commands", name)
		}
		r := start(t, name, "--help")
		for _, want := range []string{"Examples:\n  ", "Usage:", "--cgroup-root", "--bpffs", "--admin-socket"} {
			if r.code != 0 || !strings.Contains(r.stdout, want) {
				t.Errorf("%s --help has no %q", name, want)
			}
		}
	}
	if strings.Contains(root.stdout, "demo-") {
		t.Error("the parts of the demo are nobody's business")
	}
}

// TestDoctorAlwaysAnswers: on any machine, as any user.
func TestDoctorAlwaysAnswers(t *testing.T) {
	r := start(t, "doctor", "-o", "json")
	var findings []finding
	if err := json.Unmarshal([]byte(r.stdout), &findings); err != nil {
		t.Fatalf("%v; exit code %d, stderr:\n%s", err, r.code, r.stderr)
	}
	fatal := false
	for _, f := range findings {
		fatal = fatal || f.Fatal && !f.OK
		if f.Detail == "" || !f.OK && (f.Cost == "" || f.Cure == "") {
			t.Errorf("a finding that does not say everything: %+v", f)
		}
		if f.Name == "bpffs" && f.OK {
			t.Error("found a bpf file system where there is nothing")
		}
	}
	if !fatal || r.code != 1 {
		t.Errorf("without a bpf file system nothing can be limited; exit code %d", r.code)
	}
}
