package cgroup

import (
	"errors"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/distribution/reference"

	"bulkhead/pkg/policy"
)

// Container is a container as its runtime tells of it.
type Container struct {
	Runtime string // "docker", "podman" or "containerd"
	ID      string
	Name    string // without the slash that Docker's API puts before it
	Image   string // a reference, as it was given when the container was made
	Labels  map[string]string
	// PID is that of its first process, 0 if it does not run or that is not known yet.
	PID int
	// Cgroup is its linux.cgroupsPath (OCI runtime specification, config-linux.md), where
	// the runtime tells it: a path, or "SLICE:PREFIX:NAME" for a scope of systemd's.
	Cgroup string
}

// Containers are those that a plan names, by the id of their cgroup.
type Containers map[uint64]*FoundContainer

// FoundContainer is one whose cgroup was found.
type FoundContainer struct {
	*Container
	path string // of its cgroup
	// fits says which of the plan's items about containers match it, in their order.
	fits []bool
}

// AsksContainers reports whether a plan matches containers.
func AsksContainers(plan *policy.Plan) bool {
	return slices.ContainsFunc(plan.Features, func(f policy.Feature) bool {
		return slices.ContainsFunc(f.Match, func(m policy.Match) bool { return len(m.Container) > 0 })
	})
}

// serviceLabels say which service of a compose file a container is of.
var serviceLabels = [...]string{"com.docker.compose.service", "io.podman.compose.service"}

// matchesContainerOf compares them with the container whose cgroup it is; nil if it is none's.
func (it item) matchesContainerOf(c *FoundContainer) bool {
	return len(it.Container) == 0 || c != nil && c.fits[it.nth]
}

// matchesContainer compares the keys of container.
func (it item) matchesContainer(c *Container) bool {
	for key, glob := range it.Container {
		var ok bool
		switch key {
		case "name":
			ok = matchText(glob, c.Name)
		case "image":
			ok = matchImage(glob, c.Image)
		case "label":
			for k, v := range c.Labels {
				ok = ok || matchText(glob, k+"="+v)
			}
		case "compose_service":
			for _, label := range serviceLabels {
				v, has := c.Labels[label]
				ok = ok || has && matchText(glob, v)
			}
		}
		if !ok {
			return false
		}
	}
	return true
}

// matchText is match for what is no path: * takes slashes too, which values of labels
// often have.
func matchText(glob, text string) bool {
	const noSlash = "\x01"
	return match(strings.ReplaceAll(glob, "/", noSlash), strings.ReplaceAll(text, "/", noSlash))
}

// matchImage takes a reference as it was given, and in full and in short as Docker has
// them (docker.io/library/nginx:1.27, nginx:1.27), each with and without its tag and
// digest: who names none means any.
func matchImage(glob, image string) bool {
	names := []string{image}
	if ref, err := reference.ParseNormalizedNamed(image); err == nil { // an id is none
		tagged, _ := reference.TagNameOnly(ref).(reference.Tagged)
		digested, _ := ref.(reference.Digested)
		for _, name := range []string{ref.Name(), reference.FamiliarName(ref)} {
			names = append(names, name)
			if digested != nil {
				names = append(names, name+"@"+digested.Digest().String())
			}
			if tagged != nil {
				name += ":" + tagged.Tag()
				names = append(names, name)
				if digested != nil {
					names = append(names, name+"@"+digested.Digest().String())
				}
			}
		}
	}
	return slices.ContainsFunc(names, func(name string) bool { return match(glob, name) })
}

// ContainerFinder finds the cgroups of containers. It remembers what it has found out, and
// is used by one goroutine.
type ContainerFinder struct {
	tree *Tree
	// known are cgroups that are a container's by its process, by runtime, id and pid.
	known map[knownContainer]uint64
	// plan is what was looked for last, and fits what was found to match each then: to compare a thousand
	// containers with all globs takes longer than everything else.
	plan *policy.Plan
	fits map[knownContainer]fitting
}

// fitting is which items match a container of these names.
type fitting struct {
	of   Container
	fits []bool
	any  int // the first, -1 if none
}

func (f fitting) still(c *Container) bool {
	return f.of.Name == c.Name && f.of.Image == c.Image && maps.Equal(f.of.Labels, c.Labels)
}

type knownContainer struct {
	runtime, id string
	pid         int
}

// NewContainerFinder returns one that knows nothing yet.
func NewContainerFinder(t *Tree) *ContainerFinder {
	return &ContainerFinder{tree: t, known: map[knownContainer]uint64{}}
}

