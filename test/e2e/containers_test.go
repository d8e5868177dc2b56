package e2e

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"

	"bulkhead/internal/containers/enginetest"
	"bulkhead/internal/kerneltest"
)

const containing = oneProvider + `  chat:  {class: realtime, match: [{container: {name: "chat-*"}}], limits: {connections: 2}}
  batch: {class: batch, match: [{container: {label: "tier=free"}}], limits: {connections: 2}}
`

// newDocker makes a node whose containers a Docker of its own tells of.
func newDocker(t *testing.T) (*node, *enginetest.Engine) {
	t.Helper()
	n, e := newNode(t), enginetest.New(t)
	n.also = []string{"--container-runtime", "docker=" + e.Path}
	n.serve(1)
	n.write(containing)
	return n, e
}

// containerID is a container's id, of one letter.
func containerID(letter string) string { return strings.Repeat(letter, 64) }

// scope makes the cgroup that Docker makes for a container, and gives its path as status has it.
func (n *node) scope(letter string) (kerneltest.Cgroup, string) {
	n.t.Helper()
	path := "system.slice/docker-" + containerID(letter) + ".scope"
	return n.Mkdir(path), "/" + path
}

// inFeature waits until a cgroup is in a feature's compartment, or in none for "".
func (n *node) inFeature(path, feature string) {
	n.t.Helper()
	kerneltest.Poll(n.t, path+" is in "+feature, func() error {
		s := n.status()
		for _, f := range []string{"chat", "batch"} {
			if got := slices.Contains(s.cgroups(f), path); got != (f == feature) {
				return fmt.Errorf("%s has %v", f, s.cgroups(f))
			}
		}
		return nil
	})
}

// containerOf is whose cgroup it is by status, nil if it is no container's.
func (s *status) containerOf(path string) *contained {
	for _, c := range s.Compartments {
		for _, m := range c.Cgroups {
			if m.Path == path {
				return m.Container
			}
		}
	}
	return nil
}

