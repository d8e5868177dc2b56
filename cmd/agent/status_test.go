package main

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"bulkhead/internal/containers"
	"bulkhead/pkg/cgroup"
	"bulkhead/pkg/conn"
	"bulkhead/pkg/policy"
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

// A realtime feature that its quota stalls is warned of from more than one of a hundred periods on.
func TestThrottled(t *testing.T) {
	of := func(class policy.Class, throttled uint64, quota *cgroup.Quota) []cgroup.Condition {
		return schedulingOf(class, cgroup.CPUStat{NrPeriods: 1000, NrThrottled: throttled, Max: quota})
	}
	quota := &cgroup.Quota{QuotaUsec: 50000, PeriodUsec: 100000}
	for name, got := range map[string][]cgroup.Condition{
		"one of a hundred":     of(policy.Realtime, 10, quota),
		"of another class":     of(policy.Batch, 500, quota),
		"no quota any more":    of(policy.Realtime, 500, nil),
		"no periods, no stall": schedulingOf(policy.Realtime, cgroup.CPUStat{Max: quota}),
	} {
		if len(got) > 0 {
			t.Errorf("%s: %+v", name, got)
		}
	}
	got := of(policy.Realtime, 11, quota)
	if len(got) != 1 || got[0].Type != "Scheduling" || got[0].Reason != "Throttled" || needsAttention(got[0]) {
		t.Fatalf("%+v, want one condition that needs no attention", got)
	}
	for _, w := range []string{"11 of 1000", "1.1 %", "/system.slice/chat.service", "features.chat.cpu.max"} {
		if !strings.Contains(got[0].Message, w) {
			t.Errorf("%q does not say %q", got[0].Message, w)
		}
	}
}

func schedulingOf(class policy.Class, cpu cgroup.CPUStat) []cgroup.Condition {
	return throttled([]compartment{{Feature: "chat", Class: class, Cgroups: []member{{Path: "/system.slice/chat.service", CPU: cpu}}}})
}

// The text says of each runtime whether it answers, and whether it is heard of late.
func TestStatusOfRuntimes(t *testing.T) {
	var out strings.Builder
	s := &status{Agent: agentStatus{Running: true, Since: &time.Time{}, Runtimes: []containers.Runtime{
		{Runtime: "docker", Answers: true, Containers: 1},
		{Runtime: "podman", Answers: true, Containers: 2, Error: "it does not tell of changes"},
		{Runtime: "containerd", Containers: 3, Error: "hung"},
	}}}
	if err := s.table(&out); err != nil {
		t.Fatal(err)
	}
	for _, w := range []string{"docker      tells of 1 container\n", "podman      tells of 2 containers; it does not tell of changes\n", "containerd  does not answer; 3 containers known from before\n"} {
		if !strings.Contains(out.String(), w) {
			t.Errorf("%q is not in\n%s", w, &out)
		}
	}
}
