/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Destination -> provider, and task -> compartment. */
#ifndef BULKHEAD_DEST_H
#define BULKHEAD_DEST_H

#include "maps.h"

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

/*
 * The compartment of the current task: the deepest of its cgroups that the
 * plan names. Only the depths that the plan uses are looked at, and only when the
 * leaf is not in the cache with the epoch in force.
 *
 * Processes in the root cgroup are never refused; kernel threads are there.
 */
static __always_inline __u32 compartment_of(__u32 idx, struct gen *g, __u64 epoch)
{
	__u64 cgroup = bpf_get_current_cgroup_id();
	__u32 at = cgroup & (LEAVES - 1), found = 0;
	struct leaf *l;
	void *in;

	if (cgroup <= 1)
		return COMPARTMENT_PROTECTED;
	l = bpf_map_lookup_elem(&leaves, &at);
	if (!l)
		return COMPARTMENT_PROTECTED;

	volatile struct leaf *v = l;
	__u64 seq = v->seq;
	__u64 was = v->cgroup, of = v->epoch;
	__u32 hit = v->compartment;

	if (!(seq & 1) && v->seq == seq && was == cgroup && of == epoch)
		return hit;

	in = bpf_map_lookup_elem(&comps, &idx);
	if (!in)
		return COMPARTMENT_PROTECTED;
	for (int i = 0; i < MAX_LEVELS && i < g->levels; i++) {
		__u64 id = bpf_get_current_ancestor_cgroup_id(g->level[i]);
		__u32 *c;

		if (!id)
			continue;
		c = bpf_map_lookup_elem(in, &id);
		if (c) {
			found = *c;
			break;
		}
	}

	/* If another task of this CPU is at the same entry, let it have it. */
	if (!(seq & 1) && __sync_val_compare_and_swap(&l->seq, seq, seq + 1) == seq) {
		v->cgroup = cgroup;
		v->epoch = epoch;
		v->compartment = found;
		v->seq = seq + 2;
	}
	return found;
}

#endif
