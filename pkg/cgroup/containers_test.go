package cgroup

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"bulkhead/pkg/policy"
)

func contained(globs ...string) policy.Match {
	m := policy.Match{Container: map[string]string{}}
	for i := 0; i < len(globs); i += 2 {
		m.Container[globs[i]] = globs[i+1]
	}
	return m
}

func TestMatchContainer(t *testing.T) {
	c := &Container{Name: "shop-chat-1", Image: "nginx:1.27", Labels: map[string]string{"com.docker.compose.service": "chat", "source": "https://example.com/shop", "tier": ""}}
	pinned := &Container{Name: "p", Image: "ghcr.example/team/app@sha256:" + strings.Repeat("a", 64), Labels: map[string]string{"io.podman.compose.service": "chat"}}
	both := &Container{Image: "docker.io/library/nginx:1.27@sha256:" + strings.Repeat("a", 64)}
	byID := &Container{Name: "i", Image: "sha256:" + strings.Repeat("b", 64)}
	for _, tc := range []struct {
		c     *Container
		globs []string
		want  bool
	}{
		{c, []string{"name", "shop-*"}, true},
		{c, []string{"name", "shop"}, false},
		{c, []string{"image", "nginx:1.27"}, true},
		{c, []string{"image", "nginx"}, true}, // no tag is any
		{c, []string{"image", "docker.io/library/nginx"}, true},
		{c, []string{"image", "docker.io/library/nginx:1.*"}, true},
		{c, []string{"image", "docker.io/**"}, true},
		{c, []string{"image", "docker.io/*"}, false}, // * is one part of a path
		{c, []string{"image", "nginx:1.26"}, false},
		{c, []string{"image", "*:latest"}, false},
		{&Container{Image: "nginx"}, []string{"image", "nginx:latest"}, true},
		{pinned, []string{"image", "ghcr.example/team/*"}, true},
		{pinned, []string{"image", "ghcr.example/team/app@sha256:a*"}, true},
		{pinned, []string{"image", "ghcr.example/team/app:latest"}, false},
		{&Container{Image: "nginx@sha256:" + strings.Repeat("a", 64)}, []string{"image", "docker.io/library/nginx@sha256:a*"}, true},
		{&Container{Image: "docker.io/library/nginx@sha256:" + strings.Repeat("a", 64)}, []string{"image", "nginx@sha256:a*"}, true},
		{both, []string{"image", "nginx:1.27"}, true},
		{both, []string{"image", "nginx@sha256:a*"}, true},
		{both, []string{"image", "nginx:1.27@sha256:a*"}, true},
		{both, []string{"image", "nginx:latest"}, false},
		{byID, []string{"image", "sha256:b*"}, true},
		{byID, []string{"image", "**"}, true},
		{c, []string{"label", "tier=*"}, true},
		{c, []string{"label", "tier="}, true},
		{c, []string{"label", "source=*"}, true}, // slashes are nothing special in a value
		{c, []string{"label", "source=https://example.com/*"}, true},
		{c, []string{"label", "sourc=*"}, false},
		{c, []string{"compose_service", "chat"}, true},
		{pinned, []string{"compose_service", "ch*"}, true},
		{byID, []string{"compose_service", "*"}, false},
		{c, []string{"name", "shop-*", "compose_service", "chat", "label", "tier=*", "image", "nginx"}, true},
		{c, []string{"name", "shop-*", "compose_service", "batch"}, false},
	} {
		p := plan(policy.Enforce, nil, feature("chat", nil, nil, contained(tc.globs...)))
		if got := itemsOf(p)[0].matchesContainer(tc.c); got != tc.want {
			t.Errorf("%q matches %+v: %v", tc.globs, tc.c, got)
		}
	}
}

