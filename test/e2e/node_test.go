package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
)

// port is where the providers of all nodes listen, each node on addresses of its own.
const port = "8000"

// oneProvider begins a policy, whose features follow: deepseek is what the node's first server is.
const oneProvider = `
apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers:
  deepseek: {cidrs: [@1/32], ports: [8000]}
features:
`

// commandLimit is how long one command may take, on a slow emulated machine too.
const commandLimit = 30 * time.Second

// node is what an instance of bulkhead has to itself.
type node struct {
	*kerneltest.Env
	t       testing.TB
	dir     string   // its files; everybody may read them
	policy  string   // --policy
	socket  string   // --admin-socket
	ready   string   // --ready-file
	log     string   // what its agents wrote to stderr
	metrics string   // --web.listen-address
	net     string   // its addresses without the last number, "127.0.7."
	also    []string // flags that every command gets
}

var nodes atomic.Int64

// newNode makes a node, beside those of other tests.
func newNode(t *testing.T) *node {
	t.Helper()
	t.Parallel()
	dir, err := os.MkdirTemp("", "bulkhead-e2e-")
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	i := nodes.Add(1)
	n := &node{
		Env: kerneltest.New(t), t: t, dir: dir,
		policy: filepath.Join(dir, "policy.yaml"), socket: filepath.Join(dir, "agent.sock"),
		ready: filepath.Join(dir, "ready"), log: filepath.Join(dir, "agent.log"),
		net: fmt.Sprintf("127.%d.%d.", 1+i/256, i%256),
	}
	n.metrics = net.JoinHostPort(n.net+"99", "9779")
	t.Cleanup(func() {
		if t.Failed() {
			text, _ := os.ReadFile(n.log)
			lines := strings.Split(string(text), "\n")
			t.Logf("the agent's last lines:\n%s", strings.Join(lines[max(0, len(lines)-40):], "\n"))
		}
	})
	return n
}

// addr is HOST:PORT of the i-th provider.
func (n *node) addr(i int) string { return net.JoinHostPort(n.net+strconv.Itoa(i), port) }

// serve is a provider that holds a connection for as long as its client does.
func (n *node) serve(i int) *kerneltest.Server {
	n.t.Helper()
	return kerneltest.Serve(n.t, n.addr(i), kerneltest.Drain)
}

var addrMark = regexp.MustCompile(`@(\d)`)

// text puts the node's addresses in: @1 is that of addr(1).
func (n *node) text(policy string) string { return addrMark.ReplaceAllString(policy, n.net+"$1") }

// write replaces the policy.
func (n *node) write(policy string) {
	n.t.Helper()
	n.save(n.policy, policy)
}

// save replaces a policy file in one step.
func (n *node) save(path, policy string) {
	n.t.Helper()
	tmp := path + ".tmp"
	err := os.WriteFile(tmp, []byte(n.text(policy)), 0o644)
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		n.t.Fatal(err)
	}
}

// args are a command line of bulkhead that is about this node.
func (n *node) args(args ...string) []string {
	// What exec runs may have flags of the same name, so ours come first.
	return slices.Concat([]string{os.Getenv(binaryVar), args[0], "--cgroup-root", n.Cgroup.Path,
		"--bpffs", n.BPFFS, "--admin-socket", n.socket}, n.also, args[1:])
}

// result is how a command ended.
type result struct {
	stdout, stderr string
	code           int // -1: by a signal
}

func (r result) String() string {
	return fmt.Sprintf("exit code %d, stdout:\n%s\nstderr:\n%s", r.code, r.stdout, r.stderr)
}

// run runs bulkhead to its end.
func (n *node) run(args ...string) result {
	n.t.Helper()
	args = n.args(args...)
	return run(n.t, exec.Command(args[0], args[1:]...))
}

