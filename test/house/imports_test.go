package house

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "bulkhead"

// pkg is what `go list -json` says of a package.
type pkg struct {
	ImportPath string
	Dir        string
	GoFiles    []string
	Imports    []string // of the files that are built, not of tests
	Deps       []string // all that these import in turn
}

// packages are those of this module.
func packages(t *testing.T) []pkg {
	t.Helper()
	// go test takes an earlier result if no file that the test opened has
	// changed, and does not see what go list opens: so every directory is.
	root := filepath.Join("..", "..")
	err := filepath.WalkDir(root, func(_ string, d fs.DirEntry, err error) error {
		if err == nil && d.Name() == ".git" {
			return filepath.SkipDir
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("go", "list", "-json=ImportPath,Dir,GoFiles,Imports,Deps", module+"/...")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, &stderr)
	}
	var all []pkg
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		err := dec.Decode(&p)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	if len(all) < 8 {
		t.Fatalf("go list found only %d packages", len(all))
	}
	return all
}

// forTests reports whether a package is only there for tests, which may look
// behind the walls.
func forTests(self string) bool {
	return strings.HasPrefix(self, "test/") || self == "internal/kerneltest" || self == "internal/containers/enginetest"
}

// onlyIn are imports that one part of the house keeps to itself: a path, or
// all below it, to those that may import it and the reason.
var onlyIn = map[string]struct {
	who []string
	why string
}{
	"github.com/cilium/ebpf":                 {[]string{"pkg/conn"}, "the data path is one package, so that everybody else sees values"},
	"github.com/prometheus/client_golang":    {[]string{"internal/metrics"}, "metric names and labels have one place"},
	"github.com/prometheus/exporter-toolkit": {[]string{"internal/agent"}, "one listener"},
	"github.com/fsnotify/fsnotify":           {[]string{"internal/agent"}, "one watcher"},
	"github.com/spf13/cobra":                 {[]string{"cmd/agent"}, "flags and commands belong to the command line"},
	"github.com/vishvananda/netlink":         {[]string{"internal/sockets"}, "sockets are dumped in one place"},
	"go.yaml.in/yaml":                        {[]string{"pkg/policy"}, "a policy is parsed in one place"},
	"gopkg.in/yaml.v3":                       {nil, "go.yaml.in/yaml/v3 is its maintained home"},
	"github.com/bmatcuk/doublestar":          {[]string{"pkg/cgroup", "pkg/policy"}, "globs are checked where they are parsed and matched where cgroups are"},
	module + "/internal/agent":               {[]string{"cmd/agent"}, "the agent is ordering, nothing to build on"},
	module + "/internal/metrics":             {[]string{"internal/agent", "cmd/agent"}, "metrics are the end of the way"},
	module + "/internal/demo":                {[]string{"cmd/agent"}, "the demo shows the product and is no part of it"},
	module + "/cmd":                          {nil, "the command line is the top"},
	"github.com/containerd/cgroups":          {[]string{"pkg/cgroup"}, "cgroups have one hand on them"},
	"github.com/godbus/dbus":                 {[]string{"pkg/cgroup"}, "systemd is talked to by the cgroup back end"},
	"github.com/coreos/go-systemd/v22/dbus":  {[]string{"pkg/cgroup"}, "systemd is talked to by the cgroup back end"},
	"net/http/pprof":                         {nil, "importing it adds handlers to a global"},
	"expvar":                                 {nil, "importing it adds a handler to a global"},
}

func TestWhoMayImport(t *testing.T) {
	for _, p := range packages(t) {
		self := strings.TrimPrefix(p.ImportPath, module+"/")
		if forTests(self) {
			continue
		}
		for _, imp := range p.Imports {
			for path, rule := range onlyIn {
				if (imp == path || strings.HasPrefix(imp, path+"/")) && !slices.Contains(rule.who, self) && !strings.HasPrefix(p.ImportPath, path) {
					t.Errorf("%s imports %s, which only %v may: %s", p.ImportPath, imp, rule.who, rule.why)
				}
			}
		}
	}
}

// never are dependencies, direct or not, that would turn the way around:
// policy -> plan -> kernel -> snapshot -> metrics.
var never = map[string]map[string]string{
	"pkg/policy": {
		module + "/pkg/cgroup":       "the language knows no cgroup tree",
		module + "/pkg/conn":         "the language knows no kernel",
		module + "/internal":         "the language stands alone",
		"golang.org/x/sys/unix":      "policies are checked on any system",
		"github.com/cilium/ebpf":     "the language knows no kernel",
		"net/http":                   "checking a policy asks nobody",
		"github.com/prometheus":      "the language has no metrics",
		"github.com/spf13/cobra":     "the language has no flags",
		"github.com/fsnotify":        "the language reads files once",
		"github.com/vishvananda":     "the language knows no sockets",
		"github.com/coreos":          "the language knows no systemd",
		"github.com/godbus":          "the language knows no systemd",
		"github.com/containerd":      "the language knows no containers",
		"google.golang.org/grpc":     "the language asks nobody",
		"google.golang.org/genproto": "the language asks nobody",
	},
	"pkg/cgroup": {
		module + "/pkg/conn":     "cgroups and kernel programs meet only in ids and levels, in the agent",
		module + "/internal":     "a package for others to import",
		"github.com/cilium/ebpf": "cgroups are files",
	},
	"pkg/conn": {
		module + "/pkg/cgroup":       "cgroups and kernel programs meet only in ids and levels, in the agent",
		module + "/internal/agent":   "the agent uses the kernel side, not the other way",
		module + "/internal/metrics": "a snapshot is a value; what becomes of it is not its business",
	},
	"internal/sockets": {
		module + "/pkg": "sockets are read without knowing what for",
	},
	"internal/metrics": {
		module + "/internal/agent": "metrics read what they are given",
	},
	"internal/demo": {
		module + "/pkg/conn":       "the demo starts the real binary and knows nothing of its inside",
		module + "/internal/agent": "the demo starts the real binary and knows nothing of its inside",
	},
}

func TestOneWayThroughTheHouse(t *testing.T) {
	found := 0
	for _, p := range packages(t) {
		rules := never[strings.TrimPrefix(p.ImportPath, module+"/")]
		if rules != nil {
			found++
		}
		for _, dep := range p.Deps {
			for path, why := range rules {
				if dep == path || strings.HasPrefix(dep, path+"/") {
					t.Errorf("%s depends on %s: %s", p.ImportPath, dep, why)
				}
			}
		}
	}
	if found != len(never) {
		t.Errorf("rules for %d packages, of which only %d exist", len(never), found)
	}
}
