//go:build vm

package systemd

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"bulkhead/internal/kerneltest"
)

const (
	root    = "/sys/fs/cgroup"
	control = "/etc/systemd/system.control"
	// seen is where the workload of the first boot writes, in the second, what it found
	// when it started.
	seen = "/var/lib/workload-saw"
)

const values = `
apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers:
  p: {cidrs: [127.1.0.0/16], limits: {connections: 4}}
tenants:
  acme: {}
features:
  chat:  {class: realtime, cpu: {weight: 900, cpus: 0}, memory: {high: 100Mi, max: 200Mi}, pids: {max: 77}}
  batch: {class: batch, cpu: {weight: 7, max: 150%, burst: 50ms}}
  night: {class: background}
`

// want are files and their values while that is in force, by slice.
var want = map[string]map[string]string{
	"/bulkhead.slice":                      {"cpu.weight": "100"},
	"/bulkhead.slice/bulkhead-chat.slice":  {"cpu.weight": "900", "cpu.idle": "0", "cpu.max": "max 100000", "cpuset.cpus": "0", "memory.high": "104857600", "memory.max": "209715200", "pids.max": "77"},
	"/bulkhead.slice/bulkhead-batch.slice": {"cpu.weight": "7", "cpu.max": "150000 100000", "cpu.max.burst": "50000", "cpuset.cpus": "", "memory.max": "max"},
	"/bulkhead.slice/bulkhead-night.slice": {"cpu.idle": "1"},
}

// TestMain runs in each boot what is for it. TestBeforeReboot is the last of the first one, by the name of its
// file: it leaves an agent that runs.
func TestMain(m *testing.M) {
	flag.Parse()
	name, value := "test.skip", "^TestAfterReboot$"
	switch os.Getenv("BULKHEAD_BOOT") {
	case "1":
		if skip := flag.Lookup(name).Value.String(); skip != "" { // beside those that are not asked for
			value = skip + "|" + value
		}
	case "2":
		name = "test.run"
	default:
		fmt.Fprintln(os.Stderr, "this runs in the guest of test/vm -system all -boots 2")
		os.Exit(1)
	}
	if err := flag.Set(name, value); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// sh runs a line of shell and returns its output.
func sh(t *testing.T, line string) string {
	t.Helper()
	out, err := exec.Command("bash", "-c", line).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", line, err, out)
	}
	return strings.TrimSpace(string(out))
}

// agent is one that runs.
type agent struct {
	*testing.T
	cmd    *exec.Cmd
	policy string
	log    bytes.Buffer
	ended  chan struct{}
}

// start brings a policy into force and takes everything back at the end of the test.
func start(t *testing.T, policy string) *agent {
	t.Helper()
	dir := t.TempDir()
	a := &agent{T: t, policy: filepath.Join(dir, "policy.yaml"), ended: make(chan struct{})}
	a.write(policy)
	ready := filepath.Join(dir, "ready")
	a.cmd = exec.Command("bulkhead", "agent", "--policy", a.policy, "--ready-file", ready)
	a.cmd.Stderr = &a.log
	if err := a.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		a.cmd.Wait()
		close(a.ended)
	}()
	t.Cleanup(func() {
		a.signal(syscall.SIGCONT)
		a.signal(syscall.SIGTERM)
		<-a.ended
		if t.Failed() {
			t.Logf("the agent's log:\n%s", &a.log)
		}
		sh(t, "bulkhead detach")
	})
	// The first one of a machine is read from its disk and asks systemd for everything.
	kerneltest.PollFor(t, 4*time.Minute, "the agent is ready", func() error {
		select {
		case <-a.ended:
			t.Fatalf("the agent ended: %s\n%s", a.cmd.ProcessState, &a.log)
		default:
		}
		_, err := os.Stat(ready)
		return err
	})
	return a
}

func (a *agent) write(policy string) {
	a.Helper()
	if err := os.WriteFile(a.policy, []byte(policy), 0o644); err != nil {
		a.Fatal(err)
	}
}

func (a *agent) signal(s os.Signal) { _ = a.cmd.Process.Signal(s) }

