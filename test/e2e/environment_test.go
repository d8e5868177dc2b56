package e2e

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
)

// wantSentence fails unless a command failed with one line, which has all the words.
func wantSentence(t testing.TB, r result, code int, words ...string) {
	t.Helper()
	if wantResult(t, r, code, words...) && (strings.Count(r.stderr, "\n") != 1 || !strings.HasPrefix(r.stderr, "bulkhead: ") || r.stdout != "") {
		t.Errorf("not one sentence: %s", r)
	}
}

// What is missing is named with its cure, and nothing is left half done.
func TestBadEnvironment(t *testing.T) {
	n := newNode(t)
	n.write(shares)
	before := n.state()
	root, err := kerneltest.Root()
	if err != nil {
		t.Fatal(err)
	}
	agent := n.args(n.agentCommand()...)
	bulkhead := func(args []string) *exec.Cmd { return exec.Command(args[0], args[1:]...) }
	with := func(from, to string) []string {
		args := append([]string{}, agent...)
		for i := range args {
			if args[i] == from {
				args[i+1] = to
			}
		}
		return args
	}
	file := filepath.Join(n.dir, "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	taken, err := net.Listen("tcp", n.net+"97:9779")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	noCgroup2 := bulkhead(append([]string{"sh", "-c", `umount -l "$0" && exec "$@"`, root}, with("--cgroup-root", "")...))
	noCgroup2.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	for _, c := range []struct {
		what  string
		cmd   *exec.Cmd
		words []string
	}{
		{"no bpf file system", bulkhead(with("--bpffs", n.dir)), []string{n.dir, "not a bpf file system", "mount -t bpf", "--bpffs"}},
		{"no directory for it", bulkhead(with("--bpffs", n.dir+"/none")), []string{n.dir + "/none", "mount -t bpf", "--bpffs"}},
		{"no cgroup2 there", bulkhead(with("--cgroup-root", n.dir)), []string{n.dir, "cgroup v2", "--cgroup-root"}},
		{"no directory there", bulkhead(with("--cgroup-root", n.dir+"/none")), []string{n.dir + "/none"}},
		{"no cgroup2 at all", noCgroup2, []string{"no cgroup v2", "mount -t cgroup2"}},
		{"no policy", bulkhead(with("--policy", n.dir+"/none")), []string{n.dir + "/none"}},
		{"metrics address taken", bulkhead(with("--web.listen-address", n.net+"97:9779")), []string{"--web.listen-address " + n.net + "97:9779", "address already in use", "give another address"}},
		{"no directory for the ready file", bulkhead(with("--ready-file", n.dir+"/none/ready")), []string{"--ready-file", n.dir + "/none", "make the directory"}},
		{"status with a wrong --bpffs", bulkhead(n.args("status", "--bpffs", n.dir)), []string{n.dir, "not a bpf file system", "--bpffs"}},
		{"status with no --bpffs", bulkhead(n.args("status", "--bpffs", n.dir+"/none")), []string{n.dir + "/none", "--bpffs", "mount -t bpf"}},
		{"something else is the socket", bulkhead(with("--admin-socket", file)), []string{file}},
		{"no CAP_BPF", n.withCapabilities(agent, unix.CAP_NET_ADMIN), []string{"CAP_BPF"}},
		{"no CAP_NET_ADMIN", n.withCapabilities(agent, unix.CAP_BPF), []string{"CAP_NET_ADMIN"}},
	} {
		t.Log(c.what)
		wantSentence(t, run(t, c.cmd), 1, c.words...)
		n.wantState(before)
		n.wantDetached()
	}
	if _, err := os.Stat(n.ready); err == nil {
		t.Error("an agent was ready")
	}
	if _, err := os.Stat(file); err != nil {
		t.Error(err)
	}
}

// withCapabilities runs bulkhead as root with these capabilities only.
func (n *node) withCapabilities(args []string, caps ...int) *exec.Cmd {
	n.t.Helper()
	via, err := json.Marshal(args)
	if err != nil {
		n.t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), viaVar+"="+string(via), capsVar+"="+strings.Trim(strings.Join(strings.Fields(fmt.Sprint(caps)), ","), "[]"))
	return cmd
}

// Every command that needs root says so; those that do not, work.
func TestNoRoot(t *testing.T) {
	n := newNode(t)
	n.write(shares)
	for _, loaded := range []bool{false, true} {
		if loaded {
			n.start()
		}
		before := n.state()
		commands := [][]string{
			n.agentCommand(), {"plan", n.policy}, {"status"}, {"conns"}, {"explain"}, {"top", "--count", "1"}, {"detach"},
			{"exec", "--feature", "chat", "--", "true"},
		}
		if loaded {
			commands = append(commands, []string{"reload"})
		}
		for _, args := range commands {
			code := 1
			if args[0] == "exec" {
				code = 125
			}
			wantSentence(t, n.asNobody(args...), code, "root")
		}
		n.wantState(before)
		for _, args := range [][]string{{"check", n.policy}, {"version"}} {
			if r := n.asNobody(args...); r.code != 0 {
				t.Errorf("%s: %s", args[0], r)
			}
		}
		// doctor says what falls short, and does not call for an agent that runs.
		r := n.asNobody("doctor")
		if r.code != 1 || !strings.Contains(r.stdout, "root") || strings.Contains(r.stdout, "bulkhead agent --policy") == loaded {
			t.Errorf("doctor: %s", r)
		}
	}
	if r := n.run("doctor"); r.code != 0 {
		t.Errorf("doctor as root: %s", r)
	}
}

