package conn

import (
	"slices"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
)

// What stands in the way of a guest's next slot: its old entry. At home the release and
// the deletion are one step.
func TestOldEntry(t *testing.T) {
	runAll(t,
		test{"what is at home is another socket's", testOtherAtHome}, // before the others crowd them
		test{"somebody else is about to delete it, and does not", testClaimed},
		test{"deleting it is busy now and then", testBusyDelete},
	)
}

// A home's word has 24 bits of the cookie: of two sockets that have them in common, one is
// at home, and the other neither takes its slot for its own nor ends it.
func testOtherAtHome(in *instance) {
	client, _ := two(in)
	fd, s := unreachable(in, client)
	was := s.Cookie
	in.rewrite(&s, func(s *kernelSlot) { s.Cookie ^= 1 << 40 })
	wantErrno(in, client.Connect(fd, "127.2.0.1:80"), 0, "connect beside it")
	in.want(1, 1, "with another's slot at home")
	client.Close(fd)
	in.want(1, 0, "after the close")
	in.rewrite(&s, func(s *kernelSlot) { s.Cookie = was })
	if done, err := in.k.retire(&s); err != nil || !done {
		in.Fatal(done, err)
	}
	s.Word |= uint64(kernelConstantSLOT_RELEASED)
	if err := in.k.bury(&s); err != nil {
		in.Fatal(err)
	}
}

// unreachable leaves a slot of p with nobody but its descriptor.
func unreachable(in *instance, client *kerneltest.Client) (fd int, s slot) {
	in.Helper()
	fd, errno := client.Dial(kerneltest.TCP4, "192.0.2.1:80")
	wantErrno(in, errno, syscall.ENETUNREACH, "connect without a route")
	all, err := readSlots(in.k.coll.Maps)
	if err != nil || len(all) != 1 {
		in.Fatalf("slots %+v (%v), want one", all, err)
	}
	return fd, all[0]
}

// An entry whose claim is never followed by its deletion: the connect is let through
// uncounted and that is counted, and nothing is given back twice.
func testClaimed(in *instance) {
	client, _ := two(in)
	in.crowd()
	fd, s := unreachable(in, client)
	in.rewrite(&s, func(s *kernelSlot) { s.Word |= uint64(kernelConstantSLOT_CLAIMED) })
	before := in.snapshot().Totals.Uncounted
	for i, addr := range []string{"192.0.2.1:80", "127.2.0.1:80"} {
		want := []syscall.Errno{syscall.ENETUNREACH, 0}[i]
		wantErrno(in, client.Connect(fd, addr), want, "connect over a claimed entry")
		in.want(1, 0, "after a connect over a claimed entry")
		if n := in.snapshot().Totals.Uncounted - before; n != uint64(i+1) {
			in.Errorf("%d uncounted, want %d", n, i+1)
		}
	}
	client.Close(fd)
	in.empty("after the close")
}

// Before 6.7 deleting an entry can be EBUSY: a program that interrupts another one of
// its processor while that holds a lock of the same map (htab_lock_bucket in
// kernel/bpf/hashtab.c counted holders with interrupts on). That takes an interrupt in
// the right nanoseconds, so here the program is given a helper that is busy half the
// time. The connect claims the entry, gives the claim back, and tries again.
func testBusyDelete(in *instance) {
	client, _ := two(in)
	in.crowd()
	busy := busyConnect4(in)
	connect4 := in.k.links["link_connect4"]
	if err := connect4.Update(busy); err != nil {
		in.Fatal(err)
	}
	fd, _ := unreachable(in, client)
	before := in.snapshot().Totals.Uncounted
	const connects = 200
	for range connects {
		wantErrno(in, client.Connect(fd, "192.0.2.1:80"), syscall.ENETUNREACH, "connect again")
	}
	in.want(1, 0, "after connects on one descriptor")
	if n := in.count(provider("p")).Accepted; n != 1+connects {
		in.Errorf("%d accepted, want %d", n, 1+connects)
	}
	if n := in.snapshot().Totals.Uncounted - before; n != 0 {
		in.Errorf("%d were let through uncounted", n)
	}
	if err := connect4.Update(in.k.coll.Programs[kernelProgBhConnect4]); err != nil {
		in.Fatal(err)
	}
	wantErrno(in, client.Connect(fd, "127.2.0.1:80"), 0, "connect to q")
	in.want(0, 1, "after a connect to q")
	client.Close(fd)
}

// busyConnect4 is connect4's program, on the same maps, with every call of
// bpf_map_delete_elem replaced by one of a function that half the time returns EBUSY
// instead.
func busyConnect4(in *instance) *ebpf.Program {
	in.Helper()
	spec := in.k.spec.Copy()
	p := spec.Programs[kernelProgBhConnect4]
	spec.Programs = map[string]*ebpf.ProgramSpec{p.Name: p}

	at := slices.IndexFunc(p.Instructions, func(i asm.Instruction) bool { return i.Source() != nil })
	if at < 0 {
		in.Fatal("no instruction has a line") // and then none of ours may have one
	}
	const name = "busy_delete"
	calls := 0
	for i, ins := range p.Instructions {
		if ins.IsBuiltinCall() && asm.BuiltinFunc(ins.Constant) == asm.FnMapDeleteElem {
			p.Instructions[i] = asm.Call.Label(name).WithSource(ins.Source())
			calls++
		}
	}
	if calls == 0 {
		in.Fatal("no call of bpf_map_delete_elem in connect4's program")
	}
	number := &btf.Int{Name: "long", Size: 8, Encoding: btf.Signed}
	busy := asm.Instructions{
		btf.WithFuncMetadata(asm.Mov.Reg(asm.R6, asm.R1), &btf.Func{Name: name, Type: &btf.FuncProto{Return: number}, Linkage: btf.StaticFunc}).
			WithSymbol(name).WithSource(p.Instructions[at].Source()),
		asm.Mov.Reg(asm.R7, asm.R2),
		asm.FnGetPrandomU32.Call(),
		asm.And.Imm(asm.R0, 1),
		asm.JEq.Imm(asm.R0, 0, name+"_idle"),
		asm.Mov.Imm(asm.R0, -int32(unix.EBUSY)),
		asm.Return(),
		asm.Mov.Reg(asm.R1, asm.R6).WithSymbol(name + "_idle"),
		asm.Mov.Reg(asm.R2, asm.R7),
		asm.FnMapDeleteElem.Call(),
		asm.Return(),
	}
	p.Instructions = append(p.Instructions, busy...)

	return in.load(spec)[p.Name]
}
