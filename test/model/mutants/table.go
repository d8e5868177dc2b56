package main

// mutant is one way of giving back that is removed.
type mutant struct {
	name string
	file string // below bpf
	from string // must be there exactly once
	to   string
}

var mutants = []mutant{
	{"last close", "bulkhead.bpf.c",
		"	release_slot(s, seen);\n	if (!(s->flags & SLOT_SENT))\n		delete_slot(&cookie);\n",
		"	if (!(s->flags & SLOT_SENT))\n		delete_slot(&cookie);\n"},
	{"change to CLOSE", "bulkhead.bpf.c",
		"		release_slot(s, seen);\n		count_bytes(ctx, s, seen);\n",
		"		count_bytes(ctx, s, seen);\n"},
	{"connect again: what it held", "admit.h",
		"!swap_slot(s, seen, SLOT_RELEASED | SLOT_CLAIMED)",
		"__sync_val_compare_and_swap(&s->word, seen, seen | SLOT_RELEASED | SLOT_CLAIMED) != seen"},
	{"connect again: its entry", "bulkhead.bpf.c",
		"		if (clear_slot(q.cookie, same) != CLEARED)\n			return ALLOW;\n",
		"		if (q.proto == IPPROTO_UDP && clear_slot(q.cookie, same) != CLEARED)\n			return ALLOW;\n"},
	{"UDP used elsewhere", "bulkhead.bpf.c",
		"		if (clear_slot(q.cookie, same) != CLEARED)\n			return ALLOW;\n",
		"		if (q.proto == IPPROTO_TCP && clear_slot(q.cookie, same) != CLEARED)\n			return ALLOW;\n"},
	{"insert failed", "admit.h",
		"		note_cookie(q->cookie, -1);\n		give_route(idx, at);\n",
		"		note_cookie(q->cookie, -1);\n"},
	{"lost a race for a later place", "admit.h",
		"	for_holds(i, BLOCKED_BY(blocked))\n		give_place(r->holds[i].bulkhead, 1);\n	return blocked;\n",
		"	return blocked;\n"},
	{"reconciling", "bulkhead.bpf.c",
		"	a->done = s ? release_slot(s, a->word) : 0;\n",
		"	a->done = s ? 0 : 0;\n"},
	{"burying", "bulkhead.bpf.c",
		"	a->done = s && a->word & SLOT_RELEASED ? replace_slot(s, a->word, &cookie) : 0;\n",
		"	a->done = s ? 0 : 0;\n"},
	{"entry at CLOSE", "bulkhead.bpf.c",
		"		count_bytes(ctx, s, seen);\n		delete_slot(&cookie);\n",
		"		count_bytes(ctx, s, seen);\n"},
	{"entry at the last close", "bulkhead.bpf.c",
		"	if (!(s->flags & SLOT_SENT))\n		delete_slot(&cookie);\n",
		""},
}
