package demo

import (
	"context"
	"errors"
	"flag"
	"io"
	"net"
	"net/http"
	"time"
)

// provide serves calls, so many at once, in order of arrival. A call
// takes as long as its query says (?work=100ms), plus its time in the queue.
// It writes {} to out when it listens.
func provide(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet(providerCommand, flag.ContinueOnError)
	listen := flags.String("listen", "", "address")
	serveAtOnce := flags.Int("serve-at-once", 20, "calls worked on at one time")
	if err := flags.Parse(args); err != nil {
		return err
	}
	l, err := net.Listen("tcp", *listen)
	if err != nil {
		return err
	}
	srv := &http.Server{Handler: newProvider(*serveAtOnce), BaseContext: func(net.Listener) context.Context { return ctx }}
	if _, err := io.WriteString(out, "{}\n"); err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { srv.Close() })()
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// newProvider returns the provider's handler.
func newProvider(serveAtOnce int) http.Handler {
	// Senders that wait on a full channel are served first come, first served.
	places := make(chan struct{}, serveAtOnce)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		work, err := time.ParseDuration(r.URL.Query().Get("work"))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		select {
		case places <- struct{}{}:
			defer func() { <-places }()
		case <-r.Context().Done():
			return
		}
		select {
		case <-time.After(work):
			io.WriteString(w, "done\n")
		case <-r.Context().Done():
		}
	})
}
