package kerneltest

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
)

// Server accepts connections in the test process until the test ends.
type Server struct {
	Addr string

	listener net.Listener
	mu       sync.Mutex
	conns    map[net.Conn]struct{}
	closed   bool
	done     sync.WaitGroup
}

// Serve listens on a TCP address and runs handle for every connection, which is
// closed when it returns. Port 0 is any free one; Addr has the one it got.
func Serve(t testing.TB, addr string, handle func(net.Conn)) *Server {
	t.Helper()
	s, err := listen(addr, false, handle)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// ServeMPTCP is Serve for clients that speak MPTCP.
func ServeMPTCP(t testing.TB, addr string, handle func(net.Conn)) *Server {
	t.Helper()
	s, err := listen(addr, true, handle)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func listen(addr string, mptcp bool, handle func(net.Conn)) (*Server, error) {
	var lc net.ListenConfig
	lc.SetMultipathTCP(mptcp)
	l, err := lc.Listen(context.Background(), "tcp", addr)
	if err != nil {
		return nil, err
	}
	s := &Server{Addr: l.Addr().String(), listener: l, conns: map[net.Conn]struct{}{}}
	s.done.Go(func() {
		for {
			c, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				continue // a connection that was reset before it was accepted
			}
			if !s.add(c) {
				return
			}
			s.done.Go(func() {
				defer s.remove(c)
				handle(c)
			})
		}
	})
	return s, nil
}

func (s *Server) add(c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		c.Close()
		return false
	}
	s.conns[c] = struct{}{}
	return true
}

func (s *Server) remove(c net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
	c.Close()
}

// Open is the number of connections that are open on this side.
func (s *Server) Open() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

// Hangup closes every connection that is open; with reset, by a RST.
func (s *Server) Hangup(reset bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		if tcp, ok := c.(*net.TCPConn); ok && reset {
			tcp.SetLinger(0)
		}
		c.Close()
	}
}

// Close ends the server and its connections.
func (s *Server) Close() {
	s.listener.Close()
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.Hangup(false)
	s.done.Wait()
}

// Drain reads until the client closes: it holds a connection for as long as the
// client does.
func Drain(c net.Conn) { io.Copy(io.Discard, c) }

// Echo sends back what it reads.
func Echo(c net.Conn) { io.Copy(c, c) }

// Hangup closes at once.
func Hangup(net.Conn) {}

// Pour sends zeros for as long as the client reads.
func Pour(c net.Conn) {
	for b := make([]byte, 64<<10); ; {
		if _, err := c.Write(b); err != nil {
			return
		}
	}
}
