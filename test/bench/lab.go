package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"bulkhead/pkg/cgroup"
	"bulkhead/pkg/conn"
)

// configuration is one row of a table.
type configuration struct {
	name   string
	policy string // what ours enforces; "" attaches nothing of ours
	empty  bool   // programs that only return, where ours would be
	// packets: instead of those, ones that see packets, as ours do while a policy names UDP.
	packets bool
	rules   *rules // of a packet filter, during its turns

	// programs by hook, for their own times.
	programs map[string]*ebpf.Program
	// dir has the programs attached, inner is where the worker is during the turns.
	dir, inner string
}

// lab is the network namespace, the cgroups and the worker.
type lab struct {
	ctx   context.Context // done when the run is interrupted
	tree  *cgroup.Tree
	root  string // cgroup of this run
	dir   string // files of this run
	bpffs string
	*worker
	listener  int // of what the worker connects to and accepts
	endWorker func()
	stop      []func()
	at        string // where the worker is
}

// newLab makes them below what the process outside has made and will remove.
func newLab(ctx context.Context, p places) (l *lab, err error) {
	l = &lab{ctx: ctx, root: p.cgroup, dir: p.dir, bpffs: filepath.Join(p.dir, "bpf")}
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
	if err := l.mount(); err != nil {
		return nil, err
	}
	if l.tree, err = cgroup.Find(""); err != nil {
		return nil, err
	}
	if l.listener, err = listening(syscall.SOCK_STREAM, connectPort); err != nil {
		return nil, err
	}
	l.worker, l.endWorker, err = startWorker(os.NewFile(uintptr(l.listener), "listener"))
	return l, err
}

// mount gives it a bpf file system that nobody else sees.
func (l *lab) mount() error {
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := os.Mkdir(l.bpffs, 0o700); err != nil {
		return err
	}
	if err := syscall.Mount("bpf", l.bpffs, "bpf", 0, ""); err != nil {
		return fmt.Errorf("mount bpf: %w", err)
	}
	return nil
}

func (l *lab) close() {
	if l.endWorker != nil {
		l.endWorker() // before all others: only empty cgroups can be removed
	}
	l.end(0)
}

// end undoes what was made since there were so many things to undo.
func (l *lab) end(since int) {
	for i := len(l.stop) - 1; i >= since; i-- {
		l.stop[i]()
	}
	l.stop = l.stop[:since]
}

// start makes a configuration's cgroups and programs.
func (l *lab) start(c *configuration) error {
	c.dir = filepath.Join(l.root, strings.NewReplacer(" ", "-", ",", "").Replace(c.name))
	c.inner = filepath.Join(c.dir, "worker")
	if err := os.MkdirAll(c.inner, 0o755); err != nil {
		return err
	}
	l.stop = append(l.stop, func() { l.leave(); os.Remove(c.inner); os.Remove(c.dir) })
	var err error
	switch {
	case c.empty:
		c.programs, err = l.attachEmpty(c.dir, c.packets)
	case c.policy != "":
		if err = l.attachOurs(c.dir, c.inner, c.policy); err == nil {
			c.programs, err = l.attached(c.dir)
		}
	}
	if err != nil {
		return fmt.Errorf("%s: %w", c.name, err)
	}
	return nil
}

// startAll is start for each whose tools are there; the others are told.
func (l *lab) startAll(all []*configuration) (able []*configuration, missing []string, err error) {
	for _, c := range all {
		if c.rules != nil {
			if err := l.try(c.rules); err != nil {
				missing = append(missing, fmt.Sprintf("%s: left out: %v", c.name, err))
				continue
			}
		}
		if err := l.start(c); err != nil {
			return nil, nil, err
		}
		able = append(able, c)
	}
	return able, missing, nil
}

// move brings the worker into a cgroup.
func (l *lab) move(dir string) error {
	if l.at == dir {
		return nil
	}
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(fmt.Sprint(l.worker.pid)), 0); err != nil {
		return fmt.Errorf("move the worker: %w", err)
	}
	l.at = dir
	return nil
}

// leave brings the worker out of whatever cgroup it is in.
func (l *lab) leave() { l.move(l.tree.Dir) }

