package containers

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	"github.com/containerd/containerd/api/types"
	"google.golang.org/protobuf/types/known/anypb"

	"bulkhead/internal/containers/enginetest"
)

// One that listens and never answers is told, and nobody waits for it for long.
func TestHung(t *testing.T) {
	path := filepath.Join(t.TempDir(), "docker.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	w := Watch([]Socket{{Docker, path, true}, {Containerd, path, true}}, slog.New(slog.DiscardHandler))
	defer w.Close()
	if r := w.Runtimes(); len(r) != 2 {
		t.Errorf("%+v", r)
	}
	w.Settled(t.Context())
	for _, r := range w.Runtimes() {
		if r.Error == "" {
			t.Errorf("%+v", r)
		}
	}
}

// 1,000 containers of containerd with a usual specification (10 KB).
func TestManyOfContainerd(t *testing.T) {
	many := map[string]*containersapi.Container{}
	for i := range 1000 {
		id := fmt.Sprintf("c%04d", i)
		many[id] = &containersapi.Container{ID: id, Image: "box", Spec: &anypb.Any{Value: []byte(`{"x":"` + strings.Repeat("x", 10<<10) + `","linux":{"cgroupsPath":"/default/` + id + `"}}`)}}
	}
	f := &fakeContainerd{pids: map[string]uint32{}, events: make(chan *types.Envelope, 10), containers: map[string]map[string]*containersapi.Container{"default": many}}
	w := watch(t, serveContainerd(t, f))
	if n := len(w.Containers()); n != 1000 {
		t.Errorf("%d containers, %+v", n, w.Runtimes())
	}
}

// A container that was restarted while nobody listened has another process when the runtime is back, and so has one
// whose event was lost, once its process has ended.
func TestRestartedMeanwhile(t *testing.T) {
	e := enginetest.New(t)
	there, nobody := os.Getpid(), 1<<30
	e.Put("", "a", fake("chat", "nginx", nil, there))
	e.Put("", "b", fake("batch", "nginx", nil, nobody))
	w := watch(t, Socket{Docker, e.Path, true})
	become(t, w, fmt.Sprintf("docker a chat nginx %d map[]\ndocker b batch nginx %d map[]", there, nobody))
	e.Put("", "b", fake("batch", "nginx", nil, 66))
	become(t, w, fmt.Sprintf("docker a chat nginx %d map[]\ndocker b batch nginx 66 map[]", there))
	e.Stop()
	e.Put("", "a", fake("chat", "nginx", nil, 77)) // dockerd restarts it (restart: always) before it answers
	e.Start()
	become(t, w, "docker a chat nginx 77 map[]\ndocker b batch nginx 66 map[]")
}

// A container made while a list is on its way.
func TestListOfBefore(t *testing.T) {
	e := enginetest.New(t)
	e.Put("", "a", fake("chat", "nginx", nil, 11))
	e.Put("", "g", fake("stays", "nginx", nil, os.Getpid()))
	stays := fmt.Sprintf("\ndocker g stays nginx %d map[]", os.Getpid())
	hold, held, asked := make(chan struct{}), make(chan struct{}, 10), make(chan struct{}, 10)
	inner := e.Handler
	n := 0
	e.Handler = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1.41/containers/json" {
			n++
			if n == 2 { // the answer is made, then it takes its way
				e.Put("", "c", fake("listed", "box", nil, 0)) // of which only it tells
				answer := httptest.NewRecorder()
				inner.ServeHTTP(answer, r)
				held <- struct{}{}
				<-hold
				rw.Write(answer.Body.Bytes())
				return
			}
		}
		if r.URL.Path == "/v1.41/containers/d/json" {
			asked <- struct{}{}
		}
		inner.ServeHTTP(rw, r)
	})
	w := watch(t, Socket{Docker, e.Path, true})
	select {
	case <-held: // the second list, after a second
	case <-time.After(30 * time.Second):
		t.Fatal("no second list: containerd does not say when it begins to tell of events")
	}
	e.Put("create", "b", fake("new", "box", nil, 0))
	become(t, w, "docker a chat nginx 11 map[]\ndocker b new box 0 map[]"+stays)
	e.Put("destroy", "a", enginetest.Container{})
	become(t, w, "docker b new box 0 map[]"+stays)
	e.Hang("a") // nothing but the event says that it is gone
	e.Hang("g") // what is known is not forgotten for an answer that may come
	close(hold)
	// The list adds what it alone tells, and is no news of what was told since.
	announced(t, w, func() error {
		if got := texts(w.Containers()); !strings.Contains(got, "docker c listed box") {
			return errors.New(got)
		}
		return nil
	})
	if got := texts(w.Containers()); got != "docker b new box 0 map[]\ndocker c listed box 0 map[]"+stays {
		t.Error(got)
	}
	// An answer is news also if there was an event meanwhile that is about another. The next list is a minute away.
	release := e.Hang("d")
	e.Put("create", "d", fake("late", "box", map[string]string{"name": "x"}, 0))
	<-asked
	e.Put("rename", "b", fake("newer", "box", nil, 0))
	become(t, w, "docker b newer box 0 map[]\ndocker c listed box 0 map[]\ndocker d late box 0 map[]"+stays)
	release()
	become(t, w, "docker b newer box 0 map[]\ndocker c listed box 0 map[]\ndocker d late box 0 map[name:x]"+stays)
	// Who is asked about one that is not there says so, whatever became of the event.
	release = e.Hang("f")
	e.Put("create", "f", fake("lost", "box", nil, 0))
	become(t, w, "docker b newer box 0 map[]\ndocker c listed box 0 map[]\ndocker d late box 0 map[name:x]\ndocker f lost box 0 map[]"+stays)
	e.Remove("f")
	release()
	become(t, w, "docker b newer box 0 map[]\ndocker c listed box 0 map[]\ndocker d late box 0 map[name:x]"+stays)
}

