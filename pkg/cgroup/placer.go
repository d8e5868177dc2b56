package cgroup

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"bulkhead/pkg/policy"
)

// passes bounds how often all processes are looked at again while those that
// are moved go on forking.
const passes = 10

// Placer puts processes that match a policy by what they are (exe, cmdline,
// user) into their compartments, with all their descendants.
//
// Only loose processes are moved: those in the tree's root, in a slice, or in a
// directory of nobody's. Never is one moved out of a unit, a scope or a
// container that somebody else manages, whose stop, watchdog, limits and logs
// would end for it: that is a Condition which names the cure.
//
// It is told of each process that begins, becomes another program or another
// user; Pass finds all that there are. It is not for more than one goroutine.
type Placer struct {
	tree  *Tree
	plan  *policy.Plan
	items []item
	self  int
	// namespaces are ours and the first process's, by kind: who has others is in a
	// container.
	namespaces map[string][]string

	// containers are those that the plan names, by path; contained is whether others are since the last Verify.
	containers map[string]*FoundContainer
	contained  bool
	// followed are the processes that match and those that come of them.
	followed map[int]follow
	// gone are processes that had ended when they were to be looked at, since Begin:
	// their children are looked at in their place.
	gone    map[int]bool
	refused map[refusal]map[int]uint64 // pids, and when each began
	counts  Placed
	moved   []Moved
	seen    map[int]time.Time // by Poll, and since when
	lastPID string            // the youngest process then
	// youngUntil is until when one may be young.
	youngUntil time.Time
	// dry: nothing is moved, only told.
	dry bool
}

// follow is a process that belongs to a compartment.
type follow struct {
	start       uint64
	compartment uint32
	// at is the cgroup that it was put in or found in, so that one that somebody moves elsewhere is noticed.
	at string
}

// refusal is a place out of which a compartment's processes are not moved.
type refusal struct {
	compartment uint32
	cgroup, why string
}

// Placed counts what a Placer did since it was made.
type Placed struct {
	Moved uint64 // processes moved into a compartment
	Lost  uint64 // of these, later found elsewhere: somebody else had moved them
	// Skipped are looks at what matches and cannot be moved, by why: see SkipReasons.
	Skipped map[string]uint64
}

// SkipReasons are the reasons for which a process that matches is not moved:
// managed by somebody else, in a container, protected, started by bulkhead exec
// (explicit), ended meanwhile (gone), unreadable, refused by the kernel or systemd.
func SkipReasons() []string {
	return []string{"managed", "container", "protected", "explicit", "gone", "unreadable", "refused"}
}

// Moved is one move.
type Moved struct {
	PID         int
	Compartment policy.Compartment
	From, To    string // cgroups
}

// NewPlacer returns the placer of a plan.
func NewPlacer(t *Tree, plan *policy.Plan) *Placer {
	p := &Placer{tree: t, plan: plan, followed: map[int]follow{}, gone: map[int]bool{}, refused: map[refusal]map[int]uint64{},
		self: os.Getpid(), namespaces: map[string][]string{}, counts: Placed{Skipped: map[string]uint64{}}}
	p.items = itemsOf(plan)
	if plan.Mode == policy.Observe || !slices.ContainsFunc(p.items, item.OfProcess) {
		p.items = nil
	}
	for _, kind := range []string{"pid", "mnt", "cgroup"} {
		for _, of := range []string{"self", "1"} {
			if ns, err := os.Readlink("/proc/" + of + "/ns/" + kind); err == nil {
				p.namespaces[kind] = append(p.namespaces[kind], ns)
			}
		}
	}
	return p
}

// placingItems are the items by which processes are placed. One in a container is not moved, so items about containers
// name none here.
func placingItems(plan *policy.Plan) []item {
	return slices.DeleteFunc(itemsOf(plan), func(it item) bool { return len(it.Container) > 0 })
}

// Needed reports whether the plan asks for processes to be placed at all.
func (p *Placer) Needed() bool { return len(p.items) > 0 && !p.tree.Namespaced }

