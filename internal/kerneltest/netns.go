package kerneltest

import (
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// Netns is a network namespace of its own and a thread in it, which both end with the
// test. Loopback is as Main makes it.
type Netns struct {
	t     testing.TB
	tasks chan func()
}

// NewNetns makes a network namespace.
func NewNetns(t testing.TB) *Netns {
	t.Helper()
	ns := &Netns{t: t, tasks: make(chan func())}
	go func() {
		runtime.LockOSThread() // and never unlocked, so the thread ends with the goroutine
		for f := range ns.tasks {
			f()
		}
	}()
	t.Cleanup(func() { close(ns.tasks) })
	ns.Do(func() error { return os.NewSyscallError("unshare", unix.Unshare(unix.CLONE_NEWNET)) })
	ns.Do(loopback)
	return ns
}

// Do runs f in the namespace and fails the test if it fails. What f starts is in the
// namespace too: processes, and sockets whatever uses them later.
func (ns *Netns) Do(f func() error) {
	ns.t.Helper()
	result := make(chan error)
	ns.tasks <- func() { result <- f() }
	if err := <-result; err != nil {
		ns.t.Fatal(err)
	}
}
