package conn

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
)

// Offsets in struct bpf_sock_addr and struct bpf_sock_ops, flags and operations
// (linux/bpf.h).
const (
	sockAddrIP4, sockAddrPort = 4, 24
	sockOpsOp, sockOpsFlags   = 0, 84

	opConnect, opState, opRTT = 3, 10, 12
	stateFlag, rttFlag        = 1 << 2, 1 << 3

	allowOverride, allowMulti = 1, 2
)

// neighbour is a program of somebody else that counts how often it runs: by operation if
// it is a sockops one, else all in one.
type neighbour struct {
	in   *instance
	prog *ebpf.Program
	runs *ebpf.Map
	id   ebpf.ProgramID
	at   ebpf.AttachType
}

// typeAt is the type of the programs of a hook.
func typeAt(at ebpf.AttachType) ebpf.ProgramType {
	switch at {
	case ebpf.AttachCGroupSockOps:
		return ebpf.SockOps
	case ebpf.AttachCgroupInetSockRelease:
		return ebpf.CGroupSock
	case ebpf.AttachCGroupInetEgress, ebpf.AttachCGroupInetIngress:
		return ebpf.CGroupSKB
	}
	return ebpf.CGroupSockAddr
}

// newNeighbour loads a program that counts and then does what body says, which has the
// context in R6 and leaves by the label "out", with 1.
func newNeighbour(in *instance, at ebpf.AttachType, body ...asm.Instruction) *neighbour {
	in.Helper()
	runs, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 64})
	if err != nil {
		in.Fatal(err)
	}
	in.Cleanup(func() { runs.Close() })
	code := asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1)}
	if at == ebpf.AttachCGroupSockOps {
		code = append(code, asm.LoadMem(asm.R2, asm.R6, sockOpsOp, asm.Word), asm.StoreMem(asm.RFP, -4, asm.R2, asm.Word))
	} else {
		code = append(code, asm.StoreImm(asm.RFP, -4, 0, asm.Word))
	}
	code = append(code,
		asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -4),
		asm.LoadMapPtr(asm.R1, runs.FD()), asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.Mov.Imm(asm.R1, 1), asm.StoreXAdd(asm.R0, asm.R1, asm.DWord))
	code = append(code, body...)
	code = append(code, asm.Mov.Imm(asm.R0, 1).WithSymbol("out"), asm.Return())
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "neighbour", Type: typeAt(at), AttachType: at, License: "GPL", Instructions: code})
	if err != nil {
		in.Fatalf("%+v", err)
	}
	in.Cleanup(func() { prog.Close() })
	info, err := prog.Info()
	if err != nil {
		in.Fatal(err)
	}
	id, ok := info.ID()
	if !ok {
		in.Fatal("a program without an id")
	}
	return &neighbour{in, prog, runs, id, at}
}

// denying is a body that denies port and lets all else through.
func denying(port uint16) []asm.Instruction {
	return []asm.Instruction{
		asm.LoadMem(asm.R2, asm.R6, sockAddrPort, asm.Word),
		asm.JNE.Imm(asm.R2, int32(binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, port))), "out"),
		asm.Mov.Imm(asm.R0, 0),
		asm.Return(),
	}
}

// rewriting is a body that sends what would go to one address to another.
func rewriting(from, to string) []asm.Instruction {
	number := func(s string) int32 {
		b := netip.MustParseAddr(s).As4()
		return int32(binary.NativeEndian.Uint32(b[:]))
	}
	return []asm.Instruction{
		asm.LoadMem(asm.R2, asm.R6, sockAddrIP4, asm.Word),
		asm.JNE.Imm(asm.R2, number(from), "out"),
		asm.Mov.Imm(asm.R2, number(to)),
		asm.StoreMem(asm.R6, sockAddrIP4, asm.R2, asm.Word),
	}
}

// asking is a body that asks for callbacks of state changes and of round trips when a
// connection begins, beside what others have asked for.
func asking() []asm.Instruction {
	return []asm.Instruction{
		asm.LoadMem(asm.R2, asm.R6, sockOpsOp, asm.Word),
		asm.JNE.Imm(asm.R2, opConnect, "out"),
		asm.LoadMem(asm.R2, asm.R6, sockOpsFlags, asm.Word),
		asm.Or.Imm(asm.R2, stateFlag|rttFlag),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.FnSockOpsCbFlagsSet.Call(),
	}
}

