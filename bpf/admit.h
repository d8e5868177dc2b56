/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The counting rule: take a slot, give it back once. Nothing here knows a hook,
 * so that the test programs, which are not on one, include it too.
 */
#ifndef BULKHEAD_ADMIT_H
#define BULKHEAD_ADMIT_H

#include "maps.h"

/* Fixed at load. */
const volatile __u32 have_retval = 1; /* bpf_set_retval and bpf_get_retval: kernel 5.18 */

#define EEXIST 17
#define RACES 64 /* lost compare-and-swaps in a row before a place counts as contended */
#define ROUNDS 3 /* the whole admission: once, and at most twice again */

static __always_inline void count(__u32 total)
{
	__u64 *n = bpf_map_lookup_elem(&totals, &total);

	if (n)
		__sync_fetch_and_add(n, 1);
}

/* Note in the filter before slots that an entry comes (1) or is gone (-1). */
static __always_inline void note_cookie(__u64 cookie, int change)
{
	__u32 at = cookie & (COOKIES - 1);
	__u32 *n = bpf_map_lookup_elem(&cookies, &at);

	if (n)
		__sync_fetch_and_add(n, change);
}

static __always_inline struct slot *find_slot(__u64 *cookie)
{
	__u32 at = *cookie & (COOKIES - 1);
	__u32 *n = bpf_map_lookup_elem(&cookies, &at);

	if (n && !*(volatile __u32 *)n)
		return 0;
	return bpf_map_lookup_elem(&slots, cookie);
}

/* Only one of those who delete an entry succeeds, so the filter is lowered once. */
static __always_inline void delete_slot(__u64 *cookie)
{
	if (!bpf_map_delete_elem(&slots, cookie))
		note_cookie(*cookie, -1);
}

/*
 * Take one place of a bulkhead, never above the limit. 0 taken, 1 full,
 * 2 contended. A global function, so that the verifier looks at its loop once and
 * not for every hold of every round.
 */
__noinline int take_place(__u32 index, __u32 limit)
{
	struct bulkhead *b = bpf_map_lookup_elem(&bulkheads, &index);
	__u64 *word = (__u64 *)b;

	if (!b)
		return 1;
	for (int i = 0; i < RACES; i++) {
		__u64 old = *(volatile __u64 *)word;
		__u64 in_use = old & 0xffffffffU, peak = old >> 32;

		if (in_use >= limit)
			return 1;
		in_use++;
		if (peak < in_use)
			peak = in_use;
		if (__sync_val_compare_and_swap(word, old, peak << 32 | in_use) == old) {
			__sync_fetch_and_add(&b->accepted, 1);
			return 0;
		}
	}
	return 2;
}

/*
 * Give one place back. accepted, if it was counted too early, goes with it. Global for
 * the verifier's sake, like take_place.
 */
__noinline int give_place(__u32 index, __u32 accepted)
{
	struct bulkhead *b = bpf_map_lookup_elem(&bulkheads, &index);

	if (!b)
		return 0;
	if (!(__u32)__sync_fetch_and_add((__u64 *)b, -1)) {
		/* Cannot happen while every release owns its word; never wrap. */
		__sync_fetch_and_add((__u64 *)b, 1);
		count(TOTAL_UNDERFLOW);
	}
	if (accepted)
		__sync_fetch_and_add(&b->accepted, -(__u64)accepted);
	return 0;
}

/*
 * Swap the word of a slot from what the caller saw to the same with bits, and give
 * back what it held if nobody had. Only the winner gives back, and only what was
 * copied before the swap. 1 if this call won.
 */
static __always_inline int swap_slot(struct slot *s, __u64 seen, __u64 bits)
{
	__u32 held[MAX_HOLDS];
	__u32 n = s->n;

	__builtin_memcpy(held, s->bulkheads, sizeof(held));
	if (__sync_val_compare_and_swap(&s->word, seen, seen | bits) != seen)
		return 0;
	if (seen & SLOT_RELEASED)
		return 1;
	for (int i = 0; i < MAX_HOLDS && i < n; i++)
		give_place(held[i], 0);
	return 1;
}

/* Give a slot back, once. */
static __always_inline int release_slot(struct slot *s, __u64 seen)
{
	return seen & SLOT_RELEASED ? 0 : swap_slot(s, seen, SLOT_RELEASED);
}

/*
 * Give back what an earlier connection of the socket still holds, and remove the
 * entry, so that the next may be inserted. 0 if another thread is doing so: UDP sends
 * run without the socket's lock.
 */
static __always_inline int replace_slot(struct slot *s, __u64 seen, __u64 *cookie)
{
	if (seen & SLOT_CLAIMED || !swap_slot(s, seen, SLOT_RELEASED | SLOT_CLAIMED))
		return 0;
	delete_slot(cookie);
	return 1;
}

/* A word that no admission had before, on any CPU, in the life of the maps. */
static __always_inline __u64 new_word(void)
{
	__u32 zero = 0;
	__u64 *next = bpf_map_lookup_elem(&admissions, &zero);
	__u64 n;

	if (!next)
		return 0;
	n = __sync_fetch_and_add(next, 1) + 1; /* atomic: a task of this CPU may interrupt */
	return n << 18 | (__u64)(bpf_get_smp_processor_id() & 0xffff) << 2;
}

