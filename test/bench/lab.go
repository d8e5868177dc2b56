package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"bulkhead/pkg/cgroup"
	"bulkhead/pkg/conn"
)

const port = 9001

// configuration is one row of the table.
type configuration struct {
	name string
	// policy is what ours enforces; "" attaches nothing of ours.
	policy string
	empty  bool
	// rules are nftables rules that are there during its turns only.
	rules string

	// programs by hook, for their own times.
	programs map[string]*ebpf.Program

	// dir has the programs attached, inner is where the worker is during the turns.
	dir, inner string
}

// configurations are all rows; the first two are what the others are compared with.
func configurations() []*configuration {
	all := []*configuration{
		{name: "none"},
		{name: "empty", empty: true},
		{name: "no match", policy: provider("10.0.0.0/8", "") + "features: {f: {class: batch}}\n"},
		{name: "no match, 10000 cidrs", policy: cidrs(10000) + "features: {f: {class: batch}}\n"},
		{name: "counted, no limit", policy: provider("127.0.0.1/32", "") + "features: {f: {class: batch}}\n"},
		{name: "5 bulkheads", policy: full(5, 0)},
		{name: "7 bulkheads", policy: full(7, 0)},
		{name: "5 bulkheads, 10000 cidrs", policy: full(5, 10000)},
		{name: "5 bulkheads, observe", policy: strings.Replace(full(5, 0), "enforce", "observe", 1)},
	}
	if _, err := exec.LookPath("nft"); err == nil {
		for _, n := range []int{1, 5} {
			all = append(all, &configuration{name: fmt.Sprintf("nft ct count, %d rules", n), rules: nft(n)})
		}
	}
	return all
}

const head = "apiVersion: bulkhead/v1\nkind: Policy\nmode: enforce\n"

func provider(cidr, more string) string {
	return head + "providers:\n  p: {cidrs: [" + cidr + "]" + more + "}\n"
}

func cidrs(n int) string {
	var b strings.Builder
	b.WriteString(head + "providers:\n  p:\n    ports: [443]\n    cidrs: [")
	for i := range n {
		fmt.Fprintf(&b, "10.%d.%d.%d/32, ", i>>8&255, i&255, i*7&255)
	}
	b.WriteString("192.168.0.0/16]\n")
	return b.String()
}

// full is a route of five or seven bulkheads with room for everybody.
func full(n, more int) string {
	s := provider("127.0.0.1/32", ", limits: {connections: 1000}")
	if more > 0 {
		s = strings.Replace(cidrs(more), "providers:\n  p:", "providers:\n  p: {cidrs: [127.0.0.1/32], limits: {connections: 1000}}\n  q:", 1)
	}
	if n == 5 {
		// feature_provider, tenant_provider, feature, tenant, provider
		return s + `tenants: {t: {limits: {connections: 900}, providers: {p: {connections: 800}}}}
features: {f: {class: batch, limits: {connections: 700}, providers: {p: {connections: 600}}}}
`
	}
	return s + `tenants: {t: {limits: {connections: 900}, providers: {p: {connections: 800}}}}
features: {f: {class: batch, limits: {connections: 700}, providers: {p: {connections: 600}}, tenants: {t: {limits: {connections: 500}, providers: {p: {connections: 400}}}}}}
`
}

// nft is n rules that each count the connections to the server, as five limits on one
// route would need.
func nft(n int) string {
	var b strings.Builder
	b.WriteString("table ip bench {\n")
	for i := range n {
		fmt.Fprintf(&b, " set s%d { type ipv4_addr . inet_service; size 65535; flags dynamic; }\n", i)
	}
	b.WriteString(" chain c { type filter hook output priority 0;\n")
	for i := range n {
		fmt.Fprintf(&b, "  tcp dport %d ct state new add @s%d { ip daddr . tcp dport ct count over %d } reject with tcp reset\n", port, i, 500+i)
	}
	b.WriteString(" }\n}\n")
	return b.String()
}

// lab is the network namespace, the server and the cgroups.
type lab struct {
	tree     *cgroup.Tree
	root     string // cgroup of this run
	bpffs    string
	listener *os.File // of the server
	worker   worker
	// endWorker comes before all of stop: only empty cgroups can be removed.
	endWorker func()
	stop      []func()
}

