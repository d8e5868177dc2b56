/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Destination -> provider, and task -> compartment. */
#ifndef BULKHEAD_DEST_H
#define BULKHEAD_DEST_H

#include "admit.h"

/*
 * Whether any destination can match an address; see struct gen. Without a branch:
 * without CAP_PERFMON the verifier refuses an index whose range differs by path.
 */
static __always_inline int near(struct gen *g, const __u8 *addr, int ipv4)
{
	__u32 four = addr[12] << 8 | addr[13];
	__u32 six = NEAR_BITS + ((addr[0] ^ addr[2]) << 8 | (addr[1] ^ addr[3]));
	__u32 choose = -(__u32)ipv4, at;

	asm volatile("" : "+r"(choose));
	at = six ^ ((six ^ four) & choose);
	choose = at & 7;
	at >>= 3;
	/* clang proves the range and drops the mask, which the verifier of 6.1 needs. */
	asm volatile("%0 &= %1" : "+r"(at) : "i"(2 * NEAR_BITS / 8 - 1));
	return g->near[at] >> choose & 1;
}

/* The provider of a port in ports[first .. first+n). Global for the verifier's sake. */
__noinline int search_ports(__u32 idx, __u32 want, __u32 first, __u32 n)
{
	void *ranges = bpf_map_lookup_elem(&ports, &idx);
	__u32 lo = first, hi = first + n;

	if (!ranges)
		return PROVIDER_OTHER;
	unrolled for (int i = 0; i < 17; i++) { /* 2^17 > 131070, the most ranges of two protocols */
		__u32 mid = lo + (hi - lo) / 2;
		struct port_range *r = bpf_map_lookup_elem(ranges, &mid);

		if (!r || lo >= hi)
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
	return d->n ? search_ports(idx, want, d->more, d->n) : PROVIDER_OTHER;
}

/* Who connects, as the leaf cache has it. */
struct who {
	__u32 compartment;
	__u32 other; /* see struct leaf */
};

/* Where a compartment's route to a provider is; in no generation's map if it has none. */
static __always_inline __u32 route_of(struct gen *g, __u32 compartment, __u32 provider)
{
	return compartment == COMPARTMENT_PROTECTED ? NO_INDEX : compartment * g->providers + provider;
}

/* The traffic counter of a compartment's route to other, if that only counts. */
static __always_inline __u32 other_of(__u32 idx, struct gen *g, __u32 compartment)
{
	struct route *r = route_at(idx, route_of(g, compartment, PROVIDER_OTHER));

	return r && r->flags & ROUTE_COUNT_ONLY ? r->traffic : NO_INDEX;
}

/*
 * Walk from the current task's leaf towards the root, over the depths that the plan
 * uses, deepest first: the first cgroup that the plan names decides. Global and
 * unrolled for the verifier's sake.
 */
__noinline int find_compartment(__u32 idx)
{
	struct gen *g = bpf_map_lookup_elem(&gens, &idx);
	void *in = bpf_map_lookup_elem(&comps, &idx);

	if (!g || !in)
		return COMPARTMENT_PROTECTED;
	unrolled for (int i = 0; i < MAX_LEVELS; i++) {
		__u64 id;
		__u32 *c;

		if (i >= g->levels)
			break;
		id = bpf_get_current_ancestor_cgroup_id(g->level[i]);
		if (!id)
			continue;
		c = bpf_map_lookup_elem(in, &id);
		if (c)
			return *c;
	}
	return 0;
}

/*
 * The compartment of the current task, from the leaf cache if it has it of the epoch
 * in force.
 *
 * Processes in the root cgroup are never refused; kernel threads are there.
 */
static __always_inline struct who who_connects(__u32 idx, struct gen *g, __u64 epoch)
{
	struct who w = {.compartment = COMPARTMENT_PROTECTED, .other = NO_INDEX};
	__u64 cgroup = bpf_get_current_cgroup_id();
	__u32 at = cgroup & (LEAVES - 1);
	struct leaf *l;

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

	w.compartment = find_compartment(idx);
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
