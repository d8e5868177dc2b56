package upgrade

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"bulkhead/internal/kerneltest"
)

const (
	tightAddr, roomyAddr = "127.1.0.1:80", "127.2.0.1:80"
	// held is what is open at tight, which is full with it.
	held       = 5
	policyText = `
apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers:
  tight: {cidrs: [127.1.0.0/16], protocol: [tcp, udp], limits: {connections: 5, errno: EAGAIN}}
  roomy: {cidrs: [127.2.0.0/16], limits: {connections: 40}}
features:
  chat:  {class: realtime, cpu: none, match: [{cgroup: /chat}]}
  batch: {class: batch, cpu: none, match: [{cgroup: /batch}]}
`
)

// node is where releases follow one another.
type node struct {
	*kerneltest.Env
	t      *testing.T
	dir    string
	seen   map[string]uint64 // the highest value of each counter
	client *kerneltest.Client
	fds    []int
	storms map[string]*kerneltest.Client
}

func newNode(t *testing.T) *node {
	n := &node{Env: kerneltest.New(t), t: t, dir: t.TempDir(), seen: map[string]uint64{}, storms: map[string]*kerneltest.Client{}}
	if err := os.WriteFile(n.path("policy.yaml"), []byte(policyText), 0o644); err != nil {
		t.Fatal(err)
	}
	kerneltest.Serve(t, tightAddr, kerneltest.Drain)
	kerneltest.Serve(t, roomyAddr, kerneltest.Drain)
	n.client = n.Start(n.Mkdir("chat"))
	for _, addr := range []string{tightAddr, roomyAddr} {
		n.storms[addr] = n.Start(n.Mkdir("batch"))
	}
	return n
}

func (n *node) path(name string) string { return filepath.Join(n.dir, name) }

func (n *node) command(release string, args ...string) *exec.Cmd {
	all := slices.Concat([]string{args[0], "--cgroup-root", n.Cgroup.Path, "--bpffs", n.BPFFS, "--admin-socket", n.path("agent.sock")}, args[1:])
	return exec.Command(filepath.Join(os.Getenv(binariesVar), release), all...)
}

// agent is one that runs.
type agent struct {
	*exec.Cmd
	ended chan struct{}
	log   bytes.Buffer // once it has ended
}

func (n *node) begin(release string) *agent {
	n.t.Helper()
	a := &agent{ended: make(chan struct{})}
	a.Cmd = n.command(release, "agent", "--policy", n.path("policy.yaml"), "--ready-file", n.path("ready"), "--web.listen-address", "127.0.0.1:9779")
	a.Stderr = &a.log
	a.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := a.Start(); err != nil {
		n.t.Fatal(err)
	}
	go func() {
		a.Wait()
		close(a.ended)
	}()
	n.t.Cleanup(func() { a.end(syscall.SIGKILL) })
	return a
}

func (n *node) start(release string) *agent {
	n.t.Helper()
	a := n.begin(release)
	kerneltest.Poll(n.t, "the agent of "+release+" is ready", func() error {
		select {
		case <-a.ended:
			n.t.Fatalf("the agent of %s ended: %s\n%s", release, a.ProcessState, &a.log)
		default:
		}
		pid, err := os.ReadFile(n.path("ready"))
		if err == nil && strings.TrimSpace(string(pid)) != strconv.Itoa(a.Process.Pid) {
			err = errors.New("the ready file is of another")
		}
		return err
	})
	return a
}

func (a *agent) end(s os.Signal) {
	a.Process.Signal(s)
	<-a.ended
}

type status struct {
	Generation int
	PolicyHash string `json:"policy_hash"`
	Agent      struct {
		Running bool
		PID     int
	}
	Bulkheads []struct {
		Scope, Feature, Tenant, Provider string
		Limit                            *uint64
		InUse                            uint64 `json:"in_use"`
		Peak, Accepted                   uint64
		Rejected                         map[string]uint64
	}
	Traffic []struct {
		Feature, Tenant, Provider string
		Connections               uint64  `json:"connections_total"`
		Tx                        *uint64 `json:"tx_bytes"`
		Rx                        *uint64 `json:"rx_bytes"`
	}
	Conditions []struct{ Type, Reason, Message string }
}

func (n *node) status(release string) (s status) {
	n.t.Helper()
	out, err := n.command(release, "status", "-o", "json").Output()
	if err == nil {
		err = json.Unmarshal(out, &s)
	}
	if err != nil {
		if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
			err = fmt.Errorf("%w: %s", err, exit.Stderr)
		}
		n.t.Fatalf("status of %s: %v", release, err)
	}
	return s
}

