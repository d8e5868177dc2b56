// Package kerneltest is what tests that need root and a real kernel share: a place
// of their own to work in, and clients that are not the test itself.
//
//	func TestMain(m *testing.M) { os.Exit(kerneltest.Main(m)) }
//
//	env := kerneltest.New(t)
//	chat := env.Mkdir("chat")
//	kerneltest.Serve(t, "127.0.0.1:8000", kerneltest.Drain)
//	client := env.Start(chat)
//	fd, errno := client.Dial(kerneltest.TCP4, "127.0.0.1:8000")
//
// Main runs the whole test binary once more in a network and a mount namespace of its
// own: loopback is up, every address of 127.0.0.0/8 and fd00::/16 is local, everything
// else is unreachable, and there is a bpf file system that nobody else sees. Without
// root it fails; it never skips.
//
// Env is a cgroup directly below the true root of the cgroup v2 hierarchy, wherever
// that is mounted, and a directory for pins. Both are gone when the test ends, with
// all that runs in the cgroup, and also when the test binary is killed.
//
// Client is a process in a cgroup: the test binary again, which does single system
// calls as it is told, so that what they return is seen exactly. It has an io_uring too
// (Ring), passes descriptors over Unix sockets (Mailbox), and can use Go's own dialer and
// HTTP client (DialName, Requests). Servers run in the test process, which is outside of
// every Env. Command is a program that was not written for us, and Hosts gives it names.
//
// Netns is one more network namespace, and Wire is two with a veth pair between them and
// a counter of what passes.
package kerneltest