func TestContainerDirs(t *testing.T) {
	id := strings.Repeat("0123456789abcdef", 4)
	for name, want := range map[string]string{
		id: id, "docker-" + id + ".scope": id, "libpod-" + id + ".scope": id, "libpod-payload-" + id: id, "cri-containerd-" + id + ".scope": id, "crio-" + id: id,
		"libpod-conmon-" + id + ".scope": "", "crio-conmon-" + id + ".scope": "", // its monitor
		id + "-2f.service": "", id + ".service": "", "x" + id: "", id[1:]: "", id + "0": "", "docker-" + id + ".scope.d": "", "": "",
	} {
		if got := containerOf(name); got != want {
			t.Errorf("%q: %q", name, got)
		}
	}
	for spec, want := range map[string]string{
		"/default/web": "/default/web", "system.slice:docker:" + id: "/system.slice/docker-" + id + ".scope", ":pre:web": "/system.slice/pre-web.scope",
		"a-b.slice::web": "/a.slice/a-b.slice/web.scope", "user.slice:x:y.slice": "/user.slice/x-y.slice", "": "", "/": "", "relative": "", "a:b": "", "/x/..": "",
	} {
		if got, ok := (&Tree{}).specified(spec); got != want && ok || ok != (want != "") {
			t.Errorf("%q: %q %v", spec, got, ok)
		}
	}
	// What a runtime says is from the true root, a path here from the root of the tree.
	for spec, want := range map[string]string{"/mine/web": "/web", "/minework/web": "", "/other": "", "/mine": ""} {
		if got, ok := (&Tree{abs: "/mine"}).specified(spec); ok != (want != "") || ok && got != want {
			t.Errorf("%q below /mine: %q %v", spec, got, ok)
		}
	}
}

// The process says which cgroup is a container's; before there is one, the cgroup's name and its
// owner do.
func TestContainerFinder(t *testing.T) {
	tree := testTree(t)
	id := func(c string) string { return strings.Repeat(c, 64) }
	for _, dir := range []string{"/system.slice/docker-" + id("a") + ".scope/init.scope", "/system.slice/docker-" + id("b") + ".scope",
		"/user.slice/docker-" + id("c") + ".scope", "/machine.slice/libpod-conmon-" + id("d") + ".scope", "/system.slice/ssh.scope", "/default/web", "/default/web-2"} {
		mkdir(t, tree, dir)
	}
	inside := start(t, tree, "/system.slice/docker-"+id("a")+".scope/init.scope", "hold")
	bare := start(t, tree, "/system.slice/ssh.scope", "hold")
	other := start(t, tree, "/default/web-2", "hold")
	must(t, os.Chown(tree.path("/user.slice/docker-"+id("c")+".scope"), 1000, 1000))

	list := []Container{
		{Runtime: "docker", ID: id("a"), Name: "runs", PID: inside.Process.Pid},
		{Runtime: "docker", ID: id("b"), Name: "starts"},
		{Runtime: "docker", ID: id("c"), Name: "forged"},    // a user has made a directory of this name
		{Runtime: "podman", ID: id("d"), Name: "monitored"}, // only its monitor has one
		{Runtime: "podman", ID: id("e"), Name: "bare", PID: bare.Process.Pid},
		{Runtime: "containerd", ID: "default/web", Name: "web", Cgroup: tree.abs + "/default/web"},
		{Runtime: "containerd", ID: "default/moved", Name: "moved", PID: other.Process.Pid, Cgroup: tree.abs + "/default/web"},
		{Runtime: "docker", ID: id("f"), Name: "none"},
	}
	p := plan(policy.Enforce, []string{"free"}, feature("chat", nil, nil, contained("name", "runs")), feature("batch", nil, nil, contained("name", "*")))
	f := NewContainerFinder(tree)
	look := func() (names []string, conds []Condition) {
		t.Helper()
		all, err := tree.Walk()
		must(t, err)
		found, conds := f.Find(p, list, all)
		for _, a := range Adopt(p, all, found) {
			names = append(names, fmt.Sprintf("%s=%s by %s", a.Path, p.Compartments[a.Compartment].Feature, found[a.ID].Name))
		}
		return names, conds
	}
	want := []string{
		"/default/web=batch by web",
		"/system.slice/docker-" + id("a") + ".scope=chat by runs",
		"/system.slice/docker-" + id("b") + ".scope=batch by starts",
	}
	for range 2 { // the second time from what it remembers
		got, conds := look()
		if !slices.Equal(got, want) {
			t.Errorf("got  %q\nwant %q", got, want)
		}
		if len(conds) != 2 || conds[0].Reason != ReasonNoCgroup || !strings.Contains(conds[0].Message, "container bare of podman is in /system.slice/ssh.scope") ||
			!strings.Contains(conds[1].Message, "container moved of containerd is in /default/web-2") {
			t.Errorf("%+v", conds)
		}
	}

	// Once its process is known, another cgroup of its name is not taken for it.
	second := start(t, tree, "/system.slice/ssh.scope", "hold")
	list[1].PID = second.Process.Pid
	if got, _ := look(); !slices.Equal(got, want[:2]) {
		t.Errorf("got %q", got)
	}
	// Without a process it is one that will start again.
	must(t, second.Process.Kill())
	_, _ = second.Process.Wait()
	if got, _ := look(); !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	// What it remembers of another plan, or of another name, is no answer.
	p = plan(policy.Enforce, []string{"free"}, feature("chat", nil, nil, contained("name", "starts")), feature("batch", nil, nil, contained("image", "box"), contained("label", "tier=free")))
	if got, _ := look(); !slices.Equal(got, []string{"/system.slice/docker-" + id("b") + ".scope=chat by starts"}) {
		t.Errorf("by another plan: %q", got)
	}
	list[0].Image = "box"
	if got, _ := look(); len(got) != 2 || !strings.HasSuffix(got[0], ".scope=batch by runs") {
		t.Errorf("with another image: %q", got)
	}
	list[0].Image = "other"
	list[1].Name = "renamed"
	if got, _ := look(); len(got) > 0 {
		t.Errorf("with another name: %q", got)
	}
	list[1].Labels = map[string]string{"tier": "free"}
	if got, _ := look(); !slices.Equal(got, []string{"/system.slice/docker-" + id("b") + ".scope=batch by renamed"}) {
		t.Errorf("with a label: %q", got)
	}
	list[1].Labels = map[string]string{"tier": "pro"}
	if got, _ := look(); len(got) > 0 {
		t.Errorf("with another label: %q", got)
	}
	// A plan that names no containers has nobody asked.
	if found, conds := f.Find(plan(policy.Enforce, nil, feature("chat", nil, nil, policy.Match{Unit: "a.service"})), list, nil); found != nil || conds != nil {
		t.Errorf("%v %v", found, conds)
	}
}