// Find finds the cgroups of those containers that the plan names.
//
// It is the process that says which cgroup is a container's: the deepest around it that the
// runtime made for the container, which has its id as its name, or is where the runtime
// says. A container that is about to start has no process that is known, but may have its
// cgroup: one of that name, in which nobody but root can make others, is taken for it until
// then, so that it is in its compartment before its first connect.
//
// A container in no cgroup of its own (podman's --cgroups=disabled) is a condition: to adopt
// the cgroup that it is in would adopt whoever else is there.
func (f *ContainerFinder) Find(plan *policy.Plan, list []Container, all []Cgroup) (Containers, []Condition) {
	items := slices.DeleteFunc(itemsOf(plan), func(it item) bool { return len(it.Container) == 0 })
	if len(items) == 0 {
		return nil, nil
	}
	byPath, byName, there := make(map[string]Cgroup, len(all)), map[string][]Cgroup{}, make(map[uint64]Cgroup, len(all))
	for _, c := range all {
		byPath[c.Path], there[c.ID] = c, c
		if id := containerOf(path.Base(c.Path)); id != "" {
			byName[id] = append(byName[id], c)
		}
	}
	if f.plan != plan {
		f.plan, f.fits = plan, nil
	}
	found, known, fits := Containers{}, map[knownContainer]uint64{}, make(map[knownContainer]fitting, len(list))
	var conds []Condition
	for i := range list {
		c := &FoundContainer{Container: &list[i]}
		name := knownContainer{c.Runtime, c.ID, 0}
		fit, ok := f.fits[name]
		if !ok || !fit.still(c.Container) {
			fit = fitting{of: *c.Container, fits: make([]bool, len(items)), any: -1}
			for n, it := range items {
				if fit.fits[n] = it.matchesContainer(c.Container); fit.fits[n] && fit.any < 0 {
					fit.any = n
				}
			}
		}
		fits[name] = fit
		n := fit.any
		if n < 0 {
			continue
		}
		c.fits = fit.fits
		key := knownContainer{c.Runtime, c.ID, c.PID}
		if id, ok := f.known[key]; ok {
			if _, ok := there[id]; ok {
				found[id], known[key] = c, id
				continue
			}
		}
		// containerd's ids are NAMESPACE/ID.
		mine := byName[c.ID[strings.LastIndexByte(c.ID, '/')+1:]]
		if p, ok := f.tree.specified(c.Cgroup); ok {
			if at, ok := byPath[p]; ok && !slices.Contains(mine, at) {
				mine = append(slices.Clone(mine), at)
			}
		}
		at, err := f.of(c.PID, mine)
		switch {
		case errors.Is(err, ErrGone):
			for _, m := range mine {
				if m.Owner == 0 {
					found[m.ID] = c
					break // the outermost: a walk has it first
				}
			}
		case err != nil: // outside of the tree, or not to be told
		default:
			own, ok := around(at.Path, mine)
			if !ok {
				// Its number may be another process's by now, or in another pid namespace.
				i := slices.IndexFunc(mine, func(m Cgroup) bool { return m.Owner == 0 && f.tree.populated(m.Path) })
				if i >= 0 {
					found[mine[i].ID] = c
					continue
				}
				conds = append(conds, shortfall(TypePlacement, ReasonNoCgroup,
					"feature %s: container %s of %s is in %s and has no cgroup of its own, so it is in no compartment: run it with one (podman: without --cgroups=disabled)",
					items[n].feature, c.Name, c.Runtime, at.Path))
				continue
			}
			found[own.ID], known[key] = c, own.ID
		}
	}
	for id, c := range found {
		c.path = there[id].Path
	}
	f.known, f.fits = known, fits
	return found, Distinct(conds)
}

// of is the cgroup of a process: ErrGone if there is none. From a private namespace it is
// looked for in some cgroups first, as to search them all takes long.
func (f *ContainerFinder) of(pid int, some []Cgroup) (Cgroup, error) {
	if pid == 0 {
		return Cgroup{}, ErrGone
	}
	if f.tree.Namespaced {
		for _, c := range some {
			if pids, err := f.tree.pids(c.Path); err == nil && slices.Contains(pids, pid) {
				return c, nil
			}
		}
	}
	return f.tree.Of(pid)
}

// populated reports whether there are processes in a cgroup or below it.
func (t *Tree) populated(p string) bool {
	events, err := t.read(p, "cgroup.events")
	return err == nil && strings.Contains(events, "populated 1")
}

// around is the deepest of some cgroups that p is or is in.
func around(p string, some []Cgroup) (best Cgroup, ok bool) {
	for _, c := range some {
		if (c.Path == p || strings.HasPrefix(p, c.Path+"/")) && len(c.Path) > len(best.Path) {
			best, ok = c, true
		}
	}
	return best, ok
}

// containerDir matches the names that runtimes give to the cgroups of containers: the id,
// with what they put before it (docker-, libpod-, cri-containerd-, crio-), as a scope of
// systemd's or a plain directory.
var containerDir = regexp.MustCompile(`^(?:(.*)-)?([0-9a-f]{64})(?:\.scope)?$`)

// containerOf is the id in a directory's name, "" if it has none. A monitor (conmon) has a
// cgroup of the container's id too, and is not in the container.
func containerOf(name string) string {
	m := containerDir.FindStringSubmatch(name)
	if m == nil || strings.HasSuffix(m[1], "conmon") {
		return ""
	}
	return m[2]
}

// specified is the path in the tree of a linux.cgroupsPath.
func (t *Tree) specified(spec string) (string, bool) {
	if parts := strings.Split(spec, ":"); len(parts) == 3 {
		slice, prefix, name := parts[0], parts[1], parts[2]
		if slice == "" {
			slice = "system.slice" // runc's and crun's own default
		}
		if prefix != "" {
			name = prefix + "-" + name
		}
		if !strings.HasSuffix(name, ".slice") {
			name += ".scope"
		}
		spec = path.Join(slicePathOf(slice), name)
	}
	if !strings.HasPrefix(spec, "/") || path.Clean(spec) == "/" {
		return "", false
	}
	if t.abs == "" {
		return path.Clean(spec), true
	}
	p, ok := strings.CutPrefix(path.Clean(spec), t.abs+"/")
	return "/" + p, ok
}
