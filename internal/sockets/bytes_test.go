package sockets

import (
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
)

// The rule itself, by hand.
func TestBytes(t *testing.T) {
	established := func(options uint8) unix.TCPInfo {
		return unix.TCPInfo{State: uint8(Established), Options: options,
			Segs_out: 10, Bytes_sent: 1000, Segs_in: 8, Bytes_received: 500}
	}
	all := uint8(optTimestamps | optSACK | optWindow)
	for _, c := range []struct {
		name   string
		info   unix.TCPInfo
		v6     bool
		tx, rx uint64
	}{
		{"nothing sent", unix.TCPInfo{State: uint8(SynSent)}, false, 0, 0},
		{"syn, sent three times", unix.TCPInfo{State: uint8(SynSent), Segs_out: 3}, false, 3 * 60, 0},
		{"syn over ipv6", unix.TCPInfo{State: uint8(SynSent), Segs_out: 1}, true, 80, 0},
		{"ipv4", established(all), false, 60 + 9*52 + 1000, 60 + 7*52 + 500},
		{"ipv6", established(all), true, 80 + 9*72 + 1000, 80 + 7*72 + 500},
		{"peer without timestamps", established(optSACK | optWindow), false, 60 + 9*40 + 1000, 52 + 7*40 + 500},
		{"peer without any option but MSS", established(0), false, 60 + 9*40 + 1000, 44 + 7*40 + 500},
	} {
		if tx, rx := Bytes(&c.info, c.v6); tx != c.tx || rx != c.rx {
			t.Errorf("%s: got tx %d rx %d, expected %d and %d", c.name, tx, rx, c.tx, c.rx)
		}
	}
}

// The rule against the packets on a link, with and without segmentation
// offload.
func TestBytesAgainstPackets(t *testing.T) {
	for _, family := range []struct{ name, server string }{
		{"ipv4", kerneltest.WireServer4},
		{"ipv6", kerneltest.WireServer6},
	} {
		for _, offload := range []bool{true, false} {
			for _, load := range []struct {
				name string
				run  func(client, server end) error
			}{
				{"upload", func(c, s end) error { return bulk(c, s, 4<<20) }},
				{"download", func(c, s end) error { return bulk(s, c, 4<<20) }},
				{"requests", func(c, s end) error { return requests(c, s, 1000, 64) }},
				{"one request", func(c, s end) error { return requests(c, s, 1, 300) }},
			} {
				t.Run(fmt.Sprintf("%s/offload=%v/%s", family.name, offload, load.name), func(t *testing.T) {
					// A machine under load delays packets until they are sent
					// again, and of five packets that is a lot.
					for range 5 {
						if measure(t, kerneltest.NewWire(t, offload), family.server, load.run) {
							return
						}
					}
					t.Fatal("packets were sent again, and the rule is off, in each of 5 connections")
				})
			}
		}
	}
}

// measure loads one connection and compares the rule with its packets. It
// returns false if they differ and packets were sent again.
func measure(t *testing.T, wire *kerneltest.Wire, server string, load func(client, server end) error) bool {
	p := connect(t, wire, server)
	if err := load(end{wire.Client, p.client}, end{wire.Server, p.server}); err != nil {
		t.Fatal(err)
	}
	var s Socket
	kerneltest.Poll(t, "the last packets have arrived", func() error {
		// The socket between two reads of an idle wire.
		if err := wire.Count.Read(); err != nil {
			return err
		}
		s = socket(t, wire, p.client)
		return wire.Count.Idle()
	})
	disorder := disorder(t, p.client) + disorder(t, p.server)
	if err := within(s, wire.Count.Tx, wire.Count.Rx, disorder > 0); err != nil {
		if disorder > 0 {
			return false
		}
		t.Fatal(err)
	}
	t.Logf("packets: tx %d rx %d; rule: tx %+.4f %%, rx %+.4f %%", wire.Count.Tx, wire.Count.Rx,
		kerneltest.Percent(s.TxBytes, wire.Count.Tx), kerneltest.Percent(s.RxBytes, wire.Count.Rx))
	return true
}

// disorder is the number of packets that c has sent again or received out of
// order.
func disorder(t *testing.T, c *net.TCPConn) uint32 {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var info *unix.TCPInfo
	var soErr error
	err = raw.Control(func(fd uintptr) { info, soErr = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) })
	if err := errors.Join(err, soErr); err != nil {
		t.Fatal(err)
	}
	return info.Total_retrans + info.Rcv_ooopack
}

// within compares the rule with the packets: half a percent in each direction,
// or, if packets were out of order, of both together, since SACK blocks are
// then a part of the little that acknowledgements are.
func within(s Socket, tx, rx uint64, disorder bool) error {
	off := max(math.Abs(kerneltest.Percent(s.TxBytes, tx)), math.Abs(kerneltest.Percent(s.RxBytes, rx)))
	if disorder {
		off = math.Abs(kerneltest.Percent(s.TxBytes+s.RxBytes, tx+rx))
	}
	if off > 0.5 {
		return fmt.Errorf("tx %d rx %d by the rule, %d and %d by the packets: %.3f %% apart", s.TxBytes, s.RxBytes, tx, rx, off)
	}
	return nil
}

// end is a connection's end and the namespace whose thread works it.
type end struct {
	*kerneltest.Netns
	net.Conn
}

func bulk(from, to end, n int64) error {
	sent := make(chan error, 1)
	go func() {
		sent <- from.Try(func() error {
			_, err := io.CopyN(from, zeros{}, n)
			return err
		})
	}()
	err := to.Try(func() error {
		_, err := io.CopyN(io.Discard, to, n)
		return err
	})
	return errors.Join(err, <-sent)
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

func requests(client, server end, n, size int) error {
	b := make([]byte, size)
	for range n {
		for _, leg := range [][2]end{{client, server}, {server, client}} {
			err := leg[0].Try(func() error {
				_, err := leg[0].Write(b)
				return err
			})
			if err != nil {
				return err
			}
			err = leg[1].Try(func() error {
				_, err := io.ReadFull(leg[1], b)
				return err
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// connect opens one connection from the client to an address of the server.
func connect(t *testing.T, wire *kerneltest.Wire, server string) pair {
	t.Helper()
	var p pair
	var listener net.Listener
	wire.Server.Do(func() (err error) {
		listener, err = net.Listen("tcp", net.JoinHostPort(server, "0"))
		return err
	})
	defer listener.Close()
	wire.Client.Do(func() error {
		c, err := net.DialTimeout("tcp", listener.Addr().String(), 10*time.Second)
		if err != nil {
			return err
		}
		p.client = c.(*net.TCPConn)
		return nil
	})
	s, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	p.server = s.(*net.TCPConn)
	t.Cleanup(func() { p.client.Close(); p.server.Close() })
	return p
}

// socket reads c out of the client's namespace.
func socket(t *testing.T, wire *kerneltest.Wire, c *net.TCPConn) Socket {
	t.Helper()
	d := complete(t, readOwn(t, wire.Client, unix.IPPROTO_TCP))
	s, ok := d.Sockets[cookie(t, c, unix.SO_COOKIE)]
	if !ok {
		t.Fatalf("connection %s is not among %d sockets", c.LocalAddr(), len(d.Sockets))
	}
	return s
}
