package containers

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Socket is where a runtime answers.
type Socket struct {
	Runtime string // one of runtimes
	Path    string
	// Named is whether somebody has named it, so that it is asked whatever it looks like.
	Named bool
}

// The runtimes that can be asked.
const (
	Docker     = "docker"
	Podman     = "podman"
	Containerd = "containerd"
)

var runtimes = []string{Docker, Podman, Containerd}

// DefaultSockets are those of the runtimes of root, where they are by default.
func DefaultSockets() []Socket {
	return []Socket{
		{Runtime: Docker, Path: "/run/docker.sock"},
		{Runtime: Podman, Path: "/run/podman/podman.sock"},
		{Runtime: Containerd, Path: "/run/containerd/containerd.sock"},
	}
}

// ParseSockets reads RUNTIME=PATH of each text. None is DefaultSockets, and "none" alone is no socket.
func ParseSockets(texts []string) ([]Socket, error) {
	if len(texts) == 0 {
		return DefaultSockets(), nil
	}
	if len(texts) == 1 && texts[0] == "none" {
		return nil, nil
	}
	var out []Socket
	for _, text := range texts {
		runtime, path, ok := strings.Cut(text, "=")
		if !ok || !slices.Contains(runtimes, runtime) || !filepath.IsAbs(path) {
			return nil, fmt.Errorf("%q: give RUNTIME=PATH, with %s and the absolute path of its socket, or none", text, strings.Join(runtimes, ", "))
		}
		out = append(out, Socket{Runtime: runtime, Path: path, Named: true})
	}
	return out, nil
}

// there reports whether something can be asked there. A socket that systemd listens on for Docker
// would start a daemon that somebody has stopped; its pid file says whether it runs.
func (s Socket) there() bool {
	if _, err := os.Stat(s.Path); err != nil {
		return false
	}
	if s.Runtime != Docker || s.Named {
		return true
	}
	_, err := os.Stat(strings.TrimSuffix(s.Path, ".sock") + ".pid")
	return err == nil
}
