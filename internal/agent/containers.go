package agent

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"bulkhead/internal/containers"
	"bulkhead/internal/metrics"
	"bulkhead/pkg/cgroup"
	"bulkhead/pkg/policy"
)

// settleLimit bounds how long a start, a reload and plan wait for runtimes to say which containers there
// are; one that answers nothing at all is waited for a fifth of that. Those that answer later are adopted then.
const settleLimit = 10 * time.Second

// AdoptedContainer says whose cgroup an adopted one is.
type AdoptedContainer struct {
	CgroupID uint64 `json:"cgroup_id"`
	Runtime  string `json:"runtime"`
	Name     string `json:"name"`
	Image    string `json:"image"`
}

// runtimes knows the containers that the plan in force names.
type runtimes struct {
	sockets []containers.Socket
	log     *slog.Logger
	finder  *cgroup.ContainerFinder

	watcher *containers.Watcher // nil if no feature matches containers
	found   cgroup.Containers
	conds   []cgroup.Condition
}

// follow asks the runtimes if the plan matches containers, and waits for their first answers.
func (r *runtimes) follow(ctx context.Context, plan *policy.Plan) {
	if plan == nil || !cgroup.AsksContainers(plan) {
		r.close()
		return
	}
	if r.watcher == nil {
		r.watcher = containers.Watch(r.sockets, r.log)
	}
	limited, cancel := context.WithTimeout(ctx, settleLimit)
	defer cancel()
	r.watcher.Settled(limited)
}

func (r *runtimes) close() {
	if r.watcher != nil {
		r.watcher.Close()
	}
	r.watcher, r.found, r.conds = nil, nil, nil
}

// wake is ready when a runtime has told something new.
func (r *runtimes) wake() <-chan struct{} {
	if r.watcher == nil {
		return nil
	}
	return r.watcher.Wake()
}

// find finds the cgroups of the containers that a plan names.
func (r *runtimes) find(plan *policy.Plan, all []cgroup.Cgroup) cgroup.Containers {
	r.found, r.conds = nil, nil
	if r.watcher != nil {
		r.found, r.conds = r.finder.Find(plan, r.watcher.Containers(), all)
	}
	return r.found
}

// names are what containers are called now, by runtime and id.
func (r *runtimes) names() map[[2]string]string {
	out := map[[2]string]string{}
	if r.watcher != nil {
		for _, c := range r.watcher.Containers() {
			out[[2]string{c.Runtime, c.ID}] = c.Name
		}
	}
	return out
}

// state is what is published.
func (r *runtimes) state(all []cgroup.Adopted) (state []containers.Runtime, adopted []AdoptedContainer, conds []cgroup.Condition) {
	state, adopted = []containers.Runtime{}, []AdoptedContainer{}
	if r.watcher == nil {
		return state, adopted, nil
	}
	state = r.watcher.Runtimes()
	for _, ad := range all { // what is protected, say, is not
		if c := r.found[ad.ID]; c != nil {
			adopted = append(adopted, AdoptedContainer{CgroupID: ad.ID, Runtime: c.Runtime, Name: c.Name, Image: c.Image})
		}
	}
	slices.SortFunc(adopted, func(a, b AdoptedContainer) int { return strings.Compare(a.Runtime+"/"+a.Name, b.Runtime+"/"+b.Name) })
	return state, adopted, append(runtimesAway(state, r.sockets), r.conds...)
}

// runtimesUp is for metrics.
func runtimesUp(state []containers.Runtime) []metrics.Runtime {
	var out []metrics.Runtime
	for _, s := range state {
		out = append(out, metrics.Runtime{Runtime: s.Runtime, Socket: s.Socket, Up: s.Answers})
	}
	return out
}

// runtimesAway are the conditions of runtimes that do not answer, or not as they should.
func runtimesAway(state []containers.Runtime, asked []containers.Socket) (conds []cgroup.Condition) {
	for _, s := range state {
		if !s.Answers && (s.Error != "" || s.Containers > 0) {
			why := s.Error
			if why == "" {
				why = "it does not run"
			}
			conds = append(conds, cgroup.Condition{Type: cgroup.TypePlacement, Status: "False", Reason: cgroup.ReasonRuntimeAway,
				Message: fmt.Sprintf("%s at %s does not answer, so containers that it starts are in no compartment that container matches: %s", s.Runtime, s.Socket, why)})
		}
		if s.Answers && s.Error != "" {
			conds = append(conds, cgroup.Condition{Type: cgroup.TypePlacement, Status: "False", Reason: cgroup.ReasonRuntimeNoEvents,
				Message: fmt.Sprintf("containers of %s at %s come to their compartments seconds after their start, and what they connect before is in default: %s (podman: events_logger in containers.conf must not be none)", s.Runtime, s.Socket, s.Error)})
		}
	}
	if len(state) == 0 {
		var at []string
		for _, s := range asked {
			at = append(at, s.Path)
		}
		text := "the policy matches containers, and no container runtime is asked (--container-runtime none)"
		if len(at) > 0 {
			text = "the policy matches containers and no container runtime runs here: looked for at " + strings.Join(at, ", ") +
				" (Podman answers while podman.socket is started: systemctl enable --now podman.socket); --container-runtime names another"
		}
		conds = append(conds, cgroup.Condition{Type: cgroup.TypePlacement, Status: "False", Reason: cgroup.ReasonRuntimeAway, Message: text})
	}
	return conds
}

// FindContainers asks the runtimes once and finds the cgroups of the containers that a plan names.
func FindContainers(ctx context.Context, tree *cgroup.Tree, plan *policy.Plan, sockets []containers.Socket, all []cgroup.Cgroup) (cgroup.Containers, []containers.Runtime, []cgroup.Condition) {
	if !cgroup.AsksContainers(plan) {
		return nil, nil, nil
	}
	limited, cancel := context.WithTimeout(ctx, settleLimit)
	defer cancel()
	list, state := containers.List(limited, sockets)
	found, conds := cgroup.NewContainerFinder(tree).Find(plan, list, all)
	return found, state, append(runtimesAway(state, sockets), conds...)
}
