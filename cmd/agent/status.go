package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"bulkhead/internal/agent"
	"bulkhead/internal/containers"
	"bulkhead/pkg/cgroup"
	"bulkhead/pkg/conn"
	"bulkhead/pkg/policy"
)

// status is the contract's document. Fields are only ever added.
type status struct {
	SchemaVersion int           `json:"schema_version"`
	Time          time.Time     `json:"time"`
	Node          string        `json:"node"`
	Agent         agentStatus   `json:"agent"`
	Generation    uint32        `json:"generation"` // 0: nothing is in force
	PolicyHash    string        `json:"policy_hash"`
	Mode          policy.Mode   `json:"mode"`
	Compartments  []compartment `json:"compartments"`
	Bulkheads     []bulkhead    `json:"bulkheads"`
	Traffic       []traffic     `json:"traffic"`
	Slots         slots         `json:"slots"`
	// Conditions are shortfalls; empty if all is well.
	Conditions []cgroup.Condition `json:"conditions"`
}

// agentStatus has only Running set while no agent answers.
type agentStatus struct {
	Running bool       `json:"running"`
	Version string     `json:"version,omitempty"`
	PID     int        `json:"pid,omitempty"`
	Since   *time.Time `json:"since,omitempty"`
	// Processes is about those that match by what they are.
	Processes *agent.Processes `json:"processes,omitempty"`
	// Runtimes are the container runtimes that it asks.
	Runtimes []containers.Runtime `json:"container_runtimes,omitempty"`
	// ValuesCorrected are values that others changed and the agent put back, since it runs,
	// those of the parent slice among them.
	ValuesCorrected *uint64 `json:"values_corrected,omitempty"`
}

type compartment struct {
	Feature string       `json:"feature"`
	Tenant  string       `json:"tenant"`
	Class   policy.Class `json:"class"`
	// Processes are those in this compartment and in no other.
	Processes int      `json:"processes"`
	Cgroups   []member `json:"cgroups"`
	// ValuesCorrected are values of these cgroups that others changed and the agent put back;
	// null while no agent runs, and of default, which has no cgroups.
	ValuesCorrected *uint64 `json:"values_corrected"`
}

type member struct {
	Path    string `json:"path"`
	ID      uint64 `json:"id"`
	Adopted bool   `json:"adopted"`
	// Container is whose cgroup it is if container matches it; known while the agent runs.
	Container *agent.AdoptedContainer `json:"container,omitempty"`
	// CompetesIn is the cgroup whose children share CPU by weight with this one.
	CompetesIn string `json:"competes_in"`
	// CPU has the kernel's values, but for UsageUsec, which is without the
	// cgroups of other rows nested in this one.
	CPU cgroup.CPUStat `json:"cpu"`
	// Effective is what quota and weight come to here.
	cgroup.Effective
	// RealtimeThreads are threads in this row's cgroups alone that no weight or quota holds for.
	RealtimeThreads int `json:"realtime_threads"`

	Memory   cgroup.MemoryStat `json:"memory"`
	Pressure cgroup.Pressure   `json:"pressure"`
}

type bulkhead struct {
	policy.Key
	Feature     string            `json:"feature"` // always there, "" where the scope has none
	Tenant      string            `json:"tenant"`
	Provider    string            `json:"provider"`
	Limit       policy.Limit      `json:"limit"`
	InUse       uint32            `json:"in_use"`
	Peak        uint32            `json:"peak"`
	Accepted    uint64            `json:"accepted"`
	Rejected    map[string]uint64 `json:"rejected"`
	WouldReject map[string]uint64 `json:"would_reject"`
	Draining    bool              `json:"draining,omitempty"`
}

type traffic struct {
	Feature     string  `json:"feature"`
	Tenant      string  `json:"tenant"`
	Provider    string  `json:"provider"`
	Connections uint64  `json:"connections_total"`
	TxBytes     *uint64 `json:"tx_bytes"` // null where bytes are not counted
	RxBytes     *uint64 `json:"rx_bytes"`
}

type slots struct {
	InUse uint64 `json:"in_use"`
	Max   uint64 `json:"max"`
	Full  uint64 `json:"full_total"`
	// Moved are connections whose process is in another compartment by now.
	Moved int `json:"moved"`
}

