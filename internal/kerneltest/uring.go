package kerneltest

import (
	"encoding/binary"
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Way is how a connect is submitted to an io_uring.
type Way string

// The ways.
const (
	Plain       Way = "plain"
	Async       Way = "async"        // from a worker thread of the kernel's (IOSQE_ASYNC)
	LinkTimeout Way = "link timeout" // with a linked timeout that ends it
)

// Ring makes the client's io_uring (kernel 5.5 for connects); with poll, one whose
// submissions are taken by a thread of the kernel's. ENOSYS or EPERM is a kernel that has
// none or forbids it.
func (c *Client) Ring(poll bool) syscall.Errno {
	c.t.Helper()
	flags := 0
	if poll {
		flags = ringPoll
	}
	return c.call(request{Op: "ring", N: flags}).Errno
}

// RingConnect connects a socket through the ring. A linked timeout is after the time
// given.
func (c *Client) RingConnect(fd int, addr string, way Way, timeout time.Duration) syscall.Errno {
	c.t.Helper()
	return c.call(request{Op: "ring connect", FD: fd, Addr: addr, Name: string(way), Size: int(timeout)}).Errno
}

// Numbers and offsets of linux/io_uring.h.
const (
	ringPoll = 1 << 1 // IORING_SETUP_SQPOLL

	ringEntries   = 8
	ringParams    = 120 // sizeof(struct io_uring_params)
	ringSQE       = 64  // sizeof(struct io_uring_sqe)
	ringCQE       = 16  // sizeof(struct io_uring_cqe)
	offSQRing     = 0
	offCQRing     = 0x8000000
	offSQEs       = 0x10000000
	opConnect     = 16
	opLinkTimeout = 15
	flagLink      = 1 << 2
	flagAsync     = 1 << 4
	enterEvents   = 1 << 0
	enterWakeup   = 1 << 1
	needWakeup    = 1 << 0
)

// ring is the least of an io_uring: one submission at a time.
type ring struct {
	fd           int
	flags        uint32
	sq, cq, sqes []byte
	memory       []byte // what submissions point at, which the collector must not move
	sqOff, cqOff [10]uint32
}

func newRing(flags int) (*ring, error) {
	var params [ringParams]byte
	binary.NativeEndian.PutUint32(params[8:], uint32(flags))
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, ringEntries, uintptr(unsafe.Pointer(&params[0])), 0)
	if errno != 0 {
		return nil, errno
	}
	r := &ring{fd: int(fd), flags: uint32(flags)}
	for i := range r.sqOff {
		r.sqOff[i] = binary.NativeEndian.Uint32(params[40+4*i:])
		r.cqOff[i] = binary.NativeEndian.Uint32(params[80+4*i:])
	}
	entries := binary.NativeEndian.Uint32(params[0:])
	completions := binary.NativeEndian.Uint32(params[4:])
	for _, m := range []struct {
		to     *[]byte
		offset int64
		size   uint32
	}{
		{&r.sq, offSQRing, r.sqOff[6] + 4*entries},
		{&r.cq, offCQRing, r.cqOff[5] + ringCQE*completions},
		{&r.sqes, offSQEs, ringSQE * entries},
	} {
		var err error
		if *m.to, err = unix.Mmap(r.fd, m.offset, int(m.size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
			return nil, fmt.Errorf("map the ring: %v", err)
		}
	}
	var err error
	r.memory, err = unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("memory of the ring: %v", err)
	}
	return r, nil
}

// word is a number that the kernel reads or writes too.
func word(b []byte, offset uint32) *uint32 { return (*uint32)(unsafe.Pointer(&b[offset])) }