// turn has the worker do a job in a configuration's cgroup.
func (l *lab) turn(c *configuration, job string, n int) (numbers []float64, err error) {
	if err := l.ctx.Err(); err != nil {
		return nil, err
	}
	if c.rules != nil {
		if err := c.rules.put(); err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, c.rules.remove()) }()
	}
	if err := l.move(c.inner); err != nil {
		return nil, err
	}
	numbers, err = l.worker.do(job, n)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.name, err)
	}
	return numbers, nil
}

// rounds calls turn for every configuration, round after round. The first round, -1,
// warms up.
func (l *lab) rounds(what string, n int, all []*configuration, turn func(round, i int) error) error {
	for r := -1; r < n; r++ {
		for i := range all {
			// So nobody always follows the same one.
			if err := turn(r, (i+r+len(all))%len(all)); err != nil {
				return err
			}
		}
		progress("%s: round %d of %d", what, r+1, n)
	}
	return nil
}

// progress says on standard error what is running, on one line; "" clears it.
func progress(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "\r\x1b[K"+format, args...)
}

// try puts rules for a moment, to see whether this machine can.
func (l *lab) try(r *rules) error {
	if _, err := exec.LookPath(r.program); err != nil {
		return fmt.Errorf("%s is not installed", r.program)
	}
	if err := r.put(); err != nil {
		return fmt.Errorf("this kernel cannot load it: %w", err)
	}
	return r.remove()
}

func (r *rules) put() error {
	return command(r.input, r.load)
}

func (r *rules) remove() error {
	for _, c := range r.unload {
		if err := command("", c); err != nil {
			return err
		}
	}
	return nil
}

func command(input string, args []string) error {
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin = strings.NewReader(input)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", args[0], err, strings.TrimSpace(string(out)))
	}
	return nil
}

// attachEmpty attaches programs that only return, on the hooks that ours are on.
func (l *lab) attachEmpty(dir string, packets bool) (map[string]*ebpf.Program, error) {
	type hook struct {
		name string
		t    ebpf.ProgramType
		a    ebpf.AttachType
	}
	hooks := []hook{
		{"sock_release", ebpf.CGroupSock, ebpf.AttachCgroupInetSockRelease},
		{"sockops", ebpf.SockOps, ebpf.AttachCGroupSockOps},
		{"connect4", ebpf.CGroupSockAddr, ebpf.AttachCGroupInet4Connect},
		{"connect6", ebpf.CGroupSockAddr, ebpf.AttachCGroupInet6Connect},
	}
	if packets {
		hooks = []hook{
			{"egress", ebpf.CGroupSKB, ebpf.AttachCGroupInetEgress},
			{"ingress", ebpf.CGroupSKB, ebpf.AttachCGroupInetIngress},
		}
	}
	programs := map[string]*ebpf.Program{}
	for _, h := range hooks {
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
		programs[h.name] = p
	}
	return programs, nil
}

// attachOurs puts a policy in force at dir, with inner as feature f and, if the policy
// has tenants, tenant t.
func (l *lab) attachOurs(dir, inner, text string) error {
	plan, err := compiled(text)
	if err != nil {
		return err
	}
	o, err := l.instance(dir)
	if err != nil {
		return err
	}
	k, err := conn.Open(o)
	if err != nil {
		return err
	}
	l.stop = append(l.stop, func() { k.Close(); conn.Detach(o) })
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

// instance is that of a cgroup, with a directory of its own for its pins.
func (l *lab) instance(dir string) (conn.Options, error) {
	o := l.options(dir)
	if err := os.Mkdir(o.BPFFS, 0o700); err != nil {
		return o, err
	}
	l.stop = append(l.stop, func() { os.Remove(o.BPFFS) })
	return o, nil
}

func (l *lab) options(dir string) conn.Options {
	return conn.Options{CgroupRoot: dir, BPFFS: filepath.Join(l.bpffs, filepath.Base(dir))}
}

// attached finds the programs that are attached at dir, by hook.
func (l *lab) attached(dir string) (map[string]*ebpf.Program, error) {
	list, err := conn.Programs(l.options(dir))
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
