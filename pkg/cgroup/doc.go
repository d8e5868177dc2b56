// Package cgroup is bulkhead's only hand on the cgroup v2 tree: it finds the
// tree, makes a slice for every compartment, writes CPU and memory values and
// takes them back, puts processes in place, says which existing cgroups belong
// to which compartment, and reads what they use.
//
// It imports the plan (pkg/policy) and nothing else of bulkhead: the kernel
// programs and this package meet only in cgroup ids and levels.
//
// # One way through
//
//	tree, err := cgroup.Find("")               // or a directory: --cgroup-root
//	conds, err := tree.EnsureSlices(plan)      // before the plan is in force
//	all, err := tree.Walk()
//	adopted := cgroup.Adopt(plan, all, found)  // ids and levels for the kernel
//	...the plan comes into force...
//	keeper := cgroup.NewKeeper(tree)
//	put, err := keeper.SetValues(plan, adopted) // after it
//	put = keeper.Check(time.Now())             // every CheckEvery: what others changed is put back
//	tree.SendBack(keep)                        // processes that it no longer places
//	placer := cgroup.NewPlacer(tree, plan)
//	placer.Pass()                              // those that match by what they are
//	left, err := tree.Prune(plan, nil)         // what the plan no longer names
//
// Every step may be repeated at any time: each compares what is with what
// should be and writes only the difference, so an agent that was killed half
// way starts again from the beginning. No step needs to know the plan before.
//
// A [Condition] is a shortfall that leaves the rest working: the cpu
// controller on a v1 hierarchy, a memory limit that would kill at once. An
// error means that the step itself could not be done.
//
// # Paths, ids, levels
//
// Every path in this package's API starts with "/" and is relative to
// [Tree.Dir], the root that the agent was given. Ids are those of
// bpf_get_current_cgroup_id(): the inode number of the directory (on 64 bit).
// Levels are the kernel's own, counted from the root of the hierarchy and not
// from Tree.Dir, because that is what bpf_get_current_ancestor_cgroup_id()
// takes.
//
// # What is ours
//
// Below Tree.Dir ours are /bulkhead.slice, the slices in it that are named
// bulkhead-<feature>.slice and bulkhead-<feature>-<tenant>.slice, and leaves
// in those: exec-<pid>.scope of commands, match-<origin>-<feature>.scope of
// processes that were moved. Nothing else is ever created or removed.
// Processes live in leaves only, so that controllers can be turned on above
// them at any time.
//
// Everything else is somebody else's. A cgroup that a compartment adopts is
// neither moved nor made nor removed; if the policy gives it values, what they
// replaced is kept in extended attributes of the very directory and put back
// as soon as the policy no longer asks (docs/decisions/originals-in-xattrs.md).
//
// # Back ends
//
// What is made, written and removed goes through [Backend]. Where systemd runs
// the tree, it is systemd that is asked (docs/decisions/systemd-slices.md);
// everywhere else, in containers and below a --cgroup-root of one's own, it is
// plain files. [Manager] says which and why. Reading is by plain files for
// both. Values of units of others are properties of theirs
// (docs/decisions/unit-properties.md); what is no unit has plain files.
//
// # Where things are
//
//	tree.go       find the mount, walk, ids
//	slices.go     EnsureSlices, Prune, Remove
//	values.go     plan -> values -> files
//	keep.go       what others change is put back (docs/decisions/values-looked-at.md)
//	cpus.go       which CPUs of the node a feature's cgroups get
//	originals.go  what we replaced in cgroups of others
//	backend.go    the interface, and cgroupfs behind it
//	systemd.go    systemd behind it
//	units.go      values of units of others, and what they replaced
//	match.go      items of match lists
//	adopt.go      which cgroups they name, the protect list
//	process.go    what /proc says of a process
//	placer.go     which processes they name, and what to do with those
//	inherit.go    the nearest placed cgroup decides
//	usage.go      CPU time that counts once
//	enter.go      placement for bulkhead exec
//	stat.go       what a cgroup has and uses
//	effective.go  what its values come to where it lies
//	condition.go  errors and conditions
package cgroup
