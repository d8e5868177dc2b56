package main

import (
	"bytes"
	"debug/elf"
	_ "embed"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// init.sh is the guest's init.
//
//go:embed init.sh
var initScript string

// commandsScript runs the commands, in either kind of guest.
//
//go:embed commands.sh
var commandsScript string

// guestModules are loaded in every guest: the socket dumps and what tests
// build networks from. On Debian they are modules, and nothing in the guest
// would load them on demand.
func guestModules() []string {
	return []string{"inet_diag", "tcp_diag", "udp_diag", "raw_diag", "unix_diag", "mptcp_diag", "veth", "dummy"}
}

// archive is an initramfs in cpio's newc format (Linux
// Documentation/driver-api/early-userspace/buffer-format.rst). It is not
// compressed: unpacking costs the emulated CPU more than loading does.
type archive struct {
	buf  bytes.Buffer
	seen map[string]bool
	ino  int
}

// file adds a file with its directories; mode is the permissions.
func (a *archive) file(name string, mode fs.FileMode, data []byte) {
	name = strings.TrimPrefix(path.Clean("/"+name), "/")
	a.dir(path.Dir(name))
	a.entry(name, 0o100000|uint32(mode.Perm()), data)
}

// dir adds a directory and those above it, each once.
func (a *archive) dir(name string) {
	name = strings.TrimPrefix(path.Clean("/"+name), "/")
	if name == "" || a.seen[name] {
		return
	}
	a.dir(path.Dir(name))
	if a.seen == nil {
		a.seen = map[string]bool{}
	}
	a.seen[name] = true
	a.entry(name, 0o040755, nil)
}

func (a *archive) entry(name string, mode uint32, data []byte) {
	a.ino++
	// magic, ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor,
	// rdevmajor, rdevminor, namesize, check
	fmt.Fprintf(&a.buf, "070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X",
		a.ino, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name)+1, 0)
	a.buf.WriteString(name)
	a.buf.WriteByte(0)
	a.pad()
	a.buf.Write(data)
	a.pad()
}

func (a *archive) pad() {
	for a.buf.Len()%4 != 0 {
		a.buf.WriteByte(0)
	}
}

// bytes ends the archive and returns it.
func (a *archive) bytes() []byte {
	a.entry("TRAILER!!!", 0, nil)
	return a.buf.Bytes()
}

// guestFile is a file or directory of the host and its place in the guest.
type guestFile struct{ host, guest string }

// buildImage makes the initramfs: init, busybox, modules, files, and one
// script for each command.
//
// With a disk the files are kept apart, in /stage, to be put onto it.
func buildImage(k kernel, nonce string, m machine, number int, files []guestFile, commands []command) ([]byte, error) {
	var a archive
	for _, d := range []string{"bin", "dev", "proc", "run", "sys", "tmp", "root", "etc"} {
		a.dir(d)
	}
	stage, wanted := "/", guestModules()
	if m.disk != "" {
		stage, wanted = "/stage", append(wanted, "virtio_pci", "virtio_blk")
		a.dir(stage)
	}
	text := strings.NewReplacer("@NONCE@", nonce, "@BOOT@", strconv.Itoa(number), "@BOOTS@", strconv.Itoa(m.boots))
	a.file("init", 0o755, []byte(text.Replace(initScript)))
	a.file("commands.sh", 0o755, []byte(text.Replace(commandsScript)))
	a.file("etc/passwd", 0o644, []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/tmp:/bin/sh\n"))
	a.file("etc/group", 0o644, []byte("root:x:0:\nnogroup:x:65534:\n"))
	a.file("etc/hosts", 0o644, []byte("127.0.0.1 localhost\n::1 localhost\n"))
	if err := addFiles(&a, guestFile{"/bin/busybox", "/bin/busybox"}); err != nil {
		return nil, fmt.Errorf("%w (install busybox-static)", err)
	}
	modules, err := loadOrder(k.modules, wanted)
	if err != nil {
		return nil, fmt.Errorf("kernel %s: %w", k.name, err)
	}
	for i, m := range modules {
		a.file(fmt.Sprintf("modules/%03d-%s.ko", i, m.name), 0o644, m.data)
	}
	for _, f := range files {
		f.guest = path.Join(stage, f.guest)
		if err := addFiles(&a, f); err != nil {
			return nil, err
		}
	}
	for i, c := range commands {
		a.file(fmt.Sprintf("commands/%03d", i), 0o755, []byte(shellLine(c.args)))
	}
	return a.bytes(), nil
}

// addFiles adds a file, or a directory with all that it holds.
func addFiles(a *archive, f guestFile) error {
	return filepath.WalkDir(f.host, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(f.host, p)
		if err != nil {
			return err
		}
		name := path.Join(f.guest, filepath.ToSlash(rel))
		info, err := os.Stat(p) // follows links: the guest gets what they name
		if err != nil {
			return err
		}
		if info.IsDir() {
			a.dir(name)
			return nil
		}
		data, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		if interpreter(data) {
			return fmt.Errorf("%s is linked dynamically and the guest has no libraries: build it with CGO_ENABLED=0", p)
		}
		a.file(name, info.Mode(), data)
		return nil
	})
}