// attach attaches it, as others may, with flags and without a link; detach is done by the
// end of the test.
func (n *neighbour) attach(cgroup string, flags uint32) (detach func(), err error) {
	dir, err := os.Open(cgroup)
	if err != nil {
		return nil, err
	}
	err = link.RawAttachProgram(link.RawAttachProgramOptions{Target: int(dir.Fd()), Program: n.prog, Attach: n.at, Flags: flags})
	if err != nil {
		dir.Close()
		return nil, err
	}
	detach = sync.OnceFunc(func() {
		err := link.RawDetachProgram(link.RawDetachProgramOptions{Target: int(dir.Fd()), Program: n.prog, Attach: n.at})
		if err := errors.Join(err, dir.Close()); err != nil {
			n.in.Error(err)
		}
	})
	n.in.Cleanup(detach)
	return detach, nil
}

func (n *neighbour) mustAttach(cgroup string, flags uint32) (detach func()) {
	n.in.Helper()
	detach, err := n.attach(cgroup, flags)
	if err != nil {
		n.in.Fatal(err)
	}
	return detach
}

// ran is how often it has run since it was asked last, by operation.
func (n *neighbour) ran() map[uint32]uint64 {
	n.in.Helper()
	all := map[uint32]uint64{}
	for op := range n.runs.MaxEntries() {
		var times uint64
		if err := n.runs.Lookup(op, &times); err != nil {
			n.in.Fatal(err)
		}
		if times != 0 {
			all[op] = times
		}
		if err := n.runs.Update(op, uint64(0), ebpf.UpdateExist); err != nil {
			n.in.Fatal(err)
		}
	}
	return all
}

// idsAt are the programs at a hook of a cgroup itself, in their order.
func idsAt(in *instance, cgroup string, at ebpf.AttachType) (ids []ebpf.ProgramID) {
	in.Helper()
	dir, err := os.Open(cgroup)
	if err != nil {
		in.Fatal(err)
	}
	defer dir.Close()
	r, err := link.QueryPrograms(link.QueryOptions{Target: int(dir.Fd()), Attach: at})
	if err != nil {
		in.Fatal(err)
	}
	for _, p := range r.Programs {
		ids = append(ids, p.ID)
	}
	return ids
}

// newInstanceBelow is an instance whose root has a cgroup of the test's above it.
func newInstanceBelow(t *testing.T) *instance {
	t.Helper()
	in := newInstance(t)
	in.close()
	in.o.CgroupRoot = in.Mkdir("root").Path
	in.open()
	return in
}

const limitOfOne = `
providers:
  p: {cidrs: [127.1.0.0/16], limits: {connections: 1, errno: EAGAIN}}
features:
  f: {class: batch}
`

