package conn

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Options say where an instance lives. Instances with different options live side
// by side.
type Options struct {
	// CgroupRoot is the directory of the cgroup that programs are attached to.
	CgroupRoot string
	// BPFFS is a bpf file system; pins go to BPFFS/bulkhead.
	BPFFS string
	// MaxSlots is how many connections that hold something there is room for, at
	// most; 0 is the default. Only Open of an instance that is not pinned yet heeds
	// it: the kernel cannot resize a map, so what is pinned keeps its size.
	MaxSlots uint32

	layout int // a test is another release
}

// Bounds of Options.MaxSlots. A slot takes up to 256 bytes of kernel memory while its
// connection is open. Room for one that is not takes 48: two buckets of 16
// (kernel/bpf/hashtab.c) and an eighth of a slot of 128.
const (
	MinMaxSlots     = 1024
	DefaultMaxSlots = uint32(kernelConstantMAX_SLOTS)
	MaxMaxSlots     = 1 << 22
)

// dir is the instance's own directory; its lock is the agent's lock.
func (o Options) dir() string { return filepath.Join(o.BPFFS, "bulkhead") }

// pins is where maps and links of this build's layout are. Another layout is
// another directory, so a build never opens maps that it would misread.
func (o Options) pins() string {
	number := int(kernelConstantBULKHEAD_LAYOUT)
	if o.layout != 0 {
		number = o.layout
	}
	return filepath.Join(o.dir(), "v"+strconv.Itoa(number))
}

// A hook is one place where a program is attached.
type hook struct {
	name    string // of the link's pin
	program string
	attach  ebpf.AttachType
	udp     bool // only while the plan names UDP
}

// hooks in the order of attaching: what releases first, then what takes, so that no
// slot is ever taken that nothing would give back. Detaching goes the other way.
func hooks() []hook {
	return []hook{
		{"link_sock_release", kernelProgBhSockRelease, ebpf.AttachCgroupInetSockRelease, false},
		{"link_sockops", kernelProgBhSockops, ebpf.AttachCGroupSockOps, false},
		{"link_connect4", kernelProgBhConnect4, ebpf.AttachCGroupInet4Connect, false},
		{"link_connect6", kernelProgBhConnect6, ebpf.AttachCGroupInet6Connect, false},
		{"link_egress", kernelProgBhEgress, ebpf.AttachCGroupInetEgress, true},
		{"link_ingress", kernelProgBhIngress, ebpf.AttachCGroupInetIngress, true},
		{"link_sendmsg4", kernelProgBhSendmsg4, ebpf.AttachCGroupUDP4Sendmsg, true},
		{"link_sendmsg6", kernelProgBhSendmsg6, ebpf.AttachCGroupUDP6Sendmsg, true},
	}
}

const (
	bpfFSMagic   = unix.BPF_FS_MAGIC
	cgroup2Magic = unix.CGROUP2_SUPER_MAGIC
	linkPrefix   = "link_" // of the pins of links, in every layout
	staging      = "new-"  // prefix of a directory that is not published yet
)

func isFS(path string, magic int64) (bool, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return false, err
	}
	return int64(st.Type) == magic, nil
}

func (o Options) checkBPFFS() error {
	ok, err := isFS(o.BPFFS, bpfFSMagic)
	if err != nil {
		return fmt.Errorf("%w: %w (mount one: mount -t bpf bpf %s)", ErrNoBPFFS, &os.PathError{Op: "statfs", Path: o.BPFFS, Err: err}, o.BPFFS)
	}
	if !ok {
		return fmt.Errorf("%s: %w (mount one: mount -t bpf bpf %s)", o.BPFFS, ErrNoBPFFS, o.BPFFS)
	}
	return nil
}

func (o Options) check() error {
	if o.MaxSlots != 0 && (o.MaxSlots < MinMaxSlots || o.MaxSlots > MaxMaxSlots) {
		return fmt.Errorf("room for %d connections: it must be %d to %d", o.MaxSlots, MinMaxSlots, MaxMaxSlots)
	}
	if err := o.checkBPFFS(); err != nil {
		return err
	}
	ok, err := isFS(o.CgroupRoot, cgroup2Magic)
	if err != nil {
		return fmt.Errorf("cgroup root %s: %w", o.CgroupRoot, err)
	}
	if !ok {
		return fmt.Errorf("cgroup root %s: %w (see mount -t cgroup2)", o.CgroupRoot, ErrNoCgroup2)
	}
	return nil
}

// lock takes the instance for this process, or says who has it. bpffs has no
// regular files, but flock(2) works on its directories.
func (o Options) lock() (*os.File, error) {
	for try := 0; ; try++ {
		if err := os.Mkdir(o.dir(), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return nil, fmt.Errorf("pin directory: %w%s", err, needsRoot(err))
		}
		f, err := os.Open(o.dir())
		if err != nil {
			return nil, fmt.Errorf("pin directory: %w%s", err, needsRoot(err))
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				pid, _ := Holder(o)
				if pid == 0 && try < 10 {
					// Perhaps only somebody who looked (Holder) for a moment.
					time.Sleep(20 * time.Millisecond)
					continue
				}
				return nil, &BusyError{Dir: o.dir(), PID: pid}
			}
			return nil, fmt.Errorf("lock %s: %w", o.dir(), err)
		}
		// Who had it before may have removed the directory as the last thing it did:
		// then this lock is of nothing.
		opened, err := f.Stat()
		if err == nil {
			var there os.FileInfo
			if there, err = os.Stat(o.dir()); err == nil && os.SameFile(opened, there) {
				return f, nil
			}
		}
		f.Close()
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("lock %s: %w", o.dir(), err)
		}
	}
}

