// Command vm runs our tests on kernels that this machine does not run.
//
//	go run ./test/vm [flags] [package...] [-- command [argument...]]
//
// It boots Debian's cloud kernels under qemu-system-x86_64 without KVM, in
// about four seconds each, with an initramfs that holds busybox, the modules
// of socket diagnostics, and the packages' test binaries. Each test binary and
// the command run as children of init, as root, in /. cgroup2 is mounted at
// /sys/fs/cgroup with every controller, bpffs at /sys/fs/bpf; lo is up; there
// is no other network.
//
// The guest has three serial ports: the kernel's console, the output of the
// commands, and the report. Nothing that a kernel or a test prints can damage
// a report, and each of its lines starts with a word drawn for this boot. A
// kernel passes only if the guest reported exit code 0 for every command and
// then that it was done; everything else is a failure with the kernel's name
// and what the tests that failed said, or the last lines. A test binary that ran
// no test is a failure too. The exit code is 0 if all kernels passed, 1 if one
// did not, 2 for wrong use. A guest that the emulator has ended, as it does where
// the kernel patches its code, is started again, and the output says so.
//
// -only NAME:EXPRESSION leaves tests to one kernel or system: the others skip them.
//
// -virtual makes the guest's clock count instructions (one nanosecond each, idle
// time skipped), so that scheduling latency is the same on a busy and an idle
// host. There is one CPU then, unless -smp says more, which takes QEMU 10: they
// take turns, and the clock counts what all of them do, so that each of two that
// are busy has half of the speed of one that is alone.
//
// -system boots an installed Debian from a disk instead, with systemd as init and
// its own kernel; the commands run as a service of it, once all else is up. With
// -boots it is started again and again, and what is on its disk stays.
//
// Tests that are only for the guest have the build tag vm, which is set here.
//
// # Kernels
//
// Kernels are fetched once, by apt, into the cache directory
// ($BULKHEAD_CACHE, else bulkhead in the user's cache directory) and then used
// from there without the network until -refresh. The mirror and the key are
// those of the machine's own Debian sources, only the suite is another; apt
// verifies it as it always does and its own state is not touched. Needs an
// amd64 Debian host, no root. Systems are made once and kept in the same way, by
// mmdebstrap, which needs root.
package main
