package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"bulkhead/internal/kerneltest"
)

const tenanted = `
apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers:
  deepseek: {cidrs: [@1/32], ports: [8000]}
tenants:
  free: {limits: {connections: 2}}
features:
  chat:  {class: realtime, limits: {connections: 3}}
  batch: {class: batch}
`

// The command is in the compartment from its first instruction, in the process that
// bulkhead was, and so are its children.
func TestExec(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	n.write(tenanted)
	n.start()
	slice := filepath.Join("/", filepath.Base(n.Cgroup.Path), "bulkhead.slice", "bulkhead-chat.slice")
	tenantSlice := slice + "/bulkhead-chat-free.slice"

	wantIn(t, n.must("exec", "--feature", "chat", "--", "cat", "/proc/self/cgroup"), slice+"/exec-")
	wantIn(t, n.must("exec", "--feature", "chat", "--tenant", "free", "--", "cat", "/proc/self/cgroup"), tenantSlice+"/exec-")
	wantIn(t, n.must("exec", "--feature", "chat", "sh", "-c", "sh -c 'cat /proc/self/cgroup; true'; true"), slice+"/exec-")

	// The command's arguments are its own, flags too.
	if out := n.must("exec", "--feature", "batch", "--", "printf", "%s|", "--feature", "-h", "a b", ""); out != "--feature|-h|a b||" {
		t.Errorf("arguments arrived as %q", out)
	}

	p := n.program("chat", "sh", "-c", "echo $$; cat")
	if got, want := p.line(), fmt.Sprintln(p.Process.Pid); got != want {
		t.Errorf("pid %s, want %s", got, want)
	}
	// Its environment and directory are as they were.
	args := n.args("exec", "--feature", "chat", "--", "sh", "-c", "echo $PLACE; pwd")
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env, cmd.Dir = append(os.Environ(), "PLACE=inside"), n.dir
	if r := run(t, cmd); r.stdout != "inside\n"+n.dir+"\n" {
		t.Errorf("environment and directory: %s", r)
	}

	// Everybody in the feature shares its limit, a tenant has its own too.
	client, free := n.client("chat"), n.client("chat", "--tenant", "free")
	if got := dials(t, free, n.addr(1), 3, syscall.ECONNREFUSED); len(got) != 2 {
		t.Errorf("%d of the tenant's passed, want 2", len(got))
	}
	if got := dials(t, client, n.addr(1), 3, syscall.ECONNREFUSED); len(got) != 1 {
		t.Errorf("%d of the feature's passed, want 1", len(got))
	}
	n.wantCounts(map[string]counts{"feature chat": {3, 3, 3, 3, 2}, "tenant free": {2, 2, 2, 2, 1}})

	// Its leaf goes with it.
	client.Kill()
	leaf := filepath.Join(n.slice("chat"), fmt.Sprintf("exec-%d.scope", client.PID))
	kerneltest.Poll(t, "the leaf is removed", func() error {
		if _, err := os.Stat(leaf); err == nil {
			return fmt.Errorf("%s is there", leaf)
		}
		return nil
	})
}

// wantIn fails unless the cgroup of the unified hierarchy starts with want.
func wantIn(t testing.TB, procCgroup, want string) {
	t.Helper()
	for l := range strings.Lines(procCgroup) {
		if path, ok := strings.CutPrefix(l, "0::"); ok {
			if !strings.HasPrefix(path, want) {
				t.Errorf("in cgroup %s, want %s", path, want)
			}
			return
		}
	}
	t.Errorf("no cgroup v2 line in %q", procCgroup)
}

func TestExecUser(t *testing.T) {
	n := newNode(t)
	n.write(tenanted)
	n.start()
	u, err := user.Lookup("nobody")
	if err != nil {
		t.Fatal(err)
	}
	groups, err := u.GroupIds()
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(groups)
	for _, as := range []string{"nobody", u.Uid} {
		args := n.args("exec", "--feature", "chat", "--user", as, "--",
			"sh", "-c", "id -u; id -g; id -G; echo $HOME $USER; cat /proc/self/cgroup; cat /proc/self/status")
		cmd := exec.Command(args[0], args[1:]...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Groups: []uint32{0, 4711}}}
		r := run(t, cmd)
		l := strings.SplitN(r.stdout, "\n", 5)
		if r.code != 0 || len(l) < 5 {
			t.Fatalf("--user %s: %s", as, r)
		}
		got := strings.Fields(l[2])
		slices.Sort(got)
		if l[0] != u.Uid || l[1] != u.Gid || !slices.Equal(slices.Compact(got), groups) || l[3] != u.HomeDir+" nobody" {
			t.Errorf("--user %s: uid %s, gid %s, groups %v, home and name %s; want %+v, %v", as, l[0], l[1], got, l[3], u, groups)
		}
		if !strings.Contains(l[4], "bulkhead-chat.slice/exec-") {
			t.Errorf("--user %s: cgroup %s", as, l[4])
		}
		// None of root's rights is left, real, effective, saved or as a capability.
		wantFields(t, l[4], "CapPrm: 0000000000000000", "CapEff: 0000000000000000", strings.Join([]string{"Uid:", u.Uid, u.Uid, u.Uid, u.Uid}, " "))
	}
	n.wantRun(125, []string{"no_such_user"}, "exec", "--feature", "chat", "--user", "no_such_user", "--", "true")
}

func TestExecCodes(t *testing.T) {
	n := newNode(t)
	mark := filepath.Join(n.dir, "started")
	text := filepath.Join(n.dir, "text")
	if err := os.WriteFile(text, []byte("not a program"), 0o644); err != nil {
		t.Fatal(err)
	}
	n.wantRun(125, []string{"nothing is loaded"}, "exec", "--feature", "chat", "--", "touch", mark)
	n.write(tenanted)
	a := n.start()
	check := func() {
		for _, c := range []struct {
			code  int
			words []string
			args  []string
		}{
			{125, []string{`"chta"`, "chat, batch"}, []string{"--feature", "chta", "--", "touch", mark}},
			{125, []string{`"gratis"`, "free"}, []string{"--feature", "chat", "--tenant", "gratis", "--", "touch", mark}},
			{125, []string{"default"}, []string{"--feature", "default", "--", "touch", mark}},
			{125, []string{"--feature"}, []string{"--", "touch", mark}},
			// A script's variable that is not set.
			{125, []string{"--tenant is empty"}, []string{"--feature", "chat", "--tenant", "", "--", "touch", mark}},
			{125, []string{"--tenant is empty"}, []string{"--feature", "chat", "--tenant=", "--", "touch", mark}},
			{126, []string{text}, []string{"--feature", "chat", "--", text}},
			{126, []string{n.dir}, []string{"--feature", "chat", "--", n.dir}},
			{127, []string{"no-such-command"}, []string{"--feature", "chat", "--", "no-such-command"}},
			{127, []string{"/no/such"}, []string{"--feature", "chat", "--", "/no/such"}},
			{0, nil, []string{"--feature", "chat", "--", "true"}},
			{1, nil, []string{"--feature", "chat", "--", "false"}},
			{7, nil, []string{"--feature", "chat", "--", "sh", "-c", "exit 7"}},
			{125, nil, []string{"--feature", "chat", "--", "sh", "-c", "exit 125"}},
			{-1, nil, []string{"--feature", "chat", "--", "sh", "-c", "kill -KILL $$"}},
		} {
			n.wantRun(c.code, c.words, append([]string{"exec"}, c.args...)...)
		}
		if _, err := os.Stat(mark); err == nil {
			t.Error("a command was started though bulkhead exec had failed")
		}
	}
	check()
	a.kill()
	check()
}