// The agent and everything that it does needs no more of root than these.
func TestCapabilities(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	n.write(shares)
	caps := []int{unix.CAP_BPF, unix.CAP_NET_ADMIN}
	if olderThan(t, 6, 12) {
		// Its verifier takes a register's reuse of a stack slot for a leak.
		wantSentence(t, run(t, n.withCapabilities(n.args(n.agentCommand()...), caps...)), 1, "CAP_PERFMON")
		n.wantDetached()
		caps = append(caps, unix.CAP_PERFMON)
	}
	begin := func() *agent {
		cmd := n.withCapabilities(n.args(n.agentCommand()...), caps...)
		a := n.beginAs(cmd.Env, cmd.Args)
		a.waitReady()
		return a
	}
	a := begin()
	client := n.client("batch")
	dials(t, client, n.addr(1), 13, syscall.ECONNREFUSED)
	n.wantAgreement()
	n.must("reload")
	n.wantAgreement()
	a.kill()
	a = begin() // takes over
	n.wantAgreement()
	a.kill()
}

// A start that fails where it could not read what it took over removes nothing: what
// is in force needs its slices.
func TestFailedTakeOver(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	n.write(shares)
	n.start().kill()
	n.must("exec", "--feature", "chat", "--", "true") // its leaf is nobody's now
	client := n.client("batch")
	dials(t, client, n.addr(1), 13, syscall.ECONNREFUSED)
	pins := n.state()

	// No room for the slice of one more feature (cgroup.max.descendants of the root).
	n.write(shares + "  more: {class: batch}\n")
	limit := filepath.Join(n.Cgroup.Path, "cgroup.max.descendants")
	if err := os.WriteFile(limit, []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	caps := []int{unix.CAP_BPF, unix.CAP_NET_ADMIN}
	if olderThan(t, 6, 12) {
		caps = append(caps, unix.CAP_PERFMON)
	}
	r := run(t, n.withCapabilities(n.args(n.agentCommand()...), caps...))
	wantResult(t, r, 1, "cannot read the plan in force", "slice of feature more")
	n.wantState(pins)
	if err := os.WriteFile(limit, []byte("max"), 0); err != nil {
		t.Fatal(err)
	}
	wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))
	n.must("exec", "--feature", "chat", "--", "true")
	n.wantCounts(map[string]counts{"feature_provider batch/deepseek": {12, 12, 12, 12, 2}})
}

// What fails when the slices are there already takes them back: the first start, where
// another program keeps its hook for itself, and a reload, where there is no room for all
// of the new slices.
func TestSlicesTakenBack(t *testing.T) {
	n := newNode(t)
	n.write(shares)
	before := n.state()
	n.exclusive(ebpf.AttachCGroupInet6Connect, func() {
		alone := attached(t, n.Cgroup.Path)
		wantSentence(t, n.run(n.agentCommand()...), 1, "attach bh_connect6 to "+n.Cgroup.Path, "of somebody else", "bpftool cgroup tree")
		n.wantState(before)
		if ids := attached(t, n.Cgroup.Path); !slices.Equal(ids, alone) {
			t.Errorf("programs %v are attached, want %v only", ids, alone)
		}
	})
	n.wantDetached()

	n.start()
	before = n.state()
	cgroups := 0
	for _, line := range before {
		if strings.HasPrefix(line, n.Cgroup.Path+"/") && strings.Contains(line, ` "`) {
			cgroups++
		}
	}
	limit := filepath.Join(n.Cgroup.Path, "cgroup.max.descendants")
	if err := os.WriteFile(limit, []byte(fmt.Sprint(cgroups+1)), 0); err != nil {
		t.Fatal(err)
	}
	n.write(shares + "  more: {class: batch}\n  most: {class: batch}\n")
	wantResult(t, n.run("reload"), 1, "slice of feature most", "cgroup.max.descendants")
	n.wantState(before)
}

// exclusive does f while a program of somebody else has a hook for itself: it is attached
// without a flag that lets others beside it.
func (n *node) exclusive(hook ebpf.AttachType, f func()) {
	n.t.Helper()
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.CGroupSockAddr, AttachType: hook, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
	})
	if err != nil {
		n.t.Fatal(err)
	}
	defer prog.Close()
	dir, err := os.Open(n.Cgroup.Path)
	if err != nil {
		n.t.Fatal(err)
	}
	defer dir.Close()
	err = link.RawAttachProgram(link.RawAttachProgramOptions{Target: int(dir.Fd()), Program: prog, Attach: hook})
	if err != nil {
		n.t.Fatal(err)
	}
	defer func() {
		err := link.RawDetachProgram(link.RawDetachProgramOptions{Target: int(dir.Fd()), Program: prog, Attach: hook})
		if err != nil {
			n.t.Error(err)
		}
	}()
	f()
}

func olderThan(t *testing.T, major, minor int) bool {
	t.Helper()
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	var have [2]int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &have[0], &have[1]); err != nil {
		t.Fatal(err)
	}
	return have[0] < major || have[0] == major && have[1] < minor
}

// What is not built yet is accepted by check, with a warning, and refused by the agent.
func TestUnbuilt(t *testing.T) {
	n := newNode(t)
	before := n.state()
	for what, c := range map[string]struct{ from, to, word string }{
		"hosts": {"cidrs: [@1/32]", "hosts: [api.example.com]", "names are not built yet"},
	} {
		t.Log(what)
		n.write(strings.Replace(shares, c.from, c.to, 1))
		n.wantRun(0, []string{"warning", c.word}, "check", n.policy)
		n.wantRun(1, []string{c.word}, n.agentCommand()...)
		n.wantRun(1, []string{c.word}, "plan", n.policy)
		n.wantState(before)
		n.wantDetached()
	}
}
