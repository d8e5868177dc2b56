//go:build vm

package systemd

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"bulkhead/internal/kerneltest"
)

const containing = `
apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers:
  here: {cidrs: [127.0.0.1/32]}
features:
  chat:  {class: realtime, match: [{container: {compose_service: chat}}, {container: {name: early}}]}
  batch: {class: batch, match: [{container: {image: example.test/tools/box, label: "tier=free"}}]}
  parse: {class: background, match: [{container: {name: "parse-*"}}]}
`

const box = "example.test/tools/box:1.2"

// image makes a tar of a container's files: busybox, and nothing else.
func image(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	sh(t, "mkdir -p "+dir+"/r/bin && cp /bin/busybox "+dir+"/r/bin/ && for a in sh sleep nc; do ln -s busybox "+dir+"/r/bin/$a; done && tar -C "+dir+"/r -c . >"+dir+"/box.tar")
	return dir + "/box.tar"
}

// accepted is how many connections of a feature were admitted to the provider here.
func accepted(t *testing.T, feature string) (n uint64) {
	t.Helper()
	var s struct {
		Bulkheads []struct {
			Scope, Feature, Provider string
			Accepted                 uint64
		}
	}
	out := sh(t, "bulkhead status -o json")
	if err := json.Unmarshal([]byte(out), &s); err != nil {
		t.Fatal(err)
	}
	for _, b := range s.Bulkheads {
		if b.Scope == "feature" && b.Feature == feature {
			n += b.Accepted
		}
	}
	return n
}

// weighs waits until the cgroup of a process has a weight.
func weighs(t *testing.T, pid, want string) {
	t.Helper()
	kerneltest.Poll(t, "the weight of process "+pid+" is "+want, func() error {
		b, err := os.ReadFile("/proc/" + pid + "/cgroup")
		if err != nil {
			return err
		}
		at := filepath.Join(root, strings.TrimPrefix(strings.TrimSpace(string(b)), "0::"))
		idle, _ := os.ReadFile(at + "/cpu.idle")
		weight, err := os.ReadFile(at + "/cpu.weight")
		if got := strings.TrimSpace(string(weight)); err != nil || got != want && !(want == "idle" && strings.TrimSpace(string(idle)) == "1") {
			return fmt.Errorf("%s has %q, idle %q (%v): %s", at, got, idle, err, sh(t, "bulkhead status"))
		}
		return nil
	})
}

// Each runtime is asked which containers it has: those that run are adopted at the start, those
// that come are in their compartment before their first connect, and all values go back.
func TestContainers(t *testing.T) {
	tar := image(t)
	connect := " sh -c 'nc 127.0.0.1 9 </dev/null; true'"
	const docker = "docker run --security-opt apparmor=unconfined --network host "
	const podman = "podman run --security-opt apparmor=unconfined --network host "
	pidOf := func(runtime, name string) string { return sh(t, runtime+" inspect -f '{{.State.Pid}}' "+name) }

	sh(t, "systemctl start containerd docker podman.socket")
	sh(t, "docker import "+tar+" "+box+" && docker save "+box+" >/tmp/box.tar && podman load -q -i /tmp/box.tar && ctr image import --snapshotter native /tmp/box.tar")
	defer sh(t, "docker ps -aq | xargs -r docker rm -f; podman rm -af; ctr task ls -q | xargs -rn1 ctr task kill -s 9; systemctl stop docker docker.socket podman.socket containerd")
	sh(t, docker+"-d --name early "+box+" sleep 1000")

	start(t, containing)
	early := pidOf("docker", "early")
	weighs(t, early, "10000")

	sh(t, docker+"--rm --label com.docker.compose.service=chat "+box+connect)
	if got, stray := accepted(t, "chat"), accepted(t, "default"); got != 1 || stray != 0 {
		t.Errorf("docker: %d connections of chat, want 1; %d of default", got, stray)
	}
	sh(t, podman+"--rm --label tier=free "+box+connect)
	if got, stray := accepted(t, "batch"), accepted(t, "default"); got != 1 || stray != 0 {
		t.Errorf("podman: %d connections of batch, want 1; %d of default", got, stray)
	}
	sh(t, "ctr run --rm --snapshotter native --net-host "+box+" parse-1"+connect)
	if got, stray := accepted(t, "parse"), accepted(t, "default"); got != 1 || stray != 0 {
		t.Errorf("containerd: %d connections of parse, want 1; %d of default", got, stray)
	}
	sh(t, "ctr run -d --snapshotter native --cgroup /mine/own "+box+" parse-2 sleep 1000")
	weighs(t, sh(t, "ctr task ls | awk '/^parse-2/ {print $2}'"), "idle")
	sh(t, podman+"-d --name parse-3 "+box+" sleep 1000")
	if got := sh(t, "bulkhead explain --from parse-3"); !strings.Contains(got, "compartment parse") {
		t.Error(got)
	}
	weighs(t, pidOf("podman", "parse-3"), "1")

	// Made again it is another cgroup, and by another name in another compartment.
	sh(t, "docker restart -t 0 early")
	early = pidOf("docker", "early")
	weighs(t, early, "10000")
	sh(t, "docker rename early parse-4")
	weighs(t, early, "1")
	sh(t, "docker update --cpu-shares 500 parse-4") // which writes cpu.weight
	weighs(t, early, "1")

	// While the runtime is away they stay where they are.
	sh(t, "systemctl stop docker docker.socket")
	kerneltest.Poll(t, "status says so", func() error {
		if text := sh(t, "bulkhead status"); !strings.Contains(text, "RuntimeAway") {
			return fmt.Errorf("%s", text)
		}
		return nil
	})
	weighs(t, early, "1")
	if got := sh(t, "systemctl is-active docker; true"); got != "inactive" {
		t.Errorf("docker is %s: somebody has started it again", got)
	}
	sh(t, "systemctl start docker")
	kerneltest.Poll(t, "it answers again", func() error {
		if text := sh(t, "bulkhead status"); strings.Contains(text, "RuntimeAway") {
			return fmt.Errorf("%s", text)
		}
		return nil
	})
	sh(t, "bulkhead detach")
	weighs(t, early, "19") // what docker update has set since
}
