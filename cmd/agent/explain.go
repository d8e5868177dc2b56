package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"bulkhead/pkg/cgroup"
	"bulkhead/pkg/conn"
	"bulkhead/pkg/policy"
)

func (a *app) explainCommand() *cobra.Command {
	var from, to string
	proto := &format{value: "tcp", choices: []string{"tcp", "udp"}}
	cmd := &cobra.Command{
		Use:   "explain [--from PID|UNIT|CGROUP|CONTAINER] [--to HOST:PORT]",
		Short: "say which limits apply to whom, and why",
		Long: `Says which compartment a process, unit or cgroup is in and which cgroup decides
it, which provider an address is, which bulkheads a connection between them must
hold, and whether one would be let through now. Shows the last refusals on that
route. Without --from it is about this shell; without --to, about every
provider. Works while the agent is down. Needs root.

A host name is resolved here and now; the workload may get other addresses.`,
		Example: `  bulkhead explain --from 4711 --to 10.20.0.5:8000
  bulkhead explain --from chat.service --to api.example.com:443
  bulkhead explain --from /system.slice/chat.service`,
		Args: noArgs,
	}
	cmd.Flags().StringVar(&from, "from", "", "`WHO`: a process id, a unit's name, a cgroup's path, or a container's id, or its name if the policy matches it")
	cmd.Flags().StringVar(&to, "to", "", "`HOST:PORT` of a destination")
	cmd.Flags().Var(proto, "proto", "protocol of the destination")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		var host string
		var port uint16
		if to != "" {
			var err error
			if host, port, err = destination(to); err != nil {
				return wrongUse("--to %q: %w", to, err)
			}
		}
		tree, where, err := a.instance()
		if err != nil {
			return err
		}
		snap, err := snapshot(cmd.Context(), where)
		if err != nil {
			return err
		}
		e := &explainer{ctx: cmd.Context(), app: a, tree: tree, snap: snap}
		comp, counted, err := e.from(from)
		if err != nil {
			return err
		}
		if !counted {
			return nil
		}
		p := policy.TCP
		if proto.value == "udp" {
			p = policy.UDP
		}
		return e.to(cmd.Context(), comp, host, port, p)
	}
	return cmd
}

// destination splits HOST:PORT.
func destination(to string) (host string, port uint16, err error) {
	host, p, err := net.SplitHostPort(to)
	switch {
	case strings.Count(to, ":") > 1 && !strings.HasPrefix(to, "["):
		return "", 0, errors.New("not HOST:PORT; an IPv6 address stands in brackets, [::1]:443")
	case err != nil || host == "":
		return "", 0, errors.New("not HOST:PORT")
	}
	// Names of services are not looked up: a policy has none either.
	n, err := strconv.ParseUint(p, 10, 16)
	if err != nil || n == 0 {
		return "", 0, fmt.Errorf("port %q: ports are numbers, 1-65535", p)
	}
	return host, uint16(n), nil
}

type explainer struct {
	ctx  context.Context
	app  *app
	tree *cgroup.Tree
	snap *conn.Snapshot
}

func (e *explainer) say(format string, args ...any) {
	fmt.Fprintf(e.app.stdout, format+"\n", args...)
}

// from says where who is, and which compartment that is. It is not counted if
// it is protected.
func (e *explainer) from(who string) (comp uint32, counted bool, err error) {
	all, err := e.tree.Walk()
	if err != nil {
		return 0, false, err
	}
	at, err := e.find(who, all)
	if errors.Is(err, cgroup.ErrOutside) {
		e.say("%v: no limit of this instance applies to it, and it is not counted", err)
		return 0, false, nil
	}
	if err != nil {
		return 0, false, err
	}
	if at.ID == 1 {
		e.say("the root cgroup is never refused: the kernel's own threads are in it")
		return 0, false, nil
	}
	byPath := make(map[string]cgroup.Cgroup, len(all))
	for _, c := range all {
		byPath[c.Path] = c
	}
	members := make(map[uint64]conn.Member, len(e.snap.Members))
	for _, m := range e.snap.Members {
		members[m.CgroupID] = m
	}
	plan := e.snap.Plan
	for p := at.Path; ; p = path.Dir(p) {
		m, ok := members[byPath[p].ID]
		switch {
		case ok && m.Protected:
			e.say("protected, because %s is on the protect list: never refused, never counted", p)
			return 0, false, nil
		case ok && int(m.Compartment) < len(plan.Compartments):
			c := plan.Compartments[m.Compartment]
			why := "adopted by " + c.Feature + "'s match"
			if p == c.Slice {
				why = "its own slice"
			}
			e.say("compartment %s, because of %s (%s)", named(c.Feature, c.Tenant), p, why)
			return m.Compartment, true, nil
		}
		if p == "/" {
			break
		}
	}
	e.say("compartment %s, because none of its cgroups is in another", policy.DefaultFeature)
	return 0, true, nil
}

