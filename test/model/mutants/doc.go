// Command mutants shows that the model test can fail. For every way in which a slot is
// given back it takes a copy of the tree, removes that one way from the kernel programs,
// generates and builds, and runs the model test, which must fail.
//
//	go run ./test/model/mutants [-only NAME] [-duration 1m]
//
// It needs what generating needs (clang) and root. Its table is in table.go: an edit has
// to fit exactly once, so that it is noticed when the programs change under it.
package main
