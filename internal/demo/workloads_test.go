package demo

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// script is a workload that runs as a process of its own.
type script struct {
	stdin  io.WriteCloser
	stdout *json.Decoder
}

// startScript starts a script from the sources and waits until it is ready.
func startScript(t *testing.T, name string, args ...string) script {
	t.Helper()
	path, _, err := findPython(t.Context())
	if err != nil {
		t.Fatalf("these tests need python3: %v", err)
	}
	argv := []string{path, "-IBS", "workloads/" + name}
	if strings.HasSuffix(name, ".js") {
		argv = []string{"node", "workloads/" + name}
	}
	cmd := exec.Command(argv[0], append(argv[1:], args...)...)
	cmd.Env = childEnv(os.Environ())
	cmd.Stderr = t.Output()
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	s := script{in, json.NewDecoder(out)}
	s.read(t, &struct{}{})
	return s
}

func (s script) read(t *testing.T, v any) {
	t.Helper()
	if err := s.stdout.Decode(v); err != nil {
		t.Fatal(err)
	}
}

// app starts the application and returns its address.
func app(t *testing.T, threads string, args ...string) string {
	t.Helper()
	addr := freeAddr(t)
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	startScript(t, "app.py", append([]string{port, threads}, args...)...)
	return "http://" + addr
}

// The application passes on what it calls, and tells a refusal from what went
// wrong in another way, for python3 and for node.
func TestApp(t *testing.T) {
	dependency := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.RawQuery == "bad" {
			http.Error(w, "no", http.StatusTeapot)
		}
		io.WriteString(w, "thanks")
	}))
	defer dependency.Close()
	args := []string{"good=" + dependency.URL, "gone=http://" + freeAddr(t)}
	for name, base := range map[string]string{
		"threads": app(t, "0", append(args, "doc=parse:10")...),
		"pool":    app(t, "2", append(args, "doc=parse:10")...),
		"node":    nodeApp(t, args...),
	} {
		for path, want := range map[string]struct {
			status int
			body   string
		}{
			"good?fine": {200, "thanks"}, "good?bad": {502, "418"}, "gone": {503, "refused"}, "doc": {200, "10"},
		} {
			if base == "" || name == "node" && path == "doc" {
				continue
			}
			resp, err := http.Get(base + "/" + path)
			if err != nil {
				t.Fatal(err)
			}
			body, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if resp.StatusCode != want.status || !strings.Contains(strings.ToLower(string(body)), want.body) {
				t.Errorf("%s: %s: %s %s, want %v", name, path, resp.Status, body, want)
			}
		}
	}
}

// nodeApp starts the application for node; "" if node is not installed.
func nodeApp(t *testing.T, args ...string) string {
	t.Helper()
	if _, _, err := findNode(t.Context()); err != nil {
		t.Logf("without node: %v", err)
		return ""
	}
	addr := freeAddr(t)
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	startScript(t, "app.js", append([]string{port}, args...)...)
	return "http://" + addr
}

// With two threads a third call waits for one of the first two; with a thread
// for each request none does.
func TestAppThreads(t *testing.T) {
	for threads, want := range map[string]int32{"2": 2, "0": 6} {
		var inside, most atomic.Int32
		release := make(chan struct{})
		dependency := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
			if n := inside.Add(1); n > most.Load() {
				most.Store(n)
			}
			<-release
			inside.Add(-1)
		}))
		base := app(t, threads, "x="+dependency.URL)
		ended := make(chan error)
		for range 6 {
			go func() {
				_, err := get(t.Context(), newClient(), base+"/x")
				ended <- err
			}()
		}
		for inside.Load() < want {
			time.Sleep(time.Millisecond)
		}
		// Time enough for one more to come in, if it could.
		for deadline := time.Now().Add(300 * time.Millisecond); inside.Load() <= want && time.Now().Before(deadline); {
			time.Sleep(time.Millisecond)
		}
		close(release)
		for range 6 {
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
		dependency.Close()
		if most.Load() != want {
			t.Errorf("%s threads: %d calls at once, want %d", threads, most.Load(), want)
		}
	}
}

// With --retry a refusal is no answer: the call is tried until it is served.
func TestAppRetries(t *testing.T) {
	addr := freeAddr(t)
	base := app(t, "0", "--retry", "x=http://"+addr)
	answered := make(chan error)
	go func() {
		_, err := get(t.Context(), newClient(), base+"/x")
		answered <- err
	}()
	// It has been refused once it has been started; then somebody listens.
	select {
	case err := <-answered:
		t.Fatalf("answered by nobody: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.NotFoundHandler()}
	srv.Handler = http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
	defer srv.Close()
	go srv.Serve(l)
	if err := <-answered; err != nil {
		t.Error(err)
	}
}

// Batch outlives refusals and failures: it says that it floods while it is
// refused, and a job is over only when it is answered.
func TestBatchRetries(t *testing.T) {
	addr := freeAddr(t)
	b := startScript(t, "batch.py", "http://"+addr, "5", "1")
	io.WriteString(b.stdin, "measure\n")
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	const broken = 10
	var attempts, served atomic.Int64
	enough := make(chan struct{})
	provider := newProvider(5)
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if attempts.Add(1) <= broken {
			http.Error(w, "not now", http.StatusServiceUnavailable)
			return
		}
		provider.ServeHTTP(w, r)
		if served.Add(1) == 30 {
			close(enough)
		}
	})}
	defer srv.Close()
	go srv.Serve(l)
	<-enough
	b.stdin.Close()
	var r loadReport
	b.read(t, &r)
	// The jobs from before the line of input have no latency; the later ones do.
	if r.Done == 0 || len(r.Latencies) == 0 || int64(len(r.Latencies)) > served.Load() || r.Seconds <= 0 || r.Failed == 0 || r.Failed > broken ||
		!strings.Contains(r.Error, "503") {
		t.Errorf("%d were served; %+v", served.Load(), r)
	}
}

// What curl writes is understood, from the curl that is there.
func TestCurl(t *testing.T) {
	path, _, err := findCurl(t.Context())
	if err != nil {
		t.Fatalf("these tests need curl: %v", err)
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/3" {
			http.Error(w, "no", http.StatusTeapot)
		}
	}))
	defer srv.Close()
	out, _ := exec.Command(path, "--silent", "--noproxy", "*", "--parallel", "--parallel-immediate", "--output", "/dev/null",
		"--write-out", curlFormat, srv.URL+"/[1-3]").Output()
	s, err := curlSample(out)
	if err != nil || len(s.Latencies) != 2 || s.Latencies[0] <= 0 || s.Failed != 1 || !strings.Contains(s.Error, "status 418") || len(s.Refused) != 0 {
		t.Errorf("%+v, %v of %s", s, err, out)
	}
	out, _ = exec.Command(path, "--silent", "--noproxy", "*", "--output", "/dev/null", "--write-out", curlFormat, fmt.Sprintf("http://%s/[1-2]", freeAddr(t))).Output()
	s, err = curlSample(out)
	if err != nil || len(s.Refused) != 2 || s.Failed != 0 || len(s.Latencies) != 0 || s.Error == "" {
		t.Errorf("%+v, %v of %s", s, err, out)
	}
	if _, err := curlSample([]byte("call 200\n")); err == nil {
		t.Error("an old curl's line is no error")
	}
}
