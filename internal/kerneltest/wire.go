package kerneltest

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
)

// The addresses of a Wire's ends, in a /24 and a /64.
const (
	WireClient4, WireServer4 = "10.77.0.1", "10.77.0.2"
	WireClient6, WireServer6 = "fd77::1", "fd77::2"
)

// wireMTU is that of Ethernet.
const wireMTU = 1500

// Wire is a veth pair between two network namespaces with a packet counter at the
// client's end. What is started in the namespaces runs on one processor: a veth pair
// reorders the packets of a sender that moves between two, and then SACK blocks and
// repeats come and go with the scheduler.
type Wire struct {
	Client, Server *Netns
	Count          *Counter
}

// NewWire makes a wire, with segmentation offload or without, that lasts as long as the
// test.
func NewWire(t testing.TB, offload bool) *Wire {
	t.Helper()
	w := &Wire{Client: NewNetns(t), Server: NewNetns(t)}
	w.Client.Do(pinFirst)
	w.Server.Do(pinFirst)
	var peer int
	w.Server.Do(func() (err error) {
		peer, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		return err
	})
	defer unix.Close(peer)
	w.Client.Do(func() error {
		err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "client", MTU: wireMTU}, PeerName: "server", PeerNamespace: netlink.NsFd(peer)})
		if err != nil {
			return fmt.Errorf("veth pair: %w", err)
		}
		return nil
	})
	w.Client.Do(func() error { return plug("client", offload, WireClient4+"/24", WireClient6+"/64") })
	w.Server.Do(func() error { return plug("server", offload, WireServer4+"/24", WireServer6+"/64") })
	// A device drops what it is given until its carrier has been noticed, up to a second
	// later, and a SYN that is sent again has other options.
	Poll(t, "the wire is up", func() error {
		return errors.Join(w.Client.Try(func() error { return carrier("client") }), w.Server.Try(func() error { return carrier("server") }))
	})
	w.Client.Do(func() (err error) {
		w.Count, err = newCounter("client")
		return err
	})
	t.Cleanup(func() { unix.Close(w.Count.fd) })
	return w
}

// pinFirst keeps the calling thread, and the processes that it starts, on the first
// processor that it may use.
func pinFirst() error {
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

func carrier(name string) error {
	dev, err := netlink.LinkByName(name)
	if err == nil && dev.Attrs().OperState != netlink.OperUp {
		err = fmt.Errorf("%s is %s, not up", name, dev.Attrs().OperState)
	}
	return err
}

// ethtool sets one value of a device (netdevice(7), linux/ethtool.h).
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

// Counter counts the IP bytes of TCP packets that pass a device; of one that is still to
// be cut into segments, what its segments will have.
type Counter struct {
	Tx, Rx uint64 // as of the last Read

	fd     int
	lost   uint32
	buffer [512]byte
}

// Before each packet: struct virtio_net_hdr (flags, gso_type, hdr_len, gso_size, ...)
// and the Ethernet header.
const (
	vnetHeader  = 10
	etherHeader = 14
)

func newCounter(device string) (*Counter, error) {
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
	return &Counter{fd: fd}, nil
}

// Read counts the packets that have passed since the last Read.
func (c *Counter) Read() error {
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
		} else if size > wireMTU {
			return fmt.Errorf("packet of %d bytes on a wire of %d", size, wireMTU)
		}
		if from.(*unix.SockaddrLinklayer).Pkttype == unix.PACKET_OUTGOING {
			c.Tx += uint64(size)
		} else {
			c.Rx += uint64(size)
		}
	}
	lost, err := unix.GetsockoptTpacketStats(c.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
	if err != nil {
		return os.NewSyscallError("packet statistics", err)
	}
	c.lost += lost.Drops // the kernel's number starts again
	if c.lost != 0 {
		return fmt.Errorf("the counter lost %d packets", c.lost)
	}
	return nil
}

// Idle reads until no packet has passed since the read before; it is for Poll.
func (c *Counter) Idle() error {
	tx, rx := c.Tx, c.Rx
	if err := c.Read(); err != nil {
		return err
	}
	if c.Tx != tx || c.Rx != rx {
		return errors.New("packets keep coming")
	}
	return nil
}

// Percent is how far a number is from the truth, in percent of that.
func Percent(got, truth uint64) float64 {
	return 100 * (float64(got) - float64(truth)) / float64(truth)
}
