package main

import (
	"fmt"
	"time"
)

// grownRow is what a real agent and its maps need at one size. Times are milliseconds,
// medians of a few, or of one where a snapshot takes long.
type grownRow struct {
	Name  string `json:"name"`
	What  string `json:"what"` // "slots", "routes" or "compartments"
	Count int    `json:"count"`

	// KernelBytes are those of all maps, SlotsBytes of the map of slots; BytesPerSlot is by
	// how much the latter grows with each, and its table of buckets shared among as many
	// as it is made for.
	KernelBytes  float64 `json:"kernel_bytes"`
	SlotsBytes   float64 `json:"slots_bytes"`
	BytesPerSlot float64 `json:"bytes_per_slot,omitempty"`
	// BytesPerUDP are those for each UDP socket, however many slots it has.
	BytesPerUDP float64 `json:"bytes_per_udp_socket,omitempty"`

	OverNone estimate `json:"connect_over_none_ns"`
	Fill     float64  `json:"fill_s"` // for the slots beyond those of the row before
	Snapshot float64  `json:"snapshot_ms"`
	Start    float64  `json:"start_ms"`
	Reload   float64  `json:"reload_ms"`
	Scrape   float64  `json:"scrape_ms"`
	// ScrapeBytes are of the answer, RSS of the agent.
	ScrapeBytes float64 `json:"scrape_bytes"`
	RSS         float64 `json:"rss_bytes"`
	// Parts of one CPU that the agent uses, left alone and scraped each second.
	IdleCPU    float64 `json:"idle_cpu"`
	ScrapedCPU float64 `json:"scraped_cpu"`
}

const whatSlots = "slots"

// growthSection measures an agent with more and more of one thing.
func (l *lab) growthSection(o options) (rows []grownRow, missing []string, err error) {
	defer l.end(len(l.stop))
	none := &configuration{name: rowNone}
	if err := l.start(none); err != nil {
		return nil, nil, err
	}
	if len(o.slots) > 0 {
		if rows, missing, err = l.growSlots(o, none); err != nil {
			return nil, nil, err
		}
	}
	for _, n := range o.routes {
		z, err := routed(n)
		if err != nil {
			return nil, nil, err
		}
		row, err := l.grown(o, none, grownRow{What: "routes", Count: n}, z)
		if err != nil {
			return nil, nil, err
		}
		rows = append(rows, row)
	}
	for _, n := range o.compartments {
		// One is the default feature's, one the worker's.
		row, err := l.grown(o, none, grownRow{What: "compartments", Count: n}, size{features: n - 2, flat: true})
		if err != nil {
			return nil, nil, err
		}
		rows = append(rows, row)
	}
	return rows, missing, nil
}

// grown measures an agent of its own with one policy.
func (l *lab) grown(o options, none *configuration, row grownRow, z size) (grownRow, error) {
	defer l.end(len(l.stop))
	row.Name = fmt.Sprintf("%d %s", row.Count, row.What)
	progress("growth: %s: start an agent", row.Name)
	n, took, err := l.startNode(fmt.Sprintf("%s-%d", row.What, row.Count), o.binary, z)
	if err != nil {
		return row, fmt.Errorf("%s: %w", row.Name, err)
	}
	row.Start = took
	ours := &configuration{name: row.Name}
	if ours.inner, err = n.leaf("worker"); err != nil {
		return row, err
	}
	if err := n.look(o, &row, z, none, ours); err != nil {
		return row, fmt.Errorf("%s: %w", row.Name, err)
	}
	return row, nil
}

