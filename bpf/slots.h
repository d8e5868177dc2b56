/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Where slots are: find an entry, put one, remove one. Nothing here counts. */
#ifndef BULKHEAD_SLOTS_H
#define BULKHEAD_SLOTS_H

#include "maps.h"

/* Fixed at load, by the size of homes. */
const volatile __u32 home_mask = MAX_SLOTS / 8 - 1;

#define EEXIST 17

/* The part of a word that says whose it is. */
#define WORD_COOKIE(cookie) ((cookie) << 40)
#define WORD_COOKIE_MASK (0xffffffULL << 40)

static __always_inline struct slot *home_of(__u64 cookie)
{
	__u32 at = cookie & home_mask;

	return bpf_map_lookup_elem(&homes, &at);
}

/* Note in the filter that an entry comes (AT_HOME, AS_GUEST) or is gone (less than 0). */
static __always_inline void note_entry(__u64 cookie, int change)
{
	__u32 at = cookie & home_mask;
	__u32 *n = bpf_map_lookup_elem(&cookies, &at);

	if (n)
		__sync_fetch_and_add(n, change);
}

/* What there may be for a socket, in the filter's units. */
static __always_inline __u32 entries_of(__u64 cookie)
{
	__u32 at = cookie & home_mask;
	__u32 *n = bpf_map_lookup_elem(&cookies, &at);

	return n ? *(volatile __u32 *)n : 0;
}

/* Whether home is this TCP socket's, and in *seen its word. */
static __always_inline int is_home(struct slot *h, __u64 cookie, __u64 *seen)
{
	*seen = *(volatile __u64 *)&h->word;
	/* While it is claimed its cookie may be that of who was there before. */
	return (*seen & (WORD_COOKIE_MASK | SLOT_THERE | SLOT_CLAIMED)) == (WORD_COOKIE(cookie) | SLOT_THERE) &&
	       *(volatile __u64 *)&h->cookie == cookie;
}

/*
 * An entry of the hash and, in *seen, its word. None if the element was deleted and reused
 * for another socket before its word was read.
 */
static __always_inline struct slot *find_guest(__u64 cookie, __u32 part, __u64 *seen)
{
	struct slot_key key = {.cookie = cookie, .part = part};
	struct slot *s = bpf_map_lookup_elem(&slots, &key);

	if (!s)
		return 0;
	*seen = *(volatile __u64 *)&s->word;
	return (*seen & WORD_COOKIE_MASK) == WORD_COOKIE(cookie) ? s : 0;
}

/* The slot of a TCP socket. */
static __always_inline struct slot *find_slot(__u64 cookie, __u64 *seen)
{
	__u32 entries = entries_of(cookie);

	if (!entries)
		return 0;
	if (entries >= AT_HOME) {
		struct slot *h = home_of(cookie);

		if (h && is_home(h, cookie, seen))
			return h;
	}
	return entries & (AT_HOME - 1) ? find_guest(cookie, 0, seen) : 0;
}

/*
 * Note when a UDP slot was used. The word is looked at once more, since the element may be
 * somebody else's by now, whose tally is another thing.
 */
static __always_inline void touch_slot(struct slot *s, __u64 seen, __u64 now)
{
	if (*(volatile __u64 *)&s->word == seen)
		s->tally = now;
}

/* Clear an entry at home whose word is seen. Only one of those who do succeeds. */
static __always_inline int leave_home(struct slot *h, __u64 seen, __u64 cookie)
{
	if (__sync_val_compare_and_swap(&h->word, seen, 0) != seen)
		return 0;
	note_entry(cookie, -AT_HOME);
	return 1;
}

/* Only one of those who delete a guest succeeds, so that it is noted once. */
static __always_inline int delete_guest(__u64 cookie, __u32 part)
{
	struct slot_key key = {.cookie = cookie, .part = part};
	int err = bpf_map_delete_elem(&slots, &key);

	/* Of UDP the socket is noted, and not each of its slots. */
	if (!err && !part)
		note_entry(cookie, -AS_GUEST);
	return err;
}

/*
 * Remove an entry whose places are given back; seen is its word. At home, that of another
 * admission is left alone; a guest is the socket's own, whichever it is.
 */
static __always_inline void delete_slot(struct slot *s, __u64 seen, __u64 cookie, __u32 part)
{
	if (s->flags & SLOT_HOME)
		leave_home(s, seen | SLOT_RELEASED, cookie);
	else
		delete_guest(cookie, part);
}

/* A word that no other admission of this socket had, nor a recent one of any other. */
static __always_inline __u64 new_word(__u64 cookie)
{
	__u32 zero = 0;
	__u64 *next = bpf_map_lookup_elem(&admissions, &zero);
	__u64 n = 0;

	if (next)
		n = __sync_fetch_and_add(next, 1); /* atomic: a task of this CPU may interrupt */
	/* 26 bits of count for each of 2048 CPUs, and the socket's own 24. */
	return WORD_COOKIE(cookie) | (n & 0x3ffffff) << 14 | (__u64)(bpf_get_smp_processor_id() & 0x7ff) << 3 | SLOT_THERE;
}

#endif
