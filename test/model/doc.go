// Package model is the proof that counts are exact: random sequences of socket
// operations by many real processes and threads, against a plain Go model of what each
// socket holds.
//
//	op_test.go        an operation as data, and the destinations
//	generate_test.go  a seed -> rounds of operations
//	worker_test.go    the processes: one system call per operation, by thread
//	holds_test.go     the model: what each socket holds, and which outcomes are legal
//	system_test.go    programs, policy, servers and workers; runs a round, and compares
//	legal_test.go     the model itself notices what is not legal
//	shrink_test.go    a sequence that fails -> a short one that fails
//	churn_test.go     a million connections; rates and floods
//	mutants/          removes one release path after the other and expects a failure
//
// A round is run by all threads at once: each thread goes through its operations in
// order, while processes are killed and moved, servers hang up, paths are cut and
// policies are reloaded. Then all is quiet, and every bulkhead's in_use must equal the
// model's sum, the connections of the snapshot, and the sockets that exist.
//
// The model takes the result of each system call as it was. What it knows at any moment
// are two bounds of each count, what certainly and what possibly is held, and a
// connect that was refused while there was certainly room, or admitted while it was
// certainly full, is a failure at once.
//
// The same operations run one after the other when a failure is made shorter:
//
//	go test ./test/model -run TestModel -seed 42 -duration 1m -workers 6
package model
