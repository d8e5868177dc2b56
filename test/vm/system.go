package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// systemOf pairs the names that systems have here, which are Debian's versions, with their
// suites and with their kernels' names in releases.
func systemOf(name string) (suite, kernel string, err error) {
	switch name {
	case "12":
		return "bookworm", "6.1", nil
	case "13":
		return "trixie", "6.12", nil
	}
	return "", "", fmt.Errorf("%w: no system %q: there are 12 and 13", errUsage, name)
}

// systemPackages are installed beside the essential ones: systemd, and the container runtimes
// that bulkhead asks (docker.io brings containerd). There is no udev: the guest has
// no devices that come and go, and it boots in half the time.
var systemPackages = []string{"systemd", "systemd-sysv", "dbus", "libpam-systemd", "docker.io", "podman", "busybox-static"}

// masked are units that take their time and that nothing here needs: nobody logs in, the
// kernel has no modules on the disk, and what waits for a device that udev would tell of
// waits forever.
var masked = []string{
	"getty.target", "serial-getty@ttyS0.service", "systemd-firstboot.service", "systemd-remount-fs.service", "systemd-random-seed.service",
	"systemd-update-utmp.service", "systemd-update-utmp-runlevel.service", "systemd-modules-load.service", "modprobe@.service",
	"apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "e2scrub_reap.service",
	"dev-hugepages.mount", "dev-mqueue.mount", "sys-kernel-debug.mount", "sys-kernel-tracing.mount", "sys-fs-fuse-connections.mount", "sys-kernel-config.mount",
	"proc-sys-fs-binfmt_misc.automount",
	// Once, when it is made, is enough.
	"ldconfig.service", "systemd-journal-catalog-update.service", "systemd-update-done.service", "systemd-sysusers.service",
}

// notStarted are units that a test starts when it needs them.
var notStarted = []string{"containerd.service", "docker.service", "docker.socket", "podman.service", "podman.socket", "podman-auto-update.timer", "podman-restart.service"}

// systemFiles are what is configured: runtimes without networks, which need rules and modules that
// the guest has not, and without a file system of their own.
var systemFiles = map[string]string{
	"etc/hostname":                "guest\n",
	"etc/fstab":                   "",
	"etc/machine-id":              "0123456789abcdef0123456789abcdef\n", // else each boot is a first one
	"etc/docker/daemon.json":      `{"bridge": "none", "iptables": false, "ip6tables": false, "storage-driver": "vfs", "live-restore": true}` + "\n",
	"etc/containers/storage.conf": "[storage]\ndriver = \"vfs\"\nrunroot = \"/run/containers/storage\"\ngraphroot = \"/var/lib/containers/storage\"\n",
}

// diskMiB is the size of the disk; what is not used is a hole in its file.
const diskMiB = 2048

// getSystem returns the disk of an installed Debian with systemd as init, of which a guest
// gets a copy, making it first if it is not in the cache or refresh is set. It is made by mmdebstrap, as root, from the machine's own Debian sources with
// another suite in place of its own, which apt verifies as it always does.
func getSystem(ctx context.Context, cache, name string, refresh bool, log io.Writer) (disk string, err error) {
	suite, _, err := systemOf(name)
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, "systems")
	// The number is another when what is in it is.
	disk = filepath.Join(dir, suite+"-4.ext4")
	if _, err := os.Stat(disk); err == nil && !refresh {
		return disk, nil
	} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	if err := makeSystem(ctx, dir, suite, disk, log); err != nil {
		return "", fmt.Errorf("make a Debian %s: %w", name, err)
	}
	return disk, nil
}

func makeSystem(ctx context.Context, dir, suite, disk string, log io.Writer) error {
	if os.Geteuid() != 0 {
		return errors.New("only root can (it is made once and kept)")
	}
	sources, err := sourcesOf(suite)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(dir, ".make-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	list, root, image := filepath.Join(tmp, "debian.sources"), filepath.Join(tmp, "root"), filepath.Join(tmp, "disk")
	if err := os.WriteFile(list, []byte(sources), 0o644); err != nil {
		return err
	}
	fmt.Fprintf(log, "making a system of %s with systemd: once, a minute or two\n", suite)
	run := func(name string, args ...string) error {
		cmd := exec.CommandContext(ctx, name, args...)
		cmd.Env = append(os.Environ(), "LC_ALL=C.UTF-8")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w:\n%s", name, err, out)
		}
		return nil
	}
	packages := systemPackages
	if suite != "bookworm" { // where it is in docker.io
		packages = append(slices.Clone(packages), "docker-cli")
	}
	err = run("mmdebstrap", "--mode=root", "--variant=minbase", "--include="+strings.Join(packages, ","),
		"--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/locale/*", "--dpkgopt=path-exclude=/usr/share/man/*",
		suite, root, list)
	if errors.Is(err, exec.ErrNotFound) {
		return fmt.Errorf("%w (install mmdebstrap)", err)
	}
	if err != nil {
		return err
	}
	for _, unit := range masked {
		if err := os.Symlink("/dev/null", filepath.Join(root, "etc/systemd/system", unit)); err != nil {
			return err
		}
	}
	// What generators make of a machine's disks and command line is nothing here, and with a dozen of them a
	// daemon-reload takes an emulated machine 5.5 s in place of 2.
	generators, err := os.ReadDir(filepath.Join(root, "usr/lib/systemd/system-generators"))
	if err != nil {
		return err
	}
	off := filepath.Join(root, "etc/systemd/system-generators")
	if err := os.MkdirAll(off, 0o755); err != nil {
		return err
	}
	for _, g := range generators {
		if err := os.Symlink("/dev/null", filepath.Join(off, g.Name())); err != nil {
			return err
		}
	}
	for _, unit := range notStarted {
		links, _ := filepath.Glob(filepath.Join(root, "etc/systemd/system/*.wants", unit))
		for _, link := range links {
			if err := os.Remove(link); err != nil {
				return err
			}
		}
	}
	for name, text := range systemFiles {
		err := os.MkdirAll(filepath.Dir(filepath.Join(root, name)), 0o755)
		if err == nil {
			err = os.WriteFile(filepath.Join(root, name), []byte(text), 0o644)
		}
		if err != nil {
			return err
		}
	}
	if err := run("mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-d", root, image, fmt.Sprintf("%dM", diskMiB)); err != nil {
		return err
	}
	return os.Rename(image, disk)
}
