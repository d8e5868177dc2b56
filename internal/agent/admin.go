package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"bulkhead/internal/containers"
	"bulkhead/internal/metrics"
	"bulkhead/pkg/cgroup"
)

// Info is what an agent says of itself: GET /v1/info on the admin socket.
type Info struct {
	Version string    `json:"version"`
	PID     int       `json:"pid"`
	Since   time.Time `json:"since"`
	// Policy is the path that the agent reads.
	Policy string `json:"policy"`
	// Generation and PolicyHash are of the plan in force.
	Generation uint32 `json:"generation"`
	PolicyHash string `json:"policy_hash"`
	// Conditions are shortfalls; none if all is well.
	Conditions []cgroup.Condition `json:"conditions"`
	// LastReload is the last policy that was tried.
	LastReload      Outcome `json:"last_reload"`
	ReloadFailures  uint64  `json:"reload_failures"`
	SlotsReclaimed  uint64  `json:"slots_reclaimed"`
	ReconcileErrors uint64  `json:"reconcile_errors"`
	// Processes is about those that match by what they are.
	Processes Processes `json:"processes"`
	// Runtimes are the container runtimes that are asked, none if no feature matches containers;
	// Containers are those whose cgroups match.
	Runtimes   []containers.Runtime `json:"container_runtimes"`
	Containers []AdoptedContainer   `json:"containers"`
	// ValuesCorrected are values that others changed and the agent put back, since it runs:
	// one for each compartment, and one without a feature for the parent slice.
	ValuesCorrected []metrics.Corrected `json:"values_corrected"`
}

// Outcome is how a reload ended: the answer to POST /v1/reload.
type Outcome struct {
	Time time.Time `json:"time"`
	// Trigger is start, SIGHUP, request or file.
	Trigger string `json:"trigger"`
	// Generation in force afterwards: a new one, or the old if there is an error.
	Generation uint32 `json:"generation"`
	// Error is "" if the policy came into force; else it may have several lines,
	// FILE:LINE:COL: MESSAGE.
	Error    string   `json:"error"`
	Warnings []string `json:"warnings"`
}

// listenAdmin listens on the admin socket. The socket of an agent that died is
// replaced; that of one that answers is an error with its pid.
func listenAdmin(ctx context.Context, path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("admin socket: %w%s", err, needsRoot(err))
	}
	if info, err := os.Lstat(path); err == nil {
		if info.Mode().Type() != os.ModeSocket {
			return nil, fmt.Errorf("admin socket %s: there is something else of that name, which is not removed", path)
		}
		other, err := NewClient(path).Info(ctx)
		switch {
		case err == nil:
			return nil, fmt.Errorf("admin socket %s: agent %d answers there; stop it, or give this one its own --admin-socket", path, other.PID)
		case !errors.Is(err, ErrNoAgent):
			return nil, fmt.Errorf("admin socket %s: something listens there that does not answer as an agent does: %w", path, err)
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("admin socket: replace that of an agent that is gone: %w", err)
		}
	}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		// bind(2) gives the file the socket's own mode (net/unix/af_unix.c), so
		// there is no moment at which others could connect.
		var err error
		if cerr := c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) }); cerr != nil {
			return cerr
		}
		return err
	}}
	l, err := lc.Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("admin socket: %w%s", err, needsRoot(err))
	}
	return l, nil
}

// needsRoot is the cure for an error of permission. The ready file and the admin
// socket are the first things that an agent without root fails at.
func needsRoot(err error) string {
	if errors.Is(err, os.ErrPermission) {
		return " (the agent needs root)"
	}
	return ""
}

// asked is what the admin socket needs of the agent. All three may be called
// at any time from any goroutine.
type asked struct {
	info func() Info
	// reload waits until the owner has reloaded, or ctx is done.
	reload func(ctx context.Context) (Outcome, error)
	// stop makes the agent stop and returns at once.
	stop func()
}

func adminServer(a asked, log *slog.Logger) *http.Server {
	mux := http.NewServeMux()
	answer := func(w http.ResponseWriter, v any) {
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(v); err != nil {
			log.Warn("answer on the admin socket", "error", err.Error())
		}
	}
	mux.HandleFunc("GET /v1/info", func(w http.ResponseWriter, _ *http.Request) { answer(w, a.info()) })
	mux.HandleFunc("POST /v1/reload", func(w http.ResponseWriter, r *http.Request) {
		out, err := a.reload(r.Context())
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		answer(w, out)
	})
	mux.HandleFunc("POST /v1/stop", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, a.info())
		a.stop()
	})
	return &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
}
