package containers

import (
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/cgroup"
)

// fake is a container.
func fake(name, image string, labels map[string]string, pid int) kerneltest.Container {
	return kerneltest.Container{Name: name, Image: image, Labels: labels, PID: pid}
}

func watch(t *testing.T, sockets ...Socket) *Watcher {
	t.Helper()
	w := Watch(sockets, slog.New(slog.DiscardHandler))
	t.Cleanup(w.Close)
	w.Settled(t.Context())
	return w
}

// texts are containers in short.
func texts(list []cgroup.Container) string {
	var out []string
	for _, c := range list {
		out = append(out, fmt.Sprintf("%s %s %s %s %d %v", c.Runtime, c.ID, c.Name, c.Image, c.PID, c.Labels))
	}
	return strings.Join(out, "\n")
}

// become waits until a watcher has announced what the containers are: who follows it looks only then.
func become(t *testing.T, w *Watcher, want string) {
	t.Helper()
	announced(t, w, func() error {
		if got := texts(w.Containers()); got != want {
			return fmt.Errorf("the containers are\n%s\nwant\n%s", got, want)
		}
		return nil
	})
}

// announced looks now and whenever there is something new, until it is right.
func announced(t *testing.T, w *Watcher, right func() error) {
	t.Helper()
	late := time.After(30 * time.Second)
	for err := right(); err != nil; err = right() {
		select {
		case <-w.Wake():
		case <-late:
			t.Fatal(err)
		}
	}
}

func TestEngine(t *testing.T) {
	e := kerneltest.NewEngine(t)
	e.Put("", "a", fake("chat", "nginx", map[string]string{"tier": "free"}, 11))
	e.Put("", "b", fake("done", "nginx", nil, 0))
	w := watch(t, Socket{Docker, e.Path, true})
	// When it is settled the processes are known, and the names of images.
	if got, want := texts(w.Containers()), "docker a chat nginx 11 map[tier:free]\ndocker b done nginx 0 map[]"; got != want {
		t.Fatalf("got\n%s\nwant\n%s", got, want)
	}
	e.Put("destroy", "b", kerneltest.Container{})
	become(t, w, "docker a chat nginx 11 map[tier:free]")

	// One that is made is known before anything can be asked of it; what its event cannot say
	// comes when it can, and others do not wait.
	release := e.Hang("c")
	e.Put("create", "c", fake("new", "box", map[string]string{"tier": "pro", "name": "x"}, 0))
	become(t, w, "docker a chat nginx 11 map[tier:free]\ndocker c new box 0 map[tier:pro]")
	e.Put("rename", "a", fake("talk", "nginx", map[string]string{"tier": "free"}, 11))
	become(t, w, "docker a talk nginx 11 map[tier:free]\ndocker c new box 0 map[tier:pro]")
	e.Put("start", "c", fake("new", "box", map[string]string{"tier": "pro", "name": "x"}, 12))
	release()
	become(t, w, "docker a talk nginx 11 map[tier:free]\ndocker c new box 12 map[name:x tier:pro]")
	e.Put("exec_start: ls", "a", fake("talk", "nginx", map[string]string{"tier": "free"}, 99)) // nothing that we ask about
	e.Put("die", "c", fake("new", "box", map[string]string{"tier": "pro", "name": "x"}, 0))
	become(t, w, "docker a talk nginx 11 map[tier:free]\ndocker c new box 0 map[name:x tier:pro]")
	e.Put("start", "a", fake("talk", "nginx", map[string]string{"tier": "free"}, 11))
	become(t, w, "docker a talk nginx 11 map[tier:free]\ndocker c new box 0 map[name:x tier:pro]")
}

// What a runtime has told holds while it is away, and what happened meanwhile is known when it is back.
func TestAway(t *testing.T) {
	e := kerneltest.NewEngine(t)
	e.Put("", "a", fake("chat", "nginx", nil, 11))
	e.Put("", "b", fake("batch", "nginx", nil, 12))
	w := watch(t, Socket{Docker, e.Path, true})
	e.Stop()
	announced(t, w, func() error {
		if r := w.Runtimes(); len(r) != 1 || r[0].Answers || r[0].Error == "" || r[0].Containers != 2 {
			return fmt.Errorf("%+v", r)
		}
		return nil
	})
	if got := texts(w.Containers()); got != "docker a chat nginx 11 map[]\ndocker b batch nginx 12 map[]" {
		t.Errorf("away:\n%s", got)
	}
	e.Put("destroy", "b", kerneltest.Container{})
	e.Start()
	become(t, w, "docker a chat nginx 11 map[]")
	announced(t, w, func() error {
		if r := w.Runtimes(); len(r) != 1 || !r[0].Answers || r[0].Error != "" {
			return fmt.Errorf("%+v", r)
		}
		return nil
	})

	// A stream that ends in the middle of an event is begun again, with a list.
	e.Put("", "c", fake("late", "nginx", nil, 13))
	e.Cut(`{"Type": "container", "Action": "crea`)
	become(t, w, "docker a chat nginx 11 map[]\ndocker c late nginx 13 map[]")
}

// A default socket is asked only if its daemon runs: systemd may listen there for one that
// somebody has stopped, and would start it.
func TestNotStarted(t *testing.T) {
	e := kerneltest.NewEngine(t)
	e.Put("", "a", fake("chat", "nginx", nil, 11))
	w := watch(t, Socket{Docker, e.Path, false}, Socket{Podman, filepath.Join(t.TempDir(), "none.sock"), false})
	if r := w.Runtimes(); len(r) != 0 || len(w.Containers()) != 0 {
		t.Errorf("%+v", r)
	}
	if e.Connected() != 0 {
		t.Error("a socket without a daemon was asked")
	}
	if err := os.WriteFile(strings.TrimSuffix(e.Path, ".sock")+".pid", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	become(t, w, "docker a chat nginx 11 map[]")

	// One that somebody has named is missed.
	named := watch(t, Socket{Podman, filepath.Join(t.TempDir(), "none.sock"), true})
	if r := named.Runtimes(); len(r) != 1 || r[0].Answers || r[0].Error == "" {
		t.Errorf("%+v", r)
	}
}

// Who listens and does not answer holds nobody up for longer than they want to wait.
func TestSilent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "silent.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	e := kerneltest.NewEngine(t)
	e.Put("", "a", fake("chat", "nginx", nil, 11))
	w := Watch([]Socket{{Docker, e.Path, true}, {Podman, path, true}, {Containerd, path, true}}, slog.New(slog.DiscardHandler))
	become(t, w, "docker a chat nginx 11 map[]")
	w.Close() // and it ends
}

func TestParseSockets(t *testing.T) {
	if s, err := ParseSockets(nil); err != nil || len(s) != 3 || s[0].Named {
		t.Errorf("%+v %v", s, err)
	}
	if s, err := ParseSockets([]string{"none"}); err != nil || len(s) != 0 {
		t.Errorf("%+v %v", s, err)
	}
	s, err := ParseSockets([]string{"podman=/run/user/1000/podman/podman.sock", "docker=/a=b"})
	if err != nil || len(s) != 2 || s[0] != (Socket{Podman, "/run/user/1000/podman/podman.sock", true}) || s[1].Path != "/a=b" {
		t.Errorf("%+v %v", s, err)
	}
	for _, bad := range []string{"", "docker", "docker=", "docker=run.sock", "lxc=/run/x", "/run/docker.sock", "none "} {
		if _, err := ParseSockets([]string{bad}); err == nil || !strings.Contains(err.Error(), "docker, podman, containerd") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
