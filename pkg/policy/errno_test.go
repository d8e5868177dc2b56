package policy

import "syscall"

// linuxErrnos are the kernel's own numbers.
func linuxErrnos() map[string]uint16 {
	return map[string]uint16{
		"EPERM": uint16(syscall.EPERM), "EAGAIN": uint16(syscall.EAGAIN), "EACCES": uint16(syscall.EACCES), "EBUSY": uint16(syscall.EBUSY),
		"EUSERS": uint16(syscall.EUSERS), "EADDRNOTAVAIL": uint16(syscall.EADDRNOTAVAIL), "ENETDOWN": uint16(syscall.ENETDOWN),
		"ENETUNREACH": uint16(syscall.ENETUNREACH), "ENOBUFS": uint16(syscall.ENOBUFS), "ETIMEDOUT": uint16(syscall.ETIMEDOUT),
		"ECONNREFUSED": uint16(syscall.ECONNREFUSED), "EHOSTDOWN": uint16(syscall.EHOSTDOWN), "EHOSTUNREACH": uint16(syscall.EHOSTUNREACH),
		"EDQUOT": uint16(syscall.EDQUOT),
	}
}