// A container that is destroyed while an answer about it is on its way stays destroyed.
func TestAnswerOfBefore(t *testing.T) {
	e := enginetest.New(t)
	hold, asked := make(chan struct{}), make(chan struct{}, 10)
	inner := e.Handler
	e.Handler = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/v1.41/containers/a/json" {
			inner.ServeHTTP(rw, r)
			return
		}
		answer := httptest.NewRecorder()
		inner.ServeHTTP(answer, r)
		asked <- struct{}{}
		select {
		case <-hold:
		case <-r.Context().Done():
		}
		rw.WriteHeader(answer.Code)
		rw.Write(answer.Body.Bytes())
	})
	w := watch(t, Socket{Docker, e.Path, true})
	e.Put("create", "a", fake("web", "box", nil, 0))
	<-asked
	e.Put("rename", "a", fake("shop", "box", nil, 0)) // so that it is asked about again after that
	become(t, w, "docker a shop box 0 map[]")
	e.Put("destroy", "a", enginetest.Container{})
	become(t, w, "")
	hold <- struct{}{}
	<-asked
	if got := texts(w.Containers()); got != "" {
		t.Error(got)
	}
	close(hold)
}

// A socket that nobody listens on any more, which systemd leaves (RemoveOnStop=no is its default): podman was never asked for by name.
func TestNobodyBehind(t *testing.T) {
	path := filepath.Join(t.TempDir(), "podman.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()
	w := watch(t, Socket{Podman, path, false})
	if r := w.Runtimes(); len(r) != 0 {
		t.Errorf("%+v", r)
	}
}

// The first list of many containers: list reads the map that one() writes, without the lock.
func TestMany(t *testing.T) {
	e := enginetest.New(t)
	for i := range 400 {
		e.Put("", fmt.Sprint("c", i), fake(fmt.Sprint("c", i), "box", nil, 100+i))
	}
	for range 3 {
		w := Watch([]Socket{{Docker, e.Path, true}}, slog.New(slog.DiscardHandler))
		w.Settled(t.Context())
		if n := len(w.Containers()); n != 400 {
			t.Errorf("%d", n)
		}
		w.Close()
	}
}

// Podman with events_logger = "none" answers, and refuses to tell of events: what it starts is known by the next list.
func TestNoEvents(t *testing.T) {
	e := enginetest.New(t)
	e.Put("", "a", fake("chat", "nginx", nil, 11))
	var refuse atomic.Bool
	refuse.Store(true)
	inner := e.Handler
	e.Handler = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1.41/events" && refuse.Load() {
			rw.Header().Set("Content-Type", "application/json")
			rw.WriteHeader(http.StatusInternalServerError)
			fmt.Fprint(rw, `{"cause": "none", "message": "cannot read events with the \"none\" backend", "response": 500}`)
			return
		}
		inner.ServeHTTP(rw, r)
	})
	w := watch(t, Socket{Podman, e.Path, true})
	says := func(answers bool, words string) {
		t.Helper()
		announced(t, w, func() error {
			if r := w.Runtimes(); len(r) != 1 || r[0].Answers != answers || (r[0].Error == "") != (words == "") || !strings.Contains(r[0].Error, words) {
				return fmt.Errorf("%+v, want %v %q", r, answers, words)
			}
			return nil
		})
	}
	become(t, w, "podman a chat nginx 11 map[]")
	says(true, `it does not tell of changes, so it is asked every 5s: Error response from daemon: cannot read events with the "none" backend`)

	// A restart, a rename and a new one, of which it says what it is before it has started.
	e.Hang("b")
	e.Put("", "a", fake("talk", "nginx", nil, 12))
	e.Put("", "b", fake("new", "box", map[string]string{"tier": "free"}, 13))
	begin := time.Now()
	become(t, w, "podman a talk nginx 12 map[]\npodman b new sha256:of-box 0 map[tier:free]")
	if took := time.Since(begin); took > 10*time.Second {
		t.Errorf("known after %v", took)
	}
	// It is away like any other, and back.
	e.Stop()
	says(false, "not running")
	e.Start()
	says(true, "none")

	// Once it tells of events it is believed, and a list is not waited for.
	refuse.Store(false)
	says(true, "")
	e.Put("create", "c", fake("told", "box", nil, 0))
	begin = time.Now()
	announced(t, w, func() error {
		if got := texts(w.Containers()); !strings.Contains(got, "podman c told box") {
			return errors.New(got)
		}
		return nil
	})
	if took := time.Since(begin); took > 3*time.Second {
		t.Errorf("told after %v", took)
	}
}