// find says which cgroup is meant.
func (e *explainer) find(who string, all []cgroup.Cgroup) (cgroup.Cgroup, error) {
	if who == "" {
		who = strconv.Itoa(os.Getpid())
		e.say("this shell:")
	}
	if pid, err := strconv.Atoi(who); err == nil {
		c, err := e.tree.Of(pid)
		// Asked for each: a tree that is seen from another cgroup namespace cannot
		// tell a process outside from none.
		_, none := os.Stat(fmt.Sprintf("/proc/%d", pid))
		if errors.Is(err, cgroup.ErrGone) || none != nil {
			return c, fmt.Errorf("process %d: there is none", pid)
		}
		if err != nil {
			return c, err
		}
		comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		e.say("process %d (%s) is in cgroup %s", pid, strings.TrimSpace(string(comm)), c.Path)
		return c, nil
	}
	if strings.HasPrefix(who, "/") {
		p := who
		if rel, err := filepath.Rel(e.tree.Dir, who); err == nil && !strings.HasPrefix(rel, "..") {
			p = path.Join("/", rel)
		}
		c, err := e.tree.Get(p)
		if errors.Is(err, cgroup.ErrGone) {
			return c, fmt.Errorf("there is no cgroup %s under the cgroup root %s: is the unit running?", p, e.tree.Dir)
		}
		if err == nil {
			e.say("cgroup %s", c.Path)
		}
		return c, err
	}
	var found []cgroup.Cgroup
	for _, c := range all {
		if base := path.Base(c.Path); base == who || base == who+".service" {
			found = append(found, c)
		}
	}
	what := "unit"
	if !strings.Contains(who, ".") && len(found) > 0 && path.Base(found[0].Path) == who {
		what = "cgroup"
	}
	if len(found) == 0 {
		what = "container"
		found = e.containers(who, all)
	}
	if len(found) == 0 {
		return cgroup.Cgroup{}, fmt.Errorf("no cgroup of the name %s, or %s.service, and no container of that name or id that the policy matches: is it running? (names of containers are known while the agent runs)", who, who)
	}
	if len(found) > 1 {
		var paths []string
		for _, c := range found {
			paths = append(paths, c.Path)
		}
		return cgroup.Cgroup{}, fmt.Errorf("%s is the name of several cgroups, give one by its path: %s", who, strings.Join(paths, ", "))
	}
	e.say("%s %s is cgroup %s", what, who, found[0].Path)
	return found[0], nil
}

// containerID is an id, or its first twelve digits, as runtimes show it.
var containerID = regexp.MustCompile(`^[0-9a-f]{12,64}$`)

// containers are the cgroups of the containers of a name that the agent has adopted, or of an id.
func (e *explainer) containers(name string, all []cgroup.Cgroup) (found []cgroup.Cgroup) {
	if containerID.MatchString(name) {
		for _, c := range all {
			if strings.Contains(path.Base(c.Path), name) && !strings.Contains(c.Path, "conmon") {
				found = append(found, c)
			}
		}
		if len(found) > 0 {
			return found
		}
	}
	info, err := e.app.client().Info(e.ctx)
	if err != nil {
		return nil
	}
	for _, k := range info.Containers {
		if i := slices.IndexFunc(all, func(c cgroup.Cgroup) bool { return c.ID == k.CgroupID }); i >= 0 && k.Name == name {
			found = append(found, all[i])
		}
	}
	return found
}

// to explains the routes of a compartment: to one destination, or to all
// providers if host is "".
func (e *explainer) to(ctx context.Context, comp uint32, host string, port uint16, proto policy.Proto) error {
	if host == "" {
		for i := range e.snap.Plan.Providers {
			if err := e.route(comp, uint32(i)); err != nil {
				return err
			}
		}
		return nil
	}
	addrs, err := e.resolve(ctx, host)
	if err != nil {
		return err
	}
	var providers []uint32
	for _, addr := range addrs {
		i := e.snap.Plan.Lookup(addr, port, proto)
		name := e.snap.Plan.Providers[i].Name
		if prefix, ok := e.prefix(addr); ok && i != 0 {
			e.say("%s is provider %s; the longest prefix that covers it is %s", netip.AddrPortFrom(addr, port), name, prefix)
		} else {
			e.say("%s %s is provider %s: no destination of the policy has it", netip.AddrPortFrom(addr, port), proto, name)
		}
		if i == 0 && proto == policy.UDP {
			e.say("UDP to %s is neither counted nor refused", policy.OtherProvider)
			continue
		}
		if !slices.Contains(providers, i) {
			providers = append(providers, i)
		}
	}
	for _, i := range providers {
		if err := e.route(comp, i); err != nil {
			return err
		}
	}
	return nil
}