// A container that runs is adopted at the start, and one that is made before it has a process: its first connect is
// counted where it belongs. It is where its names say, until it is gone.
func TestContainers(t *testing.T) {
	n, e := newDocker(t)
	running, chat := n.scope("a")
	client := n.place(running)
	named := enginetest.Container{Name: "chat-1", Image: "nginx:1.27", PID: client.PID}
	e.Put("", containerID("a"), named)
	n.start()
	s := n.status()
	if got := s.cgroups("chat"); !slices.Contains(got, chat) {
		t.Errorf("at the start chat has %v", got)
	}
	if c := s.containerOf(chat); c == nil || *c != (contained{running.ID, "docker", "chat-1", "nginx:1.27"}) {
		t.Errorf("status -o json says %+v", c)
	}
	if r := s.Agent.Runtimes; len(r) != 1 || r[0] != (asked{"docker", e.Path, true, "", 1}) {
		t.Errorf("runtimes %+v", r)
	}
	wantWords(t, n.must("status"), "docker  tells of 1 container\n", "/system.slice/docker-aaaaaaaaaaaa….scope (adopted, docker container chat-1)")
	outside := n.place(n.Mkdir("system.slice/other.service"))
	dials(t, outside, n.addr(1), 1, 0)
	if text := n.must("conns"); strings.Contains(text, "CONTAINER") {
		t.Errorf("no connection is a container's, and conns says\n%s", text)
	}
	dials(t, client, n.addr(1), 2, 0)
	wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))
	in := map[int]string{outside.PID: "", client.PID: "docker/chat-1"}
	for _, c := range n.conns() {
		if c.Container != in[c.PID] {
			t.Errorf("conns -o json has the connection of %d in %q, want %q", c.PID, c.Container, in[c.PID])
		}
	}
	wantWords(t, n.must("conns"), "RECEIVED  CONTAINER\n", "docker/chat-1\n", " -\n")
	if r := n.run("conns", "-o", "json"); strings.Count(r.stdout, `"container"`) != 2 {
		t.Errorf("conns -o json says\n%s", r.stdout)
	}
	outside.Kill()
	n.Mkdir("machine.slice/libpod-conmon-" + containerID("a") + ".scope") // a monitor has the id too
	for _, from := range []string{"chat-1", containerID("a"), containerID("a")[:12]} {
		wantWords(t, n.must("explain", "--from", from), "container "+from+" is cgroup "+chat, "compartment chat, because of "+chat)
	}
	wantResult(t, n.run("explain", "--from", "chat"), 1, "no container of that name or id")
	wantResult(t, n.run("explain", "--from", containerID("a")[:11]), 1, "no container of that name or id")

	// Nothing can be asked about one that is about to start: the event of its creation is all there is.
	release := e.Hang(containerID("b"))
	made := enginetest.Container{Name: "job", Image: "box", Labels: map[string]string{"tier": "free"}}
	e.Put("create", containerID("b"), made)
	kerneltest.Poll(t, "it is told of", func() error {
		if r := n.status().Agent.Runtimes; len(r) != 1 || r[0].Containers != 2 {
			return fmt.Errorf("%+v", r)
		}
		return nil
	})
	second, batch := n.scope("b")
	n.inFeature(batch, "batch")
	n.logged("adopted a cgroup", batch, `"container":{"runtime":"docker","name":"job","image":"box"}`, `"feature":"batch"`)
	late := n.place(second)
	dials(t, late, n.addr(1), 1, 0)
	n.wantCounts(map[string]counts{"feature batch": {2, 1, 1, 1, 0}, "feature default": {unlimited, 0, 1, 1, 0}})
	made.PID = late.PID
	e.Put("start", containerID("b"), made)
	release()

	// By another name it is in another compartment, and by one that nothing matches in none.
	named.Name = "talk"
	e.Put("rename", containerID("a"), named)
	n.inFeature(chat, "")
	n.logged("an adopted cgroup left its compartment: nothing matches it any more", chat, `"feature":"chat"`,
		`"container":{"runtime":"docker","name":"chat-1","image":"nginx:1.27","renamed":"talk"}`)
	wantDial(t, client, 0, n.addr(1))
	made.Name = "chat-2"
	e.Put("rename", containerID("b"), made)
	n.inFeature(batch, "chat")
	n.logged("an adopted cgroup left its compartment: another has it now", batch, `"feature":"batch"`, `"name":"job","image":"box","renamed":"chat-2"`)
	for _, l := range n.lines() {
		if strings.Contains(l.text, "an adopted cgroup is gone") {
			t.Errorf("every cgroup is there, and the log says %s", l.text)
		}
	}
	wantWords(t, n.must("explain", "--from", "chat-2"), "compartment chat")
	if c := n.status().containerOf(batch); c == nil || c.Name != "chat-2" {
		t.Errorf("renamed it is %+v", c)
	}

	// What the runtime has destroyed is nobody's, although its cgroup is still there; and a cgroup that is gone is not
	// kept for a container that will start again.
	e.Put("destroy", containerID("b"), made)
	n.inFeature(batch, "")
	named.Name = "chat-3"
	e.Put("rename", containerID("a"), named)
	n.inFeature(chat, "chat")
	client.Kill()
	named.PID = 0
	e.Put("die", containerID("a"), named)
	if err := os.Remove(running.Path); err != nil {
		t.Fatal(err)
	}
	n.inFeature(chat, "")
	n.logged("an adopted cgroup is gone", chat, `"name":"chat-3"`)
	// Started again it has another cgroup of the same name.
	running, _ = n.scope("a")
	n.inFeature(chat, "chat")
	wantDial(t, n.place(running), 0, n.addr(1))
	for _, c := range n.status().Conditions {
		if c.Type == "Placement" {
			t.Errorf("all is well, and yet %+v", c)
		}
	}
}

