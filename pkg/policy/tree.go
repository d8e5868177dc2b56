package policy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"sort"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// MaxFileSize is the largest policy file, in bytes. 10,000 prefixes are about
// 200 KB; the limit keeps a wrong path (a log, a device) from being read whole.
const MaxFileSize = 8 << 20

// tree reads the one YAML document of a file. It returns nil after adding at
// least one error to r if there is none that could be looked at.
func (r *reader) tree(data []byte) *yaml.Node {
	switch {
	case len(data) > MaxFileSize:
		r.errs.add(r.at(1, 1), "the file is larger than %d bytes: a policy is not", MaxFileSize)
		return nil
	case !utf8.Valid(data):
		i := 0
		for i < len(data) {
			c, n := utf8.DecodeRune(data[i:])
			if c == utf8.RuneError && n == 1 {
				break
			}
			i += n
		}
		r.errs.add(r.place(data, i), "not UTF-8 text")
		return nil
	}

	d := yaml.NewDecoder(bytes.NewReader(data))
	var doc, next yaml.Node
	err := d.Decode(&doc)
	if errors.Is(err, io.EOF) || err == nil && nothing(doc.Content[0]) {
		r.errs.add(r.at(1, 1), "the file is empty: a policy has apiVersion, kind, mode, providers and features")
		return nil
	}
	if err == nil {
		if err = d.Decode(&next); err == nil {
			r.errs.add(r.at(next.Content[0].Line, next.Content[0].Column),
				"a second document: a file holds one policy (put the rest into a file of its own in the same directory)")
		} else if errors.Is(err, io.EOF) {
			err = nil
		}
	}
	if err != nil {
		said := syntaxError.FindStringSubmatch(err.Error())
		offset := faultOffset(data, said[2])
		at := r.place(data, offset)
		if line, err := strconv.Atoi(said[1]); offset < 0 && err == nil {
			at = r.at(line, 1)
		}
		r.errs.add(at, "not valid YAML: %s%s", said[2], syntaxHint(data, max(offset, 0), said[2]))
		return nil
	}
	r.refuse(doc.Content[0])
	return doc.Content[0]
}

// nothing is true of a document without content ("---" alone).
func nothing(n *yaml.Node) bool {
	return n.Kind == yaml.ScalarNode && n.Tag == "!!null" && n.Value == "" && n.Anchor == ""
}

// refuse finds what YAML offers and the language does not have: a reader of a
// policy should see every value where it holds.
func (r *reader) refuse(n *yaml.Node) {
	switch {
	case n.Kind == yaml.AliasNode:
		r.refused[n] = true
		r.errs.add(r.of(n), "aliases (*%s) are not part of the language: write the value out", n.Value)
		return // n.Alias is met where it stands
	case n.Anchor != "":
		r.errs.add(r.of(n), "anchors (&%s) are not part of the language: write the value out where it is needed", n.Anchor)
	case n.Style&yaml.TaggedStyle != 0:
		r.refused[n] = true
		r.errs.add(r.of(n), "tags (%s) are not part of the language: leave it out", n.Tag)
	}
	for _, c := range n.Content {
		r.refuse(c)
	}
}

// syntaxError is what the parser says: a line and a message. The line is that
// of the construct around the fault, counted from 0 or 1 depending on the fault,
// and absent for the first (go.yaml.in/yaml/v3 v3.0.6, decode.go, fail).
var syntaxError = regexp.MustCompile(`(?s)^(?:yaml: )?(?:line (\d+): )?(.*)$`)

