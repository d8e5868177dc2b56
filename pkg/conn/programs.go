package conn

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Program is a program that is attached to one of our hooks at the root.
type Program struct {
	Hook string // "connect4"
	// Cgroup is the directory that it is attached to, if that is below the root: it runs
	// before those at the root, for all that is in it.
	Cgroup string
	ID     uint32
	Name   string // "" if it may not be asked for (needs CAP_SYS_ADMIN)
	Ours   bool
}

// Attachment is what is attached at the root, measured by what the generation in
// force needs.
type Attachment struct {
	// Programs are those at our hooks, ours and others', in the order of attaching.
	Programs []Program
	// Missing are the hooks ("sendmsg4") that the generation in force needs and that
	// have no program of ours: connections are not limited, not released or, for
	// egress and ingress, not counted in bytes there. Those of UDP are needed only
	// while the policy names UDP.
	Missing []string
	// Unread says of which hooks it is not known what is attached, and why.
	Unread []error
}

// ReadAttachment looks at every hook, at the root and at the cgroups whose directories are
// given. ErrNotLoaded if nothing is in force that could need one.
func ReadAttachment(o Options, below ...string) (Attachment, error) {
	r, err := OpenReader(o)
	if err != nil {
		return Attachment{}, err
	}
	defer r.Close()
	before, err := r.namesUDP()
	if err != nil {
		return Attachment{}, err
	}
	a, err := o.attachment()
	if err != nil {
		return Attachment{}, err
	}
	after, err := r.namesUDP()
	if err != nil {
		return Attachment{}, err
	}
	for _, dir := range below {
		a.Programs = append(a.Programs, programsBelow(dir)...)
	}
	// UDP's hooks come before the generation that needs them and go after it: one that
	// was needed before and after we looked was needed meanwhile.
	a.needs(before && after)
	return a, nil
}

// Programs lists what is attached to our hooks at the root, ours and others', whether
// anything is in force or not.
func Programs(o Options) ([]Program, error) {
	a, err := o.attachment()
	if err == nil {
		err = errors.Join(a.Unread...)
	}
	if err != nil {
		return nil, err
	}
	return a.Programs, nil
}

// alone is ErrForeign if an instance with other pins is attached to the same root: each
// would count and refuse, and either's detach would take the slices of both. What may
// not be asked for, for want of CAP_SYS_ADMIN, is taken for nobody's.
func (o Options) alone() error {
	a, err := o.attachment()
	if err != nil {
		return err
	}
	others, err := o.others()
	if err != nil {
		return err
	}
	known := map[uint32]bool{}
	for _, dir := range others {
		for _, h := range hooks() {
			id, err := linkedProgramAt(filepath.Join(dir, h.name))
			if err != nil {
				return err
			}
			known[id] = true
		}
	}
	for _, p := range a.Programs {
		if !p.Ours && !known[p.ID] && p.Name == kernelProgBhConnect4 {
			return fmt.Errorf("%w: another instance of bulkhead is attached to %s (program %d at connect4): give the --bpffs that it was started with, or another --cgroup-root",
				ErrForeign, o.CgroupRoot, p.ID)
		}
	}
	return nil
}

// namesUDP says whether the generation in force names UDP.
func (r *Reader) namesUDP() (bool, error) {
	var c kernelControlWord
	if err := r.maps[kernelMapControl].Lookup(uint32(0), &c); err != nil {
		return false, fmt.Errorf("read the control word: %w", err)
	}
	var g kernelGen
	if err := r.maps[kernelMapGens].Lookup(uint32(c.Word&1), &g); err != nil {
		return false, fmt.Errorf("read the generation in force: %w", err)
	}
	return g.Udp != 0, nil
}

// needs fills in Missing: what nothing is known of is not called missing.
func (a *Attachment) needs(udp bool) {
	known := map[string]bool{}
	for _, p := range a.Programs {
		known[p.Hook] = known[p.Hook] || p.Ours
	}
	for _, err := range a.Unread {
		var at *hookError
		if errors.As(err, &at) {
			known[at.hook] = true
		}
	}
	for _, h := range hooks() {
		if h.needed(udp) && !known[h.label()] {
			a.Missing = append(a.Missing, h.label())
		}
	}
}