func (a *app) statusCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "show what is in force, live counts, and what falls short",
		Long: `Shows the policy in force, every bulkhead with its limit and live count, the
compartments with their cgroups and CPU, traffic, and conditions. It reads the
kernel's own maps, so it works while the agent is down. Needs root.

CPU time is of one row only: a tenant's is not in that of its feature, whose
slice is around the tenant's, so a sum over all rows counts nothing twice.
Memory and throttling are the kernel's own, with all below. QUOTA is the smallest
of the cgroup and those around it. WEIGHT is the cgroup's own, and what it comes to
beside the siblings of the same parent that have processes.

Each condition is a shortfall: {type, status, reason, message}. With --check the
exit code is 1 if anything needs attention: the agent is not running, nothing is
in force or another release of bulkhead is, programs are not attached or cannot be
looked at, pins were removed and cannot be put back, the last reload was refused,
CPU or memory values that the policy asks for are not in force, slots ran out, or
counts went wrong. Informative conditions do not count: Errno (this
kernel fails connect() with EPERM whatever the policy says), Scheduling (threads
that weights do not hold for, a scheduler that need not heed them, a realtime
feature that its quota stalls), Programs (others
have programs on our hooks), Namespaces (some sockets could not be looked at),
Slices (a feature left the policy and its processes are still running).`,
		Example: `  bulkhead status
  bulkhead status -o json | jq '.bulkheads[] | select(.limit != null and .in_use >= .limit)'
  bulkhead status --check && echo all is well`,
		Args: noArgs,
	}
	out := outputFlag(cmd)
	check := cmd.Flags().Bool("check", false, "exit 1 if anything needs attention")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		s, err := a.status(cmd.Context())
		if err != nil {
			return err
		}
		if out.json() {
			err = writeJSON(a.stdout, s)
		} else {
			err = s.table(a.stdout)
		}
		if err == nil && *check && slices.ContainsFunc(s.Conditions, needsAttention) {
			return &exitError{code: exitFailed}
		}
		return err
	}
	return cmd
}

// The types of conditions that status finds itself; the others come from the
// agent and from pkg/cgroup.
const (
	condAgent      = "Agent"
	condLoaded     = "Loaded"
	condAttached   = "Attached"
	condErrno      = "Errno"
	condPrograms   = "Programs"
	condSlots      = "Slots"
	condCounts     = "Counts"
	condNamespaces = "Namespaces"
	condSlices     = "Slices"
)

// needsAttention is what --check fails on, and its help lists.
func needsAttention(c cgroup.Condition) bool {
	return !slices.Contains([]string{condErrno, condPrograms, condNamespaces, condSlices, cgroup.TypeScheduling}, c.Type)
}

func shortfall(typ, reason, format string, args ...any) cgroup.Condition {
	return cgroup.Condition{Type: typ, Status: "False", Reason: reason, Message: fmt.Sprintf(format, args...)}
}

// status gathers everything. What is not loaded is a condition, not an error.
func (a *app) status(ctx context.Context) (*status, error) {
	tree, where, err := a.instance()
	if err != nil {
		return nil, err
	}
	node, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("name of this node: %w", err)
	}
	s := &status{SchemaVersion: 1, Time: time.Now(), Node: node, Compartments: []compartment{}, Bulkheads: []bulkhead{}, Traffic: []traffic{}, Conditions: []cgroup.Condition{}}
	info, running := a.askAgent(ctx, s, where)

	snap, err := snapshot(ctx, where)
	if errors.Is(err, conn.ErrNotLoaded) {
		s.Conditions = append(s.Conditions, shortfall(condLoaded, "NotLoaded", "%v", err))
		return s, nil
	}
	if errors.Is(err, conn.ErrOtherRelease) {
		// What it says of itself is true of what is in force; the counts we cannot read.
		s.Generation, s.PolicyHash = info.Generation, info.PolicyHash
		s.Conditions = append(append(s.Conditions, info.Conditions...), shortfall(condLoaded, "OtherRelease", "this is bulkhead %s, which cannot read it: %v", build().Version, err))
		return s, nil
	}
	if err != nil {
		return nil, err
	}
	s.Time, s.Generation, s.PolicyHash, s.Mode = snap.Time, snap.Generation, snap.Plan.Hash, snap.Plan.Mode
	if s.Compartments, err = compartments(tree, snap); err != nil {
		return nil, err
	}
	s.fill(snap)
	s.corrected(info)
	s.contained(info)
	if running {
		s.Conditions = append(s.Conditions, info.Conditions...)
	} else {
		s.Conditions = append(s.Conditions, controllers(tree, snap.Plan)...)
	}
	if err := s.scheduling(tree); err != nil {
		return nil, err
	}
	s.Slots.Moved = moved(tree, snap)
	var dirs []string
	for _, c := range s.Compartments {
		for _, m := range c.Cgroups {
			dirs = append(dirs, filepath.Join(tree.Dir, m.Path))
		}
	}
	s.Conditions = append(s.Conditions, kernelConditions(snap, where, dirs)...)
	return s, nil
}

