package sockets

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Namespace is a network namespace and one way into it.
type Namespace struct {
	// Cookie is SO_NETNS_COOKIE, bpf_get_netns_cookie in the kernel programs.
	// Unlike Inode it is not used again while the machine runs.
	Cookie uint64
	// Inode is the number in "net:[4026531840]".
	Inode uint64
	// Path leads into the namespace: /proc/PID/ns/net, a bind mount, or, of a
	// namespace that only a socket is in any more, that socket: /proc/PID/fd/N. It
	// is "" for the caller's own, which needs no entering.
	Path string

	pid, fd int // of the socket that Path is, if it is one
}

// String names the namespace and the way in.
func (n Namespace) String() string {
	if n.Path == "" {
		return fmt.Sprintf("own network namespace (cookie %d)", n.Cookie)
	}
	return fmt.Sprintf("network namespace %s (cookie %d)", n.Path, n.Cookie)
}

// Namespaces returns the caller's own namespace and every other one that can
// be entered, each once, the own one first. The error, if any, says what kept
// some from being looked at (permissions); the rest are good. Processes that
// end meanwhile are no error.
func Namespaces() ([]Namespace, error) {
	var all []Namespace
	err := visit(nil, func(ns Namespace, fd int) bool {
		all = append(all, ns)
		return true
	})
	return all, err
}

// visit calls f for every namespace that can be entered, the caller's own
// first, each once, with a sock_diag socket in it that is closed afterwards.
// It stops when f returns false. The cheap and likely ways in are tried first. known, if
// it is not nil, says of a socket's inode number that f has seen the socket in a namespace
// already, so that it leads to no other.
func visit(known func(inode uint64) bool, f func(ns Namespace, fd int) bool) error {
	done, own, err := visitOwn(f)
	if done || err != nil {
		return err
	}
	entered := map[uint64]bool{own: true}
	var obstacles obstacles
	for way, err := range ways(known) {
		if err != nil {
			obstacles.add(err)
			continue
		}
		if entered[way.Inode] {
			continue
		}
		fd, ns, err := enter(way)
		if err != nil {
			// Another way may lead there: only success marks it as entered.
			obstacles.add(err)
			continue
		}
		entered[ns.Inode] = true
		more := f(ns, fd)
		unix.Close(fd)
		if !more {
			break
		}
	}
	return obstacles.err()
}

// visitOwn is visit for the caller's own namespace, whose inode it returns.
func visitOwn(f func(Namespace, int) bool) (done bool, inode uint64, err error) {
	runtime.LockOSThread() // one thread for the link and the socket
	defer runtime.UnlockOSThread()
	inode, err = linkInode("/proc/thread-self/ns/net")
	if err != nil {
		return false, 0, fmt.Errorf("own network namespace: %w", err)
	}
	fd, cookie, err := diagSocket()
	if err != nil {
		return false, 0, fmt.Errorf("own network namespace: %w", err)
	}
	defer unix.Close(fd)
	return !f(Namespace{Cookie: cookie, Inode: inode}, fd), inode, nil
}

// enter opens a sock_diag socket in the namespace that way leads to.
func enter(way Namespace) (int, Namespace, error) {
	target, err := way.open()
	if err != nil {
		return -1, way, fmt.Errorf("open %s: %w", way.Path, err)
	}
	defer unix.Close(target)
	var st unix.Stat_t
	if err := unix.Fstat(target, &st); err != nil {
		return -1, way, fmt.Errorf("stat %s: %w", way.Path, err)
	}
	way.Inode = st.Ino // the process may have moved, the mount may be covered

	var fd int
	ready := make(chan error)
	go func() {
		// A thread that could not be brought home ends with its goroutine
		// instead of running others in the wrong namespace.
		runtime.LockOSThread()
		home, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			ready <- fmt.Errorf("own network namespace: %w", err)
			return
		}
		defer unix.Close(home)
		if err := unix.Setns(target, unix.CLONE_NEWNET); err != nil {
			runtime.UnlockOSThread()
			ready <- fmt.Errorf("enter %s (needs CAP_SYS_ADMIN): %w", way.Path, err)
			return
		}
		fd, way.Cookie, err = diagSocket()
		if unix.Setns(home, unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
		if err != nil {
			err = fmt.Errorf("%s: %w", way.Path, err)
		}
		ready <- err
	}()
	if err := <-ready; err != nil {
		return -1, way, err
	}
	return fd, way, nil
}

// open returns a descriptor of the namespace.
func (n Namespace) open() (int, error) {
	if n.pid == 0 {
		return unix.Open(n.Path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	}
	process, err := unix.PidfdOpen(n.pid, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(process)
	// The socket cannot close while we have it; that is for microseconds.
	socket, err := unix.PidfdGetfd(process, n.fd, 0)
	if err != nil {
		return -1, fmt.Errorf("%w (pidfd_getfd needs CAP_SYS_PTRACE)", err)
	}
	defer unix.Close(socket)
	ns, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(socket), unix.SIOCGSKNS, 0)
	if errno != 0 {
		return -1, fmt.Errorf("SIOCGSKNS: %w", errno)
	}
	unix.CloseOnExec(int(ns))
	return int(ns), nil
}

// diagSocket opens a sock_diag socket in the thread's namespace, and returns
// that namespace's cookie.
func diagSocket() (fd int, cookie uint64, err error) {
	fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return -1, 0, fmt.Errorf("open sock_diag socket: %w", err)
	}
	cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		unix.Close(fd)
		return -1, 0, fmt.Errorf("read cookie of network namespace (SO_NETNS_COOKIE, kernel 5.14): %w", err)
	}
	return fd, cookie, nil
}

