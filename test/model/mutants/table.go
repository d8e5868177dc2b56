package main

// mutant is one way of giving back that is removed.
type mutant struct {
	name string
	file string // below bpf
	from string // must be there exactly once
	to   string
}

// What is not here cannot come up in the model test: what a socket with more than
// UDP_PROVIDERS providers leaves, what bh_adopt gives back when it finds no room, and what
// bh_bury removes that is no slot. Entries that hold nothing any more are not here either:
// burying removes what a hook leaves. And two sends through one socket are never in the
// hook at the same time, so that admit does not find another's slot when it puts its own:
// the kernel holds the socket's lock meanwhile (BPF_CGROUP_RUN_SA_PROG_LOCK).
var mutants = []mutant{
	{"the last close, TCP", "bulkhead.bpf.c",
		"	release_slot(s, seen);\n	if (!(s->flags & SLOT_SENT))\n",
		"	if (!(s->flags & SLOT_SENT))\n"},
	{"the last close, UDP", "udp.h",
		"		if (part)\n			clear_part(cookie, part, 1);\n",
		"		if (part)\n			continue;\n"},
	{"the change to CLOSE", "bulkhead.bpf.c",
		"		release_slot(s, seen);\n		count_bytes(ctx, s, seen);\n",
		"		count_bytes(ctx, s, seen);\n"},
	{"TCP connects again", "bulkhead.bpf.c",
		"		if (find_slot(q.cookie, &seen) && !clear_slot(q.cookie))\n			return ALLOW;\n",
		"		if (find_slot(q.cookie, &seen) && 0)\n			return ALLOW;\n"},
	{"what is replaced at home", "admit.h",
		"		if (!swap_slot(s, seen, 0))\n",
		"		if (__sync_val_compare_and_swap(&s->word, seen, 0) != seen)\n"},
	{"what is replaced in the hash", "admit.h",
		"!swap_slot(s, seen, seen | SLOT_RELEASED | SLOT_CLAIMED)",
		"__sync_val_compare_and_swap(&s->word, seen, seen | SLOT_RELEASED | SLOT_CLAIMED) != seen"},
	{"UDP connects elsewhere", "udp.h",
		"	return was && was != part ? clear_part(cookie, was, 1) : 0;\n",
		"	return was && was != part ? 1 : 0;\n"},
	{"UDP connects to nobody", "bulkhead.bpf.c",
		"			if (connects)\n				reconnect(q.cookie, 0);\n",
		""},
	{"UDP connects where it has sent", "bulkhead.bpf.c",
		"			if (connects)\n				reconnect(q.cookie, q.part);\n			return ALLOW;\n",
		"			return ALLOW;\n"},
	{"no room for the slot", "admit.h",
		"	give_route(idx, at);\n	count(TOTAL_SLOTS_FULL);\n",
		"	count(TOTAL_SLOTS_FULL);\n"},
	{"a race lost for a later place", "admit.h",
		"	for_holds(i, BLOCKED_BY(blocked))\n		give_place(r->holds[i].bulkhead, 1);\n	return blocked;\n",
		"	return blocked;\n"},
	{"reconciling", "bulkhead.bpf.c",
		"s->tally == a->tally) ? release_slot(s, a->word) : 0;\n",
		"s->tally == a->tally) ? 0 : 0;\n"},
	{"burying", "bulkhead.bpf.c",
		"	a->done = s && a->word & SLOT_RELEASED ? replace_slot(s, a->word, a->cookie, a->part) : 0;\n",
		"	a->done = s ? 0 : 0;\n"},
}
