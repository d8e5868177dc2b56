/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The counting rule: take a slot, give it back once. Nothing here knows a hook.
 */
#ifndef BULKHEAD_ADMIT_H
#define BULKHEAD_ADMIT_H

#include "slots.h"

/* Fixed at load. */
const volatile __u32 have_retval = 1; /* bpf_set_retval and bpf_get_retval: kernel 5.18 */
const volatile __u32 have_comm = 1;   /* bpf_get_current_comm: CAP_PERFMON */

#define EPERM 1
#define PROTO_UDP 17
/*
 * What may lose a race is tried EIGHT * EIGHT times before it counts as lost: in two
 * functions, since the time to load a program grows with the square of its length.
 */
#define EIGHT 8
#define ROUNDS 3 /* the whole admission: once, and at most twice again */

/*
 * Every loop is unrolled, so that indices are constants. Without CAP_PERFMON the
 * verifier refuses other arithmetic on pointers, and follows a loop's counter beyond
 * its end, where speculation may go.
 */
#define unrolled _Pragma("unroll")

/* Over the first n of at most MAX_HOLDS. */
#define for_holds(i, n) unrolled for (int i = 0; i < MAX_HOLDS && i < (n); i++)

static __always_inline void count(__u32 total)
{
	__u64 *n = bpf_map_lookup_elem(&totals, &total);

	if (n)
		__sync_fetch_and_add(n, 1);
}

enum taken {
	TAKEN = 0,
	FULL = 1,
	RACED = 2, /* somebody else changed the count meanwhile */
};

/*
 * One try to take a place of a bulkhead, never above the limit; accepted of it is counted
 * as such. The verifier looks at a global function once, and not for every hold of every
 * round.
 */
__noinline int try_place(__u32 index, __u32 limit, __u32 accepted)
{
	struct bulkhead *b = bpf_map_lookup_elem(&bulkheads, &index);
	__u64 *word = (__u64 *)b, old, in_use, peak;

	if (!b)
		return FULL;
	old = *(volatile __u64 *)word;
	in_use = old & 0xffffffffU;
	peak = old >> 32;
	if (in_use >= limit)
		return FULL;
	in_use++;
	if (peak < in_use)
		peak = in_use;
	if (__sync_val_compare_and_swap(word, old, peak << 32 | in_use) != old)
		return RACED;
	__sync_fetch_and_add(&b->accepted, accepted);
	return TAKEN;
}

__noinline int try_place_eight(__u32 index, __u32 limit, __u32 accepted)
{
	unrolled for (int i = 0; i < EIGHT; i++) {
		int got = try_place(index, limit, accepted);

		if (got != RACED)
			return got;
	}
	return RACED;
}

/* Take a place, or FULL, or RACED if every try lost. */
__noinline int take_place(__u32 index, __u32 limit, __u32 accepted)
{
	unrolled for (int i = 0; i < EIGHT; i++) {
		int got = try_place_eight(index, limit, accepted);

		if (got != RACED)
			return got;
	}
	return RACED;
}

