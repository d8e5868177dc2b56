package e2e

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
)

// A cgroup that is there joins its compartment where it is, and so does one that comes
// later; nothing is moved.
func TestAdoption(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	first, outside := n.Mkdir("apps/batch-1"), n.Mkdir("apps/else")
	client, other := n.place(first), n.place(outside)
	place, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", client.PID))
	if err != nil {
		t.Fatal(err)
	}
	n.write(oneProvider + `  batch: {class: batch, match: [{cgroup: "/apps/batch-*"}], limits: {connections: 3}}
`)
	n.start()
	if got := dials(t, client, n.addr(1), 3, syscall.ECONNREFUSED); len(got) != 3 {
		t.Errorf("%d passed, want 3", len(got))
	}
	wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))
	wantDial(t, other, 0, n.addr(1))
	if now, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", client.PID)); err != nil || string(now) != string(place) {
		t.Errorf("it was in %s and is in %s (%v)", place, now, err)
	}
	wantWords(t, n.must("explain", "--from", "/apps/batch-1"), "compartment batch", "/apps/batch-1 (adopted by batch's match)")

	// As they appear, and not by the look every ten seconds that finds what was missed.
	begin := time.Now()
	for i := range 5 {
		name := fmt.Sprintf("/apps/batch-new%d", i)
		n.Mkdir(name[1:])
		kerneltest.Poll(t, name+" is adopted", func() error {
			if got := n.status().cgroups("batch"); !slices.Contains(got, name) {
				return fmt.Errorf("%v", got)
			}
			return nil
		})
	}
	if took := time.Since(begin); took > 25*time.Second {
		t.Errorf("five cgroups were adopted after %v: nobody tells of them", took)
	}

	// Two levels down, too.
	second := n.Mkdir("apps/batch-2/pod/container")
	late := n.place(second)
	kerneltest.Poll(t, "the new cgroup is adopted", func() error {
		if got := n.status().cgroups("batch"); !slices.Contains(got, "/apps/batch-2") {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
	n.logged("adopted a cgroup", "/apps/batch-2")
	wantDial(t, late, syscall.ECONNREFUSED, n.addr(1))
	client.Kill()
	kerneltest.Poll(t, "there is room", func() error {
		if b := n.status().find("feature batch"); b.InUse != 0 {
			return fmt.Errorf("in_use %d", b.InUse)
		}
		return nil
	})
	dials(t, late, n.addr(1), 3, 0)
	wantDial(t, late, syscall.ECONNREFUSED, n.addr(1))
	n.wantCounts(map[string]counts{"feature batch": {3, 3, 3, 6, 3}})
}

// What is protected is never refused and never counted, whoever else would have it;
// everything else has to do with what default says.
func TestProtect(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	n.write(`
apiVersion: bulkhead/v1
kind: Policy
mode: enforce
protect: [/apps/keep, "admin@*.service"]
providers:
  deepseek: {cidrs: [@1/32], ports: [8000]}
features:
  chat: {class: realtime, match: [{cgroup: "/apps/*"}], limits: {connections: 0}}
  default: {limits: {connections: 0}}
`)
	clients := map[string]*kerneltest.Client{}
	for _, at := range []string{"apps/keep", "apps/keep/below", "apps/other", "system/ssh.service", "system/admin@1.service", "system/else"} {
		clients[at] = n.place(n.Mkdir(at))
	}
	n.start()
	for at, want := range map[string]syscall.Errno{
		"apps/keep": 0, "apps/keep/below": 0, "system/ssh.service": 0, "system/admin@1.service": 0,
		"apps/other": syscall.ECONNREFUSED, "system/else": syscall.ECONNREFUSED,
	} {
		// What passes stays open, to be found by conns if it were counted.
		if _, errno := clients[at].Dial(kerneltest.TCP4, n.addr(1)); errno != want {
			t.Errorf("connect from %s: %v, want %v", at, errno, want)
		}
	}
	// From outside of the cgroup root nothing is anybody's business.
	if c, err := net.Dial("tcp", n.addr(1)); err != nil {
		t.Errorf("connect from outside: %v", err)
	} else {
		c.Close()
	}
	n.wantCounts(map[string]counts{"feature chat": {0, 0, 0, 0, 1}, "feature default": {0, 0, 0, 0, 1}})
	if all := n.conns(); len(all) != 0 {
		t.Errorf("conns %+v, want none", all)
	}
	wantWords(t, n.must("explain", "--from", "/apps/keep/below"), "/apps/keep is on the protect list")
}

// Observe refuses nothing and counts what enforce would refuse.
func TestObserve(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	observed := strings.Replace(shares, "mode: enforce", "mode: observe", 1)
	n.write(observed)
	n.start()
	client := n.client("batch")
	fds := dials(t, client, n.addr(1), 15, 0)
	s := n.status()
	b := s.find("feature_provider batch/deepseek")
	if len(fds) != 15 || s.Mode != "observe" || b.InUse != 15 || b.Accepted != 15 || total(b.Rejected) != 0 || b.WouldReject["full"] != 3 {
		t.Errorf("%d passed; mode %s, %+v", len(fds), s.Mode, b)
	}
	n.wantAgreement()
	n.logged("would be refused", `"pid":`+fmt.Sprint(client.PID))

	// Enforce means the same numbers.
	n.write(shares)
	n.must("reload")
	wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))
	client.Close(fds[:4]...)
	dials(t, client, n.addr(1), 1, 0)
	wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))
	b = n.status().find("feature_provider batch/deepseek")
	if b.InUse != 12 || b.Peak != 15 || total(b.Rejected) != 2 || b.WouldReject["full"] != 3 {
		t.Errorf("%+v", b)
	}
	wantWords(t, n.must("explain", "--from", fmt.Sprint(client.PID), "--to", n.addr(1)), "in all it refused 2, and would have refused 3 in mode observe")
}

