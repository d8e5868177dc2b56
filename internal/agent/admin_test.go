package agent

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// serving serves an admin socket that answers with pid and out.
func serving(t *testing.T, path string, pid int, out Outcome) (stopped <-chan struct{}) {
	t.Helper()
	l, err := listenAdmin(context.Background(), path)
	must(t, err)
	stop := make(chan struct{}, 1)
	s := adminServer(asked{
		info:   func() Info { return Info{PID: pid, Version: "v1"} },
		reload: func(context.Context) (Outcome, error) { return out, nil },
		stop:   func() { stop <- struct{}{} },
	}, slog.New(slog.NewTextHandler(t.Output(), nil)))
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	t.Cleanup(func() { s.Close(); <-done })
	return stop
}

// TestReloadTimeout: an agent that does not answer does not keep the command for ever.
func TestReloadTimeout(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "agent.sock")
	l, err := net.Listen("unix", socket) // nobody accepts
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c := NewClient(socket)
	c.reloadTimeout = 10 * time.Millisecond
	if _, err := c.Reload(t.Context()); err == nil || !strings.Contains(err.Error(), "has not answered for 10ms") {
		t.Errorf("got %v", err)
	}
}

func TestAdminSocket(t *testing.T) {
	ctx := context.Background()
	path := filepath.Join(t.TempDir(), "run", "agent.sock")
	c := NewClient(path)
	if _, err := c.Info(ctx); !errors.Is(err, ErrNoAgent) {
		t.Errorf("without a socket: %v", err)
	}
	stopped := serving(t, path, 4711, Outcome{Generation: 7, Error: "p.yaml:1:2: no", Warnings: []string{"w"}})

	info, err := os.Stat(path)
	must(t, err)
	if info.Mode().Perm() != 0o600 {
		t.Errorf("mode of the socket: %v", info.Mode())
	}
	dir, err := os.Stat(filepath.Dir(path))
	must(t, err)
	if dir.Mode().Perm() != 0o755 {
		t.Errorf("mode of its directory: %v", dir.Mode())
	}
	if i, err := c.Info(ctx); err != nil || i.PID != 4711 {
		t.Errorf("info: %+v %v", i, err)
	}
	if out, err := c.Reload(ctx); err != nil || out.Generation != 7 || out.Error != "p.yaml:1:2: no" {
		t.Errorf("reload: %+v %v", out, err)
	}
	if _, err := c.Stop(ctx); err != nil {
		t.Errorf("stop: %v", err)
	}
	<-stopped

	// A second agent names the first.
	if _, err := listenAdmin(ctx, path); err == nil || !strings.Contains(err.Error(), "4711") {
		t.Errorf("second agent on the socket: %v", err)
	}
}

// TestStaleSocket: what a killed agent leaves is replaced; anything else is not
// touched.
func TestStaleSocket(t *testing.T) {
	ctx := context.Background()
	path := filepath.Join(t.TempDir(), "agent.sock")
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	must(t, err)
	dead.SetUnlinkOnClose(false)
	must(t, dead.Close())
	if _, err := NewClient(path).Info(ctx); !errors.Is(err, ErrNoAgent) {
		t.Errorf("socket of a dead agent: %v", err)
	}
	l, err := listenAdmin(ctx, path)
	must(t, err)
	must(t, l.Close())

	write(t, path, "precious")
	if _, err := listenAdmin(ctx, path); err == nil {
		t.Error("replaced a file that is no socket")
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != "precious" {
		t.Errorf("the file: %q %v", text, err)
	}
}