// wantCarried fails unless a release has what was open, exactly, and no counter has fallen.
func (n *node) wantCarried(release string) {
	n.t.Helper()
	s := n.status(release)
	counter := func(name string, value uint64) {
		if value < n.seen[name] {
			n.t.Errorf("%s: %s fell from %d to %d", release, name, n.seen[name], value)
		}
		n.seen[name] = value
	}
	found := map[string]bool{}
	for _, b := range s.Bulkheads {
		name := b.Scope + " " + b.Feature + b.Provider
		found[name] = true
		if want := map[string]uint64{"feature chat": held + 1, "provider tight": held}[name]; want != 0 && b.InUse != want {
			n.t.Errorf("%s: %s has %d in use, want %d", release, name, b.InUse, want)
		}
		if b.Limit != nil && (b.Peak > *b.Limit || b.InUse > *b.Limit) {
			n.t.Errorf("%s: %s has %d in use, %d at most, with a limit of %d", release, name, b.InUse, b.Peak, *b.Limit)
		}
		counter(name+" accepted", b.Accepted)
		counter(name+" peak", b.Peak)
		for reason, v := range b.Rejected {
			counter(name+" rejected "+reason, v)
		}
	}
	for _, tr := range s.Traffic {
		name := "traffic " + tr.Feature + " " + tr.Provider
		counter(name+" connections", tr.Connections)
		if tr.Tx != nil {
			counter(name+" tx", *tr.Tx)
			counter(name+" rx", *tr.Rx)
		}
	}
	for _, name := range []string{"feature chat", "provider tight", "provider roomy"} {
		if !found[name] {
			n.t.Errorf("%s: status has no %s", release, name)
		}
	}
	for _, c := range s.Conditions {
		if c.Type == "Counts" || c.Type == "Attached" || c.Type == "Loaded" || c.Type == "Kernel" {
			n.t.Errorf("%s: condition %+v", release, c)
		}
	}
}

// wantAlone fails unless there are the pins of one layout and one program at each hook.
func (n *node) wantAlone() string {
	n.t.Helper()
	entries, err := os.ReadDir(filepath.Join(n.BPFFS, "bulkhead"))
	if err != nil || len(entries) != 1 {
		n.t.Fatalf("pins: %v (%v)", entries, err)
	}
	dir, err := os.Open(n.Cgroup.Path)
	if err != nil {
		n.t.Fatal(err)
	}
	defer dir.Close()
	for _, hook := range []ebpf.AttachType{
		ebpf.AttachCGroupInet4Connect, ebpf.AttachCGroupInet6Connect, ebpf.AttachCGroupUDP4Sendmsg, ebpf.AttachCGroupUDP6Sendmsg,
		ebpf.AttachCGroupSockOps, ebpf.AttachCgroupInetSockRelease, ebpf.AttachCGroupInetEgress, ebpf.AttachCGroupInetIngress,
	} {
		all, err := link.QueryPrograms(link.QueryOptions{Target: int(dir.Fd()), Attach: hook})
		if err != nil || len(all.Programs) != 1 {
			n.t.Errorf("programs at %s: %v (%v)", hook, all, err)
		}
	}
	return entries[0].Name()
}

// hold opens what is held, four of TCP and one of UDP at tight, and one at roomy, and
// sets the others to work.
func (n *node) hold() {
	n.t.Helper()
	for range held - 1 {
		n.fds = append(n.fds, n.client.MustDial(kerneltest.TCP4, tightAddr))
	}
	n.fds = append(n.fds, n.client.MustDial(kerneltest.UDP4, tightAddr), n.client.MustDial(kerneltest.TCP4, roomyAddr))
	n.client.Upload(n.fds[0], 100_000)
	n.storms[tightAddr].Storm(kerneltest.TCP4, tightAddr, 1)
	n.storms[roomyAddr].Storm(kerneltest.TCP4, roomyAddr, 2)
}

// calm ends what the others do: who had room was not refused, and nobody else came in.
func (n *node) calm() {
	n.t.Helper()
	if counts := n.storms[tightAddr].Calm(); len(counts) != 1 || counts[syscall.EAGAIN] == 0 {
		n.t.Errorf("connects to the provider that is full: %v", counts)
	}
	if counts := n.storms[roomyAddr].Calm(); len(counts) != 1 || counts[0] == 0 {
		n.t.Errorf("connects to the provider that has room: %v", counts)
	}
}

// release closes all that is held, and nothing is left of it.
func (n *node) release(release string) {
	n.t.Helper()
	n.client.Close(n.fds...)
	kerneltest.Poll(n.t, "nothing is in use", func() error {
		for _, b := range n.status(release).Bulkheads {
			if b.InUse != 0 {
				return fmt.Errorf("%s %s%s: %d", b.Scope, b.Feature, b.Provider, b.InUse)
			}
		}
		return nil
	})
	n.client.Close(n.client.MustDial(kerneltest.TCP4, tightAddr))
}

