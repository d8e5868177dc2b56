package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"bulkhead/pkg/policy"
)

// Exit codes of exec, as env(1) has them.
const (
	exitExec          = 125 // bulkhead itself failed; the command was not started
	exitNotExecutable = 126
	exitNotFound      = 127
)

func (a *app) execCommand() *cobra.Command {
	var feature, tenant, as string
	cmd := &cobra.Command{
		Use:   "exec --feature F [--tenant T] [--user U] -- CMD [ARG...]",
		Short: "become a command inside a compartment",
		Long: `Moves itself into a leaf of the compartment's slice and then becomes CMD, with the
same process id, open files and environment. So CMD never runs a moment outside
its compartment, and its children stay inside. Works while the agent is down.
Needs root; --user gives it up before CMD starts (and sets HOME, USER, LOGNAME
and SHELL).

The feature, and the tenant if one is given, must be in the policy in force; if
not, CMD is not started. Nothing is ever placed in the default feature: what is
in no other compartment is in it already.

Exit codes: 125 if bulkhead fails, 126 if CMD cannot be executed, 127 if it is
not found, else CMD's own.`,
		Example: `  bulkhead exec --feature batch_summarize -- python3 summarize.py
  bulkhead exec --feature chat --tenant free --user www-data -- ./server --port 8000`,
		Args: aCommand,
	}
	flags := cmd.Flags()
	flags.StringVar(&feature, "feature", "", "`NAME` of the feature (required)")
	flags.StringVar(&tenant, "tenant", "", "`NAME` of the tenant")
	flags.StringVar(&as, "user", "", "`USER` to run as, by name or number")
	// CMD's own flags are not ours, also without the "--".
	flags.SetInterspersed(false)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if feature == "" {
			return wrongUse("--feature is missing")
		}
		// A script whose variable is not set must not lose its limits.
		if flags.Changed("tenant") && tenant == "" {
			return wrongUse("--tenant is empty: leave it out for the feature without a tenant")
		}
		return a.exec(feature, tenant, as, args)
	}
	return cmd
}

// exec returns only if it failed.
func (a *app) exec(feature, tenant, as string, args []string) error {
	failed := func(err error) error { return &exitError{exitExec, err} }

	tree, where, err := a.instance()
	if err != nil {
		return failed(err)
	}
	plan, err := planInForce(where)
	if err != nil {
		return failed(err)
	}
	slice, err := sliceOf(plan, feature, tenant)
	if err != nil {
		return failed(err)
	}
	env := os.Environ()
	var who *identity
	if as != "" {
		if who, err = lookUp(as); err != nil {
			return failed(err)
		}
		env = who.environment(env)
	}
	// Before anything is made: a mistyped command leaves no cgroup behind.
	path, err := find(args[0])
	if err != nil {
		return err
	}
	if _, err := tree.Enter(slice); err != nil {
		return failed(err)
	}
	if who != nil {
		if err := who.become(); err != nil {
			return failed(err)
		}
	}
	err = syscall.Exec(path, args, env)
	return startError(args[0], err)
}

// sliceOf finds the slice of a compartment in the plan in force.
func sliceOf(plan *policy.Plan, feature, tenant string) (string, error) {
	var features []string
	for _, f := range plan.Features {
		features = append(features, f.Name)
	}
	switch {
	case feature == policy.DefaultFeature:
		return "", fmt.Errorf("feature %s is what every process is in that is in no other: start the command without bulkhead exec", policy.DefaultFeature)
	case !slices.Contains(features, feature):
		known := slices.DeleteFunc(slices.Clone(features), func(f string) bool { return f == policy.DefaultFeature })
		return "", fmt.Errorf("feature %q is not in the policy in force%s", feature, orKnown(feature, known))
	case tenant != "" && !slices.Contains(plan.Tenants, tenant):
		return "", fmt.Errorf("tenant %q is not in the policy in force%s", tenant, orKnown(tenant, plan.Tenants))
	}
	id, ok := plan.FindCompartment(feature, tenant)
	if !ok || plan.Compartments[id].Slice == "" {
		return "", fmt.Errorf("%s is no compartment of the policy in force", named(feature, tenant))
	}
	return plan.Compartments[id].Slice, nil
}

// orKnown is what to say after a name that is not known.
func orKnown(name string, known []string) string {
	if len(known) == 0 {
		return "; there are none"
	}
	text := "; there are: " + strings.Join(known, ", ")
	if near := suggest(name, known); near != "" {
		text += fmt.Sprintf("; did you mean %q?", near)
	}
	return text
}

