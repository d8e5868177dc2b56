package sockets

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
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
	for _, family := range []struct{ name, client, server string }{
		{"ipv4", "10.77.0.1", "10.77.0.2"},
		{"ipv6", "fd77::1", "fd77::2"},
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
						if measure(t, newLink(t, offload), family.client, family.server, load.run) {
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
func measure(t *testing.T, link link, client, server string, load func(client, server end) error) bool {
	p := link.connect(t, client, server)
	if err := load(end{link.client, p.client}, end{link.server, p.server}); err != nil {
		t.Fatal(err)
	}
	var s Socket
	poll(t, func() error {
		// The last packets may be in flight: read until nothing changes.
		before := *link.count
		if err := link.count.read(); err != nil {
			t.Fatal(err)
		}
		s = link.socket(t, p.client)
		if link.count.tx != before.tx || link.count.rx != before.rx {
			return errors.New("packets keep coming")
		}
		return nil
	})
	disorder := disorder(t, p.client) + disorder(t, p.server)
	if err := within(s, link.count.tx, link.count.rx, disorder > 0); err != nil {
		if disorder > 0 {
			return false
		}
		t.Fatal(err)
	}
	t.Logf("packets: tx %d rx %d; rule: tx %+.4f %%, rx %+.4f %%", link.count.tx, link.count.rx,
		percent(s.TxBytes, link.count.tx), percent(s.RxBytes, link.count.rx))
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
	off := max(math.Abs(percent(s.TxBytes, tx)), math.Abs(percent(s.RxBytes, rx)))
	if disorder {
		off = math.Abs(percent(s.TxBytes+s.RxBytes, tx+rx))
	}
	if off > 0.5 {
		return fmt.Errorf("tx %d rx %d by the rule, %d and %d by the packets: %.3f %% apart", s.TxBytes, s.RxBytes, tx, rx, off)
	}
	return nil
}

func percent(got, truth uint64) float64 {
	return 100 * (float64(got) - float64(truth)) / float64(truth)
}

// end is a connection's end and the thread that works it.
type end struct {
	thread
	net.Conn
}

func bulk(from, to end, n int64) error {
	sent := make(chan error, 1)
	go func() {
		sent <- from.do(func() error {
			_, err := io.CopyN(from, zeros{}, n)
			return err
		})
	}()
	err := to.do(func() error {
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
			err := leg[0].do(func() error {
				_, err := leg[0].Write(b)
				return err
			})
			if err != nil {
				return err
			}
			err = leg[1].do(func() error {
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

// link is a veth pair between two namespaces with a packet counter on the
// client's end. All that happens on it happens on one processor: a veth pair
// reorders the packets of a sender that moves between two, and then SACK
// blocks and repeats, which Bytes cannot see, come and go with the scheduler.
type link struct {
	client, server thread
	count          *counter
}

func newLink(t *testing.T, offload bool) link {
	t.Helper()
	l := link{client: newNetns(t), server: newNetns(t)}
	for _, th := range []thread{l.client, l.server} {
		th.mustDo(t, pin)
	}
	var peer int
	l.server.mustDo(t, func() (err error) {
		peer, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		return err
	})
	defer unix.Close(peer)
	l.client.mustDo(t, func() error {
		err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "client", MTU: 1500},
			PeerName: "server", PeerNamespace: netlink.NsFd(peer)})
		if err != nil {
			return fmt.Errorf("veth pair: %w", err)
		}
		return nil
	})
	for _, end := range []struct {
		thread
		name      string
		addresses []string
	}{
		{l.client, "client", []string{"10.77.0.1/24", "fd77::1/64"}},
		{l.server, "server", []string{"10.77.0.2/24", "fd77::2/64"}},
	} {
		end.mustDo(t, func() error { return linkUp(end.name, end.addresses, offload) })
	}
	// A device drops what it is given until its carrier has been noticed, up to
	// a second later, and a SYN sent again has options that Bytes cannot know of.
	poll(t, func() error {
		return errors.Join(l.client.do(func() error { return carrier("client") }), l.server.do(func() error { return carrier("server") }))
	})
	l.client.mustDo(t, func() (err error) {
		l.count, err = newCounter("client")
		return err
	})
	t.Cleanup(func() { unix.Close(l.count.fd) })
	return l
}

// pin keeps the calling thread on the first processor it may use.
func pin() error {
	var may, first unix.CPUSet
	if err := unix.SchedGetaffinity(0, &may); err != nil {
		return os.NewSyscallError("sched_getaffinity", err)
	}
	for cpu := 0; first.Count() == 0; cpu++ {
		if may.IsSet(cpu) {
			first.Set(cpu)
		}
	}
	return os.NewSyscallError("sched_setaffinity", unix.SchedSetaffinity(0, &first))
}

func linkUp(name string, addresses []string, offload bool) error {
	dev, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	if !offload {
		for _, command := range []uint32{unix.ETHTOOL_STSO, unix.ETHTOOL_SGSO, unix.ETHTOOL_SGRO} {
			if err := ethtool(name, command, 0); err != nil {
				return err
			}
		}
	}
	if err := netlink.LinkSetUp(dev); err != nil {
		return err
	}
	for _, a := range addresses {
		addr, err := netlink.ParseAddr(a)
		if err != nil {
			return err
		}
		addr.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrAdd(dev, addr); err != nil {
			return fmt.Errorf("add %s: %w", a, err)
		}
	}
	return nil
}

func carrier(name string) error {
	dev, err := netlink.LinkByName(name)
	if err == nil && dev.Attrs().OperState != netlink.OperUp {
		err = fmt.Errorf("%s is %s, not up", name, dev.Attrs().OperState)
	}
	return err
}

// ethtool sets one offload of a device (man 4 netdevice, linux/ethtool.h).
func ethtool(name string, command, value uint32) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	data := [2]uint32{command, value}
	var request struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}
	copy(request.name[:], name)
	request.data = unsafe.Pointer(&data)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request)))
	runtime.KeepAlive(&data)
	if errno != 0 {
		return fmt.Errorf("ethtool command %#x on %s: %w", command, name, errno)
	}
	return nil
}

