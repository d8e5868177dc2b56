// Package agent is the ordering of `bulkhead agent`: what is done first, what
// may be done at the same time, and what is undone when a later step fails. It
// decides nothing about policies, cgroups or kernel maps; those are pkg/policy,
// pkg/cgroup and pkg/conn.
//
//	err := agent.Run(ctx, agent.Options{Policy: "/etc/bulkhead/policy.yaml", ...})
//
// returns when ctx is done (nil, the limits stay in force) or when the agent
// cannot start or go on.
//
// # One owner
//
// One goroutine, the loop in agent.go, owns everything that changes: the
// conn.Kernel, the plan in force, the members, the conditions. The others only
// ask it: the watcher sends it content hashes, the tree's watcher and the
// kernel's process events wake it, the admin socket sends it requests and waits
// for the answer. What others may read, it publishes as a
// value that never changes afterwards (Info, and the list of cgroups for the
// metrics). Metrics and refusals are read through conn.Readers, which see the
// kernel's maps and not the owner's state.
//
// # A reload is a transaction
//
//	load, compile         \
//	refuse what is not built  > a failure changes nothing in force
//	make slices               |
//	find members          /
//	conn.Apply              the flip
//	cgroup values         \
//	place processes         > a failure is a Condition: the limits are in force
//	prune old slices      /
//
// The start is the same transaction. Slices made for a plan that did not come
// into force are removed again.
//
// # When a reload happens
//
// On SIGHUP and on request, always. By the watcher, only when the content of
// the policy files is neither what was tried last nor still changing; so a bad
// file is reported once, and a file that is saved in several steps is read when
// it is complete.
//
// # Where things are
//
//	agent.go     Run, the loop, the ticks
//	reload.go    the transaction, the members
//	watch.go     when the policy files have new content
//	tree.go      when cgroups come and go
//	processes.go who matches by what it is, and is moved
//	keep.go      values that others change are put back
//	refusals.go  which refusals are news
//	admin.go     the admin socket; client.go its other end
//	web.go       the metrics listener
//	starting.go  one start at a time
//	mount.go     whether the pins outlive our mount namespace
package agent
