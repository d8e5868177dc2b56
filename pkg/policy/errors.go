package policy

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Place is where something stands in a policy. The zero Place is nowhere: that of
// what was read back from JSON.
type Place struct {
	File string
	// Line and Col count from 1; Col is in characters.
	Line, Col int
}

// String is "FILE:LINE:COL", which editors and terminals make a link of.
func (p Place) String() string { return fmt.Sprintf("%s:%d:%d", p.File, p.Line, p.Col) }

// Errorf is an Error at the place.
func (p Place) Errorf(format string, args ...any) *Error {
	return &Error{File: p.File, Line: p.Line, Col: p.Col, Msg: fmt.Sprintf(format, args...)}
}

// Error is one fault of a policy at its place.
type Error struct {
	File string
	// Line and Col count from 1; Col is in characters.
	Line, Col int
	Msg       string
}

// Error is "FILE:LINE:COL: message", which editors and terminals make a link of.
func (e *Error) Error() string {
	return fmt.Sprintf("%s:%d:%d: %s", e.File, e.Line, e.Col, e.Msg)
}

// Errors is everything that is wrong with a policy, sorted by place: files in
// the order in which they are read, then line, then column. It is never empty
// where a function of this package returns it.
type Errors []*Error

// Error is one line for each fault.
func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, err := range e {
		lines[i] = err.Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap lets errors.As find the first *Error.
func (e Errors) Unwrap() []error {
	errs := make([]error, len(e))
	for i, err := range e {
		errs[i] = err
	}
	return errs
}

// Warning is what is legal and unwise, at its place.
type Warning struct {
	File string
	// Line and Col count from 1; Col is in characters.
	Line, Col int
	Msg       string
}

// String is "FILE:LINE:COL: message", as Error.Error.
func (w Warning) String() string {
	return fmt.Sprintf("%s:%d:%d: %s", w.File, w.Line, w.Col, w.Msg)
}

// Warnings are sorted by place, as Errors are.
type Warnings []Warning

// place is where something stands in a policy.
type place struct {
	file      string
	order     int // of the file among those that are read
	line, col int
}

func (p place) public() Place { return Place{File: p.file, Line: p.line, Col: p.col} }

func (p place) String() string { return p.public().String() }

func comparePlaces(a, b place) int {
	return cmp.Or(cmp.Compare(a.order, b.order), cmp.Compare(a.line, b.line), cmp.Compare(a.col, b.col))
}

// finding is an error or a warning that is not yet sorted.
type finding struct {
	at  place
	msg string
}

type findings []finding

func (f *findings) add(at place, format string, args ...any) {
	*f = append(*f, finding{at, fmt.Sprintf(format, args...)})
}

func (f findings) sorted() findings {
	sorted := slices.Clone(f)
	slices.SortStableFunc(sorted, func(a, b finding) int { return comparePlaces(a.at, b.at) })
	return sorted
}

// err is nil, without a type, if nothing was found.
func (f findings) err() error {
	if len(f) == 0 {
		return nil
	}
	var errs Errors
	for _, x := range f.sorted() {
		errs = append(errs, &Error{File: x.at.file, Line: x.at.line, Col: x.at.col, Msg: x.msg})
	}
	return errs
}

func (f findings) warnings() Warnings {
	var ws Warnings
	for _, x := range f.sorted() {
		ws = append(ws, Warning{File: x.at.file, Line: x.at.line, Col: x.at.col, Msg: x.msg})
	}
	return ws
}

// didYouMean is `; did you mean "x"?` for the nearest of the known names, or,
// if none is near, what there is to choose from.
func didYouMean(name string, known []string) string {
	best, distance := "", min(3, (len(name)+1)/3)+1 // one in three characters, at most 3
	for _, k := range known {
		if d := editDistance(name, k); d < distance {
			best, distance = k, d
		}
	}
	switch {
	case best != "":
		return fmt.Sprintf("; did you mean %q?", best)
	case len(known) == 0:
		return "; there are none"
	case len(known) <= 20:
		return "; there are: " + strings.Join(known, ", ")
	}
	return ""
}

// editDistance counts the insertions, deletions, changes and swaps of
// neighbours between two names. Names are short; longer text is far from all.
func editDistance(a, b string) int {
	if len(a) > 64 || len(b) > 64 {
		return 64
	}
	var before, last []int
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		before, last, row = last, row, make([]int, len(b)+1)
		row[0] = i
		for j := 1; j <= len(b); j++ {
			change := last[j-1]
			if a[i-1] != b[j-1] {
				change++
			}
			row[j] = min(change, last[j]+1, row[j-1]+1)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
	}
	return row[len(b)]
}