/* The same, in one call where nobody else is at it. */
static __always_inline int take(__u32 index, __u32 limit)
{
	int got = try_place(index, limit, 1);

	return got == RACED ? take_place(index, limit, 1) : got;
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
 * Swap the word of a slot from what the caller saw to another, and give back what it held
 * if nobody had. Only the winner gives back, and only what was copied before the swap. 1 if
 * this call won.
 */
static __always_inline int swap_slot(struct slot *s, __u64 seen, __u64 word)
{
	__u32 held[MAX_HOLDS];
	__u32 n = s->n;

	__builtin_memcpy(held, s->bulkheads, sizeof(held));
	if (__sync_val_compare_and_swap(&s->word, seen, word) != seen)
		return 0;
	if (seen & SLOT_RELEASED)
		return 1;
	for_holds(i, n)
		give_place(held[i], 0);
	return 1;
}

/* Give a slot back, once. */
static __always_inline int release_slot(struct slot *s, __u64 seen)
{
	return seen & SLOT_RELEASED ? 0 : swap_slot(s, seen, seen | SLOT_RELEASED);
}

/*
 * Give back what an earlier connection still holds, and remove the entry, so that the
 * next may be put. 0 if the agent is doing so or has changed the word.
 */
static __always_inline int replace_slot(struct slot *s, __u64 seen, __u64 cookie, __u32 part)
{
	if (s->flags & SLOT_HOME) {
		if (!swap_slot(s, seen, 0))
			return 0;
		note_entry(cookie, -AT_HOME);
		return 1;
	}
	if (seen & SLOT_CLAIMED || !swap_slot(s, seen, seen | SLOT_RELEASED | SLOT_CLAIMED))
		return 0;
	if (!delete_guest(cookie, part))
		return 1;
	/* Busy, on kernels before 6.7, under an interrupt: it may be tried again. */
	seen |= SLOT_RELEASED | SLOT_CLAIMED;
	__sync_val_compare_and_swap(&s->word, seen, seen & ~(__u64)SLOT_CLAIMED);
	return 0;
}

/* Remove a TCP socket's entry: 0 if somebody else is at it. Global for the verifier's sake. */
__noinline int try_clear(__u64 cookie)
{
	__u64 seen;
	struct slot *old = find_slot(cookie, &seen);

	return !old || replace_slot(old, seen, cookie, 0);
}

__noinline int try_clear_eight(__u64 cookie)
{
	unrolled for (int i = 0; i < EIGHT; i++)
		if (try_clear(cookie))
			return 1;
	return 0;
}

/* Make room for a TCP socket's next slot. 0 if its old one did not go away. */
__noinline int clear_slot(__u64 cookie)
{
	unrolled for (int i = 0; i < EIGHT; i++) {
		if (try_clear_eight(cookie))
			return 1;
		/* Somebody else is at it, for a moment: look again. */
	}
	count(TOTAL_UNCOUNTED);
	return 0;
}

static __always_inline struct route *route_at(__u32 idx, __u32 at)
{
	void *rs = bpf_map_lookup_elem(&routes, &idx);

	return rs ? bpf_map_lookup_elem(rs, &at) : 0;
}

/* What was in the way: which hold of the route, and enum reason. Never 0. */
#define BLOCKED(hold, reason) ((hold) + 1 | (reason) << 8)
#define BLOCKED_BY(blocked) (((blocked) & 0xff) - 1)
#define BLOCKED_WHY(blocked) ((blocked) >> 8)

#define FULL_AT_ONCE (1 << 16) /* seen by reading, before anything was taken */

/*
 * One try to take every bulkhead on route at of generation idx: 0, or none and what
 * was in the way. Global for the verifier's sake.
 *
 * It reads first and takes second. Adding and backing out shows samples above
 * the limit, and a flood on a full provider would make connects to another one
 * fail; reading first touches nothing when something is full.
 */
__noinline int try_route(__u32 idx, __u32 at)
{
	struct route *r = route_at(idx, at);
	int blocked = 0;
	__u32 n;

	if (!r)
		return 0;
	n = r->n;
	for_holds(i, n) {
		__u32 index = r->holds[i].bulkhead;
		struct bulkhead *b = bpf_map_lookup_elem(&bulkheads, &index);

		if (b && *(volatile __u32 *)&b->in_use >= r->holds[i].limit)
			return BLOCKED(i, REASON_FULL) | FULL_AT_ONCE;
	}
	for_holds(i, n) {
		int got = take(r->holds[i].bulkhead, r->holds[i].limit);

		if (got != TAKEN) {
			blocked = BLOCKED(i, got == FULL ? REASON_FULL : REASON_CONTENDED);
			break;
		}
	}
	if (!blocked)
		return 0;
	for_holds(i, BLOCKED_BY(blocked))
		give_place(r->holds[i].bulkhead, 1);
	return blocked;
}

/* Take every bulkhead on a route, trying again what lost a race. Returns as try_route. */
static __always_inline int take_route(__u32 idx, __u32 at)
{
	int blocked = 0;

	unrolled for (int round = 0; round < ROUNDS; round++) {
		blocked = try_route(idx, at);
		if (!blocked || blocked & FULL_AT_ONCE)
			break;
	}
	return blocked & (FULL_AT_ONCE - 1);
}

/* Take a place whatever the limit. */
__noinline int take_anyway(__u32 index, __u32 accepted)
{
	struct bulkhead *b;

	if (take_place(index, NO_LIMIT, accepted) == TAKEN)
		return 0;
	/* Contended: what a slot names must be taken, if at the price of the peak. */
	b = bpf_map_lookup_elem(&bulkheads, &index);
	if (b) {
		__sync_fetch_and_add((__u64 *)b, 1);
		__sync_fetch_and_add(&b->accepted, accepted);
	}
	return 0;
}

/* Take every bulkhead of a route that only observes, whatever its limits. */
__noinline int take_route_anyway(__u32 idx, __u32 at)
{
	struct route *r = route_at(idx, at);

	if (!r)
		return 0;
	for_holds(i, r->n)
		take_anyway(r->holds[i].bulkhead, 1);
	return 0;
}

/* Give back every bulkhead of a route whose slot could not be kept. */
__noinline int give_route(__u32 idx, __u32 at)
{
	struct route *r = route_at(idx, at);

	if (!r)
		return 0;
	for_holds(i, r->n)
		give_place(r->holds[i].bulkhead, 1);
	return 0;
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
	__u32 part; /* of slot_key */
	__u32 generation;
	__u16 port; /* host order */
	__u8 proto;
	__u8 header; /* IP and TCP header bytes of an ordinary segment */
};

/*
 * Note a refusal on route at, or one that observe mode let through; told once a second
 * a route. The errno to fail with. Global for the verifier's sake, and so of scalars:
 * the address in two halves, protocol << 16 | port.
 */
__noinline int refused(__u64 route, __u32 blocked, __u32 port, __u64 addr0, __u64 addr1)
{
	struct route *r = route_at(route >> 32, (__u32)route);
	__u32 at, bulkhead = 0, limit = 0, err = EPERM, observe;
	struct refusal *f;
	struct bulkhead *b;
	__u64 now, last;

	if (!r)
		return EPERM;
	for_holds(i, MAX_HOLDS) {
		if (i != BLOCKED_BY(blocked))
			continue;
		bulkhead = r->holds[i].bulkhead;
		limit = r->holds[i].limit;
		err = r->err[i];
	}
	observe = r->flags & ROUTE_OBSERVE;
	b = bpf_map_lookup_elem(&bulkheads, &bulkhead);
	if (b) {
		/*
		 * One addition to the pointer, of a number that the verifier can bound: at
		 * most 6, which is within the structure.
		 */
		__u32 why = BLOCKED_WHY(blocked) & 3, which = observe & 1;

		/* So that clang makes no branch of it: without CAP_PERFMON there must be one path. */
		asm volatile("%0 &= 3; %1 &= 1" : "+r"(why), "+r"(which));
		which = which * REASONS + why;
		__sync_fetch_and_add((__u64 *)((char *)b + offsetof(struct bulkhead, rejected)) + which, 1);
	}
	at = r->traffic;
	f = bpf_map_lookup_elem(&refusals, &at);
	if (!f)
		return err;
	__sync_fetch_and_add(&f->total, 1);
	now = bpf_ktime_get_ns();
	last = *(volatile __u64 *)&f->claimed_ns;
	if (now - last < 1000000000ULL && last)
		return err;
	if (__sync_val_compare_and_swap(&f->claimed_ns, last, now) != last)
		return err;
	f->pid = bpf_get_current_pid_tgid() >> 32;
	f->bulkhead = bulkhead;
	f->limit = limit;
	f->err = have_retval ? err : EPERM;
	f->port = port;
	f->reason = BLOCKED_WHY(blocked);
	f->observed = observe;
	f->proto = port >> 16;
	__builtin_memcpy(f->addr, &addr0, 8);
	__builtin_memcpy(f->addr + 8, &addr1, 8);
	if (have_comm)
		bpf_get_current_comm(f->comm, sizeof(f->comm));
	*(volatile __u64 *)&f->at_ns = now;
	return err;
}

/* Write all of an entry but its word, and who connects. */
static __always_inline void fill_slot(struct slot *s, const struct route *r, const struct ask *q, __u8 flags)
{
	s->cookie = q->cookie;
	s->n = r->n;
	s->proto = q->proto;
	s->flags = flags;
	s->header = q->header;
	s->traffic = r->traffic;
	s->part = q->part;
	for_holds(i, MAX_HOLDS)
		s->bulkheads[i] = r->holds[i].bulkhead;
	s->netns = q->netns;
	s->fin_segs = 0;
	s->port = q->port;
	s->generation = q->generation;
	__builtin_memcpy(s->addr, q->addr, 16);
}

/* Who connects, and when. */
static __always_inline void sign_slot(struct slot *s)
{
	__u64 now = bpf_ktime_get_coarse_ns(); /* a tick is exact enough, and a fifth of the price */

	s->pid = bpf_get_current_pid_tgid() >> 32;
	s->born_ns = now;
	s->tally = s->proto == PROTO_UDP ? now : 0;
	if (have_comm)
		bpf_get_current_comm(s->comm, sizeof(s->comm));
}

/*
 * Claim a TCP socket's home for an admission; the entry is to be filled and moved_in
 * called. None if it is not free.
 */
static __always_inline struct slot *claim_home(__u64 cookie, __u64 word)
{
	struct slot *h = home_of(cookie);

	if (!h || *(volatile __u64 *)&h->word || __sync_val_compare_and_swap(&h->word, 0, word | SLOT_CLAIMED))
		return 0;
	return h;
}

static __always_inline void moved_in(struct slot *h, __u64 word)
{
	note_entry(h->cookie, AT_HOME);
	/* A full barrier on every machine: who sees the word sees the rest. */
	__sync_val_compare_and_swap(&h->word, (word & ~(__u64)SLOT_RELEASED) | SLOT_CLAIMED, word);
}

/* Put an entry into the hash. 0, or -EEXIST, or another error if there is no room. */
static __always_inline long put_guest(struct slot *s)
{
	struct slot_key key = {.cookie = s->cookie, .part = s->part};
	long err;

	if (!key.part)
		note_entry(key.cookie, AS_GUEST);
	err = bpf_map_update_elem(&slots, &key, s, BPF_NOEXIST);
	if (err && !key.part)
		note_entry(key.cookie, -AS_GUEST);
	return err;
}

/* Not inline, for the sake of the stack. */
static __noinline long put_as_guest(const struct route *r, const struct ask *q, __u64 word)
{
	struct slot s = {};

	fill_slot(&s, r, q, 0);
	sign_slot(&s);
	s.word = word;
	return put_guest(&s);
}

/*
 * Put the slot of a connection whose places are taken. 0, or -EEXIST, or another error if
 * there is no room.
 */
static __always_inline long put_slot(const struct route *r, const struct ask *q)
{
	__u64 word = new_word(q->cookie);
	/* A UDP socket may have a slot for each provider: those are in the hash. */
	struct slot *h = q->part ? 0 : claim_home(q->cookie, word);

	if (!h)
		return put_as_guest(r, q, word);
	fill_slot(h, r, q, SLOT_HOME);
	sign_slot(h);
	moved_in(h, word);
	return 0;
}

/* As refused, of what is asked. */
static __always_inline int refuse(__u32 idx, __u32 at, const struct ask *q, int blocked)
{
	__u64 half[2];

	__builtin_memcpy(half, q->addr, 16);
	return refused((__u64)idx << 32 | at, blocked, (__u32)q->proto << 16 | q->port, half[0], half[1]);
}

/*
 * A connection whose places are taken cannot be remembered, so it must not be counted.
 * The policy says whether it is let through; 0, or the errno of the narrowest limit.
 */
static __always_inline int no_room(__u32 idx, __u32 at, const struct route *r, const struct ask *q)
{
	int limited = 0, first = 0;

	give_route(idx, at);
	count(TOTAL_SLOTS_FULL);
	for_holds(i, r->n) {
		if (r->holds[i].limit != NO_LIMIT) {
			limited = 1;
			first = i;
			break;
		}
	}
	if (r->flags & ROUTE_STRICT && limited) {
		int no = refuse(idx, at, q, BLOCKED(first, REASON_EXHAUSTED));

		if (!(r->flags & ROUTE_OBSERVE))
			return no;
	}
	count_connection(r->traffic);
	return 0;
}

#endif
