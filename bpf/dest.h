/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Destination -> provider, and task -> compartment. */
#ifndef BULKHEAD_DEST_H
#define BULKHEAD_DEST_H

#include "maps.h"

/* Whether any destination can match an address; see struct gen. */
static __always_inline int near(struct gen *g, const __u8 *addr, int ipv4)
{
	__u32 bit;

	if (ipv4) {
		bit = addr[12] << 8 | addr[13];
		return g->near4[bit >> 3 & (NEAR_BITS / 8 - 1)] >> (bit & 7) & 1;
	}
	bit = (addr[0] ^ addr[2]) << 8 | (addr[1] ^ addr[3]);
	return g->near6[bit >> 3 & (NEAR_BITS / 8 - 1)] >> (bit & 7) & 1;
}

/*
 * The provider of protocol:port at an address: one longest-prefix lookup, and a
 * search in that prefix's ports where it has more than one range. The compiler
 * of the policy has put into each prefix what shorter ones say of ports that it
 * leaves free, so no second lookup is ever needed.
 */
static __always_inline __u32 provider_of(__u32 idx, struct dest_key *key, __u8 proto, __u16 port)
{
	__u32 want = (__u32)proto << 16 | port;
	void *trie = bpf_map_lookup_elem(&dests, &idx);
	struct dest *d;

	if (!trie)
		return PROVIDER_OTHER;
	d = bpf_map_lookup_elem(trie, key);
	if (!d)
		return PROVIDER_OTHER;
	if (want >= d->from && want <= d->to)
		return d->provider;
	if (!d->n)
		return PROVIDER_OTHER;

	void *ranges = bpf_map_lookup_elem(&ports, &idx);
	__u32 lo = d->more, hi = d->more + d->n;

	if (!ranges)
		return PROVIDER_OTHER;
	for (int i = 0; i < 17 && lo < hi; i++) { /* 2^17 > 65536 ranges */
		__u32 mid = lo + (hi - lo) / 2;
		struct port_range *r = bpf_map_lookup_elem(ranges, &mid);

		if (!r)
			return PROVIDER_OTHER;
		if (want < r->from)
			hi = mid;
		else if (want > r->to)
			lo = mid + 1;
		else
			return r->provider;
	}
	return PROVIDER_OTHER;
}

/* Who connects, as the leaf cache has it. */
struct who {
	__u32 compartment;
	__u32 other; /* see struct leaf */
};

static __always_inline struct route *route_of(__u32 idx, struct gen *g, __u32 compartment, __u32 provider)
{
	__u32 at = compartment * g->providers + provider;
	void *rs = bpf_map_lookup_elem(&routes, &idx);

	if (!rs || compartment == COMPARTMENT_PROTECTED)
		return 0;
	return bpf_map_lookup_elem(rs, &at);
}

/* The traffic counter of a compartment's route to other, if that only counts. */
static __always_inline __u32 other_of(__u32 idx, struct gen *g, __u32 compartment)
{
	struct route *r = route_of(idx, g, compartment, PROVIDER_OTHER);

	return r && r->flags & ROUTE_COUNT_ONLY ? r->traffic : NO_INDEX;
}

/*
 * The compartment of the current task: the deepest of its cgroups that the
 * plan names. Only the depths that the plan uses are looked at, and only when the
 * leaf is not in the cache with the epoch in force.
 *
 * Processes in the root cgroup are never refused; kernel threads are there.
 */
static __always_inline struct who who_connects(__u32 idx, struct gen *g, __u64 epoch)
{
	struct who w = {.compartment = COMPARTMENT_PROTECTED, .other = NO_INDEX};
	__u64 cgroup = bpf_get_current_cgroup_id();
	__u32 at = cgroup & (LEAVES - 1);
	struct leaf *l;
	void *in;

	if (cgroup <= 1)
		return w;
	l = bpf_map_lookup_elem(&leaves, &at);
	if (!l)
		return w;

	volatile struct leaf *v = l;
	__u64 seq = v->seq;
	__u64 was = v->cgroup, of = v->epoch;
	struct who hit = {.compartment = v->compartment, .other = v->other};

	if (!(seq & 1) && v->seq == seq && was == cgroup && of == epoch)
		return hit;

	in = bpf_map_lookup_elem(&comps, &idx);
	if (!in)
		return w;
	w.compartment = 0;
	for (int i = 0; i < MAX_LEVELS && i < g->levels; i++) {
		__u64 id = bpf_get_current_ancestor_cgroup_id(g->level[i]);
		__u32 *c;

		if (!id)
			continue;
		c = bpf_map_lookup_elem(in, &id);
		if (c) {
			w.compartment = *c;
			break;
		}
	}
	w.other = other_of(idx, g, w.compartment);

	/* If another task of this CPU is at the same entry, let it have it. */
	if (!(seq & 1) && __sync_val_compare_and_swap(&l->seq, seq, seq + 1) == seq) {
		v->cgroup = cgroup;
		v->epoch = epoch;
		v->compartment = w.compartment;
		v->other = w.other;
		v->seq = seq + 2;
	}
	return w;
}

#endif
