package main

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"bulkhead/pkg/cgroup"
	"bulkhead/pkg/conn"
)

// What the kernel side shows becomes conditions, and of which --check fails.
func TestKernelConditions(t *testing.T) {
	where := conn.Options{CgroupRoot: "/a", BPFFS: filepath.Join(t.TempDir(), "none")}
	of := func(totals conn.Totals) []cgroup.Condition {
		return kernelConditions(&conn.Snapshot{Totals: totals}, where, nil)
	}
	for _, c := range []struct {
		name                 string
		conditions           []cgroup.Condition
		typ, reason, message string
		attention            bool
	}{
		{"a lost program", attached(conn.Attachment{Missing: []string{"ingress", "sendmsg4"}}, where),
			"Attached", "Missing", "not attached to /a: ingress, sendmsg4", true},
		{"programs that cannot be read", attached(conn.Attachment{Unread: []error{errors.New("connect4: x"), errors.New("connect6: y")}}, where),
			"Attached", "NotRead", "connect4: x; connect6: y", true},
		{"nothing that can be read", of(conn.Totals{}), "Attached", "NotRead", where.BPFFS, true},
		{"programs of others", attached(conn.Attachment{Programs: []conn.Program{{Hook: "connect4", ID: 7, Name: "x"}}}, where),
			"Programs", "Foreign", "connect4: program 7 x", false},
		{"slots ran out", of(conn.Totals{SlotsFull: 3, SlotsMax: 9}), "Slots", "Full", "3 connections", true},
		{"an entry that did not go away", of(conn.Totals{Uncounted: 4}), "Counts", "Uncounted", "4 connections", true},
		{"below zero", of(conn.Totals{Underflow: 5}), "Counts", "Underflow", "5 releases", true},
	} {
		i := slices.IndexFunc(c.conditions, func(x cgroup.Condition) bool { return x.Type == c.typ && x.Reason == c.reason })
		if i < 0 {
			t.Errorf("%s: %+v, want %s %s", c.name, c.conditions, c.typ, c.reason)
			continue
		}
		if x := c.conditions[i]; !strings.Contains(x.Message, c.message) || needsAttention(x) != c.attention {
			t.Errorf("%s: %+v, needs attention: %v; want %q and %v", c.name, x, needsAttention(x), c.message, c.attention)
		}
	}
	for _, x := range append(attached(conn.Attachment{Programs: []conn.Program{{Hook: "connect4", ID: 7, Ours: true}}}, where), of(conn.Totals{})...) {
		if x.Type != "Attached" && x.Type != "Errno" || x.Reason == "Missing" {
			t.Errorf("all is well, and yet %+v", x)
		}
	}
}