// hookError is what kept us from seeing what is attached to a hook.
type hookError struct {
	hook string
	err  error
}

func (e *hookError) Error() string { return e.hook + ": " + e.err.Error() }
func (e *hookError) Unwrap() error { return e.err }

// attachment is all but Missing.
func (o Options) attachment() (Attachment, error) {
	var a Attachment
	root, err := os.Open(o.CgroupRoot)
	if err != nil {
		return a, fmt.Errorf("cgroup root: %w", err)
	}
	defer root.Close()
	for _, h := range hooks() {
		programs, err := o.programsAt(h, root)
		if err != nil {
			a.Unread = append(a.Unread, &hookError{h.label(), err})
			continue
		}
		a.Programs = append(a.Programs, programs...)
	}
	return a, nil
}

// effective lists the programs that run at a hook for our root: those attached there and
// those above.
func (o Options) effective(h hook) ([]ebpf.ProgramID, error) {
	root, err := os.Open(o.CgroupRoot)
	if err != nil {
		return nil, fmt.Errorf("cgroup root: %w", err)
	}
	defer root.Close()
	r, err := link.QueryPrograms(link.QueryOptions{Target: int(root.Fd()), Attach: h.attach, QueryFlags: unix.BPF_F_QUERY_EFFECTIVE})
	if err != nil {
		return nil, fmt.Errorf("query the programs of %s at %s: %w", h.label(), o.CgroupRoot, err)
	}
	var ids []ebpf.ProgramID
	for _, p := range r.Programs {
		ids = append(ids, p.ID)
	}
	return ids, nil
}

// describePrograms names programs by number, and by name where that may be asked for.
func describePrograms(ids []ebpf.ProgramID) string {
	var all []string
	for _, id := range ids {
		all = append(all, strings.TrimSpace(fmt.Sprintf("program %d %s", id, programName(id))))
	}
	return strings.Join(all, ", ")
}

func programName(id ebpf.ProgramID) string {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return ""
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return ""
	}
	return info.Name
}

// programsAt lists the programs at one hook.
func (o Options) programsAt(h hook, root *os.File) ([]Program, error) {
	ids, err := link.QueryPrograms(link.QueryOptions{Target: int(root.Fd()), Attach: h.attach})
	if err != nil {
		return nil, fmt.Errorf("query programs at %s: %w", o.CgroupRoot, err)
	}
	ours, err := o.linkedProgram(h)
	if err != nil {
		return nil, err
	}
	var all []Program
	for _, p := range ids.Programs {
		all = append(all, Program{Hook: h.label(), ID: uint32(p.ID), Name: programName(p.ID), Ours: uint32(p.ID) == ours})
	}
	return all, nil
}

// programsBelow lists what is attached to a cgroup's own hooks, none of it ours; nothing if
// it is gone or may not be looked at, as the root then may not either.
func programsBelow(dir string) (all []Program) {
	f, err := os.Open(dir)
	if err != nil {
		return nil
	}
	defer f.Close()
	for _, h := range hooks() {
		r, err := link.QueryPrograms(link.QueryOptions{Target: int(f.Fd()), Attach: h.attach})
		if err != nil {
			continue
		}
		for _, p := range r.Programs {
			all = append(all, Program{Hook: h.label(), Cgroup: dir, ID: uint32(p.ID), Name: programName(p.ID)})
		}
	}
	return all
}

// label is how people know a hook: "connect4".
func (h hook) label() string { return strings.TrimPrefix(h.name, "link_") }

// needed says whether a generation that names UDP, or does not, needs the hook.
func (h hook) needed(udp bool) bool { return udp || !h.udp }

// linkedProgram is the id of the program under a pinned link, 0 if there is none.
func (o Options) linkedProgram(h hook) (uint32, error) {
	return linkedProgramAt(filepath.Join(o.pins(), h.name))
}

func linkedProgramAt(pin string) (uint32, error) {
	l, err := link.LoadPinnedLink(pin, nil)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("open pinned link %s: %w", pin, err)
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return 0, fmt.Errorf("pinned link %s: %w", pin, err)
	}
	return uint32(info.Program), nil
}
