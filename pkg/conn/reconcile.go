package conn

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"

	"bulkhead/internal/sockets"
	"bulkhead/pkg/policy"
)

// Reconciled is what one comparison of slots with sockets did.
type Reconciled struct {
	// Reclaimed slots were given back: their socket was in neither of two complete
	// dumps of its network namespace.
	Reclaimed int
	// Errors are namespaces that could not be read; nothing of theirs was freed.
	Errors []error
}

// Reconcile compares slots with the sockets that exist. A slot is given back only
// when two complete dumps in a row, in two calls, lacked its socket, by the word that
// was seen before the first; it never writes a count. The kernel's own hooks free
// nearly every slot: this is for what gives no event, such as a connect that failed
// before its SYN while the descriptor stays open, or an MPTCP subflow. It does what
// Expire does, too, and sees which UDP sockets have been disconnected.
func (k *Kernel) Reconcile(ctx context.Context) (Reconciled, error) {
	var out Reconciled
	slots, err := readSlots(k.coll.Maps)
	if err != nil {
		return out, err
	}
	wanted := map[uint64]struct{}{}
	for _, s := range slots {
		wanted[s.Netns] = struct{}{}
	}
	dumps := map[uint64]sockets.Dump{}
	if len(wanted) > 0 {
		for _, d := range sockets.ReadAll(ctx, wanted, protocols(slots)...) {
			dumps[d.Cookie] = d
			if _, asked := wanted[d.Cookie]; asked && !d.Complete {
				out.Errors = append(out.Errors, fmt.Errorf("network namespace %d: %w", d.Cookie, d.Err))
			}
		}
	}
	nowhere := map[uint64]int{}
	for cookie, d := range dumps {
		if errors.Is(d.Err, sockets.ErrNowhere) {
			nowhere[cookie] = k.nowhere[cookie] + 1
		}
	}
	k.nowhere = nowhere
	now, idle := monotonic(), k.idleTimes()
	missing := map[slotKey]uint64{}
	for _, s := range slots {
		d, ok := dumps[s.Netns]
		if ok && k.gone(d) {
			d.Complete = true // and empty
		}
		if !ok || !d.Complete {
			// Keep what earlier dumps proved: this one says nothing.
			if w, was := k.missing[s.key()]; was && w == s.Word {
				missing[s.key()] = w
			}
			continue
		}
		// A socket that listens is not the connection that it failed to be before.
		if so, alive := d.Sockets[s.Cookie]; alive && so.State != sockets.Listen {
			// By where it is: a connect elsewhere that failed behind our hook leaves the
			// association as it was.
			connected := so.State == sockets.Established && k.partOf(so.Remote) == s.Part
			if s.Part == 0 || connected || s.released() || idle.left(&s, now) >= 0 {
				continue
			}
		} else if k.missing[s.key()] != s.Word {
			missing[s.key()] = s.Word
			continue
		} else if s.released() {
			if err := k.bury(&s); err != nil {
				return out, err
			}
			continue
		}
		done, err := k.retire(&s)
		if err != nil {
			return out, err
		}
		if done {
			out.Reclaimed++
		}
	}
	k.missing = missing
	return out, k.Forget()
}

// goneRounds are the rounds in a row, ten minutes by the agent's period, in which a network
// namespace must not be found before it counts as gone.
const goneRounds = 20

// gone says whether a network namespace is no more: again and again nothing led there,
// though every process, mount, thread and socket could be looked at. Only sockets that are
// on their way in a message of a Unix socket hide so.
func (k *Kernel) gone(d sockets.Dump) bool { return k.nowhere[d.Cookie] >= goneRounds }

// Expire gives back the slots of UDP sockets that have sent their provider nothing, and
// received nothing from it, for the time that the policy calls idle, and returns how many,
// and how long it is until there can be another under the plan in force. A socket that is
// connected to the provider keeps its slot. It reads all slots of UDP.
func (k *Kernel) Expire() (n int, next time.Duration, err error) {
	if k.tables == nil || k.tables.gen.Udp == 0 {
		return 0, policy.DefaultIdle, nil // Reconcile does it for what an earlier plan has left
	}
	udp, err := k.udpSockets()
	if err != nil {
		return 0, 0, err
	}
	var slots []slot
	if len(udp) > 0 {
		if slots, err = readGuests(k.coll.Maps); err != nil {
			return 0, 0, err
		}
	}
	now, idle := monotonic(), k.idleTimes()
	// What comes after this look has at least that long.
	next = policy.DefaultIdle
	for _, t := range idle {
		if t > 0 {
			next = min(next, t)
		}
	}
	for _, s := range slots {
		if s.Part == 0 || s.Part == udp[s.Cookie].Connected || s.released() {
			continue
		}
		if left := idle.left(&s, now); left >= 0 {
			next = min(next, left)
			continue
		}
		done, err := k.retire(&s)
		if err != nil {
			return n, 0, err
		}
		if done {
			n++
		}
	}
	return n, next, nil
}

// partOf is the number in slots of the provider of a UDP address.
func (k *Kernel) partOf(remote netip.AddrPort) uint32 {
	if k.plan == nil {
		return 0
	}
	p := k.plan.Lookup(remote.Addr(), remote.Port(), policy.UDP)
	return k.tables.routes[p].Part
}

// idleTimes are the idle times of routes, by the index of their counter.
type idleTimes map[uint32]time.Duration

func (k *Kernel) idleTimes() idleTimes {
	all := idleTimes{}
	if k.plan == nil {
		return all
	}
	for i, r := range k.plan.Routes {
		all[k.at.traffic[i]] = k.plan.Providers[r.Provider].Idle
	}
	return all
}

// left is how long a UDP slot may still be idle; below 0 it has been for too long. What
// has left the policy keeps the default.
func (t idleTimes) left(s *slot, now int64) time.Duration {
	idle := t[s.Traffic]
	if idle == 0 {
		idle = policy.DefaultIdle
	}
	return idle - time.Duration(now-int64(s.Tally))
}

// udpSockets reads what is noted of UDP sockets.
func (k *Kernel) udpSockets() (map[uint64]kernelUdpSocket, error) {
	all := map[uint64]kernelUdpSocket{}
	err := readHash(k.coll.Maps[kernelMapUdpSockets], func(cookie uint64, u *kernelUdpSocket) error {
		all[cookie] = *u
		return nil
	})
	return all, err
}

// retire gives a slot back by the word that was seen, and leaves a tombstone: only a
// socket's own hooks delete its entry while it holds anything.
func (k *Kernel) retire(s *slot) (bool, error) {
	return k.settle(kernelProgBhRetire, kernelRetire{Cookie: s.Cookie, Word: s.Word, Part: s.Part, Tally: s.Tally})
}

// bury deletes a tombstone whose socket two dumps lacked.
func (k *Kernel) bury(s *slot) error {
	_, err := k.settle(kernelProgBhBury, kernelRetire{Cookie: s.Cookie, Word: s.Word, Part: s.Part})
	return err
}

// settle runs one of the programs that act on a slot by its word.
func (k *Kernel) settle(program string, in kernelRetire) (bool, error) {
	var out kernelRetire
	if _, err := k.coll.Programs[program].Run(&ebpf.RunOptions{Context: &in, ContextOut: &out}); err != nil {
		return false, fmt.Errorf("%s of socket %d: %w", program, in.Cookie, err)
	}
	return out.Done != 0, nil
}
