package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"time"
)

// ErrNoAgent: nobody listens on the admin socket.
var ErrNoAgent = errors.New("no agent answers")

// infoTimeout is how long a running agent may take to say something of itself.
const infoTimeout = 2 * time.Second

// Client talks to the agent on an admin socket.
type Client struct {
	socket string
	http   *http.Client
}

// NewClient returns a client for the socket at a path. It connects when asked.
func NewClient(socket string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socket)
	}
	return &Client{socket: socket, http: &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}}
}

// Info asks the agent what it says of itself; ErrNoAgent if nobody listens, another
// error if who does has not answered within two seconds.
func (c *Client) Info(ctx context.Context) (Info, error) {
	ctx, cancel := context.WithTimeout(ctx, infoTimeout)
	defer cancel()
	var info Info
	err := c.do(ctx, http.MethodGet, "/v1/info", &info)
	return info, err
}

// Reload makes the agent reload and waits for the outcome.
func (c *Client) Reload(ctx context.Context) (Outcome, error) {
	var out Outcome
	err := c.do(ctx, http.MethodPost, "/v1/reload", &out)
	return out, err
}

// Stop makes the agent stop. It is still running when Stop returns.
func (c *Client) Stop(ctx context.Context) (Info, error) {
	var info Info
	err := c.do(ctx, http.MethodPost, "/v1/stop", &info)
	return info, err
}

func (c *Client) do(ctx context.Context, method, path string, into any) error {
	req, err := http.NewRequestWithContext(ctx, method, "http://agent"+path, nil)
	if err != nil {
		return err
	}
	resp, err := c.http.Do(req)
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("%w on %s", ErrNoAgent, c.socket)
	case errors.Is(err, os.ErrPermission):
		return fmt.Errorf("ask the agent on %s: %w (needs root)", c.socket, os.ErrPermission)
	case err != nil:
		return fmt.Errorf("ask the agent on %s: %w", c.socket, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
		return fmt.Errorf("ask the agent on %s: %s: %s", c.socket, resp.Status, strings.TrimSpace(string(text)))
	}
	if err := json.NewDecoder(resp.Body).Decode(into); err != nil {
		return fmt.Errorf("ask the agent on %s: %w", c.socket, err)
	}
	return nil
}
