package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

func run() error {
	only := flag.String("only", "", "names that have this in them")
	duration := flag.Duration("duration", time.Minute, "how long the model test has to find it")
	flag.Parse()
	out, err := exec.Command("git", "rev-parse", "--show-toplevel").Output()
	if err != nil {
		return fmt.Errorf("find the tree: %w", err)
	}
	tree := strings.TrimSpace(string(out))
	survived := 0
	fmt.Printf("%-32s %s\n", "removed", "the model test")
	// Nothing is removed in the first: what fails without a cause proves nothing.
	for _, m := range append([]mutant{{name: "nothing"}}, mutants...) {
		if !strings.Contains(m.name, *only) {
			continue
		}
		said, failed, err := try(tree, m, *duration)
		if err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		fmt.Printf("%-32s %s\n", m.name, said)
		if failed != (m.from != "") {
			survived++
		}
	}
	if survived > 0 {
		return fmt.Errorf("%d not as they should be", survived)
	}
	return nil
}

// failure is what the model test says of one.
var failure = regexp.MustCompile(`round \d+, after ([0-9.a-zµ]+), seed (\d+): (.*)\n?(.*)`)

// try says what the model test made of a mutant.
func try(tree string, m mutant, duration time.Duration) (said string, failed bool, err error) {
	dir, err := os.MkdirTemp("", "bulkhead-mutant-")
	if err != nil {
		return "", false, err
	}
	defer os.RemoveAll(dir)
	if err := copyTree(tree, dir); err != nil {
		return "", false, err
	}
	if m.from != "" {
		if err := edit(filepath.Join(dir, "bpf", m.file), m.from, m.to); err != nil {
			return "", false, err
		}
		if err := command(dir, "make", "generate").run(); err != nil {
			return "", false, err
		}
	}
	test := filepath.Join(dir, "model.test")
	if err := command(dir, "go", "test", "-trimpath", "-c", "-o", test, "./test/model").run(); err != nil {
		return "", false, err
	}
	// Beside the given time: loading, the time until a difference is believed, and no
	// time to make the sequence shorter.
	ctx, cancel := context.WithTimeout(context.Background(), duration+time.Minute)
	defer cancel()
	args := []string{test, "-test.run", "^TestModel$", "-duration", duration.String(), "-shrink", "0"}
	if os.Geteuid() != 0 {
		args = append([]string{"sudo", "-E"}, args...)
	}
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Dir = filepath.Join(dir, "test", "model")
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	text, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	switch found := failure.FindStringSubmatch(string(text)); {
	case err == nil:
		if m.from == "" {
			return "passes", false, nil
		}
		return "SURVIVED", false, nil
	case errors.As(err, &exit) && found != nil:
		return fmt.Sprintf("failed after %s with seed %s: %s %s", found[1], found[2], found[3], strings.TrimSpace(found[4])), true, nil
	}
	return "", false, fmt.Errorf("%w\n%s", err, text)
}

// copyTree copies what git knows of, as it is now, and what it does not ignore.
func copyTree(from, to string) error {
	list := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	list.Dir = from
	out, err := list.Output()
	if err != nil {
		return fmt.Errorf("list the tree: %w", err)
	}
	for _, name := range strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00") {
		b, err := os.ReadFile(filepath.Join(from, name))
		if errors.Is(err, os.ErrNotExist) {
			continue // deleted, and not yet so in git
		}
		if err != nil {
			return err
		}
		target := filepath.Join(to, name)
		if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(target, b, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// edit replaces a text that must be in a file exactly once.
func edit(file, from, to string) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if n := strings.Count(string(b), from); n != 1 {
		return fmt.Errorf("%s has this %d times, not once:\n%s", file, n, from)
	}
	return os.WriteFile(file, []byte(strings.Replace(string(b), from, to, 1)), 0o644)
}

type task struct{ *exec.Cmd }

func command(dir, name string, args ...string) task {
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	return task{cmd}
}

// run runs it and has what it printed in the error.
func (t task) run() error {
	out, err := t.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", t, err, out)
	}
	return nil
}
