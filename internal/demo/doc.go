// Package demo is `bulkhead demo`: it shows, on the node it runs on and with
// nothing to configure, what a flood of batch calls does to chat with and
// without bulkheads.
//
// # What runs
//
// Every part is a process of its own, the same binary started again:
//
//	bulkhead demo                   the command: progress, table, clean-up
//	└ demo-supervisor               network and mount namespace of its own
//	  ├ demo-provider               an HTTP server: 20 calls at once, the rest queue
//	  ├ demo-chat                   calls at a fixed rate
//	  ├ demo-batch                  60 workers, each one call after another
//	  └ agent                       the real agent, in the last phase only
//
// The provider, chat and batch know nothing of bulkhead: an ordinary
// net/http server and clients. Three phases use one provider: chat alone; chat
// with the flood; and the same again under the agent, with both workloads
// started by `bulkhead exec`.
//
// # What is measured
//
// Each workload times its own calls. Chat's calls are due at fixed times
// whatever happened to the earlier ones, and a call's latency runs from when
// it was due to when its answer was read, so time spent queueing cannot hide.
// A batch job runs from its first attempt to its answer, refusals and the
// waits after them included. The chat of every phase makes the same sequence of
// calls, and is started once every batch worker has had an answer or a refusal:
// the flood is there before the first measured call. The demo as a whole goes
// before the node's other work on the processor, so that a busy node shows the
// same; its own parts are equals.
//
// # What it leaves
//
// Nothing. Files, sockets and pins live in mounts that only the supervisor's
// mount namespace sees, so they end with its processes, and with the pins the
// kernel programs. All processes but the command itself are in one cgroup,
// bulkhead-demo-PID, which the command kills and removes on every way out. Only
// SIGKILL of the command itself keeps it from that: then parent-death signals
// end the processes, and the next demo removes the empty cgroup, which it
// knows by the lock that nobody holds any more.
//
// # Where to start
//
// [Run] is the command, [Child] is what the hidden commands named by
// [ChildCommands] run. tree.go is the cgroup, supervise.go the three phases,
// workload.go the provider and its two callers, report.go the numbers and the
// table.
package demo
