package cgroup

import (
	"fmt"
	"testing"
)

// TestProperties: what systemd calls the values that a policy can ask for.
func TestProperties(t *testing.T) {
	for v, want := range map[Value]string{
		{"cpu.weight", "900"}:          "[CPUWeight=@t 900]",
		{"cpu.idle", "1"}:              "[CPUWeight=@t 0]",
		{"cpu.idle", "0"}:              "[CPUWeight=@t 100]",
		{"cpu.max", "150000 100000"}:   "[CPUQuotaPerSecUSec=@t 1500000 CPUQuotaPeriodUSec=@t 100000]",
		{"cpu.max", "4000 20000"}:      "[CPUQuotaPerSecUSec=@t 200000 CPUQuotaPeriodUSec=@t 20000]",
		{"cpu.max", "max 100000"}:      "[CPUQuotaPerSecUSec=@t 18446744073709551615 CPUQuotaPeriodUSec=@t 18446744073709551615]",
		{"memory.high", "4096"}:        "[MemoryHigh=@t 4096]",
		{"pids.max", "500"}:            "[TasksMax=@t 500]",
		{"memory.max", "max"}:          "[MemoryMax=@t 18446744073709551615]",
		{"cpu.max.burst", "1000"}:      "[]", // it has no name for it
		{"cpu.uclamp.min", "5.00"}:     "[]",
		{"cpuset.cpus", "0,2-3,9"}:     "[AllowedCPUs=@ay [0xd, 0x2]]",
		{"cpuset.cpus", ""}:            "[AllowedCPUs=@ay []]",
		{"cpuset.cpus", "many"}:        "error",
		{"cpu.weight", "no number"}:    "error",
		{"cpu.max", "no number 10000"}: "error",
	} {
		ps, err := properties(v)
		var got []string
		for _, p := range ps {
			got = append(got, fmt.Sprintf("%s=%s", p.Name, p.Value))
		}
		if s := fmt.Sprint(got); want != "error" && (s != want || err != nil) || want == "error" && err == nil {
			t.Errorf("%+v: %s (%v), want %s", v, s, err, want)
		}
	}
}

// TestSlicePaths: a slice's name says where it is.
func TestSlicePaths(t *testing.T) {
	for unit, want := range map[string]string{
		"bulkhead.slice":           "/bulkhead.slice",
		"bulkhead-chat.slice":      "/bulkhead.slice/bulkhead-chat.slice",
		"bulkhead-chat-acme.slice": "/bulkhead.slice/bulkhead-chat.slice/bulkhead-chat-acme.slice",
	} {
		if got := slicePathOf(unit); got != want || !isSlice(got) || unitOf(got) != unit {
			t.Errorf("%s is at %s, want %s", unit, got, want)
		}
	}
}

// TestManager: who makes the slices of this tree. Only where init is systemd of this very
// tree is it asked.
func TestManager(t *testing.T) {
	tree := testTree(t)
	m := tree.Manager
	if m.Name != "cgroupfs" || m.Unreachable || m.Why == "" {
		t.Errorf("%+v, want the files: the root is a cgroup of our own", m)
	}
	if _, ok := tree.Backend.(cgroupfs); !ok {
		t.Errorf("the back end is %T", tree.Backend)
	}
}