// Of several cgroups of a container's name the deepest around its process is its own; before there is a process, one
// is taken for it, and that is the outermost.
func TestContainerNested(t *testing.T) {
	tree := testTree(t)
	id := strings.Repeat("ab", 32)
	outer := mkdir(t, tree, "/a/libpod-"+id+".scope")
	inner := mkdir(t, tree, outer.Path+"/"+id)
	mkdir(t, tree, "/b/"+id)
	p := plan(policy.Enforce, nil, feature("chat", nil, nil, contained("name", "chat")))
	all, err := tree.Walk()
	must(t, err)
	f := NewContainerFinder(tree)
	only := func(when string, pid int, want Cgroup) {
		t.Helper()
		found, conds := f.Find(p, []Container{{Runtime: "podman", ID: id, Name: "chat", PID: pid}}, all)
		if len(found) != 1 || found[want.ID] == nil || len(conds) > 0 {
			t.Errorf("%s: %v %v, want %s", when, found, conds, want.Path)
		}
	}
	only("without a process", 0, outer)
	only("with one in the inner", start(t, tree, inner.Path, "hold").Process.Pid, inner)
	outside := start(t, tree, outer.Path, "hold").Process.Pid
	only("with one in the outer", outside, outer)

	// Once it is known it stays known, also if it is a user's and its process has ended, until the cgroup is gone.
	must(t, os.Chown(tree.path(inner.Path), 1000, 1000))
	must(t, os.Chown(tree.path(outer.Path), 1000, 1000))
	must(t, os.Chown(tree.path("/b/"+id), 1000, 1000))
	all, err = tree.Walk()
	must(t, err)
	moved := start(t, tree, inner.Path, "hold")
	only("a user's", moved.Process.Pid, inner)
	must(t, moved.Process.Kill())
	_, _ = moved.Process.Wait()
	only("a user's whose process has ended", moved.Process.Pid, inner)
	all = slices.DeleteFunc(all, func(c Cgroup) bool { return c.ID == inner.ID })
	if found, conds := f.Find(p, []Container{{Runtime: "podman", ID: id, Name: "chat", PID: moved.Process.Pid}}, all); len(found) > 0 {
		t.Errorf("when it is gone: %v %v", found, conds)
	}
}

