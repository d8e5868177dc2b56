package cgroup

import (
	"errors"
	"os"
	"os/exec"
	"testing"
	"time"
)

// Age is a process's own, to the tick, and of one that has ended there is none.
func TestAge(t *testing.T) {
	begin := time.Now()
	child := exec.Command("sleep", "60")
	must(t, child.Start())
	pid := child.Process.Pid
	time.Sleep(50 * time.Millisecond)
	young, err := Age(pid)
	if most := time.Since(begin) + 20*time.Millisecond; err != nil || young < 50*time.Millisecond || young > most {
		t.Errorf("a new process is %v old (%v), want 50ms to %v", young, err, most)
	}
	if own, err := Age(os.Getpid()); err != nil || own < young {
		t.Errorf("who started it is %v old (%v), and it %v", own, err, young)
	}
	must(t, child.Process.Kill())
	_ = child.Wait()
	if _, err := Age(pid); !errors.Is(err, ErrGone) {
		t.Errorf("when it has ended: %v", err)
	}
}