// askAgent fills in what the agent says of itself.
func (a *app) askAgent(ctx context.Context, s *status, where conn.Options) (agent.Info, bool) {
	info, err := a.client().Info(ctx)
	if err == nil {
		s.Agent = agentStatus{Running: true, Version: info.Version, PID: info.PID, Since: &info.Since, Processes: &info.Processes, Runtimes: info.Runtimes}
		return info, true
	}
	message := err.Error()
	if pid, ok := conn.Holder(where); ok {
		message = fmt.Sprintf("agent %d holds the pins in %s, but: %v", pid, where.BPFFS, err)
	}
	s.Conditions = append(s.Conditions, shortfall(condAgent, "NotRunning", "%s: nothing reloads, adopts or reconciles", message))
	return info, false
}

// contained says of each cgroup which container's it is.
func (s *status) contained(info agent.Info) {
	for _, k := range info.Containers {
		for i := range s.Compartments {
			for j := range s.Compartments[i].Cgroups {
				if m := &s.Compartments[i].Cgroups[j]; m.ID == k.CgroupID {
					m.Container = &k
				}
			}
		}
	}
}

// corrected fills in what the agent put back.
func (s *status) corrected(info agent.Info) {
	total := uint64(0)
	for _, k := range info.ValuesCorrected {
		total += k.Count
		for i, c := range s.Compartments {
			if c.Feature == k.Feature && c.Tenant == k.Tenant {
				s.Compartments[i].ValuesCorrected = &k.Count
			}
		}
	}
	if s.Agent.Running {
		s.Agent.ValuesCorrected = &total
	}
}

func (s *status) fill(snap *conn.Snapshot) {
	for _, b := range snap.Bulkheads {
		s.Bulkheads = append(s.Bulkheads, bulkhead{
			Key: b.Key, Feature: b.Feature, Tenant: b.Tenant, Provider: b.Provider,
			Limit: b.Limit, InUse: b.InUse, Peak: b.Peak, Accepted: b.Accepted,
			Rejected: b.Rejected, WouldReject: b.WouldReject, Draining: b.Draining,
		})
	}
	for _, t := range snap.Traffic {
		row := traffic{Feature: t.Feature, Tenant: t.Tenant, Provider: t.Provider, Connections: t.Connections}
		if t.Bytes {
			row.TxBytes, row.RxBytes = &t.TxBytes, &t.RxBytes
		}
		s.Traffic = append(s.Traffic, row)
	}
	s.Slots = slots{InUse: snap.Totals.Slots, Max: snap.Totals.SlotsMax, Full: snap.Totals.SlotsFull}
}

// compartments joins the plan with the cgroups that the kernel has for it.
func compartments(tree *cgroup.Tree, snap *conn.Snapshot) ([]compartment, error) {
	all, err := tree.Walk()
	if err != nil {
		return nil, err
	}
	out := make([]compartment, len(snap.Plan.Compartments))
	for i, c := range snap.Plan.Compartments {
		out[i] = compartment{Feature: c.Feature, Tenant: c.Tenant, Class: c.Class, Cgroups: []member{}}
	}
	// Cgroups that are nested in others of the list give their processes to
	// whoever is around them: the deepest decides. Parents come first.
	owner := map[string]int{}
	usage := map[string]uint64{}
	for _, m := range placed(snap, all) {
		i := int(m.Compartment)
		stat, err := tree.Stat(m.cgroup.Path)
		if errors.Is(err, cgroup.ErrGone) {
			continue
		}
		if err != nil {
			return nil, err
		}
		effective, err := tree.Effective(m.cgroup.Path)
		if errors.Is(err, cgroup.ErrGone) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for p := path.Dir(m.cgroup.Path); p != "/" && p != "."; p = path.Dir(p) {
			if around, ok := owner[p]; ok {
				out[around].Processes -= stat.Processes
				break
			}
		}
		owner[m.cgroup.Path], usage[m.cgroup.Path] = i, stat.CPU.UsageUsec
		out[i].Processes += stat.Processes
		out[i].Cgroups = append(out[i].Cgroups, member{
			Path: m.cgroup.Path, ID: m.cgroup.ID, Adopted: m.cgroup.Path != snap.Plan.Compartments[i].Slice,
			CompetesIn: path.Dir(m.cgroup.Path), CPU: stat.CPU, Effective: effective, Memory: stat.Memory, Pressure: stat.Pressure,
		})
	}
	usage = cgroup.OwnUsage(usage)
	for _, c := range out {
		for i := range c.Cgroups {
			c.Cgroups[i].CPU.UsageUsec = usage[c.Cgroups[i].Path]
		}
	}
	// Everything else is default's, but for what came and went meanwhile.
	total, err := tree.Processes("/")
	if err != nil {
		return nil, err
	}
	for _, c := range out[1:] {
		total -= c.Processes
	}
	out[0].Processes = max(total, 0)
	return out, nil
}

