// Package conn is the data path: the kernel programs that give every connection a
// slot on each bulkhead of its route, or refuse it, and everything that user space
// does with them.
//
//	policy.Plan + members -> Kernel.Apply -> a generation in pinned maps
//	pinned maps           -> Reader.Snapshot -> a value for status and metrics
//	sockets               -> Kernel.Reconcile -> slots given back
//	sockets, who is where -> Kernel.Adopt     -> slots of what was there before
//
// The programs are in ../../bpf: types.h has every structure that both sides share
// (Go gets them from its BTF, kernel_bpfel.go), dest.h finds provider and compartment,
// slots.h puts and finds slots, admit.h is the counting rule, udp.h says which slots a UDP
// socket has, bulkhead.bpf.c are the hooks. ../../docs/counting.md says what is counted.
//
// Kernel is the agent's: it loads or takes over what is pinned, applies plans and
// reconciles. There is one at a time for a pin directory. Reader needs no agent. What
// is in force stays in force when either ends; only Detach removes it.
//
// # Pins
//
// BPFFS/bulkhead/v<layout>/ has one pin for each map, by its name, and one for each
// link, link_<hook>. The layout number is BULKHEAD_LAYOUT in types.h: a build opens
// only maps of its own layout as its own. What a release of another has in force it takes
// over (predecessor.go), by the description that is in each layout's map layout. A first
// start pins aside, in new-<pid>, and publishes with one rename. The agent's lock is an flock on BPFFS/bulkhead.
//
// # Generations
//
// dests, ports, comps, routes, plans and gens have two entries each; the low bit of
// the control word says which is in force, and a plan is applied by building the other
// and storing the word. Limits are in the routes, so that a connect is judged by one
// generation throughout. Counts are outside the generations and found by name.
package conn