// A user may make a directory of any name in a cgroup that is theirs: it is no container's without its process.
func TestContainerForged(t *testing.T) {
	n, e := newDocker(t)
	const user = 12345
	forged, path := n.scope("c")
	if err := os.Chown(forged.Path, user, user); err != nil {
		t.Fatal(err)
	}
	one := enginetest.Container{Name: "chat-1", Image: "box"}
	e.Put("", containerID("c"), one)
	_, ours := n.scope("d")
	e.Put("", containerID("d"), enginetest.Container{Name: "chat-2", Image: "box"})
	n.start()
	if got := n.status().cgroups("chat"); !slices.Contains(got, ours) || slices.Contains(got, path) {
		t.Errorf("chat has %v, want %s and not %s", got, ours, path)
	}
	wantWords(t, n.must("explain", "--from", path), "compartment default")
	// The runtime says that its process is there: then it is the container's, whoever owns it.
	one.PID = n.place(forged).PID
	e.Put("start", containerID("c"), one)
	n.inFeature(path, "chat")
	// And a process elsewhere says that a cgroup of its name is not.
	e.Put("start", containerID("d"), enginetest.Container{Name: "chat-2", Image: "box", PID: n.place(n.Mkdir("system.slice/ssh.scope")).PID})
	n.inFeature(ours, "")
	if c := n.status().condition("Placement"); c == nil || c.Reason != "NoCgroupOfItsOwn" || !strings.Contains(c.Message, "chat-2") {
		t.Errorf("condition %+v", c)
	}
	wantWords(t, n.run("plan", n.policy).stdout, "NoCgroupOfItsOwn", "chat-2")
}

// A process that an item matches is not missed where it is if an earlier item has the container that it is in: not by
// the agent, once it knows of the container, nor by plan and after a reload.
func TestProcessInContainer(t *testing.T) {
	n, e := newDocker(t)
	n.write(strings.Replace(containing, `container: {label: "tier=free"}`, `exe: "**/*e2e.test", cgroup: "/system.slice/*"`, 1))
	running, chat := n.scope("a")
	client := n.place(running)
	missed := func() *condition {
		c := n.status().condition("Placement")
		if c != nil && (c.Reason != "NotLoose" || !strings.Contains(c.Message, chat)) {
			t.Fatalf("%+v", c)
		}
		return c
	}
	n.start()
	if missed() == nil {
		t.Error("nothing is told of a process in a container that nobody knows")
	}
	wantWords(t, n.run("plan", n.policy).stdout, "NotLoose", chat)
	e.Put("start", containerID("a"), enginetest.Container{Name: "chat-1", Image: "box", PID: client.PID})
	kerneltest.Poll(t, "it is in its place", func() error {
		if c := missed(); c != nil {
			return fmt.Errorf("%+v", c)
		}
		return nil
	})
	n.inFeature(chat, "chat")
	n.wantRun(0, nil, "plan", n.policy)
	if r := n.run("plan", n.policy); strings.Contains(r.stdout, "NotLoose") {
		t.Errorf("plan: %s", r)
	}
	n.must("reload")
	if c := missed(); c != nil {
		t.Errorf("after a reload %+v", c)
	}
}

