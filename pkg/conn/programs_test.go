package conn

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"bulkhead/internal/kerneltest"
)

// attachment is what status sees.
func (in *instance) attachment(missing ...string) Attachment {
	in.Helper()
	a, err := ReadAttachment(in.o)
	if err != nil {
		in.Fatal(err)
	}
	if !slices.Equal(a.Missing, missing) {
		in.Errorf("missing %v, want %v", a.Missing, missing)
	}
	return a
}

// A hook that has lost its program is missing if the generation in force needs it, and
// only then: those of UDP too, while the policy names UDP.
func TestLostPrograms(t *testing.T) {
	in := newInstance(t)
	if _, err := ReadAttachment(in.o); !errors.Is(err, ErrNotLoaded) {
		t.Errorf("before the first apply: %v, want ErrNotLoaded", err)
	}
	in.apply(planOf(t, tcpPolicy))
	if a := in.attachment(); len(a.Programs) != 4 || len(a.Unread) != 0 {
		t.Errorf("without UDP: %+v, want four programs", a)
	}
	in.apply(planOf(t, udpPolicy))
	if a := in.attachment(); len(a.Programs) != 8 || len(a.Unread) != 0 {
		t.Errorf("with UDP: %+v, want eight programs", a)
	}

	// Somebody detaches a link, as `bpftool link detach` does. Its pin stays.
	for _, name := range []string{"link_sendmsg4", "link_ingress"} {
		l, err := link.LoadPinnedLink(filepath.Join(in.o.pins(), name), nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(l.Detach(), l.Close()); err != nil {
			t.Fatal(err)
		}
	}
	in.attachment("ingress", "sendmsg4")
	in.apply(planOf(t, tcpPolicy))
	in.attachment() // nothing needs them now
	in.apply(planOf(t, udpPolicy))
	in.attachment() // they are new

	// Somebody removes a pin, and with it the link.
	if err := in.k.links["link_connect6"].Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(in.o.pins(), "link_connect6")); err != nil {
		t.Fatal(err)
	}
	kerneltest.Poll(in, "the link goes with its pin", func() error { // the kernel detaches later
		if n := attached(in, in.Cgroup.Path)["link_connect6"]; n != 0 {
			return fmt.Errorf("%d programs", n)
		}
		return nil
	})
	in.attachment("connect6")

	// A program of somebody else is none of ours.
	denyAll(in, in.Cgroup.Path)
	a := in.attachment("connect6")
	others := slices.DeleteFunc(a.Programs, func(p Program) bool { return p.Ours })
	if len(others) != 1 || others[0].Hook != "connect4" {
		t.Errorf("programs of others: %+v, want one at connect4", others)
	}
}

// A hook whose pin cannot be read is neither missing nor passed over.
func TestUnreadPrograms(t *testing.T) {
	in := newInstance(t)
	in.apply(planOf(t, tcpPolicy))
	pin := filepath.Join(in.o.pins(), "link_connect4")
	if err := os.Rename(pin, pin+"_aside"); err != nil {
		t.Fatal(err)
	}
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.Pin(pin); err != nil {
		t.Fatal(err)
	}
	a := in.attachment()
	if len(a.Unread) != 1 || !strings.HasPrefix(a.Unread[0].Error(), "connect4: ") || len(a.Programs) != 3 {
		t.Errorf("got %+v, want three programs and an error of connect4", a)
	}
	if _, err := Programs(in.o); err == nil {
		t.Error("Programs says nothing")
	}
	if err := errors.Join(m.Unpin(), os.Rename(pin+"_aside", pin)); err != nil {
		t.Fatal(err)
	}
	if a := in.attachment(); len(a.Unread) != 0 || len(a.Programs) != 4 {
		t.Errorf("once it is back: %+v", a)
	}
}
