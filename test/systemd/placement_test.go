//go:build vm

package systemd

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"bulkhead/internal/kerneltest"
)

const placing = `
apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers: {}
features:
  chat:  {class: realtime, match: [{unit: "adopted*.service"}]}
  batch: {class: batch, match: [{exe: /usr/bin/sleep, cmdline: "77[0-9]$"}]}
`

// where is the cgroup of a process.
func where(pid int) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	return strings.TrimPrefix(strings.TrimSpace(string(b)), "0::")
}

// loose starts a command in the root cgroup, where nobody manages it.
func loose(t *testing.T, name string, args ...string) int {
	t.Helper()
	d, err := os.Open(root)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	cmd := exec.Command("/bin/sh", append([]string{"-c", `echo $$ >` + root + `/cgroup.procs && exec "$0" "$@"`, name}, args...)...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	return cmd.Process.Pid
}

func in(t *testing.T, pid int, cgroup string) {
	t.Helper()
	kerneltest.Poll(t, fmt.Sprintf("process %d is in %s", pid, cgroup), func() error {
		if at := where(pid); at != cgroup {
			out, _ := exec.Command("sh", "-c", fmt.Sprintf("cat /proc/%d/comm; ls -l /proc/%d/exe; bulkhead status -o json | grep -A12 'processes.: {\\|Placement'", pid, pid)).CombinedOutput()
			return fmt.Errorf("it is in %s: %s", at, out)
		}
		return nil
	})
}

// Loose processes that match become a scope, which systemd knows and keeps; those of a
// unit stay where they are, and who asks is told how. They go back with detach.
func TestLooseProcesses(t *testing.T) {
	first := loose(t, "sleep", "771")
	in(t, first, "/")
	a := start(t, placing)
	scope := "/bulkhead.slice/bulkhead-batch.slice/match-1-batch.scope"
	in(t, first, scope)
	second := loose(t, "sleep", "772")
	in(t, second, scope)
	if got := sh(t, "systemctl is-active match-1-batch.scope"); got != "active" {
		t.Errorf("the scope is %s", got)
	}
	// It asks for no controller: that would be turned on up to the root.
	if on := sh(t, "cat "+root+"/cgroup.subtree_control "+root+"/bulkhead.slice/cgroup.subtree_control "+root+"/bulkhead.slice/bulkhead-batch.slice/cgroup.subtree_control"); strings.Contains(on, "cpuset") {
		t.Errorf("the scope has turned controllers on: %s", on)
	}
	for _, command := range []string{"systemctl daemon-reload", "systemctl daemon-reexec"} {
		sh(t, command)
		in(t, first, scope)
		in(t, second, scope)
	}
	third := loose(t, "sleep", "773") // over the connection that the reexec has cut
	in(t, third, scope)

	// One of a unit is left alone, with its unit.
	sh(t, "systemd-run --unit=mine --collect /usr/bin/sleep 774")
	defer sh(t, "systemctl stop mine")
	kerneltest.Poll(t, "status tells of it", func() error {
		if text := sh(t, "bulkhead status"); !strings.Contains(text, "/system.slice/mine.service") || !strings.Contains(text, "Delegate=yes") {
			return fmt.Errorf("%s", text)
		}
		return nil
	})
	a.Log(sh(t, "bulkhead status | grep processes"))
	// In one that is delegated it gets a cgroup in the unit, whose stop ends it.
	sh(t, "systemd-run --unit=lent --collect -p Delegate=yes /usr/bin/sleep 775")
	var lent int
	fmt.Sscan(sh(t, "systemctl show -P MainPID lent"), &lent)
	in(t, lent, "/system.slice/lent.service/bulkhead-match-"+sh(t, "stat -c %i "+root+"/system.slice/lent.service")+"-batch")
	sh(t, "systemctl daemon-reload && systemctl stop lent")
	if _, err := os.Stat(root + "/system.slice/lent.service"); !os.IsNotExist(err) || where(lent) != "" {
		t.Errorf("stopped, and process %d is in %q, the cgroup is there: %v", lent, where(lent), err)
	}
	sh(t, "bulkhead detach")
	for _, pid := range []int{first, second, third} {
		in(t, pid, "/")
	}
	kerneltest.Poll(t, "the scope is gone", func() error {
		if _, err := os.Stat(filepath.Join(root, "bulkhead.slice")); !os.IsNotExist(err) {
			return fmt.Errorf("%v: %s", err, sh(t, "systemd-cgls --no-pager /bulkhead.slice; true"))
		}
		return nil
	})
}

// A unit that is adopted works as before: stopped, restarted twenty times, and killed by
// its watchdog; each time its new cgroup is adopted.
func TestAdoptedUnitRestarts(t *testing.T) {
	unit := "/run/systemd/system/adopted.service"
	text := `[Unit]
StartLimitIntervalSec=0
[Service]
Type=notify
NotifyAccess=all
WatchdogSec=10
Restart=on-watchdog
ExecStart=/bin/bash -c 'systemd-notify --ready; while [ ! -e /run/hang ]; do systemd-notify WATCHDOG=1; sleep 2; done; sleep 1000'
`
	if err := os.WriteFile(unit, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	defer func() {
		os.Remove("/run/hang")
		sh(t, "systemctl stop adopted")
		os.Remove(unit)
		sh(t, "systemctl daemon-reload")
	}()
	sh(t, "systemctl daemon-reload && systemctl start adopted")
	start(t, placing)
	adopted := func(when string) {
		t.Helper()
		kerneltest.Poll(t, when+": its cgroup is adopted", func() error {
			out, err := exec.Command("stat", "-c", "%i", root+"/system.slice/adopted.service").Output()
			if err != nil {
				return err // between two
			}
			st := strings.TrimSpace(string(out))
			all := sh(t, `bulkhead status -o json | tr -d ' \n' | grep -o '"path":"/system.slice/adopted.service","id":[0-9]*'; true`)
			if !strings.HasSuffix(all, ":"+st) {
				return fmt.Errorf("%s is not %s", all, st)
			}
			return nil
		})
	}
	adopted("at the start")
	for i := range 20 {
		sh(t, "systemctl restart adopted")
		if i%5 == 4 { // each time it is: the agent is asked seldom, as that takes a second here
			adopted(fmt.Sprintf("restart %d", i))
		}
	}
	if got := sh(t, "systemctl show -P NRestarts -P Result adopted"); !strings.Contains(got, "success") {
		t.Errorf("%s", got)
	}
	// Its watchdog ends it, as it hangs, and it comes again.
	sh(t, "touch /run/hang")
	kerneltest.Poll(t, "the watchdog restarts it", func() error {
		if n := sh(t, "systemctl show -P NRestarts adopted"); n == "0" {
			return fmt.Errorf("%s restarts", n)
		}
		return nil
	})
	os.Remove("/run/hang")
	kerneltest.Poll(t, "it runs again", func() error {
		if got, err := exec.Command("systemctl", "is-active", "adopted").Output(); err != nil {
			return fmt.Errorf("%s", got)
		}
		return nil
	})
	adopted("after the watchdog")
	sh(t, "systemctl stop adopted")
	if _, err := os.Stat(root + "/system.slice/adopted.service"); !os.IsNotExist(err) {
		t.Errorf("stopped, and its cgroup is there: %v", err)
	}
}
