package policy

// builtInProtect is protected on every node: what must be able to connect for
// somebody to get at the machine and repair it. PID 1 and systemd's own services,
// the bus and sshd under the names that Debian (ssh) and others (sshd) give them,
// also one unit per connection; the kubelet and the runtimes that Kubernetes
// documents (containerd, CRI-O, cri-dockerd) and Docker; the agent itself.
func builtInProtect() []string {
	return []string{
		"bulkhead.service",
		"containerd.service",
		"cri-docker.service",
		"crio.service",
		"dbus-broker.service",
		"dbus.service",
		"docker.service",
		"init.scope",
		"kubelet.service",
		"ssh.service",
		"ssh@*.service",
		"sshd.service",
		"sshd@*.service",
		"systemd-*.service",
	}
}
