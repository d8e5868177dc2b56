package policy

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Load reads a policy from a file, or from all *.yaml and *.yml files of a
// directory, in the order of their names. Directories below are not looked at,
// nor is anything that starts with a dot; symbolic links are followed, as
// Kubernetes makes every file of a ConfigMap one.
//
// The error is Errors if the policy is wrong, and wraps that of the file system
// if it cannot be read.
func Load(path string) (*File, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("read policy: %w", err)
	}
	if !info.IsDir() {
		data, err := readFile(path)
		if err != nil {
			return nil, fmt.Errorf("read policy: %w", err)
		}
		return Parse(path, data)
	}
	sources, err := readDir(path)
	if err != nil {
		return nil, fmt.Errorf("read policy: %w", err)
	}
	return parse(sources)
}

// readFile reads one byte more than a policy may have, so that what is larger
// is seen to be.
func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, MaxFileSize+1))
	if err != nil {
		return nil, err // it names the path
	}
	return data, nil
}

// readDir reads a directory so that all files are of one version: Kubernetes
// replaces a ConfigMap's files together, by renaming the link ..data that they
// all go through, and removes what it named before.
func readDir(dir string) ([]source, error) {
	const tries = 100 // each is a whole replacement during one read
	for range tries {
		before := version(dir)
		sources, err := readOnce(dir)
		if version(dir) != before {
			continue
		}
		return sources, err
	}
	return nil, fmt.Errorf("%s is replaced all the time: %d tries", dir, tries)
}

// version is what ..data names, or "".
func version(dir string) string {
	target, err := os.Readlink(filepath.Join(dir, "..data"))
	if err != nil {
		return ""
	}
	return target
}

func readOnce(dir string) ([]source, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var sources []source
	for _, e := range entries { // sorted by name
		path := filepath.Join(dir, e.Name())
		if strings.HasPrefix(e.Name(), ".") || !slices.Contains([]string{".yaml", ".yml"}, filepath.Ext(e.Name())) {
			continue
		}
		info, err := os.Stat(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil, fmt.Errorf("%s is a link to nothing: %w", path, err)
		case err != nil:
			return nil, err
		case info.IsDir():
			continue
		case !info.Mode().IsRegular():
			return nil, fmt.Errorf("%s is not a regular file", path)
		}
		data, err := readFile(path)
		if err != nil {
			return nil, err
		}
		sources = append(sources, source{path, data})
	}
	if len(sources) == 0 {
		return nil, fmt.Errorf("%s has no *.yaml file: an empty directory is not an empty policy", dir)
	}
	return sources, nil
}
