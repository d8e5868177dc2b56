package policy

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// reader reads the nodes of one file. Its methods add what is wrong to errs,
// and return false if there is no value to go on with.
type reader struct {
	file    string
	order   int
	errs    *findings
	refused map[*yaml.Node]bool // there is an error for it already
}

// join is the path of a key, for messages: "features.chat.limits".
func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// fail adds an error about the value of a key.
func (r *reader) fail(n *yaml.Node, path, format string, args ...any) {
	r.errs.add(r.of(n), "%s: %s", path, fmt.Sprintf(format, args...))
}

// wrong adds that another kind of node was expected.
func (r *reader) wrong(n *yaml.Node, path, want string) {
	switch {
	case r.refused[n]:
	case path == "":
		r.errs.add(r.of(n), "a policy is %s; this is %s", want, kindOf(n))
	case n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null":
		r.fail(n, path, "is empty; write %s", want)
	default:
		r.fail(n, path, "needs %s; this is %s", want, kindOf(n))
	}
}

func kindOf(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	}
	switch n.ShortTag() {
	case "!!null":
		return "empty"
	case "!!bool":
		return "a yes or no"
	case "!!int", "!!float":
		return "a number"
	case "!!timestamp":
		return "a date"
	}
	return "a text"
}

// mapping calls visit for every key of a mapping that is known and not there
// already. If known is nil, keys are names that the policy gives.
func (r *reader) mapping(n *yaml.Node, path, want string, known []string, visit func(key string, k, v *yaml.Node)) bool {
	if n.Kind != yaml.MappingNode || r.refused[n] {
		r.wrong(n, path, want)
		return false
	}
	seen := map[string]*yaml.Node{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		if k.Kind != yaml.ScalarNode || r.refused[k] {
			if !r.refused[k] {
				r.errs.add(r.of(k), "%sa key is a text; this is %s", prefix(path), kindOf(k))
			}
			continue
		}
		key := k.Value
		first, again := seen[key]
		switch {
		case again:
			r.errs.add(r.of(k), "%sduplicate key %s: it is already at %s", prefix(path), show(key), r.of(first))
			continue
		case known == nil && !validName.MatchString(key):
			r.errs.add(r.of(k), "%s%s is not a name: a name is 1 to 40 of a-z, 0-9 and _", prefix(path), show(key))
		case known != nil && !slices.Contains(known, key):
			r.errs.add(r.of(k), "%sunknown key %s%s", prefix(path), show(key), didYouMean(key, known))
			continue
		}
		seen[key] = k
		visit(key, k, v)
	}
	return true
}

var validName = regexp.MustCompile(`^[a-z0-9_]{1,40}$`)

func prefix(path string) string {
	if path == "" {
		return ""
	}
	return path + ": "
}

// list calls visit for every item.
func (r *reader) list(n *yaml.Node, path, want string, visit func(path string, v *yaml.Node)) bool {
	if n.Kind != yaml.SequenceNode || r.refused[n] {
		r.wrong(n, path, want)
		return false
	}
	for i, v := range n.Content {
		visit(fmt.Sprintf("%s[%d]", path, i), v)
	}
	return true
}

// text is a text that is not empty. A number, a date or a yes without quotes is
// none: what was meant is not what YAML would make of it.
func (r *reader) text(n *yaml.Node, path, want string) (string, bool) {
	if n.Kind != yaml.ScalarNode || r.refused[n] {
		r.wrong(n, path, want)
		return "", false
	}
	switch tag := n.ShortTag(); {
	case tag == "!!str" && n.Value != "":
		return n.Value, true
	case tag == "!!str":
		r.fail(n, path, "is empty; write %s", want)
	case tag == "!!null":
		r.wrong(n, path, want)
	default:
		r.fail(n, path, "needs %s; %s is %s (quote it if it is meant as text)", want, n.Value, kindOf(n))
	}
	return "", false
}

// choice is one of a few words.
func (r *reader) choice(n *yaml.Node, path string, words []string) (string, bool) {
	want := words[0]
	if n := len(words) - 1; n > 0 {
		want = strings.Join(words[:n], ", ") + " or " + words[n]
	}
	s, ok := r.text(n, path, want)
	if ok && !slices.Contains(words, s) {
		r.fail(n, path, "%s is not %s%s", show(s), want, nearest(s, words))
		return "", false
	}
	return s, ok
}

// nearest is didYouMean without the list of what there is.
func nearest(s string, words []string) string {
	if hint := didYouMean(s, words); strings.HasPrefix(hint, "; did") {
		return hint
	}
	return ""
}

func (r *reader) boolean(n *yaml.Node, path string) (value, ok bool) {
	if n.Kind != yaml.ScalarNode || r.refused[n] || n.Style != 0 || n.Value != "true" && n.Value != "false" {
		r.wrong(n, path, "true or false")
		return false, false
	}
	return n.Value == "true", true
}

var decimal = regexp.MustCompile(`^(0|[1-9][0-9]*)$`)

// number is a plain decimal number in a range: YAML has 010 (8), 1_000, 0x10,
// 1e3 and more, and an empty value that decodes to 0. None of them is what
// everybody reads, so all are errors. want says what may stand here.
func (r *reader) number(n *yaml.Node, path, want string, low, high uint64) (uint64, bool) {
	switch {
	case n.Kind != yaml.ScalarNode, r.refused[n], n.ShortTag() == "!!null":
		r.wrong(n, path, want)
		return 0, false
	case n.Style != 0 && decimal.MatchString(n.Value):
		r.fail(n, path, "%s is in quotes; write %s, without quotes", show(n.Value), want)
		return 0, false
	case !decimal.MatchString(n.Value):
		r.fail(n, path, "%s is not %s%s", show(n.Value), want, plainly(n.Value))
		return 0, false
	}
	// A number too long for 64 bits is out of range as well.
	v, err := strconv.ParseUint(n.Value, 10, 64)
	if err != nil || v < low || v > high {
		r.fail(n, path, "%s is out of range; write %s", clip(n.Value), want)
		return 0, false
	}
	return v, true
}

// plainly says what a plain number is, of what was meant as one.
func plainly(s string) string {
	if strings.ContainsAny(s[:min(1, len(s))], "+-.0123456789") {
		return " (digits only: no sign, fraction, exponent, unit or leading zero)"
	}
	return ""
}

// clip shortens digits.
func clip(s string) string {
	if len(s) > 24 {
		return s[:24] + "..."
	}
	return s
}