// Follow takes over what an earlier placer followed, as far as it still belongs into
// the compartments: see SendBack, which comes first.
func (p *Placer) Follow(before *Placer) {
	if before == nil {
		return
	}
	p.seen, p.lastPID = before.seen, before.lastPID
	p.counts.Moved, p.counts.Lost = before.counts.Moved, before.counts.Lost
	for why, n := range before.counts.Skipped {
		p.counts.Skipped[why] = n
	}
	if !p.Needed() {
		return
	}
	if len(before.followed) == 0 {
		return
	}
	// Of a tree that cannot be read it is not known where processes came from: then they may match.
	all, _ := p.tree.Walk()
	b := newBelonging(p.tree, p.plan, []*policy.Plan{before.plan}, all)
	for pid, f := range before.followed {
		was := before.plan.Compartments[f.compartment]
		for i, c := range p.plan.Compartments {
			if c.Feature == was.Feature && c.Tenant == was.Tenant && p.places(uint32(i)) && b.of(pid, c.Slice) == c.Slice {
				f.compartment = uint32(i)
				p.followed[pid] = f
			}
		}
	}
}

// Containers tells which cgroups are those of containers that the plan names: who is in one that an earlier item
// matches is where that item has it.
func (p *Placer) Containers(found Containers) {
	byPath := make(map[string]*FoundContainer, len(found))
	same := len(found) == len(p.containers)
	for _, c := range found {
		byPath[c.path] = c
		old := p.containers[c.path]
		same = same && old != nil && slices.Equal(old.fits, c.fits)
	}
	p.containers = byPath
	p.contained = p.contained || !same
}

// inContainer reports whether a cgroup is or is in that of a container which an item matches.
func (p *Placer) inContainer(it item, at string) bool {
	for ; at != "/" && at != "."; at = path.Dir(at) {
		if c := p.containers[at]; c != nil && it.matchesContainerOf(c) && it.matchesCgroup(at) {
			return true
		}
	}
	return false
}

// places reports whether an item puts processes into a compartment.
func (p *Placer) places(compartment uint32) bool {
	return slices.ContainsFunc(p.items, func(it item) bool { return it.OfProcess() && it.compartment == compartment })
}

// Pass looks at every process, until a look finds none to move. The error is
// for a /proc that cannot be read.
func (p *Placer) Pass() error {
	if !p.Needed() {
		return nil
	}
	p.refused = map[refusal]map[int]uint64{}
	for range passes {
		pids, err := processes()
		if err != nil {
			return fmt.Errorf("look for processes: %w", err)
		}
		// Parents mostly have the smaller number: their children find them followed.
		slices.Sort(pids)
		before := p.counts.Moved
		there := make(map[int]bool, len(pids))
		for _, pid := range pids {
			there[pid] = true
			p.Look(pid)
		}
		for pid := range p.followed {
			if !there[pid] {
				delete(p.followed, pid)
			}
		}
		if p.counts.Moved == before {
			break
		}
	}
	return nil
}

// Verify finds those that somebody has moved out of their compartments, tries again
// what was refused, and forgets those that have ended. It reads the lists of the cgroups that
// they were put in, however many processes are in them, and no process in its place.
func (p *Placer) Verify() {
	inside, looked := map[int]bool{}, map[string]bool{}
	for _, f := range p.followed {
		if f.at == "" || looked[f.at] {
			continue
		}
		looked[f.at] = true
		pids, err := p.tree.members(f.at)
		if err != nil {
			return // and again
		}
		for _, pid := range pids {
			inside[pid] = true
		}
	}
	for pid, f := range p.followed {
		if f.at != "" && !inside[pid] {
			p.Look(pid)
		} else if f.at == "" && !(process{pid: pid, start: f.start}).still() {
			delete(p.followed, pid)
		}
	}
	for r, pids := range p.refused {
		for pid, start := range pids {
			if !(process{pid: pid, start: start}).still() {
				delete(pids, pid)
			} else if p.contained || kindOf(r.why) == "refused" {
				delete(pids, pid)
				p.Look(pid)
			}
		}
		if len(pids) == 0 {
			delete(p.refused, r)
		}
	}
	p.contained = false
}

