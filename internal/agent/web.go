package agent

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"syscall"
	"time"

	"github.com/prometheus/exporter-toolkit/web"
)

// webServer is the metrics listener.
type webServer struct {
	listeners []net.Listener
	config    string
}

// listenWeb listens on every address, or on none. config is the path of a web
// configuration file (TLS, users) as in the Prometheus exporter toolkit, or "".
func listenWeb(addresses []string, config string) (*webServer, error) {
	if err := web.Validate(config); err != nil {
		return nil, fmt.Errorf("web configuration %s: %w", config, err)
	}
	s := &webServer{config: config}
	for _, a := range addresses {
		// Go takes "" for any port on every address.
		if _, _, err := net.SplitHostPort(a); err != nil {
			s.close()
			return nil, fmt.Errorf("--web.listen-address %q is not ADDRESS:PORT: %w", a, err)
		}
		l, err := net.Listen("tcp", a)
		if err != nil {
			s.close()
			if op := (*net.OpError)(nil); errors.As(err, &op) {
				err = op.Err // without the address once more
			}
			return nil, fmt.Errorf("--web.listen-address %s: %w%s", a, err, listenCure(err))
		}
		s.listeners = append(s.listeners, l)
	}
	return s, nil
}

// listenCure says what to do about an address that cannot be had.
func listenCure(err error) string {
	if errors.Is(err, syscall.EADDRINUSE) {
		return " (stop what listens there, ss -ltnp shows it, or give another address)"
	}
	return " (give another address)"
}

func (s *webServer) close() {
	for _, l := range s.listeners {
		l.Close()
	}
}

// serve serves until the listeners are closed or one of them fails.
func (s *webServer) serve(metrics http.Handler, log *slog.Logger) error {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metrics)
	mux.HandleFunc("GET /-/healthy", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok\n") })
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, "bulkhead agent: see /metrics\n")
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	systemd := false
	return web.ServeMultiple(s.listeners, server, &web.FlagConfig{WebConfigFile: &s.config, WebSystemdSocket: &systemd}, log)
}
