package policy

import (
	"net/netip"
	"strings"
	"time"
)

// Reserved names. They may be given limits like any other but never
// destinations (other) or a match, CPU, memory (default).
const (
	// DefaultFeature is the feature of every process that matches no other.
	DefaultFeature = "default"
	// OtherProvider is the provider of every destination that matches no other.
	OtherProvider = "other"
)

// Mode says whether limits are kept or only tried.
type Mode string

// The two modes. Observe counts what would be refused, refuses nothing and
// touches no CPU, memory or placement.
const (
	Enforce Mode = "enforce"
	Observe Mode = "observe"
)

// Exhausted says what happens to a connect whose slot the kernel cannot remember,
// because the table of connections is full or memory is refused. Only routes that
// hold a bulkhead have slots.
type Exhausted string

// The two choices. Allow, the default, lets the connect through, uncounted by the
// bulkheads on its route, and counts that. Refuse fails it with the errno of the
// first of Route.Holds, and counts that there under reason "exhausted". With mode
// observe nothing is refused.
const (
	ExhaustedAllow  Exhausted = "allow"
	ExhaustedRefuse Exhausted = "refuse"
)

// ParentSlice is the path of the one cgroup of ours in the root that everything is
// confined to; all slices are in it.
const ParentSlice = "/bulkhead.slice"

// IsOurs says whether the path of a cgroup, from that root, is ParentSlice or in it.
func IsOurs(path string) bool {
	return path == ParentSlice || strings.HasPrefix(path, ParentSlice+"/")
}

// Class is a feature's priority.
type Class string

// The classes, from first to last served.
const (
	Realtime   Class = "realtime"
	Timely     Class = "timely"
	Batch      Class = "batch"
	Background Class = "background"
)

// Scope says what one bulkhead bounds. The order of the constants is the
// order of a route: narrowest first, the provider last. A refusal is counted
// on the first full bulkhead in that order.
type Scope uint8

// The seven scopes, so a route holds at most seven bulkheads (MaxHolds).
const (
	ScopeFeatureTenantProvider Scope = iota + 1
	ScopeFeatureProvider
	ScopeTenantProvider
	ScopeFeatureTenant
	ScopeFeature
	ScopeTenant
	ScopeProvider
)

// MaxHolds is the largest number of bulkheads on one route: one of each scope.
const MaxHolds = 7

// Unlimited is the limit of a bulkhead that only counts. In JSON it is null.
const Unlimited Limit = 1<<32 - 1

// Limit is a number of concurrent connections, 0 (refuse all) to MaxLimit, or
// Unlimited. In JSON it is a number or null.
type Limit uint32

// MaxLimit is the largest number of connections a policy may name.
const MaxLimit = 1_000_000

// Proto is an IP protocol number as in netinet/in.h. In JSON it is "tcp" or
// "udp".
type Proto uint8

// The protocols a provider may name. No protocol in a policy means TCP.
const (
	TCP Proto = 6
	UDP Proto = 17
)

// Plan is a compiled policy: everything the kernel and the cgroup tree need,
// and nothing of the file it came from. It is immutable, and compiling the
// same policy always gives the same Plan, byte for byte in JSON.
//
// Plan is also the record of what is in force: it is stored beside the kernel
// maps that were built from it, so that commands can name what they see while
// the agent is down. Fields are only ever added.
type Plan struct {
	// Hash is "sha256:" and the hex digest of the plan's JSON with Hash empty.
	// Comments and layout of the file do not change it.
	Hash string `json:"hash"`
	Mode Mode   `json:"mode"`
	// Exhausted is never empty in what Compile returns. A plan that an earlier
	// release stored has none, and means ExhaustedAllow.
	Exhausted Exhausted `json:"exhausted"`
	// Protect names units (globs, "ssh.service") and cgroups (paths that start
	// with "/", relative to the cgroup root) that are never refused: the
	// built-in list and the policy's own, sorted.
	Protect []string `json:"protect"`
	// Providers[0] is other; the rest are in file order (ties between
	// destinations of one length go to the earlier provider).
	Providers []Provider `json:"providers"`
	// Tenants are sorted by name.
	Tenants []string `json:"tenants"`
	// Features[0] is default; the rest are in file order, in which they match.
	Features []Feature `json:"features"`
	// Compartments[0] is the default feature without tenant. Then, for every
	// feature in order: the feature itself, and the feature with each tenant
	// in order of name. The default feature has no tenants.
	Compartments []Compartment `json:"compartments"`
	// Bulkheads are sorted by Key: scope, feature, tenant, provider.
	Bulkheads []Bulkhead `json:"bulkheads"`
	// Routes are sorted by (Compartment, Provider) and complete: every
	// compartment has a route to every provider, so Routes[c*len(Providers)+p]
	// is the route of compartment c to provider p.
	Routes []Route `json:"routes"`
	// Destinations are what an address matches, sorted by prefix.
	Destinations []Destination `json:"destinations"`
}

