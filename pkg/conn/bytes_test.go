package conn

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"testing"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
)

// Bytes of open and of closed connections, against the packets on the wire: within half
// a percent, with segmentation offload and without, and never less than before.
func TestBytes(t *testing.T) {
	const mega = 1 << 20
	type load struct {
		name string
		run  func(client, server *kerneltest.Client, c, s int)
	}
	bulk := func(from, to *kerneltest.Client, a, b int) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			to.Download(b, 20*mega)
		}()
		from.Upload(a, 20*mega)
		<-done
	}
	loads := []load{
		{"upload", func(client, server *kerneltest.Client, c, s int) { bulk(client, server, c, s) }},
		{"download", func(client, server *kerneltest.Client, c, s int) { bulk(server, client, s, c) }},
		{"requests", func(client, server *kerneltest.Client, c, s int) {
			for range 100 { // each a few milliseconds in an emulated machine
				client.Upload(c, 64)
				server.Download(s, 64)
				server.Upload(s, 64)
				client.Download(c, 64)
			}
		}},
	}
	in := newInstance(t)
	plan := planOf(t, `
providers:
  p: {cidrs: [10.77.0.0/24, "fd77::/64"]}
features:
  f: {class: batch}
`)
	cg := in.Mkdir("f")
	in.apply(plan, member(t, plan, cg, "f", ""))
	for _, offload := range []bool{true, false} {
		wire := newWire(t, offload)
		client, server := in.startIn(wire.client, cg), in.startIn(wire.server, in.Mkdir("server"))
		// A veth pair reorders the packets of a sender that moves between processors.
		client.Pin(0)
		server.Pin(0)
		for _, kind := range []struct {
			kerneltest.Kind
			addr string
		}{{kerneltest.TCP4, "10.77.0.2:0"}, {kerneltest.TCP6, "[fd77::2]:0"}} {
			l := server.Socket(kind.Kind)
			server.Bind(l, kind.addr)
			addr := server.Listen(l)
			for _, load := range loads {
				for _, end := range []string{"close", "reset", "the server closes first"} {
					if load.name != "requests" && end != "close" {
						continue
					}
					t.Run(fmt.Sprintf("%s/offload=%v/%s/%s", kind.Kind, offload, load.name, end), func(t *testing.T) {
						in := &instance{T: t, Env: in.With(t), o: in.o, k: in.k}
						wire.count.tx, wire.count.rx = 0, 0
						before := in.traffic("f", "", "p")
						c := client.MustDial(kind.Kind, addr)
						s := server.Accept(l)
						load.run(client, server, c, s)
						last := in.agrees(wire, before, before, "open")
						switch end {
						case "close":
							client.Close(c)
							server.Close(s)
						case "reset":
							client.Reset(c)
							server.Close(s)
						default:
							server.Close(s)
							client.Close(c)
						}
						in.empty("after the close")
						in.agrees(wire, before, last, "closed")
					})
				}
			}
		}
		client.Kill()
		server.Kill()
	}
}

// agrees waits until the wire is idle and compares what was counted since before with
// what passed on it.
func (in *instance) agrees(wire *wire, before, last Traffic, when string) (now Traffic) {
	in.Helper()
	kerneltest.Poll(in, when, func() error {
		passed := wire.count.tx + wire.count.rx
		if err := wire.count.read(); err != nil {
			in.Fatal(err)
		}
		if wire.count.tx+wire.count.rx != passed {
			return errors.New("the wire is not idle")
		}
		now = in.traffic("f", "", "p")
		if now.TxBytes < last.TxBytes || now.RxBytes < last.RxBytes {
			in.Fatalf("%s: %+v, less than %+v", when, now, last)
		}
		last = now
		tx, rx := now.TxBytes-before.TxBytes, now.RxBytes-before.RxBytes
		for _, d := range []float64{percent(tx, wire.count.tx), percent(rx, wire.count.rx)} {
			if d < -0.5 || d > 0.5 {
				return fmt.Errorf("%d and %d bytes on the wire, %d and %d counted: more than 0.5 %% apart", wire.count.tx, wire.count.rx, tx, rx)
			}
		}
		return nil
	})
	in.Logf("%s: %d out (%+.4f %%), %d in (%+.4f %%)", when, wire.count.tx, percent(now.TxBytes-before.TxBytes, wire.count.tx),
		wire.count.rx, percent(now.RxBytes-before.RxBytes, wire.count.rx))
	return now
}

func percent(got, truth uint64) float64 {
	return 100 * (float64(got) - float64(truth)) / float64(truth)
}

// wire is a veth pair between two namespaces, with a counter at the client's end.
type wire struct {
	client, server *kerneltest.Netns
	count          *counter
}

func newWire(t *testing.T, offload bool) *wire {
	t.Helper()
	w := &wire{client: kerneltest.NewNetns(t), server: kerneltest.NewNetns(t)}
	var peer int
	w.server.Do(func() (err error) {
		peer, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		return err
	})
	defer unix.Close(peer)
	w.client.Do(func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "client", MTU: 1500}, PeerName: "server", PeerNamespace: netlink.NsFd(peer)})
	})
	w.client.Do(func() error { return plug("client", offload, "10.77.0.1/24", "fd77::1/64") })
	w.server.Do(func() error { return plug("server", offload, "10.77.0.2/24", "fd77::2/64") })
	w.client.Do(func() (err error) {
		w.count, err = newCounter("client")
		return err
	})
	t.Cleanup(func() { unix.Close(w.count.fd) })
	return w
}

