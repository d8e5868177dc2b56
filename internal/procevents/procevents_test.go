package procevents

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
)

// gather takes events until all that is wanted was among them.
func gather(t *testing.T, l *Listener, want ...Event) (all []Event, lost bool) {
	t.Helper()
	kerneltest.Poll(t, fmt.Sprintf("the events %+v", want), func() error {
		events, missed, err := l.Take()
		if err != nil {
			t.Fatal(err)
		}
		lost = lost || missed
		all = append(all, events...)
		for _, w := range want {
			if !slices.Contains(all, w) {
				return fmt.Errorf("%+v is not among %d events", w, len(all))
			}
		}
		return nil
	})
	return all, lost
}

func listening(t *testing.T) *Listener {
	t.Helper()
	l, err := Listen()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// A process is told when it begins, when it becomes another program and when it
// becomes another user, and nothing of threads and exits.
func TestEvents(t *testing.T) {
	l := listening(t)
	cmd := exec.Command("/usr/bin/setpriv", "--reuid=65534", "--clear-groups", "/bin/true")
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	self, child := os.Getpid(), cmd.Process.Pid
	// More threads, which are nobody's children.
	var locked sync.WaitGroup
	end := make(chan struct{})
	for range 2 * runtime.NumCPU() {
		locked.Add(1)
		go func() {
			runtime.LockOSThread()
			locked.Done()
			<-end
		}()
	}
	locked.Wait()
	close(end)
	if err := exec.Command("/bin/true").Run(); err != nil {
		t.Fatal(err)
	}
	all, lost := gather(t, l, Event{Fork, self, child}, Event{Exec, child, 0}, Event{User, child, 0})
	if lost {
		t.Error("events were lost")
	}
	var its []Event
	for _, e := range all {
		switch {
		case e.PID == child || e.Child == child:
			its = append(its, e)
		case e.Child == self || e.What&(Fork|Exec|User) == 0:
			t.Errorf("%+v of a thread, or an end", e)
		}
	}
	want := []Event{{Fork, self, child}, {Exec, child, 0}, {User, child, 0}, {Exec, child, 0}}
	if !slices.Equal(its, want) {
		t.Errorf("%+v, want %+v", its, want)
	}
}

// What comes faster than it is read is known to be missing, and what comes then
// is told again.
func TestLost(t *testing.T) {
	l := listening(t)
	l.mu.Lock()
	l.events = make([]Event, waiting)
	l.mu.Unlock()
	if err := exec.Command("/bin/true").Run(); err != nil {
		t.Fatal(err)
	}
	kerneltest.Poll(t, "one more than there is room for", func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		if len(l.events) == waiting {
			return fmt.Errorf("not yet")
		}
		return nil
	})
	if _, lost, err := l.Take(); !lost || err != nil {
		t.Fatalf("lost %v, %v", lost, err)
	}
	cmd := exec.Command("/bin/true")
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	if _, lost := gather(t, l, Event{Exec, cmd.Process.Pid, 0}); lost {
		t.Error("a loss is told twice")
	}
}

// A thousand processes that begin and end within a moment are all told.
func TestBurst(t *testing.T) {
	l := listening(t)
	const n = 1000
	cmd := exec.Command("/bin/sh", "-c", fmt.Sprintf("i=0; while [ $i -lt %d ]; do (:); i=$((i+1)); done", n))
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	forks := 0
	kerneltest.Poll(t, "all forks", func() error {
		events, lost, err := l.Take()
		if lost || err != nil {
			t.Fatalf("lost %v, %v", lost, err)
		}
		for _, e := range events {
			if e.What == Fork && e.PID == cmd.Process.Pid {
				forks++
			}
		}
		if forks != n {
			return fmt.Errorf("%d", forks)
		}
		return nil
	})
}

// Where the kernel would say nothing, Listen fails instead of hearing nothing.
func TestElsewhere(t *testing.T) {
	if os.Getenv("PROCEVENTS_ELSEWHERE") != "" {
		l, err := Listen()
		if err == nil {
			l.Close()
			t.Fatal("it listens")
		}
		t.Log(err)
		return
	}
	// Others who listen are answered, and the answer is heard by all.
	stop, others := make(chan struct{}), sync.WaitGroup{}
	others.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				if l, err := Listen(); err != nil {
					t.Error(err)
				} else {
					l.Close()
				}
			}
		}
	})
	defer others.Wait()
	defer close(stop)
	for name, flags := range map[string]uintptr{"network": unix.CLONE_NEWNET, "pid": unix.CLONE_NEWPID} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command("/proc/self/exe", "-test.run", "^TestElsewhere$", "-test.v")
			cmd.Env = append(os.Environ(), "PROCEVENTS_ELSEWHERE=1")
			cmd.SysProcAttr = &unix.SysProcAttr{Cloneflags: flags}
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			} else {
				t.Logf("%s", out)
			}
		})
	}
}