// growSlots measures one agent while more and more slots are held.
func (l *lab) growSlots(o options, none *configuration) (rows []grownRow, missing []string, err error) {
	defer l.end(len(l.stop))
	progress("growth: slots: start an agent")
	z := size{held: true}
	n, took, err := l.startNode("slots", o.binary, z)
	if err != nil {
		return nil, nil, fmt.Errorf("slots: %w", err)
	}
	ours := &configuration{name: "slots"}
	if ours.inner, err = n.leaf("worker"); err != nil {
		return nil, nil, err
	}
	h := &holders{}
	if h.dir, err = n.leaf("holders"); err != nil {
		return nil, nil, err
	}
	l.stop = append(l.stop, h.end)
	_, s, err := n.snapshot()
	if err != nil {
		return nil, nil, err
	}
	room, held := s.Totals.SlotsMax, s.Totals.Slots
	empty, err := n.memory()
	if err != nil {
		return nil, nil, err
	}
	for _, count := range o.slots {
		row := grownRow{What: whatSlots, Name: fmt.Sprintf("%d slots", count), Count: count, Start: took}
		// The worker needs one, too.
		if uint64(count) > room {
			missing = append(missing, fmt.Sprintf("%s: left out: the map of this build has room for %d", row.Name, room))
			continue
		}
		begun := time.Now()
		if err := h.growTo(min(count, int(room)-16)); err != nil {
			return nil, nil, err
		}
		row.Fill = time.Since(begun).Seconds()
		if err := n.look(o, &row, z, none, ours); err != nil {
			return nil, nil, fmt.Errorf("%s: %w", row.Name, err)
		}
		_, s, err := n.snapshot()
		if err != nil {
			return nil, nil, err
		}
		now, err := n.memory()
		if err != nil {
			return nil, nil, err
		}
		if got := s.Totals.Slots - held; got != uint64(h.n) || s.Totals.SlotsFull > 0 {
			return nil, nil, fmt.Errorf("%s: %d are taken, and %d had no room", row.Name, got, s.Totals.SlotsFull)
		}
		row.BytesPerSlot = (row.SlotsBytes-slotsBytes(empty))/float64(h.n) + slotsBytes(empty)/float64(room)
		row.BytesPerUDP = (now["udp_sockets"]-empty["udp_sockets"])/float64(h.n) + empty["udp_sockets"]/float64(room)
		rows = append(rows, row)
	}
	return rows, missing, nil
}

// slotsBytes are those of all that slots are in: the hash, the homes, the filter.
func slotsBytes(maps map[string]float64) float64 {
	return maps["slots"] + maps["homes"] + maps["cookies"]
}

// look measures an agent as it is now.
func (n *node) look(o options, row *grownRow, z size, none, ours *configuration) error {
	l := n.l
	// Where memory alone is asked for, nothing that takes long.
	again, rounds := 5, 61
	if o.idle == 0 {
		again, rounds = 1, 1
	}
	maps, err := n.memory()
	if err != nil {
		return err
	}
	for _, bytes := range maps {
		row.KernelBytes += bytes
	}
	row.SlotsBytes = slotsBytes(maps)

	times := [2][]float64{}
	both := []*configuration{none, ours}
	err = l.rounds("growth: "+row.Name+": connect", rounds, both, func(round, i int) error {
		t, err := l.turn(both[i], "connect", o.connects)
		if err == nil && round >= 0 {
			times[i] = append(times[i], t[0]/float64(o.connects))
		}
		return err
	})
	if err != nil {
		return err
	}
	row.OverNone = estimated(differences(times[1], times[0]))

	var snapshots, reloads, scrapes []float64
	for i := range again {
		progress("growth: %s: snapshot, reload, scrape %d of %d", row.Name, i+1, again)
		t, _, err := n.snapshot()
		if err != nil {
			return err
		}
		snapshots = append(snapshots, t)
		// Another policy each time, and never the one that it began with.
		other := z
		other.prefixes = 1 + i%2
		if t, err = n.reload(other.text()); err != nil {
			return err
		}
		reloads = append(reloads, t)
		t, bytes, err := n.scrape()
		if err != nil {
			return err
		}
		scrapes = append(scrapes, t)
		row.ScrapeBytes = float64(bytes)
		if snapshots[i] > 5000 {
			break // what takes so long varies little
		}
	}
	row.Snapshot, row.Reload, row.Scrape = median(snapshots), median(reloads), median(scrapes)

	progress("growth: %s: the agent's CPU, left alone for %s", row.Name, o.idle)
	if row.IdleCPU, err = n.share(o.idle, func() error { return nil }); err != nil {
		return err
	}
	progress("growth: %s: the agent's CPU, scraped each second for %s", row.Name, o.scraped)
	row.ScrapedCPU, err = n.share(o.scraped, func() error {
		_, _, err := n.scrape()
		return err
	})
	if err != nil {
		return err
	}
	row.RSS, err = n.rss()
	return err
}
