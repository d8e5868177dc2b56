// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * The hooks. Plain UAPI headers and no CO-RE: this loads without kernel BTF.
 * One set of programs is attached once, at the cgroup root that the agent was
 * given; who connects is decided from the current task at connect().
 */
#include "dest.h"
#include "udp.h"
#include <linux/in.h>
#include <bpf/bpf_endian.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define ALLOW 1
#define DENY 0

#define ETH_P_IPV6 0x86dd
#define TCP_HEADER 20
#define UDP_HEADER 8
#define TCP_TIMESTAMPS 12 /* bytes of options, padded */
#define SYN_OPTIONS 20	  /* MSS, SACK permitted and timestamps, window scale */
#define SYNACK_OPTIONS 8  /* what a SYN-ACK with timestamps has beyond them */


/*
 * Make the system call fail with err. From 7.x the verifier wants to know that what
 * bpf_set_retval gets is 0 or a negative errno, as 64 bits: it follows the mask and the
 * subtraction, not a negation of 32 bits.
 */
static __always_inline void fail_with(int err)
{
	static long (*const set_retval)(long) = (void *)BPF_FUNC_set_retval;
	__s64 positive = err, negative = 0;

	asm volatile("%0 &= 4095" : "+r"(positive));
	asm volatile("%0 -= %1" : "+r"(negative) : "r"(positive));
	set_retval(negative);
}

/*
 * Admit one connection, or a UDP socket's first datagram, to route at of generation idx:
 * 0, with its slot taken, or the errno to fail with. A TCP socket's earlier slot must be
 * cleared before.
 */
static __always_inline int admit(__u32 idx, __u32 at, const struct ask *q)
{
	int blocked = take_route(idx, at);
	struct route *r = route_at(idx, at);
	long err;

	if (!r)
		return 0;
	if (blocked) {
		int no = refuse(idx, at, q, blocked);

		if (!(r->flags & ROUTE_OBSERVE))
			return no;
		take_route_anyway(idx, at);
	}
	if (q->part && (!list_part(q->cookie, q->part) || !clear_part(q->cookie, q->part, 0)))
		return no_room(idx, at, r, q);
	err = put_slot(r, q);
	if (err && err != -EEXIST)
		return no_room(idx, at, r, q);
	if (err) {
		give_route(idx, at);
		/* The agent has adopted it just now, and its slot counts. */
		if (!q->part)
			count(TOTAL_UNCOUNTED);
		return 0;
	}
	count_connection(r->traffic);
	return 0;
}

/*
 * connect() and unconnected sends, one way for every family. Destination first:
 * most connects on a node match nothing and must cost next to nothing.
 */