func run(t testing.TB, cmd *exec.Cmd) result {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	late := time.AfterFunc(commandLimit, func() { cmd.Process.Kill() })
	err := cmd.Wait()
	if !late.Stop() {
		t.Fatalf("%s did not end within %s; stderr:\n%s", strings.Join(cmd.Args, " "), commandLimit, &stderr)
	}
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return result{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// must runs bulkhead, which must end with 0, and returns its stdout.
func (n *node) must(args ...string) string {
	n.t.Helper()
	r := n.run(args...)
	if r.code != 0 {
		n.t.Fatalf("bulkhead %s: %s", strings.Join(args, " "), r)
	}
	return r.stdout
}

// wantRun fails unless the command ends with the code and says all the words on
// stderr.
func (n *node) wantRun(code int, words []string, args ...string) result {
	n.t.Helper()
	r := n.run(args...)
	if !wantResult(n.t, r, code, words...) {
		n.t.Errorf("that was bulkhead %s", strings.Join(args, " "))
	}
	return r
}

func wantResult(t testing.TB, r result, code int, words ...string) bool {
	t.Helper()
	if r.code != code {
		t.Errorf("want exit code %d, got %s", code, r)
	}
	return wantWords(t, r.stderr, words...) && r.code == code
}

func wantWords(t testing.TB, text string, words ...string) bool {
	t.Helper()
	ok := true
	for _, w := range words {
		if !strings.Contains(text, w) {
			ok = false
			t.Errorf("want %q in\n%s", w, text)
		}
	}
	return ok
}

// agent is one that was started.
type agent struct {
	*exec.Cmd
	n     *node
	ended chan struct{}
}

// begin starts an agent and does not wait until it is ready.
func (n *node) begin(extra ...string) *agent {
	n.t.Helper()
	return n.beginAs(nil, n.args(append(n.agentCommand(), extra...)...))
}

func (n *node) agentCommand() []string {
	return []string{"agent", "--policy", n.policy, "--ready-file", n.ready, "--web.listen-address", n.metrics}
}

func (n *node) beginAs(env, args []string) *agent {
	n.t.Helper()
	log, err := os.OpenFile(n.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		n.t.Fatal(err)
	}
	defer log.Close()
	a := &agent{Cmd: exec.Command(args[0], args[1:]...), n: n, ended: make(chan struct{})}
	a.Env = append(os.Environ(), env...)
	a.Stderr = log
	a.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := a.Start(); err != nil {
		n.t.Fatal(err)
	}
	go func() {
		a.Wait()
		close(a.ended)
	}()
	n.t.Cleanup(func() { a.kill() })
	return a
}

// start starts an agent and waits until it is ready.
func (n *node) start(extra ...string) *agent {
	n.t.Helper()
	a := n.begin(extra...)
	a.waitReady()
	return a
}

func (a *agent) waitReady() {
	a.n.t.Helper()
	want := strconv.Itoa(a.Process.Pid)
	kerneltest.Poll(a.n.t, "the agent is ready", func() error {
		select {
		case <-a.ended:
			a.n.t.Fatalf("the agent ended: %s", a.ProcessState)
		default:
		}
		// One of an agent that was killed may still be there.
		pid, err := os.ReadFile(a.n.ready)
		if err == nil && strings.TrimSpace(string(pid)) != want {
			err = fmt.Errorf("%s is of process %s", a.n.ready, pid)
		}
		return err
	})
}

// end waits until the agent has ended and returns its exit code.
func (a *agent) end() int {
	a.n.t.Helper()
	select {
	case <-a.ended:
	case <-time.After(commandLimit):
		a.n.t.Fatalf("the agent has not ended within %s", commandLimit)
	}
	return a.ProcessState.ExitCode()
}

// signal sends a signal.
func (a *agent) signal(s os.Signal) {
	a.n.t.Helper()
	if err := a.Process.Signal(s); err != nil {
		a.n.t.Fatal(err)
	}
}

// kill ends the agent by SIGKILL.
func (a *agent) kill() {
	a.Process.Kill()
	<-a.ended
}

// line is a line of the agent's log.
type line struct {
	Msg      string `json:"msg"`
	PID      int    `json:"pid"`
	Command  string `json:"command"`
	Feature  string `json:"feature"`
	Provider string `json:"provider"`
	Remote   string `json:"remote"`
	Errno    string `json:"errno"`
	Limit    *int   `json:"limit"`
	Total    int    `json:"total"`
	More     int    `json:"more"`
	Bulkhead struct {
		Scope, Feature, Tenant, Provider string
	} `json:"bulkhead"`

	text string
}

// lines are the log of the node's agents: JSON, since it is no terminal.
func (n *node) lines() []line {
	n.t.Helper()
	text, err := os.ReadFile(n.log)
	if err != nil {
		n.t.Fatal(err)
	}
	var all []line
	for l := range strings.Lines(string(text)) {
		if !strings.HasSuffix(l, "\n") {
			break // it is being written
		}
		x := line{text: l}
		if err := json.Unmarshal([]byte(l), &x); err != nil {
			n.t.Errorf("not a line of JSON in the log: %s", l)
		}
		all = append(all, x)
	}
	return all
}

// logged waits until the log has a line with all the words.
func (n *node) logged(words ...string) {
	n.t.Helper()
	kerneltest.Poll(n.t, "the agent's log", func() error {
		for _, l := range n.lines() {
			if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(l.text, w) }) {
				return nil
			}
		}
		return fmt.Errorf("no line with %q", words)
	})
}