// DefaultIdle is the Idle of a provider that does not say its own: what Linux
// gives a UDP stream in its own tables (nf_conntrack_udp_timeout_stream,
// Documentation/networking/nf_conntrack-sysctl.rst), and what RFC 4787 (REQ-5)
// asks of a NAT.
const DefaultIdle = 2 * time.Minute

// MinIdle and MaxIdle are the range of Provider.Idle.
const (
	MinIdle = time.Second
	MaxIdle = 24 * time.Hour
)

// Provider is a named set of destinations.
type Provider struct {
	Name string `json:"name"`
	// Hosts are names that are still to be resolved. The agent of this release
	// refuses a plan that has any.
	Hosts []string `json:"hosts,omitempty"`
	// Place is where Hosts stand, for messages; not part of the hash.
	Place Place `json:"-"`
	// UDP is true if any of the provider's destinations is UDP.
	UDP bool `json:"udp,omitempty"`
	// Idle is how long a UDP socket keeps its slot after its last datagram to or
	// from the provider: whole seconds from MinIdle to MaxIdle, and 0 if the
	// provider has no UDP. A plan that an earlier release stored has 0 for all. In
	// JSON it is the number of seconds, "idle_sec".
	Idle time.Duration `json:"-"`
}

// Feature is a named workload group.
type Feature struct {
	Name  string `json:"name"`
	Owner string `json:"owner,omitempty"`
	Class Class  `json:"class"`
	// CPU, Memory and Pids are nil where the policy leaves them alone: always for
	// the default feature.
	CPU    *CPU    `json:"cpu,omitempty"`
	Memory *Memory `json:"memory,omitempty"`
	Pids   *Pids   `json:"pids,omitempty"`
	// Match are the feature's match items in file order.
	Match []Match `json:"match,omitempty"`
}

// CPU is what a feature's cgroups get of the processor.
type CPU struct {
	// Weight is cpu.weight, 1 to 10000. Zero only if Idle.
	Weight uint32 `json:"weight,omitempty"`
	// Idle is cpu.idle: run only when nobody else wants to (kernel 5.15).
	Idle bool `json:"idle,omitempty"`
	// MaxUsec is the quota of cpu.max in microseconds per PeriodUsec; 0 is "max".
	MaxUsec    uint64 `json:"max_usec,omitempty"`
	PeriodUsec uint64 `json:"period_usec,omitempty"`
	// BurstUsec is cpu.max.burst: how much of the quota that earlier periods left may be
	// used at once (kernel 5.14). It is at most MaxUsec.
	BurstUsec uint64 `json:"burst_usec,omitempty"`
	// CPUs is where the feature may run, as the policy says it: "0-3,6", or "not 0" for
	// all but that; "" is everywhere. On tells what that is on a node.
	CPUs string `json:"cpus,omitempty"`
	// Exclusive: no cgroup of another feature may run on CPUs.
	Exclusive bool `json:"exclusive,omitempty"`
	// UclampMin and UclampMax are cpu.uclamp.min and .max in percent of the largest CPU
	// at its highest frequency; 0 is nothing said.
	UclampMin uint32 `json:"uclamp_min_percent,omitempty"`
	UclampMax uint32 `json:"uclamp_max_percent,omitempty"`
}