// plug brings one end up.
func plug(name string, offload bool, addrs ...string) error {
	// Small buffers keep fewer packets in flight than the queue behind a veth holds
	// (net.core.netdev_max_backlog, 1000), so that nothing is lost.
	for _, f := range []string{"tcp_rmem", "tcp_wmem"} {
		if err := os.WriteFile("/proc/sys/net/ipv4/"+f, []byte("4096 65536 131072"), 0); err != nil {
			return err
		}
	}
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
	for _, a := range addrs {
		addr, err := netlink.ParseAddr(a)
		if err != nil {
			return err
		}
		addr.Flags = unix.IFA_F_NODAD // else it is of no use for a second
		if err := netlink.AddrAdd(dev, addr); err != nil {
			return fmt.Errorf("add %s: %w", a, err)
		}
	}
	return nil
}

// ethtool sets one value of a device (linux/ethtool.h).
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

// counter counts the IP bytes of TCP packets on a device; of one that is still to be cut
// into segments, what the segments will have.
type counter struct {
	fd     int
	tx, rx uint64
	buffer [256]byte
}

// Before each packet: struct virtio_net_hdr (flags, gso_type, hdr_len, gso_size, ...)
// and the Ethernet header.
const (
	vnetHeader  = 10
	etherHeader = 14
)

func newCounter(device string) (*counter, error) {
	dev, err := net.InterfaceByName(device)
	if err != nil {
		return nil, err
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("packet socket: %w", err)
	}
	all := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, unix.ETH_P_ALL))
	err = errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 512<<20),
		unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1),
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: dev.Index}))
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("packet socket: %w", err)
	}
	return &counter{fd: fd}, nil
}

func (c *counter) read() error {
	for {
		n, from, err := unix.Recvfrom(c.fd, c.buffer[:], unix.MSG_TRUNC)
		if errors.Is(err, unix.EAGAIN) {
			break
		}
		if err != nil {
			return os.NewSyscallError("recvfrom", err)
		}
		packet := c.buffer[vnetHeader+etherHeader:]
		header, proto := 0, byte(0)
		switch binary.BigEndian.Uint16(c.buffer[vnetHeader+12:]) {
		case unix.ETH_P_IP:
			header, proto = int(packet[0]&15)*4, packet[9]
		case unix.ETH_P_IPV6:
			header, proto = 40, packet[6]
		}
		if proto != unix.IPPROTO_TCP {
			continue
		}
		header += int(packet[header+12]>>4) * 4
		size := n - vnetHeader - etherHeader
		if segment := int(binary.NativeEndian.Uint16(c.buffer[4:])); c.buffer[1] != 0 {
			size += ((size-header+segment-1)/segment - 1) * header
		}
		if from.(*unix.SockaddrLinklayer).Pkttype == unix.PACKET_OUTGOING {
			c.tx += uint64(size)
		} else {
			c.rx += uint64(size)
		}
	}
	lost, err := unix.GetsockoptTpacketStats(c.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
	if err != nil {
		return os.NewSyscallError("packet statistics", err)
	}
	if lost.Drops != 0 {
		return fmt.Errorf("the counter lost %d packets", lost.Drops)
	}
	return nil
}

// However a connection ends, what was counted of it while it was open is still counted
// when it is closed: a counter that falls by one byte is a restart to whoever reads it.
func TestBytesNeverFall(t *testing.T) {
	runAll(t, test{"closed in SYN_SENT", func(in *instance) {
		client, _ := two(in)
		blackHole(in, "127.1.0.9")
		fd := client.Socket(kerneltest.TCP4)
		client.NonBlocking(fd)
		client.Connect(fd, "127.1.0.9:81")
		neverFalls(in, func() { client.Close(fd) })
	}}, test{"reset without data", func(in *instance) {
		client, _ := two(in)
		fd := client.MustDial(kerneltest.TCP4, "127.1.0.1:80")
		neverFalls(in, func() { client.Reset(fd) })
	}}, test{"reset by the server", func(in *instance) {
		client, servers := two(in)
		fd := client.MustDial(kerneltest.TCP4, "127.1.0.1:80")
		client.Upload(fd, 1000)
		kerneltest.Poll(in, "the server has it", func() error {
			if servers["p"].Open() == 0 {
				return errors.New("not accepted")
			}
			return nil
		})
		neverFalls(in, func() { servers["p"].Hangup(true) })
	}}, test{"reset with data that was never read", func(in *instance) {
		client, _ := two(in)
		release := make(chan struct{})
		server := kerneltest.Serve(in, "127.1.0.2:80", func(net.Conn) { <-release })
		defer close(release)
		fd := client.MustDial(kerneltest.TCP4, server.Addr)
		client.NonBlocking(fd)
		for client.SendTo(fd, "", 64<<10) == 0 {
		}
		neverFalls(in, func() { client.Reset(fd) })
	}}, test{"AF_UNSPEC", func(in *instance) {
		client, _ := two(in)
		fd := client.MustDial(kerneltest.TCP4, "127.1.0.1:80")
		client.Upload(fd, 1000)
		neverFalls(in, func() { client.Disconnect(fd) })
	}})
}

func neverFalls(in *instance, end func()) {
	in.Helper()
	var open Traffic
	kerneltest.Poll(in, "what is in flight has arrived", func() error {
		last := open
		if open = in.traffic("f", "", "p"); open != last || open.TxBytes == 0 {
			return fmt.Errorf("was %+v, is %+v", last, open)
		}
		return nil
	})
	end()
	in.empty("after the end")
	if closed := in.traffic("f", "", "p"); closed.TxBytes < open.TxBytes || closed.RxBytes < open.RxBytes {
		in.Errorf("%d and %d bytes while open, %d and %d once closed", open.TxBytes, open.RxBytes, closed.TxBytes, closed.RxBytes)
	}
}
