package demo

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"
)

// database is a PostgreSQL server whose connections a report takes, beside a
// web feature that needs one for a moment.
type database struct {
	Connections int           `json:"connections"` // of the server
	Sessions    int           `json:"sessions"`    // of the report
	Limit       int           `json:"limit"`       // the report's connections
	Calls       int           `json:"calls"`       // of the web feature
	Apart       time.Duration `json:"apart"`       // between two calls
}

func theDatabase() database {
	return database{Connections: 10, Sessions: 20, Limit: 5, Calls: 20, Apart: 200 * time.Millisecond}
}

const databasePort = "5432"

func (e database) about() about {
	takes := time.Duration(e.Calls) * e.Apart
	return about{
		name:  "database",
		title: "a report takes the connections of the database",
		setup: fmt.Sprintf("PostgreSQL with %d connections; a report opens %d psql sessions and keeps them, a web feature asks `select 1` through psql %d times",
			e.Connections, e.Sessions, e.Calls),
		measured: "queries of the web",
		key:      95,
		policy: fmt.Sprintf(policyHead+`providers:
  postgres: {cidrs: [%s/32], ports: [%s], limits: {connections: %d}}
features:
  web:
    class: realtime
    providers: {postgres: {connections: %d}}
  report:
    class: background
    providers: {postgres: {connections: %d}}
`, loopback, databasePort, e.Connections, e.Connections-e.Limit, e.Limit),
		runs:  []runInfo{{run: without, takes: takes}, {run: with, takes: takes, base: true}},
		needs: []tool{python, postgres},
	}
}

// where is the database, for libpq. Without encryption, which a server without
// it would only be asked for.
func (e database) where() string {
	return fmt.Sprintf("postgresql://demo@%s:%s/postgres?sslmode=disable&connect_timeout=10", loopback, databasePort)
}

// serve starts the server.
func (e database) serve(g *stage) error {
	p := g.scenario.Tools.Postgres
	dir := filepath.Join(privateDir, "postgres")
	user := &syscall.Credential{Uid: p.UID, Gid: p.GID}
	in := func(name string, argv ...string) program {
		return program{name: name, cgroup: g.tree.supervisor(), user: user, argv: argv}
	}
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
		if err := os.Mkdir(dir, 0o700); err != nil {
			return err
		}
		if err := os.Chown(dir, int(p.UID), int(p.GID)); err != nil {
			return err
		}
		// Nobody else is in this network namespace, and nothing has to survive.
		c, err := g.start(in("initdb", filepath.Join(p.Bin, "initdb"), "--pgdata", dir, "--username", "demo", "--auth", "trust",
			"--no-sync", "--no-instructions", "--encoding", "UTF8", "--locale", "C"))
		if err != nil {
			return err
		}
		if err := g.await(c, readyTimeout); err != nil {
			return err
		}
	}
	args := []string{filepath.Join(p.Bin, "postgres"), "-D", dir}
	for _, setting := range []string{
		"listen_addresses=" + loopback, "port=" + databasePort, "unix_socket_directories=",
		"max_connections=" + strconv.Itoa(e.Connections), "superuser_reserved_connections=0",
		"max_wal_senders=0", "max_worker_processes=0", "autovacuum=off", "fsync=off", "shared_buffers=4MB",
		"dynamic_shared_memory_type=mmap",
	} {
		args = append(args, "-c", setting)
	}
	c, err := g.start(in("PostgreSQL", args...))
	if err != nil {
		return err
	}
	g.parts = append(g.parts, c)
	// It writes this line when it listens.
	if err := g.awaitText(c, "ready to accept connections", readyTimeout); err != nil {
		return err
	}
	g.needs(c)
	return nil
}

func (e database) run(g *stage) (sample, error) {
	if err := e.serve(g); err != nil {
		return sample{}, err
	}
	psql := filepath.Join(g.scenario.Tools.Postgres.Bin, "psql")
	if err := g.app(role{feature: "web"}, 0, "web="+psql+" "+e.where()); err != nil {
		return sample{}, err
	}
	report, err := g.ready("the report", role{feature: "report"}, g.python("report.py", psql, e.where(), strconv.Itoa(e.Sessions), "60"))
	if err != nil {
		return sample{}, err
	}
	if err := g.measuring(); err != nil {
		return sample{}, err
	}
	outcomes, err := g.probe(steady("web", 1/e.Apart.Seconds(), time.Duration(e.Calls)*e.Apart,
		func(int) string { return webURL + "/web" }))
	if err != nil {
		return sample{}, err
	}
	s := gather(outcomes, "web")
	s.Load, err = g.finish(report)
	return s, err
}

func (e database) verdict(r rows) string {
	return fmt.Sprintf("The report's sessions left no connection: %d of %d queries of the web feature failed. With %d connections for the report %d failed.",
		r.without.Failed+r.without.Refused, e.Calls, e.Limit, r.with.Failed+r.with.Refused)
}
