/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Every structure that the kernel programs share with user space, written once.
 * Go gets them from this file's BTF through bpf2go; nothing is mirrored by hand.
 *
 * Padding is explicit. A change of a map's key, value or meaning is a new layout:
 * raise BULKHEAD_LAYOUT, which is part of the pin path.
 *
 * Little endian only: bulkhead.in_use is the low half of the word that holds it.
 */
#ifndef BULKHEAD_TYPES_H
#define BULKHEAD_TYPES_H

#include <linux/types.h>

#define MAX_HOLDS 7	   /* bulkheads on one route: one of each scope */
#define MAX_LEVELS 32	   /* distinct cgroup depths that one plan may name */
#define MAX_BULKHEADS 32768 /* twice the largest plan: one drains while the next comes */
#define MAX_ROUTES 32768   /* also: traffic counters */
#define UDP_PROVIDERS 15	   /* that one UDP socket holds slots of at once */
#define LEAVES 512	   /* leaf cache entries per CPU; a power of two */

/* Numbers that user space needs by name; an enum, because macros leave no BTF. */
enum constant {
	BULKHEAD_LAYOUT = 2,	   /* of the maps; part of the pin path */
	PROVIDER_OTHER = 0,
	COMPARTMENT_PROTECTED = 0xffff,
	MAX_SLOTS = 131072,	   /* connections that hold something, unless the agent is told otherwise */
	LAYOUT_FIELDS = 128,
	NO_LIMIT = 0xffffffff,
	NO_INDEX = 0xffffffff,
	SLOT_RELEASED = 1,	   /* bit 0 of slot.word: its places are given back */
	SLOT_CLAIMED = 2,	   /* bit 1 of slot.word: somebody is writing or deleting the entry */
	SLOT_THERE = 4,		   /* bit 2 of slot.word: always, so that no word is 0 */
};

/*
 * The one word that says what is in force. Bit 0 is the index of the generation
 * (in every map of two), the rest is the epoch, which rises with every flip and
 * with every change of who is in which compartment: it dates the leaf cache.
 */
struct control_word {
	__u64 word;
};

#define NEAR_BITS 65536

/*
 * What a generation has besides its maps. near says in one bit whether any
 * destination can match: most connects on a node match none, and one bit is one
 * cache line where the prefix lookup is ten. For IPv4 it is the bit of the address's
 * first 16 bits; for IPv6, whose first 16 bits are nearly always the same few, that
 * of the exclusive or of its first two 16-bit words. It is never clear for an address
 * that has a destination.
 */
struct gen {
	__u32 generation;	   /* as users see it, from 1 */
	__u32 providers;	   /* route of (c, p) is c * providers + p */
	__u32 udp;		   /* the plan names UDP destinations */
	__u32 levels;		   /* used entries of level */
	__u8 level[MAX_LEVELS];	   /* cgroup depths to look at, deepest first */
	__u8 near[2 * NEAR_BITS / 8]; /* IPv4's bits, then IPv6's */
};

struct dest_key {
	__u32 prefixlen;	   /* in bits of addr, at most 128 */
	__u8 addr[16];		   /* network order; IPv4 as ::ffff:a.b.c.d */
};

/*
 * What an address of this prefix may match. Protocol and port are one number,
 * protocol << 16 | port. Nearly every prefix has one range, so the first is here
 * and the others, sorted and disjoint, in ports[more .. more+n).
 */
struct dest {
	__u32 from, to;		   /* inclusive; from > to matches nothing */
	__u32 provider;
	__u32 more, n;
};

struct port_range {
	__u32 from, to;		   /* inclusive */
	__u32 provider;
};

struct hold {
	__u32 bulkhead;		   /* index into bulkheads */
	__u32 limit;		   /* NO_LIMIT only counts */
};

enum route_flag {
	ROUTE_OBSERVE = 1,	   /* count what would be refused, refuse nothing */
	ROUTE_COUNT_ONLY = 2,	   /* no slot: count the connection and let it pass */
	ROUTE_STRICT = 4,	   /* refuse what there is no room to remember */
};

/* What one compartment must hold to connect to one provider. */
struct route {
	__u32 traffic;		   /* index into traffic and refusals */
	__u32 part;		   /* the provider's number in slot_key, 1 and up */
	__u16 flags;		   /* enum route_flag */
	__u16 n;		   /* used entries of holds */
	__u16 err[MAX_HOLDS];	   /* what connect() fails with when holds[i] is full */
	__u16 pad;
	struct hold holds[MAX_HOLDS]; /* narrowest scope first, the provider's last */
};

enum reason {
	REASON_FULL = 0,	   /* in_use had reached the limit */
	REASON_CONTENDED = 1,	   /* lost every race for the last places */
	REASON_EXHAUSTED = 2,	   /* no room to remember the connection, and the policy is strict */
	REASONS = 3,
};

/*
 * The count of one bulkhead, one cache line. in_use and peak are one word so
 * that one compare-and-swap takes a place and keeps the peak exact. Limits are in
 * the routes, so that a generation is judged by its own.
 */
struct bulkhead {
	__u32 in_use;
	__u32 peak;		   /* since the bulkhead exists */
	__u64 rejected[REASONS];
	__u64 would_reject[REASONS]; /* in observe mode */
	__u64 accepted;
};

/* Traffic of one (compartment, provider). */
struct traffic_count {
	__u64 connections;	   /* let through by us; to other also what another program denied */
	__u64 tx_bytes;		   /* IP bytes of closed connections, headers included */
	__u64 rx_bytes;
	__u64 pad;
};

