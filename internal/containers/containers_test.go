package containers

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"bulkhead/internal/kerneltest"
	"bulkhead/pkg/cgroup"
)

// fakeEngine answers as Docker does. What the real ones do is tested with them, in test/systemd; here
// is what they do at bad moments only.
type fakeEngine struct {
	t      *testing.T
	path   string
	server *http.Server

	mu         sync.Mutex
	containers map[string]fake
	events     map[chan string]bool
	hang       map[string]chan struct{} // inspect waits for these
	asked      map[string]int
}

type fake struct {
	name, image string
	labels      map[string]string
	pid         int
}

func newEngine(t *testing.T) *fakeEngine {
	e := &fakeEngine{t: t, path: filepath.Join(t.TempDir(), "docker.sock"), containers: map[string]fake{}, events: map[chan string]bool{},
		hang: map[string]chan struct{}{}, asked: map[string]int{}}
	e.start()
	t.Cleanup(func() { e.server.Close() })
	return e
}

func (e *fakeEngine) start() {
	e.t.Helper()
	_ = os.Remove(e.path)
	l, err := net.Listen("unix", e.path)
	if err != nil {
		e.t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/_ping", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Api-Version", "1.41")
		fmt.Fprint(w, "OK")
	})
	mux.HandleFunc("/v1.41/containers/json", e.list)
	mux.HandleFunc("/v1.41/containers/{id}/json", e.inspect)
	mux.HandleFunc("/v1.41/events", e.stream)
	e.server = &http.Server{Handler: mux}
	go e.server.Serve(l)
}

func (e *fakeEngine) list(w http.ResponseWriter, _ *http.Request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := []map[string]any{}
	for id, c := range e.containers {
		state := "exited"
		if c.pid != 0 {
			state = "running"
		}
		out = append(out, map[string]any{"Id": id, "Names": []string{"/" + c.name}, "Image": "sha256:of-" + c.image, "Labels": c.labels, "State": state})
	}
	json.NewEncoder(w).Encode(out)
}

func (e *fakeEngine) inspect(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	e.mu.Lock()
	e.asked[id]++
	hang := e.hang[id]
	e.mu.Unlock()
	if hang != nil {
		select {
		case <-hang:
		case <-r.Context().Done():
			return
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	c, ok := e.containers[id]
	if !ok {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprint(w, `{"message": "no such container"}`)
		return
	}
	json.NewEncoder(w).Encode(map[string]any{"Id": id, "Name": "/" + c.name, "State": map[string]any{"Pid": c.pid}, "Config": map[string]any{"Image": c.image, "Labels": c.labels}})
}

func (e *fakeEngine) stream(w http.ResponseWriter, r *http.Request) {
	events := make(chan string, 100)
	e.mu.Lock()
	e.events[events] = true
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		delete(e.events, events)
		e.mu.Unlock()
	}()
	w.(http.Flusher).Flush()
	for {
		select {
		case line := <-events:
			if line == "" {
				return
			}
			fmt.Fprintln(w, line)
			w.(http.Flusher).Flush()
		case <-r.Context().Done():
			return
		}
	}
}

// put makes or changes a container; tell is the event of it, "" for none.
func (e *fakeEngine) put(tell, id string, c fake) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if tell == "destroy" {
		delete(e.containers, id)
	} else {
		e.containers[id] = c
	}
	attributes := map[string]string{"name": c.name, "image": c.image}
	for k, v := range c.labels {
		if k != "name" {
			attributes[k] = v
		}
	}
	line, _ := json.Marshal(map[string]any{"Type": "container", "Action": tell, "Actor": map[string]any{"ID": id, "Attributes": attributes}})
	for events := range e.events {
		if tell != "" {
			events <- string(line)
		}
	}
}