// explain answers for what no limit is about, and says what there is not.
func TestExplainFrom(t *testing.T) {
	n := newNode(t)
	n.write(shares)
	n.start()
	// This process is outside of the node's root.
	out := n.must("explain", "--to", n.addr(1), "--from", fmt.Sprint(os.Getpid()))
	wantWords(t, out, fmt.Sprintf("process %d is in cgroup ", os.Getpid()), "outside the cgroup root "+n.Cgroup.Path, "no limit of this instance applies to it")
	if strings.Contains(out, "route") {
		t.Errorf("explain said\n%s", out)
	}
	wantWords(t, n.must("explain"), "no limit of this instance applies to it")
	for _, from := range []string{"/no/such", n.Cgroup.Path + "/no/such", "/bulkhead.slice/bulkhead-none.slice"} {
		wantSentence(t, n.run("explain", "--from", from), 1, "there is no cgroup /", strings.TrimPrefix(from, n.Cgroup.Path), "under the cgroup root "+n.Cgroup.Path)
	}
	wantSentence(t, n.run("explain", "--from", "no-such-unit"), 1, "no-such-unit.service")
	for _, from := range []string{"0", "-1", "2147483647"} {
		wantResult(t, n.run("explain", "--from", from), 1, "process "+from+": there is none")
	}
	// From a cgroup namespace too, where a process has to be looked for in the tree.
	inside, err := os.Open(n.Mkdir("namespace").Path)
	if err != nil {
		t.Fatal(err)
	}
	defer inside.Close()
	args := n.args("explain", "--from", "2147483647")
	cmd := exec.Command(args[0], args[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(inside.Fd()), Unshareflags: unix.CLONE_NEWCGROUP}
	wantResult(t, run(t, cmd), 1, "process 2147483647: there is none")
	r := n.run("explain", "--from", "/bulkhead.slice/bulkhead-chat.slice", "--to", "no-such-host.invalid:443")
	wantResult(t, r, 1, "--to", "no-such-host.invalid")
}

// connect() fails with what the policy says of the bulkhead that was full.
func TestErrno(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	want := map[string]syscall.Errno{
		"EPERM": syscall.EPERM, "EAGAIN": syscall.EAGAIN, "EACCES": syscall.EACCES, "EBUSY": syscall.EBUSY,
		"ENETUNREACH": syscall.ENETUNREACH, "ENOBUFS": syscall.ENOBUFS, "ETIMEDOUT": syscall.ETIMEDOUT,
		"ECONNREFUSED": syscall.ECONNREFUSED, "EHOSTUNREACH": syscall.EHOSTUNREACH,
	}
	text := "apiVersion: bulkhead/v1\nkind: Policy\nmode: enforce\nproviders:\n  deepseek: {cidrs: [@1/32], ports: [8000]}\nfeatures:\n"
	for name := range want {
		text += fmt.Sprintf("  %s: {class: realtime, match: [{cgroup: /%s}], limits: {connections: 0, errno: %s}}\n", strings.ToLower(name), name, name)
	}
	n.write(text)
	clients := map[string]*kerneltest.Client{}
	for name := range want {
		clients[name] = n.place(n.Mkdir(name))
	}
	n.start()
	for name, errno := range want {
		wantDial(t, clients[name], errno, n.addr(1))
	}
	if c := n.status().condition("Errno"); c != nil {
		t.Errorf("condition %+v", c)
	}
}

// One provider is one provider, over IPv4, IPv6 and IPv4 in IPv6; other ports, other
// addresses and UDP are not it.
func TestDestinations(t *testing.T) {
	n := newNode(t)
	const six = "[fd00:e2e::1]:8006" // a port that no other node uses, as this server is everywhere
	n.serve(1)
	n.serve(2)
	kerneltest.Serve(t, "[::]:8006", kerneltest.Drain)
	kerneltest.Serve(t, net.JoinHostPort(n.net+"1", "8001"), kerneltest.Drain)
	n.write(`
apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers:
  deepseek: {cidrs: [@1/32, "fd00:e2e::/64"], ports: [8000, 8006], limits: {connections: 3}}
  quic: {cidrs: [@2/32], ports: [8000], protocol: udp, idle: 45s, limits: {connections: 3}}
features:
  chat: {class: realtime, match: [{cgroup: /chat}]}
`)
	client := n.place(n.Mkdir("chat"))
	n.start()
	// What gives a UDP socket's place back is said where UDP is counted.
	wantWords(t, n.must("explain", "--from", "/chat", "--to", n.addr(2), "--proto", "udp"), "provider quic", "no datagram with it for 45s gives its place back")
	mapped := "[::ffff:" + n.net + "1]:" + port
	client.MustDial(kerneltest.TCP4, n.addr(1))
	client.MustDial(kerneltest.TCP6, mapped)
	client.MustDial(kerneltest.TCP6, six)
	for kind, addrs := range map[kerneltest.Kind][]string{
		kerneltest.TCP4: {n.addr(1)},
		kerneltest.TCP6: {mapped, six},
	} {
		for i, errno := range client.Probe(kind, addrs) {
			if errno != syscall.ECONNREFUSED {
				t.Errorf("connect to %s: %v, want %v", addrs[i], errno, syscall.ECONNREFUSED)
			}
		}
	}
	for _, addr := range []string{n.addr(2), net.JoinHostPort(n.net+"1", "8001")} {
		client.MustDial(kerneltest.TCP4, addr)
	}
	// A rule without a protocol means TCP.
	for kind, addr := range map[kerneltest.Kind]string{kerneltest.UDP4: n.addr(1), kerneltest.UDP6: six} {
		fd, errno := client.Dial(kind, addr)
		if sent := client.SendTo(client.Socket(kind), addr, 10); errno != 0 || sent != 0 {
			t.Errorf("UDP to %s: connect %v, send %v", addr, errno, sent)
		}
		client.Close(fd)
	}
	n.wantCounts(map[string]counts{"provider deepseek": {3, 3, 3, 3, 3}})
	if got := n.status().connections("chat", "other"); got != 2 {
		t.Errorf("connections_total to other is %d, want 2", got)
	}
}

// A client that leaks connections fills its own share and nobody else's, and is named.
func TestLeak(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	n.write(shares)
	n.start()
	leaky, good := n.client("batch"), n.client("chat")
	if got := dials(t, leaky, n.addr(1), 200, syscall.ECONNREFUSED); len(got) != 12 {
		t.Errorf("%d of 200 passed, want 12", len(got))
	}
	if got := dials(t, good, n.addr(1), 8, 0); len(got) != 8 {
		t.Errorf("%d of chat's 8 passed", len(got))
	}
	held := map[int]int{}
	for _, c := range n.conns() {
		held[c.PID]++
	}
	if held[leaky.PID] != 12 || held[good.PID] != 8 {
		t.Errorf("connections by pid: %v", held)
	}
}

// A connection stays with the compartment that admitted it; status counts those whose
// process is elsewhere by now.
func TestMoved(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	n.write(shares)
	n.start()
	client := n.client("batch")
	client.MustDial(kerneltest.TCP4, n.addr(1))
	client.MustDial(kerneltest.TCP4, n.addr(1))
	want := func(moved int, when string) {
		t.Helper()
		var s struct {
			Slots struct{ Moved int } `json:"slots"`
		}
		if err := json.Unmarshal([]byte(n.must("status", "-o", "json")), &s); err != nil {
			t.Fatal(err)
		}
		if s.Slots.Moved != moved {
			t.Errorf("%s: %d moved, want %d", when, s.Slots.Moved, moved)
		}
	}
	want(0, "before")
	n.Move(client.PID, n.Mkdir("elsewhere"))
	want(2, "after the move")
	wantWords(t, n.must("status"), "2 connections: admitted in another compartment")
	client.MustDial(kerneltest.TCP4, n.addr(1))
	want(2, "with one more, which default has admitted")
	for name, inUse := range map[string]int{"feature_provider batch/deepseek": 2, "provider deepseek": 3} {
		if b := n.status().find(name); b == nil || b.InUse != inUse {
			t.Errorf("%s: %+v, want %d in use", name, b, inUse)
		}
	}
}

// The agent gives back what a UDP socket has held for longer than the policy's idle time.
func TestIdleUDP(t *testing.T) {
	n := newNode(t)
	n.write(`
apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers:
  quic: {cidrs: [@1/32], protocol: udp, idle: 1s, limits: {connections: 3}}
features:
  chat: {class: realtime, cpu: none}
`)
	n.start()
	client := n.client("chat")
	fd := client.Socket(kerneltest.UDP4)
	connected := client.MustDial(kerneltest.UDP4, n.addr(1))
	// Reconciling does it too, ten seconds after the start, ten later, and each thirty from
	// then on. On a busy machine it may be first, but not each time.
	reconciled := func() (times int) {
		for _, l := range n.lines() {
			if strings.Contains(l.text, "freed slots whose connections are gone") {
				times++
			}
		}
		return times
	}
	const tries = 3
	for try := 1; ; try++ {
		before := reconciled()
		if errno := client.SendTo(fd, n.addr(1), 1); errno != 0 {
			t.Fatal(errno)
		}
		kerneltest.Poll(t, "the idle slot is given back", func() error {
			if b := n.status().find("provider quic"); b.InUse != 1 || b.Accepted != try+1 {
				return fmt.Errorf("%d in use, want that of the connected socket; %d were accepted", b.InUse, b.Accepted)
			}
			return nil
		})
		if reconciled() == before {
			break
		}
		if try == tries {
			t.Fatal("it was reconciling that gave it back, each time")
		}
	}
	client.Close(fd, connected)
}