// worker is the process that connects. There is one for all configurations, which is
// moved from cgroup to cgroup: two processes of the same program differ by more than
// what is measured, by the pages and the cache sets that they happened to get.
type worker struct {
	pid int
	in  io.Writer
	out *bufio.Reader
}

func newLab() (l *lab, err error) {
	l = &lab{}
	defer func() {
		if err != nil {
			l.close()
		}
	}()
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, fmt.Errorf("loopback: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return nil, fmt.Errorf("loopback: %w", err)
	}
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return nil, fmt.Errorf("make mounts private: %w", err)
	}
	if l.bpffs, err = os.MkdirTemp("", "bulkhead-bench"); err != nil {
		return nil, err
	}
	l.stop = append(l.stop, func() { os.Remove(l.bpffs) })
	if err := syscall.Mount("bpf", l.bpffs, "bpf", 0, ""); err != nil {
		return nil, fmt.Errorf("mount bpf: %w", err)
	}
	l.stop = append(l.stop, func() { syscall.Unmount(l.bpffs, syscall.MNT_DETACH) })
	if l.tree, err = cgroup.Find(""); err != nil {
		return nil, err
	}
	l.root = filepath.Join(l.tree.Dir, fmt.Sprintf("bulkhead-bench-%d", os.Getpid()))
	if err := os.Mkdir(l.root, 0o755); err != nil {
		return nil, err
	}
	l.stop = append(l.stop, func() { os.Remove(l.root) })
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	l.listener = os.NewFile(uintptr(fd), "listener")
	l.stop = append(l.stop, func() { l.listener.Close() })
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: port}); err != nil {
		return nil, err
	}
	if err := syscall.Listen(fd, 16); err != nil {
		return nil, err
	}
	return l, l.startWorker()
}

func (l *lab) startWorker() error {
	cmd := exec.Command("/proc/self/exe", "worker")
	cmd.Stderr = os.Stderr
	cmd.ExtraFiles = []*os.File{l.listener}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	l.worker = worker{pid: cmd.Process.Pid, in: in, out: bufio.NewReader(out)}
	l.endWorker = func() {
		cmd.Process.Kill()
		cmd.Wait()
	}
	return nil
}

func (l *lab) close() {
	if l.endWorker != nil {
		l.endWorker()
	}
	for i := len(l.stop) - 1; i >= 0; i-- {
		l.stop[i]()
	}
}

// start makes a configuration's cgroups and programs.
func (l *lab) start(c *configuration) error {
	c.dir = filepath.Join(l.root, strings.NewReplacer(" ", "-", ",", "").Replace(c.name))
	c.inner = filepath.Join(c.dir, "worker")
	if err := os.MkdirAll(c.inner, 0o755); err != nil {
		return err
	}
	l.stop = append(l.stop, func() { os.Remove(c.inner); os.Remove(c.dir) })
	var err error
	switch {
	case c.empty:
		c.programs, err = l.attachEmpty(c.dir)
	case c.policy != "":
		if err = l.attachOurs(c.dir, c.inner, c.policy); err == nil {
			c.programs, err = l.attached(c.dir)
		}
	}
	return err
}

// turn has the worker connect n times in a configuration's cgroup, and gives the
// processor time that took.
func (l *lab) turn(c *configuration, n int) (time.Duration, error) {
	if c.rules != "" {
		load := exec.Command("nft", "-f", "-")
		load.Stdin = strings.NewReader(c.rules)
		if out, err := load.CombinedOutput(); err != nil {
			return 0, fmt.Errorf("nft: %w: %s", err, out)
		}
		defer exec.Command("nft", "delete", "table", "ip", "bench").Run()
	}
	if err := os.WriteFile(filepath.Join(c.inner, "cgroup.procs"), []byte(fmt.Sprint(l.worker.pid)), 0); err != nil {
		return 0, fmt.Errorf("move the worker: %w", err)
	}
	fmt.Fprintln(l.worker.in, n)
	line, err := l.worker.out.ReadString('\n')
	if err != nil {
		return 0, fmt.Errorf("worker: %w", err)
	}
	var ns int64
	if _, err := fmt.Sscan(line, &ns); err != nil {
		return 0, errors.New(strings.TrimSpace(line))
	}
	return time.Duration(ns), nil
}