// cut ends the streams of events, with a line that is none first.
func (e *fakeEngine) cut(garbage string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for events := range e.events {
		if garbage != "" {
			events <- garbage
		}
		events <- ""
	}
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

// become waits for what a watcher announces.
func become(t *testing.T, w *Watcher, want string) {
	t.Helper()
	kerneltest.Poll(t, "the containers are\n"+want, func() error {
		if got := texts(w.Containers()); got != want {
			return fmt.Errorf("they are\n%s", got)
		}
		return nil
	})
}

func TestEngine(t *testing.T) {
	e := newEngine(t)
	e.put("", "a", fake{"chat", "nginx", map[string]string{"tier": "free"}, 11})
	e.put("", "b", fake{"done", "nginx", nil, 0})
	w := watch(t, Socket{Docker, e.path, true})
	// When it is settled the processes are known, and the names of images that run.
	if got, want := texts(w.Containers()), "docker a chat nginx 11 map[tier:free]\ndocker b done sha256:of-nginx 0 map[]"; got != want {
		t.Fatalf("got\n%s\nwant\n%s", got, want)
	}
	e.put("destroy", "b", fake{})
	become(t, w, "docker a chat nginx 11 map[tier:free]")

	// One that is made is known before anything can be asked of it; what its event cannot say
	// comes when it can, and others do not wait.
	free := make(chan struct{})
	e.mu.Lock()
	e.hang["c"] = free
	e.mu.Unlock()
	e.put("create", "c", fake{"new", "box", map[string]string{"tier": "pro", "name": "x"}, 0})
	become(t, w, "docker a chat nginx 11 map[tier:free]\ndocker c new box 0 map[tier:pro]")
	e.put("rename", "a", fake{"talk", "nginx", map[string]string{"tier": "free"}, 11})
	become(t, w, "docker a talk nginx 11 map[tier:free]\ndocker c new box 0 map[tier:pro]")
	e.put("start", "c", fake{"new", "box", map[string]string{"tier": "pro", "name": "x"}, 12})
	close(free)
	become(t, w, "docker a talk nginx 11 map[tier:free]\ndocker c new box 12 map[name:x tier:pro]")
	e.put("exec_start: ls", "a", fake{"talk", "nginx", map[string]string{"tier": "free"}, 99}) // nothing that we ask about
	e.put("die", "c", fake{"new", "box", map[string]string{"tier": "pro", "name": "x"}, 0})
	become(t, w, "docker a talk nginx 11 map[tier:free]\ndocker c new box 0 map[name:x tier:pro]")
	e.put("start", "a", fake{"talk", "nginx", map[string]string{"tier": "free"}, 11})
	become(t, w, "docker a talk nginx 11 map[tier:free]\ndocker c new box 0 map[name:x tier:pro]")
}

// What a runtime has told holds while it is away, and what happened meanwhile is known when it is back.
func TestAway(t *testing.T) {
	e := newEngine(t)
	e.put("", "a", fake{"chat", "nginx", nil, 11})
	e.put("", "b", fake{"batch", "nginx", nil, 12})
	w := watch(t, Socket{Docker, e.path, true})
	e.server.Close()
	kerneltest.Poll(t, "it does not answer", func() error {
		if r := w.Runtimes(); len(r) != 1 || r[0].Answers || r[0].Error == "" || r[0].Containers != 2 {
			return fmt.Errorf("%+v", r)
		}
		return nil
	})
	if got := texts(w.Containers()); got != "docker a chat nginx 11 map[]\ndocker b batch nginx 12 map[]" {
		t.Errorf("away:\n%s", got)
	}
	e.put("destroy", "b", fake{})
	e.start()
	become(t, w, "docker a chat nginx 11 map[]")
	kerneltest.Poll(t, "it answers", func() error {
		if r := w.Runtimes(); len(r) != 1 || !r[0].Answers || r[0].Error != "" {
			return fmt.Errorf("%+v", r)
		}
		return nil
	})

	// A stream that ends in the middle of an event is begun again, with a list.
	e.put("", "c", fake{"late", "nginx", nil, 13})
	e.cut(`{"Type": "container", "Action": "crea`)
	become(t, w, "docker a chat nginx 11 map[]\ndocker c late nginx 13 map[]")
}

// A default socket is asked only if its daemon runs: systemd may listen there for one that
// somebody has stopped, and would start it.
func TestNotStarted(t *testing.T) {
	e := newEngine(t)
	e.put("", "a", fake{"chat", "nginx", nil, 11})
	w := watch(t, Socket{Docker, e.path, false}, Socket{Podman, filepath.Join(t.TempDir(), "none.sock"), false})
	if r := w.Runtimes(); len(r) != 0 || len(w.Containers()) != 0 {
		t.Errorf("%+v", r)
	}
	e.mu.Lock()
	n := len(e.events)
	e.mu.Unlock()
	if n != 0 {
		t.Error("a socket without a daemon was asked")
	}
	if err := os.WriteFile(strings.TrimSuffix(e.path, ".sock")+".pid", nil, 0o644); err != nil {
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
	e := newEngine(t)
	e.put("", "a", fake{"chat", "nginx", nil, 11})
	w := Watch([]Socket{{Docker, e.path, true}, {Podman, path, true}, {Containerd, path, true}}, slog.New(slog.DiscardHandler))
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