// Memory is what a feature's cgroups get of memory, in bytes; 0 is "max".
type Memory struct {
	High uint64 `json:"high,omitempty"`
	Max  uint64 `json:"max,omitempty"`
}

// Pids is how many processes and threads a feature's cgroups may have.
type Pids struct {
	// Max is pids.max.
	Max uint64 `json:"max"`
}

// Match is one item of a feature's match list: all set keys must hold.
type Match struct {
	// Tenant is the tenant of what matches, or "".
	Tenant string `json:"tenant,omitempty"`
	// Unit is a glob over systemd unit names.
	Unit string `json:"unit,omitempty"`
	// Cgroup is a path or glob (with **) below the cgroup root, starting "/".
	Cgroup string `json:"cgroup,omitempty"`
	// Exe is a glob over the path of the executable.
	Exe string `json:"exe,omitempty"`
	// Cmdline is a regular expression (RE2) over the command line.
	Cmdline string `json:"cmdline,omitempty"`
	// User is a user name or number.
	User string `json:"user,omitempty"`
	// Container are keys (name, image, label as "key=value", compose_service)
	// with their globs.
	Container map[string]string `json:"container,omitempty"`
	// Place is where the item stands, for messages; not part of the hash.
	Place Place `json:"-"`
}

// OfProcess reports whether an item is about what a process is, and not only
// about where it is.
func (m Match) OfProcess() bool { return m.Exe != "" || m.Cmdline != "" || m.User != "" }

// Compartment is a feature, or a feature x tenant. Its id is its index.
type Compartment struct {
	Feature string `json:"feature"`
	Tenant  string `json:"tenant,omitempty"`
	Class   Class  `json:"class"`
	// Slice is the path of the compartment's own cgroup below the cgroup root,
	// "/bulkhead.slice/bulkhead-chat.slice"; "" for the default feature, which
	// is never moved.
	Slice string `json:"slice,omitempty"`
}

// Key names a bulkhead. Fields that the scope does not use are "".
type Key struct {
	Scope    Scope  `json:"scope"`
	Feature  string `json:"feature,omitempty"`
	Tenant   string `json:"tenant,omitempty"`
	Provider string `json:"provider,omitempty"`
}

// Bulkhead is one limit.
type Bulkhead struct {
	Key
	// Limit is the number of concurrent connections it lets through; JSON null
	// is Unlimited.
	Limit Limit `json:"limit"`
	// Errno is what connect() fails with when this bulkhead is full.
	Errno uint16 `json:"errno"`
}

// Route is what a connection from one compartment to one provider must hold.
type Route struct {
	Compartment uint32 `json:"compartment"` // index into Plan.Compartments
	Provider    uint32 `json:"provider"`    // index into Plan.Providers
	// Holds are indices into Plan.Bulkheads, narrowest scope first, the
	// provider's last.
	Holds []uint32 `json:"holds,omitempty"`
	// CountOnly routes take no slot: connections are counted and never
	// refused. It is set for routes to other that no limit names.
	CountOnly bool `json:"count_only,omitempty"`
}

// Destination is one prefix and everything that can match an address whose
// longest prefix it is: its own ports, and those of shorter prefixes that
// cover it where it leaves ports free. So one longest-prefix lookup and one
// search in Ports decide, and a longer prefix never hides a wider rule for
// other ports.
type Destination struct {
	// Prefix is masked; IPv4 is IPv4 here, never mapped.
	Prefix netip.Prefix `json:"prefix"`
	// Ports are disjoint and sorted by (Proto, First). Empty means that the
	// prefix matches nothing: it only cuts off a shorter one (::/0 does not
	// mean IPv4).
	Ports []PortRange `json:"ports"`
}

// PortRange gives a range of ports of one protocol to a provider.
type PortRange struct {
	Proto    Proto  `json:"proto"`
	First    uint16 `json:"first"`
	Last     uint16 `json:"last"` // inclusive
	Provider uint32 `json:"provider"`
}
