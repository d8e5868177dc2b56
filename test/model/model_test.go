package model

import (
	"math/rand/v2"
	"testing"
	"time"

	"bulkhead/pkg/conn"
)

// TestModel does random operations until the time is over.
func TestModel(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64N(1_000_000)
	}
	t.Logf("-seed %d -workers %d", seed, *workersFlag)
	// With room for few, sockets get into one another's way in the map of slots.
	g := newStage(t, conn.MinMaxSlots)
	s, err := newSystem(g, *workersFlag, patience)
	if err != nil {
		t.Fatal(err)
	}
	stop, sampled := make(chan struct{}), make(chan error, 1)
	go func() { sampled <- s.sample(stop) }()
	gen := newGenerator(seed, *workersFlag)
	began := time.Now()
	rounds := 0
	var marks []int // where in the log each round begins
	for ; time.Since(began) < *durationFlag && err == nil; rounds++ {
		marks = append(marks, len(s.log))
		if err = s.runRound(gen.round()); err != nil {
			break
		}
		select {
		case err = <-sampled:
		default:
		}
	}
	lasted := time.Since(began)
	close(stop)
	if err == nil {
		err = <-sampled
	}
	t.Logf("%d rounds in %s, %d samples, %d reclaimed by reconciling\n%s", rounds, lasted.Round(time.Millisecond), s.samples.Load(), s.reclaimed, s.model.report())
	if closeErr := s.close(); closeErr != nil {
		t.Error(closeErr)
	}
	if err != nil {
		t.Errorf("round %d, after %s, seed %d: %v", rounds, lasted.Round(time.Millisecond), seed, err)
		g.explain(*workersFlag, s.log, marks)
	}
}
