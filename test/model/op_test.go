package model

import (
	"fmt"
	"net/netip"
	"strings"

	"bulkhead/pkg/policy"
)

// Kind is what an operation does.
type Kind uint8

// The operations of a thread on its descriptors, then those that concern two of them and
// run alone, then those that run beside the threads.
const (
	Open Kind = iota + 1 // socket() of Sock into D
	Connect
	ConnectWait // the same, and wait a little for a handshake that is under way
	Sendto      // UDP
	Unspec      // connect(AF_UNSPEC)
	Shutdown
	Close
	Reset  // SO_LINGER 0 and close
	Bind   // to any address and port
	Listen // bind and listen
	Accept // connect to the own listener D, accept into D2
	// Storm is many short lives of sockets of its own: two threads at the same moment
	// connect them, or send through one, to Dest and to the destination D2.
	Storm

	Dup  // D into D2 of thread L2, the same process
	Pass // D into D2 of thread L2 of process W2, by SCM_RIGHTS
	// Exhaust is a process that has more sockets than there is room for slots, and ends.
	Exhaust
	Fork // a process that has a copy of D and nothing else: number D2

	Kill    // SIGKILL, and a new process
	EndFork // kill the copy D2
	Move    // process W to cgroup Arg
	Members // the swinging cgroup to place Arg
	Reload  // plan Arg
	Cut     // the far end of the wire goes down
	Mend
	Hangup    // server Arg closes what it has accepted
	HangupRST // the same, with RST
	Reconcile
	Quiet // all idle: compare; Arg 1: reconcile too
)

var kindNames = [...]string{Open: "socket", Connect: "connect", ConnectWait: "connect+wait", Sendto: "sendto", Unspec: "unspec",
	Shutdown: "shutdown", Close: "close", Reset: "reset", Bind: "bind", Listen: "listen", Accept: "accept", Storm: "storm", Dup: "dup", Pass: "pass",
	Fork: "fork", Exhaust: "exhaust", Kill: "kill", EndFork: "end-fork", Move: "move", Members: "members", Reload: "reload", Cut: "cut", Mend: "mend",
	Hangup: "hangup", HangupRST: "hangup-rst", Reconcile: "reconcile", Quiet: "quiet"}

func (k Kind) String() string { return kindNames[k] }

// byThread are run by the threads, alone are run with nothing beside them.
func (k Kind) byThread() bool { return k <= Storm }
func (k Kind) alone() bool    { return k == Dup || k == Pass || k == Fork || k == Exhaust || k == Quiet }

// Sock is a kind of socket. The mapped ones are IPv6 sockets that only ever have
// IPv4 addresses, in IPv6's form (UDP: or in IPv4's).
type Sock uint8

// The kinds of socket.
const (
	TCP4 Sock = iota + 1
	TCP6
	TCPMapped
	UDP4
	UDP6
	UDPMapped
)

var sockNames = [...]string{"none", "tcp4", "tcp6", "tcp-mapped", "udp4", "udp6", "udp-mapped"}

func (s Sock) String() string { return sockNames[s] }
func (s Sock) udp() bool      { return s >= UDP4 }
func (s Sock) v6only() bool   { return s == TCP6 || s == UDP6 }

// Op is one operation. Descriptors are named by process, thread and number, so that a
// sequence means the same when some of it is left out: what is not possible then is
// skipped.
type Op struct {
	Kind   Kind
	W, L   uint8 // process, thread
	D      uint8 // descriptor
	W2, L2 uint8
	D2     uint8
	Sock   Sock
	Dest   uint8 // index into dests
	Arg    uint8
}

func (o Op) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s", o.Kind)
	desc := func(w, l, d uint8) string { return fmt.Sprintf(" %d.%d.%d", w, l, d) }
	switch o.Kind {
	case Open:
		fmt.Fprintf(&b, "%s %s", desc(o.W, o.L, o.D), o.Sock)
	case Connect, ConnectWait, Sendto:
		fmt.Fprintf(&b, "%s to %s", desc(o.W, o.L, o.D), dests[o.Dest])
		if o.Arg != 0 {
			b.WriteString(" in the other form")
		}
	case Storm:
		fmt.Fprintf(&b, " %d.%d %s to %s, %s", o.W, o.L, o.Sock, dests[o.Dest], dests[o.D2])
	case Unspec, Shutdown, Close, Reset, Bind, Listen:
		b.WriteString(desc(o.W, o.L, o.D))
	case Accept, Dup:
		fmt.Fprintf(&b, "%s ->%s", desc(o.W, o.L, o.D), desc(o.W, o.L2, o.D2))
	case Pass:
		fmt.Fprintf(&b, "%s ->%s", desc(o.W, o.L, o.D), desc(o.W2, o.L2, o.D2))
	case Fork:
		fmt.Fprintf(&b, "%s -> copy %d", desc(o.W, o.L, o.D), o.D2)
	case Kill:
		fmt.Fprintf(&b, " %d", o.W)
	case EndFork:
		fmt.Fprintf(&b, " copy %d", o.D2)
	case Move:
		fmt.Fprintf(&b, " %d to cgroup %d", o.W, o.Arg)
	case Members, Reload, Hangup, HangupRST, Quiet:
		fmt.Fprintf(&b, " %d", o.Arg)
	}
	return b.String()
}