// moved counts the open connections whose process is in another compartment now than the
// one that admitted them, which keeps them. A process that is gone has not moved.
func moved(tree *cgroup.Tree, snap *conn.Snapshot) int {
	all, err := tree.Walk()
	if err != nil {
		return 0
	}
	in := map[uint64]uint32{}
	for _, m := range placed(snap, all) {
		in[m.CgroupID] = m.Compartment
	}
	in = cgroup.Inherit(all, in)
	of := map[uint32]*policy.Compartment{} // by process; nil if it is gone
	n := 0
	for _, c := range snap.Connections {
		now, seen := of[c.PID]
		if !seen {
			if g, err := tree.Of(int(c.PID)); err == nil {
				now = &snap.Plan.Compartments[in[g.ID]] // 0, default, where none is named
			}
			of[c.PID] = now
		}
		if now != nil && (now.Feature != c.Feature || now.Tenant != c.Tenant) {
			n++
		}
	}
	return n
}

// placedMember is a member of the plan in force whose cgroup still exists.
type placedMember struct {
	conn.Member
	cgroup cgroup.Cgroup
}

// placed are the members that are in compartments, parents first.
func placed(snap *conn.Snapshot, all []cgroup.Cgroup) []placedMember {
	byID := make(map[uint64]conn.Member, len(snap.Members))
	for _, m := range snap.Members {
		byID[m.CgroupID] = m
	}
	var out []placedMember
	for _, c := range all {
		m, ok := byID[c.ID]
		if ok && !m.Protected && int(m.Compartment) < len(snap.Plan.Compartments) {
			out = append(out, placedMember{m, c})
		}
	}
	return out
}

// controllers are the shortfalls that can be seen without the agent.
func controllers(tree *cgroup.Tree, plan *policy.Plan) []cgroup.Condition {
	var out []cgroup.Condition
	asked := map[string]bool{}
	for _, f := range plan.Features {
		asked["cpu"] = asked["cpu"] || f.CPU != nil
		asked["cpuset"] = asked["cpuset"] || f.CPU != nil && f.CPU.CPUs != ""
		asked["memory"] = asked["memory"] || f.Memory != nil
		asked["pids"] = asked["pids"] || f.Pids != nil
	}
	for _, name := range []string{"cpu", "cpuset", "memory", "pids"} {
		if !asked[name] || plan.Mode == policy.Observe {
			continue
		}
		if c, missing := tree.Shortfall(name); missing {
			out = append(out, c)
		}
	}
	return append(out, tree.CPUConditions(plan)...)
}

// kernelConditions are what the kernel side itself shows.
func kernelConditions(snap *conn.Snapshot, where conn.Options, cgroups []string) []cgroup.Condition {
	var out []cgroup.Condition
	a, err := conn.ReadAttachment(where, cgroups...)
	if err != nil {
		a.Unread = []error{err}
	}
	out = append(out, attached(a, where)...)
	if !conn.HaveErrno() {
		out = append(out, shortfall(condErrno, "FallbackEPERM", "this kernel (before 5.18) fails a refused connect() with EPERM whatever the policy says"))
	}
	t := snap.Totals
	if t.SlotsFull > 0 {
		out = append(out, shortfall(condSlots, "Full", "%d connections found no room or no memory for their slot (%d at most): they were let through uncounted, or refused if the policy said exhausted: refuse", t.SlotsFull, t.SlotsMax))
	}
	if t.Uncounted > 0 {
		out = append(out, shortfall(condCounts, "Uncounted", "%d connections were let through uncounted because an old entry of their socket did not go away", t.Uncounted))
	}
	if t.Underflow > 0 {
		out = append(out, shortfall(condCounts, "Underflow", "%d releases found a count of zero: please report this as a bug", t.Underflow))
	}
	if len(snap.Unseen) > 0 {
		out = append(out, shortfall(condNamespaces, "NotRead", "sockets of these network namespaces could not be read, their bytes count when they close: %s", strings.Join(snap.Unseen, "; ")))
	}
	return out
}

