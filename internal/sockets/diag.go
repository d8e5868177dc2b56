package sockets

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Socket is one socket of a namespace.
type Socket struct {
	// Cookie names the socket for as long as the machine runs: SO_COOKIE, and
	// bpf_get_socket_cookie in the kernel programs.
	Cookie uint64
	// Proto is unix.IPPROTO_TCP or unix.IPPROTO_UDP.
	Proto uint8
	// State is a TCP state as in linux/tcp_states.h (1 ESTABLISHED, 2
	// SYN_SENT, 8 CLOSE_WAIT, ...). A connected UDP socket is ESTABLISHED,
	// any other is CLOSE.
	State State
	// Local and Remote are IPv4 where the packets are, also on an IPv6 socket.
	Local, Remote netip.AddrPort
	// UID owns the socket. Inode is that of its descriptor, 0 if it has none.
	UID, Inode uint32
	// Cgroup is the id of the cgroup that the socket was made in, 0 if the kernel
	// does not tell (before 5.9).
	Cgroup uint64
	// Subflow: it is a path of MPTCP, which the application's own socket is above. Told
	// to who has CAP_NET_ADMIN.
	Subflow bool
	// TxBytes and RxBytes are IP bytes, headers included (see Bytes); 0 for
	// UDP, whose sockets keep no such counts.
	TxBytes, RxBytes uint64
	// LastSent and LastReceived are the times since data last went out and
	// came in, or since the connection was made; milliseconds, TCP only.
	LastSent, LastReceived time.Duration
}

// State is a TCP state, numbered as in linux/tcp_states.h.
type State uint8

// The states that a listed socket can be in. Close is UDP only.
const (
	Established State = iota + 1
	SynSent
	SynRecv
	FinWait1
	FinWait2
	timeWait
	Close
	CloseWait
	LastAck
	Listen
	Closing
)

// String is the state's name as tools print it: "established", "close_wait".
func (s State) String() string {
	names := [...]string{"", "established", "syn_sent", "syn_recv", "fin_wait1", "fin_wait2",
		"time_wait", "close", "close_wait", "last_ack", "listen", "closing"}
	if int(s) < len(names) && s != 0 {
		return names[s]
	}
	return fmt.Sprintf("state_%d", uint8(s))
}

// Layout of linux/inet_diag.h, which x/sys/unix does not have.
const (
	sizeofRequest = 56 // struct inet_diag_req_v2
	sizeofMessage = 72 // struct inet_diag_msg
	attrInfo      = 2  // INET_DIAG_INFO, the protocol's own tcp_info
	attrULP       = 19 // INET_DIAG_ULP_INFO: the name of who is above TCP, and more
	attrCgroup    = 21 // INET_DIAG_CGROUP_ID, 8 bytes
	timerTimeWait = 3  // idiag_timer of a TIME_WAIT stand-in
	// States asked for: all but TIME_WAIT (a busy node has tens of thousands)
	// and those past 11, which are no states of a connection
	// (NEW_SYN_RECV is asked for as SYN_RECV; BOUND_INACTIVE, 6.8, is CLOSE).
	wantedStates = (1<<(Closing+1) - 1) &^ (1 << timeWait)
	// A kernel that reports less than this of tcp_info is older than 4.19.
	minInfo = int(unsafe.Offsetof(unix.TCPInfo{}.Bytes_sent)) + 8
)

// request is the netlink message that asks for every socket of one protocol
// and family in the namespace of the netlink socket that it is sent on.
func request(seq uint32, family, proto uint8) []byte {
	b := make([]byte, 0, unix.SizeofNlMsghdr+sizeofRequest)
	b = binary.NativeEndian.AppendUint32(b, unix.SizeofNlMsghdr+sizeofRequest)
	b = binary.NativeEndian.AppendUint16(b, unix.SOCK_DIAG_BY_FAMILY)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST|unix.NLM_F_DUMP)
	b = binary.NativeEndian.AppendUint32(b, seq)
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = append(b, family, proto, 1<<(attrInfo-1), 0)
	b = binary.NativeEndian.AppendUint32(b, wantedStates)
	return b[:cap(b)] // the address filter stays zero: it is not looked at in a dump
}

