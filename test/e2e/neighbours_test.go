package e2e

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
)

// foreign attaches a program of somebody else, which lets everything pass, to a cgroup
// until the test ends or detach is called.
func foreign(t testing.TB, cgroup, name string, typ ebpf.ProgramType, at ebpf.AttachType, flags uint32) (id ebpf.ProgramID, detach func()) {
	t.Helper()
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: name, Type: typ, AttachType: at, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	info, err := prog.Info()
	if err != nil {
		t.Fatal(err)
	}
	id, _ = info.ID()
	dir, err := os.Open(cgroup)
	if err != nil {
		t.Fatal(err)
	}
	err = link.RawAttachProgram(link.RawAttachProgramOptions{Target: int(dir.Fd()), Program: prog, Attach: at, Flags: flags})
	if err != nil {
		t.Fatal(err)
	}
	attached := true
	detach = func() {
		if !attached {
			return
		}
		attached = false
		err := link.RawDetachProgram(link.RawDetachProgramOptions{Target: int(dir.Fd()), Program: prog, Attach: at})
		if err := errors.Join(err, dir.Close(), prog.Close()); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(detach)
	return id, detach
}

// allowMulti is BPF_F_ALLOW_MULTI (linux/bpf.h).
const allowMulti = 2

// Programs of others on our hooks are listed by status, table and document, and by doctor,
// with their hook, id and name, whether an agent runs or not; they are no reason for
// --check to fail, and they survive whatever ours does.
func TestNeighbours(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	n.write("apiVersion: bulkhead/v1\nkind: Policy\nmode: enforce\nproviders: {deepseek: {cidrs: [@1/32], limits: {connections: 1}}}\nfeatures: {chat: {class: realtime, cpu: none}}\n")
	before, _ := foreign(t, n.Cgroup.Path, "their_connect", ebpf.CGroupSockAddr, ebpf.AttachCGroupInet4Connect, allowMulti)
	a := n.start()
	after, _ := foreign(t, n.Cgroup.Path, "their_sockops", ebpf.SockOps, ebpf.AttachCGroupSockOps, allowMulti)
	packets, detach := foreign(t, n.Cgroup.Path, "their_packets", ebpf.CGroupSKB, ebpf.AttachCGroupInetEgress, allowMulti)

	words := []string{
		fmt.Sprintf("connect4: program %d their_connect", before),
		fmt.Sprintf("sockops: program %d their_sockops", after),
		fmt.Sprintf("egress: program %d their_packets", packets),
	}
	told := func(when string) {
		t.Helper()
		c := n.status().condition("Programs")
		if c == nil || c.Reason != "Foreign" {
			t.Fatalf("%s: condition %+v", when, c)
		}
		wantWords(t, c.Message, words...)
		if !wantWords(t, n.must("status"), words...) {
			t.Errorf("that was %s", when)
		}
	}
	told("with an agent")
	n.wantRun(0, nil, "status", "--check")
	wantWords(t, n.run("doctor").stdout, fmt.Sprintf("connect4 %d their_connect", before))

	client := n.client("chat")
	dials(t, client, n.addr(1), 2, syscall.ECONNREFUSED)
	n.wantCounts(map[string]counts{"provider deepseek": {1, 1, 1, 1, 1}})

	a.kill()
	told("without an agent")
	a = n.start()
	told("with the next agent")
	detach()
	if c := n.status().condition("Programs"); c == nil || strings.Contains(c.Message, words[2]) {
		t.Errorf("after one is gone: %+v", c)
	}
	a.signal(syscall.SIGTERM)
	a.end()
	client.Kill()
	n.must("detach")
	if ids := attached(t, n.Cgroup.Path); !slices.Equal(ids, []ebpf.ProgramID{before, after}) {
		t.Errorf("attached after detach: %v, want theirs, %d and %d", ids, before, after)
	}
}

// A program of somebody else on a compartment's own cgroup runs before ours for all that
// is in it, and may deny or rewrite: status lists it, with the cgroup.
func TestNeighboursBelow(t *testing.T) {
	n := newNode(t)
	n.write("apiVersion: bulkhead/v1\nkind: Policy\nmode: enforce\nproviders: {}\nfeatures: {chat: {class: realtime, cpu: none}}\n")
	n.start()
	n.client("chat") // so that its slice is there
	id, _ := foreign(t, n.slice("chat"), "their_connect", ebpf.CGroupSockAddr, ebpf.AttachCGroupInet4Connect, allowMulti)
	wantWords(t, n.must("status"), fmt.Sprintf("program %d their_connect", id), "bulkhead-chat.slice")
}
