package conn

import (
	"net/netip"
	"time"

	"bulkhead/pkg/policy"
)

// Snapshot is what the kernel held at one moment, as values: nothing in it
// changes afterwards and reading it changes nothing. Every command and every
// metric is made from one.
type Snapshot struct {
	Time time.Time
	// Generation counts the plans applied since the maps exist, from 1.
	Generation uint32
	// Plan is the plan that Generation was built from.
	Plan *policy.Plan
	// Members are the cgroups that the plan in force places in compartments.
	Members []Member
	// Bulkheads are sorted by Key. Those that have left the plan are there while
	// somebody still holds them, with Draining set.
	Bulkheads []Bulkhead
	// Traffic is sorted by feature, tenant, provider.
	Traffic []Traffic
	// Connections are those that hold a slot, oldest first.
	Connections []Connection
	// Refusals are the last one told on each route, newest first.
	Refusals []Refusal
	Totals   Totals
	// Unseen names network namespaces that have slots and could not be read:
	// their connections have no State and their bytes are counted at close.
	Unseen []string
}

// Bulkhead is one limit and its live count.
type Bulkhead struct {
	policy.Key
	Limit    policy.Limit
	InUse    uint32 // connections now
	Peak     uint32 // most at once since the bulkhead exists
	Accepted uint64
	// Rejected and WouldReject count connects by reason: "full", "contended".
	// WouldReject counts in observe mode only.
	Rejected    map[string]uint64
	WouldReject map[string]uint64
	// Draining: no route of the plan in force leads here any more.
	Draining bool
}

// Traffic is what one compartment exchanged with one provider since the maps exist.
type Traffic struct {
	Feature, Tenant, Provider string
	// Connections that were admitted.
	Connections uint64
	// TxBytes and RxBytes are IP bytes, headers included, of closed and of open
	// connections. They are meaningless, and zero, unless Bytes is set: routes that
	// only count connections (to other, uncapped) have none.
	TxBytes, RxBytes uint64
	Bytes            bool
}

// Connection is one slot.
type Connection struct {
	Cookie                    uint64 // socket cookie, as getsockopt(SO_COOKIE)
	Netns                     uint64 // network namespace cookie, as SO_NETNS_COOKIE
	PID                       uint32 // who connected; it may be gone
	Comm                      string
	Feature, Tenant, Provider string
	Remote                    netip.AddrPort
	Proto                     policy.Proto
	Age                       time.Duration
	// State is the TCP state ("established"), or "" if the socket was not seen.
	State string
	// Idle is the time since data last went either way; 0 if the socket was not seen.
	Idle             time.Duration
	TxBytes, RxBytes uint64
	// Bulkheads are the keys that it holds, narrowest first.
	Bulkheads []policy.Key
}

// Refusal is one refused connect (or, if Observed, one that observe mode let
// through). At most one a second on each route is told.
type Refusal struct {
	Time                      time.Time
	Total                     uint64 // refusals and would-be refusals on the route, told or not
	Feature, Tenant, Provider string
	PID                       uint32
	Comm                      string
	Remote                    netip.AddrPort
	Proto                     policy.Proto
	Bulkhead                  policy.Key // the most specific that was full
	// Refused and WouldRefuse are what Bulkhead has counted of each kind, over all
	// routes that hold it.
	Refused, WouldRefuse uint64
	Limit                policy.Limit
	Reason               string // "full", "contended"
	Errno                uint16 // what connect() returned, unless Observed
	Observed             bool
}

// Totals are counts that belong to no bulkhead.
type Totals struct {
	SlotsFull      uint64 // let through uncounted: no room for the slot
	Underflow      uint64 // releases that found a count of zero; always 0 unless we have a bug
	RefusedEarlier uint64 // denied by another program before ours
	Uncounted      uint64 // let through uncounted: an old entry of the socket did not go away
	Slots          uint64 // entries in the slot map now
	SlotsMax       uint64 // there is room for as many, and for some more
}

// Member places a cgroup in a compartment of a plan. Where cgroups are nested the
// deepest decides.
type Member struct {
	CgroupID uint64 // inode number of the cgroup's directory
	// Level is the kernel's depth: 1 is a child of the hierarchy's true root. It is 0 in
	// a Snapshot, since the kernel does not keep it.
	Level int
	// Compartment is an index into Plan.Compartments; ignored if Protected.
	Compartment uint32
	// Protected cgroups are never refused and never counted.
	Protected bool
}