// connect submits one connect and waits for its completion, and that of its timeout.
func (r *ring) connect(fd int, addr string, way Way, timeout int) error {
	sa, err := rawSockaddr(addr)
	if err != nil {
		return err
	}
	copy(r.memory, sa)
	at := uint64(uintptr(unsafe.Pointer(&r.memory[0])))
	const deadline = 512 // of struct __kernel_timespec, behind the address
	submit := []sqe{{op: opConnect, fd: int32(fd), off: uint64(len(sa)), addr: at}}
	switch way {
	case Async:
		submit[0].flags = flagAsync
	case LinkTimeout:
		submit[0].flags = flagLink
		binary.NativeEndian.PutUint64(r.memory[deadline:], uint64(timeout)/1e9)
		binary.NativeEndian.PutUint64(r.memory[deadline+8:], uint64(timeout)%1e9)
		submit = append(submit, sqe{op: opLinkTimeout, fd: -1, addr: at + deadline, len: 1, user: 1})
	}
	mask := *word(r.sq, r.sqOff[2])
	tail := *word(r.sq, r.sqOff[1])
	for _, s := range submit {
		i := tail & mask
		s.put(r.sqes[ringSQE*i:])
		*word(r.sq, r.sqOff[6]+4*i) = i
		tail++
	}
	atomic.StoreUint32(word(r.sq, r.sqOff[1]), tail)

	var result error
	for done := 0; done < len(submit); {
		flags, n := uint32(enterEvents), len(submit)
		if r.flags&ringPoll != 0 {
			n = 0
			if atomic.LoadUint32(word(r.sq, r.sqOff[4]))&needWakeup != 0 {
				flags |= enterWakeup
			}
		}
		if done > 0 || atomic.LoadUint32(word(r.sq, r.sqOff[0])) == tail {
			n = 0 // taken already
		}
		_, _, errno := unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), uintptr(n), 1, uintptr(flags), 0, 0)
		if errno != 0 && errno != unix.EINTR {
			return fmt.Errorf("io_uring_enter: %v", errno)
		}
		head := *word(r.cq, r.cqOff[0])
		for ; head != atomic.LoadUint32(word(r.cq, r.cqOff[1])); head++ {
			c := r.cq[r.cqOff[5]+ringCQE*(head&*word(r.cq, r.cqOff[2])):]
			if res := int32(binary.NativeEndian.Uint32(c[8:])); binary.NativeEndian.Uint64(c) == 0 && res < 0 {
				result = syscall.Errno(-res)
			}
			done++
		}
		atomic.StoreUint32(word(r.cq, r.cqOff[0]), head)
	}
	return result
}

// sqe is what we use of struct io_uring_sqe.
type sqe struct {
	op, flags byte
	fd        int32
	off, addr uint64
	len       uint32
	user      uint64
}

func (s sqe) put(b []byte) {
	clear(b[:ringSQE])
	b[0], b[1] = s.op, s.flags
	binary.NativeEndian.PutUint32(b[4:], uint32(s.fd))
	binary.NativeEndian.PutUint64(b[8:], s.off)
	binary.NativeEndian.PutUint64(b[16:], s.addr)
	binary.NativeEndian.PutUint32(b[24:], s.len)
	binary.NativeEndian.PutUint64(b[32:], s.user)
}

// rawSockaddr is an address as connect(2) wants it.
func rawSockaddr(addr string) ([]byte, error) {
	sa, err := sockaddr(addr)
	if err != nil {
		return nil, err
	}
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		b := binary.NativeEndian.AppendUint16(nil, unix.AF_INET)
		b = binary.BigEndian.AppendUint16(b, uint16(sa.Port))
		return append(append(b, sa.Addr[:]...), make([]byte, 8)...), nil
	case *unix.SockaddrInet6:
		b := binary.NativeEndian.AppendUint16(nil, unix.AF_INET6)
		b = binary.BigEndian.AppendUint16(b, uint16(sa.Port))
		b = append(append(b, 0, 0, 0, 0), sa.Addr[:]...)
		return binary.NativeEndian.AppendUint32(b, sa.ZoneId), nil
	}
	return nil, fmt.Errorf("address of another family: %T", sa)
}
