// Package e2e holds the end-to-end tests: they know bulkhead as its users do, as
// one binary with a command line, documents, metrics, a log and exit codes, and
// what connect(2) returns to programs that know nothing of it.
//
//	go test ./test/e2e
//
// needs root. The binary is $BULKHEAD_BINARY; without that it is built with go
// build, and where there is no go it is the bulkhead in PATH.
//
// Every test has a node of its own (node_test.go): a cgroup root, a directory for
// pins, sockets, addresses and files. They run side by side, as instances of
// bulkhead may. What a program in a compartment does is done by a client of
// internal/kerneltest that was started by bulkhead exec, or by one in a cgroup
// that a policy adopts; flood_test.go has programs that were not written for us.
//
// What the contract promises of documents and metrics is written down once, in
// contract_test.go, and decoded strictly.
//
// Tests of CPU and memory need these controllers on cgroup v2. Where a v1
// hierarchy has them they are skipped; BULKHEAD_REQUIRE=cpu,memory makes that a
// failure.
package e2e
