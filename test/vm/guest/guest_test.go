//go:build vm

package guest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

const cgroupRoot = "/sys/fs/cgroup"

// TestWorkingDirectory: tests run as root in /.
func TestWorkingDirectory(t *testing.T) {
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	if dir != "/" || os.Getuid() != 0 {
		t.Errorf("uid %d in %s, want 0 in /", os.Getuid(), dir)
	}
}

// TestMounts: the file systems that the agent needs are where it looks first.
func TestMounts(t *testing.T) {
	for dir, want := range map[string]int64{
		cgroupRoot:    unix.CGROUP2_SUPER_MAGIC,
		"/sys/fs/bpf": unix.BPF_FS_MAGIC,
		"/proc":       unix.PROC_SUPER_MAGIC,
		"/tmp":        unix.TMPFS_MAGIC,
	} {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			t.Errorf("%s: %v", dir, err)
		} else if st.Type != want {
			t.Errorf("%s has file system type %#x, want %#x", dir, st.Type, want)
		}
	}
}

// TestControllers: cpu and memory are cgroup2's and take values.
func TestControllers(t *testing.T) {
	dir := newCgroup(t)
	// In this order: cpu.weight cannot be written while cpu.idle is 1.
	for _, v := range [][2]string{{"cpu.weight", "123"}, {"cpu.idle", "1"}, {"memory.max", "1048576"}} {
		file, value := v[0], v[1]
		name := filepath.Join(dir, file)
		if err := os.WriteFile(name, []byte(value), 0); err != nil {
			t.Error(err)
			continue
		}
		if got, err := os.ReadFile(name); err != nil || strings.TrimSpace(string(got)) != value {
			t.Errorf("%s is %q (%v), want %s", file, got, err, value)
		}
	}
}

// TestModules: what the rig puts into the image is loaded.
func TestModules(t *testing.T) {
	for _, m := range []string{"inet_diag", "tcp_diag", "udp_diag", "unix_diag", "mptcp_diag", "veth"} {
		if _, err := os.Stat("/sys/module/" + m); err != nil {
			t.Error(err)
		}
	}
}

// TestInetDiag: a dump finds a listener on loopback, so lo is up as well.
func TestInetDiag(t *testing.T) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp4", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	want := uint16(l.Addr().(*net.TCPAddr).Port)
	for _, port := range dumpTCP(t) {
		if port == want {
			return
		}
	}
	t.Errorf("no socket with local port %d in the dump", want)
}

// dumpTCP returns the local ports of all IPv4 TCP sockets (sock_diag(7)).
func dumpTCP(t *testing.T) []uint16 {
	t.Helper()
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	// nlmsghdr, then inet_diag_req_v2: family, protocol, ext, pad, states, id
	req := make([]byte, unix.SizeofNlMsghdr+56)
	binary.NativeEndian.PutUint32(req[0:], uint32(len(req)))
	binary.NativeEndian.PutUint16(req[4:], unix.SOCK_DIAG_BY_FAMILY)
	binary.NativeEndian.PutUint16(req[6:], unix.NLM_F_REQUEST|unix.NLM_F_DUMP)
	req[16], req[17] = unix.AF_INET, unix.IPPROTO_TCP
	binary.NativeEndian.PutUint32(req[20:], ^uint32(0))
	if err := unix.Sendto(fd, req, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		t.Fatal(err)
	}
	var ports []uint16
	buf := make([]byte, 1<<16)
	for {
		n, _, err := unix.Recvfrom(fd, buf, 0)
		if err != nil {
			t.Fatal(err)
		}
		for b := buf[:n]; len(b) >= unix.SizeofNlMsghdr; {
			h := (*unix.NlMsghdr)(unsafe.Pointer(&b[0]))
			switch h.Type {
			case unix.NLMSG_DONE:
				return ports
			case unix.NLMSG_ERROR:
				t.Fatalf("dump: %v", unix.Errno(-int32(binary.NativeEndian.Uint32(b[16:]))))
			}
			// inet_diag_msg: family, state, timer, retrans, then the source port
			ports = append(ports, binary.BigEndian.Uint16(b[20:]))
			b = b[(h.Len+3)&^3:]
		}
	}
}

// TestConnect4: a cgroup/connect4 program loads, attaches, and refuses.
func TestConnect4(t *testing.T) {
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type:         ebpf.CGroupSockAddr,
		AttachType:   ebpf.AttachCGroupInet4Connect,
		License:      "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer prog.Close()
	dir := newCgroup(t)
	l, err := link.AttachCgroup(link.CgroupOptions{Path: dir, Attach: ebpf.AttachCGroupInet4Connect, Program: prog})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()

	server, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	move(t, dir)
	c, err := net.Dial("tcp4", server.Addr().String())
	move(t, cgroupRoot)
	if err == nil {
		c.Close()
	}
	if !errors.Is(err, unix.EPERM) {
		t.Errorf("connect under a program that refuses: %v, want %v", err, unix.EPERM)
	}
	if c, err = net.Dial("tcp4", server.Addr().String()); err != nil {
		t.Errorf("connect outside of its cgroup: %v", err)
	} else {
		c.Close()
	}
}

// newCgroup makes a cgroup with cpu and memory for the test.
func newCgroup(t *testing.T) string {
	t.Helper()
	if err := os.WriteFile(filepath.Join(cgroupRoot, "cgroup.subtree_control"), []byte("+cpu +memory"), 0); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(cgroupRoot, "guest-"+t.Name())
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// move moves this process to the cgroup dir.
func move(t *testing.T, dir string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), fmt.Append(nil, os.Getpid()), 0); err != nil {
		t.Fatal(err)
	}
}