// suggest is the nearest of the known names, by the rule that cobra has for
// commands; "" if none is near.
func suggest(name string, known []string) string {
	c := &cobra.Command{SuggestionsMinimumDistance: 2}
	for _, k := range known {
		c.AddCommand(&cobra.Command{Use: k, Run: func(*cobra.Command, []string) {}})
	}
	if near := c.SuggestionsFor(name); len(near) > 0 {
		return near[0]
	}
	return ""
}

// find is execvp(3)'s search, but says what was wrong: 127 if there is no such
// file, 126 if there is and it cannot be executed.
func find(name string) (string, error) {
	if name == "" {
		return "", startError(name, fs.ErrNotExist)
	}
	path, err := exec.LookPath(name)
	switch {
	case err == nil:
		return path, nil
	case errors.Is(err, exec.ErrDot):
		// Found through an entry of PATH that is relative, which the user chose.
		return path, nil
	case strings.Contains(name, "/"):
		return "", startError(name, err)
	}
	// LookPath passes over files that may not be executed, as execvp does, but
	// execvp remembers that it saw one.
	for _, dir := range filepath.SplitList(os.Getenv("PATH")) {
		if info, err := os.Stat(filepath.Join(dir, name)); err == nil && info.Mode().IsRegular() {
			return "", startError(name, fs.ErrPermission)
		}
	}
	return "", startError(name, fs.ErrNotExist)
}

// startError gives the error of execve(2) its exit code.
func startError(name string, err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, exec.ErrNotFound) || errors.Is(err, syscall.ENOTDIR) {
		return &exitError{exitNotFound, fmt.Errorf("%s: no such command", name)}
	}
	var pe *exec.Error
	if errors.As(err, &pe) {
		err = pe.Err
	}
	return &exitError{exitNotExecutable, fmt.Errorf("%s: cannot be executed: %w", name, err)}
}

// identity is a user to become.
type identity struct {
	name, home, shell string
	uid, gid          int
	groups            []int
}

func lookUp(as string) (*identity, error) {
	u, err := user.Lookup(as)
	if err != nil {
		if _, number := strconv.Atoi(as); number != nil {
			return nil, fmt.Errorf("--user: %w", err)
		}
		if u, err = user.LookupId(as); err != nil {
			return nil, fmt.Errorf("--user: %w", err)
		}
	}
	who := &identity{name: u.Username, home: u.HomeDir, shell: shellOf(u.Username)}
	if who.uid, err = strconv.Atoi(u.Uid); err != nil {
		return nil, fmt.Errorf("--user %s: uid: %w", as, err)
	}
	if who.gid, err = strconv.Atoi(u.Gid); err != nil {
		return nil, fmt.Errorf("--user %s: gid: %w", as, err)
	}
	ids, err := u.GroupIds()
	if err != nil {
		return nil, fmt.Errorf("--user %s: groups: %w", as, err)
	}
	for _, id := range ids {
		n, err := strconv.Atoi(id)
		if err != nil {
			return nil, fmt.Errorf("--user %s: groups: %w", as, err)
		}
		who.groups = append(who.groups, n)
	}
	return who, nil
}

// shellOf is the last field of passwd(5), which package user leaves out; ""
// for users from elsewhere.
func shellOf(name string) string {
	data, err := os.ReadFile("/etc/passwd")
	if err != nil {
		return ""
	}
	for _, line := range strings.Split(string(data), "\n") {
		if f := strings.Split(line, ":"); len(f) == 7 && f[0] == name {
			return f[6]
		}
	}
	return ""
}

// environment is env with what names the user set to this one.
func (w *identity) environment(env []string) []string {
	set := map[string]string{"HOME": w.home, "USER": w.name, "LOGNAME": w.name}
	if w.shell != "" {
		set["SHELL"] = w.shell
	}
	var out []string
	for _, e := range env {
		if key, _, _ := strings.Cut(e, "="); set[key] == "" {
			out = append(out, e)
		}
	}
	for _, key := range []string{"HOME", "LOGNAME", "SHELL", "USER"} {
		if set[key] != "" {
			out = append(out, key+"="+set[key])
		}
	}
	return out
}

// become changes all threads to the user: groups first, while it is allowed.
func (w *identity) become() error {
	if err := syscall.Setgroups(w.groups); err != nil {
		return fmt.Errorf("--user %s: set groups: %w", w.name, err)
	}
	if err := syscall.Setgid(w.gid); err != nil {
		return fmt.Errorf("--user %s: set gid %d: %w", w.name, w.gid, err)
	}
	if err := syscall.Setuid(w.uid); err != nil {
		return fmt.Errorf("--user %s: set uid %d: %w", w.name, w.uid, err)
	}
	return nil
}