// ways yields every way into a network namespace, with its inode: processes,
// mounts, threads, sockets. Errors are of one way each.
func ways(known func(inode uint64) bool) iter.Seq2[Namespace, error] {
	return func(yield func(Namespace, error) bool) {
		for _, each := range []iter.Seq2[Namespace, error]{processWays, mountWays, threadWays, socketWays(known)} {
			for way, err := range each {
				if !yield(way, err) {
					return
				}
			}
		}
	}
}

func processWays(yield func(Namespace, error) bool) {
	for pid := range numbered("/proc") {
		if !yieldLink(filepath.Join("/proc", pid, "ns/net"), yield) {
			return
		}
	}
}

// threadWays finds namespaces that only a thread which is not its process's
// first is in. It reads a link for every thread of the machine.
func threadWays(yield func(Namespace, error) bool) {
	for pid := range numbered("/proc") {
		tasks := filepath.Join("/proc", pid, "task")
		for tid := range numbered(tasks) {
			if tid != pid && !yieldLink(filepath.Join(tasks, tid, "ns/net"), yield) {
				return
			}
		}
	}
}

// socketWays finds namespaces that nothing is in any more but sockets: a process that
// has left, or was handed the socket, holds it. It looks at every socket of the machine
// that is not known, so it is the last resort.
func socketWays(known func(inode uint64) bool) iter.Seq2[Namespace, error] {
	return func(yield func(Namespace, error) bool) {
		seen := map[uint64]bool{}
		for pid := range numbered("/proc") {
			fds := filepath.Join("/proc", pid, "fd")
			for fd := range numbered(fds) {
				way := Namespace{Path: filepath.Join(fds, fd)}
				link, err := os.Readlink(way.Path)
				if err != nil {
					continue // closed meanwhile, or not to be looked at, as its process was not
				}
				inode, ok := bracketed("socket:", link)
				if !ok || known != nil && known(inode) {
					continue
				}
				way.pid, _ = strconv.Atoi(pid)
				way.fd, _ = strconv.Atoi(fd)
				ns, err := way.open()
				if err == nil {
					var st unix.Stat_t
					err = unix.Fstat(ns, &st)
					way.Inode = st.Ino
					unix.Close(ns)
				}
				if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EBADF) || err == nil && seen[way.Inode] {
					continue
				}
				seen[way.Inode] = seen[way.Inode] || err == nil
				if !yield(way, err) {
					return
				}
			}
		}
	}
}

func yieldLink(path string, yield func(Namespace, error) bool) bool {
	inode, err := linkInode(path)
	return yield(Namespace{Inode: inode, Path: path}, err)
}

// mountWays finds bind mounts of namespaces, which need no process: those in
// our mount namespace, and those of process 1, which an agent in a container
// does not have (container runtimes keep theirs in the host's /run).
func mountWays(yield func(Namespace, error) bool) {
	for _, at := range []struct{ table, root string }{
		{"/proc/thread-self/mountinfo", ""},
		{"/proc/1/mountinfo", "/proc/1/root"},
	} {
		table, err := os.ReadFile(at.table)
		if err != nil {
			if !yield(Namespace{}, err) {
				return
			}
			continue
		}
		for _, way := range mountedNamespaces(table) {
			way.Path = at.root + way.Path
			if !yield(way, nil) {
				return
			}
		}
	}
}

// mountedNamespaces picks the network namespaces out of a mountinfo table,
// see proc_pid_mountinfo(5): field 4 is "net:[INODE]", field 5 the mount
// point with octal escapes, and the type follows a lone "-".
func mountedNamespaces(table []byte) []Namespace {
	var found []Namespace
	for lines := bufio.NewScanner(bytes.NewReader(table)); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) < 5 || !strings.Contains(lines.Text(), " - nsfs ") {
			continue
		}
		if inode, ok := netInode(fields[3]); ok {
			found = append(found, Namespace{Inode: inode, Path: unescape(fields[4])})
		}
	}
	return found
}

// unescape undoes the octal escapes of mountinfo (\040 is a space).
func unescape(s string) string {
	var out strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				out.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		out.WriteByte(s[i])
	}
	return out.String()
}

// numbered yields the entries of dir whose names are numbers; none if dir is
// gone or may not be read.
func numbered(dir string) iter.Seq[string] {
	return func(yield func(string) bool) {
		d, err := os.Open(dir)
		if err != nil {
			return
		}
		defer d.Close()
		names, _ := d.Readdirnames(-1) // a process that ends meanwhile has no more threads
		for _, name := range names {
			if name[0] >= '1' && name[0] <= '9' && !yield(name) {
				return
			}
		}
	}
}

func linkInode(path string) (uint64, error) {
	target, err := os.Readlink(path)
	if err != nil {
		return 0, err
	}
	inode, ok := netInode(target)
	if !ok {
		return 0, fmt.Errorf("%s leads to %q, not to a network namespace", path, target)
	}
	return inode, nil
}

// netInode reads "net:[4026531840]".
func netInode(s string) (uint64, bool) { return bracketed("net:", s) }

// bracketed reads the number in "PREFIX[NUMBER]".
func bracketed(prefix, s string) (uint64, bool) {
	s, ok := strings.CutPrefix(s, prefix+"[")
	if !ok {
		return 0, false
	}
	inode, err := strconv.ParseUint(strings.TrimSuffix(s, "]"), 10, 64)
	return inode, err == nil
}

// obstacles keeps the first of many alike errors and counts the rest.
type obstacles struct {
	first error
	more  int
}

// add leaves out what only says that a process or mount has gone meanwhile.
func (o *obstacles) add(err error) {
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ESRCH):
	case o.first == nil:
		o.first = err
	default:
		o.more++
	}
}

func (o *obstacles) err() error {
	if o.first == nil || o.more == 0 {
		return o.first
	}
	return fmt.Errorf("%w (and %d more)", o.first, o.more)
}