static __always_inline int judge(struct bpf_sock_addr *ctx, struct dest_key *key, int ipv4, int connects)
{
	struct ask q = {};
	__u32 zero = 0, idx, provider = PROVIDER_OTHER;
	struct control_word *c = bpf_map_lookup_elem(&control, &zero);
	struct gen *g;
	struct who who;
	__u64 word;
	int err;

	if (!c)
		return ALLOW;
	word = *(volatile __u64 *)&c->word;
	idx = word & 1;
	g = bpf_map_lookup_elem(&gens, &idx);
	if (!g)
		return ALLOW;

	q.proto = ctx->protocol;
	if (q.proto != IPPROTO_TCP && q.proto != IPPROTO_UDP)
		return ALLOW;
	if (q.proto == IPPROTO_UDP && !g->udp) {
		/* What a plan before this one has counted ends all the same. */
		if (connects)
			reconnect(bpf_get_socket_cookie(ctx), 0);
		return ALLOW;
	}
	q.port = bpf_ntohs((__u16)ctx->user_port);
	if (near(g, key->addr, ipv4))
		provider = provider_of(idx, key, q.proto, q.port);
	who = who_connects(idx, g, word >> 1);
	q.cookie = bpf_get_socket_cookie(ctx);
	if (q.proto == IPPROTO_UDP) {
		struct route *r = 0;

		if (have_retval && bpf_get_retval() < 0) {
			/* Denied before us: a socket's old association stays as it is. */
			count(TOTAL_REFUSED_EARLIER);
			return ALLOW;
		}
		/* Nothing without a protocol of its own means UDP: a name lookup connects it too. */
		if (provider != PROVIDER_OTHER)
			r = route_at(idx, route_of(g, who.compartment, provider));
		if (!r) {
			/* A datagram to nobody of ours leaves an association alone. */
			if (connects)
				reconnect(q.cookie, 0);
			return ALLOW;
		}
		q.part = r->part;
		if (use_part(q.cookie, q.part)) {
			if (connects)
				reconnect(q.cookie, q.part);
			return ALLOW;
		}
	} else {
		/* A TCP connect runs the hook only if the socket's old connection is over. */
		__u64 seen;

		if (find_slot(q.cookie, &seen) && !clear_slot(q.cookie))
			return ALLOW;
		if (who.compartment == COMPARTMENT_PROTECTED)
			return ALLOW;
		if (provider == PROVIDER_OTHER && who.other != NO_INDEX) {
			count_connection(who.other);
			return ALLOW;
		}
	}

	if (have_retval && bpf_get_retval() < 0) {
		/* A program before ours has denied it: there will be no connection. */
		count(TOTAL_REFUSED_EARLIER);
		return ALLOW;
	}
	__builtin_memcpy(q.addr, key->addr, 16);
	q.netns = bpf_get_netns_cookie(ctx);
	q.generation = g->generation;
	q.header = (ipv4 ? 20 : 40) + TCP_HEADER;
	err = admit(idx, route_of(g, who.compartment, provider), &q);
	if (!err) {
		/* If it is refused, the kernel leaves a UDP socket's old association as it is. */
		if (q.proto == IPPROTO_UDP && connects)
			reconnect(q.cookie, q.part);
		return ALLOW;
	}
	if (have_retval)
		fail_with(err);
	return DENY;
}

static __always_inline int judge4(struct bpf_sock_addr *ctx, int connects)
{
	struct dest_key key = {.prefixlen = 128};
	__u32 a = ctx->user_ip4;

	key.addr[10] = key.addr[11] = 0xff;
	__builtin_memcpy(key.addr + 12, &a, 4);
	return judge(ctx, &key, 1, connects);
}

static __always_inline int judge6(struct bpf_sock_addr *ctx, int connects)
{
	struct dest_key key = {.prefixlen = 128};
	__u32 a[4] = {ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3]};

	/* IPv4-mapped if 0, told without a branch for near(). */
	__u64 differs = a[0] | a[1] | (a[2] ^ bpf_htonl(0xffff));

	__builtin_memcpy(key.addr, a, 16);
	return judge(ctx, &key, (differs - 1) >> 63, connects);
}

SEC("cgroup/connect4")
int bh_connect4(struct bpf_sock_addr *ctx)
{
	return judge4(ctx, 1);
}

SEC("cgroup/connect6")
int bh_connect6(struct bpf_sock_addr *ctx)
{
	return judge6(ctx, 1);
}

SEC("cgroup/sendmsg4")
int bh_sendmsg4(struct bpf_sock_addr *ctx)
{
	return judge4(ctx, 0);
}

SEC("cgroup/sendmsg6")
int bh_sendmsg6(struct bpf_sock_addr *ctx)
{
	return judge6(ctx, 0);
}

/*
 * The bytes of a connection that closes, from what TCP has counted anyway: no
 * cost per packet. Its counters are of payload and segments, corrected for
 * segmentation offload, so headers are added here. What was measured against a
 * count of packets, and what it misses, is in docs/decisions/bytes-at-close.md.
 */
