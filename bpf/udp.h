/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * UDP: one slot for each (socket, provider). What one connect() took ends with the next;
 * what sends took ends with the socket, or, by the agent, after an idle time. A
 * disconnected socket (AF_UNSPEC) gives no event.
 *
 * connect() and sends run their hooks under the socket's lock (BPF_CGROUP_RUN_SA_PROG_LOCK in
 * linux/bpf-cgroup.h) and hold the descriptor open: of one socket there is one at a time, and
 * none beside the last close. Who may be beside them is the agent, which adopts and retires.
 */
#ifndef BULKHEAD_UDP_H
#define BULKHEAD_UDP_H

#include "admit.h"

#define for_parts(i) unrolled for (int i = 0; i < UDP_PROVIDERS; i++)

static __always_inline struct udp_socket *find_udp(__u64 cookie)
{
	return entries_of(cookie) & (AT_HOME - 1) ? bpf_map_lookup_elem(&udp_sockets, &cookie) : 0;
}

/* Whether a socket has a live slot of a part: it is used now. Global for the verifier's sake. */
__noinline int use_part(__u64 cookie, __u32 part)
{
	__u64 seen;
	struct slot *s = find_guest(cookie, part, &seen);

	if (!s || seen & SLOT_RELEASED)
		return 0;
	touch_slot(s, seen, bpf_ktime_get_coarse_ns());
	return 1;
}

/* Global for the verifier's sake, as the others are. */
__noinline int is_live(__u64 cookie, __u32 part)
{
	__u64 seen;
	struct slot *s = find_guest(cookie, part, &seen);

	return s && !(seen & SLOT_RELEASED);
}

/*
 * Remove a socket's slot of a part, a live one too if live, else it is left alone. 0 if
 * somebody else is at it.
 */
__noinline int try_clear_part(__u64 cookie, __u32 part, int live)
{
	__u64 seen;
	struct slot *s = find_guest(cookie, part, &seen);

	if (!s || (!live && !(seen & SLOT_RELEASED)))
		return 1;
	return replace_slot(s, seen, cookie, part);
}

__noinline int try_clear_part_eight(__u64 cookie, __u32 part, int live)
{
	unrolled for (int i = 0; i < EIGHT; i++)
		if (try_clear_part(cookie, part, live))
			return 1;
	return 0;
}

/* The same, until nobody else is at it. */
__noinline int clear_part(__u64 cookie, __u32 part, int live)
{
	unrolled for (int i = 0; i < EIGHT; i++)
		if (try_clear_part_eight(cookie, part, live))
			return 1;
	count(TOTAL_UNCOUNTED);
	return 0;
}

/* What a connect() of a socket takes, or 0: what its last one took ends. */
__noinline int reconnect(__u64 cookie, __u32 part)
{
	struct udp_socket *u = find_udp(cookie);
	__u32 was;

	if (!u)
		return 0;
	was = u->connected;
	u->connected = part; /* hooks hold the socket's lock */
	return was && was != part ? clear_part(cookie, was, 1) : 0;
}

/*
 * Put a part in the place of one whose slot has ended. The agent may be about to put a slot
 * of the old one: it puts and then looks whether it is listed, and here we take its place
 * and then look whether it is live, so that one of the two notices.
 */
__noinline int take_over(__u64 cookie, __u32 part, __u32 old)
{
	struct udp_socket *u = find_udp(cookie);
	int took = 0;

	if (!u || !old || is_live(cookie, old))
		return 0;
	for_parts(i) {
		if (__sync_val_compare_and_swap(&u->parts[i], old, part) == old) {
			took = 1;
			break;
		}
	}
	if (!took)
		return 0;
	if (!is_live(cookie, old)) {
		try_clear_part(cookie, old, 0);
		return 1;
	}
	for_parts(i)
		if (__sync_val_compare_and_swap(&u->parts[i], part, old) == part)
			break;
	return 0;
}

/* Note that a socket may have a slot of a part. 0 if there is no room. */
__noinline int list_part(__u64 cookie, __u32 part)
{
	struct udp_socket fresh = {.parts = {part}}, *u = find_udp(cookie);

	if (!u) {
		long err;

		note_entry(cookie, AS_GUEST);
		err = bpf_map_update_elem(&udp_sockets, &cookie, &fresh, BPF_NOEXIST);
		if (!err)
			return 1;
		note_entry(cookie, -AS_GUEST);
		u = find_udp(cookie);
		if (!u)
			return 0;
	}
	for_parts(i)
		if (*(volatile __u32 *)&u->parts[i] == part)
			return 1;
	for_parts(i) {
		__u32 was = __sync_val_compare_and_swap(&u->parts[i], 0, part);

		if (!was || was == part)
			return 1;
	}
	for_parts(i)
		if (take_over(cookie, part, *(volatile __u32 *)&u->parts[i]))
			return 1;
	return 0;
}

/* The last close: everything ends. Global for the verifier's sake. */
__noinline int release_udp(__u64 cookie)
{
	struct udp_socket *u = find_udp(cookie);

	if (!u)
		return 0;
	for_parts(i) {
		__u32 part = *(volatile __u32 *)&u->parts[i];

		if (part)
			clear_part(cookie, part, 1);
	}
	if (!bpf_map_delete_elem(&udp_sockets, &cookie))
		note_entry(cookie, -AS_GUEST);
	return 0;
}

#endif