// dockerd --containerd-namespace: containerd knows Docker's containers too, in a namespace of any name. Docker's word is
// the one that counts, whoever is asked first; what Docker does not know is containerd's.
func TestTwoNames(t *testing.T) {
	id, pod := strings.Repeat("ab", 32), strings.Repeat("cd", 32)
	e := enginetest.New(t)
	e.Put("", id, fake("chat", "nginx", nil, 11))
	e.Put("", "short", fake("job", "nginx", nil, 12))
	f := &fakeContainerd{pids: map[string]uint32{}, events: make(chan *types.Envelope, 10), containers: map[string]map[string]*containersapi.Container{
		"dockers": {id: {ID: id}},
		"k8s.io":  {pod: {ID: pod, Labels: map[string]string{"io.kubernetes.container.name": "web"}}},
		"own":     {"short": {ID: "short"}}, // of the same name by chance
	}}
	docker, containerd := Socket{Docker, e.Path, true}, serveContainerd(t, f)
	of := map[string]string{
		Docker:     "docker " + id + " chat nginx 11 map[]\ndocker short job nginx 12 map[]",
		Containerd: "containerd k8s.io/" + pod + " web  0 map[io.kubernetes.container.name:web]\ncontainerd own/short short  0 map[]",
	}
	for _, order := range [][]Socket{{docker, containerd}, {containerd, docker}} {
		w := watch(t, order...)
		if got, want := texts(w.Containers()), of[order[0].Runtime]+"\n"+of[order[1].Runtime]; got != want {
			t.Errorf("%s first:\n%s\nwant\n%s", order[0].Runtime, got, want)
		}
		for _, r := range w.Runtimes() {
			if r.Containers != 2 || !r.Answers {
				t.Errorf("%+v", r)
			}
		}
	}
	// What Docker has told holds while it is away; what it has removed is nobody's but containerd's.
	w := watch(t, docker, containerd)
	e.Put("destroy", id, enginetest.Container{})
	become(t, w, "docker short job nginx 12 map[]\ncontainerd dockers/"+id+" "+id+"  0 map[]\n"+of[Containerd])
}
