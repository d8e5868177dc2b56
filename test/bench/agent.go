package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/cilium/ebpf"

	"bulkhead/internal/agent"
	"bulkhead/pkg/conn"
)

const metricsAddress = "127.0.0.1:9779"

// node is a real agent with a part of the cgroup tree and pins of its own.
type node struct {
	l      *lab
	o      conn.Options
	slice  string // of the worker's compartment; processes are in leaves below
	policy string // file
	listen string // address of its metrics
	client *agent.Client
	cmd    *exec.Cmd
	log    bytes.Buffer
	ended  chan struct{}
}

// startNode starts an agent with a policy for the worker and gives the milliseconds until it
// was ready.
func (l *lab) startNode(name, binary string, z size) (n *node, took float64, err error) {
	dir := filepath.Join(l.root, name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, 0, err
	}
	l.stop = append(l.stop, func() {
		l.leave()
		if err := removeTree(dir); err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
		}
	})
	room := uint32(0)
	if z.held {
		room = 1 << 20 // the most that are held, and the worker's
	}
	if n, took, err = l.startAgent(name, dir, binary, z.text(), metricsAddress, room); err != nil {
		return nil, 0, err
	}
	n.slice = filepath.Join(dir, "bulkhead.slice/bulkhead-f.slice")
	if !z.flat {
		n.slice = filepath.Join(n.slice, "bulkhead-f-t.slice")
	}
	return n, took, nil
}

// startAgent starts one below a cgroup, with room for so many connections, 0 for as many as it
// has by itself.
func (l *lab) startAgent(name, dir, binary, policy, listen string, room uint32) (*node, float64, error) {
	n := &node{l: l, policy: filepath.Join(l.dir, name+".yaml"), listen: listen, ended: make(chan struct{})}
	var err error
	if n.o, err = l.instance(dir); err != nil {
		return nil, 0, err
	}
	socket, ready := filepath.Join(l.dir, name+".sock"), filepath.Join(l.dir, name+".ready")
	n.client = agent.NewClient(socket)
	if err := os.WriteFile(n.policy, []byte(policy), 0o600); err != nil {
		return nil, 0, err
	}
	if room == 0 {
		room = conn.DefaultMaxSlots
	}
	n.cmd = exec.Command(binary, "agent", "--policy", n.policy, "--ready-file", ready, "--web.listen-address", n.listen,
		"--cgroup-root", dir, "--bpffs", n.o.BPFFS, "--admin-socket", socket, "--max-connections", fmt.Sprint(room))
	n.cmd.Stderr = &n.log
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	begun := time.Now()
	if err := n.cmd.Start(); err != nil {
		return nil, 0, fmt.Errorf("the agent (make build makes it): %w", err)
	}
	go func() {
		n.cmd.Wait()
		close(n.ended)
	}()
	l.stop = append(l.stop, func() {
		n.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-n.ended:
		case <-time.After(30 * time.Second):
			n.cmd.Process.Kill()
			<-n.ended
		}
		conn.Detach(n.o)
	})
	for {
		if text, err := os.ReadFile(ready); err == nil && len(text) > 0 {
			return n, ms(begun), nil
		}
		select {
		case <-n.ended:
			return nil, 0, fmt.Errorf("the agent ended: %s\n%s", n.cmd.ProcessState, &n.log)
		case <-l.ctx.Done():
			return nil, 0, l.ctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
}

// leaf makes a cgroup for processes in the worker's compartment.
func (n *node) leaf(name string) (string, error) {
	dir := filepath.Join(n.slice, name)
	return dir, os.Mkdir(dir, 0o755)
}

// reload gives the milliseconds of reloading a policy that differs from the last one.
func (n *node) reload(text string) (float64, error) {
	if err := os.WriteFile(n.policy, []byte(text), 0o600); err != nil {
		return 0, err
	}
	begun := time.Now()
	out, err := n.client.Reload(n.l.ctx)
	if err == nil && out.Error != "" {
		err = errors.New(out.Error)
	}
	return ms(begun), err
}

// scrape gives the milliseconds and the bytes of one answer of /metrics.
func (n *node) scrape() (took float64, size int64, err error) {
	request, err := http.NewRequestWithContext(n.l.ctx, http.MethodGet, "http://"+n.listen+"/metrics", nil)
	if err != nil {
		return 0, 0, err
	}
	begun := time.Now()
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, 0, fmt.Errorf("scrape: %w", err)
	}
	defer answer.Body.Close()
	size, err = io.Copy(io.Discard, answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("scrape: %s", answer.Status)
	}
	return ms(begun), size, err
}

// snapshot gives the milliseconds of a whole one, and what it says.
func (n *node) snapshot() (float64, *conn.Snapshot, error) {
	begun := time.Now()
	r, err := conn.OpenReader(n.o)
	if err != nil {
		return 0, nil, err
	}
	defer r.Close()
	s, err := r.Snapshot(n.l.ctx)
	return ms(begun), s, err
}

// share is the part of one CPU that the agent uses while each is called once a second.
func (n *node) share(during time.Duration, each func() error) (float64, error) {
	clock := processClock(n.cmd.Process.Pid)
	begun, before := time.Now(), processorTime(clock)
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for time.Since(begun) < during {
		select {
		case <-n.l.ctx.Done():
			return 0, n.l.ctx.Err()
		case <-n.ended:
			return 0, fmt.Errorf("the agent ended: %s", n.cmd.ProcessState)
		case <-tick.C:
		}
		if err := each(); err != nil {
			return 0, err
		}
	}
	return float64(processorTime(clock)-before) / float64(time.Since(begun)), nil
}

// rss is the agent's resident memory in bytes.
func (n *node) rss() (float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", n.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(text))
	if len(fields) < 2 {
		return 0, fmt.Errorf("statm: %q", text)
	}
	pages, err := strconv.ParseFloat(fields[1], 64)
	return pages * float64(os.Getpagesize()), err
}

// memory is what the kernel says its maps take, in bytes by name: those pinned, and those
// of the two generations within them.
func (n *node) memory() (map[string]float64, error) {
	pins, err := filepath.Glob(filepath.Join(n.o.BPFFS, "bulkhead", "v*", "*"))
	if err != nil {
		return nil, err
	}
	bytes, seen := map[string]float64{}, map[ebpf.MapID]bool{}
	add := func(name string, m *ebpf.Map) error {
		info, err := m.Info()
		if err != nil {
			return fmt.Errorf("map %s: %w", name, err)
		}
		id, _ := info.ID()
		size, ok := info.Memlock()
		if !ok {
			return fmt.Errorf("map %s: the kernel does not say its size", name)
		}
		if !seen[id] {
			bytes[name] += float64(size)
		}
		seen[id] = true
		return nil
	}
	for _, pin := range pins {
		m, err := ebpf.LoadPinnedMap(pin, &ebpf.LoadPinOptions{ReadOnly: true})
		if err != nil {
			continue // a link
		}
		err = add(filepath.Base(pin), m)
		for i := uint32(0); err == nil && m.Type() == ebpf.ArrayOfMaps && i < m.MaxEntries(); i++ {
			var inner *ebpf.Map
			if m.Lookup(i, &inner) == nil { // else nothing is there yet
				err = add(filepath.Base(pin), inner)
				inner.Close()
			}
		}
		m.Close()
		if err != nil {
			return nil, err
		}
	}
	if bytes["slots"] == 0 {
		return nil, errors.New("no map slots is pinned")
	}
	return bytes, nil
}
