package containers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"bulkhead/internal/containers/enginetest"
	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/cgroup"
)

// fake is a container.
func fake(name, image string, labels map[string]string, pid int) enginetest.Container {
	return enginetest.Container{Name: name, Image: image, Labels: labels, PID: pid}
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
	e := enginetest.New(t)
	e.Put("", "a", fake("chat", "nginx", map[string]string{"tier": "free"}, 11))
	e.Put("", "b", fake("done", "nginx", nil, 0))
	w := watch(t, Socket{Docker, e.Path, true})
	// When it is settled the processes are known, and the names of images.
	if got, want := texts(w.Containers()), "docker a chat nginx 11 map[tier:free]\ndocker b done nginx 0 map[]"; got != want {
		t.Fatalf("got\n%s\nwant\n%s", got, want)
	}
	e.Put("destroy", "b", enginetest.Container{})
	become(t, w, "docker a chat nginx 11 map[tier:free]")

	// One that is made is known before anything can be asked of it; what its event cannot say
	// comes when it can, and others do not wait.
	release := e.Hang("c")
	e.Put("create", "c", fake("new", "box", map[string]string{"tier": "pro", "name": "x"}, 0))
	become(t, w, "docker a chat nginx 11 map[tier:free]\ndocker c new box 0 map[tier:pro]")
	// A new name is known at once, and takes nothing from what was known.
	asked := e.Hang("a")
	e.Put("rename", "a", fake("talk", "nginx", map[string]string{"tier": "free"}, 11))
	become(t, w, "docker a talk nginx 11 map[tier:free]\ndocker c new box 0 map[tier:pro]")
	asked()
	e.Put("start", "c", fake("new", "box", map[string]string{"tier": "pro", "name": "x"}, 12))
	release()
	become(t, w, "docker a talk nginx 11 map[tier:free]\ndocker c new box 12 map[name:x tier:pro]")
	e.Put("die", "c", fake("new", "box", map[string]string{"tier": "pro", "name": "x"}, 0))
	become(t, w, "docker a talk nginx 11 map[tier:free]\ndocker c new box 0 map[name:x tier:pro]")
}

// follow has what a runtime tells of changes sent as text, in order.
func follow(t *testing.T, s Socket) <-chan string {
	t.Helper()
	r, err := open(s)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	told, ended := make(chan string, 100), make(chan struct{})
	ctx, stop := context.WithCancel(t.Context())
	t.Cleanup(func() {
		stop()
		<-ended
		r.close()
	})
	go func() {
		defer close(ended)
		_ = r.follow(ctx, time.Unix(1234567, 89), func() {}, func(c change) {
			text := c.id
			if c.made != nil {
				text += fmt.Sprintf(" is %s of %s %v", c.made.Name, c.made.Image, c.made.Labels)
			}
			if c.pid != nil {
				text += fmt.Sprintf(" has process %d", *c.pid)
			}
			if c.removed {
				text += " is gone"
			}
			told <- text
		})
	}()
	return told
}

// wantTold compares what was told, of which the last is the last.
func wantTold(t *testing.T, told <-chan string, want ...string) {
	t.Helper()
	for _, want := range want {
		select {
		case got := <-told:
			if got != want {
				t.Errorf("told %q, want %q", got, want)
			}
		case <-time.After(30 * time.Second):
			t.Fatalf("%q is not told", want)
		}
	}
}

// What is known at once from each event of Docker's and of Podman's.
func TestEngineEvents(t *testing.T) {
	e := enginetest.New(t)
	since, inner := make(chan string, 1), e.Handler
	e.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if s := r.FormValue("since"); s != "" {
			since <- s
		}
		inner.ServeHTTP(w, r)
	})
	told := follow(t, Socket{Podman, e.Path, true})
	kerneltest.Poll(t, "it follows", func() error {
		if e.Followers() != 1 {
			return errors.New("nobody does")
		}
		return nil
	})
	// Nothing is missed between a question and its answer.
	if got := <-since; got != "1234567" {
		t.Errorf("events since %s", got)
	}
	var want []string
	for _, action := range []string{"create", "init", "start", "restart", "rename", "update", "exec_start: ls", "health_status", "exec_died",
		"stop", "die", "died", "cleanup", "remove", "destroy"} {
		e.Put(action, action, fake("web", "box", map[string]string{"tier": "free", "name": "x", "oldName": "y"}, 11))
		switch action {
		case "exec_start: ls", "health_status", "exec_died":
		case "stop", "die", "died", "cleanup":
			want = append(want, action+" has process 0")
		case "remove", "destroy":
			want = append(want, action+" is gone")
		default:
			want = append(want, action+" is web of box map[tier:free]")
		}
	}
	wantTold(t, told, want...)
}

// What a runtime has told holds while it is away, and what happened meanwhile is known when it is back.
func TestAway(t *testing.T) {
	e := enginetest.New(t)
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
	e.Put("destroy", "b", enginetest.Container{})
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
	e := enginetest.New(t)
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
	e := enginetest.New(t)
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