// What a runtime has told holds while it does not answer, plan knows that too, and everybody is told.
func TestContainerRuntimeAway(t *testing.T) {
	n, e := newDocker(t)
	running, chat := n.scope("a")
	client := n.place(running)
	named := enginetest.Container{Name: "chat-1", Image: "nginx:1.27", PID: client.PID}
	e.Put("", containerID("a"), named)

	// Before anything is in force.
	r := n.run("plan", n.policy)
	wantResult(t, r, 2)
	wantWords(t, r.stdout, "+ adopt cgroup "+chat+" into chat (container of docker chat-1, 1 process)\n")
	type planned struct{ Path, Feature, Container string }
	plan := func(code int, file string, more ...string) (adopt, release []planned, conds []condition) {
		t.Helper()
		r := n.run(append(append([]string{"plan", "-o", "json"}, more...), file)...)
		wantResult(t, r, code)
		var doc struct {
			Adopt, Release []planned
			Conditions     []condition
		}
		if err := json.Unmarshal([]byte(r.stdout), &doc); err != nil {
			t.Fatalf("%v in %s", err, r.stdout)
		}
		for _, c := range doc.Conditions {
			if c.Reason == "RuntimeAway" {
				conds = append(conds, c)
			}
		}
		return doc.Adopt, doc.Release, conds
	}
	adopt, release, conds := plan(2, n.policy)
	if fmt.Sprint(adopt) != fmt.Sprintf("[{%s chat docker chat-1}]", chat) || len(release)+len(conds) > 0 {
		t.Errorf("plan adopts %v, releases %v, %+v", adopt, release, conds)
	}
	n.start()
	up := series("container_runtime_up", "runtime", "docker", "socket", e.Path)
	// runs waits until the agent knows whether the runtime answers.
	runs := func(want float64) {
		t.Helper()
		kerneltest.Poll(t, "status and metrics know whether it answers", func() error {
			var away *condition
			s := n.status()
			for i, c := range s.Conditions {
				if c.Reason == "RuntimeAway" {
					away = &s.Conditions[i]
				}
			}
			if got, there := n.scrape()[up]; !there || got != want || (away == nil) != (want == 1) {
				return fmt.Errorf("%s is %v, condition %+v", up, got, away)
			}
			if away != nil && (away.Type != "Placement" || away.Status != "False" || !strings.Contains(away.Message, "docker at "+e.Path+" does not answer")) {
				t.Fatalf("%+v", away)
			}
			return nil
		})
	}
	runs(1)
	dials(t, client, n.addr(1), 2, 0)
	n.wantRun(0, nil, "plan", n.policy)
	// What another policy does not match it lets go.
	other := filepath.Join(n.dir, "other.yaml")
	n.save(other, strings.Replace(containing, "chat-*", "talk-*", 1))
	if adopt, release, conds = plan(2, other); len(adopt)+len(conds) > 0 || len(release) != 1 || release[0].Path != chat {
		t.Errorf("plan of another policy adopts %v, releases %v, %+v", adopt, release, conds)
	}

	e.Stop()
	runs(0)
	n.inFeature(chat, "chat")
	wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))
	wantWords(t, n.must("status"), "docker  does not answer; 1 container known from before\n", "docker container chat-1", "RuntimeAway")
	wantWords(t, n.must("explain", "--from", "chat-1"), "compartment chat")
	// Also a reload leaves it where it is.
	n.must("reload")
	n.inFeature(chat, "chat")
	wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))
	adopt, release, conds = plan(0, n.policy)
	if len(adopt)+len(release) > 0 || len(conds) != 1 || !strings.Contains(conds[0].Message, "docker at "+e.Path+" does not answer") {
		t.Errorf("while it is away plan adopts %v, releases %v, %+v", adopt, release, conds)
	}
	// One that listens and says nothing.
	silent := filepath.Join(n.dir, "podman.sock")
	l, err := net.Listen("unix", silent)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, release, conds = plan(0, n.policy, "--container-runtime", "podman="+silent)
	if len(release) > 0 || len(conds) != 2 || !slices.ContainsFunc(conds, func(c condition) bool { return strings.Contains(c.Message, "podman at "+silent+" does not answer") }) {
		t.Errorf("plan releases %v, %+v", release, conds)
	}
	// A policy that names no containers lets it go, whoever answers.
	without := filepath.Join(n.dir, "without.yaml")
	n.save(without, strings.NewReplacer(`container: {name: "chat-*"}`, "cgroup: /x", `container: {label: "tier=free"}`, "cgroup: /y").Replace(containing))
	if adopt, release, _ = plan(2, without); len(adopt) > 0 || len(release) != 1 || release[0].Path != chat {
		t.Errorf("plan of a policy without containers adopts %v, releases %v", adopt, release)
	}

	// What happened meanwhile is known when it is back.
	second, batch := n.scope("b")
	n.place(second)
	e.Put("", containerID("b"), enginetest.Container{Name: "job", Image: "box", Labels: map[string]string{"tier": "free"}})
	e.Start()
	runs(1)
	n.inFeature(batch, "batch")
	if got := n.status().cgroups("chat"); !slices.Contains(got, chat) {
		t.Errorf("back again, chat has %v", got)
	}
	n.wantRun(0, nil, "plan", n.policy)
	// An agent does not keep what a runtime that answers has destroyed, and plan says so.
	e.Put("destroy", containerID("a"), named)
	n.inFeature(chat, "")
}

