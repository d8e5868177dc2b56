package metrics

import (
	"context"
	"sync"
	"time"
)

// readLimit ends a reading that hangs, if the source heeds its context.
const readLimit = 30 * time.Second

// source shares readings between scrapes: at most one is under way, whoever
// asks waits for it only so long, and its result stays until the next good one.
type source[T any] struct {
	read     func(context.Context) (T, error)
	patience time.Duration

	mu      sync.Mutex
	reading chan struct{} // closed when the reading under way ends; nil if none is
	value   T             // of the last good reading
	have    bool
	err     error // of the last reading
}

// get returns the last good value, if there is one. It is fresh if a reading
// that was under way or was started by this call ended well in time.
func (s *source[T]) get() (value T, have, fresh bool) {
	s.mu.Lock()
	done := s.reading
	if done == nil {
		done = make(chan struct{})
		s.reading = done
		go s.once(done)
	}
	s.mu.Unlock()

	timer := time.NewTimer(s.patience)
	defer timer.Stop()
	inTime := false
	select {
	case <-done:
		inTime = true
	case <-timer.C:
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.value, s.have, inTime && s.err == nil
}

func (s *source[T]) once(done chan struct{}) {
	ctx, cancel := context.WithTimeout(context.Background(), readLimit)
	defer cancel()
	value, err := s.read(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err = err; err == nil {
		s.value, s.have = value, true
	}
	s.reading = nil
	close(done)
}