// attachEmpty attaches programs that only return, on the hooks that ours are on.
func (l *lab) attachEmpty(dir string) (map[string]*ebpf.Program, error) {
	programs := map[string]*ebpf.Program{}
	for _, h := range []struct {
		hook string
		t    ebpf.ProgramType
		a    ebpf.AttachType
	}{
		{"sock_release", ebpf.CGroupSock, ebpf.AttachCgroupInetSockRelease},
		{"sockops", ebpf.SockOps, ebpf.AttachCGroupSockOps},
		{"connect4", ebpf.CGroupSockAddr, ebpf.AttachCGroupInet4Connect},
		{"connect6", ebpf.CGroupSockAddr, ebpf.AttachCGroupInet6Connect},
	} {
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Name: "empty", Type: h.t, AttachType: h.a, License: "GPL",
			Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
		})
		if err != nil {
			return nil, fmt.Errorf("empty program for %s: %w", h.a, err)
		}
		at, err := link.AttachCgroup(link.CgroupOptions{Path: dir, Attach: h.a, Program: p})
		if err != nil {
			return nil, fmt.Errorf("attach empty program: %w", err)
		}
		l.stop = append(l.stop, func() { at.Close(); p.Close() })
		programs[h.hook] = p
	}
	return programs, nil
}

// attachOurs puts a policy in force at dir, with inner as feature f, tenant t if the
// policy has one.
func (l *lab) attachOurs(dir, inner, text string) error {
	plan, err := compiled(text)
	if err != nil {
		return err
	}
	pins := filepath.Join(l.bpffs, filepath.Base(dir))
	if err := os.Mkdir(pins, 0o755); err != nil {
		return err
	}
	o := conn.Options{CgroupRoot: dir, BPFFS: pins}
	k, err := conn.Open(o)
	if err != nil {
		return err
	}
	l.stop = append(l.stop, func() { k.Close(); conn.Detach(o); os.Remove(pins) })
	var st syscall.Stat_t
	if err := syscall.Stat(inner, &st); err != nil {
		return err
	}
	m := conn.Member{CgroupID: st.Ino, Level: l.tree.Level + 3}
	for i, c := range plan.Compartments {
		if c.Feature == "f" && (c.Tenant == "t" || len(plan.Tenants) == 0) {
			m.Compartment = uint32(i)
		}
	}
	_, err = k.Apply(plan, []conn.Member{m})
	return err
}

// attached finds the programs that are attached at dir, by hook.
func (l *lab) attached(dir string) (map[string]*ebpf.Program, error) {
	list, err := conn.Programs(conn.Options{CgroupRoot: dir, BPFFS: filepath.Join(l.bpffs, filepath.Base(dir))})
	if err != nil {
		return nil, err
	}
	programs := map[string]*ebpf.Program{}
	for _, one := range list {
		p, err := ebpf.NewProgramFromID(ebpf.ProgramID(one.ID))
		if err != nil {
			return nil, err
		}
		l.stop = append(l.stop, func() { p.Close() })
		programs[one.Hook] = p
	}
	return programs, nil
}

// hookTimes are the nanoseconds that one connect and close spent in each hook, by the
// kernel's own statistics, in a turn of its own since they cost something themselves.
func (l *lab) hookTimes(c *configuration, n int) (map[string]float64, error) {
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		return nil, fmt.Errorf("bpf statistics: %w", err)
	}
	defer stats.Close()
	before := map[string]time.Duration{}
	for hook, p := range c.programs {
		s, err := p.Stats()
		if err != nil {
			return nil, err
		}
		before[hook] = s.Runtime
	}
	if _, err := l.turn(c, n); err != nil {
		return nil, err
	}
	times := map[string]float64{}
	for hook, p := range c.programs {
		s, err := p.Stats()
		if err != nil {
			return nil, err
		}
		times[hook] = float64((s.Runtime - before[hook]).Nanoseconds()) / float64(warmUp+n)
	}
	return times, nil
}
