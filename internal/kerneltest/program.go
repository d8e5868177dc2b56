package kerneltest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Command is a program that was not written for us, in a cgroup; the test is skipped
// where it is not installed. It is never outside the cgroup, and killed when the test ends
// if it still runs.
func (e *Env) Command(in Cgroup, name string, args ...string) *exec.Cmd {
	e.t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		e.t.Skipf("not installed: %s", name)
	}
	dir, err := os.Open(in.Path)
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() { dir.Close() })
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	cmd := exec.CommandContext(ctx, path, args...)
	e.t.Cleanup(func() {
		cancel()
		if cmd.Process != nil {
			cmd.Wait()
		}
	})
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	return cmd
}

// Hosts makes names known, to every process that the test starts, until it ends: lines of
// hosts(5). Only names, so that nothing asks a server.
func Hosts(t testing.TB, lines string) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{"hosts": lines, "nsswitch.conf": "hosts: files\n"} {
		from, to := filepath.Join(dir, name), filepath.Join("/etc", name)
		err := os.WriteFile(from, []byte(text), 0o644)
		if _, missing := os.Stat(to); err == nil && errors.Is(missing, os.ErrNotExist) {
			if err = os.WriteFile(to, nil, 0o644); err == nil {
				t.Cleanup(func() { os.Remove(to) })
			}
		}
		if err == nil {
			err = os.NewSyscallError("mount", unix.Mount(from, to, "", unix.MS_BIND, "")) // in our mount namespace only
		}
		if err != nil {
			t.Fatalf("make names known: %v", err)
		}
		t.Cleanup(func() {
			if err := unix.Unmount(to, unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
		})
	}
}

// Requests makes n requests at the same moment with Go's HTTP client, of "http/1" or
// "http/2" (without TLS), and returns how many were answered; the first error's errno if
// one failed. Connections stay idle in the client's pool until CloseIdle.
func (c *Client) Requests(protocol, addr string, n int) (answered int, errno syscall.Errno) {
	c.t.Helper()
	a := c.call(request{Op: "requests", Name: protocol, Addr: addr, N: n})
	return a.N, a.Errno
}

// CloseIdle closes the connections of the client's pool.
func (c *Client) CloseIdle() {
	c.t.Helper()
	c.must(request{Op: "idle"})
}

// DialName connects to a name's addresses as Go's net.Dialer does, and returns the
// address that was reached. The connection is open until the client ends.
func (c *Client) DialName(name string) (remote string, errno syscall.Errno) {
	c.t.Helper()
	a := c.call(request{Op: "dial name", Addr: name})
	return a.Addr, a.Errno
}

// LookUp asks Go's resolver for a name's addresses.
func (c *Client) LookUp(name string) syscall.Errno {
	c.t.Helper()
	return c.call(request{Op: "look up", Name: name}).Errno
}

func (c *child) requests(protocol, addr string, n int) (int, error) {
	if c.http == nil {
		c.http = &http.Transport{MaxIdleConnsPerHost: n, IdleConnTimeout: time.Hour, Protocols: &http.Protocols{}}
		c.http.Protocols.SetHTTP1(protocol == "http/1")
		c.http.Protocols.SetUnencryptedHTTP2(protocol == "http/2")
	}
	client := http.Client{Transport: c.http}
	var all sync.WaitGroup
	var mu sync.Mutex
	var first error
	answered := 0
	for range n {
		all.Go(func() {
			r, err := client.Get("http://" + addr + "/")
			if err == nil {
				_, err = io.Copy(io.Discard, r.Body)
				r.Body.Close()
			}
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				answered++
			} else if first == nil {
				first = err
			}
		})
	}
	all.Wait()
	if first != nil {
		first = fmt.Errorf("request: %w", first)
	}
	return answered, first
}

func (c *child) dialName(addr string) (string, error) {
	conn, err := (&net.Dialer{}).Dial("tcp", addr)
	if err != nil {
		return "", err
	}
	c.conns = append(c.conns, conn)
	return conn.RemoteAddr().String(), nil
}