// Another program at the hook of connect4, above our root, at it and below, with every
// flag, from before us and after us. Where both can run both do. Where the kernel does not
// let ours in, nothing of ours is left and theirs is as it was; and where theirs is not let
// in, or does not run below ours, that is the kernel's rule (BPF_F_ALLOW_OVERRIDE in
// linux/bpf.h) and ours works.
func TestNeighbourFlags(t *testing.T) {
	const both, ours, theirs = "both", "only ours", "only theirs"
	above, at, below := "", "root", "root/f"
	in := newInstanceBelow(t)
	f := in.Mkdir(below)
	server := kerneltest.Serve(t, "127.1.0.1:80", kerneltest.Drain)
	plan := planOf(t, limitOfOne)
	apply := func() error {
		_, err := in.k.Apply(plan, []Member{member(t, plan, f, "f", "")})
		return err
	}
	// works says who of us two runs when somebody connects.
	works := func(n *neighbour) (oursRuns, theirsRun bool) {
		t.Helper()
		n.ran()
		client := in.start(f)
		defer client.Kill()
		client.MustDial(kerneltest.TCP4, server.Addr)
		_, errno := client.Dial(kerneltest.TCP4, server.Addr)
		if errno != 0 {
			wantErrno(t, errno, errnoSeen(syscall.EAGAIN), "a second connect")
		}
		return errno != 0, n.ran()[0] == 2
	}
	for _, c := range []struct {
		place      string
		flags      uint32
		theirFirst string // who runs if they were first
		oursFirst  string
	}{
		{above, 0, theirs, ours},
		{above, allowMulti, both, both},
		{at, 0, theirs, ours},
		{at, allowOverride, theirs, ours},
		{at, allowMulti, both, both},
		{below, 0, both, both},
		{below, allowOverride, both, both},
		{below, allowMulti, both, both},
		// Theirs first is not here: ours must not take its place without a word.
		{above, allowOverride, "", ours},
	} {
		for _, first := range []string{theirs, ours} {
			want := c.theirFirst
			if first == ours {
				want = c.oursFirst
			}
			if want == "" {
				continue
			}
			name := fmt.Sprintf("at %q with flags %d, first %s", c.place, c.flags, first)
			n := newNeighbour(in, ebpf.AttachCGroupInet4Connect)
			dir := in.Mkdir(c.place).Path
			var detach func()
			if first == theirs {
				detach = n.mustAttach(dir, c.flags)
				err := apply()
				if want == theirs {
					if !errors.Is(err, unix.EPERM) {
						t.Errorf("%s: %v, want EPERM", name, err)
					}
					if in.k.pinned || len(attached(t, in.o.CgroupRoot)) > 1 {
						t.Errorf("%s: pinned %v, attached %v; want nothing of ours", name, in.k.pinned, attached(t, in.o.CgroupRoot))
					}
				} else if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
			} else {
				if err := apply(); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				var err error
				if detach, err = n.attach(dir, c.flags); err != nil && c.place != at {
					t.Errorf("%s: theirs: %v", name, err)
				} else if err != nil {
					detach = func() {}
				}
			}
			ourRuns, theirRuns := works(n)
			if ourRuns != (want != theirs) || theirRuns != (want != ours) {
				t.Errorf("%s: ours runs %v, theirs %v; want %s", name, ourRuns, theirRuns, want)
			}
			detach()
			// Without them ours can start, whatever was before.
			if err := apply(); err != nil {
				t.Fatalf("%s: once they are gone: %v", name, err)
			}
			if ourRuns, _ := works(n); !ourRuns {
				t.Errorf("%s: ours does not run once they are gone", name)
			}
			in.close()
			if err := Detach(in.o); err != nil {
				t.Fatal(err)
			}
			in.open()
		}
	}
}

func TestNeighbours(t *testing.T) {
	runAll(t,
		test{"denies one port", testDeniesOnePort},
		test{"denies datagrams", testDeniesDatagrams},
		test{"rewrites the destination", testRewrites},
		test{"counts state changes", testCountsStates},
		test{"counts closes and packets", testCountsClosesAndPackets},
	)
}

// A program that denies one port, in every order: what it denies takes nothing for longer
// than its descriptor is open, all else passes, and no place is lost.
func testDeniesOnePort(in *instance) {
	const port = 7777
	client, _ := two(in)
	early := in.Mkdir("f/early")
	first := in.start(early)
	// Programs of descendants run before ours, those at our root in the order of attaching.
	before, after := newNeighbour(in, ebpf.AttachCGroupInet4Connect, denying(port)...), newNeighbour(in, ebpf.AttachCGroupInet4Connect, denying(port)...)
	before.mustAttach(early.Path, allowMulti)
	after.mustAttach(in.Cgroup.Path, allowMulti)
	for name, c := range map[string]*kerneltest.Client{"before ours": first, "after ours": client} {
		for range 100 {
			fd, errno := c.Dial(kerneltest.TCP4, fmt.Sprintf("127.1.0.1:%d", port))
			wantErrno(in, errno, syscall.EPERM, "a port that is denied "+name)
			c.Close(fd)
		}
		in.want(0, 0, "denied a hundred times "+name)
		fd := c.MustDial(kerneltest.TCP4, "127.1.0.1:80")
		in.want(1, 0, "another port, with a program "+name)
		c.Close(fd)
		in.want(0, 0, "after its close")
		// With the descriptor open: its next connect is judged anew.
		fd, errno := c.Dial(kerneltest.TCP4, fmt.Sprintf("127.1.0.1:%d", port))
		wantErrno(in, errno, syscall.EPERM, "a port that is denied "+name)
		wantErrno(in, c.Connect(fd, "127.2.0.1:80"), 0, "connect elsewhere on the same descriptor")
		in.want(0, 1, "after it")
		c.Close(fd)
		// And without a next connect two Reconciles find it.
		fd, errno = c.Dial(kerneltest.TCP4, fmt.Sprintf("127.1.0.1:%d", port))
		wantErrno(in, errno, syscall.EPERM, "a port that is denied "+name)
		in.reconcile()
		in.reconcile()
		in.want(0, 0, "denied, after two Reconciles")
		c.Close(fd)
	}
	if b := in.count(provider("p")); b.refused() != 0 {
		in.Errorf("%d counted as refused by us", b.refused())
	}
}

