/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The maps. Names are at most 15 characters and types are in BTF, so that
 * `bpftool map dump` prints names.
 *
 * dests, ports, comps, routes, plans and gens are the two generations: index
 * control.word & 1 is in force, the other is being built or retired. The rest lives
 * across generations.
 */
#ifndef BULKHEAD_MAPS_H
#define BULKHEAD_MAPS_H

#include "types.h"
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* Written by the agent through one 8-byte store into the mapped page. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct control_word);
} control SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, struct gen);
} gens SEC(".maps");

/*
 * clang leaves a structure that only an inner map points to as a forward
 * declaration in BTF, and an enum that no map has out of it; in the parameter of a
 * function they are written whole. Nobody calls this, so it is never loaded.
 */
struct written_types {
	struct dest_key key;
	struct dest dest;
	struct port_range ports;
	struct route route;
	struct plan_chunk plan;
	enum constant constant;
	enum route_flag route_flag;
	enum slot_flag slot_flag;
	enum reason reason;
	enum total total;
};

int write_types(struct written_types *all)
{
	return all ? 1 : 0;
}

struct dests_inner {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct dest_key);
	__type(value, struct dest);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 2);
	__type(key, __u32);
	__array(values, struct dests_inner);
} dests SEC(".maps");

struct ports_inner {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_INNER_MAP);
	__type(key, __u32);
	__type(value, struct port_range);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 2);
	__type(key, __u32);
	__array(values, struct ports_inner);
} ports SEC(".maps");

/* cgroup id -> compartment, or COMPARTMENT_PROTECTED. */
struct comps_inner {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, __u64);
	__type(value, __u32);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 2);
	__type(key, __u32);
	__array(values, struct comps_inner);
} comps SEC(".maps");

struct routes_inner {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_INNER_MAP);
	__type(key, __u32);
	__type(value, struct route);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 2);
	__type(key, __u32);
	__array(values, struct routes_inner);
} routes SEC(".maps");

struct plans_inner {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_INNER_MAP);
	__type(key, __u32);
	__type(value, struct plan_chunk);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 2);
	__type(key, __u32);
	__array(values, struct plans_inner);
} plans SEC(".maps");

/*
 * Per CPU: a writer can only be interrupted by another task of its own CPU, so
 * program order is all the ordering the sequence lock needs.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, LEAVES);
	__type(key, __u32);
	__type(value, struct leaf);
} leaves SEC(".maps");

/*
 * The slots of TCP connections, each at cookie modulo size: an array needs no allocation,
 * no hashing and no lock of a bucket, and sockets that follow each other are beside each
 * other. As many as an eighth of slots; a power of two.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_SLOTS / 8);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct slot);
} homes SEC(".maps");

/* Those of UDP, and of TCP where home is not free. Never LRU: it evicts live entries. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_SLOTS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct slot_key);
	__type(value, struct slot);
} slots SEC(".maps");

/*
 * A filter before homes, slots and udp_sockets, as long as homes and by the same index: how
 * many entries there are, in units of AT_HOME and AS_GUEST. Zero says that there is none:
 * most sockets of a node have none, and here eight of them share a cache line. It may be
 * too high for a moment and is never too low when somebody looks for what is there.
 */
#define AT_HOME (1U << 24)
#define AS_GUEST 1U
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_SLOTS / 8);
	__type(key, __u32);
	__type(value, __u32);
} cookies SEC(".maps");

/* By cookie. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_SLOTS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct udp_socket);
} udp_sockets SEC(".maps");

/* The agent maps it and only reads, but for an index that no slot names. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_BULKHEADS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct bulkhead);
} bulkheads SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_ROUTES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct traffic_count);
} traffic SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_ROUTES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct refusal);
} refusals SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TOTALS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64);
} totals SEC(".maps");

/* The next admission's number, per CPU: makes slot.word unique. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} admissions SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_BULKHEADS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct bulkhead_name);
} bulkhead_names SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_ROUTES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct traffic_name);
} traffic_names SEC(".maps");

/* The agent writes it and only agents read it. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LAYOUT_FIELDS);
	__type(key, __u32);
	__type(value, struct layout_field);
} layout SEC(".maps");

#endif
