// Command generated checks that the committed kernel objects and their Go side
// are what the sources give: it runs go generate, compares, and puts back what
// was there.
//
// Go files must be the same to the byte. Objects are compared section by
// section, and by the maps that they define, but not by their type
// information as such: it describes the kernel's own context structs too, and
// those have grown from one release's headers to the next (bpf_sock_ops by a
// field between 6.1 and 6.12) without changing a single instruction.
package main

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
)

// generatedFile matches what bpf2go writes.
var generatedFile = regexp.MustCompile(`_bpfe[lb]\.(go|o)$`)

func main() {
	if err := check("."); err != nil {
		fmt.Fprintln(os.Stderr, "generated:", err)
		os.Exit(1)
	}
}

// check compares the generated files below root with newly generated ones.
func check(root string) error {
	before, err := read(root)
	if err != nil {
		return err
	}
	if len(before) == 0 {
		return fmt.Errorf("no generated files below %s", root)
	}
	cmd := exec.Command("go", "generate", "./...")
	cmd.Dir, cmd.Stdout, cmd.Stderr = root, os.Stdout, os.Stderr
	genErr := cmd.Run()
	after, err := read(root)
	if err := errors.Join(genErr, err, restore(before, after)); err != nil {
		return err
	}
	if diffs := compare(before, after); len(diffs) > 0 {
		return fmt.Errorf("run make generate and commit the result:\n  %s", strings.Join(diffs, "\n  "))
	}
	return nil
}

// read returns the generated files below root by path.
func read(root string) (map[string][]byte, error) {
	files := map[string][]byte{}
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !generatedFile.MatchString(p) {
			return err
		}
		files[p], err = os.ReadFile(p)
		return err
	})
	return files, err
}

// restore puts the files back to before.
func restore(before, after map[string][]byte) error {
	var errs []error
	for p := range after {
		if _, ok := before[p]; !ok {
			errs = append(errs, os.Remove(p))
		}
	}
	for p, data := range before {
		errs = append(errs, os.WriteFile(p, data, 0o644))
	}
	return errors.Join(errs...)
}

// compare returns a sentence for each file that differs, sorted.
func compare(before, after map[string][]byte) []string {
	var diffs []string
	for p, old := range before {
		now, ok := after[p]
		switch {
		case !ok:
			diffs = append(diffs, p+": is not generated any more")
		case bytes.Equal(old, now):
		case filepath.Ext(p) != ".o":
			diffs = append(diffs, p+": differs")
		default:
			if err := sameObject(old, now); err != nil {
				diffs = append(diffs, p+": "+err.Error())
			}
		}
	}
	for p := range after {
		if _, ok := before[p]; !ok {
			diffs = append(diffs, p+": is not committed")
		}
	}
	slices.Sort(diffs)
	return diffs
}

// sameObject returns nil if two objects hold the same programs, data and maps.
func sameObject(a, b []byte) error {
	secA, err := sections(a)
	if err != nil {
		return err
	}
	secB, err := sections(b)
	if err != nil {
		return err
	}
	mapsA, err := maps(a)
	if err != nil {
		return err
	}
	mapsB, err := maps(b)
	if err != nil {
		return err
	}
	for what, pair := range map[string][2]map[string]string{"section": {secA, secB}, "map": {mapsA, mapsB}} {
		for name := range pair[0] {
			if _, ok := pair[1][name]; !ok {
				return fmt.Errorf("%s %s is gone", what, name)
			}
		}
		for name, now := range pair[1] {
			if old, ok := pair[0][name]; !ok || old != now {
				return fmt.Errorf("%s %s differs", what, name)
			}
		}
	}
	return nil
}

// sections returns the contents of an object's sections by name, without type
// information and names.
func sections(object []byte) (map[string]string, error) {
	f, err := elf.NewFile(bytes.NewReader(object))
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, s := range f.Sections {
		if s.Type == elf.SHT_NULL || s.Type == elf.SHT_STRTAB || strings.Contains(s.Name, ".BTF") {
			continue
		}
		data, err := s.Data()
		if err != nil {
			return nil, fmt.Errorf("section %s: %w", s.Name, err)
		}
		out[s.Name] += string(data)
	}
	return out, nil
}

// maps returns the definitions of an object's maps by name. Their keys' and
// values' types are in the Go file.
func maps(object []byte) (map[string]string, error) {
	spec, err := ebpf.LoadCollectionSpecFromReader(bytes.NewReader(object))
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for name, m := range spec.Maps {
		out[name] = fmt.Sprint(m.Type, m.KeySize, m.ValueSize, m.MaxEntries, m.Flags, m.Pinning)
	}
	return out, nil
}
