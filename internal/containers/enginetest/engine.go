// Package enginetest stands in for Docker in tests: its API on a socket, about containers that the test makes up. What the
// real ones do is tested with them, in test/systemd; this one can do it at bad moments.
package enginetest

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
)

// Engine answers on a socket as Docker does.
type Engine struct {
	Path string // of the socket
	// Handler is what Start serves; a test may put its own around it before somebody asks.
	Handler http.Handler

	t      testing.TB
	server *http.Server

	mu         sync.Mutex
	containers map[string]Container
	events     map[chan string]bool
	hang       map[string]chan struct{} // an inspection waits for these
	connected  int
}

// Container is what an Engine says of one. It runs if it has a PID.
type Container struct {
	Name, Image string
	Labels      map[string]string
	PID         int
}

// New starts one that has no containers.
func New(t testing.TB) *Engine {
	t.Helper()
	e := &Engine{t: t, Path: filepath.Join(t.TempDir(), "docker.sock"), containers: map[string]Container{}, events: map[chan string]bool{},
		hang: map[string]chan struct{}{}}
	mux := http.NewServeMux()
	mux.HandleFunc("/_ping", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Api-Version", "1.41")
		fmt.Fprint(w, "OK")
	})
	mux.HandleFunc("/v1.41/containers/json", e.list)
	mux.HandleFunc("/v1.41/containers/{id}/json", e.inspect)
	mux.HandleFunc("/v1.41/events", e.stream)
	e.Handler = mux
	e.Start()
	t.Cleanup(e.Stop)
	return e
}

// Start makes it answer again.
func (e *Engine) Start() {
	e.t.Helper()
	_ = os.Remove(e.Path)
	l, err := net.Listen("unix", e.Path)
	if err != nil {
		e.t.Fatal(err)
	}
	e.server = &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { e.Handler.ServeHTTP(w, r) }),
		ConnState: func(_ net.Conn, s http.ConnState) {
			e.mu.Lock()
			defer e.mu.Unlock()
			if s == http.StateNew {
				e.connected++
			}
		},
	}
	go e.server.Serve(l)
}

// Stop ends all connections and removes the socket. It keeps its containers.
func (e *Engine) Stop() { e.server.Close() }

// Connected is how many connections there were.
func (e *Engine) Connected() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.connected
}

func (e *Engine) list(w http.ResponseWriter, _ *http.Request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := []map[string]any{}
	for of, c := range e.containers {
		// As if each name were another image's by now.
		state, id := "exited", "sha256:of-"+c.Image
		if c.PID != 0 {
			state = "running"
		}
		out = append(out, map[string]any{"Id": of, "Names": []string{"/" + c.Name}, "Image": id, "ImageID": id, "Labels": c.Labels, "State": state})
	}
	json.NewEncoder(w).Encode(out)
}

func (e *Engine) inspect(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	e.mu.Lock()
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
	json.NewEncoder(w).Encode(map[string]any{"Id": id, "Name": "/" + c.Name, "State": map[string]any{"Pid": c.PID}, "Config": map[string]any{"Image": c.Image, "Labels": c.Labels}})
}

func (e *Engine) stream(w http.ResponseWriter, r *http.Request) {
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

// Put makes or changes a container, and removes it with "destroy"; event is what is told of it, ""
// for nothing.
func (e *Engine) Put(event, id string, c Container) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if event == "destroy" {
		delete(e.containers, id)
	} else {
		e.containers[id] = c
	}
	if event != "" {
		e.tell(event, id, c)
	}
}

// Remove removes a container and tells nobody.
func (e *Engine) Remove(id string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.containers, id)
}

func (e *Engine) tell(event, id string, c Container) {
	attributes := map[string]string{"name": c.Name, "image": c.Image}
	for k, v := range c.Labels {
		if k != "name" { // Docker's own attribute has the place
			attributes[k] = v
		}
	}
	line, _ := json.Marshal(map[string]any{"Type": "container", "Action": event, "Actor": map[string]any{"ID": id, "Attributes": attributes}})
	for events := range e.events {
		events <- string(line)
	}
}

// Followers is how many streams of events there are.
func (e *Engine) Followers() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.events)
}

// Hang has what is asked about a container wait until it is released.
func (e *Engine) Hang(id string) (release func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	free := make(chan struct{})
	e.hang[id] = free
	return func() { close(free) }
}

// Cut ends the streams of events, with a line that is none first.
func (e *Engine) Cut(garbage string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for events := range e.events {
		if garbage != "" {
			events <- garbage
		}
		events <- ""
	}
}
