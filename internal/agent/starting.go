package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// startingLimit is how long one start may keep another waiting. The largest policy with
// all that is to be taken over needs a few seconds.
const startingLimit = 30 * time.Second

// startAlone lets one agent at a time through what comes before it has the lock of its
// pins: two that are started at the same moment would take each other's admin socket for
// that of an agent that is gone, and one would say that an address is in use, which is
// true and hides why. It is a lock (flock(2)) on the bpf file system's directory itself,
// which every agent of these pins can open, and which leaves nothing behind.
//
// The file is to be closed once the pins are locked. It is nil where the directory cannot
// be opened: why is for those to say who need it.
func startAlone(ctx context.Context, bpffs string) (*os.File, error) {
	f, err := os.Open(bpffs)
	if err != nil {
		return nil, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, startingLimit, fmt.Errorf("another agent is being started on %s and has not come to an end for %v", bpffs, startingLimit))
	defer cancel()
	poll := time.NewTicker(10 * time.Millisecond)
	defer poll.Stop()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", bpffs, err)
		}
		select {
		case <-poll.C:
		case <-ctx.Done():
			f.Close()
			return nil, context.Cause(ctx)
		}
	}
}