// needsRoot is the cure for an error of permission.
func needsRoot(err error) string {
	if errors.Is(err, os.ErrPermission) {
		return " (needs root)"
	}
	return ""
}

// Holder returns the pid of the agent that runs on these pins, from /proc/locks
// (proc_locks(5)); ok is false if none does. The pid is 0 if it is of another pid
// namespace.
func Holder(o Options) (pid int, ok bool) {
	f, err := os.Open(o.dir())
	if err != nil {
		return 0, false
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB); err == nil {
		return 0, false // released by the close
	} else if !errors.Is(err, unix.EWOULDBLOCK) {
		return 0, false
	}
	var st unix.Stat_t
	if unix.Fstat(int(f.Fd()), &st) != nil {
		return 0, true
	}
	want := fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	locks, err := os.ReadFile("/proc/locks")
	if err != nil {
		return 0, true
	}
	for _, line := range strings.Split(string(locks), "\n") {
		// 1: FLOCK  ADVISORY  WRITE 4711 00:1c:2 0 EOF
		w := strings.Fields(line)
		if len(w) >= 6 && w[1] == "FLOCK" && w[3] == "WRITE" && w[5] == want {
			pid, _ = strconv.Atoi(w[4])
			return max(pid, 0), true
		}
	}
	return 0, true
}

// removeStaging removes what a start that was killed has left: directories that
// were never published. Their links detach with their pins. The lock is held.
func (o Options) removeStaging() error {
	entries, err := os.ReadDir(o.dir())
	if err != nil {
		return fmt.Errorf("pin directory: %w", err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), staging) {
			if err := os.RemoveAll(filepath.Join(o.dir(), e.Name())); err != nil {
				return fmt.Errorf("remove what an interrupted start left: %w", err)
			}
		}
	}
	return nil
}

// pinnedMaps opens every map of this layout. Nothing is changed, so what is not
// ours is only reported.
func (o Options) pinnedMaps(spec *ebpf.CollectionSpec, opts *ebpf.LoadPinOptions) (map[string]*ebpf.Map, error) {
	maps := make(map[string]*ebpf.Map, len(spec.Maps))
	for name, ms := range spec.Maps {
		if !isPinned(name) {
			continue
		}
		how := opts
		if name == kernelMapHomes {
			// Mapped, to read only; but the kernel maps no map shared through a
			// descriptor that is for reading only (bpf_map_mmap wants VM_SHARED).
			how = nil
		}
		m, err := ebpf.LoadPinnedMap(filepath.Join(o.pins(), name), how)
		switch name {
		case kernelMapSlots, kernelMapUdpSockets, kernelMapHomes, kernelMapCookies:
			if err == nil {
				ms.MaxEntries = m.MaxEntries() // as it was asked for when it was made
			}
		}
		if err == nil {
			err = ms.Compatible(m)
		}
		if err != nil {
			closeAll(maps)
			if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
				return nil, fmt.Errorf("open pinned map %s: %w (needs root, or CAP_BPF)", name, err)
			}
			return nil, fmt.Errorf("%w: %s in %s: %w (stop the agent, then `bulkhead detach` removes them)", ErrForeign, name, o.pins(), err)
		}
		maps[name] = m
	}
	return maps, nil
}

// isPinned says whether a map outlives the process. Constants do not.
func isPinned(name string) bool { return !strings.HasPrefix(name, ".") }

func closeAll(maps map[string]*ebpf.Map) {
	for _, m := range maps {
		m.Close()
	}
}

// loadPinnedLink opens a link and proves that it is attached to root; nil without
// an error if there is no such pin.
func (o Options) loadPinnedLink(h hook, root uint64) (link.Link, error) {
	path := filepath.Join(o.pins(), h.name)
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open pinned link %s: %w", path, err)
	}
	info, err := l.Info()
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("pinned link %s: %w", path, err)
	}
	cg := info.Cgroup()
	if cg == nil || cg.CgroupId != root {
		l.Close()
		at := "elsewhere"
		if cg != nil {
			at = fmt.Sprintf("to cgroup id %d", cg.CgroupId)
			if cg.CgroupId == 0 {
				at = "to a cgroup that is gone"
			}
		}
		return nil, fmt.Errorf("%w: %s is attached %s, not to %s (id %d); use another --bpffs for another root, or `bulkhead detach` first",
			ErrForeign, path, at, o.CgroupRoot, root)
	}
	return l, nil
}

// inode is the cgroup id of a cgroup directory (64-bit kernels).
func inode(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, fmt.Errorf("cgroup %s: %w", path, err)
	}
	return st.Ino, nil
}

// text is a C string of a shared structure.
func text(c []int8) string {
	b := make([]byte, 0, len(c))
	for _, x := range c {
		b = append(b, byte(x))
	}
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

// setText fills a C string, which was zero before and stays terminated.
func setText(c []int8, s string) {
	for i := 0; i < len(s) && i < len(c)-1; i++ {
		c[i] = int8(s[i])
	}
}