// young is for how long a process is looked at again by Poll: it may become
// another program.
const young = 2 * time.Second

// Poll looks at the processes that it has not seen before, and at the young. It
// stands in where nobody tells of them.
func (p *Placer) Poll(now time.Time) error {
	// Its last field is the pid that was given last (proc(5)).
	load, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return fmt.Errorf("look for processes: %w", err)
	}
	f := strings.Fields(string(load))
	if last := f[len(f)-1]; last == p.lastPID && now.After(p.youngUntil) {
		return nil
	} else if last != p.lastPID {
		p.lastPID, p.youngUntil = last, now.Add(young)
	}
	pids, err := processes()
	if err != nil {
		return fmt.Errorf("look for processes: %w", err)
	}
	slices.Sort(pids)
	seen := make(map[int]time.Time, len(pids))
	for _, pid := range pids {
		first, known := p.seen[pid]
		if !known {
			first = now
		}
		seen[pid] = first
		if now.Sub(first) < young {
			p.Look(pid)
		}
	}
	p.seen = seen
	return nil
}

// Preview returns the moves that a first Pass would make, and makes none.
// Conditions then are those that it would have. It is for a placer that does
// nothing else.
func (p *Placer) Preview() ([]Moved, error) {
	p.dry = true
	err := p.Pass()
	return p.Moves(), err
}

// Begin begins to look at what was told together, in order.
func (p *Placer) Begin() { clear(p.gone) }

// Forked is told that a process has made another. Nearly always it is where it
// should be, or nobody's concern.
func (p *Placer) Forked(parent, child int) {
	f, ok := p.followed[parent]
	switch {
	case ok:
		p.look(child, &f.compartment)
	case p.gone[parent]:
		p.look(child, nil)
	default:
		delete(p.followed, child) // another had this pid
	}
}

// Look places one process, if it is to be placed.
func (p *Placer) Look(pid int) { p.look(pid, nil) }

// look places a process that may come of one in a compartment, of which /proc does not
// tell any more when that one has ended.
func (p *Placer) look(pid int, of *uint32) {
	if pid == p.self || pid <= 1 || !p.Needed() {
		return
	}
	pr, err := processOf(pid)
	if err != nil {
		delete(p.followed, pid)
		switch {
		case errors.Is(err, ErrGone):
			p.gone[pid] = true
		case !errors.Is(err, errKernel):
			p.counts.Skipped["unreadable"]++
		}
		return
	}
	if f, ok := p.followed[pid]; ok && f.start != pr.start {
		delete(p.followed, pid) // another process with this pid
	}
	target, ok, err := p.target(pr, of)
	if errors.Is(err, ErrGone) {
		p.gone[pid] = true
	} else if err != nil && !errors.Is(err, ErrOutside) {
		p.counts.Skipped["unreadable"]++
	}
	if ok {
		p.place(pr, target)
	}
}

// comesOf is the compartment of a process that matches nothing itself: the one that it
// has, or that of the process that made it.
func (p *Placer) comesOf(pr process, of *uint32) (uint32, bool) {
	if f, ok := p.followed[pr.pid]; ok {
		return f.compartment, true
	}
	if of != nil {
		return *of, true
	}
	// The parent of that number may be another by now.
	f, ok := p.followed[pr.parent]
	return f.compartment, ok && (process{pid: pr.parent, start: f.start}).still()
}

