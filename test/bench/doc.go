// Command bench measures what bulkhead costs, as ratios within one run: `make bench`.
//
// It has five sections, which run one after the other:
//
//	connect     processor time of connect and close on loopback
//	throughput  bulk TCP, small requests, small datagrams, HTTP under wrk
//	growth      memory and time with many slots, routes and compartments
//	upkeep      what an agent takes that is left alone, and how soon it adopts
//	cpu         a handler beside parsers, in virtual time (test/cpu, test/vm)
//
// Every configuration has a cgroup of its own with its own programs. One worker process
// is moved from one to the next, and the servers are outside of all of them. Turns are
// short and many, so that a drift of the machine's speed reaches all alike; compared are
// medians of what was found within a round, with the 95 % interval of that median.
// Rates are per second of processor time (client and server together, on one processor),
// so other load of the machine is not counted.
//
// All but upkeep and cpu happens in a network and a mount namespace of its own; upkeep in the
// node's own network namespace, as only there the kernel tells of processes. However the run
// ends, nothing stays: the process that was started waits for the one inside, and removes
// what is left.
//
// With -check it measures what the limits in check.go are about, and exits with 1 if one
// is missed: `make bench-check`.
//
//	main.go        command line, sections, namespaces, cleaning up
//	report.go      what a run gives, as tables or JSON
//	stats.go       medians and their intervals
//	check.go       the limits
//	lab.go         cgroups, programs, packet filter rules, turns
//	policies.go    the policies and rules that are measured
//	worker.go      the process that is moved
//	server.go      what it talks to
//	connect.go     one file for each section; growth's parts are
//	throughput.go  agent.go (a real agent), holder.go (many sockets)
//	growth.go      and apply.go (plans, without an agent)
//	upkeep.go
//	cpu.go
package main