// The same of datagrams, which have no event of their own at all: what was taken for one
// that a program after ours denies is the socket's, and goes with it.
func testDeniesDatagrams(in *instance) {
	client := udp(in)
	early := in.Mkdir("f/early")
	first := in.start(early)
	newNeighbour(in, ebpf.AttachCGroupUDP4Sendmsg, denying(7777)...).mustAttach(early.Path, allowMulti)
	newNeighbour(in, ebpf.AttachCGroupUDP4Sendmsg, denying(7777)...).mustAttach(in.Cgroup.Path, allowMulti)
	for name, c := range map[string]*kerneltest.Client{"before ours": first, "after ours": client} {
		for range 20 { // ten times the limit
			fd := c.Socket(kerneltest.UDP4)
			wantErrno(in, c.SendTo(fd, "127.1.0.1:7777", 10), syscall.EPERM, "a datagram that is denied "+name)
			if name == "before ours" && HaveErrno() {
				in.want(0, 0, "denied "+name)
			}
			wantErrno(in, c.SendTo(fd, "127.1.0.1:80", 10), 0, "a datagram to another port")
			in.want(1, 0, "after it")
			c.Close(fd)
			in.want(0, 0, "after the close")
		}
	}
	if b := in.count(provider("p")); b.refused() != 0 {
		in.Errorf("%d counted as refused by us", b.refused())
	}
}

// A program that rewrites the destination, as a load balancer in the socket layer does:
// before ours, the connection is one to where it goes; after ours, to where the client
// meant it to go. Programs of descendants run before ours, those at our root in the order
// of attaching.
func testRewrites(in *instance) {
	client, servers := two(in)
	early := in.Mkdir("f/early")
	first := in.start(early)
	const service, backend = "127.2.0.9", "127.1.0.1" // of q and of p
	newNeighbour(in, ebpf.AttachCGroupInet4Connect, rewriting(service, backend)...).mustAttach(early.Path, allowMulti)
	reached := func(c *kerneltest.Client, p, q uint32, remote, when string) {
		in.Helper()
		fd := c.MustDial(kerneltest.TCP4, service+":80")
		kerneltest.Poll(in, "it has reached the backend", func() error {
			if servers["p"].Open() != 1 || servers["q"].Open() != 0 {
				return fmt.Errorf("%d at p's server, %d at q's", servers["p"].Open(), servers["q"].Open())
			}
			return nil
		})
		in.want(p, q, when)
		if got := in.snapshot().Connections; len(got) != 1 || got[0].Remote.String() != remote+":80" || got[0].State != "established" {
			in.Errorf("%s: connections %+v, want one established to %s", when, got, remote)
		}
		in.reconcile()
		in.reconcile()
		in.want(p, q, when+", after two Reconciles")
		c.Close(fd)
		in.empty(when + ", after the close")
		kerneltest.Poll(in, "the backend has let go", func() error {
			if n := servers["p"].Open(); n != 0 {
				return fmt.Errorf("%d open", n)
			}
			return nil
		})
	}
	reached(first, 1, 0, backend, "rewritten before ours")
	newNeighbour(in, ebpf.AttachCGroupInet4Connect, rewriting(service, backend)...).mustAttach(in.Cgroup.Path, allowMulti)
	reached(client, 0, 1, service, "rewritten after ours")
}

// converse makes a connection that ends in one way only: the server closes it first.
func converse(in *instance, client *kerneltest.Client, addr string) {
	in.Helper()
	fd := client.MustDial(kerneltest.TCP4, addr)
	client.Upload(fd, 1)
	client.Download(fd, 1)
	if n, errno := client.Receive(fd, 1); n != 0 || errno != 0 {
		in.Fatalf("read %d (%v), want the end", n, errno)
	}
	client.Close(fd)
	kerneltest.Poll(in, "the connection is over", func() error { return noSockets(in, addr) })
}