// holds polls until the files of slices have their values.
func holds(t *testing.T, when string, want map[string]map[string]string) {
	t.Helper()
	kerneltest.PollFor(t, 2*time.Minute, when+": all values hold", func() error {
		for slice, files := range want {
			for file, value := range files {
				now, err := os.ReadFile(filepath.Join(root, slice, file))
				if err != nil || strings.TrimSpace(string(now)) != value {
					return fmt.Errorf("%s of %s is %q (%v), want %q", file, slice, now, err, value)
				}
			}
		}
		return nil
	})
}

// The slices are systemd's units with the paths that they have without it, and their
// values stay whatever is done to systemd.
func TestValues(t *testing.T) {
	before := state(t)
	t.Run("in force", func(t *testing.T) {
		a := start(t, values)
		holds(t, "after the start", want)
		if out := sh(t, "bulkhead doctor"); !regexp.MustCompile(`ok +cgroup manager +systemd`).MatchString(out) {
			t.Errorf("doctor does not name systemd:\n%s", out)
		}
		// As in a container that has the host's tree, and not its /run.
		if out := sh(t, "unshare --mount bash -c 'mount -t tmpfs none /run/systemd && bulkhead doctor'"); !regexp.MustCompile(`short +cgroup manager +cgroupfs: .* cannot be reached`).MatchString(out) {
			t.Errorf("doctor does not say that systemd cannot be reached:\n%s", out)
		}
		a.signal(syscall.SIGSTOP) // from here on systemd keeps them, or nobody
		for _, line := range []string{
			"systemctl daemon-reload",
			"systemctl daemon-reexec",
			"systemctl set-property bulkhead-chat.slice IOWeight=70",
			"systemctl set-property --runtime bulkhead-batch.slice IOWeight=50",
			"systemctl daemon-reload",
		} {
			sh(t, line)
			holds(t, line, want)
		}
		if state := sh(t, "systemctl is-active bulkhead-chat.slice"); state != "active" {
			t.Errorf("bulkhead-chat.slice is %s", state)
		}
		a.signal(syscall.SIGCONT)

		// The connection that systemd closed when it started itself again is made anew.
		a.write(strings.ReplaceAll(values, "weight: 900", "weight: 901"))
		sh(t, "bulkhead reload")
		holds(t, "after a reload", map[string]map[string]string{"/bulkhead.slice/bulkhead-chat.slice": {"cpu.weight": "901"}})
		// From 6.9 on a kernel does not count CPUs that may be added, so there it is CPU 0.
		every := sh(t, "cat /sys/devices/system/cpu/possible")
		a.write(strings.ReplaceAll(strings.ReplaceAll(values, "cpu: {weight: 900, cpus: 0}, memory: {high: 100Mi, max: 200Mi}, pids: {max: 77}", "cpu: none"), "  night: {class: background}\n", ""))
		sh(t, "bulkhead reload")
		holds(t, "after values left the policy", map[string]map[string]string{
			"/bulkhead.slice/bulkhead-chat.slice": {"cpu.weight": "100", "cpuset.cpus": every, "memory.high": "max", "memory.max": "max", "pids.max": "max"}})
		kerneltest.Poll(t, "the slice of a feature that left the policy is gone", func() error {
			if _, err := os.Stat(root + "/bulkhead.slice/bulkhead-night.slice"); err == nil {
				return fmt.Errorf("it is there")
			}
			return nil
		})
	})
	// What others have set is theirs.
	for _, file := range []string{control + "/bulkhead-chat.slice.d/50-IOWeight.conf", "/run/systemd/system.control/bulkhead-batch.slice.d/50-IOWeight.conf"} {
		if err := os.Remove(file); err != nil {
			t.Error(err)
		}
		if err := os.Remove(filepath.Dir(file)); err != nil {
			t.Error(err)
		}
	}
	if after := state(t); after != before {
		t.Errorf("after detach:\n%s\nbefore:\n%s", after, before)
	}
}

// state is everything of the machine that must be as it was after detach.
func state(t *testing.T) string {
	t.Helper()
	return sh(t, `find `+root+` -type d -name 'bulkhead*'; find /etc/systemd /run/systemd -name '*bulkhead*' -not -path '*/units/*'; systemctl list-units --all --plain --no-legend 'bulkhead*' 'exec-*'
for f in cgroup.subtree_control system.slice/cpu.weight system.slice/dbus.service/memory.max; do echo $f $(cat `+root+`/$f 2>&1); done`)
}