/* Note a refusal, or one that observe mode let through; told once a second a route. */
static __always_inline void refused(struct route *r, __u32 i, __u32 why, const __u8 *addr, __u16 port, __u8 proto)
{
	__u32 observe = r->flags & ROUTE_OBSERVE, at = r->traffic;
	struct bulkhead *b;
	struct refusal *f;
	__u64 now, last;

	if (i >= MAX_HOLDS)
		return;
	b = bpf_map_lookup_elem(&bulkheads, &r->holds[i].bulkhead);
	if (b)
		__sync_fetch_and_add(observe ? &b->would_reject[why & 1] : &b->rejected[why & 1], 1);
	f = bpf_map_lookup_elem(&refusals, &at);
	if (!f)
		return;
	__sync_fetch_and_add(&f->total, 1);
	now = bpf_ktime_get_ns();
	last = *(volatile __u64 *)&f->claimed_ns;
	if (now - last < 1000000000ULL && last)
		return;
	if (__sync_val_compare_and_swap(&f->claimed_ns, last, now) != last)
		return;
	f->pid = bpf_get_current_pid_tgid() >> 32;
	f->bulkhead = r->holds[i].bulkhead;
	f->limit = r->holds[i].limit;
	f->err = r->err[i];
	f->port = port;
	f->reason = why;
	f->observed = observe;
	f->proto = proto;
	__builtin_memcpy(f->addr, addr, 16);
	bpf_get_current_comm(f->comm, sizeof(f->comm));
	*(volatile __u64 *)&f->at_ns = now;
}

/*
 * Take every bulkhead on the route, or none. -1 if taken; else the index of the
 * hold that was in the way, with its reason in *why.
 *
 * It reads first and takes second. Adding and backing out shows samples above
 * the limit, and a flood on a full provider would make connects to another one
 * fail; reading first touches nothing when something is full.
 */
static __always_inline int take_route(struct route *r, __u32 *why)
{
	__u32 n = r->n;
	int blocked = -1;

	for (int round = 0; round < ROUNDS; round++) {
		int taken;

		for (int i = 0; i < MAX_HOLDS && i < n; i++) {
			struct bulkhead *b = bpf_map_lookup_elem(&bulkheads, &r->holds[i].bulkhead);

			if (b && *(volatile __u32 *)&b->in_use >= r->holds[i].limit) {
				*why = REASON_FULL;
				return i;
			}
		}
		blocked = -1;
		for (taken = 0; taken < MAX_HOLDS && taken < n; taken++) {
			int got = take_place(r->holds[taken].bulkhead, r->holds[taken].limit);

			if (got) {
				*why = got == 1 ? REASON_FULL : REASON_CONTENDED;
				blocked = taken;
				break;
			}
		}
		if (blocked < 0)
			return -1;
		for (int i = 0; i < MAX_HOLDS && i < blocked; i++)
			give_place(r->holds[i].bulkhead, 1);
	}
	return blocked;
}

/* Take every bulkhead of a route that only observes, whatever its limits. */
static __always_inline void take_route_anyway(struct route *r)
{
	for (int i = 0; i < MAX_HOLDS && i < r->n; i++)
		take_place(r->holds[i].bulkhead, NO_LIMIT);
}

static __always_inline void count_connection(__u32 at)
{
	struct traffic_count *t = bpf_map_lookup_elem(&traffic, &at);

	if (t)
		__sync_fetch_and_add(&t->connections, 1);
}

struct ask {
	__u64 cookie;
	__u64 netns;
	__u8 addr[16];
	__u16 port; /* host order */
	__u8 proto;
	__u8 header; /* IP and TCP header bytes of an ordinary segment */
};

/*
 * Admit one connection to a route: 0, with its slot taken, or the errno to fail
 * with. A slot of an earlier connection of the socket must be released before.
 */
static __always_inline int admit(struct route *r, const struct ask *q)
{
	__u32 why = REASON_FULL;
	struct slot s = {};
	int blocked;
	long err;

	blocked = take_route(r, &why);
	if (blocked >= 0) {
		refused(r, blocked, why, q->addr, q->port, q->proto);
		if (!(r->flags & ROUTE_OBSERVE))
			return blocked < MAX_HOLDS ? r->err[blocked] : 1;
		take_route_anyway(r);
	}

	s.word = new_word();
	s.born_ns = bpf_ktime_get_ns();
	s.netns = q->netns;
	s.traffic = r->traffic;
	s.n = r->n;
	for (int i = 0; i < MAX_HOLDS; i++)
		s.bulkheads[i] = r->holds[i].bulkhead;
	s.pid = bpf_get_current_pid_tgid() >> 32;
	bpf_get_current_comm(s.comm, sizeof(s.comm));
	__builtin_memcpy(s.addr, q->addr, 16);
	s.port = q->port;
	s.proto = q->proto;
	s.header = q->header;
	note_cookie(q->cookie, 1);
	err = bpf_map_update_elem(&slots, &q->cookie, &s, BPF_NOEXIST);
	if (err) {
		note_cookie(q->cookie, -1);
		for (int i = 0; i < MAX_HOLDS && i < r->n; i++)
			give_place(r->holds[i].bulkhead, 1);
		/* Another thread sent through this UDP socket and its slot counts. */
		if (err == -EEXIST)
			return 0;
		/* No room to remember it: it must not be counted, and it is let through. */
		count(TOTAL_SLOTS_FULL);
	}
	count_connection(r->traffic);
	return 0;
}

#endif
