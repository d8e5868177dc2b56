package conn

import (
	"context"
	"fmt"

	"github.com/cilium/ebpf"

	"bulkhead/internal/sockets"
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
// before its SYN while the descriptor stays open, or an MPTCP subflow.
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
	if len(wanted) == 0 {
		k.missing = map[uint64]uint64{}
		return out, k.Forget()
	}
	dumps := map[uint64]sockets.Dump{}
	for _, d := range sockets.ReadAll(ctx, wanted, protocols(slots)...) {
		dumps[d.Cookie] = d
		if _, asked := wanted[d.Cookie]; asked && !d.Complete {
			out.Errors = append(out.Errors, fmt.Errorf("network namespace %d: %w", d.Cookie, d.Err))
		}
	}
	missing := map[uint64]uint64{}
	for _, s := range slots {
		d, ok := dumps[s.Netns]
		if !ok || !d.Complete {
			// Keep what earlier dumps proved: this one says nothing.
			if w, was := k.missing[s.cookie]; was && w == s.Word {
				missing[s.cookie] = w
			}
			continue
		}
		if _, alive := d.Sockets[s.cookie]; alive {
			continue
		}
		if k.missing[s.cookie] != s.Word {
			missing[s.cookie] = s.Word
			continue
		}
		if s.released() {
			if err := k.bury(s.cookie, s.Word); err != nil {
				return out, err
			}
			continue
		}
		done, err := k.retire(s.cookie, s.Word)
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

// retire gives a slot back by the word that was seen, and leaves a tombstone: only a
// socket's own hooks delete its entry while it holds anything.
func (k *Kernel) retire(cookie, word uint64) (bool, error) {
	return k.settle(kernelProgBhRetire, cookie, word)
}

// bury deletes a tombstone whose socket two dumps lacked.
func (k *Kernel) bury(cookie, word uint64) error {
	_, err := k.settle(kernelProgBhBury, cookie, word)
	return err
}

// settle runs one of the programs that act on a slot by its word.
func (k *Kernel) settle(program string, cookie, word uint64) (bool, error) {
	in := kernelRetire{Cookie: cookie, Word: word}
	var out kernelRetire
	if _, err := k.coll.Programs[program].Run(&ebpf.RunOptions{Context: &in, ContextOut: &out}); err != nil {
		return false, fmt.Errorf("%s of socket %d: %w", program, cookie, err)
	}
	return out.Done != 0, nil
}
