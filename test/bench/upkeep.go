package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// upkeepRow is what an agent takes of one CPU with many compartments and processes, which do
// nothing.
type upkeepRow struct {
	Name         string `json:"name"`
	Match        string `json:"match"` // "cgroup" or "exe"
	Compartments int    `json:"compartments"`
	Processes    int    `json:"processes"`
	// Ready are the milliseconds of its start, and of moving processes that match by what they are.
	Ready float64 `json:"ready_ms"`
	// Parts of one CPU: left alone, scraped each 15 s, and that with so many programs a second
	// that begin in the compartments and end.
	Idle    float64 `json:"idle"`
	Scraped float64 `json:"scraped"`
	Forks   float64 `json:"forks"`
	RSS     float64 `json:"rss_bytes"`
	// Milliseconds from before mkdir(2) of a cgroup that matches to the agent's word that it is
	// adopted, of as many as Adopted says.
	Adopted    int     `json:"adopted,omitempty"`
	AdoptedP50 float64 `json:"adopted_p50_ms,omitempty"`
	AdoptedP95 float64 `json:"adopted_p95_ms,omitempty"`
	AdoptedMax float64 `json:"adopted_max_ms,omitempty"`
}

const (
	byCgroup = "cgroup"
	byExe    = "exe"
	// upkeepScrape is how many seconds are between two scrapes: Prometheus is mostly told 15.
	upkeepScrape = 15
	// upkeepForks are a second.
	upkeepForks = 20
	// upkeepSettled is how long an agent has before it is watched: by then it has looked at all
	// and compared slots with sockets once.
	upkeepSettled = 12 * time.Second
	upkeepAddress = "127.0.0.1:19779" // in the node's own network namespace
)

// upkeepSection is the one section that is not in a network namespace of its own: there the
// kernel tells an agent nothing of processes.
func (l *lab) upkeepSection(o options) (rows []upkeepRow, err error) {
	for _, z := range o.upkeep {
		for _, match := range []string{byCgroup, byExe} {
			row, err := l.upkeep(o, upkeepRow{Match: match, Compartments: z[0], Processes: z[1]})
			if err != nil {
				return rows, fmt.Errorf("%s: %w", row.Name, err)
			}
			rows = append(rows, row)
		}
	}
	return rows, nil
}

func (l *lab) upkeep(o options, row upkeepRow) (_ upkeepRow, err error) {
	since := len(l.stop)
	defer func() { l.end(since) }()
	row.Name = fmt.Sprintf("%d compartments, %d processes, by %s", row.Compartments, row.Processes, row.Match)
	progress("upkeep: %s: start the processes", row.Name)
	s := sleepers{dir: filepath.Join(l.dir, "sleepers"), root: filepath.Join(l.root, "upkeep"), match: row.Match, compartments: row.Compartments}
	l.stop = append(l.stop, func() {
		s.end()
		err = errors.Join(err, removeTree(s.root), os.RemoveAll(s.dir))
	})
	// Each process has a descriptor here until it is waited for.
	if err := errors.Join(allowFiles(row.Processes+row.Compartments+1000), s.make()); err != nil {
		return row, err
	}
	for i := range row.Processes {
		if err := s.start(i, "1000000"); err != nil {
			return row, err
		}
	}
	n, took, err := l.startAgent("upkeep", s.root, o.binary, s.policy(), upkeepAddress, 0)
	if err != nil {
		return row, err
	}
	row.Ready = took
	if err := n.wait(upkeepSettled); err != nil {
		return row, err
	}

	second := 0
	scrape := func() error {
		second++
		if second%upkeepScrape != upkeepScrape/2 {
			return nil
		}
		_, _, err := n.scrape()
		return err
	}
	progress("upkeep: %s: left alone for %s", row.Name, o.upkeepFor)
	if row.Idle, err = n.share(o.upkeepFor, func() error { return nil }); err != nil {
		return row, err
	}
	progress("upkeep: %s: scraped for %s", row.Name, o.upkeepFor)
	if row.Scraped, err = n.share(o.upkeepFor, scrape); err != nil {
		return row, err
	}
	progress("upkeep: %s: scraped, with %d programs a second, for %s", row.Name, upkeepForks, o.upkeepFor)
	endForks := s.forks()
	row.Forks, err = n.share(o.upkeepFor, scrape)
	if err := errors.Join(err, endForks()); err != nil {
		return row, err
	}
	if row.RSS, err = n.rss(); err != nil {
		return row, err
	}
	if row.Match != byCgroup {
		return row, nil
	}
	made, err := s.more(n)
	if err != nil {
		return row, err
	}
	l.end(since + 1) // then its log is whole
	took50, err := adoptions(made, &n.log)
	if err != nil {
		return row, err
	}
	row.Adopted = len(made)
	row.AdoptedP50, row.AdoptedP95, row.AdoptedMax = median(took50), quantile(took50, 0.95), quantile(took50, 1)
	return row, nil
}

// adoptions are how many milliseconds it took from when each cgroup was made to when the log
// says that it is adopted.
func adoptions(made map[string]time.Time, log io.Reader) (took []float64, err error) {
	lines := bufio.NewScanner(log)
	for lines.Scan() {
		var e struct {
			Time   time.Time
			Msg    string
			Cgroup string
		}
		if json.Unmarshal(lines.Bytes(), &e) != nil || e.Msg != "adopted a cgroup" {
			continue
		}
		if t, ok := made[e.Cgroup]; ok {
			took = append(took, float64(e.Time.Sub(t).Microseconds())/1e3)
		}
	}
	if len(took) != len(made) {
		return nil, fmt.Errorf("of %d cgroups %d were adopted", len(made), len(took))
	}
	return took, lines.Err()
}

