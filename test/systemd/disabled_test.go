//go:build vm

package systemd

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/conn"
)

// disabling gives CPU values to units that have no cpu controller, as the slice that they are in says: systemd
// takes the property and nothing comes of it.
const disabling = `
apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers: {}
features:
  shut:
    class: realtime
    match: [{cgroup: "/closed.slice/shut*.service"}]
    cpu: {weight: 900, max: 150%}
    memory: {high: 100Mi}
    pids: {max: 77}
  open:
    class: realtime
    match: [{unit: open.service}]
    cpu: {weight: 800}
`

// What systemd does not bring into force holds up nobody: the agent starts, reloads and stops, what can be set is
// set, and a condition says why the rest is not. It is set when it can be.
func TestDisabledControllers(t *testing.T) {
	const slice = "/etc/systemd/system/closed.slice"
	if err := os.WriteFile(slice, []byte("[Slice]\nDisableControllers=cpu\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	const units = "shut1 shut2 shut3 shut4"
	sh(t, "systemctl daemon-reload; for u in "+units+"; do systemd-run --unit=$u --slice=closed.slice sleep infinity; done; systemd-run --unit=open sleep infinity")
	t.Cleanup(func() {
		sh(t, "systemctl stop "+units+" open; systemctl stop closed.slice; rm "+slice+"; systemctl daemon-reload")
	})
	a := start(t, disabling)
	others := map[string]map[string]string{"/system.slice/open.service": {"cpu.weight": "800"}}
	for _, u := range strings.Fields(units) {
		others["/closed.slice/"+u+".service"] = map[string]string{"memory.high": "104857600", "pids.max": "77"}
	}
	holds(t, "what can be set", others)

	// In an emulated machine a command alone takes a second, or ten; to wait for each value would take minutes.
	const soon = time.Minute
	took := func(line string) {
		t.Helper()
		begin := time.Now()
		sh(t, line)
		if d := time.Since(begin); d > soon {
			t.Errorf("%s: %v", line, d)
		} else {
			t.Logf("%s: %v", line, d)
		}
	}
	took("bulkhead reload")
	// told are the conditions; on a busy machine the agent does not always answer in time.
	told := func() (string, error) {
		s := statusOf(t)
		if !s.Agent.Running {
			return "", fmt.Errorf("the agent does not answer")
		}
		return fmt.Sprint(s.Conditions), nil
	}
	kerneltest.Poll(t, "the conditions name the cause", func() error {
		if text, err := told(); err != nil || !strings.Contains(text, "closed.slice has DisableControllers=cpu") || !strings.Contains(text, "shut1.service") || !strings.Contains(text, "CPUWeight") {
			return fmt.Errorf("%s %v", text, err)
		}
		return nil
	})

	// It can be stopped in the middle of it.
	began := time.Now()
	reload := exec.Command("bulkhead", "reload")
	if err := reload.Start(); err != nil {
		t.Fatal(err)
	}
	took("bulkhead detach")
	reload.Wait()
	<-a.ended
	t.Logf("with a reload on its way: %v", time.Since(began))
	if left := sh(t, "grep -rls bulkhead /run/systemd/system.control /run/systemd/transient; systemctl show -P CPUWeight "+units+" open"); strings.Trim(strings.ReplaceAll(left, "[not set]", ""), "\n") != "" {
		t.Errorf("after detach:\n%s", left)
	}

	// Once it can be set it is.
	b := start(t, disabling)
	sh(t, "sed -i /DisableControllers/d "+slice+"; systemctl daemon-reload")
	for _, u := range strings.Fields(units) {
		others["/closed.slice/"+u+".service"]["cpu.weight"] = "900"
		others["/closed.slice/"+u+".service"]["cpu.max"] = "150000 100000"
	}
	holds(t, "not disabled any more", others)
	kerneltest.PollFor(t, 3*time.Minute, "the condition is gone", func() error {
		if text, err := told(); err != nil || strings.Contains(text, "CPUWeight") || strings.Contains(text, "cpu.") {
			return fmt.Errorf("%s %v", text, err)
		}
		return nil
	})
	b.signal(syscall.SIGTERM)
	<-b.ended
	sh(t, "bulkhead detach")

	// One that has just begun, and answers nobody yet, is stopped too.
	c := exec.Command("bulkhead", "agent", "--policy", b.policy)
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	kerneltest.Poll(t, "it holds the pins", func() error {
		if _, ok := conn.Holder(conn.Options{CgroupRoot: root, BPFFS: "/sys/fs/bpf"}); !ok {
			return fmt.Errorf("nobody does")
		}
		return nil
	})
	took("bulkhead detach")
	if err := c.Wait(); err != nil {
		t.Errorf("stopped as it began: %v", err)
	}
}
