package e2e

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"bulkhead/internal/kerneltest"
)

// shares is the main job: batch gets 12 of the provider's 20 places.
const shares = `
apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers:
  deepseek: {cidrs: [@1/32], ports: [8000], limits: {connections: 20}}
  qwen:     {cidrs: [@2/32], ports: [8000], limits: {connections: 15}}
features:
  chat:  {class: realtime}
  batch: {class: batch, providers: {deepseek: {connections: 12}}}
`

// A flood of batch calls gets its own share and chat does not notice; every view says
// the same.
func TestFlood(t *testing.T) {
	n := newNode(t)
	server := n.serve(1)
	n.write(shares)
	n.start()
	batch, chat := n.client("batch"), n.client("chat")

	passed := 0
	for _, r := range batch.Burst(kerneltest.TCP4, n.addr(1), 60) {
		switch r.Errno {
		case 0:
			passed++
		case syscall.ECONNREFUSED:
		default:
			t.Errorf("connect: %v", r.Errno)
		}
	}
	if passed != 12 {
		t.Errorf("%d of batch's 60 passed, want 12", passed)
	}
	if passed := dials(t, chat, n.addr(1), 8, 0); len(passed) != 8 {
		t.Errorf("%d of chat's 8 passed", len(passed))
	}
	kerneltest.Poll(t, "the provider has them all", func() error {
		if open := server.Open(); open != 20 {
			return fmt.Errorf("%d", open)
		}
		return nil
	})
	// The most specific full bulkhead is the one that a refusal is counted on.
	wantDial(t, chat, syscall.ECONNREFUSED, n.addr(1))
	wantDial(t, batch, syscall.ECONNREFUSED, n.addr(1))

	n.wantCounts(map[string]counts{
		"feature_provider batch/deepseek": {12, 12, 12, 12, 49},
		"feature batch":                   {unlimited, 12, 12, 12, 0},
		"feature chat":                    {unlimited, 8, 8, 8, 0},
		"provider deepseek":               {20, 20, 20, 20, 1},
		"provider qwen":                   {15, 0, 0, 0, 0},
		"feature default":                 {unlimited, 0, 0, 0, 0},
	})
	s := n.status()
	if b, c := s.connections("batch", "deepseek"), s.connections("chat", "deepseek"); b != 12 || c != 8 {
		t.Errorf("connections_total of batch and chat: %d and %d, want 12 and 8", b, c)
	}
	n.wantAgreement()

	held := map[string]int{}
	for _, c := range n.conns() {
		held[fmt.Sprintf("%d %s %s %s", c.PID, c.Feature, c.Provider, c.Address)]++
	}
	want := map[string]int{
		fmt.Sprintf("%d batch deepseek %s", batch.PID, n.addr(1)): 12,
		fmt.Sprintf("%d chat deepseek %s", chat.PID, n.addr(1)):   8,
	}
	if fmt.Sprint(held) != fmt.Sprint(want) {
		t.Errorf("conns: %v, want %v", held, want)
	}

	// It names who is full, and who would be.
	why := n.must("explain", "--from", fmt.Sprint(batch.PID), "--to", n.addr(1))
	wantWords(t, why, "compartment batch", "provider deepseek", "refused now with ECONNREFUSED: feature_provider batch/deepseek is full")
	wantFields(t, why, "feature_provider batch/deepseek 12 12 (ECONNREFUSED)", "feature batch 12 unlimited", "provider deepseek 20 20 (ECONNREFUSED)")
	why = n.must("explain", "--from", fmt.Sprint(chat.PID), "--to", n.addr(2))
	wantWords(t, why, "compartment chat", "provider qwen", "let through now")

	// Who gives up makes room, and only there.
	batch.Kill()
	kerneltest.Poll(t, "batch's slots are free", func() error {
		if b := n.status().find("feature_provider batch/deepseek"); b.InUse != 0 || b.Peak != 12 {
			return fmt.Errorf("in_use %d, peak %d", b.InUse, b.Peak)
		}
		return nil
	})
	n.wantCounts(map[string]counts{"provider deepseek": {20, 8, 20, 20, 1}, "feature chat": {unlimited, 8, 8, 8, 0}})
}

