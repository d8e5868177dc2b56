package containers

import (
	"context"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/containerd/containerd/api/events"
	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	eventsapi "github.com/containerd/containerd/api/services/events/v1"
	namespacesapi "github.com/containerd/containerd/api/services/namespaces/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/api/types/task"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// fakeContainerd answers as containerd does.
type fakeContainerd struct {
	mu         sync.Mutex
	containers map[string]map[string]*containersapi.Container // by namespace and id
	pids       map[string]uint32
	stopped    string // the one whose process has ended and is still known
	events     chan *types.Envelope
	// old does not know how to send containers one by one.
	old bool
}

// These have the same names in each of the services, so each is one of its own.
type (
	fakeNamespaces struct {
		namespacesapi.UnimplementedNamespacesServer
		*fakeContainerd
	}
	fakeContainers struct {
		containersapi.UnimplementedContainersServer
		*fakeContainerd
	}
	fakeTasks struct {
		tasksapi.UnimplementedTasksServer
		*fakeContainerd
	}
	fakeEvents struct {
		eventsapi.UnimplementedEventsServer
		*fakeContainerd
	}
)

func namespaceOf(ctx context.Context) string {
	md, _ := metadata.FromIncomingContext(ctx)
	if ns := md.Get("containerd-namespace"); len(ns) == 1 {
		return ns[0]
	}
	return ""
}

func (f fakeNamespaces) List(context.Context, *namespacesapi.ListNamespacesRequest) (*namespacesapi.ListNamespacesResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := &namespacesapi.ListNamespacesResponse{}
	for _, ns := range slices.Sorted(maps.Keys(f.containers)) {
		out.Namespaces = append(out.Namespaces, &namespacesapi.Namespace{Name: ns})
	}
	return out, nil
}

func (f fakeContainers) List(ctx context.Context, _ *containersapi.ListContainersRequest) (*containersapi.ListContainersResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return &containersapi.ListContainersResponse{Containers: slices.Collect(maps.Values(f.containers[namespaceOf(ctx)]))}, nil
}

func (f fakeContainers) ListStream(r *containersapi.ListContainersRequest, s containersapi.Containers_ListStreamServer) error {
	if f.old {
		return f.UnimplementedContainersServer.ListStream(r, s)
	}
	list, err := f.List(s.Context(), r)
	for _, c := range list.GetContainers() {
		if err == nil {
			err = s.Send(&containersapi.ListContainerMessage{Container: c})
		}
	}
	return err
}

func (f fakeContainers) Get(ctx context.Context, r *containersapi.GetContainerRequest) (*containersapi.GetContainerResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c := f.containers[namespaceOf(ctx)][r.ID]; c != nil {
		return &containersapi.GetContainerResponse{Container: c}, nil
	}
	return nil, status.Error(codes.NotFound, "no such container")
}

func (f fakeTasks) List(context.Context, *tasksapi.ListTasksRequest) (*tasksapi.ListTasksResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := &tasksapi.ListTasksResponse{}
	for id := range f.pids {
		out.Tasks = append(out.Tasks, f.task(id))
	}
	return out, nil
}

func (f fakeTasks) task(id string) *task.Process {
	state := task.Status_RUNNING
	if id == f.stopped {
		state = task.Status_STOPPED
	}
	return &task.Process{ID: id, Pid: f.pids[id], Status: state}
}

func (f fakeTasks) Get(_ context.Context, r *tasksapi.GetRequest) (*tasksapi.GetResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.pids[r.ContainerID] != 0 {
		return &tasksapi.GetResponse{Process: f.task(r.ContainerID)}, nil
	}
	return nil, status.Error(codes.NotFound, "no task")
}

func (f fakeEvents) Subscribe(_ *eventsapi.SubscribeRequest, s eventsapi.Events_SubscribeServer) error {
	for {
		select {
		case e := <-f.events:
			if err := s.Send(e); err != nil {
				return err
			}
		case <-s.Context().Done():
			return nil
		}
	}
}

// tell changes what there is, and tells of it.
func (f *fakeContainerd) tell(t *testing.T, ns string, m proto.Message, change func()) {
	t.Helper()
	if change != nil {
		f.mu.Lock()
		change()
		f.mu.Unlock()
	}
	any, err := anypb.New(m)
	if err != nil {
		t.Fatal(err)
	}
	f.events <- &types.Envelope{Namespace: ns, Event: any}
}

// serveContainerd has it answer until the test ends.
func serveContainerd(t *testing.T, f *fakeContainerd) Socket {
	t.Helper()
	path := filepath.Join(t.TempDir(), "containerd.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	namespacesapi.RegisterNamespacesServer(server, fakeNamespaces{fakeContainerd: f})
	containersapi.RegisterContainersServer(server, fakeContainers{fakeContainerd: f})
	tasksapi.RegisterTasksServer(server, fakeTasks{fakeContainerd: f})
	eventsapi.RegisterEventsServer(server, fakeEvents{fakeContainerd: f})
	go server.Serve(l)
	t.Cleanup(server.Stop)
	return Socket{Containerd, path, true}
}

func TestContainerd(t *testing.T) {
	f := &fakeContainerd{pids: map[string]uint32{"web": 11}, events: make(chan *types.Envelope, 10), containers: map[string]map[string]*containersapi.Container{
		"default": {"web": {ID: "web", Image: "docker.io/library/nginx:1.27", Labels: map[string]string{"nerdctl/name": "shop"},
			Spec: &anypb.Any{Value: []byte(`{"linux": {"cgroupsPath": "/default/web"}}`)}}},
		"k8s.io": {"c1": {ID: "c1", Labels: map[string]string{"io.kubernetes.container.name": "chat"}, Spec: &anypb.Any{Value: []byte("not json")}}},
		"moby":   {"d1": {ID: "d1"}}, // Docker tells of it
	}}
	w := watch(t, serveContainerd(t, f))
	const web = "containerd default/web shop docker.io/library/nginx:1.27 11 map[nerdctl/name:shop]"
	const chat = "\ncontainerd k8s.io/c1 chat  0 map[io.kubernetes.container.name:chat]"
	if got := texts(w.Containers()); got != web+chat || w.Containers()[0].Cgroup != "/default/web" {
		t.Fatalf("got\n%s (%+v)", got, w.Containers())
	}
	f.tell(t, "new", &events.ContainerCreate{ID: "n"}, func() {
		f.containers["new"] = map[string]*containersapi.Container{"n": {ID: "n", Image: "box"}}
	})
	become(t, w, web+chat+"\ncontainerd new/n n box 0 map[]")
	f.tell(t, "new", &events.TaskCreate{ContainerID: "n", Pid: 12}, func() { f.pids["n"] = 12 })
	become(t, w, web+chat+"\ncontainerd new/n n box 12 map[]")
	// Its process has ended, whose number may be another's by now, and nobody has taken it away.
	f.tell(t, "new", &events.ContainerUpdate{ID: "n"}, func() { f.stopped = "n" })
	become(t, w, web+chat+"\ncontainerd new/n n box 0 map[]")
	f.tell(t, "new", &events.TaskExit{ContainerID: "n", ID: "n", Pid: 12}, func() { delete(f.pids, "n") })
	become(t, w, web+chat+"\ncontainerd new/n n box 0 map[]")
	f.tell(t, "new", &events.ContainerDelete{ID: "n"}, func() { delete(f.containers, "new") })
	become(t, w, web+chat)
}

// What is known at once from each event. What is executed in a container is not the container, and Docker tells of its own.
func TestContainerdEvents(t *testing.T) {
	f := &fakeContainerd{events: make(chan *types.Envelope, 10)}
	told := follow(t, serveContainerd(t, f))
	f.tell(t, "moby", &events.TaskCreate{ContainerID: "d1", Pid: 13}, nil)
	f.tell(t, "new", &events.ContainerCreate{ID: "n"}, nil)
	f.tell(t, "new", &events.TaskCreate{ContainerID: "n", Pid: 12}, nil)
	f.tell(t, "new", &events.TaskExit{ContainerID: "n", ID: "shell"}, nil)
	f.tell(t, "new", &events.TaskDelete{ContainerID: "n", ID: "shell"}, nil)
	f.tell(t, "new", &events.TaskOOM{ContainerID: "n"}, nil)
	f.tell(t, "new", &events.ContainerUpdate{ID: "n"}, nil)
	f.tell(t, "new", &events.TaskExit{ContainerID: "n", ID: "n"}, nil)
	f.tell(t, "new", &events.TaskDelete{ContainerID: "n", ID: "n"}, nil)
	f.tell(t, "new", &events.TaskDelete{ContainerID: "n"}, nil)
	f.tell(t, "new", &events.ContainerDelete{ID: "n"}, nil)
	wantTold(t, told, "new/n", "new/n has process 12", "new/n", "new/n has process 0", "new/n has process 0", "new/n has process 0", "new/n is gone")
}

// A containerd that cannot send them one by one is asked for all.
func TestOldContainerd(t *testing.T) {
	f := &fakeContainerd{old: true, containers: map[string]map[string]*containersapi.Container{"default": {"web": {ID: "web", Image: "box"}}}}
	if got := texts(watch(t, serveContainerd(t, f)).Containers()); got != "containerd default/web web box 0 map[]" {
		t.Error(got)
	}
}

// One without a process is there, and one that is not there is no failure.
func TestContainerdGet(t *testing.T) {
	f := &fakeContainerd{containers: map[string]map[string]*containersapi.Container{"default": {"web": {ID: "web", Image: "box"}}}}
	r, err := open(serveContainerd(t, f))
	if err != nil {
		t.Fatal(err)
	}
	defer r.close()
	for id, want := range map[string]bool{"default/web": true, "default/other": false, "other/web": false} {
		if c, ok, err := r.get(t.Context(), id); ok != want || err != nil || ok && (c.ID != id || c.Image != "box" || c.PID != 0) {
			t.Errorf("%s: %+v %v %v", id, c, ok, err)
		}
	}
}
