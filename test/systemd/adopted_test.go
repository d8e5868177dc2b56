//go:build vm

package systemd

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"bulkhead/internal/kerneltest"
)

// adopting gives values to units of others: one that says nothing of them, one with values in its unit file, one that
// was made by StartTransientUnit, one whose administrator has set a property, a slice, and a directory below a unit
// that is delegated.
const adopting = `
apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers: {}
features:
  chat:
    class: realtime
    match: [{cgroup: /system.slice/plain.service}, {cgroup: /system.slice/stated.service}, {cgroup: /system.slice/transient.service},
            {cgroup: /system.slice/admins.service}, {cgroup: /group.slice}]
    cpu: {weight: 900, max: 150%}
    memory: {high: 100Mi}
    pids: {max: 77}
  inner:
    class: batch
    match: [{cgroup: /system.slice/delegate.service/inner}]
    cpu: none
    pids: {max: 33}
`

var (
	theirs = []string{"plain.service", "stated.service", "transient.service", "admins.service", "group.slice"}
	// given are their values while adopting is in force.
	given = map[string]string{"cpu.weight": "900", "cpu.idle": "0", "cpu.max": "150000 100000", "memory.high": "104857600", "pids.max": "77"}
)

func cgroupOf(unit string) string {
	if strings.HasSuffix(unit, ".slice") {
		return "/" + unit
	}
	return "/system.slice/" + unit
}

// allGiven are the given values of all units.
func allGiven() map[string]map[string]string {
	all := map[string]map[string]string{"/system.slice/delegate.service/inner": {"pids.max": "33"}}
	for _, u := range theirs {
		all[cgroupOf(u)] = given
	}
	return all
}