// target is the compartment that a process belongs to by what it is: that of
// the first item that matches, else that of the process it comes from. ok is
// false if that is no matter of processes: nothing matches, or where it is does.
func (p *Placer) target(pr process, of *uint32) (compartment uint32, ok bool, err error) {
	where := "" // read for those only who match otherwise: most processes do not
	around := func(it item) (bool, error) {
		if it.Unit == "" && it.Cgroup == "" && len(it.Container) == 0 {
			return true, nil
		}
		if where == "" {
			c, err := pr.in(p.tree)
			if err != nil {
				return false, err
			}
			where = c.Path
		}
		if len(it.Container) > 0 {
			return p.inContainer(it, where), nil
		}
		return it.around(where), nil
	}
	before := len(p.items)
	for i, it := range p.items {
		if !it.OfProcess() {
			continue
		}
		hit, e := it.matchesProcess(pr)
		if hit && e == nil {
			hit, e = around(it)
		}
		if errors.Is(e, ErrGone) || errors.Is(e, ErrOutside) {
			return 0, false, e
		}
		if e != nil {
			err = e // another item may not need what cannot be read
			continue
		}
		if hit {
			compartment, ok, before = it.compartment, true, i
			break
		}
	}
	if !ok {
		if compartment, ok = p.comesOf(pr, of); !ok {
			return 0, false, err
		}
	}
	for _, it := range p.items[:before] {
		if it.OfProcess() {
			continue
		}
		if hit, e := around(it); e != nil {
			return 0, false, e
		} else if hit && !policy.IsOurs(where) {
			return 0, false, err
		}
	}
	return compartment, true, err
}

// place moves a process into a compartment, if it is not there and may be
// moved.
func (p *Placer) place(pr process, compartment uint32) {
	c, err := pr.in(p.tree)
	if err != nil {
		return // gone, or outside of the root: nobody's concern
	}
	slice := p.plan.Compartments[compartment].Slice
	was, known := p.followed[pr.pid]
	if p.inside(c, slice) {
		p.followed[pr.pid] = follow{pr.start, compartment, c.Path}
		return
	}
	if known && was.at != "" && was.compartment == compartment {
		p.counts.Lost++
	}
	unit, why := p.why(pr, c)
	if why != "" {
		p.counts.Skipped[kindOf(why)]++
		if why != protectedPlace {
			p.refuse(pr, refusal{compartment, c.Path, why})
		}
		// Its children may be somewhere else.
		p.followed[pr.pid] = follow{pr.start, compartment, ""}
		return
	}
	leaf := p.tree.leafIn(slice, unit, originOf(c, p.tree.ID))
	if p.dry {
		p.followed[pr.pid] = follow{pr.start, compartment, ""}
		p.moved = append(p.moved, Moved{pr.pid, p.plan.Compartments[compartment], c.Path, leaf})
		return
	}
	if err := p.tree.Backend.Move(leaf, pr.pid); err != nil {
		switch {
		case !pr.still():
			p.counts.Skipped["gone"]++
		default:
			p.counts.Skipped["refused"]++
			p.refuse(pr, refusal{compartment, c.Path, "refused: " + err.Error()})
		}
		return
	}
	if !pr.still() {
		// It ended in between. If another has its pid by now, that one goes back to
		// where it came from: the place that it was born in, its parent's.
		if now, err := processOf(pr.pid); err == nil {
			if parent, err := p.tree.Of(now.parent); err == nil {
				_ = p.tree.write(parent.Path, "cgroup.procs", strconv.Itoa(pr.pid))
			}
		}
		p.counts.Skipped["gone"]++
		return
	}
	p.counts.Moved++
	p.followed[pr.pid] = follow{pr.start, compartment, leaf}
	p.moved = append(p.moved, Moved{pr.pid, p.plan.Compartments[compartment], c.Path, leaf})
}

// members are the processes in a cgroup that is looked at again and again, none if it is gone. A threaded one lists none:
// each of its processes is looked at in its own place then.
func (t *Tree) members(p string) ([]int, error) {
	s, err := t.again(p, "cgroup.procs")
	if gone(err) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return parsePIDs(p, s)
}

func (p *Placer) refuse(pr process, r refusal) {
	if p.refused[r] == nil {
		p.refused[r] = map[int]uint64{}
	}
	p.refused[r][pr.pid] = pr.start
}

const (
	protectedPlace = "protected"
	explicitPlace  = "explicit"
)

// inside reports whether a cgroup is of the compartment with a slice.
func (p *Placer) inside(c Cgroup, slice string) bool {
	if sliceAround(c.Path) == slice {
		return true
	}
	if isMatchSub(c, p.tree.ID) {
		_, of := partsOf(c)
		return of == slice
	}
	return false
}

