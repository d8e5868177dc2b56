package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
)

// release pairs the name that a kernel has here with the Debian suite that it
// comes from.
type release struct {
	name, suite string
	// prefix is what the kernel's own version must start with: a suite that
	// moved on must not be tested under the old name.
	prefix string
}

// releases are the kernels of ring 3, oldest first.
func releases() []release {
	return []release{
		{"6.1", "bookworm", "6.1."},
		{"6.12", "trixie", "6.12."},
		{"newest", "sid", ""},
	}
}

// kernel is one that is ready to boot.
type kernel struct {
	name    string // as in releases
	version string // as uname -r says
	vmlinuz string // path
	modules string // path of lib/modules/VERSION
}

// cacheDir is where kernels are kept; never inside the repository.
func cacheDir() (string, error) {
	if d := os.Getenv("BULKHEAD_CACHE"); d != "" {
		return filepath.Abs(d)
	}
	d, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no cache directory, set BULKHEAD_CACHE: %w", err)
	}
	return filepath.Join(d, "bulkhead"), nil
}

// getKernel returns r from the cache, fetching it first if it is not there or
// refresh is set. A failed fetch leaves the cache as it was.
func getKernel(ctx context.Context, cache string, r release, refresh bool, log io.Writer) (kernel, error) {
	dir := filepath.Join(cache, "kernels", r.suite)
	k, err := locate(dir, r)
	if err == nil && !refresh {
		return k, nil
	}
	if !refresh && !errors.Is(err, fs.ErrNotExist) {
		return kernel{}, err
	}
	if err := fetchKernel(ctx, dir, r, log); err != nil {
		return kernel{}, fmt.Errorf("fetch kernel %s: %w", r.name, err)
	}
	return locate(dir, r)
}

// locate finds the kernel in a tree of unpacked packages. Until 6.x the image
// is boot/vmlinuz-VERSION, from 7.x it lies with its modules.
func locate(dir string, r release) (kernel, error) {
	var found []string
	for _, lib := range []string{"lib", "usr/lib"} {
		m, err := filepath.Glob(filepath.Join(dir, lib, "modules/*/kernel"))
		if err != nil {
			return kernel{}, err
		}
		found = append(found, m...)
	}
	if len(found) == 0 {
		return kernel{}, fmt.Errorf("kernel %s: no modules in %s: %w", r.name, dir, fs.ErrNotExist)
	}
	if len(found) > 1 {
		return kernel{}, fmt.Errorf("kernel %s: more than one version in %s, remove it and fetch again", r.name, dir)
	}
	modules := filepath.Dir(found[0])
	k := kernel{name: r.name, version: filepath.Base(modules), modules: modules}
	if !strings.HasPrefix(k.version, r.prefix) {
		return kernel{}, fmt.Errorf("kernel %s: suite %s has %s", r.name, r.suite, k.version)
	}
	for _, p := range []string{filepath.Join(dir, "boot", "vmlinuz-"+k.version), filepath.Join(modules, "vmlinuz")} {
		if _, err := os.Stat(p); err == nil {
			k.vmlinuz = p
			return k, nil
		}
	}
	return kernel{}, fmt.Errorf("kernel %s: no vmlinuz for %s in %s", r.name, k.version, dir)
}

// imagePackage matches the packages that hold a kernel image or its modules.
var imagePackage = regexp.MustCompile(`(?m)^linux-(?:image|binary|modules)-\d\S*-cloud-amd64$`)

// fetchKernel downloads and unpacks the newest kernel of r.suite and then
// replaces dir with it.
func fetchKernel(ctx context.Context, dir string, r release, log io.Writer) error {
	if runtime.GOARCH != "amd64" {
		return fmt.Errorf("only amd64 hosts are supported, this is %s", runtime.GOARCH)
	}
	sources, err := sourcesOf(r.suite)
	if err != nil {
		return err
	}

	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), ".fetch-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	apt := aptState{ctx: ctx, dir: tmp, log: log}
	if err := apt.init(sources); err != nil {
		return err
	}
	fmt.Fprintf(log, "fetching kernel %s: the newest cloud kernel of %s\n", r.name, r.suite)
	if _, err := apt.run("apt-get", "-qq", "--error-on=any", "update"); err != nil {
		return fmt.Errorf("%w (if it is signed by a key that this machine does not know: install the newest debian-archive-keyring; nothing unverified is used)", err)
	}
	deps, err := apt.run("apt-cache", "depends", "--recurse", "--important", "linux-image-cloud-amd64")
	if err != nil {
		return err
	}
	packages := imagePackage.FindAllString(deps, -1)
	if len(packages) == 0 {
		return fmt.Errorf("linux-image-cloud-amd64 of %s depends on no kernel image", r.suite)
	}
	if _, err := apt.run("apt-get", append([]string{"-qq", "download"}, packages...)...); err != nil {
		return err
	}
	debs, err := filepath.Glob(filepath.Join(tmp, "*.deb"))
	if err != nil {
		return err
	}
	tree := filepath.Join(tmp, "tree")
	for _, deb := range debs {
		if _, err := apt.run("dpkg-deb", "-x", deb, tree); err != nil {
			return err
		}
	}
	if _, err := locate(tree, r); err != nil {
		return err
	}
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	return os.Rename(tree, dir)
}

// aptState runs apt on a state of its own in dir, so that the machine's lists,
// cache and locks are not touched and root is not needed.
type aptState struct {
	ctx context.Context
	dir string
	log io.Writer
}

func (a aptState) init(sources string) error {
	for _, d := range []string{"lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(a.dir, d), 0o755); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(a.dir, "debian.sources"), []byte(sources), 0o644); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(a.dir, "status"), nil, 0o644); err != nil {
		return err
	}
	conf := fmt.Sprintf(`Dir::State "%[1]s";
Dir::State::lists "%[1]s/lists";
Dir::State::status "%[1]s/status";
Dir::Cache "%[1]s/cache";
Dir::Etc::SourceList "%[1]s/debian.sources";
Dir::Etc::SourceParts "/dev/null";
Dir::Etc::Preferences "/dev/null";
Dir::Etc::PreferencesParts "/dev/null";
APT::Architecture "amd64";
Acquire::Languages "none";
// As root apt would give up its rights for the download, and the user _apt
// cannot reach a cache below /root.
APT::Sandbox::User "root";
`, a.dir)
	return os.WriteFile(filepath.Join(a.dir, "apt.conf"), []byte(conf), 0o644)
}

// run runs one of apt's tools in dir and returns its standard output.
func (a aptState) run(name string, args ...string) (string, error) {
	if strings.HasPrefix(name, "apt-") {
		// Read last, so it wins over the machine's own configuration.
		args = append([]string{"-c", filepath.Join(a.dir, "apt.conf")}, args...)
	}
	cmd := exec.CommandContext(a.ctx, name, args...)
	cmd.Dir = a.dir
	cmd.Env = append(os.Environ(), "LC_ALL=C.UTF-8")
	var out bytes.Buffer
	cmd.Stdout = &out
	cmd.Stderr = a.log
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s %s: %w", name, strings.Join(args, " "), err)
	}
	return out.String(), nil
}
