package sockets

import (
	"encoding/binary"
	"errors"
	"io"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// message is one netlink message.
func message(kind, flags uint16, seq uint32, data []byte) []byte {
	b := binary.NativeEndian.AppendUint32(nil, uint32(unix.SizeofNlMsghdr+len(data)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = binary.NativeEndian.AppendUint16(b, flags)
	b = binary.NativeEndian.AppendUint32(b, seq)
	b = binary.NativeEndian.AppendUint32(b, 0)
	return append(b, data...)
}

func result(errno int32) []byte { return binary.NativeEndian.AppendUint32(nil, uint32(errno)) }

// inetDiagMsg is a socket message with a cookie of two different halves.
func inetDiagMsg(state, timer byte) []byte {
	b := make([]byte, sizeofMessage)
	b[0], b[1], b[2] = unix.AF_INET, state, timer
	binary.NativeEndian.PutUint32(b[44:], 7)
	binary.NativeEndian.PutUint32(b[48:], 1)
	return b
}

// Only a dump that the kernel calls done, without an error and without having
// been interrupted, is a good one.
func TestDrain(t *testing.T) {
	const multi = unix.NLM_F_MULTI
	socket := message(unix.SOCK_DIAG_BY_FAMILY, multi, 5, inetDiagMsg(1, 0))
	done := message(unix.NLMSG_DONE, multi, 5, result(0))
	for _, c := range []struct {
		name     string
		messages [][]byte
		sockets  int
		err      error  // expected, or
		text     string // part of its text
	}{
		{"nothing open", [][]byte{done}, 0, nil, ""},
		{"one message", [][]byte{append(append([]byte{}, socket...), done...)}, 1, nil, ""},
		{"three messages", [][]byte{socket, append(append([]byte{}, socket...), socket...), done}, 3, nil, ""},
		{"error in an empty dump's last message", [][]byte{message(unix.NLMSG_DONE, multi, 5, result(-int32(unix.ENOENT)))}, 0, unix.ENOENT, ""},
		{"error after some sockets", [][]byte{socket, message(unix.NLMSG_DONE, multi, 5, result(-int32(unix.ENOMEM)))}, 1, unix.ENOMEM, ""},
		{"refused", [][]byte{message(unix.NLMSG_ERROR, 0, 5, result(-int32(unix.EPERM)))}, 0, unix.EPERM, ""},
		{"acknowledged", [][]byte{message(unix.NLMSG_ERROR, 0, 5, result(0))}, 0, nil, "acknowledged"},
		{"interrupted in the middle", [][]byte{socket, message(unix.SOCK_DIAG_BY_FAMILY, multi|unix.NLM_F_DUMP_INTR, 5, inetDiagMsg(1, 0)), done}, 2, ErrInterrupted, ""},
		{"interrupted at the end", [][]byte{socket, message(unix.NLMSG_DONE, multi|unix.NLM_F_DUMP_INTR, 5, result(0))}, 1, ErrInterrupted, ""},
		{"no end", [][]byte{socket}, 1, io.ErrUnexpectedEOF, ""},
		{"end without a result", [][]byte{message(unix.NLMSG_DONE, multi, 5, nil)}, 0, nil, "without a result"},
		{"answer to another request", [][]byte{message(unix.NLMSG_DONE, multi, 4, result(0))}, 0, nil, "request 4"},
		{"overrun", [][]byte{message(unix.NLMSG_OVERRUN, multi, 5, nil)}, 0, nil, "type 4"},
		{"cut short", [][]byte{socket[:len(socket)-4]}, 0, nil, "malformed"},
		{"empty", [][]byte{nil}, 0, nil, "empty"},
		{"socket message too short", [][]byte{message(unix.SOCK_DIAG_BY_FAMILY, multi, 5, make([]byte, 8)), done}, 0, nil, "8 bytes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			sockets, left := 0, c.messages
			err := drain(func() ([]byte, error) {
				if len(left) == 0 {
					return nil, io.ErrUnexpectedEOF
				}
				m := left[0]
				left = left[1:]
				return m, nil
			}, 5, func(b []byte) error {
				_, ok, err := parse(b, unix.IPPROTO_TCP)
				if ok {
					sockets++
				}
				return err
			})
			switch {
			case c.text != "":
				if err == nil || !strings.Contains(err.Error(), c.text) {
					t.Errorf("got error %v, expected one with %q", err, c.text)
				}
			case !errors.Is(err, c.err):
				t.Errorf("got error %v, expected %v", err, c.err)
			}
			if sockets != c.sockets {
				t.Errorf("got %d sockets, expected %d", sockets, c.sockets)
			}
		})
	}
}

// A dump that is interrupted is tried again, and reported if it always is.
func TestInterruptedDumpIsRetried(t *testing.T) {
	for failures, want := range map[int]error{0: nil, attempts - 1: nil, attempts: ErrInterrupted} {
		tried := 0
		err := retry(func() error {
			tried++
			if tried <= failures {
				return ErrInterrupted
			}
			return nil
		})
		if !errors.Is(err, want) || tried != min(failures+1, attempts) {
			t.Errorf("%d interruptions: got %v after %d attempts, expected %v", failures, err, tried, want)
		}
	}
}

func TestParse(t *testing.T) {
	info := func(n int) []byte {
		raw := make([]byte, n)
		full := unix.TCPInfo{State: uint8(Established), Segs_out: 2, Segs_in: 1, Bytes_sent: 10}
		copy(raw, unsafe.Slice((*byte)(unsafe.Pointer(&full)), unsafe.Sizeof(full)))
		b := inetDiagMsg(1, 0)
		b = binary.NativeEndian.AppendUint16(b, uint16(unix.SizeofRtAttr+n))
		b = binary.NativeEndian.AppendUint16(b, attrInfo)
		return append(b, raw...)
	}
	for name, b := range map[string][]byte{
		"older kernel": info(minInfo), "this kernel": info(int(unsafe.Sizeof(unix.TCPInfo{}))), "newer kernel": info(400),
	} {
		s, ok, err := parse(b, unix.IPPROTO_TCP)
		if err != nil || !ok || s.Cookie != 1<<32|7 || s.TxBytes != 2*40+20+10 {
			t.Errorf("tcp_info of %s: got %+v, %v, %v; expected cookie %d and 110 bytes sent", name, s, ok, err, uint64(1<<32|7))
		}
	}
	if _, _, err := parse(info(minInfo-8), unix.IPPROTO_TCP); err == nil {
		t.Error("got no error, expected one for a tcp_info without bytes_sent")
	}
	if _, _, err := parse(info(minInfo)[:sizeofMessage+20], unix.IPPROTO_TCP); err == nil {
		t.Error("got no error, expected one for an attribute that is cut short")
	}
	for name, b := range map[string][]byte{"time_wait": inetDiagMsg(byte(timeWait), timerTimeWait), "fin_wait2 stand-in": inetDiagMsg(byte(FinWait2), timerTimeWait)} {
		if s, ok, err := parse(b, unix.IPPROTO_TCP); ok || err != nil {
			t.Errorf("%s: got %+v, %v, %v; expected it to be left out", name, s, ok, err)
		}
	}
}

func TestMountedNamespaces(t *testing.T) {
	table := `22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
50 22 0:4 net:[4026532345] /run/netns/blue rw shared:7 - nsfs nsfs rw
51 22 0:4 mnt:[4026532300] /run/snapd/ns/a.mnt rw - nsfs nsfs rw
52 22 0:4 net:[4026532399] /run/with\040blank\134 rw - nsfs nsfs rw
53 22 0:9 /net:[1] /somewhere rw - tmpfs nsfs rw
`
	got := mountedNamespaces([]byte(table))
	if len(got) != 2 || got[0] != (Namespace{Inode: 4026532345, Path: "/run/netns/blue"}) ||
		got[1] != (Namespace{Inode: 4026532399, Path: `/run/with blank\`}) {
		t.Errorf("got %+v, expected the two network namespaces", got)
	}
}
