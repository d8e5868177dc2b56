package conn

import (
	"errors"
	"fmt"
	"net"
	"testing"

	"bulkhead/internal/kerneltest"
)

// Bytes of open and of closed connections, against the packets on the wire: within half
// a percent, with segmentation offload and without, and never less than before.
func TestBytes(t *testing.T) {
	const mega = 1 << 20
	type load struct {
		name string
		run  func(client, server *kerneltest.Client, c, s int)
	}
	bulk := func(from, to *kerneltest.Client, a, b int) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			to.Download(b, 20*mega)
		}()
		from.Upload(a, 20*mega)
		<-done
	}
	loads := []load{
		{"upload", func(client, server *kerneltest.Client, c, s int) { bulk(client, server, c, s) }},
		{"download", func(client, server *kerneltest.Client, c, s int) { bulk(server, client, s, c) }},
		{"requests", func(client, server *kerneltest.Client, c, s int) {
			for range 100 { // each a few milliseconds in an emulated machine
				client.Upload(c, 64)
				server.Download(s, 64)
				server.Upload(s, 64)
				client.Download(c, 64)
			}
		}},
	}
	in := newInstance(t)
	_, cg := in.enforce(`
providers:
  p: {cidrs: [10.77.0.0/24, "fd77::/64"]}
features:
  f: {class: batch}
`)
	for _, offload := range []bool{true, false} {
		wire := kerneltest.NewWire(t, offload)
		client, server := in.startIn(wire.Client, cg), in.startIn(wire.Server, in.Mkdir("server"))
		for _, kind := range []struct {
			kerneltest.Kind
			addr string
		}{{kerneltest.TCP4, kerneltest.WireServer4 + ":0"}, {kerneltest.TCP6, "[" + kerneltest.WireServer6 + "]:0"}} {
			l := server.Socket(kind.Kind)
			server.Bind(l, kind.addr)
			addr := server.Listen(l)
			for _, load := range loads {
				for _, end := range []string{"close", "reset", "the server closes first"} {
					if load.name != "requests" && end != "close" {
						continue
					}
					t.Run(fmt.Sprintf("%s/offload=%v/%s/%s", kind.Kind, offload, load.name, end), func(t *testing.T) {
						in := &instance{T: t, Env: in.With(t), o: in.o, k: in.k}
						wire.Count.Tx, wire.Count.Rx = 0, 0
						before := in.traffic("f", "", "p")
						c := client.MustDial(kind.Kind, addr)
						s := server.Accept(l)
						load.run(client, server, c, s)
						last := in.agrees(wire, before, before, "open")
						switch end {
						case "close":
							client.Close(c)
							server.Close(s)
						case "reset":
							client.Reset(c)
							server.Close(s)
						default:
							server.Close(s)
							client.Close(c)
						}
						in.empty("after the close")
						in.agrees(wire, before, last, "closed")
					})
				}
			}
		}
		client.Kill()
		server.Kill()
	}
}

// agrees waits until the wire is idle and compares what was counted since before with
// what passed on it.
func (in *instance) agrees(wire *kerneltest.Wire, before, last Traffic, when string) (now Traffic) {
	in.Helper()
	kerneltest.Poll(in, when, func() error {
		if err := wire.Count.Idle(); err != nil {
			return err
		}
		now = in.traffic("f", "", "p")
		if now.TxBytes < last.TxBytes || now.RxBytes < last.RxBytes {
			in.Fatalf("%s: %+v, less than %+v", when, now, last)
		}
		last = now
		tx, rx := now.TxBytes-before.TxBytes, now.RxBytes-before.RxBytes
		for _, d := range []float64{kerneltest.Percent(tx, wire.Count.Tx), kerneltest.Percent(rx, wire.Count.Rx)} {
			if d < -0.5 || d > 0.5 {
				return fmt.Errorf("%d and %d bytes on the wire, %d and %d counted: more than 0.5 %% apart", wire.Count.Tx, wire.Count.Rx, tx, rx)
			}
		}
		return nil
	})
	in.Logf("%s: %d out (%+.4f %%), %d in (%+.4f %%)", when, wire.Count.Tx, kerneltest.Percent(now.TxBytes-before.TxBytes, wire.Count.Tx),
		wire.Count.Rx, kerneltest.Percent(now.RxBytes-before.RxBytes, wire.Count.Rx))
	return now
}

// However a connection ends, what was counted of it while it was open is still counted
// when it is closed: a counter that falls by one byte is a restart to whoever reads it.
func TestBytesNeverFall(t *testing.T) {
	runAll(t, test{"closed in SYN_SENT", func(in *instance) {
		client, _ := two(in)
		blackHole(in, "127.1.0.9")
		fd := client.Socket(kerneltest.TCP4)
		client.NonBlocking(fd)
		client.Connect(fd, "127.1.0.9:81")
		neverFalls(in, func() { client.Close(fd) })
	}}, test{"reset without data", func(in *instance) {
		client, _ := two(in)
		fd := client.MustDial(kerneltest.TCP4, "127.1.0.1:80")
		neverFalls(in, func() { client.Reset(fd) })
	}}, test{"reset by the server", func(in *instance) {
		client, servers := two(in)
		fd := client.MustDial(kerneltest.TCP4, "127.1.0.1:80")
		client.Upload(fd, 1000)
		kerneltest.Poll(in, "the server has it", func() error {
			if servers["p"].Open() == 0 {
				return errors.New("not accepted")
			}
			return nil
		})
		neverFalls(in, func() { servers["p"].Hangup(true) })
	}}, test{"reset with data that was never read", func(in *instance) {
		client, _ := two(in)
		release := make(chan struct{})
		server := kerneltest.Serve(in, "127.1.0.2:80", func(net.Conn) { <-release })
		defer close(release)
		fd := client.MustDial(kerneltest.TCP4, server.Addr)
		client.NonBlocking(fd)
		for client.SendTo(fd, "", 64<<10) == 0 {
		}
		neverFalls(in, func() { client.Reset(fd) })
	}}, test{"AF_UNSPEC", func(in *instance) {
		client, _ := two(in)
		fd := client.MustDial(kerneltest.TCP4, "127.1.0.1:80")
		client.Upload(fd, 1000)
		neverFalls(in, func() { client.Disconnect(fd) })
	}})
}

func neverFalls(in *instance, end func()) {
	in.Helper()
	var open Traffic
	kerneltest.Poll(in, "what is in flight has arrived", func() error {
		last := open
		if open = in.traffic("f", "", "p"); open != last || open.TxBytes == 0 {
			return fmt.Errorf("was %+v, is %+v", last, open)
		}
		return nil
	})
	end()
	in.empty("after the end")
	if closed := in.traffic("f", "", "p"); closed.TxBytes < open.TxBytes || closed.RxBytes < open.RxBytes {
		in.Errorf("%d and %d bytes while open, %d and %d once closed", open.TxBytes, open.RxBytes, closed.TxBytes, closed.RxBytes)
	}
}