// interpreter says whether data is an executable that needs a dynamic linker.
func interpreter(data []byte) bool {
	f, err := elf.NewFile(bytes.NewReader(data))
	if err != nil {
		return false // not an ELF file
	}
	return slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP })
}

// shellLine is args as one line of sh.
func shellLine(args []string) string {
	quoted := make([]string, len(args))
	for i, a := range args {
		quoted[i] = "'" + strings.ReplaceAll(a, "'", `'\''`) + "'"
	}
	return strings.Join(quoted, " ") + "\n"
}

// module is a kernel module, decompressed: busybox can only load those.
type module struct {
	name string
	data []byte
}

// loadOrder returns the modules wanted, each after those that it depends on.
// What is built into the kernel is left out; what does not exist is an error.
func loadOrder(dir string, wanted []string) ([]module, error) {
	files := map[string]string{}
	err := filepath.WalkDir(filepath.Join(dir, "kernel"), func(p string, d fs.DirEntry, err error) error {
		if name, _, ok := strings.Cut(d.Name(), ".ko"); err == nil && ok {
			files[moduleName(name)] = p
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	// Not all of Debian's packages that hold modules hold this list.
	builtin, err := os.ReadFile(filepath.Join(dir, "modules.builtin"))
	if err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	isBuiltin := map[string]bool{}
	for _, p := range strings.Fields(string(builtin)) {
		isBuiltin[moduleName(strings.TrimSuffix(path.Base(p), ".ko"))] = true
	}

	var order []module
	done := map[string]bool{}
	var visit func(name string) error
	visit = func(name string) error {
		if done[name] || isBuiltin[name] {
			return nil
		}
		done[name] = true
		file, ok := files[name]
		if !ok {
			return fmt.Errorf("no module %s in %s", name, dir)
		}
		data, err := readModule(file)
		if err != nil {
			return err
		}
		deps, err := dependencies(data)
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		for _, d := range deps {
			if err := visit(moduleName(d)); err != nil {
				return err
			}
		}
		order = append(order, module{name, data})
		return nil
	}
	for _, w := range wanted {
		if err := visit(moduleName(w)); err != nil {
			return nil, err
		}
	}
	return order, nil
}

// moduleName is the name as the kernel says it; file names may have dashes.
func moduleName(s string) string { return strings.ReplaceAll(s, "-", "_") }

// readModule reads a module file and decompresses it.
func readModule(file string) ([]byte, error) {
	tool := map[string]string{".ko": "cat", ".xz": "xz", ".zst": "zstd", ".gz": "gzip"}[filepath.Ext(file)]
	switch tool {
	case "":
		return nil, fmt.Errorf("%s: unknown compression", file)
	case "cat":
		return os.ReadFile(file)
	}
	data, err := exec.Command(tool, "-dc", file).Output()
	if err != nil {
		return nil, fmt.Errorf("%s -dc %s: %w", tool, file, err)
	}
	return data, nil
}

// dependencies reads the names of the modules that must be loaded first, which
// each module states in its section .modinfo. (modules.dep says the same, but
// is made on the installed machine and not in the package.)
func dependencies(ko []byte) ([]string, error) {
	f, err := elf.NewFile(bytes.NewReader(ko))
	if err != nil {
		return nil, err
	}
	s := f.Section(".modinfo")
	if s == nil {
		return nil, fmt.Errorf("no section .modinfo")
	}
	info, err := s.Data()
	if err != nil {
		return nil, err
	}
	for _, field := range strings.Split(string(info), "\x00") {
		if v, ok := strings.CutPrefix(field, "depends="); ok && v != "" {
			return strings.Split(v, ","), nil
		}
	}
	return nil, nil
}