// wantFields fails unless text has each line, whatever blanks its columns are filled
// with.
func wantFields(t testing.TB, text string, lines ...string) {
	t.Helper()
	have := map[string]bool{}
	for l := range strings.Lines(text) {
		have[strings.Join(strings.Fields(l), " ")] = true
	}
	for _, l := range lines {
		if !have[l] {
			t.Errorf("want the line %q in\n%s", l, text)
		}
	}
}

// holder is a program in Python that knows nothing of bulkhead: it holds what it gets.
const holder = `
import socket, sys
host, port, n = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
held, refused = [], 0
for _ in range(n):
    s = socket.socket()
    try:
        s.connect((host, port))
        held.append(s)
    except ConnectionRefusedError:
        refused += 1
print(len(held), refused, flush=True)
sys.stdin.read()
`

// Programs that were not written for us get the same: those of the list that are
// installed, of which there must be one.
func TestRealPrograms(t *testing.T) {
	n := newNode(t)
	kerneltest.Serve(t, n.addr(1), func(c net.Conn) {
		if _, err := bufio.NewReader(c).ReadString('\n'); err == nil {
			io.WriteString(c, "HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n")
		}
	})
	n.write(shares)
	n.start()

	if _, err := exec.LookPath("python3"); err == nil {
		host, port, _ := net.SplitHostPort(n.addr(1))
		p := n.program("batch", "python3", "-c", holder, host, port, "60")
		if got := p.line(); got != "12 48\n" {
			t.Errorf("Python: %q passed and were refused, want 12 48", got)
		}
		n.wantCounts(map[string]counts{"feature_provider batch/deepseek": {12, 12, 12, 12, 48}})
	} else {
		dials(t, n.client("batch"), n.addr(1), 13, syscall.ECONNREFUSED)
	}

	url := "http://" + n.addr(1) + "/"
	ran := 0
	for _, args := range [][]string{
		{"curl", "--silent", "--show-error", "--max-time", "10", "--output", os.DevNull, url},
		{"wget", "-q", "-O", os.DevNull, url},
		{"python3", "-c", "import sys, urllib.request as r; r.build_opener(r.ProxyHandler({})).open(sys.argv[1], timeout=10).read()", url},
	} {
		if _, err := exec.LookPath(args[0]); err != nil {
			continue
		}
		ran++
		if r := n.exec("chat", args...); r.code != 0 {
			t.Errorf("chat's %s: %s", args[0], r)
		}
		// Its own code, not ours, and what it says of ECONNREFUSED.
		if r := n.exec("batch", args...); r.code <= 0 || r.code >= 125 {
			t.Errorf("batch's %s, which is full: %s", args[0], r)
		} else if args[0] == "curl" && r.code != 7 {
			t.Errorf("curl should say that it could not connect (7): %s", r)
		}
	}
	if ran == 0 {
		t.Error("neither curl nor wget nor python3 is installed")
	}
	if b := n.status().find("provider deepseek"); b.Accepted != 12+ran || b.InUse != 12 {
		t.Errorf("accepted %d, in_use %d; want %d and 12", b.Accepted, b.InUse, 12+ran)
	}
}

// exec runs a command in a compartment to its end.
func (n *node) exec(feature string, args ...string) result {
	n.t.Helper()
	return n.run(append([]string{"exec", "--feature", feature, "--"}, args...)...)
}

// program is a command in a compartment that runs until its stdin ends.
type program struct {
	*exec.Cmd
	t   testing.TB
	out *bufio.Reader
}

func (n *node) program(feature string, args ...string) *program {
	n.t.Helper()
	args = n.args(append([]string{"exec", "--feature", feature, "--"}, args...)...)
	p := &program{Cmd: exec.Command(args[0], args[1:]...), t: n.t}
	p.Stderr = os.Stderr
	in, err := p.StdinPipe()
	if err != nil {
		n.t.Fatal(err)
	}
	out, err := p.StdoutPipe()
	if err != nil {
		n.t.Fatal(err)
	}
	p.out = bufio.NewReader(out)
	if err := p.Start(); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() {
		in.Close()
		p.Process.Kill()
		p.Wait()
	})
	return p
}

// line is the next line that it prints.
func (p *program) line() string {
	p.t.Helper()
	l, err := p.out.ReadString('\n')
	if err != nil {
		p.t.Fatalf("%s: %v", p.Path, err)
	}
	return l
}