// What is beside container in an item has to hold too, and the item's tenant is the container's.
func TestContainerBeside(t *testing.T) {
	tree := testTree(t)
	id := strings.Repeat("ab", 32)
	at := mkdir(t, tree, "/docker-"+id+".scope").Path
	all, err := tree.Walk()
	must(t, err)
	for _, tc := range []struct {
		policy.Match
		want string
	}{
		{policy.Match{Unit: "docker-*.scope"}, at + "=chat/"},
		{policy.Match{Unit: "*.service"}, ""},
		{policy.Match{Cgroup: "/docker-*"}, at + "=chat/"},
		{policy.Match{Cgroup: "/other/*"}, ""},
		{policy.Match{Tenant: "free"}, at + "=chat/free"},
	} {
		tc.Container = map[string]string{"name": "web"}
		p := plan(policy.Enforce, []string{"free"}, feature("chat", nil, nil, tc.Match))
		found, conds := NewContainerFinder(tree).Find(p, []Container{{Runtime: "docker", ID: id, Name: "web"}}, all)
		noConditions(t, conds, nil)
		got := ""
		for _, a := range Adopt(p, all, found) {
			c := p.Compartments[a.Compartment]
			got += a.Path + "=" + c.Feature + "/" + c.Tenant
		}
		if got != tc.want {
			t.Errorf("%v: %q, want %q", tc.Match, got, tc.want)
		}
	}
}

func TestContainerdByName(t *testing.T) {
	tree := testTree(t)
	id := strings.Repeat("cd", 32)
	mkdir(t, tree, "/cri-containerd-"+id+".scope")
	child := start(t, tree, "/cri-containerd-"+id+".scope", "hold")
	p := plan(policy.Enforce, nil, feature("chat", nil, nil, contained("name", "chat")))
	all, err := tree.Walk()
	must(t, err)
	for _, pid := range []int{0, child.Process.Pid} {
		found, conds := NewContainerFinder(tree).Find(p, []Container{{Runtime: "containerd", ID: "k8s.io/" + id, Name: "chat", PID: pid}}, all)
		if len(found) != 1 {
			t.Errorf("pid %d: %v %v", pid, found, conds)
		}
	}
}

// The pid that a runtime told is another process's now.
func TestContainerPIDReused(t *testing.T) {
	tree := testTree(t)
	id := strings.Repeat("ef", 32)
	mkdir(t, tree, "/docker-"+id+".scope")
	mkdir(t, tree, "/other.service")
	start(t, tree, "/docker-"+id+".scope", "hold")
	other := start(t, tree, "/other.service", "hold")
	p := plan(policy.Enforce, nil, feature("chat", nil, nil, contained("name", "chat")))
	all, err := tree.Walk()
	must(t, err)
	found, conds := NewContainerFinder(tree).Find(p, []Container{{Runtime: "docker", ID: id, Name: "chat", PID: other.Process.Pid}}, all)
	if len(found) != 1 {
		t.Errorf("%v %v", found, conds)
	}
	// One of which is known that it is outside of the tree says that it is not here.
	found, conds = NewContainerFinder(tree).Find(p, []Container{{Runtime: "docker", ID: id, Name: "chat", PID: os.Getpid()}}, all)
	if len(found)+len(conds) > 0 {
		t.Errorf("with a process outside: %v %v", found, conds)
	}
	// A user's directory of its name is not taken for it even so.
	must(t, os.Chown(tree.path("/docker-"+id+".scope"), 1000, 1000))
	all, err = tree.Walk()
	must(t, err)
	found, conds = NewContainerFinder(tree).Find(p, []Container{{Runtime: "docker", ID: id, Name: "chat", PID: other.Process.Pid}}, all)
	if len(found) != 0 || len(conds) != 1 || conds[0].Reason != ReasonNoCgroup {
		t.Errorf("a user's: %v %v", found, conds)
	}
}
