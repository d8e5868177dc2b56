package conn

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"bulkhead/pkg/policy"
)

// Counts are found by name over generations: a bulkhead or a route that stays in
// the policy keeps its index, and with it its counts. The registry of names is in
// the kernel beside them, so that it survives the agent and bpftool can read it.

// trafficKey names one traffic counter.
type trafficKey struct{ feature, tenant, provider string }

func bulkheadName(k policy.Key) (n kernelBulkheadName) {
	setText(n.Scope[:], k.Scope.String())
	setText(n.Feature[:], k.Feature)
	setText(n.Tenant[:], k.Tenant)
	setText(n.Provider[:], k.Provider)
	return n
}

func (n *kernelBulkheadName) key() (policy.Key, error) {
	var s policy.Scope
	if err := s.UnmarshalText([]byte(text(n.Scope[:]))); err != nil {
		return policy.Key{}, err
	}
	return policy.Key{Scope: s, Feature: text(n.Feature[:]), Tenant: text(n.Tenant[:]), Provider: text(n.Provider[:])}, nil
}

func trafficName(k trafficKey) (n kernelTrafficName) {
	setText(n.Feature[:], k.feature)
	setText(n.Tenant[:], k.tenant)
	setText(n.Provider[:], k.provider)
	return n
}

func (n *kernelTrafficName) key() trafficKey {
	return trafficKey{text(n.Feature[:]), text(n.Tenant[:]), text(n.Provider[:])}
}

// names are both registries as a value.
type names struct {
	bulkheads map[policy.Key]uint32
	traffic   map[trafficKey]uint32
}

// readNames reads both registries.
func readNames(maps map[string]*ebpf.Map) (map[policy.Key]uint32, map[trafficKey]uint32, error) {
	bulkheads := make(map[policy.Key]uint32)
	err := readHash(maps[kernelMapBulkheadNames], func(at uint32, n *kernelBulkheadName) error {
		k, err := n.key()
		bulkheads[k] = at
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	traffic := make(map[trafficKey]uint32)
	err = readHash(maps[kernelMapTrafficNames], func(at uint32, n *kernelTrafficName) error {
		traffic[n.key()] = at
		return nil
	})
	return bulkheads, traffic, err
}

// registry gives names their index. It is the agent's, under its lock.
type registry[K comparable] struct {
	what  string
	at    map[K]uint32
	used  map[uint32]bool
	names *ebpf.Map
	value func(K) any
	// zero clears the counts of an index that nothing names any more.
	zero func(uint32) error
	next uint32
}

func newRegistry[K comparable](what string, at map[K]uint32, names *ebpf.Map, value func(K) any, zero func(uint32) error) *registry[K] {
	r := &registry[K]{what: what, at: at, used: make(map[uint32]bool, len(at)), names: names, value: value, zero: zero}
	for _, i := range at {
		r.used[i] = true
	}
	return r
}

// index finds a name's index or gives it one whose counts are zero. New names are
// written before any route can lead to them.
func (r *registry[K]) index(k K) (uint32, error) {
	if i, ok := r.at[k]; ok {
		return i, nil
	}
	limit := r.names.MaxEntries()
	if uint32(len(r.used)) >= limit {
		return 0, fmt.Errorf("%w: more than %d %s, those still draining included", ErrFull, limit, r.what)
	}
	for r.used[r.next%limit] {
		r.next++
	}
	i := r.next % limit
	if err := r.zero(i); err != nil {
		return 0, err
	}
	if err := r.names.Update(i, r.value(k), ebpf.UpdateAny); err != nil {
		return 0, fmt.Errorf("name %s %v: %w", r.what, k, err)
	}
	r.at[k], r.used[i] = i, true
	return i, nil
}

// retire forgets the names that keep does not want and no slot holds. Only after
// the generation that led to them is out of force and every program that may have
// begun under it has ended: from then on no new slot can name them.
func (r *registry[K]) retire(keep func(K) bool, held map[uint32]bool) error {
	for k, i := range r.at {
		if keep(k) || held[i] {
			continue
		}
		if err := r.names.Delete(i); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("forget %s %v: %w", r.what, k, err)
		}
		delete(r.at, k)
		delete(r.used, i)
	}
	return nil
}