// connect opens one connection from client to server.
func (l link) connect(t *testing.T, client, server string) pair {
	t.Helper()
	var p pair
	var listener net.Listener
	l.server.mustDo(t, func() (err error) {
		listener, err = net.Listen("tcp", net.JoinHostPort(server, "0"))
		return err
	})
	defer listener.Close()
	l.client.mustDo(t, func() error {
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
	// Small buffers keep fewer packets in flight than the queue behind a veth
	// holds (net.core.netdev_max_backlog, 1000), so that nothing is lost.
	for _, c := range []*net.TCPConn{p.client, p.server} {
		if err := errors.Join(c.SetReadBuffer(128<<10), c.SetWriteBuffer(128<<10)); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

// socket reads c out of the client's namespace.
func (l link) socket(t *testing.T, c *net.TCPConn) Socket {
	t.Helper()
	var d Dump
	l.client.mustDo(t, func() error {
		d = Read(context.Background(), Namespace{}, unix.IPPROTO_TCP)
		return d.Err
	})
	s, ok := d.Sockets[cookie(t, c, unix.SO_COOKIE)]
	if !ok {
		t.Fatalf("connection %s is not among %d sockets", c.LocalAddr(), len(d.Sockets))
	}
	return s
}

// counter counts the IP bytes of TCP packets that pass a device: for one that
// is still to be segmented, what its segments will have.
type counter struct {
	fd     int
	tx, rx uint64
	buffer [512]byte
}

const (
	vnetHeader = 10 // struct virtio_net_hdr: flags, gso_type, hdr_len, gso_size, ...
	etherSize  = 14
)

func newCounter(device string) (*counter, error) {
	dev, err := net.InterfaceByName(device)
	if err != nil {
		return nil, err
	}
	all := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, unix.ETH_P_ALL))
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("packet socket: %w", err)
	}
	for _, option := range []struct{ level, name, value int }{
		{unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 512 << 20},
		{unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1},
	} {
		if err := unix.SetsockoptInt(fd, option.level, option.name, option.value); err != nil {
			unix.Close(fd)
			return nil, fmt.Errorf("packet socket: %w", err)
		}
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: dev.Index}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("packet socket: %w", err)
	}
	return &counter{fd: fd}, nil
}

// read counts the packets that have come in since.
func (c *counter) read() error {
	for {
		n, from, err := unix.Recvfrom(c.fd, c.buffer[:], unix.MSG_TRUNC)
		if errors.Is(err, unix.EAGAIN) {
			break
		}
		if err != nil {
			return os.NewSyscallError("recvfrom", err)
		}
		packet := c.buffer[vnetHeader+etherSize:]
		var proto byte
		header := 0
		switch binary.BigEndian.Uint16(c.buffer[vnetHeader+12:]) {
		case unix.ETH_P_IP:
			proto, header = packet[9], int(packet[0]&15)*4
		case unix.ETH_P_IPV6:
			proto, header = packet[6], 40
		}
		if proto != unix.IPPROTO_TCP {
			continue
		}
		header += int(packet[header+12]>>4) * 4
		size := uint64(n - vnetHeader - etherSize)
		if segment := int(binary.NativeEndian.Uint16(c.buffer[4:])); c.buffer[1] != 0 {
			segments := (int(size) - header + segment - 1) / segment
			size += uint64((segments - 1) * header)
		} else if size > 1500 {
			return fmt.Errorf("packet of %d bytes on a link of 1500", size)
		}
		if from.(*unix.SockaddrLinklayer).Pkttype == unix.PACKET_OUTGOING {
			c.tx += size
		} else {
			c.rx += size
		}
	}
	lost, err := unix.GetsockoptTpacketStats(c.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
	if err != nil {
		return os.NewSyscallError("packet statistics", err)
	}
	if lost.Drops != 0 {
		return fmt.Errorf("packet counter lost %d packets", lost.Drops)
	}
	return nil
}

// poll waits until f returns nil, for ten seconds at most.
func poll(t *testing.T, f func() error) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}