// A sockops program that asks for state changes gets as many with us as without us,
// whoever runs first. One that asks for none gets those that we ask for too, because they
// are turned on for a socket and not for a program; it gets them for connections that hold
// a slot, and for no others.
func testCountsStates(in *instance) {
	_, cg := in.enforce("providers: {}\nfeatures:\n  f: {class: batch}\n") // ours asks for nothing
	const ours, others = "127.1.0.6:80", "127.3.0.6:80"
	for _, addr := range []string{ours, others} {
		kerneltest.Serve(in, addr, func(c net.Conn) { io.CopyN(c, c, 1) })
	}
	client := in.start(cg)
	asks := newNeighbour(in, ebpf.AttachCGroupSockOps, asking()...)
	silent := newNeighbour(in, ebpf.AttachCGroupSockOps)
	run := func(addr string) (a, s map[uint32]uint64) {
		in.Helper()
		asks.ran()
		silent.ran()
		converse(in, client, addr)
		return asks.ran(), silent.ran()
	}
	same := func(got, want map[uint32]uint64, what string) {
		in.Helper()
		// How many round trips are measured is TCP's affair, that they are told is not.
		if (got[opRTT] == 0) != (want[opRTT] == 0) {
			in.Errorf("%s: %d round trips, without us %d", what, got[opRTT], want[opRTT])
		}
		if want[opRTT] != 0 {
			got[opRTT] = want[opRTT]
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			in.Errorf("%s: ran %v by operation, without us %v", what, got, want)
		}
	}

	detach := asks.mustAttach(cg.Path, allowMulti)
	without, _ := run(ours)
	detach()
	detach = silent.mustAttach(cg.Path, allowMulti)
	_, silentWithout := run(ours)
	detach()
	if without[opState] == 0 || without[opRTT] == 0 || without[opConnect] != 1 || silentWithout[opState] != 0 {
		in.Fatalf("without us: one that asks ran %v, one that does not %v", without, silentWithout)
	}
	plan := planOf(in, twoProviders)
	in.apply(plan, member(in, plan, cg, "f", ""))
	for where, dir := range map[string]string{"before ours": cg.Path, "after ours": in.Cgroup.Path} {
		detach := asks.mustAttach(dir, allowMulti)
		got, _ := run(ours)
		same(got, without, "asks, "+where+", with a slot")
		got, _ = run(others)
		same(got, without, "asks, "+where+", without a slot")
		detach()

		detach = silent.mustAttach(dir, allowMulti)
		_, got = run(others)
		same(got, silentWithout, "does not ask, "+where+", without a slot")
		_, got = run(ours)
		delete(got, opState) // what ours has asked for
		same(got, silentWithout, "does not ask, "+where+", with a slot, but for state changes")
		detach()
	}
	in.empty("after all")
}

// Programs of others on sock_release and on packets run as often with us as without us.
func testCountsClosesAndPackets(in *instance) {
	client, _ := two(in)
	cg := in.Mkdir("f")
	for _, addr := range []string{"127.1.0.1:53", "127.2.0.1:53"} {
		sink, err := net.ListenPacket("udp", addr)
		if err != nil {
			in.Fatal(err)
		}
		defer sink.Close()
	}
	var all []*neighbour
	for _, at := range []ebpf.AttachType{ebpf.AttachCgroupInetSockRelease, ebpf.AttachCGroupInetEgress, ebpf.AttachCGroupUDP4Sendmsg, ebpf.AttachCGroupInet4Connect} {
		all = append(all, newNeighbour(in, at))
	}
	run := func(dir string) (got []uint64) {
		in.Helper()
		for _, n := range all {
			defer n.mustAttach(dir, allowMulti)()
			n.ran()
		}
		fd := client.MustDial(kerneltest.UDP4, "127.1.0.1:53")
		for range 10 {
			wantErrno(in, client.SendTo(fd, "", 100), 0, "send")
			wantErrno(in, client.SendTo(fd, "127.2.0.1:53", 100), 0, "sendto")
		}
		client.Close(fd, client.Socket(kerneltest.TCP4))
		for _, n := range all {
			got = append(got, n.ran()[0])
		}
		return got
	}
	without := run(cg.Path) // ours has nothing to do with UDP, and with packets
	if slices.Contains(without, 0) {
		in.Fatalf("without us they ran %v times", without)
	}
	plan := planOf(in, udpPolicy)
	in.apply(plan, member(in, plan, cg, "f", ""))
	for where, dir := range map[string]string{"before ours": cg.Path, "after ours": in.Cgroup.Path} {
		if got := run(dir); !slices.Equal(got, without) {
			in.Errorf("%s: they ran %v times, without us %v", where, got, without)
		}
	}
	in.apply(plan) // nobody's cgroup
	if got := run(cg.Path); !slices.Equal(got, without) {
		in.Errorf("of no compartment: they ran %v times, without us %v", got, without)
	}
}

