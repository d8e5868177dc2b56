package upgrade

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
)

// edit is a change of one file of the tree.
type edit struct {
	path string
	what *regexp.Regexp
	with string
}

// The releases that are made of this one. Where a field is put matters to nobody but who
// wrote it: the other finds it by its name.
func nextRelease() []edit {
	return []edit{
		{"bpf/types.h", regexp.MustCompile(`BULKHEAD_LAYOUT = (\d+),`), "BULKHEAD_LAYOUT = 1$1,"},
		{"bpf/types.h", regexp.MustCompile(`(?m)^struct slot \{\n.*\n`), "$0\t__u64 spare;\n"},
		{"bpf/types.h", regexp.MustCompile(`(?m)^\t__u64 accepted;\n`), "$0\t__u64 spare;\n"},
		{"bpf/types.h", regexp.MustCompile(`(?m)^struct traffic_count \{\n`), "$0\t__u64 spare;\n"},
		{"bpf/types.h", regexp.MustCompile(`(?m)^struct traffic_name \{\n`), "$0\tchar spare[16];\n"},
	}
}

func otherPrograms() []edit {
	return []edit{{"bpf/bulkhead.bpf.c", regexp.MustCompile(`(?m)^int (bh_connect4|bh_sock_release)\(.*\)\n\{\n`), "$0\tbpf_ktime_get_ns();\n"}}
}

// copyTree copies what a binary is built from.
func copyTree(to, from string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		switch {
		case rel == ".git" || rel == "bin" || rel == "test" || rel == "docs":
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		case d.IsDir():
			return os.MkdirAll(filepath.Join(to, rel), 0o755)
		case !d.Type().IsRegular():
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(to, rel), text, 0o644)
	})
}

// apply makes the edits in a tree, each of which must change something, and returns how
// to undo them.
func apply(tree string, edits []edit) (undo func() error, err error) {
	before := map[string][]byte{}
	for _, e := range edits {
		path := filepath.Join(tree, e.path)
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		if before[path] == nil {
			before[path] = text
		}
		if !e.what.Match(text) {
			return nil, fmt.Errorf("%s has nothing that is %s", e.path, e.what)
		}
		if err := os.WriteFile(path, e.what.ReplaceAll(text, []byte(e.with)), 0o644); err != nil {
			return nil, err
		}
	}
	return func() (err error) {
		for path, text := range before {
			err = errors.Join(err, os.WriteFile(path, text, 0o644))
		}
		return err
	}, nil
}

// builder builds as whoever has started this through sudo, so that the build cache stays
// theirs.
type builder struct{ credential *syscall.Credential }

func newBuilder() builder {
	uid, err1 := strconv.ParseUint(os.Getenv("SUDO_UID"), 10, 32)
	gid, err2 := strconv.ParseUint(os.Getenv("SUDO_GID"), 10, 32)
	if err1 != nil || err2 != nil || uid == 0 {
		return builder{}
	}
	return builder{&syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
}

// own gives all of a directory to who builds.
func (b builder) own(dir string) error {
	if b.credential == nil {
		return nil
	}
	return filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		return errors.Join(err, os.Lchown(path, int(b.credential.Uid), int(b.credential.Gid)))
	})
}

// run runs the go command in a tree.
func (b builder) run(tree string, args ...string) error {
	tool := "go"
	if _, err := exec.LookPath(tool); err != nil {
		tool = filepath.Join(os.Getenv("GOROOT"), "bin", "go") // set by go test, where sudo has another PATH
	}
	cmd := exec.Command(tool, args...)
	cmd.Dir = tree
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if os.Getenv("BPF_CFLAGS") == "" {
		// As in the Makefile.
		cmd.Env = append(cmd.Env, "BPF_CFLAGS=-O2 -g -Wall -Werror -mcpu=v3 -I/usr/include/"+machine()+"-linux-gnu")
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: b.credential}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}

func machine() string {
	var u syscall.Utsname
	if syscall.Uname(&u) != nil {
		return ""
	}
	var b []byte
	for _, c := range u.Machine {
		if c != 0 {
			b = append(b, byte(c))
		}
	}
	return string(b)
}

func (b builder) build(tree, binary string) error {
	return b.run(tree, "build", "-trimpath", "-buildvcs=false", "-o", binary, "./cmd/agent")
}

// buildAll builds every release into a directory.
func buildAll(dir string) error {
	b := newBuilder()
	root, err := filepath.Abs(filepath.Join("..", ".."))
	if err != nil {
		return err
	}
	tree := filepath.Join(dir, "tree")
	if err := copyTree(tree, root); err != nil {
		return err
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		return err
	}
	if err := b.own(dir); err != nil {
		return err
	}
	if binary := os.Getenv("BULKHEAD_BINARY"); binary != "" {
		if err := os.Symlink(binary, filepath.Join(dir, "this")); err != nil {
			return err
		}
	} else if err := b.build(tree, filepath.Join(dir, "this")); err != nil {
		return err
	}
	for name, edits := range map[string][]edit{"next": nextRelease(), "programs": otherPrograms()} {
		undo, err := apply(tree, edits)
		if err != nil {
			return err
		}
		if err := b.run(tree, "generate", "./pkg/conn"); err != nil {
			return err
		}
		if err := b.build(tree, filepath.Join(dir, name)); err != nil {
			return err
		}
		if err := undo(); err != nil {
			return err
		}
	}
	return nil
}
