// Package upgrade holds the tests of going from one release to another and back, with
// connections open and clients at work.
//
//	go test ./test/upgrade
//
// needs root, Go, and what make generate needs. It makes the other releases itself, from
// a copy of this tree: the next one, whose maps have another layout, and one of the same
// layout with other programs. The binary of this release is $BULKHEAD_BINARY, or is built
// too. Nothing is left behind but what Go keeps in its build cache.
package upgrade
