package kerneltest

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Mailbox is a socket of a client that descriptors can be passed to (SCM_RIGHTS,
// unix(7)), by clients of the same network namespace.
type Mailbox struct {
	c    *Client
	fd   int
	addr string
}

// Mailbox makes a client's mailbox.
func (c *Client) Mailbox() Mailbox {
	c.t.Helper()
	a := c.must(request{Op: "mailbox"})
	return Mailbox{c, a.FD, a.Addr}
}

// Post passes a descriptor to a mailbox, where it is held until it is collected. The
// sender keeps its own.
func (c *Client) Post(to Mailbox, fd int) {
	c.t.Helper()
	c.must(request{Op: "post", FD: fd, Addr: to.addr})
}

// Collect receives a descriptor that was posted.
func (m Mailbox) Collect() (fd int) {
	m.c.t.Helper()
	return m.c.must(request{Op: "collect", FD: m.fd}).FD
}

func mailbox() (fd int, addr string, err error) {
	fd, err = unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, "", err
	}
	// No address asks for a free abstract one.
	if err := unix.Bind(fd, &unix.SockaddrUnix{}); err != nil {
		return -1, "", err
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return -1, "", err
	}
	return fd, sa.(*unix.SockaddrUnix).Name, nil
}

func post(addr string, fd int) error {
	from, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(from)
	return unix.Sendmsg(from, []byte("x"), unix.UnixRights(fd), &unix.SockaddrUnix{Name: addr}, 0)
}

func collect(fd int) (int, error) {
	rights := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(fd, make([]byte, 1), rights, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return -1, err
	}
	messages, err := unix.ParseSocketControlMessage(rights[:n])
	if err != nil || len(messages) != 1 {
		return -1, fmt.Errorf("%d control messages: %w", len(messages), errors.Join(err))
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return -1, fmt.Errorf("%d descriptors: %w", len(fds), errors.Join(err))
	}
	return fds[0], nil
}

// fastOpen is connect and send in one (RFC 7413; MSG_FASTOPEN in tcp(7)).
func fastOpen(fd int, addr string, size int) error {
	sa, err := sockaddr(addr)
	if err != nil {
		return err
	}
	return unix.Sendto(fd, make([]byte, size), unix.MSG_FASTOPEN, sa)
}