// manner is what comes of a TCP connect to a destination that we let through.
type manner uint8

const (
	open        manner = iota
	refusing           // a RST
	unreachable        // ENETUNREACH, before any SYN
	hole               // nothing ever answers
)

// destination is where operations go. Port is that of a server, or of none.
type destination struct {
	Addr     netip.AddrPort
	Provider string
	manner
	wire bool // the way may be cut, so nothing waits for an answer
}

func (d destination) String() string { return fmt.Sprintf("%s (%s)", d.Addr, d.Provider) }

func to(addr, provider string, m manner, wire bool) destination {
	return destination{netip.MustParseAddrPort(addr), provider, m, wire}
}

const (
	serverPort = 80
	closedPort = 9
)

// dests: providers a and b are on loopback, c is behind the wire, other is nobody's. There
// is always room at roomy for many.
var dests = []destination{
	to("127.1.0.1:80", "a", open, false),
	to("127.1.0.1:9", "a", refusing, false),
	to("127.2.0.1:80", "b", open, false),
	to("127.2.0.2:80", "b", open, false),
	to("127.2.0.1:9", "b", refusing, false),
	to("10.78.1.1:80", "c", open, true),
	to("10.78.1.2:9", "c", refusing, true),
	to("10.79.1.1:80", "c", hole, true),
	to("192.0.2.1:80", "a", unreachable, false),
	to("192.0.2.129:80", "b", unreachable, false),
	to("127.4.0.1:80", "roomy", open, false),
	to("127.3.0.1:80", policy.OtherProvider, open, false),
	to("127.3.0.1:9", policy.OtherProvider, refusing, false),
	to("198.51.100.1:80", policy.OtherProvider, unreachable, false),

	to("[fd00:1::1]:80", "a", open, false),
	to("[fd00:1::1]:9", "a", refusing, false),
	to("[fd00:2::1]:80", "b", open, false),
	to("[fd00:2::2]:9", "b", refusing, false),
	to("[fd78:1::1]:80", "c", open, true),
	to("[fd78:1::2]:9", "c", refusing, true),
	to("[fd79:1::1]:80", "c", hole, true),
	to("[2001:db8:1::1]:80", "a", unreachable, false),
	to("[2001:db8:2::1]:80", "b", unreachable, false),
	to("[fd00:4::1]:80", "roomy", open, false),
	to("[fd00:3::1]:80", policy.OtherProvider, open, false),
	to("[2001:db8:3::1]:80", policy.OtherProvider, unreachable, false),
}

// nowhere is unreachable, and roomy's.
var nowhere = netip.MustParseAddrPort("203.0.113.1:80")

// policyText has the limits of one plan: of a, b, c, features f and g, f's tenant t, g at
// a, and default.
func policyText(limit [8]int) string {
	return fmt.Sprintf(`apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers:
  roomy: {cidrs: [203.0.113.0/24, 127.4.0.0/16, "fd00:4::/32"], protocol: [tcp, udp], idle: 1h}
  a: {cidrs: [127.1.0.0/16, 192.0.2.0/25, "fd00:1::/32", "2001:db8:1::/48"], protocol: [tcp, udp], idle: 1h, limits: {connections: %d, errno: EAGAIN}}
  b: {cidrs: [127.2.0.0/16, 192.0.2.128/25, "fd00:2::/32", "2001:db8:2::/48"], protocol: [tcp, udp], idle: 1h, limits: {connections: %d, errno: EAGAIN}}
  c: {cidrs: [10.78.0.0/16, 10.79.0.0/16, "fd78::/16", "fd79::/16"], protocol: [tcp, udp], idle: 1h, limits: {connections: %d, errno: EAGAIN}}
tenants:
  t: {}
features:
  f: {class: batch, limits: {connections: %d, errno: EAGAIN}, tenants: {t: {limits: {connections: %d, errno: EAGAIN}}}}
  g: {class: batch, limits: {connections: %d, errno: EAGAIN}, providers: {a: {connections: %d, errno: EAGAIN}}}
  many: {class: batch}
  default: {limits: {connections: %d, errno: EAGAIN}}
`, limit[0], limit[1], limit[2], limit[3], limit[4], limit[5], limit[6], limit[7])
}

// plans differ in limits only.
var plans = [][8]int{
	{12, 16, 14, 16, 6, 14, 5, 10},
	{6, 20, 14, 10, 8, 18, 3, 10},
	{20, 8, 20, 20, 4, 10, 8, 4},
}

// place is where a cgroup may be: a compartment, or protected.
type place struct {
	feature, tenant string
	protected       bool
}

// cgroups are those that workers are in. The first swings: what the members say of it
// changes, between all of the places.
var cgroups = []place{
	{feature: "f"},
	{feature: "f"},
	{feature: "f", tenant: "t"},
	{feature: "g"},
	{feature: policy.DefaultFeature},
	{protected: true},
	{feature: "many"},
}