// faultOffset finds where the parser's fault is: the character that, added to
// everything before it, makes the parser say what it says of the whole. It looks
// back from where the parser stopped reading, by lines and then by characters.
// Parsing again and again is bounded: -1 is "not found", in a very large file. In
// such a one the fault is likely a quote that is never closed, and for that kind
// the parser's own line is right.
func faultOffset(data []byte, msg string) int {
	budget := 8 << 20
	depth := 1 + nesting(data)/16 // the parser's time is quadratic in it
	fails := func(n int) bool {
		budget -= n * depth
		if budget < 0 {
			return false
		}
		err := firstError(bytes.NewReader(data[:n]))
		return err != nil && syntaxError.FindStringSubmatch(err.Error())[2] == msg
	}

	read := &byByte{data: data}
	_ = firstError(read)
	ends := []int{read.n} // where the parser stopped, and all ends of lines before
	for i := read.n - 1; i > 0; i-- {
		if data[i-1] == '\n' {
			ends = append(ends, i)
		}
	}
	end := ends[lastTrue(len(ends), 1, func(i int) bool { return fails(ends[i]) })]

	ends = []int{end} // and of the characters of that line
	line := bytes.LastIndexByte(data[:max(0, end-1)], '\n') + 1
	for e := end; e > line; {
		_, size := utf8.DecodeLastRune(data[:e])
		e -= size
		ends = append(ends, e)
	}
	end = ends[lastTrue(len(ends), 16, func(i int) bool { return fails(ends[i]) })]
	if budget < 0 {
		return -1
	}
	return max(0, end-1)
}

// lastTrue is the last of the indices 0 to i for all of which is holds, below n;
// it holds for 0. After some steps of one it takes longer and longer ones and then
// halves the last, so it may miss a short gap.
func lastTrue(n, ones int, is func(int) bool) int {
	i, step := 0, 1
	for i+1 < n {
		next := min(i+step, n-1)
		if !is(next) {
			return i + sort.Search(next-i-1, func(j int) bool { return !is(i + 1 + j) })
		}
		i = next
		if i >= ones {
			step *= 2
		}
	}
	return i
}

// nesting is how deep brackets and braces are in each other at most.
func nesting(data []byte) int {
	depth, most := 0, 0
	for _, c := range data {
		switch c {
		case '[', '{':
			depth++
			most = max(most, depth)
		case ']', '}':
			depth--
		}
	}
	return most
}

// firstError parses all documents.
func firstError(r io.Reader) error {
	d := yaml.NewDecoder(r)
	for {
		var n yaml.Node
		if err := d.Decode(&n); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// byByte gives one byte at a time, so that n is how far the parser has looked.
type byByte struct {
	data []byte
	n    int
}

func (b *byByte) Read(p []byte) (int, error) {
	if b.n == len(b.data) {
		return 0, io.EOF
	}
	n := copy(p[:min(1, len(p))], b.data[b.n:])
	b.n += n
	return n, nil
}

// syntaxHint is the cure of the two faults that everybody makes.
func syntaxHint(data []byte, offset int, msg string) string {
	line := data[bytes.LastIndexByte(data[:offset], '\n')+1:]
	if i := bytes.IndexByte(line, '\n'); i >= 0 {
		line = line[:i]
	}
	indent := line[:len(line)-len(bytes.TrimLeft(line, " \t"))]
	switch {
	case bytes.IndexByte(indent, '\t') >= 0:
		return " (indent with spaces, not with tabs)"
	case strings.Contains(msg, "alphabetic or numeric"), strings.Contains(msg, "cannot start any token"), strings.Contains(msg, "unknown anchor"):
		return " (quote text that starts with one of *&!%@`)"
	}
	return ""
}

// place is the place of the byte at offset.
func (r *reader) place(data []byte, offset int) place {
	before := data[:max(0, offset)]
	line := bytes.Count(before, []byte("\n")) + 1
	col := utf8.RuneCount(before[bytes.LastIndexByte(before, '\n')+1:]) + 1
	return r.at(line, col)
}

func (r *reader) at(line, col int) place {
	return place{file: r.file, order: r.order, line: line, col: col}
}

func (r *reader) of(n *yaml.Node) place { return r.at(n.Line, n.Column) }

// show quotes a value of a policy for a message: it may hold anything, and goes
// to a terminal.
func show(s string) string {
	const most = 80
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "..."
	}
	return fmt.Sprintf("%q", s)
}