// wantOther fails unless a release says that another is in force, and that its agent would
// take over.
func (n *node) wantOther(release, layout string, running bool) {
	n.t.Helper()
	s := n.status(release)
	i := slices.IndexFunc(s.Conditions, func(c struct{ Type, Reason, Message string }) bool { return c.Type == "Loaded" })
	if i < 0 || s.Conditions[i].Reason != "OtherRelease" || !strings.Contains(s.Conditions[i].Message, "/bulkhead/"+layout+": another release of bulkhead is in force") ||
		!strings.Contains(s.Conditions[i].Message, "takes over") || s.Agent.Running != running || (s.Generation != 0) != running {
		n.t.Errorf("status of %s: %+v", release, s)
	}
	if err := n.command(release, "status", "--check").Run(); err == nil {
		n.t.Errorf("status --check of %s finds nothing wrong", release)
	}
}

// The next release takes over, and this one takes over again: what is open is counted
// throughout, the limit holds all the time, and nothing of the other is left.
func TestUpgrade(t *testing.T) {
	n := newNode(t)
	a := n.start("this")
	n.hold()
	n.wantCarried("this")
	layout := n.wantAlone()
	before := "this"
	for i, release := range []string{"next", "this", "next", "this"} {
		if i < 2 {
			n.wantOther(map[string]string{"this": "next", "next": "this"}[before], layout, true)
			a.end(syscall.SIGTERM)
		} else {
			a.end(syscall.SIGKILL)
		}
		n.wantOther(release, layout, false)
		begun := time.Now()
		a = n.start(release)
		n.wantCarried(release)
		t.Logf("%s has taken over and said so %v after its start", release, time.Since(begun))
		now := n.wantAlone()
		if now == layout {
			t.Errorf("both releases have layout %s", now)
		}
		n.wantOther(before, now, true)
		layout, before = now, release
	}
	n.calm()
	n.wantCarried("this")
	n.release("this")
}

// Killed at any moment of taking over, whoever comes next finishes it. What closed in that
// very moment is given back by reconciling, a moment later.
func TestUpgradeKilled(t *testing.T) {
	n := newNode(t)
	a := n.start("this")
	n.hold()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	begun := time.Now()
	a.end(syscall.SIGKILL)
	a = n.start("next")
	takes := time.Since(begun)
	both := 0
	for range 8 {
		a.end(syscall.SIGKILL)
		a = n.begin([]string{"this", "next"}[random.IntN(2)])
		time.Sleep(time.Duration(random.Int64N(int64(takes)))) // the moment is random
		a.end(syscall.SIGKILL)
		if entries, err := filepath.Glob(filepath.Join(n.BPFFS, "bulkhead", "v*")); err != nil || len(entries) == 0 {
			t.Fatalf("pins: %v (%v)", entries, err)
		} else if len(entries) == 2 {
			both++
		}
		release := []string{"this", "next"}[random.IntN(2)]
		a = n.start(release)
		n.wantCarried(release)
		n.wantAlone()
	}
	t.Logf("%d of 8 were killed with both in force", both)
	a.end(syscall.SIGKILL)
	n.start("this")
	n.calm()
	n.wantCarried("this")
	n.release("this")
}

// A release of the same layout puts its programs under the links that there are.
func TestOtherPrograms(t *testing.T) {
	n := newNode(t)
	a := n.start("this")
	n.hold()
	n.wantCarried("this")
	layout := n.wantAlone()
	attached := func() (links map[string]link.ID, tags map[string]string) {
		t.Helper()
		links, tags = map[string]link.ID{}, map[string]string{}
		pins, err := filepath.Glob(filepath.Join(n.BPFFS, "bulkhead", layout, "link_*"))
		if err != nil || len(pins) != 8 {
			t.Fatalf("pins %v (%v)", pins, err)
		}
		for _, pin := range pins {
			l, err := link.LoadPinnedLink(pin, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			info, err := l.Info()
			if err != nil {
				t.Fatal(err)
			}
			p, err := ebpf.NewProgramFromID(info.Program)
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			prog, err := p.Info()
			if err != nil {
				t.Fatal(err)
			}
			links[filepath.Base(pin)], tags[filepath.Base(pin)] = info.ID, prog.Tag
		}
		return links, tags
	}
	links, tags := attached()
	for _, release := range []string{"programs", "this"} {
		a.end(syscall.SIGKILL)
		n.wantCarried(release) // it reads what the other has left
		a = n.start(release)
		n.wantCarried(release)
		if now := n.wantAlone(); now != layout {
			t.Errorf("%s has layout %s, want %s", release, now, layout)
		}
		nowLinks, nowTags := attached()
		for hook, id := range links {
			if nowLinks[hook] != id {
				t.Errorf("%s: link %d at %s, was %d", release, nowLinks[hook], hook, id)
			}
			changed := release == "programs" && (hook == "link_connect4" || hook == "link_sock_release")
			if (nowTags[hook] != tags[hook]) != changed {
				t.Errorf("%s: program %s at %s, was %s", release, nowTags[hook], hook, tags[hook])
			}
		}
	}
	n.calm()
	n.wantCarried("this")
	n.release("this")
}