// why says why a process may not be moved out of a cgroup, "" if it may; then unit is
// the one in which it must stay, "" if it is in none.
func (p *Placer) why(pr process, c Cgroup) (unit, why string) {
	if p.protects(c.Path) {
		return "", protectedPlace
	}
	if policy.IsOurs(c.Path) {
		if isMatchLeaf(c.Path) {
			return "", "" // it is there because we have put it there
		}
		return "", explicitPlace
	}
	if why := p.container(pr, "pid"); why != "" {
		return "", why
	}
	if unit := innermostUnit(c.Path); unit != "" {
		// Deeper in it are others who manage what is theirs.
		if c.Path == unit && p.tree.delegated(unit) {
			return unit, ""
		}
		return "", fmt.Sprintf("managed: %s is somebody's unit; match it as a whole (unit: %s), or give it Delegate=yes, with which a process that is in none of its own cgroups is put into one in the unit", unit, path.Base(unit))
	}
	// A container need not be a unit, nor have a pid namespace.
	for _, kind := range []string{"cgroup", "mnt"} {
		if why := p.container(pr, kind); why != "" && c.Path != "/" && !strings.HasSuffix(c.Path, ".slice") {
			return "", why
		}
	}
	if c.Owner != 0 {
		return "", fmt.Sprintf("managed: %s is delegated to uid %d; match it by cgroup", c.Path, c.Owner)
	}
	return "", ""
}

// container says that a process has a namespace of its own, "" if it has not.
func (p *Placer) container(pr process, kind string) string {
	ns, err := os.Readlink(pr.dir() + "/ns/" + kind)
	if err != nil {
		return "unreadable: its namespaces cannot be read (needs CAP_SYS_PTRACE)"
	}
	if slices.Contains(p.namespaces[kind], ns) {
		return ""
	}
	return fmt.Sprintf("container: it is in a %s namespace of its own; match it by container, or its cgroup", kind)
}

// protects reports whether a cgroup, or one that it is in, is protected: see Protected.
func (p *Placer) protects(at string) bool {
	for ; at != "/" && at != "."; at = path.Dir(at) {
		if protects(p.plan, at) {
			return true
		}
	}
	return false
}

func kindOf(why string) string {
	kind, _, _ := strings.Cut(why, ":")
	return kind
}

// Conditions are what stands in the way of placing processes now.
func (p *Placer) Conditions() []Condition {
	var out []Condition
	if len(p.items) > 0 && p.tree.Namespaced {
		out = append(out, shortfall(TypePlacement, ReasonNamespaced,
			"processes are not moved from within a private cgroup namespace; run the agent in the host's, or match by cgroup or unit"))
	}
	for _, it := range p.items {
		if it.User != "" && !it.known {
			out = append(out, shortfall(TypePlacement, ReasonUnknownUser,
				"feature %s: user %s is not known on this node (getent passwd), so its match item matches nothing; give the number, or make the user and reload", it.feature, it.User))
		}
	}
	var keys []refusal
	for k := range p.refused {
		if k.why != explicitPlace {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, func(a, b refusal) int {
		return strings.Compare(fmt.Sprint(a.compartment, a.cgroup, a.why), fmt.Sprint(b.compartment, b.cgroup, b.why))
	})
	for _, k := range keys {
		c := p.plan.Compartments[k.compartment]
		_, why, _ := strings.Cut(k.why, ": ")
		out = append(out, shortfall(TypePlacement, ReasonNotLoose, "process %s matches %s and stays in cgroup %s: %s",
			names(slices.Sorted(maps.Keys(p.refused[k]))), strings.TrimSuffix(c.Feature+"/"+c.Tenant, "/"), k.cgroup, why))
	}
	return Distinct(out)
}

// Counts says what was done so far.
func (p *Placer) Counts() Placed { return p.counts }

// Moves are the moves since it was asked last.
func (p *Placer) Moves() []Moved {
	out := p.moved
	p.moved = nil
	return out
}