func (e *explainer) resolve(ctx context.Context, host string) ([]netip.Addr, error) {
	if addr, err := netip.ParseAddr(host); err == nil {
		return []netip.Addr{addr.Unmap()}, nil
	}
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, fmt.Errorf("--to: %w (the name is looked up here and now; an address needs no look-up)", err)
	}
	var texts []string
	for i := range addrs {
		addrs[i] = addrs[i].Unmap()
		texts = append(texts, addrs[i].String())
	}
	e.say("%s resolves here and now to %s; the workload may get other addresses", host, strings.Join(texts, ", "))
	return addrs, nil
}

// prefix is the destination that is looked at for an address: the longest that
// covers it. Its ports may be those of a shorter one.
func (e *explainer) prefix(addr netip.Addr) (best netip.Prefix, ok bool) {
	for _, d := range e.snap.Plan.Destinations {
		if d.Prefix.Contains(addr) && (!ok || d.Prefix.Bits() > best.Bits()) {
			best, ok = d.Prefix, true
		}
	}
	return best, ok
}

// route explains one route.
func (e *explainer) route(comp, provider uint32) error {
	plan := e.snap.Plan
	c, name := plan.Compartments[comp], plan.Providers[provider].Name
	r := plan.Route(comp, provider)
	e.say("\nroute %s -> %s: %s", named(c.Feature, c.Tenant), name, e.verdict(r))
	if len(r.Holds) > 0 {
		rows := [][]string{{"  HOLDS", "IN USE", "LIMIT"}}
		for _, i := range r.Holds {
			b := plan.Bulkheads[i]
			rows = append(rows, []string{"  " + b.Key.String(), fmt.Sprint(e.inUse(b.Key)), limitText(b)})
		}
		if err := table(e.app.stdout, rows...); err != nil {
			return err
		}
	}
	if p := plan.Providers[provider]; p.UDP {
		e.say("  a UDP socket that has exchanged no datagram with it for %s gives its place back, unless it is connected", age(p.Idle))
	}
	if t := e.snap.Totals; t.SlotsFull > 0 && !r.CountOnly {
		e.say("  the table of connections has had no room or no memory for %d (room for %d, %d in it now): %s", t.SlotsFull, t.SlotsMax, t.Slots, noRoom(plan, r))
	}
	for _, f := range e.snap.Refusals {
		if f.Feature != c.Feature || f.Tenant != c.Tenant || f.Provider != name {
			continue
		}
		what := "refused"
		if f.Observed {
			what = "would have been refused"
		}
		e.say("  %s ago pid %d (%s) to %s %s: %s was %s at %s%s",
			age(time.Since(f.Time)), f.PID, f.Comm, f.Remote, what, f.Bulkhead, f.Reason, f.Limit, e.inAll(f.Bulkhead))
	}
	return nil
}

// noRoom is what becomes of a connection on the route that finds no room in the table.
func noRoom(plan *policy.Plan, r policy.Route) string {
	if plan.Exhausted == policy.ExhaustedRefuse && plan.Mode == policy.Enforce {
		for _, i := range r.Holds {
			if b := plan.Bulkheads[i]; b.Limit != policy.Unlimited {
				return fmt.Sprintf("one that finds none is refused, on %s (exhausted: refuse)", b.Key)
			}
		}
	}
	return "one that finds none is let through uncounted"
}

// inAll is how many a bulkhead refused, and how many it would have refused in
// mode observe. They are the bulkhead's own counts, of all routes that hold it:
// those of a route count both kinds in one.
func (e *explainer) inAll(key policy.Key) string {
	for _, b := range e.snap.Bulkheads {
		if b.Key == key {
			return fmt.Sprintf("; in all it refused %d, and would have refused %d in mode observe", sum(b.Rejected), sum(b.WouldReject))
		}
	}
	return "" // it left the policy
}

// verdict is what a connect on the route would get now.
func (e *explainer) verdict(r policy.Route) string {
	plan := e.snap.Plan
	if r.CountOnly {
		return "let through, only counted: no limit names it"
	}
	for _, i := range r.Holds {
		b := plan.Bulkheads[i]
		if b.Limit == policy.Unlimited || e.inUse(b.Key) < uint32(b.Limit) {
			continue
		}
		if plan.Mode == policy.Observe {
			return fmt.Sprintf("let through now, and counted as a would-be refusal: %s is full (mode observe)", b.Key)
		}
		errno := policy.ErrnoName(b.Errno)
		if !conn.HaveErrno() {
			errno = "EPERM"
		}
		return fmt.Sprintf("refused now with %s: %s is full", errno, b.Key)
	}
	return "let through now"
}

func (e *explainer) inUse(key policy.Key) uint32 {
	for _, b := range e.snap.Bulkheads {
		if b.Key == key {
			return b.InUse
		}
	}
	return 0
}
