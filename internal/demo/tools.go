package demo

import (
	"context"
	"fmt"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// tool is an ordinary program that workloads are made of.
type tool string

const (
	python   tool = "python3"
	node     tool = "node"
	curl     tool = "curl"
	postgres tool = "PostgreSQL"
)

// tools are where the ordinary programs are.
type tools struct {
	Python string `json:"python"`
	// Node is "" if it is not installed, which nothing needs.
	Node     string           `json:"node"`
	Curl     string           `json:"curl"`
	Postgres postgresPrograms `json:"postgres"`
	// Versions are for people; Missing is why a tool cannot be used, with the
	// cure.
	Versions map[tool]string `json:"versions"`
	Missing  map[tool]string `json:"missing"`
}

// postgresPrograms are one release's, and the user who may run the server,
// which refuses root.
type postgresPrograms struct {
	Bin string `json:"bin"` // directory of initdb, postgres and psql
	UID uint32 `json:"uid"`
	GID uint32 `json:"gid"`
}

// toolTimeout bounds a program that is asked for its version.
const toolTimeout = 20 * time.Second

// findTools looks for them. postgresDirs is a glob for the directories of
// PostgreSQL's programs, which Debian keeps out of the path.
func findTools(ctx context.Context, postgresDirs string) tools {
	t := tools{Versions: map[tool]string{}, Missing: map[tool]string{}}
	found := func(name tool, version string, err error, cure string) {
		if err != nil {
			t.Missing[name] = fmt.Sprintf("%v: %s", err, cure)
			return
		}
		t.Versions[name] = version
	}
	var version string
	var err error
	t.Python, version, err = findPython(ctx)
	found(python, version, err, "apt install python3")
	if t.Node, version, err = findNode(ctx); err == nil {
		t.Versions[node] = version
	}
	t.Curl, version, err = findCurl(ctx)
	found(curl, version, err, "apt install curl")
	t.Postgres, version, err = findPostgres(ctx, postgresDirs)
	found(postgres, version, err, "apt install postgresql")
	return t
}

// why returns why the tools of a are not all there, or "".
func (t tools) why(a about) string {
	var all []string
	for _, n := range a.needs {
		if m := t.Missing[n]; m != "" {
			all = append(all, m)
		}
	}
	return strings.Join(all, "; ")
}

// used returns the programs that experiments use, with versions, for people.
func (t tools) used(all []about) []string {
	versions := []string{}
	for _, name := range []tool{python, node, curl, postgres} {
		for _, a := range all {
			if v := t.Versions[name]; v != "" && (slices.Contains(a.needs, name) || slices.Contains(a.likes, name)) {
				versions = append(versions, v)
				break
			}
		}
	}
	return versions
}

// ask returns what a program writes.
func ask(ctx context.Context, argv ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, toolTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).Output()
	return strings.TrimSpace(string(out)), err
}

// findPython returns the interpreter itself: what is in the path may be a
// script that chooses one.
func findPython(ctx context.Context) (path, version string, err error) {
	name, err := exec.LookPath("python3")
	if err != nil {
		return "", "", fmt.Errorf("python3 is not installed")
	}
	out, err := ask(ctx, name, "-I", "-B", "-c",
		"import sys, json, http.server, urllib.request, concurrent.futures; print(sys.executable, '%d.%d.%d' % sys.version_info[:3])")
	path, number, ok := strings.Cut(out, " ")
	if err != nil || !ok {
		return "", "", fmt.Errorf("%s does not run with its standard library (%v)", name, err)
	}
	var major, minor int
	if _, err := fmt.Sscanf(number, "%d.%d", &major, &minor); err != nil || major != 3 || minor < 9 {
		return "", "", fmt.Errorf("%s is %s and 3.9 is needed", name, number)
	}
	return path, fmt.Sprintf("python3 %s (%s)", number, path), nil
}

// findNode wants 14, the oldest that the script was made for.
func findNode(ctx context.Context) (path, version string, err error) {
	if path, err = exec.LookPath("node"); err != nil {
		return "", "", err
	}
	// The program itself, as for python3.
	out, err := ask(ctx, path, "-p", "process.execPath + ' ' + process.versions.node")
	path, version, ok := strings.Cut(out, " ")
	var major int
	if err == nil && ok {
		_, err = fmt.Sscanf(version, "%d.", &major)
	}
	if err != nil || major < 14 {
		return "", "", fmt.Errorf("node is %q (%v) and 14 is needed", out, err)
	}
	return path, fmt.Sprintf("node %s (%s)", version, path), nil
}

// findCurl wants 7.75, the first to write each transfer's exit code.
func findCurl(ctx context.Context) (path, version string, err error) {
	if path, err = exec.LookPath("curl"); err != nil {
		return "", "", fmt.Errorf("curl is not installed")
	}
	out, err := ask(ctx, path, "--version")
	f := strings.Fields(out)
	var major, minor int
	if err == nil && len(f) > 1 {
		_, err = fmt.Sscanf(f[1], "%d.%d", &major, &minor)
	}
	switch {
	case err != nil || len(f) < 2:
		return "", "", fmt.Errorf("%s does not tell its version (%v)", path, err)
	case major < 7 || major == 7 && minor < 75:
		return "", "", fmt.Errorf("%s is %s and 7.75 is needed", path, f[1])
	}
	return path, fmt.Sprintf("curl %s (%s)", f[1], path), nil
}

func findPostgres(ctx context.Context, dirs string) (p postgresPrograms, version string, err error) {
	found, err := filepath.Glob(dirs)
	if err != nil {
		return p, "", err
	}
	release := func(dir string) int {
		n, _ := strconv.Atoi(filepath.Base(filepath.Dir(dir)))
		return n
	}
	slices.SortFunc(found, func(a, b string) int { return release(b) - release(a) })
	for _, dir := range found {
		p.Bin = dir
		for _, name := range []string{"initdb", "postgres", "psql"} {
			if _, err := exec.LookPath(filepath.Join(dir, name)); err != nil {
				p.Bin = ""
			}
		}
		if p.Bin != "" {
			break
		}
	}
	if p.Bin == "" {
		return p, "", fmt.Errorf("PostgreSQL is not installed")
	}
	who, err := user.Lookup("postgres")
	if err != nil {
		return p, "", fmt.Errorf("PostgreSQL's server does not run as root, and there is no user postgres")
	}
	uid, uerr := strconv.ParseUint(who.Uid, 10, 32)
	gid, gerr := strconv.ParseUint(who.Gid, 10, 32)
	if uerr != nil || gerr != nil {
		return p, "", fmt.Errorf("user postgres has uid %q and gid %q", who.Uid, who.Gid)
	}
	p.UID, p.GID = uint32(uid), uint32(gid)
	out, err := ask(ctx, filepath.Join(p.Bin, "psql"), "--version")
	f := strings.Fields(out)
	if err != nil || len(f) < 3 {
		return p, "", fmt.Errorf("%s/psql does not tell its version (%v)", p.Bin, err)
	}
	return p, fmt.Sprintf("PostgreSQL %s (%s)", f[2], p.Bin), nil
}

// debianPostgres is where Debian's packages put PostgreSQL's programs.
const debianPostgres = "/usr/lib/postgresql/*/bin"
