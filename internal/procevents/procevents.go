package procevents

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// What a process did (linux/cn_proc.h).
const (
	Fork uint32 = 0x1
	Exec uint32 = 0x2
	// User is a change of the user, real or effective.
	User uint32 = 0x4
)

// Event is something that a process did: all its threads, by their group's id.
type Event struct {
	What uint32
	// PID is who did it; for a fork, the parent.
	PID int
	// Child is whom it made, for a fork.
	Child int
}

const (
	connectorIdx, connectorVal = 1, 1 // CN_IDX_PROC, CN_VAL_PROC
	listen, ignore             = 1, 2 // PROC_CN_MCAST_LISTEN, PROC_CN_MCAST_IGNORE
	none                       = 0    // PROC_EVENT_NONE: the answer to listen

	// A message is a netlink header, a cn_msg and a proc_event; where in it what is.
	headerSize = 16
	cnSize     = 20
	whatAt     = headerSize + cnSize
	dataAt     = whatAt + 16

	// bufferSize is of the socket: each event takes 768 bytes of it, so this has room
	// for those of 5,000 processes that begin at once.
	bufferSize = 8 << 20
	// answerLimit bounds the wait for the kernel's answer, which is there at once.
	answerLimit = 2 * time.Second
	// waiting is how many events wait for Take at most.
	waiting = 1 << 16
)

// Listener collects events until they are taken.
type Listener struct {
	file *os.File
	fd   int
	wake chan struct{}

	mu     sync.Mutex
	events []Event
	lost   bool
	err    error
}

// Listen begins to collect events. What is forked after it has returned is told.
func Listen() (*Listener, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_CONNECTOR)
	if err != nil {
		return nil, fmt.Errorf("process events: %w", err)
	}
	file := os.NewFile(uintptr(fd), "process events")
	l := &Listener{file: file, fd: fd, wake: make(chan struct{}, 1)}
	if err := l.begin(fd); err != nil {
		file.Close()
		return nil, fmt.Errorf("process events: %w", err)
	}
	go l.read()
	return l, nil
}

func (l *Listener) begin(fd int) error {
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, bufferSize) // an overflow is noticed
	if err := filter(fd); err != nil {
		return err
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: connectorIdx}); err != nil {
		return fmt.Errorf("%w (needs CAP_NET_ADMIN)", err)
	}
	// Who listens hears the answers to all others too. Of a request only ack comes back,
	// and one more (cn_proc_ack): seq is the kernel's own count.
	mark := uint32(time.Now().UnixNano())
	if err := ask(fd, listen, mark); err != nil {
		if errors.Is(err, unix.ECONNREFUSED) {
			err = fmt.Errorf("%w (only in the initial network namespace: hostNetwork)", err)
		}
		return err
	}
	// The kernel answers, with an error if it does not like the asker; outside of
	// the initial user and pid namespaces it says nothing at all.
	if err := l.file.SetReadDeadline(time.Now().Add(answerLimit)); err != nil {
		return err
	}
	defer l.file.SetReadDeadline(time.Time{})
	buf := make([]byte, 4096)
	for {
		n, err := l.file.Read(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return errors.New("the kernel does not answer (only in the initial user and pid namespaces: hostPID)")
		}
		if err != nil {
			return err
		}
		le := binary.NativeEndian
		if n < dataAt+4 || le.Uint32(buf[whatAt:]) != none || le.Uint32(buf[headerSize+12:]) != mark+1 {
			l.add(buf[:n]) // somebody else has made the kernel tell already, or is answered
			continue
		}
		if errno := unix.Errno(le.Uint32(buf[dataAt:])); errno != 0 {
			return errno
		}
		return nil
	}
}

// ask tells the kernel to begin or to end.
func ask(fd int, what, mark uint32) error {
	le := binary.NativeEndian
	var m [headerSize + cnSize + 4]byte
	le.PutUint32(m[0:], uint32(len(m)))
	le.PutUint16(m[4:], unix.NLMSG_DONE)
	le.PutUint32(m[headerSize:], connectorIdx)
	le.PutUint32(m[headerSize+4:], connectorVal)
	le.PutUint32(m[headerSize+12:], mark)
	le.PutUint16(m[headerSize+16:], 4) // length of what follows
	le.PutUint32(m[headerSize+cnSize:], what)
	return unix.Sendto(fd, m[:], 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
}

// filter lets pass only what is wanted. It tells events by the low half of their
// number, as the kernel loads words in network order and swaps nothing.
func filter(fd int) error {
	var raw [4]byte
	word := func(v uint32) uint32 {
		binary.NativeEndian.PutUint32(raw[:], v)
		return binary.BigEndian.Uint32(raw[:])
	}
	prog, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: whatAt, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: word(none), SkipTrue: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: word(Fork), SkipTrue: 3},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: word(Exec), SkipTrue: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: word(User), SkipTrue: 1},
		bpf.RetConstant{Val: 0},
		bpf.RetConstant{Val: 0xffff},
	})
	if err != nil {
		return err
	}
	f := make([]unix.SockFilter, len(prog))
	for i, p := range prog {
		f[i] = unix.SockFilter{Code: p.Op, Jt: p.Jt, Jf: p.Jf, K: p.K}
	}
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(f)), Filter: &f[0]})
}

// read collects until the socket is closed.
func (l *Listener) read() {
	buf := make([]byte, 4096)
	for {
		n, err := l.file.Read(buf)
		switch {
		case err == nil:
			l.add(buf[:n])
		case errors.Is(err, unix.ENOBUFS):
			l.mu.Lock()
			l.lost = true
			l.mu.Unlock()
		default:
			l.mu.Lock()
			if !errors.Is(err, os.ErrClosed) {
				l.err = fmt.Errorf("process events: %w", err)
			}
			l.mu.Unlock()
			close(l.wake)
			return
		}
		select {
		case l.wake <- struct{}{}:
		default:
		}
	}
}

// add keeps the event of one message. Threads are not told: what they do, their
// process does.
func (l *Listener) add(m []byte) {
	le := binary.NativeEndian
	if len(m) < dataAt+16 || le.Uint32(m[headerSize:]) != connectorIdx {
		return
	}
	word := func(i int) int { return int(int32(le.Uint32(m[dataAt+4*i:]))) }
	e := Event{What: le.Uint32(m[whatAt:]), PID: word(1)} // pid, group of who did it
	switch e.What {
	case Fork: // then of the child
		if word(2) != word(3) {
			return // a thread
		}
		e.Child = word(3)
	case Exec, User:
	default:
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.events) == waiting {
		l.events, l.lost = nil, true
		return
	}
	l.events = append(l.events, e)
}

// Wake has a value when there is something to Take. It is closed at the end.
func (l *Listener) Wake() <-chan struct{} { return l.wake }

// Take returns what was collected since it was called last, in order. If lost,
// there were more: only a look at all processes can tell what. An error means
// that nothing will come any more.
func (l *Listener) Take() (events []Event, lost bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	events, lost, err = l.events, l.lost, l.err
	l.events, l.lost = nil, false
	return events, lost, err
}

// Close ends it. Before 6.6 the kernel counts listeners, and goes on making events for
// those who do not say that they are gone.
func (l *Listener) Close() error {
	_ = ask(l.fd, ignore, 0)
	return l.file.Close()
}
