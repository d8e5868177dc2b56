package policy

import (
	"net/netip"
	"time"
)

// File is a policy as it was written, in one file or several: read, found to be
// right, and not yet compiled. It is made by Load and Parse only.
type File struct {
	start     place // of the first file
	mode      placed[Mode]
	exhausted placed[Exhausted] // empty if nothing is said
	protect   []placed[string]
	providers []*provider // file order; other is not among them
	other     *provider   // nil if it is not named
	tenants   []*tenant   // file order
	features  []*feature  // file order; default is not among them
	deflt     *feature    // nil if it is not named
}

// placed is a value and where it stands.
type placed[T any] struct {
	value T
	at    place
}

// block is a limit block.
type block struct {
	at    place // of the number
	limit Limit
	share uint32 // percent of the provider's limit; 0 if limit says it
	errno uint16
	bad   bool // there is an error for it already
}

type provider struct {
	placed[string] // name
	hosts          []string
	hostsAt        place // of the list
	prefixes       []placed[netip.Prefix]
	ports          []PortRange   // sorted, disjoint, for every protocol; Provider is not set
	idle           time.Duration // 0 if nothing is said
	idleAt         place
	limits         *block
}

// pair is the limit of something at one provider.
type pair struct {
	placed[string] // the provider's name
	block          *block
}

type tenant struct {
	placed[string]
	limits    *block
	providers []pair
}

// feature is a feature, and in its tenants what is said of a feature's tenant.
type feature struct {
	placed[string]
	owner     string
	class     Class
	classless bool // no class is given
	cpu       *CPU
	maxAt     place // of cpu.max
	cpusAt    place // of cpu.cpus
	memory    *Memory
	memoryAt  place
	pids      *Pids
	pidsAt    place
	// perCgroup: the policy says itself that cpu, memory and pids limits apply to each cgroup.
	cpuPerCgroup, memoryPerCgroup, pidsPerCgroup bool
	match                                        []matchItem
	limits                                       *block
	providers                                    []pair
	tenants                                      []*tenant
}

type matchItem struct {
	Match
	at          place
	tenantAt    place
	containerAt map[string]place // of each glob of container
}
