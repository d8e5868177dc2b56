package containers

import (
	"context"
	"errors"
	"io"
	"strconv"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"

	"bulkhead/pkg/cgroup"
)

// engine is Docker, or Podman which answers the same requests.
type engine struct {
	Socket
	api *client.Client
}

func openEngine(s Socket) (runtime, error) {
	api, err := client.New(client.WithHost("unix://"+s.Path), client.WithUserAgent("bulkhead"))
	if err != nil {
		return nil, err
	}
	return engine{s, api}, nil
}

func (e engine) close() { _ = e.api.Close() }

func (e engine) ping(ctx context.Context) error {
	_, err := e.api.Ping(ctx, client.PingOptions{NegotiateAPIVersion: true})
	if err != nil && client.IsErrConnectionFailed(err) {
		err = errors.New("it takes no connection") // the client speaks of Docker whoever it is
	}
	return err
}

func (e engine) list(ctx context.Context) (list []cgroup.Container, ask map[string]bool, err error) {
	all, err := e.api.ContainerList(ctx, client.ContainerListOptions{All: true})
	if err != nil {
		return nil, nil, err
	}
	ask = map[string]bool{}
	for _, s := range all.Items {
		// It is an id if the name that it was made by is another image's now: one that is stopped would not match when
		// it starts again.
		if s.State == container.StateRunning || s.State == container.StatePaused || s.Image == s.ImageID {
			ask[s.ID] = true
		}
		c := cgroup.Container{Runtime: e.Runtime, ID: s.ID, Image: s.Image, Labels: s.Labels}
		if len(s.Names) > 0 {
			c.Name = nameOf(s.Names[0])
		}
		list = append(list, c)
	}
	return list, ask, nil
}

func nameOf(s string) string { return strings.TrimPrefix(s, "/") }

func (e engine) get(ctx context.Context, id string) (cgroup.Container, bool, error) {
	r, err := e.api.ContainerInspect(ctx, id, client.ContainerInspectOptions{})
	if cerrdefs.IsNotFound(err) {
		return cgroup.Container{}, false, nil
	}
	if err != nil {
		return cgroup.Container{}, false, err
	}
	c := cgroup.Container{Runtime: e.Runtime, ID: r.Container.ID, Name: nameOf(r.Container.Name)}
	if r.Container.Config != nil {
		c.Image, c.Labels = r.Container.Config.Image, r.Container.Config.Labels
	}
	if s := r.Container.State; s != nil {
		c.PID = s.Pid
	}
	return c, true, nil
}

func (e engine) follow(ctx context.Context, since time.Time, subscribed func(), tell func(change)) error {
	// What happens while the request is on its way is told from its beginning; in whole seconds,
	// which is all that Podman reads.
	stream := e.api.Events(ctx, client.EventsListOptions{
		Since:   strconv.FormatInt(since.Unix(), 10),
		Filters: make(client.Filters).Add("type", "container"),
	})
	subscribed()
	for {
		select {
		case err := <-stream.Err:
			if err == nil || errors.Is(err, io.EOF) {
				err = errors.New("it ended the stream of events")
			}
			return err
		case m := <-stream.Messages:
			c := change{id: m.Actor.ID}
			switch m.Action {
			case "create", "rename", "update", "init", "start", "restart":
				c.made = e.told(m.Actor.ID, m.Actor.Attributes)
			case "die", "died", "stop", "cleanup":
				ended := 0
				c.pid = &ended
			case "destroy", "remove":
				c.removed = true
			default:
				continue // what is executed in it, its health
			}
			if c.id != "" {
				tell(c)
			}
		}
	}
}

// told is what an event says of a container: its labels, and with them its name and image.
func (e engine) told(id string, attributes map[string]string) *cgroup.Container {
	if attributes["image"] == "" {
		return nil
	}
	c := &cgroup.Container{Runtime: e.Runtime, ID: id, Name: attributes["name"], Image: attributes["image"], Labels: map[string]string{}}
	for k, v := range attributes {
		// A label of these names is known when the container has been asked about.
		if k != "name" && k != "image" && k != "oldName" {
			c.Labels[k] = v
		}
	}
	return c
}
