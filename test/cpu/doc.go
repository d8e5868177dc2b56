// Package cpu measures what a compartment's share of the CPU is worth: how long a
// handler that needs about 2 ms of CPU takes to answer beside 8 processes that parse JSON
// without pause, and beside 64 scripts that work so too. The same is done alone, with all in one cgroup, and with
// handler and parsers started by bulkhead exec in features of a policy that a real
// agent has brought into force.
//
// Its test has the build tag vm and runs only in the guest of test/vm, in virtual time
// (-virtual): one CPU whose clock counts instructions, one nanosecond each. So a latency
// is a count of instructions, the same on a busy and an idle host, and can have a
// limit:
//
//	make build
//	go run ./test/vm -virtual -file bin/bulkhead:/bin/bulkhead ./test/cpu
//
// Its benchmark measures more cases with more requests and prints each as a line of JSON,
// for the tables of docs/cpu.md: what else the kernel offers, each with what it costs the
// parsers, and a handler in SCHED_FIFO, which nothing but the kernel itself can hold up.
// `make bench` runs it, BENCH_FLAGS='-sections cpu -cases background' a part of it. With
// $BULKHEAD_CPU_ROUNDS the cases go by turns, and the requests of all turns are put together.
// Its parsers are Go programs, or with $BULKHEAD_CPU_PLAIN scripts: the timers of a Go program's
// runtime interrupt whoever runs.
//
// # Several CPUs
//
// In virtual time one thread of the emulator runs all CPUs by turns, and the clock counts
// the instructions of all. QEMU 10 gives each CPU its part of the time until the next
// timer: two that are busy have half of the speed each of one that is alone, so there
// SCHED_FIFO in the same run is the measure and alone is none. QEMU 7.2 begins again with
// the first CPU at each timer, and one that is always busy keeps the others from running:
// test/vm refuses it. In ordinary time (-smp 2 without -virtual) the part of the machine
// that the parsers get is right on any host, and latencies are only on an idle host with a
// processor for each.
//
// The binary is $BULKHEAD_BINARY, else the bulkhead in PATH. A guest whose kernel has no
// cpu controller on cgroup v2 fails. The table of latencies is in the log.
//
// # What is measured
//
// The prober is a process outside of every cgroup measured. It sends a request 10 to
// 15 ms after the last answer, at moments drawn with a fixed seed so that they fall on
// all phases of the kernel's tick, and takes the time from before the request is written
// until the answer is read. It is in SCHED_FIFO, all its threads: an answer that is
// there preempts whatever runs, so the prober's own wait for the CPU, which no policy
// here is about, is no part of the time. What remains is the handler's: wake up, wait
// for the CPU, work, be preempted and wait again.
//
// The handler is an awk script; parsers and prober are this package's test binary again. A
// parser appends one byte to a file for each document, so that a lowly class can be seen to
// work on.
package cpu