// drain reads the answer to request seq to its end and passes each of its
// socket messages to each. It returns nil only if the kernel said that the
// dump is done, without an error and without having been interrupted: a dump
// can fail in its last message after looking like an empty success
// (a missing module does), and says only by a flag that it is inconsistent.
func drain(receive func() ([]byte, error), seq uint32, each func([]byte) error) error {
	interrupted := false
	for {
		b, err := receive()
		if err != nil {
			return err
		}
		messages, err := syscall.ParseNetlinkMessage(b)
		if err != nil {
			return fmt.Errorf("malformed netlink message: %w", err)
		}
		if len(messages) == 0 {
			return errors.New("empty netlink message")
		}
		for _, m := range messages {
			if m.Header.Seq != seq {
				return fmt.Errorf("netlink answer to request %d, expected %d", m.Header.Seq, seq)
			}
			if m.Header.Flags&unix.NLM_F_DUMP_INTR != 0 {
				interrupted = true
			}
			switch m.Header.Type {
			case unix.SOCK_DIAG_BY_FAMILY:
				if err := each(m.Data); err != nil {
					return err
				}
			case unix.NLMSG_NOOP:
			case unix.NLMSG_DONE, unix.NLMSG_ERROR:
				if len(m.Data) < 4 {
					return errors.New("netlink dump ended without a result")
				}
				result := int32(binary.NativeEndian.Uint32(m.Data))
				switch {
				case result < 0:
					return syscall.Errno(-result)
				case m.Header.Type == unix.NLMSG_ERROR:
					return errors.New("netlink acknowledged a dump instead of answering it")
				case interrupted:
					return ErrInterrupted
				}
				return nil
			default:
				return fmt.Errorf("unexpected netlink message of type %d", m.Header.Type)
			}
		}
	}
}

// parse turns one socket message of a dump of proto into a Socket. It returns
// false for a TIME_WAIT stand-in.
func parse(b []byte, proto uint8) (Socket, bool, error) {
	if len(b) < sizeofMessage {
		return Socket{}, false, fmt.Errorf("socket message of %d bytes, expected %d or more", len(b), sizeofMessage)
	}
	// Offsets in struct inet_diag_msg; ports and addresses are big endian.
	if b[2] == timerTimeWait || State(b[1]) == timeWait {
		return Socket{}, false, nil
	}
	s := Socket{
		Cookie: uint64(binary.NativeEndian.Uint32(b[44:])) | uint64(binary.NativeEndian.Uint32(b[48:]))<<32,
		Proto:  proto,
		State:  State(b[1]),
		UID:    binary.NativeEndian.Uint32(b[64:]),
		Inode:  binary.NativeEndian.Uint32(b[68:]),
	}
	var local, remote netip.Addr
	switch family := b[0]; family {
	case unix.AF_INET:
		local = netip.AddrFrom4([4]byte(b[8:]))
		remote = netip.AddrFrom4([4]byte(b[24:]))
	case unix.AF_INET6:
		local = netip.AddrFrom16([16]byte(b[8:])).Unmap()
		remote = netip.AddrFrom16([16]byte(b[24:])).Unmap()
	default:
		return Socket{}, false, fmt.Errorf("socket message of address family %d", family)
	}
	s.Local = netip.AddrPortFrom(local, binary.BigEndian.Uint16(b[4:]))
	s.Remote = netip.AddrPortFrom(remote, binary.BigEndian.Uint16(b[6:]))
	for attrs := b[sizeofMessage:]; len(attrs) >= unix.SizeofRtAttr; {
		n := int(binary.NativeEndian.Uint16(attrs))
		if n < unix.SizeofRtAttr || n > len(attrs) {
			return Socket{}, false, fmt.Errorf("socket message with an attribute of %d bytes in %d", n, len(attrs))
		}
		kind := binary.NativeEndian.Uint16(attrs[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
		if kind == attrCgroup && n >= unix.SizeofRtAttr+8 {
			s.Cgroup = binary.NativeEndian.Uint64(attrs[unix.SizeofRtAttr:])
		}
		if kind == attrULP {
			s.Subflow = bytes.Contains(attrs[unix.SizeofRtAttr:n], []byte("mptcp\x00"))
		}
		if kind == attrInfo && proto == unix.IPPROTO_TCP {
			raw := attrs[unix.SizeofRtAttr:n]
			if len(raw) < minInfo {
				return Socket{}, false, fmt.Errorf("tcp_info of %d bytes, expected %d or more (kernel 4.19)", len(raw), minInfo)
			}
			// The kernel's struct only grows at its end.
			var info unix.TCPInfo
			copy(unsafe.Slice((*byte)(unsafe.Pointer(&info)), unsafe.Sizeof(info)), raw)
			if s.State != Listen {
				s.TxBytes, s.RxBytes = Bytes(&info, remote.Is6())
				s.LastSent = time.Duration(info.Last_data_sent) * time.Millisecond
				s.LastReceived = time.Duration(info.Last_data_recv) * time.Millisecond
			}
		}
		attrs = attrs[min((n+3)&^3, len(attrs)):]
	}
	return s, true, nil
}