// Nobody is asked for a policy that names no containers, nor is one that named some when it is in force no more.
func TestContainersNotAsked(t *testing.T) {
	n, e := newDocker(t)
	running, chat := n.scope("a")
	client := n.place(running)
	e.Put("", containerID("a"), enginetest.Container{Name: "chat-1", Image: "nginx:1.27", PID: client.PID})
	n.write(shares)
	n.start()
	n.wantRun(0, nil, "plan", n.policy)
	n.must("status")
	if c := e.Connected(); c != 0 {
		t.Errorf("a policy without containers made %d connections", c)
	}
	none := func() {
		t.Helper()
		if r := n.status().Agent.Runtimes; len(r) != 0 {
			t.Errorf("status has runtimes %+v", r)
		}
		for name := range n.scrape() {
			if strings.HasPrefix(name, "bulkhead_container_runtime_up") {
				t.Errorf("a metric %s", name)
			}
		}
	}
	none()
	n.write(containing)
	n.must("reload")
	if got := n.status().cgroups("chat"); !slices.Contains(got, chat) {
		t.Errorf("after the reload chat has %v", got)
	}
	// A reload that is refused goes on asking as before, also one that the kernel refuses.
	n.write(wrong)
	n.wantRun(1, nil, "reload")
	n.exclusive(ebpf.AttachCGroupUDP6Sendmsg, func() {
		n.write(strings.Replace(shares, "ports: [8000]", "ports: [8000], protocol: udp", 1))
		n.wantRun(1, []string{"attach bh_sendmsg6"}, "reload")
	})
	e.Put("rename", containerID("a"), enginetest.Container{Name: "chat-2", Image: "nginx:1.27", PID: client.PID})
	kerneltest.Poll(t, "it has another name", func() error {
		if c := n.status().containerOf(chat); c == nil || c.Name != "chat-2" {
			return fmt.Errorf("%+v", c)
		}
		return nil
	})

	n.write(shares)
	n.must("reload")
	none()
	kerneltest.Poll(t, "nobody follows its events", func() error {
		if f := e.Followers(); f != 0 {
			return fmt.Errorf("%d do", f)
		}
		return nil
	})
	before := e.Connected()
	n.must("reload")
	if c := e.Connected(); c != before {
		t.Errorf("%d connections more for a policy without containers", c-before)
	}

	// Somebody may want nobody to be asked.
	other := filepath.Join(n.dir, "other.yaml") // what is in the agent's file is in force at any time
	n.save(other, containing)
	n.also = []string{"--container-runtime", "none"}
	r := n.run("plan", other)
	wantResult(t, r, 2)
	wantWords(t, r.stdout, "RuntimeAway", "no container runtime is asked (--container-runtime none)")
}

// A runtime that there is not is wrong use of every command, also of one that asks none.
func TestContainerRuntimeFlag(t *testing.T) {
	n := newNode(t)
	n.write(shares)
	for _, value := range []string{"foo", "docker", "docker=relative.sock", "lxc=/run/lxc.sock"} {
		n.also = []string{"--container-runtime", value}
		words := []string{"--container-runtime", fmt.Sprintf("%q", value), "docker, podman, containerd"}
		n.wantRun(2, words, "check", n.policy)
		n.wantRun(2, words, "agent", "--policy", n.policy)
		n.wantRun(1, words, "plan", n.policy) // 2 says that there are changes
	}
}

