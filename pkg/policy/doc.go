// Package policy is the language of bulkhead: it reads policy files, says
// everything that is wrong with them and where, and compiles what is right into
// a Plan. It touches nothing but the files that it is told to read: no kernel,
// no cgroup, no clock.
//
//	file, err := policy.Load("/etc/bulkhead")   // a file, or a directory of *.yaml
//	plan, warnings, err := policy.Compile(file)
//
// or both in one step, Check. docs/policy.md is the reference for people who
// write policies; docs/policy-example.yaml is one to start from.
//
// # The way through
//
//	bytes -> yaml.Node -> File -> Plan
//	      tree        parse    compile
//
// tree.go gets a tree of nodes from the bytes, and a place (FILE:LINE:COL) for
// every fault of syntax. node.go reads single nodes: a mapping with known keys,
// a list, a text, a plain number. values.go knows the small notations: prefixes,
// ports, host names, sizes, times, shares, globs. parse.go walks the tree with these and
// fills a File; refer.go looks at what only the whole policy shows, such as names
// that nothing declares. Nothing stops at the first fault: everything wrong is in
// one Errors, sorted by place. What is legal and unwise are Warnings (warn.go).
//
// compile.go turns a File, which is known to be right, into the Plan: the
// compartments, the bulkheads, the complete matrix of routes. dest.go makes the
// Destinations, so that the kernel needs one longest-prefix lookup and one search
// to find a provider; Plan.Lookup is the same in plain Go, to test against and to
// explain with. diff.go lists what differs between two plans.
//
// # Promises
//
// The same policy compiles to the same Plan, byte for byte in JSON. A Plan
// survives JSON: what is read back is equal to what was written (but for
// places). A Plan is never changed after Compile has returned it.
package policy
