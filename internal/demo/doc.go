// Package demo is `bulkhead demo`: it shows, on the node it runs on and with
// nothing to configure, what bulkheads do in six experiments that people know,
// each without and with them.
//
// # What runs
//
// Every part is a process of its own. Those named demo- and the agent are the
// same binary started again, the workloads ordinary programs:
//
//	bulkhead demo                   the command: progress, table, clean-up
//	└ demo-supervisor               network, mount and IPC namespace of its own
//	  ├ demo-provider               an HTTP server: so many calls at once, the rest queue
//	  ├ demo-prober                 makes calls when they are due and times them
//	  ├ postgres                    where the experiment is about a database
//	  ├ app.py or app.js            a web application that calls a provider
//	  ├ batch.py, curl, psql, ...   what floods
//	  └ agent                       the real agent, in the runs with bulkheads
//
// The workloads know nothing of bulkhead: scripts for python3 with its
// standard library or for node (workloads/), curl, and psql. With bulkheads they
// are started by `bulkhead exec`. What is not installed is named with the cure,
// and the experiments that need it are skipped.
//
// # What is measured
//
// The prober is outside of every cgroup, process and event loop that is
// measured. Its calls are due at fixed times whatever happened to the earlier
// ones, and a call's latency runs from when it was due to when its answer was
// read, so time spent queueing cannot hide. The runs of an experiment make the
// same calls, once every worker of the load has had an answer or a refusal: the
// load is there before the first measured call. In bounded curl is the prober
// and the load, and its own times are held against its run time as seen from
// outside.
//
// The demo as a whole goes before the node's other work on the processor, so
// that a busy node shows the same, and the prober and the providers, which
// stand for other machines, before its workloads, which are equals.
//
// # What it leaves
//
// Nothing. Files, sockets and pins live in mounts that only the supervisor's
// mount namespace sees, so they end with its processes, and with the pins the
// kernel programs; shared memory ends with the IPC namespace. All processes but
// the command itself are in one cgroup, bulkhead-demo-PID, which the command
// kills and removes on every way out. Only SIGKILL of the command itself keeps it
// from that: then parent-death signals end the processes, and the next demo
// removes the cgroup, which it knows by the lock that nobody holds any more.
//
// # Where to start
//
// [Run] is the command, [Child] is what the hidden commands named by
// [ChildCommands] run. experiment.go says what an experiment is, and each has a
// file: flood.go, slow.go, tenants.go, bounded.go, cpu.go, database.go. tree.go is
// the cgroup, supervise.go the order of things, stage.go what one run may do,
// child.go its processes, tools.go the programs of the node, prober.go and
// provider.go the two ends of a call, result.go the numbers, text.go the table
// and progress.go the wait for it.
package demo