// What others have attached stays as it is and where it is, in its order, when ours comes,
// changes, is taken over and goes; status sees it all the time.
func TestNeighboursStay(t *testing.T) {
	in := newInstance(t)
	cg := in.Mkdir("f")
	theirs := map[string][]ebpf.ProgramID{} // by hook
	for _, h := range hooks() {
		for range 2 {
			n := newNeighbour(in, h.attach)
			n.mustAttach(in.Cgroup.Path, allowMulti)
			theirs[h.name] = append(theirs[h.name], n.id)
		}
	}
	check := func(when string, ours int) {
		t.Helper()
		for _, h := range hooks() {
			ids := idsAt(in, in.Cgroup.Path, h.attach)
			got := slices.DeleteFunc(slices.Clone(ids), func(id ebpf.ProgramID) bool { return !slices.Contains(theirs[h.name], id) })
			if !slices.Equal(got, theirs[h.name]) {
				t.Errorf("%s: %s has %v of others, want %v", when, h.name, got, theirs[h.name])
			}
		}
		programs, err := Programs(in.o)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, p := range programs {
			if p.Ours {
				n++
			} else if p.Name != "neighbour" {
				t.Errorf("%s: %+v is told of others", when, p)
			}
		}
		if n != ours || len(programs)-n != 2*len(hooks()) {
			t.Errorf("%s: %d programs of ours and %d of others are told, want %d and %d", when, n, len(programs)-n, ours, 2*len(hooks()))
		}
	}
	check("before", 0)
	plan := planOf(t, udpPolicy)
	for range 2 {
		in.apply(plan, member(t, plan, cg, "f", ""))
		check("with UDP", 8)
		in.close()
		in.open()
		check("taken over", 8)
		in.apply(planOf(t, tcpPolicy))
		check("without UDP", 4)
		in.close()
		if err := Detach(in.o); err != nil {
			t.Fatal(err)
		}
		check("detached", 0)
		in.open()
	}
}

// Another program has the hook for itself, at our root or above it: ours cannot be
// attached, and the error says whose program is in the way.
func TestExclusiveNeighbourIsNamed(t *testing.T) {
	for _, c := range []struct {
		place string
		flags uint32
	}{{"", 0}, {"root", 0}, {"root", allowOverride}} {
		t.Run(fmt.Sprintf("at %q with flags %d", c.place, c.flags), func(t *testing.T) {
			in := newInstanceBelow(t)
			n := newNeighbour(in, ebpf.AttachCGroupInet4Connect)
			n.mustAttach(in.Mkdir(c.place).Path, c.flags)
			plan := planOf(t, limitOfOne)
			_, err := in.k.Apply(plan, nil)
			if !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), fmt.Sprintf("program %d", n.id)) || !strings.Contains(err.Error(), "neighbour") {
				t.Errorf("got %q, want it to name program %d neighbour", err, n.id)
			}
		})
	}
}

// A program above our root that is attached with BPF_F_ALLOW_OVERRIDE would run no more
// below our root once ours is attached there: the start is refused and names it, and it
// goes on running.
func TestOverriddenNeighbour(t *testing.T) {
	in := newInstanceBelow(t)
	f := in.Mkdir("root/f")
	server := kerneltest.Serve(t, "127.1.0.1:80", kerneltest.Drain)
	n := newNeighbour(in, ebpf.AttachCGroupInet4Connect)
	n.mustAttach(in.Cgroup.Path, allowOverride)
	client := in.start(f)
	client.MustDial(kerneltest.TCP4, server.Addr)
	if got := n.ran()[0]; got != 1 {
		t.Fatalf("theirs ran %d times before us, want 1", got)
	}
	plan := planOf(t, limitOfOne)
	if _, err := in.k.Apply(plan, []Member{member(t, plan, f, "f", "")}); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("program %d", n.id)) {
		t.Errorf("Apply: %v, want it refused, with program %d named", err, n.id)
	}
	client.MustDial(kerneltest.TCP4, server.Addr)
	if got := n.ran()[0]; got != 1 {
		t.Errorf("theirs ran %d times after us, want 1: ours has replaced it without a word", got)
	}
}
