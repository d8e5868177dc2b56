package containers

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/containerd/containerd/api/events"
	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	eventsapi "github.com/containerd/containerd/api/services/events/v1"
	namespacesapi "github.com/containerd/containerd/api/services/namespaces/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/task"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"bulkhead/pkg/cgroup"
)

// containerd is containerd's own API. What Docker runs there is left to Docker, which alone
// knows its names: see Watcher.own, where it has another namespace than it has by default.
type containerd struct {
	Socket
	conn       *grpc.ClientConn
	namespaces namespacesapi.NamespacesClient
	containers containersapi.ContainersClient
	tasks      tasksapi.TasksClient
	events     eventsapi.EventsClient
}

// dockers is the namespace of Docker's containers by default.
const dockers = "moby"

func openContainerd(s Socket) (runtime, error) {
	conn, err := grpc.NewClient("unix://"+s.Path, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(most)))
	if err != nil {
		return nil, err
	}
	return &containerd{s, conn, namespacesapi.NewNamespacesClient(conn), containersapi.NewContainersClient(conn),
		tasksapi.NewTasksClient(conn), eventsapi.NewEventsClient(conn)}, nil
}

func (r *containerd) close() { _ = r.conn.Close() }

// in is a context for requests about one namespace.
func in(ctx context.Context, namespace string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "containerd-namespace", namespace)
}

// Ids are unique in their namespace only.
func idOf(namespace, id string) string { return namespace + "/" + id }

func (r *containerd) ping(ctx context.Context) error {
	_, err := r.namespaces.List(ctx, &namespacesapi.ListNamespacesRequest{})
	return err
}

// most is what an answer may take: gRPC's own limit of 4 MiB is what the tasks of some ten thousand need.
const most = 64 << 20

// all lists the containers of a namespace, one by one: each comes with its specification, and some hundred of them
// are more than one answer may be.
func (r *containerd) all(ctx context.Context) (out []*containersapi.Container, err error) {
	stream, err := r.containers.ListStream(ctx, &containersapi.ListContainersRequest{})
	for err == nil {
		var m *containersapi.ListContainerMessage
		if m, err = stream.Recv(); err == nil {
			out = append(out, m.Container)
		}
	}
	if errors.Is(err, io.EOF) {
		return out, nil
	}
	if status.Code(err) == codes.Unimplemented {
		list, err := r.containers.List(ctx, &containersapi.ListContainersRequest{})
		return list.GetContainers(), err
	}
	return nil, err
}

func (r *containerd) list(ctx context.Context) (out []cgroup.Container, _ map[string]bool, err error) {
	all, err := r.namespaces.List(ctx, &namespacesapi.ListNamespacesRequest{})
	if err != nil {
		return nil, nil, err
	}
	for _, ns := range all.Namespaces {
		if ns.Name == dockers {
			continue
		}
		list, err := r.all(in(ctx, ns.Name))
		if err != nil {
			return nil, nil, err
		}
		running, err := r.tasks.List(in(ctx, ns.Name), &tasksapi.ListTasksRequest{})
		if err != nil {
			return nil, nil, err
		}
		pids := map[string]int{}
		for _, p := range running.Tasks {
			pids[p.ID] = pidOf(p)
		}
		for _, c := range list {
			with := r.container(ns.Name, c)
			with.PID = pids[c.ID]
			out = append(out, with)
		}
	}
	return out, nil, nil
}

// container is one without its process.
func (r *containerd) container(namespace string, c *containersapi.Container) cgroup.Container {
	out := cgroup.Container{Runtime: r.Runtime, ID: idOf(namespace, c.ID), Name: c.ID, Image: c.Image, Labels: c.Labels}
	// What nerdctl and the kubelet call a container; containerd itself has ids only.
	for _, label := range []string{"nerdctl/name", "io.kubernetes.container.name"} {
		if name := c.Labels[label]; name != "" {
			out.Name = name
		}
	}
	var spec struct {
		Linux struct {
			CgroupsPath string `json:"cgroupsPath"`
		} `json:"linux"`
	}
	if c.Spec != nil && json.Unmarshal(c.Spec.Value, &spec) == nil {
		out.Cgroup = spec.Linux.CgroupsPath
	}
	return out
}

func (r *containerd) get(ctx context.Context, id string) (cgroup.Container, bool, error) {
	namespace, id, _ := strings.Cut(id, "/")
	ctx = in(ctx, namespace)
	c, err := r.containers.Get(ctx, &containersapi.GetContainerRequest{ID: id})
	if status.Code(err) == codes.NotFound {
		return cgroup.Container{}, false, nil
	}
	if err != nil {
		return cgroup.Container{}, false, err
	}
	out := r.container(namespace, c.Container)
	switch t, err := r.tasks.Get(ctx, &tasksapi.GetRequest{ContainerID: id}); {
	case err == nil:
		out.PID = pidOf(t.Process)
	case err != nil && status.Code(err) != codes.NotFound:
		return cgroup.Container{}, false, err
	}
	return out, true, nil
}

// pidOf is the pid of a task, 0 if it has ended.
func pidOf(p *task.Process) int {
	if p == nil || p.Status == task.Status_STOPPED {
		return 0
	}
	return int(p.Pid)
}

func (r *containerd) follow(ctx context.Context, _ time.Time, subscribed func(), tell func(change)) error {
	stream, err := r.events.Subscribe(ctx, &eventsapi.SubscribeRequest{Filters: []string{`topic~="^/(containers|tasks)/"`}})
	if err != nil {
		return err
	}
	for {
		e, err := stream.Recv()
		if err != nil {
			return err
		}
		if e.Namespace == dockers || e.Event == nil {
			continue
		}
		subscribed() // it says nothing before the first event
		m, err := e.Event.UnmarshalNew()
		if err != nil {
			continue // of a release that has more kinds
		}
		var c change
		switch m := m.(type) {
		case *events.ContainerCreate:
			c.id = m.ID
		case *events.ContainerUpdate:
			c.id = m.ID
		case *events.ContainerDelete:
			c.id, c.removed = m.ID, true
		case *events.TaskCreate:
			pid := int(m.Pid)
			c.id, c.pid = m.ContainerID, &pid
		case *events.TaskExit:
			if m.ID != m.ContainerID { // executed in it
				continue
			}
			c.id, c.pid = m.ContainerID, new(int)
		case *events.TaskDelete:
			if m.ID != "" && m.ID != m.ContainerID {
				continue
			}
			c.id, c.pid = m.ContainerID, new(int)
		default:
			continue
		}
		c.id = idOf(e.Namespace, c.id)
		tell(c)
	}
}
