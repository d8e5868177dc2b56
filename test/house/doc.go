// Package house holds the rules that keep the tree a house: who may import
// whom, who may exit, and that nothing mutable lives outside of functions. They
// are tests, so that a change that breaks one says why the rule is there.
package house
