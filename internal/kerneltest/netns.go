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
	onThread(func() {
		for f := range ns.tasks {
			f()
		}
	})
	t.Cleanup(func() { close(ns.tasks) })
	ns.Do(func() error { return os.NewSyscallError("unshare", unix.Unshare(unix.CLONE_NEWNET)) })
	ns.Do(loopback)
	return ns
}

// With is the same namespace for a subtest, which it does not end with.
func (ns *Netns) With(t testing.TB) *Netns {
	sub := *ns
	sub.t = t
	return &sub
}

// Do runs f in the namespace and fails the test if it fails. What f starts is in the
// namespace too: processes, and sockets whatever uses them later.
func (ns *Netns) Do(f func() error) {
	ns.t.Helper()
	if err := ns.Try(f); err != nil {
		ns.t.Fatal(err)
	}
}

// Try is Do that returns the error, for any goroutine.
func (ns *Netns) Try(f func() error) error {
	result := make(chan error)
	ns.tasks <- func() { result <- f() }
	return <-result
}

// onThread starts f on a thread of its own, which ends with it and whose namespaces it
// may change. That is never the process's first: it cannot end, and the others take
// its namespaces for the process's.
func onThread(f func()) {
	go func() {
		runtime.LockOSThread() // and never unlocked, so the thread ends with the goroutine
		if unix.Gettid() != unix.Getpid() {
			f()
			return
		}
		done := make(chan struct{})
		onThread(func() {
			defer close(done)
			f()
		})
		<-done
		runtime.UnlockOSThread()
	}()
}