// attached renders what conn says of the programs. That it could not be looked at needs
// attention as much as that one is missing.
func attached(a conn.Attachment, where conn.Options) []cgroup.Condition {
	var out []cgroup.Condition
	if len(a.Missing) > 0 {
		out = append(out, shortfall(condAttached, "Missing", "not attached to %s: %s; start the agent again, after bulkhead detach if it refuses", where.CgroupRoot, strings.Join(a.Missing, ", ")))
	}
	if err := errors.Join(a.Unread...); err != nil {
		out = append(out, shortfall(condAttached, "NotRead", "what is attached is not known: %s", strings.ReplaceAll(err.Error(), "\n", "; ")))
	}
	var foreign []string
	for _, p := range a.Programs {
		if !p.Ours {
			one := strings.TrimSpace(fmt.Sprintf("%s: program %d %s", p.Hook, p.ID, p.Name))
			if p.Cgroup != "" {
				one += " on " + p.Cgroup
			}
			foreign = append(foreign, one)
		}
	}
	if len(foreign) > 0 {
		out = append(out, shortfall(condPrograms, "Foreign", "others have programs on the same hooks, which may refuse before or after bulkhead: %s", strings.Join(foreign, ", ")))
	}
	return out
}

// table is the document for people: what is busy first.
func (s *status) table(w io.Writer) error {
	agentText := "not running"
	if s.Agent.Running {
		agentText = fmt.Sprintf("pid %d, %s, since %s", s.Agent.PID, s.Agent.Version, s.Agent.Since.Format(time.RFC3339))
	}
	policyText := "none in force"
	if s.Generation > 0 {
		policyText = fmt.Sprintf("generation %d, mode %s, %s", s.Generation, s.Mode, s.PolicyHash)
	}
	for _, c := range s.Conditions {
		if c.Type == condLoaded && c.Reason == "OtherRelease" {
			policyText = "in force, of another release of bulkhead"
		}
	}
	rows := [][]string{{"agent", agentText}, {"policy", policyText}}
	if p := s.Agent.Processes; p != nil && p.Watch != "" {
		how := "the kernel tells of them"
		if p.Watch == "polling" {
			how = "looked for ten times a second"
		}
		rows = append(rows, []string{"processes", fmt.Sprintf("%d moved into their compartments, %d of them again; %s", p.Moved, p.Lost, how)})
	}
	for _, r := range s.Agent.Runtimes {
		how := "tells of " + plural(r.Containers, "container")
		switch {
		case !r.Answers:
			how = "does not answer; " + plural(r.Containers, "container") + " known from before"
		case r.Error != "":
			how += "; " + r.Error
		}
		rows = append(rows, []string{r.Runtime, how})
	}
	if err := table(w, rows...); err != nil {
		return err
	}
	if len(s.Compartments) > 0 {
		fmt.Fprintln(w)
		if err := table(w, s.bulkheadRows()...); err != nil {
			return err
		}
		fmt.Fprintln(w)
		if err := table(w, s.compartmentRows()...); err != nil {
			return err
		}
		fmt.Fprintln(w)
		if err := table(w, s.trafficRows()...); err != nil {
			return err
		}
		if s.Slots.Moved > 0 {
			fmt.Fprintf(w, "\n%s: admitted in another compartment than where the process is now, and counted there until the end\n", plural(s.Slots.Moved, "connection"))
		}
	}
	if n := s.Agent.ValuesCorrected; n != nil && *n > 0 {
		fmt.Fprintf(w, "\n%s of cgroups: changed by somebody else and put back since the agent runs; its log says which\n", plural(int(*n), "value"))
	}
	return printConditions(w, s.Conditions)
}

// printConditions is the last part of status and of plan.
func printConditions(w io.Writer, conds []cgroup.Condition) error {
	for i, c := range conds {
		if i == 0 {
			fmt.Fprintln(w)
		}
		// A policy's errors are one a line.
		message := strings.ReplaceAll(c.Message, "\n", "\n  ")
		if _, err := fmt.Fprintf(w, "%s: %s: %s\n", c.Type, c.Reason, message); err != nil {
			return err
		}
	}
	return nil
}