static __always_inline void count_bytes(struct bpf_sock_ops *ctx, struct slot *s, __u64 seen)
{
	struct traffic_count *t = bpf_map_lookup_elem(&traffic, &s->traffic);
	/*
	 * 64 bits each: a smaller one that clang puts on the stack where a pointer was is
	 * refused without CAP_PERFMON.
	 */
	__u64 old = ctx->args[0], ts = s->flags & SLOT_TIMESTAMPS, header = s->header, tx, rx;

	if (!t)
		return;
	asm volatile("" : "+r"(old), "+r"(ts));
	if (!ctx->bytes_acked) { /* not even the SYN: it was never established */
		tx = (header + SYN_OPTIONS) * ctx->segs_out;
		rx = header * ctx->segs_in;
	} else {
		/* The SYN counts as one byte of bytes_acked. */
		__u64 sent = ctx->bytes_acked - 1 + (__u32)(ctx->snd_nxt - ctx->snd_una);
		int fin = old == BPF_TCP_FIN_WAIT2 || old == BPF_TCP_LAST_ACK || old == BPF_TCP_CLOSING;

		tx = header * ctx->segs_out + sent + s->tally + (ts ? SYN_OPTIONS - TCP_TIMESTAMPS : SYN_OPTIONS);
		rx = header * ctx->segs_in + ctx->bytes_received + (ts ? SYNACK_OPTIONS : SYNACK_OPTIONS + 4);
		if (fin)
			tx -= 1; /* so does the FIN */
		if (old == BPF_TCP_FIN_WAIT2 && ctx->segs_out == s->fin_segs) {
			/* The peer's FIN and the answer to it pass by a stand-in of the socket. */
			tx += header;
			rx += header;
		} else if (fin) {
			rx -= 1;
		} else if (seen & SLOT_RELEASED && (old == BPF_TCP_ESTABLISHED || old == BPF_TCP_CLOSE_WAIT)) {
			/* The last close resets: with SO_LINGER 0, or data that was not read. */
			tx += header;
		}
	}
	__sync_fetch_and_add(&t->tx_bytes, tx);
	__sync_fetch_and_add(&t->rx_bytes, rx);
}

/* A socket of ours was told that its peer has answered. */
static __always_inline void established(struct bpf_sock_ops *ctx, struct slot *s)
{
	/* Search the SYN-ACK for the timestamps option (kind 8, RFC 7323). */
	__u8 option[12] = {8};

	if (bpf_load_hdr_opt(ctx, option, sizeof(option), 0) > 0) {
		s->flags |= SLOT_TIMESTAMPS;
		s->header += TCP_TIMESTAMPS;
	}
	s->flags |= SLOT_ESTABLISHED;
}

#define OUR_CALLBACKS (BPF_SOCK_OPS_STATE_CB_FLAG | BPF_SOCK_OPS_RETRANS_CB_FLAG)

SEC("sockops")
int bh_sockops(struct bpf_sock_ops *ctx)
{
	__u64 cookie, seen;
	struct slot *s;
	__u32 flags;

	switch (ctx->op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
	case BPF_SOCK_OPS_RETRANS_CB:
		break;
	case BPF_SOCK_OPS_STATE_CB:
		if (ctx->args[1] == BPF_TCP_CLOSE || ctx->args[1] == BPF_TCP_FIN_WAIT2)
			break;
		return 1;
	default:
		return 1;
	}
	cookie = bpf_get_socket_cookie(ctx);
	s = find_slot(cookie, &seen);
	if (!s)
		return 1;

	if (ctx->op == BPF_SOCK_OPS_RETRANS_CB) {
		/* args: first sequence number, segments. The last one may be short. */
		__u32 most = ctx->args[1] * ctx->mss_cache, left = ctx->snd_nxt - ctx->args[0];

		if (s->flags & SLOT_ESTABLISHED)
			s->tally += left < most ? left : most;
		return 1;
	}
	if (ctx->op == BPF_SOCK_OPS_STATE_CB) {
		if (ctx->args[1] == BPF_TCP_FIN_WAIT2) {
			s->fin_segs = ctx->segs_out;
			return 1;
		}
		release_slot(s, seen);
		count_bytes(ctx, s, seen);
		delete_slot(s, seen, cookie, 0);
		return 1;
	}

	/*
	 * OR: another program's flags are its own. Again when established, since
	 * another program may have cleared ours in between.
	 */
	flags = ctx->bpf_sock_ops_cb_flags;
	if ((flags & OUR_CALLBACKS) != OUR_CALLBACKS)
		bpf_sock_ops_cb_flags_set(ctx, flags | OUR_CALLBACKS);
	if (ctx->op == BPF_SOCK_OPS_TCP_CONNECT_CB)
		s->flags |= SLOT_SENT;
	else
		established(ctx, s);
	return 1;
}

/*
 * The last close of the descriptor. It always releases: waiting for CLOSE would
 * hold a slot for minutes behind a dead peer. The entry of a connection that has
 * sent its SYN stays until CLOSE, for its bytes; nothing else comes for the others.
 */