// exec makes a scope in the slice, and becomes the command.
func TestExec(t *testing.T) {
	start(t, values)
	cmd := exec.Command("bulkhead", "exec", "--feature", "chat", "--", "sh", "-c", "echo $$; cat /proc/self/cgroup; exec cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	said := filepath.Join(t.TempDir(), "said")
	out, err := os.Create(said)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	name := fmt.Sprintf("exec-%d.scope", cmd.Process.Pid)
	wanted := fmt.Sprintf("%d\n0::/bulkhead.slice/bulkhead-chat.slice/%s\n", cmd.Process.Pid, name)
	kerneltest.Poll(t, "the command says where it is", func() error {
		text, err := os.ReadFile(said)
		if err == nil && string(text) != wanted {
			err = fmt.Errorf("%q, want %q", text, wanted)
		}
		return err
	})
	if slice := sh(t, "systemctl show -P Slice "+name); slice != "bulkhead-chat.slice" {
		t.Errorf("the scope is in %s", slice)
	}
	if n := compartment(t, "chat"); n != 1 {
		t.Errorf("%d processes in chat, want 1", n)
	}
	in.Close()
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	kerneltest.Poll(t, "the scope is gone", func() error {
		if _, err := os.Stat(root + "/bulkhead.slice/bulkhead-chat.slice/" + name); err == nil {
			return fmt.Errorf("it is there")
		}
		return nil
	})
	// From a cgroup namespace of one's own: systemd moves the process, and it is not in it.
	elsewhere := sh(t, "unshare --cgroup bulkhead exec --cgroup-root "+root+" --feature chat -- cat /proc/self/cgroup")
	if !regexp.MustCompile(`^0::(/\.\.)+/bulkhead\.slice/bulkhead-chat\.slice/exec-\d+\.scope$`).MatchString(elsewhere) {
		t.Errorf("from another cgroup namespace: in %s", elsewhere)
	}
	if out, err := exec.Command("bulkhead", "exec", "--feature", "night", "--", "sh", "-c", "exit 7").CombinedOutput(); err == nil || err.(*exec.ExitError).ExitCode() != 7 {
		t.Errorf("exit 7: %v %s", err, out)
	}
}

// status is of status -o json what is looked at here.
type status struct {
	Agent        struct{ Running bool }
	Conditions   []struct{ Reason, Message string }
	Compartments []struct {
		Feature         string
		Processes       int
		ValuesCorrected *uint64 `json:"values_corrected"`
	}
}

func statusOf(t *testing.T) (s status) {
	t.Helper()
	if err := json.Unmarshal([]byte(sh(t, "bulkhead status -o json")), &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// compartment is how many processes status sees in a feature.
func compartment(t *testing.T, feature string) int {
	t.Helper()
	n := 0
	for _, c := range statusOf(t).Compartments {
		if c.Feature == feature {
			n += c.Processes
		}
	}
	return n
}

// What runs in a slice keeps it: detach takes the values back and stops nothing.
func TestDetachInhabited(t *testing.T) {
	sh(t, "systemd-run --unit=resident --slice=bulkhead-chat.slice sleep 1000")
	defer sh(t, "systemctl stop resident.service")
	pid := sh(t, "systemctl show -P MainPID resident.service")
	t.Run("in force", func(t *testing.T) {
		start(t, values)
		holds(t, "in force", want)
		if n := compartment(t, "chat"); n != 1 {
			t.Errorf("%d processes in chat, want 1", n)
		}
	})
	if now := sh(t, "systemctl show -P MainPID,ActiveState resident.service"); now != pid+"\nactive" {
		t.Errorf("the service is %q, was %s", now, pid)
	}
	if out := sh(t, "cat "+root+"/bulkhead.slice/bulkhead-chat.slice/memory.high"); out != "max" {
		t.Errorf("memory.high %s after detach", out)
	}
	if left := sh(t, "ls -d "+control+"/bulkhead* 2>/dev/null || true"); left != "" {
		t.Errorf("left: %s", left)
	}
}

// systemd's own programs on the hooks of a unit, daemon-reload after daemon-reload: theirs
// work, ours stay, and the limit is never passed.
func TestSystemdsPrograms(t *testing.T) {
	start(t, values)
	kerneltest.Serve(t, "127.1.0.1:80", kerneltest.Drain)
	kerneltest.Serve(t, "127.1.0.2:80", kerneltest.Drain)
	// Eight workers want a connection for good, of which the limit leaves four. Theirs is
	// the address that their own unit denies, too: its packets get nowhere.
	sh(t, `systemd-run --unit=workers --slice=bulkhead-chat.slice -p IPAddressDeny=127.1.0.2 -p IPAccounting=yes -p SocketBindDeny=any -p RestrictNetworkInterfaces=lo bash -c '
		for i in 1 2 3 4 5 6 7 8; do (while :; do exec 3<>/dev/tcp/127.1.0.1/80 && sleep 1000; sleep 0.2; done) 2>/dev/null & done; wait'`)
	t.Cleanup(func() { sh(t, "systemctl stop workers.service") })
	established := func() int {
		return strings.Count(sh(t, `awk '$3 == "0100017F:0050" && $4 == "01" {print "x"}' /proc/net/tcp`), "x")
	}
	dir, err := os.Open(root)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	ours := func() any {
		r, err := link.QueryPrograms(link.QueryOptions{Target: int(dir.Fd()), Attach: ebpf.AttachCGroupInet4Connect})
		if err != nil || len(r.Programs) != 1 {
			t.Fatalf("programs at the root: %v (%v), want one", r, err)
		}
		return r.Programs
	}
	kerneltest.Poll(t, "four are connected", func() error {
		if n := established(); n != 4 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	before := ours()
	for range 5 {
		sh(t, "systemctl daemon-reload")
		if n := established(); n != 4 {
			t.Errorf("%d connections after a daemon-reload, want 4", n)
		}
	}
	if after := ours(); !reflect.DeepEqual(after, before) {
		t.Errorf("our programs: %+v, were %+v", after, before)
	}
	if out, err := exec.Command("systemd-run", "--wait", "--pipe", "--slice=bulkhead-batch.slice", "-p", "IPAddressDeny=127.1.0.2", "timeout", "3", "bash", "-c", "exec 3<>/dev/tcp/127.1.0.2/80").CombinedOutput(); err == nil {
		t.Errorf("systemd's IPAddressDeny denied nothing: %s", out)
	}

	// A unit that starts again and again has a new cgroup each time, in the same slice.
	for i := range 3 {
		out, err := exec.Command("systemd-run", "--wait", "--pipe", "--slice=bulkhead-chat.slice", "bash", "-c", "exec 3<>/dev/tcp/127.1.0.1/80").CombinedOutput()
		if err == nil || !strings.Contains(string(out), "refused") {
			t.Errorf("start %d: %v %s, want it refused over the limit", i, err, out)
		}
	}
}

// What is in force when the machine goes down, for TestAfterReboot.
func TestBeforeReboot(t *testing.T) {
	unit := `
[Service]
Slice=bulkhead-chat.slice
ExecStart=bash -c 'cat ` + root + `/bulkhead.slice/bulkhead-chat.slice/{cpu.weight,memory.max,cpuset.cpus} >` + seen + `; exec sleep 1000'
[Install]
WantedBy=multi-user.target
`
	const policy = "/etc/policy.yaml"
	for name, text := range map[string]string{"/etc/systemd/system/workload.service": unit, policy: values} {
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	sh(t, "systemctl enable workload.service")
	// It ends with the machine and takes nothing back.
	sh(t, "systemd-run --unit=agent -p Type=exec bulkhead agent --policy "+policy)
	holds(t, "before the reboot", want)
}

// Values are in force before the workload starts, without an agent.
func TestAfterReboot(t *testing.T) {
	if _, err := os.Stat("/run/bulkhead"); err == nil {
		t.Error("an agent has run")
	}
	kerneltest.Poll(t, "the workload has started", func() error {
		saw, err := os.ReadFile(seen)
		if err == nil && string(saw) != "900\n209715200\n0\n" {
			err = fmt.Errorf("it saw %q", saw)
		}
		return err
	})
	sh(t, "systemctl disable --now workload.service; bulkhead detach")
	if left := sh(t, "ls -d "+control+"/bulkhead* "+root+"/bulkhead.slice 2>/dev/null || true"); left != "" {
		t.Errorf("left: %s", left)
	}
}