func (s *status) bulkheadRows() [][]string {
	rows := [][]string{{"SCOPE", "FEATURE", "TENANT", "PROVIDER", "IN USE", "LIMIT", "PEAK", "ACCEPTED", "REJECTED", "WOULD REJECT", ""}}
	for _, b := range s.Bulkheads {
		note := ""
		switch {
		case b.Draining:
			note = "draining"
		case b.Limit != policy.Unlimited && b.InUse >= uint32(b.Limit):
			note = "full"
		}
		rows = append(rows, []string{b.Scope.String(), dash(b.Feature), dash(b.Tenant), dash(b.Provider),
			fmt.Sprint(b.InUse), b.Limit.String(), fmt.Sprint(b.Peak), count(b.Accepted), count(sum(b.Rejected)), count(sum(b.WouldReject)), note})
	}
	return rows
}

func (s *status) compartmentRows() [][]string {
	rows := [][]string{{"COMPARTMENT", "CLASS", "PROCESSES", "CGROUP", "WEIGHT", "QUOTA", "CPUS", "CPU TIME", "THROTTLED", "MEMORY"}}
	for _, c := range s.Compartments {
		name, class, processes := named(c.Feature, c.Tenant), string(c.Class), fmt.Sprint(c.Processes)
		if len(c.Cgroups) == 0 {
			rows = append(rows, []string{name, class, processes, "-", "-", "-", "-", "-", "-", "-"})
		}
		for _, m := range c.Cgroups {
			at := m.Path
			if m.Container != nil {
				at = shortID(at) + fmt.Sprintf(" (adopted, %s container %s)", m.Container.Runtime, m.Container.Name)
			} else if m.Adopted {
				at += " (adopted)"
			}
			rows = append(rows, []string{name, class, processes, at, weightText(m), quotaText(m), cpusText(m.CPU.CPUs),
				age(time.Duration(m.CPU.UsageUsec) * time.Microsecond), age(time.Duration(m.CPU.ThrottledUsec) * time.Microsecond), memoryText(m.Memory)})
			name, class, processes = "", "", ""
		}
	}
	return rows
}

// shortID has twelve digits of a container's id in a path, as runtimes show it.
func shortID(p string) string {
	dir, base := path.Split(p)
	return dir + longID.ReplaceAllString(base, "$1…")
}

var longID = regexp.MustCompile(`([0-9a-f]{12})[0-9a-f]{52}`)

// weightText is the weight and what it comes to among which siblings.
func weightText(m member) string {
	text := "-"
	switch {
	case m.CPU.Idle:
		text = "idle"
	case m.CPU.Weight != nil:
		text = fmt.Sprint(*m.CPU.Weight)
	}
	if m.Share != nil {
		text += fmt.Sprintf(" (%.2f of %s)", *m.Share, m.CompetesIn)
	}
	return text
}

// quotaText is the quota that holds, and whose it is if it is not the cgroup's own.
func quotaText(m member) string {
	if m.Effective.CPU == nil {
		return "-"
	}
	text := fmt.Sprintf("%d%%", int(*m.Effective.CPU*100+0.5))
	if m.CPUFrom != m.Path {
		return text + fmt.Sprintf(" (of %s)", m.CPUFrom)
	}
	if q := m.CPU.Max; q != nil && q.BurstUsec > 0 {
		text += fmt.Sprintf("+%dms", q.BurstUsec/1000)
	}
	return text
}

func cpusText(cpus *string) string {
	if cpus == nil {
		return "-"
	}
	return *cpus
}

func memoryText(m cgroup.MemoryStat) string {
	if m.Current == nil {
		return "-"
	}
	return size(*m.Current)
}

func (s *status) trafficRows() [][]string {
	rows := slices.Clone(s.Traffic)
	slices.SortStableFunc(rows, func(a, b traffic) int { return cmp.Compare(b.Connections, a.Connections) })
	out := [][]string{{"COMPARTMENT", "PROVIDER", "CONNECTIONS", "SENT", "RECEIVED"}}
	for _, t := range rows {
		if t.Connections == 0 {
			continue
		}
		tx, rx := "-", "-"
		if t.TxBytes != nil {
			tx, rx = size(*t.TxBytes), size(*t.RxBytes)
		}
		out = append(out, []string{named(t.Feature, t.Tenant), t.Provider, count(t.Connections), tx, rx})
	}
	return out
}