SEC("cgroup/sock_release")
int bh_sock_release(struct bpf_sock *ctx)
{
	__u64 cookie = bpf_get_socket_cookie(ctx), seen;
	struct slot *s;

	if (ctx->protocol == IPPROTO_UDP) {
		release_udp(cookie);
		return 1;
	}
	s = find_slot(cookie, &seen);
	if (!s)
		return 1;
	release_slot(s, seen);
	if (!(s->flags & SLOT_SENT))
		delete_slot(s, seen, cookie, 0);
	return 1;
}

/*
 * The remote end of a UDP packet, which begins with its IP header. 0 if it cannot be read.
 */
static __always_inline int remote_of(struct __sk_buff *skb, int out, struct dest_key *key, __u16 *port)
{
	__u8 first;
	__u32 at;

	key->prefixlen = 128;
	if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		if (bpf_skb_load_bytes(skb, out ? 24 : 8, key->addr, 16) < 0)
			return 0;
		at = 40; /* Linux sends none, and receives few, of the headers that may come between */
	} else {
		__builtin_memset(key->addr, 0, 10);
		key->addr[10] = key->addr[11] = 0xff;
		if (bpf_skb_load_bytes(skb, 0, &first, 1) < 0 || bpf_skb_load_bytes(skb, out ? 16 : 12, key->addr + 12, 4) < 0)
			return 0;
		at = (first & 15) * 4;
	}
	if (bpf_skb_load_bytes(skb, at + (out ? 2 : 0), port, 2) < 0)
		return 0;
	*port = bpf_ntohs(*port);
	return 1;
}

/*
 * The part of slot_key that a remote end has by the generation in force, 0 if none. Its
 * halves, in network order, for the verifier's sake.
 */
__noinline int part_of(__u64 addr0, __u64 addr1, __u32 port)
{
	struct dest_key key = {.prefixlen = 128};
	__u32 zero = 0, idx, provider;
	struct control_word *c = bpf_map_lookup_elem(&control, &zero);
	struct route *r;

	if (!c)
		return 0;
	idx = *(volatile __u64 *)&c->word & 1;
	__builtin_memcpy(key.addr, &addr0, 8);
	__builtin_memcpy(key.addr + 8, &addr1, 8);
	provider = provider_of(idx, &key, IPPROTO_UDP, port);
	if (provider == PROVIDER_OTHER)
		return 0;
	r = route_at(idx, provider); /* of compartment 0: a part is the same in all */
	return r ? r->part : 0;
}

/* The number of the generation in force. */
static __always_inline __u32 generation(void)
{
	__u32 zero = 0, idx;
	struct control_word *c = bpf_map_lookup_elem(&control, &zero);
	struct gen *g;

	if (!c)
		return 0;
	idx = *(volatile __u64 *)&c->word & 1;
	g = bpf_map_lookup_elem(&gens, &idx);
	return g ? g->generation : 0;
}

/*
 * UDP has no counters of its own, so its bytes are counted by packet; attached
 * only while the plan names UDP. A packet that is to be cut into segments later
 * gets its IP and UDP headers once for each.
 */
static __always_inline int count_udp(struct __sk_buff *skb, int out)
{
	__u64 cookie, seen, bytes, half[2], told[2];
	struct bpf_sock *sk = skb->sk;
	struct traffic_count *t;
	struct udp_socket *u;
	struct dest_key key;
	__u16 port;
	struct slot *s;
	__u32 at;

	if (!sk)
		return 1;
	sk = bpf_sk_fullsock(sk);
	if (!sk || sk->protocol != IPPROTO_UDP)
		return 1;
	cookie = bpf_get_socket_cookie(skb);
	u = find_udp(cookie);
	if (!u || !remote_of(skb, out, &key, &port))
		return 1;
	__builtin_memcpy(half, key.addr, 16);

	/* Most sockets speak to one address; whose it is, a generation says. */
	at = u->connected;
	if (!at)
		at = u->parts[0];
	s = find_guest(cookie, at, &seen);
	if (s)
		__builtin_memcpy(told, s->addr, 16);
	if (!s || s->port != port || told[0] != half[0] || told[1] != half[1] || s->generation != generation()) {
		at = part_of(half[0], half[1], port);
		if (!at)
			return 1;
		s = find_guest(cookie, at, &seen);
	}
	if (!s || seen & SLOT_RELEASED)
		return 1;
	at = s->traffic;
	/* The coarse clock is not for programs of this type. */
	touch_slot(s, seen, bpf_ktime_get_ns());
	t = bpf_map_lookup_elem(&traffic, &at);
	if (!t)
		return 1;
	bytes = skb->len;
	if (skb->gso_segs > 1)
		bytes += (__u64)(skb->gso_segs - 1) * ((skb->protocol == bpf_htons(ETH_P_IPV6) ? 40 : 20) + UDP_HEADER);
	__sync_fetch_and_add(out ? &t->tx_bytes : &t->rx_bytes, bytes);
	return 1;
}

