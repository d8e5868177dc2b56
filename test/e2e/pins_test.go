package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
)

// pins are the paths in the node's part of the bpf file system.
func (n *node) pins() (all []string) {
	n.t.Helper()
	err := filepath.WalkDir(n.BPFFS, func(path string, _ fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		all = append(all, path)
		return err
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return all
}

// layout is the directory of the pins of the one layout that is in force.
func (n *node) layout() string {
	n.t.Helper()
	dirs, err := filepath.Glob(filepath.Join(n.BPFFS, "bulkhead", "v*"))
	if err != nil || len(dirs) != 1 {
		n.t.Fatalf("directories of pins: %v (%v)", dirs, err)
	}
	return dirs[0]
}

func remove(t testing.TB, paths ...string) {
	t.Helper()
	for _, p := range paths {
		if _, err := os.Stat(p); err != nil {
			t.Fatal(err)
		}
		if err := os.RemoveAll(p); err != nil {
			t.Fatal(err)
		}
	}
}

// Pins that somebody removes while the agent runs are there again within a moment, and
// nothing else is noticed of it.
func TestPinsRemoved(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	n.serve(2)
	client := n.place(n.Mkdir("apps/batch"))
	n.write(busy)
	a := n.start()
	dials(t, client, n.addr(1), 6, 0)
	client.MustDial(kerneltest.UDP4, n.addr(2))
	before, ids, dir := n.pins(), attached(t, n.Cgroup.Path), n.layout()
	told := 0
	back := func() {
		t.Helper()
		// Nothing that holds has let go.
		wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))
		kerneltest.Poll(t, "the pins are there again", func() error {
			if now := n.pins(); !slices.Equal(now, before) {
				return fmt.Errorf("pins:\n%s", strings.Join(now, "\n"))
			}
			return nil
		})
		told++
		kerneltest.Poll(t, "the agent tells of it", func() error {
			lines := 0
			for _, l := range n.lines() {
				if strings.Contains(l.Msg, "somebody had removed pins") {
					lines++
				}
			}
			if lines != told {
				return fmt.Errorf("%d lines, want %d", lines, told)
			}
			return nil
		})
		n.wantRun(0, nil, "status", "--check")
		if now := attached(t, n.Cgroup.Path); !slices.Equal(now, ids) {
			t.Errorf("programs %v, were %v", now, ids)
		}
		b := n.status().find("provider tight")
		if b.InUse != 6 || b.Peak != 6 {
			t.Errorf("%+v", b)
		}
	}
	remove(t, dir)
	back()
	remove(t, dir+"/link_connect4")
	back()
	remove(t, dir+"/homes", dir+"/control", dir+"/link_sock_release")
	back()
	remove(t, filepath.Dir(dir)) // with the lock
	back()
	n.wantRun(1, []string{"another agent", fmt.Sprintf("pid %d", a.Process.Pid)}, n.agentCommand()...)

	// They are pins as any: what goes with a reload goes, and what comes with it too.
	n.write(strings.Replace(busy, "protocol: [tcp, udp]", "protocol: tcp", 1))
	n.must("reload")
	if _, err := os.Stat(dir + "/link_sendmsg4"); err == nil {
		t.Error("the link of UDP stays without UDP in the policy")
	}
	n.write(busy)
	n.must("reload")
	ids = attached(t, n.Cgroup.Path)
	remove(t, dir)
	back()

	// And they hold what is in force when the agent is gone.
	a.kill()
	wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))
	if now := attached(t, n.Cgroup.Path); !slices.Equal(now, ids) {
		t.Errorf("programs %v, were %v", now, ids)
	}
	n.start()
	n.wantCounts(map[string]counts{"provider tight": {6, 6, 6, 6, n.status().find("provider tight").Rejected["full"]}})
	client.Kill()
	n.wantNothing()
	n.wantUnmended()
}

// Pins that are removed while no agent runs take the limits with them, and status says
// so. The next start begins anew, with what is open.
func TestPinsRemovedWithoutAgent(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	client := n.place(n.Mkdir("apps/batch"))
	n.write(busy)
	n.start().kill()
	dials(t, client, n.addr(1), 6, 0)
	dir := n.layout()

	// A map alone: the limits hold, and what to do is said.
	remove(t, dir+"/slots")
	wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))
	for _, args := range [][]string{n.agentCommand(), {"status"}, {"conns"}} {
		n.wantRun(1, []string{"slots", "pins are not usable", "bulkhead detach"}, args...)
	}
	n.must("detach")
	n.wantDetached()
	fds := dials(t, client, n.addr(1), 2, 0)
	a := n.start()
	n.wantHeldAnew(client, 8)
	client.Close(fds...)
	wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))

	// All of them.
	a.kill()
	remove(t, n.layout())
	kerneltest.Poll(t, "nothing is attached", func() error {
		if ids := attached(t, n.Cgroup.Path); len(ids) > 0 {
			return fmt.Errorf("programs %v", ids)
		}
		return nil
	})
	fds = dials(t, client, n.addr(1), 3, 0)
	n.wantRun(1, nil, "status", "--check")
	if c := n.status().condition("Loaded"); c == nil || c.Reason != "NotLoaded" || !strings.Contains(c.Message, "bulkhead agent --policy") {
		t.Errorf("condition %+v", c)
	}
	n.start()
	n.wantHeldAnew(client, 9)
	wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))
	client.Close(fds...)
	wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))
	client.Kill()
	n.wantNothing()
	n.wantUnmended()
}

// wantHeldAnew fails unless a start has found what a client had open at tight, and conns
// has who that is.
func (n *node) wantHeldAnew(c *kerneltest.Client, open int) {
	n.t.Helper()
	n.wantCounts(map[string]counts{"provider tight": {6, open, open, 0, 0}})
	all := n.conns()
	if len(all) != open {
		n.t.Errorf("%d connections, want %d", len(all), open)
	}
	for _, one := range all {
		if one.PID != c.PID || one.Command != "exe" || one.Feature != "batch" || one.Address != n.addr(1) {
			n.t.Errorf("%+v, want it to be of process %d", one, c.PID)
		}
	}
}

// A bpf file system that only this mount namespace has is told of, once, and is no fault:
// such are those of these tests.
func TestPrivateBPFFS(t *testing.T) {
	n := newNode(t)
	n.write(busy)
	n.start()
	var ns unix.Stat_t
	if err := unix.Stat("/proc/self/ns/pid", &ns); err != nil {
		t.Fatal(err)
	}
	private := 0
	for _, l := range n.lines() {
		if strings.Contains(l.Msg, "only this mount namespace has the bpf file system") {
			private++
			wantWords(t, l.text, n.BPFFS, "Bidirectional", "on the host")
		}
	}
	out := n.must("doctor")
	if ns.Ino == 0xEFFFFFFC { // the first pid namespace, whose process 1 is the host's
		if private != 1 {
			t.Errorf("%d lines of a private file system", private)
		}
		wantWords(t, out, "short  bpffs on the host", "only this mount namespace has it", "mountPropagation: Bidirectional")
	} else {
		if private != 0 {
			t.Error("it cannot be known whether the file system is private")
		}
		wantWords(t, out, "bpffs on the host", "not known")
	}
	n.wantRun(0, nil, "status", "--check")
}
