package policy

import (
	"slices"
	"strconv"
)

// DefaultErrno is what connect() fails with at a limit that names no other:
// ECONNREFUSED, which every client library treats as "not now".
const DefaultErrno uint16 = 111

type errno struct {
	name  string
	value uint16
}

// errnos are what connect(2) documents or clients are used to, by value as in
// include/uapi/asm-generic/errno.h (amd64, arm64, riscv64, s390x). Left out are
// those that mean "wait" or "done" to a client: EINTR, EINPROGRESS, EALREADY,
// EISCONN.
func errnos() []errno {
	return []errno{
		{"EPERM", 1},
		{"EAGAIN", 11},
		{"EACCES", 13},
		{"EBUSY", 16},
		{"EUSERS", 87},
		{"EADDRNOTAVAIL", 99},
		{"ENETDOWN", 100},
		{"ENETUNREACH", 101},
		{"ENOBUFS", 105},
		{"ETIMEDOUT", 110},
		{"ECONNREFUSED", DefaultErrno},
		{"EHOSTDOWN", 112},
		{"EHOSTUNREACH", 113},
		{"EDQUOT", 122},
	}
}

func errnoNames() []string {
	var names []string
	for _, e := range errnos() {
		names = append(names, e.name)
	}
	return names
}

func errnoByName(name string) (uint16, bool) {
	all := errnos()
	i := slices.IndexFunc(all, func(e errno) bool { return e.name == name })
	if i < 0 {
		return 0, false
	}
	return all[i].value, true
}

// ErrnoName is the name of an errno that a policy may use, "EAGAIN", or its
// number if it is none of them.
func ErrnoName(value uint16) string {
	for _, e := range errnos() {
		if e.value == value {
			return e.name
		}
	}
	return strconv.Itoa(int(value))
}
