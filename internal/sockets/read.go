package sockets

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Why a Dump is not complete; test with errors.Is.
var (
	// ErrInterrupted: sockets changed under the dump and the kernel says so
	// (NLM_F_DUMP_INTR), each time it was tried.
	ErrInterrupted = errors.New("socket dump was interrupted")
	// ErrUnreachable: nothing on this machine that we may look at leads into
	// the namespace.
	ErrUnreachable = errors.New("network namespace cannot be entered")
	// ErrNowhere: as ErrUnreachable, and there was nothing that we could not look at.
	ErrNowhere = fmt.Errorf("%w: nothing leads there", ErrUnreachable)
	// ErrNoDiag: the kernel has no sock_diag for the protocol.
	ErrNoDiag = errors.New("kernel has no sock_diag for the protocol (modules inet_diag, tcp_diag, udp_diag)")
)

const (
	// attempts for one dump that is interrupted.
	attempts = 3
	// The kernel answers from memory; this bounds a hang, not a slow dump.
	receiveTimeout = 10 * time.Second
	// The largest message that the kernel builds for a dump is 32 KiB.
	receiveBuffer = 64 << 10
)

// Dump is what one reading of a namespace's sockets gave.
type Dump struct {
	Namespace
	// Sockets by cookie: all of them if Complete, else those seen before Err.
	Sockets map[uint64]Socket
	// Complete says that a cookie which is missing from Sockets was not in the
	// kernel's tables.
	Complete bool
	// Err says why the dump is not complete; nil if it is.
	Err error
}

// Read reads the sockets of the given protocols (unix.IPPROTO_TCP, _UDP) in
// one namespace. If ns has a cookie and its path leads to another namespace by
// now, the Dump is empty, not complete, and says so.
func Read(ctx context.Context, ns Namespace, protos ...uint8) Dump {
	d := Dump{Namespace: ns}
	read := func(found Namespace, fd int) {
		if ns.Cookie != 0 && ns.Cookie != found.Cookie {
			d.Err = fmt.Errorf("%w: %s leads to the one with cookie %d", ErrUnreachable, ns, found.Cookie)
			return
		}
		d = dump(ctx, found, fd, protos)
	}
	if ns.Path == "" {
		_, _, err := visitOwn(func(found Namespace, fd int) bool {
			read(found, fd)
			return true
		})
		if err != nil {
			d.Err = err
		}
		return d
	}
	fd, found, err := enter(ns)
	if err != nil {
		d.Err = fmt.Errorf("%w: %w", ErrUnreachable, err)
		return d
	}
	defer unix.Close(fd)
	read(found, fd)
	return d
}

// ReadAll reads the caller's own namespace and those whose cookies are wanted,
// and enters no more than it must to find them. The result has the own one
// first and then exactly one Dump for each other wanted cookie, in no order;
// those that nothing leads to have Err ErrUnreachable.
func ReadAll(ctx context.Context, wanted map[uint64]struct{}, protos ...uint8) []Dump {
	missing := make(map[uint64]struct{}, len(wanted))
	for cookie := range wanted {
		missing[cookie] = struct{}{}
	}
	var dumps []Dump
	err := visit(nil, func(ns Namespace, fd int) bool {
		if _, ok := missing[ns.Cookie]; ok || ns.Path == "" {
			dumps = append(dumps, dump(ctx, ns, fd, protos))
			delete(missing, ns.Cookie)
		}
		return len(missing) > 0 && ctx.Err() == nil
	})
	if len(dumps) == 0 {
		dumps = append(dumps, Dump{Err: err})
	}
	for cookie := range missing {
		d := Dump{Namespace: Namespace{Cookie: cookie}, Err: ErrNowhere}
		if cause := errors.Join(ctx.Err(), err); cause != nil {
			d.Err = fmt.Errorf("%w: %w", ErrUnreachable, cause)
		}
		dumps = append(dumps, d)
	}
	return dumps
}

// ReadEvery reads every namespace that can be entered, the own one first. The error says
// what kept some from being found.
func ReadEvery(ctx context.Context, protos ...uint8) ([]Dump, error) {
	var dumps []Dump
	inodes, noted := map[uint64]bool{}, 0
	known := func(inode uint64) bool {
		for ; noted < len(dumps); noted++ {
			for _, s := range dumps[noted].Sockets {
				inodes[uint64(s.Inode)] = true
			}
		}
		return inodes[inode]
	}
	err := visit(known, func(ns Namespace, fd int) bool {
		dumps = append(dumps, dump(ctx, ns, fd, protos))
		return ctx.Err() == nil
	})
	return dumps, errors.Join(err, ctx.Err())
}

// dump reads all sockets of protos through fd.
func dump(ctx context.Context, ns Namespace, fd int, protos []uint8) Dump {
	d := Dump{Namespace: ns, Sockets: map[uint64]Socket{}}
	timeout := unix.NsecToTimeval(receiveTimeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
		d.Err = fmt.Errorf("%s: set timeout: %w", ns, err)
		return d
	}
	receive := receiver(ctx, fd)
	seq := uint32(0)
	for _, proto := range protos {
		// IPv6 first: a socket can change into an IPv4 one (IPV6_ADDRFORM),
		// never back, so it cannot be missed between the two.
		for _, family := range []uint8{unix.AF_INET6, unix.AF_INET} {
			err := retry(func() error {
				seq++
				return dumpFamily(fd, receive, seq, family, proto, d.Sockets)
			})
			if errors.Is(err, unix.ENOENT) {
				err = fmt.Errorf("%w: %w", ErrNoDiag, err)
			}
			if err != nil {
				d.Err = fmt.Errorf("%s: sock_diag of protocol %d, address family %d: %w", ns, proto, family, err)
				return d
			}
		}
	}
	d.Complete = true
	return d
}

// retry tries f again for as long as it is interrupted, up to attempts times.
func retry(f func() error) (err error) {
	for range attempts {
		if err = f(); !errors.Is(err, ErrInterrupted) {
			break
		}
	}
	return err
}

// dumpFamily adds the sockets of one protocol and family to sockets.
func dumpFamily(fd int, receive func() ([]byte, error), seq uint32, family, proto uint8, sockets map[uint64]Socket) error {
	kernel := &unix.SockaddrNetlink{Family: unix.AF_NETLINK}
	if err := unix.Sendto(fd, request(seq, family, proto), 0, kernel); err != nil {
		return fmt.Errorf("send request: %w", err)
	}
	return drain(receive, seq, func(b []byte) error {
		s, ok, err := parse(b, proto)
		if ok {
			sockets[s.Cookie] = s
		}
		return err
	})
}

// receiver returns a function that reads the next message from fd into a
// buffer that the message after it overwrites.
func receiver(ctx context.Context, fd int) func() ([]byte, error) {
	buffer := make([]byte, receiveBuffer)
	return func() ([]byte, error) {
		for {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			n, _, flags, from, err := unix.Recvmsg(fd, buffer, nil, 0)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil {
				return nil, fmt.Errorf("receive: %w", err)
			}
			if flags&unix.MSG_TRUNC != 0 {
				return nil, fmt.Errorf("netlink message does not fit into %d bytes", len(buffer))
			}
			if sender, ok := from.(*unix.SockaddrNetlink); !ok || sender.Pid != 0 {
				continue // not from the kernel: anybody may send to a netlink socket
			}
			return buffer[:n], nil
		}
	}
}
