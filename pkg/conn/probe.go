package conn

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"bulkhead/internal/sockets"
)

// Finding is one thing that was looked at, for doctor.
type Finding struct {
	Name string
	OK   bool
	// Fatal: without it no connection can be limited.
	Fatal bool
	// Detail is what was seen; Cost what is lost without it; Cure what to do.
	Detail, Cost, Cure string
}

// oldest is the oldest kernel that this is made for.
const oldestMajor, oldestMinor = 5, 15

// Probe looks at what this kernel, its mounts and our capabilities allow. It attaches
// and pins nothing. Without privileges it says what it could not look at.
func Probe(ctx context.Context, o Options) []Finding {
	var all []Finding
	add := func(f Finding) { all = append(all, f) }

	major, minor, rel := kernelVersion()
	add(Finding{
		Name: "kernel", Fatal: true, Detail: rel,
		OK:   major > oldestMajor || major == oldestMajor && minor >= oldestMinor,
		Cost: "programs may not load", Cure: fmt.Sprintf("run kernel %d.%d or later", oldestMajor, oldestMinor),
	})

	caps := effectiveCapabilities()
	for _, c := range []struct {
		name       string
		bit        uint
		fatal      bool
		cost, cure string
	}{
		{"CAP_BPF", unix.CAP_BPF, true, "programs and maps cannot be loaded", "run as root, or add CAP_BPF"},
		{"CAP_NET_ADMIN", unix.CAP_NET_ADMIN, true, "programs cannot be loaded or attached", "run as root, or add CAP_NET_ADMIN"},
		{"CAP_SYS_ADMIN", unix.CAP_SYS_ADMIN, false, "status, conns, plan, explain, top and exec cannot read the plan in force, and sockets of other network namespaces are not reconciled", "run as root, or add CAP_SYS_ADMIN"},
		{"CAP_PERFMON", unix.CAP_PERFMON, false, "the command of a process that is gone is not known in conns and in refusals", "run as root, or add CAP_PERFMON"},
		{"CAP_SYS_PTRACE", unix.CAP_SYS_PTRACE, false, "network namespaces of other users' processes are not found", "run as root, or add CAP_SYS_PTRACE"},
	} {
		// CAP_SYS_ADMIN includes CAP_BPF and CAP_PERFMON (capabilities(7)).
		ok := caps&(1<<c.bit) != 0 || (c.bit == unix.CAP_BPF || c.bit == unix.CAP_PERFMON) && caps&(1<<unix.CAP_SYS_ADMIN) != 0
		detail := "effective"
		if !ok {
			detail = "missing"
		}
		add(Finding{Name: c.name, OK: ok, Fatal: c.fatal, Detail: detail, Cost: c.cost, Cure: c.cure})
	}
	privileged := caps&(1<<unix.CAP_SYS_ADMIN) != 0 || caps&(1<<unix.CAP_BPF) != 0 && caps&(1<<unix.CAP_NET_ADMIN) != 0

	ok, err := isFS(o.CgroupRoot, cgroup2Magic)
	f := Finding{Name: "cgroup2", OK: ok, Fatal: true, Detail: o.CgroupRoot, Cost: "nothing to attach to", Cure: "mount -t cgroup2 none DIR, and name it with --cgroup-root"}
	if err != nil {
		f.Detail = err.Error()
	} else if !ok {
		f.Detail += " is not a cgroup v2 directory"
	}
	add(f)

	ok, err = isFS(o.BPFFS, bpfFSMagic)
	f = Finding{Name: "bpffs", OK: ok, Fatal: true, Detail: o.BPFFS, Cost: "nothing can be pinned, so limits would end with the agent", Cure: "mount -t bpf bpf " + o.BPFFS}
	if err != nil {
		f.Detail = err.Error()
	} else if !ok {
		f.Detail += " is not a bpf file system"
	}
	add(f)

	if !privileged {
		add(Finding{Name: "programs", Detail: "not tried without CAP_BPF and CAP_NET_ADMIN", Cost: "unknown", Cure: "run doctor as root"})
	} else {
		f = Finding{Name: "programs", OK: true, Fatal: true, Detail: "all load and verify", Cost: "no connection can be limited", Cure: "report the message with this kernel's version"}
		if err := tryLoad(); err != nil {
			f.OK, f.Detail = false, err.Error()
		}
		add(f)
		f = Finding{Name: "errno", OK: HaveErrno(), Detail: "connect() fails with the policy's errno", Cost: "connect() fails with EPERM whatever the policy says", Cure: "run kernel 5.18 or later"}
		if !f.OK {
			f.Detail = "bpf_set_retval is missing"
		}
		add(f)
	}

	d := sockets.Read(ctx, sockets.Namespace{}, unix.IPPROTO_TCP)
	f = Finding{Name: "sock_diag", OK: d.Complete, Detail: fmt.Sprintf("%d TCP sockets seen", len(d.Sockets)), Cost: "slots of sockets that give no event are freed only at close; bytes of open connections are unknown", Cure: "modprobe tcp_diag udp_diag"}
	if d.Err != nil {
		f.Detail = d.Err.Error()
	}
	add(f)
	return all
}

func tryLoad() error {
	spec, err := loadKernel()
	if err != nil {
		return err
	}
	if err := setConstants(spec); err != nil {
		return err
	}
	coll, err := ebpf.NewCollection(spec)
	if err != nil {
		return explainLoad(err)
	}
	coll.Close()
	return nil
}

func kernelVersion() (major, minor int, release string) {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return 0, 0, "unknown"
	}
	release = unix.ByteSliceToString(u.Release[:])
	fmt.Sscanf(release, "%d.%d", &major, &minor)
	return major, minor, release
}

// effectiveCapabilities is CapEff of proc_pid_status(5), 0 if it cannot be read.
func effectiveCapabilities() uint64 {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0
	}
	for _, line := range strings.Split(string(b), "\n") {
		if v, ok := strings.CutPrefix(line, "CapEff:"); ok {
			n, _ := strconv.ParseUint(strings.TrimSpace(v), 16, 64)
			return n
		}
	}
	return 0
}