SEC("cgroup_skb/egress")
int bh_egress(struct __sk_buff *skb)
{
	return count_udp(skb, 1);
}

SEC("cgroup_skb/ingress")
int bh_ingress(struct __sk_buff *skb)
{
	return count_udp(skb, 0);
}

/* The entry of an admission: of TCP, at home or a guest. */
static __always_inline struct slot *find_admission(const struct retire *a, __u64 *seen)
{
	struct slot *h = home_of(a->cookie);

	if (!a->part && h && is_home(h, a->cookie, seen) && !((*seen ^ a->word) & ~(__u64)SLOT_RELEASED))
		return h;
	return find_guest(a->cookie, a->part, seen);
}

/*
 * Retire a slot whose socket is proven gone, or, of UDP, that was idle for too long: by
 * the word, and leaving a tombstone.
 */
SEC("syscall")
int bh_retire(struct retire *a)
{
	__u64 seen;
	struct slot *s = find_admission(a, &seen);

	a->done = s && (!a->part || s->tally == a->tally) ? release_slot(s, a->word) : 0;
	return 0;
}

/*
 * Delete a tombstone whose socket is proven gone. It is claimed first, as a hook does: the
 * descriptor may still be open and connect at this very moment.
 */
SEC("syscall")
int bh_bury(struct retire *a)
{
	__u64 seen;
	struct slot *s = find_admission(a, &seen);

	a->done = s && a->word & SLOT_RELEASED ? replace_slot(s, a->word, a->cookie, a->part) : 0;
	return 0;
}

/*
 * Give what began before the attach, before the policy named its destination, or under
 * another release, its slot. It is there already, so it takes its places whatever the
 * limits, and is not counted as accepted.
 */
SEC("syscall")
int bh_adopt(struct adopt *a)
{
	__u64 cookie = a->slot.cookie, word = new_word(cookie) | (a->slot.word & SLOT_RELEASED), seen;
	__u32 part = a->slot.part, n = word & SLOT_RELEASED ? 0 : a->slot.n;
	struct slot s = a->slot, *h = 0;
	long err = 0;

	a->done = 0;
	s.word = word;
	s.flags &= ~SLOT_HOME;
	if (part ? find_guest(cookie, part, &seen) != 0 : find_slot(cookie, &seen) != 0)
		return 0;
	if (part && !list_part(cookie, part)) {
		count(TOTAL_SLOTS_FULL);
		return 0;
	}
	for_holds(i, n)
		take_anyway(s.bulkheads[i], 0);
	if (!part)
		h = claim_home(cookie, word & ~(__u64)SLOT_RELEASED);
	if (h) {
		s.word = h->word;
		s.flags |= SLOT_HOME;
		*h = s;
		moved_in(h, word);
	} else {
		err = put_guest(&s);
	}
	/* The socket's own hook may have put another part in the place of this one; see take_over. */
	if (!err && part && !list_part(cookie, part)) {
		clear_part(cookie, part, 1);
		return 0;
	}
	if (err) {
		for_holds(i, n)
			give_place(s.bulkheads[i], 0);
		if (err != -EEXIST)
			count(TOTAL_SLOTS_FULL);
		return 0;
	}
	if (part && a->connected) {
		/* Unless it has connected elsewhere by now, under its lock. */
		struct udp_socket *u = find_udp(cookie);

		if (u)
			__sync_val_compare_and_swap(&u->connected, a->was, part);
	}
	a->slot.word = word;
	a->done = 1;
	return 0;
}
