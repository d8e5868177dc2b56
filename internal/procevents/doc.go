// Package procevents tells what processes do, as the kernel's process events
// connector has it (Documentation/driver-api/connector.rst, linux/cn_proc.h):
// forks, execs and changes of user, in the order in which they happened on each
// CPU, without a look at /proc and at no cost while nothing happens.
//
// It is our own reader of the connector and not the one of
// vishvananda/netlink: that one ends at the first overflow, which comes after
// some 270 events with the socket's default buffer, knows no changes of user,
// and parses what nobody here wants to know. Exits, which are half of all
// events, are dropped by a filter in the kernel.
//
// It needs CAP_NET_ADMIN, and the initial user, pid and network namespaces: a
// DaemonSet has them with hostPID and hostNetwork. Everywhere else Listen
// fails, and who wants to know must poll.
package procevents