// starting is held while a client is started, since what it becomes is in the
// environment.
var starting sync.Mutex

// place starts a client in a cgroup.
func (n *node) place(in kerneltest.Cgroup) *kerneltest.Client {
	n.t.Helper()
	starting.Lock()
	defer starting.Unlock()
	return n.Start(in)
}

// client starts a client with bulkhead exec.
func (n *node) client(feature string, more ...string) *kerneltest.Client {
	n.t.Helper()
	args := append([]string{"exec", "--feature", feature}, more...)
	via, err := json.Marshal(n.args(append(args, "--", "")...))
	if err != nil {
		n.t.Fatal(err)
	}
	from := n.Mkdir("login")
	starting.Lock()
	defer starting.Unlock()
	os.Setenv(viaVar, string(via))
	defer os.Unsetenv(viaVar)
	c := n.Start(from)
	c.Close() // nothing: once it answers it is inside
	return c
}

// dials connects n sockets, which stay open, and says how many passed; the others
// must have been refused with want.
func dials(t testing.TB, c *kerneltest.Client, addr string, n int, want syscall.Errno) (passed []int) {
	t.Helper()
	for range n {
		fd, errno := c.Dial(kerneltest.TCP4, addr)
		switch errno {
		case 0:
			passed = append(passed, fd)
		case want:
			c.Close(fd)
		default:
			t.Errorf("connect to %s: %v, want success or %v", addr, errno, want)
		}
	}
	return passed
}

// wantDial fails unless one more connect to each address returns want, and keeps none.
func wantDial(t testing.TB, c *kerneltest.Client, want syscall.Errno, addrs ...string) {
	t.Helper()
	for i, errno := range c.Probe(kerneltest.TCP4, addrs) {
		if errno != want {
			t.Errorf("connect to %s: %v, want %v", addrs[i], errno, want)
		}
	}
}

// slice is the directory of a compartment's slice.
func (n *node) slice(feature string) string {
	return filepath.Join(n.Cgroup.Path, "bulkhead.slice", "bulkhead-"+feature+".slice")
}

// state lists what bulkhead may leave behind or change: cgroups with their values and
// attributes, and pins.
func (n *node) state() []string {
	n.t.Helper()
	var all []string
	list := func(root string, add func(path string, d fs.DirEntry) error) {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err == nil {
				err = add(path, d)
			}
			if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
				return nil // gone meanwhile
			}
			return err
		})
		if err != nil {
			n.t.Fatal(err)
		}
	}
	list(n.BPFFS, func(path string, _ fs.DirEntry) error {
		all = append(all, path)
		return nil
	})
	list(n.Cgroup.Path, func(path string, d fs.DirEntry) error {
		switch {
		case d.IsDir():
			names := make([]byte, 4096)
			size, err := unix.Llistxattr(path, names)
			all = append(all, fmt.Sprintf("%s %q", path, names[:max(size, 0)]))
			return err
		case slices.Contains(controlFiles(), d.Name()):
			value, err := os.ReadFile(path)
			all = append(all, path+": "+strings.TrimSpace(string(value)))
			return err
		}
		return nil
	})
	return all
}

// controlFiles are what a policy may change of a cgroup.
func controlFiles() []string {
	return []string{"cpu.weight", "cpu.idle", "cpu.max", "cpu.max.burst", "cpuset.cpus", "memory.high", "memory.max", "cgroup.subtree_control"}
}

// wantState fails unless everything is as it was.
func (n *node) wantState(before []string) {
	n.t.Helper()
	if after := n.state(); !slices.Equal(before, after) {
		n.t.Errorf("before:\n%s\nafter:\n%s", strings.Join(before, "\n"), strings.Join(after, "\n"))
	}
}

// scrape reads the metrics: series as they are printed, with labels by name.
func (n *node) scrape() map[string]float64 {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), commandLimit)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+n.metrics+"/metrics", nil)
	if err != nil {
		n.t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		n.t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		n.t.Fatalf("scrape: %s", resp.Status)
	}
	all := map[string]float64{}
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		l := lines.Text()
		if strings.HasPrefix(l, "#") {
			continue
		}
		i := strings.LastIndexByte(l, ' ')
		v, err := strconv.ParseFloat(l[i+1:], 64)
		if err != nil {
			n.t.Fatalf("scrape: %q: %v", l, err)
		}
		all[l[:i]] = v
	}
	return all
}