// sleepers are processes that do nothing, in a cgroup for each compartment, or all in one
// and each compartment's of an executable of its own.
type sleepers struct {
	dir, root    string
	match        string
	compartments int
	started      []*exec.Cmd
	places       []*os.File // cgroups
}

func (s *sleepers) policy() string {
	var b strings.Builder
	b.WriteString(head + "providers:\n  p: {cidrs: [127.0.0.1/32], ports: [9000-9099], limits: {connections: 1000}}\nfeatures:\n")
	for i := range s.compartments {
		match := fmt.Sprintf(`cgroup: "/apps/*w%d"`, i)
		if s.match == byExe {
			match = fmt.Sprintf("exe: %q", s.program(i))
		}
		fmt.Fprintf(&b, "  f%d: {class: batch, limits: {connections: 50}, match: [{%s}]}\n", i, match)
	}
	return b.String()
}

func (s *sleepers) program(i int) string { return filepath.Join(s.dir, fmt.Sprintf("sleep%d", i)) }

func (s *sleepers) make() error {
	work := filepath.Join(s.root, "apps")
	if err := errors.Join(os.Mkdir(s.dir, 0o755), controllersFor(s.root), os.MkdirAll(work, 0o755)); err != nil {
		return err
	}
	path, err := exec.LookPath("sleep")
	if err != nil {
		return err
	}
	sleep, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	for i := range s.compartments {
		at := work
		if s.match == byCgroup {
			at = filepath.Join(work, fmt.Sprintf("w%d", i))
			if err := os.Mkdir(at, 0o755); err != nil {
				return err
			}
		}
		if i == 0 || s.match == byCgroup {
			f, err := os.Open(at)
			if err != nil {
				return err
			}
			s.places = append(s.places, f)
		}
		if i == 0 || s.match == byExe {
			if err := os.WriteFile(s.program(i), sleep, 0o755); err != nil {
				return err
			}
		}
	}
	return nil
}

// controllersFor makes a cgroup that has the controllers which the one above has.
func controllersFor(root string) error {
	above := filepath.Dir(root)
	there, err := os.ReadFile(filepath.Join(above, "cgroup.controllers"))
	if err != nil {
		return err
	}
	for _, c := range strings.Fields(string(there)) {
		if err := os.WriteFile(filepath.Join(above, "cgroup.subtree_control"), []byte("+"+c), 0); err != nil {
			return fmt.Errorf("turn %s on: %w", c, err)
		}
	}
	return os.Mkdir(root, 0o755)
}

// command is one of the i-th's compartment.
func (s *sleepers) command(i int, seconds string) *exec.Cmd {
	i %= s.compartments
	program := s.program(0)
	if s.match == byExe {
		program = s.program(i)
	}
	cmd := exec.Command(program, seconds)
	cmd.Args[0] = "sleep" // busybox is what it is called
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(s.places[i%len(s.places)].Fd())}
	return cmd
}

func (s *sleepers) start(i int, seconds string) error {
	cmd := s.command(i, seconds)
	if err := cmd.Start(); err != nil {
		return err
	}
	s.started = append(s.started, cmd)
	return nil
}

// forks begins programs that end at once, until it is told to end.
func (s *sleepers) forks() (end func() error) {
	stop, failed := make(chan struct{}), make(chan error, 1)
	go func() {
		each := time.NewTicker(time.Second / upkeepForks)
		defer each.Stop()
		var running sync.WaitGroup
		defer running.Wait()
		for i := 0; ; i++ {
			select {
			case <-stop:
				failed <- nil
				return
			case <-each.C:
			}
			cmd := s.command(i, "0.2")
			if err := cmd.Start(); err != nil {
				failed <- err
				return
			}
			running.Go(func() { cmd.Wait() })
		}
	}()
	return func() error {
		close(stop)
		return <-failed
	}
}

// more makes cgroups that match, one after the other, and says when.
func (s *sleepers) more(n *node) (map[string]time.Time, error) {
	made := map[string]time.Time{}
	random := rand.New(rand.NewPCG(1, 2))
	for i := range 100 {
		progress("upkeep: new cgroups: %d of 100", i+1)
		name := fmt.Sprintf("/apps/n%d-w%d", i, random.IntN(s.compartments))
		made[name] = time.Now()
		if err := os.Mkdir(filepath.Join(s.root, name), 0o755); err != nil {
			return nil, err
		}
		if err := n.wait(100*time.Millisecond + time.Duration(random.Int64N(int64(300*time.Millisecond)))); err != nil {
			return nil, err
		}
	}
	return made, n.wait(time.Second)
}

func (s *sleepers) end() {
	for _, f := range s.places {
		f.Close()
	}
	for _, cmd := range slices.Backward(s.started) {
		cmd.Process.Kill()
	}
	for _, cmd := range s.started {
		cmd.Wait()
	}
}

// wait lets an agent be.
func (n *node) wait(d time.Duration) error {
	select {
	case <-n.l.ctx.Done():
		return n.l.ctx.Err()
	case <-n.ended:
		return fmt.Errorf("the agent ended: %s\n%s", n.cmd.ProcessState, bytes.TrimSpace(n.log.Bytes()))
	case <-time.After(d):
		return nil
	}
}