// Limits hold at once, and values when the runtime has written its own: until then there is no process. What the
// runtime wrote is what comes back, and it may write at any time: a container's cgroup is never idle.
func TestContainerValues(t *testing.T) {
	n, e := newDocker(t)
	n.needControllers()
	n.write(strings.NewReplacer("class: batch", "class: background, memory: {max: 1Gi}").Replace(containing))
	n.Mkdir("system.slice")
	for _, dir := range []string{"", "/system.slice"} {
		set(t, n.Cgroup.Path+dir, "cgroup.subtree_control", "+cpu +memory")
	}
	old, _ := n.scope("a")
	client := n.place(old)
	e.Put("", containerID("a"), enginetest.Container{Name: "chat-1", Image: "box", PID: client.PID})
	n.start()
	wantValues(t, old.Path, map[string]string{"cpu.weight": "10000"})

	made := enginetest.Container{Name: "job", Image: "box", Labels: map[string]string{"tier": "free"}}
	e.Put("create", containerID("b"), made)
	cgroup, path := n.scope("b")
	n.inFeature(path, "batch")
	wantValues(t, cgroup.Path, map[string]string{"cpu.weight": "100", "cpu.idle": "0", "memory.max": "max"})
	set(t, cgroup.Path, "cpu.weight", "39") // as a runtime does
	made.PID = n.place(cgroup).PID
	e.Put("start", containerID("b"), made)
	kerneltest.Poll(t, "it has the values of batch", func() error {
		for file, want := range map[string]string{"cpu.weight": "1", "memory.max": fmt.Sprint(1 << 30)} {
			if got, err := os.ReadFile(filepath.Join(cgroup.Path, file)); err != nil || strings.TrimSpace(string(got)) != want {
				return fmt.Errorf("%s is %s (%v)", file, got, err)
			}
		}
		return nil
	})
	wantValues(t, cgroup.Path, map[string]string{"cpu.idle": "0"})
	n.must("detach")
	wantValues(t, cgroup.Path, map[string]string{"cpu.weight": "39", "memory.max": "max"})
	wantValues(t, old.Path, map[string]string{"cpu.weight": "100"})
}

// A Podman without an event logger answers and tells of nothing: its containers are found all the same, and status and
// plan say that they are late.
func TestContainerNoEvents(t *testing.T) {
	n, e := newDocker(t)
	n.also = []string{"--container-runtime", "podman=" + e.Path}
	inner := e.Handler
	e.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/events") {
			http.Error(w, "no event logger", http.StatusInternalServerError)
			return
		}
		inner.ServeHTTP(w, r)
	})
	running, chat := n.scope("a")
	e.Put("", containerID("a"), enginetest.Container{Name: "chat-1", Image: "box", PID: n.place(running).PID})
	n.start()
	if got := n.status().cgroups("chat"); !slices.Contains(got, chat) {
		t.Errorf("at the start chat has %v", got)
	}
	second, batch := n.scope("b")
	e.Put("", containerID("b"), enginetest.Container{Name: "job", Image: "box", Labels: map[string]string{"tier": "free"}, PID: n.place(second).PID})
	n.inFeature(batch, "batch")
	s := n.status()
	if c := s.condition("Placement"); c == nil || c.Reason != "RuntimeNoEvents" || !strings.Contains(c.Message, "no event logger") {
		t.Errorf("conditions %+v", s.Conditions)
	}
	if r := s.Agent.Runtimes; len(r) != 1 || !r[0].Answers || r[0].Containers != 2 || !strings.Contains(r[0].Error, "it does not tell of changes") {
		t.Errorf("runtimes %+v", r)
	}
	wantWords(t, n.must("status"), "podman  tells of 2 containers; it does not tell of changes, so it is asked every 5s", "Placement: RuntimeNoEvents")
	wantWords(t, n.must("plan", n.policy), "RuntimeNoEvents")
	if got := n.scrape()[series("container_runtime_up", "runtime", "podman", "socket", e.Path)]; got != 1 {
		t.Errorf("by the metrics it is %v", got)
	}
}
