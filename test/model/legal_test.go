package model

import (
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"bulkhead/pkg/policy"
)

// The model itself notices what is not legal, as soon as a result says so.
func TestLegal(t *testing.T) {
	var compiled []*policy.Plan
	for _, limits := range plans {
		p, err := compile(policyText(limits))
		if err != nil {
			t.Fatal(err)
		}
		compiled = append(compiled, p)
	}
	m, err := newModel(compiled, unix.EAGAIN)
	if err != nil {
		t.Fatal(err)
	}
	at := place{feature: "f"} // 16 of its own, 12 at a
	const a, b = 0, 2         // dests
	begin := func(d uint8, kind Kind, dest uint8) *flight {
		t.Helper()
		f := m.begin(Op{Kind: kind, D: d, Sock: TCP4, Dest: dest}, m.holdOf(at, dests[dest].Provider, false), nil)
		if f == nil {
			t.Fatalf("%s of descriptor %d is not possible", kind, d)
		}
		return f
	}
	end := func(f *flight, errno syscall.Errno, legal bool, what string) {
		t.Helper()
		if err := m.end(f, answer{errno: errno}, true); (err == nil) != legal {
			t.Fatalf("%s: %v", what, err)
		}
	}
	do := func(d uint8, kind Kind, dest uint8, errno syscall.Errno, legal bool, what string) {
		t.Helper()
		end(begin(d, kind, dest), errno, legal, what)
	}
	for d := range uint8(20) {
		do(d, Open, 0, 0, true, "socket")
	}
	do(0, Connect, a, unix.EAGAIN, false, "refused while nothing is in use")
	for d := range uint8(12) {
		do(d, Connect, a, 0, true, "connect within the limit")
	}
	do(12, Connect, a, unix.EAGAIN, true, "refused when full")
	do(12, Connect, a, 0, false, "admitted when full")
	do(12, Close, 0, 0, true, "close")
	do(13, Connect, b, unix.EAGAIN, false, "refused at b, because a is full")

	// While one is closing, either is legal.
	for _, errno := range []syscall.Errno{unix.EAGAIN, 0} {
		closing, other := begin(11, Close, 0), begin(14, Connect, a)
		end(closing, 0, true, "close")
		end(other, errno, true, "connect beside a close")
		if errno != 0 {
			do(11, Open, 0, 0, true, "socket")
			do(11, Connect, a, 0, true, "connect after the close")
		}
	}
	// While a plan with other limits comes in force, either's are.
	m.flipping(1) // 6 at a, where 12 are
	f := begin(15, Connect, a)
	m.flipped(1)
	end(f, unix.EAGAIN, true, "refused by the new plan")
	m.flipping(2) // 20 at a, 20 by f
	f = begin(15, Connect, a)
	m.flipped(2)
	end(f, 0, true, "admitted by the new plan")
	do(16, Connect, a, unix.EAGAIN, false, "refused by the plan before")

	// A slot is held by every descriptor of its socket.
	on := m.descs[desc{0, 0, 1}]
	m.attach(on, desc{1, 0, 0})
	m.killing(0)
	m.killed(0)
	if len(m.socks) != 1 || len(on.slots) != 1 || m.descs[desc{1, 0, 0}] != on {
		t.Errorf("after the death of one of two processes: %d sockets, %d slots", len(m.socks), len(on.slots))
	}
	for _, count := range [][]int{m.certain, m.possible} {
		for i, n := range count {
			if want := map[bool]int{true: 1}[contains(on, uint32(i))]; n != want {
				t.Errorf("%s: %d held, want %d", m.plan.Bulkheads[i].Key, n, want)
			}
		}
	}
}

func contains(s *sock, bulkhead uint32) bool {
	for h := range s.slots {
		for _, b := range h.bulkheads {
			if b == bulkhead {
				return true
			}
		}
	}
	return false
}
