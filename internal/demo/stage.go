package demo

import (
	"encoding/json"
	"fmt"
	"io"
	"time"
)

// stage is where one run of an experiment takes place. Its methods are
// for the experiment's run.
type stage struct {
	*supervisor
	step step
	// agent is nil in the runs without bulkheads.
	agent *child
	// parts are ended one by one at the end, workloads through their cgroups.
	parts []*child
}

// role says who a workload is. Without bulkheads it says nothing.
type role struct {
	feature, tenant string
	// oneCPU keeps it on one processor.
	oneCPU bool
}

// python is the command line of a workload's script.
func (g *stage) python(script string, args ...string) []string {
	// Isolated from the user's own modules and settings, without site, which a
	// script of the standard library does not need, and without writing
	// compiled modules anywhere.
	return append([]string{g.scenario.Tools.Python, "-IBS", scriptPath(script)}, args...)
}

// workload starts a workload: in the node's part of the tree, with bulkheads
// by bulkhead exec.
func (g *stage) workload(name string, r role, argv []string) (*child, error) {
	if g.agent != nil {
		in := append([]string{g.binary, "exec", "--feature", r.feature}, g.agentFlags()...)
		if r.tenant != "" {
			in = append(in, "--tenant", r.tenant)
		}
		argv = append(append(in, "--"), argv...)
	}
	return g.start(program{name: name, argv: argv, cgroup: g.tree.apps(), oneCPU: r.oneCPU})
}

// ready starts a workload and returns when it has written that it is ready.
func (g *stage) ready(name string, r role, argv []string) (*child, error) {
	c, err := g.workload(name, r, argv)
	if err != nil {
		return nil, err
	}
	return c, g.read(c, &struct{}{}, floodTimeout)
}

// whole runs a program to its end and returns its output and how long it
// took, without the start of bulkhead exec.
func (g *stage) whole(name string, r role, argv []string) (output []byte, took time.Duration, err error) {
	// A shell that becomes the program on a word.
	c, err := g.ready(name, r, append([]string{"/bin/sh", "-c", `echo {}; read -r begin; exec "$@"`, "sh"}, argv...))
	if err != nil {
		return nil, 0, err
	}
	read := make(chan error, 1)
	begin := time.Now()
	go func() {
		var err error
		output, err = io.ReadAll(io.MultiReader(c.stdout.Buffered(), c.output))
		read <- err
	}()
	if err := g.begin(c); err != nil {
		return nil, 0, err
	}
	// It is no failure of the demo if it fails: its output says so.
	select {
	case <-c.done:
		took = time.Since(begin)
	case <-g.ctx.Done():
		return nil, 0, g.why(nil)
	case <-time.After(callTimeout + stopTimeout):
		return nil, 0, c.late(callTimeout + stopTimeout)
	}
	return output, took, <-read
}

// app starts the measured web application, in which so many threads answer, 0
// is one for each request.
func (g *stage) app(r role, threads int, args ...string) error {
	return g.serve(r, g.python("app.py", append([]string{webPort, fmt.Sprint(threads)}, args...)...))
}

// nodeApp is app for node, where that is installed, with a thread for each
// request where it is not.
func (g *stage) nodeApp(r role, dependencies ...string) error {
	node := g.scenario.Tools.Node
	if node == "" {
		return g.app(r, 0, dependencies...)
	}
	return g.serve(r, append([]string{node, scriptPath("app.js"), webPort}, dependencies...))
}

func (g *stage) serve(r role, argv []string) error {
	c, err := g.ready("the application", r, argv)
	if err == nil {
		g.needs(c)
	}
	return err
}

// provider starts a provider that serves so many calls at once.
func (g *stage) provider(port string, serveAtOnce int) error {
	c, err := g.start(program{name: "the provider", cgroup: g.tree.supervisor(), first: true, argv: []string{
		g.binary, providerCommand, "--listen", loopback + ":" + port, "--serve-at-once", fmt.Sprint(serveAtOnce)}})
	if err != nil {
		return err
	}
	g.parts = append(g.parts, c)
	if err := g.read(c, &struct{}{}, readyTimeout); err != nil {
		return err
	}
	g.needs(c)
	return nil
}

// measuring says that the measured part begins.
func (g *stage) measuring() error { return g.events.Encode(event{Step: &g.step, Measuring: true}) }

// probe makes calls and returns what became of them.
func (g *stage) probe(calls []call) ([]outcome, error) {
	c, err := g.start(program{name: "the prober", cgroup: g.tree.supervisor(), first: true, argv: []string{g.binary, proberCommand}})
	if err != nil {
		return nil, err
	}
	last := calls[len(calls)-1].Due
	err = json.NewEncoder(c.stdin).Encode(calls)
	if cerr := c.stdin.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return nil, g.why(fmt.Errorf("tell the prober what to do: %w", err))
	}
	var outcomes []outcome
	if err := g.read(c, &outcomes, last+callTimeout+stopTimeout); err != nil {
		return nil, err
	}
	return outcomes, g.await(c, stopTimeout)
}

// begin lets a load count what it does.
func (g *stage) begin(load *child) error {
	if _, err := io.WriteString(load.stdin, "measure\n"); err != nil {
		return g.why(fmt.Errorf("tell %s to measure: %w", load.name, err))
	}
	return nil
}

// finish ends a load and returns what it counted.
func (g *stage) finish(load *child) (*loadReport, error) {
	load.stdin.Close()
	r := &loadReport{}
	if err := g.read(load, r, callTimeout+stopTimeout); err != nil {
		return nil, err
	}
	return r, g.await(load, stopTimeout)
}

// end ends everything of the stage: workloads with their children first, then
// the agent, then the rest.
func (g *stage) end() error {
	for _, c := range g.children {
		if c != g.agent {
			c.stopped.Store(true)
		}
	}
	if err := g.tree.killApps(); err != nil {
		return g.why(err)
	}
	if g.agent != nil {
		if err := g.stopAgent(g.agent); err != nil {
			return err
		}
	}
	for _, c := range g.parts {
		_ = c.cmd.Process.Kill() // an error means that it has ended already
	}
	late := time.After(stopTimeout)
	for _, c := range g.children {
		select {
		case <-c.done:
		case <-g.ctx.Done():
			return g.why(nil)
		case <-late:
			return c.late(stopTimeout)
		}
	}
	g.children = nil
	return nil
}
