package model

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// shrink drops pieces of a sequence that fails for as long as what is left still fails,
// halves first and single elements last (delta debugging, Zeller and Hildebrandt), or
// until there is no more time.
func shrink[T any](seq []T, fails func([]T) bool, more func() bool) []T {
	for size := (len(seq) + 1) / 2; size > 0; {
		dropped := false
		for at := 0; at < len(seq) && more(); {
			without := slices.Concat(seq[:at], seq[min(at+size, len(seq)):])
			if fails(without) {
				seq, dropped = without, true
			} else {
				at += size
			}
		}
		switch {
		case !more() || size == 1 && !dropped:
			return seq
		case size > 1:
			size = (size + 1) / 2
		}
	}
	return seq
}

// explain runs what was done once more, one operation after the other, and prints the
// shortest sequence found that fails. It is tried with the last rounds first.
func (g *stage) explain(workers int, log []Op, marks []int) {
	over := time.Now().Add(*shrinkFlag)
	more := func() bool { return time.Now().Before(over) }
	var last error
	runs := 0
	fails := func(ops []Op) bool {
		runs++
		s, err := newSystem(g, workers, replayPatience)
		if err != nil {
			g.t.Logf("replay: %v", err)
			return false
		}
		err = s.runAll(ops)
		if err == nil {
			err = s.quiet(true)
		}
		if closeErr := s.close(); closeErr != nil {
			g.t.Logf("replay: %v", closeErr)
		}
		if err != nil {
			last = err
		}
		return err != nil
	}
	for n := 1; more(); n *= 4 {
		from := marks[max(0, len(marks)-n)]
		if ops := log[from:]; fails(ops) {
			found := shrink(ops, fails, more)
			g.t.Logf("%d operations one after the other fail too, of %d, after %d runs: %v\n%s", len(found), len(log), runs, last, list(found))
			return
		}
		if n >= len(marks) {
			break
		}
	}
	tail := log[max(0, len(log)-200):]
	g.t.Logf("one after the other, the operations do not fail (%d runs): it takes some at the same time. The last of them:\n%s", runs, list(tail))
}

func list(ops []Op) string {
	var b strings.Builder
	for _, o := range ops {
		fmt.Fprintf(&b, "  %s\n", o)
	}
	return b.String()
}

// faulty is a system with one fault: it loses a slot when a process is killed that has
// passed a connected socket on.
func faulty(ops []Op) bool {
	connected, passed := map[desc]bool{}, map[uint8]bool{}
	for _, o := range ops {
		at := desc{o.W, o.L, o.D}
		switch o.Kind {
		case Connect:
			connected[at] = true
		case Close:
			delete(connected, at)
		case Pass:
			passed[o.W] = passed[o.W] || connected[at]
		case Kill:
			if passed[o.W] {
				return true
			}
		}
	}
	return false
}

func TestShrink(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	always := func() bool { return true }
	gen := newGenerator(seed, 4)
	var ops []Op
	for !faulty(ops) {
		ops = append(ops, gen.round()...)
	}
	got := shrink(ops, faulty, always)
	if len(got) != 3 || got[0].Kind != Connect || got[1].Kind != Pass || got[2].Kind != Kill || !faulty(got) {
		t.Errorf("%d operations became\n%swant a connect, a pass, and a kill", len(ops), list(got))
	}

	// What needs two far apart, and what needs everything.
	seq := make([]int, 1000)
	for i := range seq {
		seq[i] = i
	}
	tries := 0
	two := shrink(seq, func(s []int) bool { tries++; return slices.Contains(s, 3) && slices.Contains(s, 997) }, always)
	if !slices.Equal(two, []int{3, 997}) || tries > 200 {
		t.Errorf("got %v after %d tries, want 3 and 997", two, tries)
	}
	if all := shrink(seq[:20], func(s []int) bool { return len(s) == 20 }, always); len(all) != 20 {
		t.Errorf("got %v, want everything", all)
	}
	if none := shrink(seq, func([]int) bool { return true }, func() bool { return false }); len(none) != len(seq) {
		t.Error("it goes on without time")
	}
}

// A seed stands for a sequence, whatever machine it is on, and every operation comes.
func TestGenerator(t *testing.T) {
	seen := map[Kind]int{}
	a, b := newGenerator(7, 6), newGenerator(7, 6)
	for range 200 {
		ops := a.round()
		if !slices.Equal(ops, b.round()) {
			t.Fatal("one seed gave two sequences")
		}
		if ops[len(ops)-1].Kind != Quiet {
			t.Fatal("a round does not end quiet")
		}
		for _, o := range ops {
			seen[o.Kind]++
		}
	}
	for k := Open; k <= Quiet; k++ {
		if seen[k] == 0 {
			t.Errorf("200 rounds have no %s", k)
		}
	}
	if slices.Equal(newGenerator(8, 6).round(), newGenerator(7, 6).round()) {
		t.Error("two seeds gave one sequence")
	}
}
