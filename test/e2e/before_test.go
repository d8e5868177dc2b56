package e2e

import (
	"syscall"
	"testing"
)

// Connections from before the first start: plan says what they mean for a limit, the
// agent counts them, newcomers are refused while they are too many, and their end is
// noticed.
func TestFromBefore(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	cg := n.Mkdir("apps/batch")
	old := n.place(cg)
	var open []int
	for range 4 {
		open = append(open, old.MustDial("tcp4", n.addr(1)))
	}
	n.write(`
apiVersion: bulkhead/v1
kind: Policy
mode: enforce
providers:
  deepseek: {cidrs: [@1/32], ports: [8000], limits: {connections: 20}}
features:
  batch: {class: batch, match: [{cgroup: /apps/batch}], providers: {deepseek: {connections: 3, errno: EAGAIN}}}
`)
	r := n.run("plan", n.policy)
	wantResult(t, r, 2)
	wantWords(t, r.stdout, "feature_provider batch/deepseek", "4 in use now: new connections are refused until below 3, nobody is cut", "provider deepseek: 20 (4 in use now)")
	n.wantDetached()

	n.start()
	n.logged("counted connections from before", `"connections":4`)
	n.wantCounts(map[string]counts{"feature_provider batch/deepseek": {3, 4, 4, 0, 0}, "provider deepseek": {20, 4, 4, 0, 0}})
	for _, c := range n.conns() {
		if c.Feature != "batch" || c.PID != old.PID || c.Command == "" {
			t.Errorf("%+v, want feature batch and pid %d", c, old.PID)
		}
	}
	wantDial(t, old, syscall.EAGAIN, n.addr(1))
	old.Close(open[:2]...)
	old.MustDial("tcp4", n.addr(1))
	wantDial(t, old, syscall.EAGAIN, n.addr(1))
	old.Kill()
	n.wantCounts(map[string]counts{"feature_provider batch/deepseek": {3, 0, 4, 1, 2}, "provider deepseek": {20, 0, 4, 1, 0}})
}