/* The last refusal on a route that won the right to be told (one a second). */
struct refusal {
	__u64 claimed_ns;	   /* who sets it writes the rest, and at_ns last */
	__u64 at_ns;		   /* CLOCK_MONOTONIC; 0 never */
	__u64 total;		   /* refusals on the route, told or not */
	__u32 pid;
	__u32 bulkhead;		   /* the first that was full */
	__u32 limit;
	__u16 err;
	__u16 port;		   /* host order */
	__u8 reason;		   /* enum reason */
	__u8 observed;		   /* 1: it was let through */
	__u8 proto;
	__u8 pad[5];
	__u8 addr[16];
	char comm[16];
};

enum slot_flag {
	SLOT_SENT = 1,		   /* TCP_CONNECT_CB was seen: a change to CLOSE will follow */
	SLOT_ESTABLISHED = 2,
	SLOT_TIMESTAMPS = 4,	   /* every segment but the SYN has TCP timestamps */
	SLOT_HOME = 8,		   /* the entry is in homes */
	SLOT_ADOPTED = 16,	   /* from before the attach: no callbacks, so no bytes */
};

/* Names an entry of slots. */
struct slot_key {
	__u64 cookie;		   /* of the socket */
	__u32 part;		   /* 0 for TCP; for UDP, route.part: one slot for each provider */
	__u32 pad;
};

/*
 * One connection's hold on every bulkhead on its route: a TCP connection, or a UDP
 * socket's dealings with one provider.
 *
 * A TCP connection's entry is at home, in element cookie modulo size of homes, if that is
 * free, and else, like every UDP entry, a guest of that home in the hash map slots.
 *
 * word names one admission: the low 24 bits of the cookie, a number that counts
 * admissions on each CPU, and the three bits above. Setting SLOT_RELEASED by
 * compare-and-swap is the release; clearing or deleting the entry is housekeeping. Entries
 * are reused at once, so a word that was read through a pointer counts only if it has the
 * cookie's bits, and nothing may be given back or written without it.
 *
 * Two cache lines, what every hook needs in the first.
 */
struct slot {
	__u64 word;		   /* in homes, 0 if free */
	__u64 cookie;
	__u32 part;		   /* as in the key */
	__u8 n;
	__u8 proto;
	__u8 flags;		   /* enum slot_flag */
	__u8 header;		   /* IP and TCP header bytes of an ordinary segment */
	__u32 traffic;		   /* names the feature, tenant and provider */
	__u32 pid;		   /* who connected; it may be gone */
	__u32 bulkheads[MAX_HOLDS];
	__u32 fin_segs;		   /* TCP: segments sent when FIN_WAIT2 began */

	__u64 born_ns;		   /* CLOCK_MONOTONIC_COARSE: up to a tick, 1 to 10 ms, early */
	__u64 netns;		   /* network namespace cookie */
	/*
	 * TCP: payload bytes that were sent again. Only the socket's own sockops calls write
	 * it and fin_segs, one at a time. UDP: the time of the last datagram, as born_ns.
	 */
	__u64 tally;
	__u16 port;		   /* host order */
	__u16 pad;
	__u32 generation;	   /* that admitted it */
	char comm[16];
	__u8 addr[16];
};

/*
 * Which slots a UDP socket has: whatever is here may be in slots, and nothing else is. It
 * goes with the last close. Hooks of one socket run under its lock; the agent's adopt
 * program does not, so a part is put in by compare-and-swap.
 */
struct udp_socket {
	__u32 connected;	   /* the part that the socket's connect() took, 0 if none */
	__u32 parts[UDP_PROVIDERS]; /* 0 is free */
};

/* The leaf cache: a sequence lock of one CPU. */
struct leaf {
	__u64 seq;		   /* odd while it is being written */
	__u64 cgroup;
	__u64 epoch;
	__u32 compartment;
	__u32 other;		   /* traffic of the route to other if it only counts, else NO_INDEX */
};

/*
 * Where the fields of the shared structures are in this layout, by name, for a release
 * that has another: "slot.Word". This structure is the one that never changes.
 */

struct layout_field {
	char name[40];
	__u32 offset;		   /* bytes */
	__u32 size;
};

/* Event counters that belong to no bulkhead. */
enum total {
	TOTAL_SLOTS_FULL = 0,	   /* let through without a slot: no room in slots */
	TOTAL_UNDERFLOW = 1,	   /* a release found a count of zero: a bug */
	TOTAL_REFUSED_EARLIER = 2, /* denied by a program before ours: no slot taken */
	TOTAL_UNCOUNTED = 3,	   /* let through without a slot: its old entry did not go away */
	TOTALS = 4,
};

/* Argument of the retire and bury programs. */
struct retire {
	__u64 cookie;
	__u64 word;		   /* as it was seen */
	__u64 tally;		   /* as it was seen, for UDP: whoever used it since keeps it */
	__u32 part;
	__u32 done;		   /* out: 1 if this call did it */
};

/*
 * Argument of the adopt program: a connection that no hook of ours has seen begin, and what
 * it is to hold. One that was in the maps of another release keeps what was noted of it.
 */
struct adopt {
	struct slot slot;	   /* word: SLOT_RELEASED if it is, else 0; the word it got is written here */
	__u32 connected;	   /* UDP: 1 if it is the one that the socket is connected to, */
	__u32 was;		   /* which is noted if this is noted now */
	__u32 done;		   /* out: 1 if it has a slot now that it had not */
	__u32 pad;
};

/* Names, for user space and bpftool; the programs never read them. */
struct bulkhead_name {
	char scope[24];
	char feature[48];
	char tenant[48];
	char provider[48];
};

struct traffic_name {
	char feature[48];
	char tenant[48];
	char provider[48];
};

/* A piece of the plan in force, as JSON, for commands that run without the agent. */
#define PLAN_CHUNK 4096
struct plan_chunk {
	__u32 used;
	char text[PLAN_CHUNK - 4];
};

#endif
