// Package sockets reads the TCP and UDP sockets of every network namespace
// that can be entered, as values keyed by socket cookie.
//
// A socket's cookie is the number that bpf_get_socket_cookie gives to the
// kernel programs, so a Dump answers three questions about the slots that
// they keep: does the socket still exist, in which state is it, and how many
// bytes has it moved so far.
//
//	wanted := map[uint64]struct{}{slot.NetnsCookie: {}}
//	for _, d := range sockets.ReadAll(ctx, wanted, unix.IPPROTO_TCP) {
//		s, found := d.Sockets[slot.Cookie]
//		...
//	}
//
// # What a Dump proves
//
// A socket in a Dump existed while the dump ran, whatever became of the rest
// of it. A socket that is missing proves something only if Complete is set,
// and only about the namespace whose cookie the Dump carries. Even then a
// caller waits for a second complete dump: inet_diag walks hash chains by
// position and never flags itself as interrupted, so a chain that shrinks
// between two messages can hide one live socket from one dump.
//
// A dump that failed, was interrupted, or whose namespace no one could enter
// has Complete false and says why in Err; it never looks like an empty
// success. ReadAll returns one Dump for each namespace that was asked for, so
// that none can be forgotten.
//
// # What is listed
//
// Connections in every state from SYN_SENT to LAST_ACK, listeners (a
// connection from a port that is listened on was accepted, not made), half
// open requests (state SYN_RECV, no inode), and UDP sockets that have a port.
// Not listed:
//
//   - sockets in state CLOSE (never connected, refused, reset): the kernel
//     has them in no table;
//   - TIME_WAIT, and the FIN_WAIT2 that the kernel keeps as a small stand-in
//     after the last close: both carry the cookie of a socket that has
//     already passed through CLOSE, so to list them would be to call a dead
//     socket alive;
//   - MPTCP sockets (protocol 262). Their subflows are TCP sockets and are
//     listed as such, with the cookies that the connect hook sees and inodes
//     that no descriptor has.
//
// Inode 0 on anything but a request means that no descriptor is left: the
// last close has happened and the kernel finishes on its own.
//
// # Ways into a namespace
//
// The caller's own namespace is read without entering anything. Others are
// found through /proc/PID/ns/net, through bind mounts of nsfs (our own mounts
// and those of process 1), and, while some wanted namespace is still missing,
// through /proc/PID/task/TID/ns/net. Entering needs CAP_SYS_ADMIN; looking at
// the namespaces of other users' processes needs CAP_SYS_PTRACE. A namespace
// that lives only in an open descriptor is not found.
//
// The kernel needs inet_diag with tcp_diag and udp_diag, built in or as
// modules, and SO_NETNS_COOKIE (5.14).
//
// # Bytes
//
// TxBytes and RxBytes are IP bytes, headers included; see Bytes for the rule
// and for how close it comes.
package sockets