// units starts them and removes them at the end of the test.
func units(t *testing.T) {
	t.Helper()
	const etc = "/etc/systemd/system/"
	for name, text := range map[string]string{
		"plain.service":                  "[Service]\nExecStart=sleep infinity\n",
		"stated.service":                 "[Service]\nExecStart=sleep infinity\nCPUWeight=idle\nCPUQuota=70%\nMemoryHigh=200M\nTasksMax=500\n",
		"admins.service":                 "[Service]\nExecStart=sleep infinity\n",
		"admins.service.d/override.conf": "[Service]\nMemoryHigh=300M\n",
		"delegate.service":               "[Service]\nExecStart=bash -c 'cd " + root + "/system.slice/delegate.service; mkdir -p main inner; echo $$$$ >main/cgroup.procs; echo +pids >cgroup.subtree_control; exec sleep infinity'\nDelegate=yes\n",
		"within.service":                 "[Service]\nExecStart=sleep infinity\nSlice=group.slice\n",
	} {
		if err := os.MkdirAll(filepath.Dir(etc+name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(etc+name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	all := "plain.service stated.service admins.service delegate.service within.service"
	sh(t, "systemctl daemon-reload; systemctl start "+all+"; systemd-run --unit=transient.service -p CPUWeight=55 sleep infinity")
	sh(t, "systemctl set-property --runtime admins.service CPUWeight=300; systemctl set-property admins.service TasksMax=400")
	kerneltest.Poll(t, "the delegated directory is there", func() error {
		_, err := os.Stat(root + "/system.slice/delegate.service/inner/pids.max")
		return err
	})
	t.Cleanup(func() {
		sh(t, "systemctl stop "+all+" transient.service group.slice; systemctl revert admins.service plain.service 2>/dev/null; cd "+etc+" && rm -rf "+all+" admins.service.d; systemctl daemon-reload")
	})
}

// own is what systemd, the kernel and the drop-ins say of the units.
func own(t *testing.T) string {
	t.Helper()
	var files []string
	for _, u := range theirs {
		for _, f := range []string{"cpu.weight", "cpu.idle", "cpu.max", "memory.high", "memory.max", "pids.max"} {
			files = append(files, filepath.Join(root, cgroupOf(u), f))
		}
	}
	return sh(t, `systemctl show -p Id,ControlGroup,CPUWeight,CPUQuotaPerSecUSec,CPUQuotaPeriodUSec,MemoryHigh,MemoryMax,TasksMax `+strings.Join(theirs, " ")+`
grep -H . `+strings.Join(files, " ")+` `+root+`/system.slice/delegate.service/inner/pids.max 2>&1
find /etc/systemd/system.control /run/systemd/system.control /run/systemd/transient -type f 2>/dev/null | sort | xargs grep -H .`)
}

// ownSettles polls until own is as it was: systemd answers before it has turned a controller off.
func ownSettles(t *testing.T, when, want string) {
	t.Helper()
	kerneltest.Poll(t, when+": all is as it was", func() error {
		if now := own(t); now != want {
			return fmt.Errorf("%s\nwas:\n%s", now, want)
		}
		return nil
	})
}

func (a *agent) kill() {
	a.Helper()
	if err := a.cmd.Process.Kill(); err != nil {
		a.Fatal(err)
	}
	<-a.ended
}

// Values of units are properties: systemd keeps them, and gets its own back, by detach and by the policy; also from an
// agent that was killed.
func TestUnits(t *testing.T) {
	units(t)
	before := own(t)
	a := start(t, adopting)
	holds(t, "after the start", allGiven())
	a.signal(syscall.SIGSTOP) // from here on systemd keeps them, or nobody
	for _, line := range []string{
		"systemctl daemon-reload", "systemctl daemon-reexec",
		"systemctl set-property plain.service IOWeight=70", "systemctl set-property --runtime transient.service IOWeight=70",
		"systemctl daemon-reload", "systemctl restart plain.service",
	} {
		sh(t, line)
		holds(t, line, allGiven())
	}
	sh(t, "systemctl set-property plain.service IOWeight=; systemctl set-property --runtime transient.service IOWeight=; rm -r "+control+"/plain.service.d /run/systemd/transient/transient.service.d/50-IOWeight.conf")
	a.kill()
	sh(t, "bulkhead detach")
	ownSettles(t, "after a kill and detach", before)

	b := start(t, adopting)
	holds(t, "in force again", allGiven())
	b.kill()
	c := start(t, strings.ReplaceAll(adopting, "weight: 900", "weight: 901"))
	holds(t, "by another agent", map[string]map[string]string{"/system.slice/plain.service": {"cpu.weight": "901"}, "/system.slice/stated.service": {"cpu.weight": "901"}})
	c.write(strings.ReplaceAll(adopting, "cpu: {weight: 900, max: 150%}", "cpu: none"))
	sh(t, "bulkhead reload")
	holds(t, "less", map[string]map[string]string{"/system.slice/stated.service": {"cpu.idle": "1", "cpu.max": "70000 100000", "pids.max": "77"}})
	c.write("apiVersion: bulkhead/v1\nkind: Policy\nmode: enforce\nproviders: {}\nfeatures: {}\n")
	sh(t, "bulkhead reload")
	ownSettles(t, "after it left the policy", before)

	// What stops gives back at once; what starts again is adopted again.
	c.write(adopting)
	sh(t, "bulkhead reload")
	holds(t, "adopted", allGiven())
	sh(t, "systemctl stop plain.service")
	kerneltest.Poll(t, "the property of a unit that stopped is back", func() error {
		if now := sh(t, "systemctl show -P CPUWeight plain.service; ls -d /run/systemd/system.control/plain.service.d 2>/dev/null || true"); now != "[not set]" {
			return fmt.Errorf("%s", now)
		}
		return nil
	})
	sh(t, "systemctl start plain.service")
	holds(t, "started again", allGiven())
	sh(t, "systemctl stop transient.service")
	kerneltest.Poll(t, "nothing is left of a transient unit", func() error {
		if now := sh(t, "ls -d /run/systemd/transient/transient.service* 2>/dev/null || true"); now != "" {
			return fmt.Errorf("%s", now)
		}
		return nil
	})
	sh(t, "systemd-run --unit=transient.service -p CPUWeight=55 sleep infinity")
	holds(t, "another of its name", allGiven())
	c.signal(syscall.SIGTERM)
	<-c.ended
	sh(t, "bulkhead detach")
	ownSettles(t, "in the end", before)
}

// A burst, which systemd has no name for, beside a quota, for which it has: what the unit had of both comes back, however
// often they were set.
func TestUnitBurst(t *testing.T) {
	const unit, at = "/run/systemd/system/burst.service", root + "/system.slice/burst.service/"
	if err := os.WriteFile(unit, []byte("[Service]\nExecStart=sleep infinity\nCPUQuota=70%\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	sh(t, "systemctl daemon-reload; systemctl start burst; echo 7000 >"+at+"cpu.max.burst")
	defer func() {
		sh(t, "systemctl stop burst; rm "+unit+"; systemctl daemon-reload")
	}()
	a := start(t, strings.Replace(adopting, "match: [{cgroup: /system.slice/plain.service}", "match: [{unit: burst.service}", 1))
	holds(t, "no burst is asked for", map[string]map[string]string{"/system.slice/burst.service": {"cpu.max": "150000 100000", "cpu.max.burst": "0"}})
	a.write("apiVersion: bulkhead/v1\nkind: Policy\nmode: enforce\nproviders: {}\nfeatures:\n  chat: {class: realtime, match: [{unit: burst.service}], cpu: {max: 150%, burst: 50ms}}\n")
	for range 3 {
		sh(t, "bulkhead reload")
		holds(t, "after a reload", map[string]map[string]string{"/system.slice/burst.service": {"cpu.max": "150000 100000", "cpu.max.burst": "50000"}})
	}
	a.signal(syscall.SIGTERM)
	<-a.ended
	sh(t, "bulkhead detach")
	holds(t, "after detach", map[string]map[string]string{"/system.slice/burst.service": {"cpu.max": "70000 100000", "cpu.max.burst": "7000"}})
}

// corrections are those that status counts, by feature; the features of an agent that does not answer in time have none.
func corrections(t *testing.T) map[string]uint64 {
	t.Helper()
	all := map[string]uint64{}
	for _, c := range statusOf(t).Compartments {
		if c.ValuesCorrected != nil {
			all[c.Feature] += *c.ValuesCorrected
		}
	}
	return all
}

// What somebody else changes is put back within ten seconds or so, counted and told; and what an administrator has
// set for a unit is his again when we let go.
func TestForeignChange(t *testing.T) {
	units(t)
	a := start(t, values+strings.SplitAfter(strings.ReplaceAll(adopting, "chat:", "web:"), "features:\n")[1])
	ours := map[string]map[string]string{"/bulkhead.slice/bulkhead-chat.slice": {"cpu.weight": "900", "cpu.max": "max 100000"}}
	for slice, files := range allGiven() {
		ours[slice] = files
	}
	holds(t, "after the start", ours)
	// back waits until all is right and counted.
	back := func(when string, chat, web, inner uint64) {
		t.Helper()
		want := map[string]uint64{"chat": chat, "web": web, "inner": inner, "batch": 0, "night": 0}
		kerneltest.PollFor(t, time.Minute, when+": it is counted", func() error {
			if now := corrections(t); !maps.Equal(now, want) {
				return fmt.Errorf("%v, want %v", now, want)
			}
			return nil
		})
		holds(t, when, ours)
	}
	set := func(file, value string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(root, file), []byte(value), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	set("bulkhead.slice/bulkhead-chat.slice/cpu.weight", "5")
	set("bulkhead.slice/bulkhead-chat.slice/cpu.max", "1000 100000")
	set("system.slice/plain.service/cpu.weight", "6")
	set("system.slice/delegate.service/inner/pids.max", "7")
	back("files", 2, 1, 1)
	if !regexp.MustCompile(`"cgroup":"/system.slice/plain.service","file":"cpu.weight","was":"6","put_back_to":"900"`).MatchString(a.log.String()) {
		t.Error("the log does not tell of it")
	}

	sh(t, "systemctl set-property plain.service CPUWeight=201; systemctl set-property --runtime admins.service CPUWeight=202")
	back("properties", 2, 3, 1)
	sh(t, "systemctl daemon-reload")
	back("a reload", 2, 3, 1)
	// It takes our record with it, and there is nothing left to give back.
	sh(t, "systemctl revert stated.service")
	a.kill()
	sh(t, "bulkhead detach")
	if now := sh(t, "systemctl show -P CPUWeight plain.service admins.service stated.service"); now != "201\n\n202\n\nidle" {
		t.Errorf("CPUWeight is %q after detach, want what the administrator set", now)
	}
	if now := sh(t, "cd /; grep -H = etc/systemd/system.control/plain.service.d/* run/systemd/system.control/*/*"); now != "etc/systemd/system.control/plain.service.d/50-CPUWeight.conf:CPUWeight=201\n"+
		"run/systemd/system.control/admins.service.d/50-CPUWeight.conf:CPUWeight=202" {
		t.Errorf("drop-ins after detach:\n%s", now)
	}
}
