package main

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// rateRow is one kind of traffic in one configuration.
type rateRow struct {
	Traffic string `json:"traffic"`
	Name    string `json:"name"`
	Unit    string `json:"unit"`
	// PerSecond is by the clock on the wall, PerCPUSecond per second of processor time of
	// client and server together; medians over the turns.
	PerSecond    float64 `json:"per_second"`
	PerCPUSecond float64 `json:"per_cpu_second"`
	// Ratio is of PerCPUSecond, to that without programs in the same round.
	Ratio estimate `json:"ratio"`
}

// Kinds of traffic and configurations that limits are about.
const (
	trafficBulk      = "bulk TCP"
	trafficExchange  = "64-byte request/response, TCP"
	trafficDatagrams = "64-byte datagrams, UDP"
	trafficHTTP      = "HTTP keep-alive, wrk"

	rowCounted   = "bytes counted"
	rowUntracked = "untracked"
	// rowBesideUDP is untracked while the policy names UDP, so that our programs see
	// every packet.
	rowBesideUDP = "untracked, programs for UDP attached"
	// rowPackets is what any program that sees packets costs.
	rowPackets = "empty programs that see packets"
)

// sample is what one turn moved and needed.
type sample struct{ amount, cpu, wall float64 } // nanoseconds

// throughputSection measures all kinds, turns of about a twentieth of a second each, but a
// second where wrk is run.
func (l *lab) throughputSection(rounds, httpRounds int) (rows []rateRow, missing []string, err error) {
	for _, t := range []struct {
		name, unit, job string
		kind, port      int
		serve           func(fd int, buffer []byte)
		n               int
		per             float64 // of n
		counted         string
	}{
		{trafficBulk, "MB", "bulk", syscall.SOCK_STREAM, bulkPort, sink, 64, 1.048576, counted},
		{trafficExchange, "requests", "exchange", syscall.SOCK_STREAM, echoPort, echo, 1500, 1, counted},
		{trafficDatagrams, "datagrams", "datagrams", syscall.SOCK_DGRAM, datagramPort, acknowledge, 4096, 1, udpCounted},
	} {
		s, err := startServer(t.kind, t.port, t.serve)
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", t.name, err)
		}
		one, err := l.rates(t.name, t.unit, t.counted, rounds, func(c *configuration) (sample, error) {
			before := s.cpu()
			used, err := l.turn(c, t.job, t.n)
			if err != nil {
				return sample{}, err
			}
			return sample{float64(t.n) * t.per, used[0] + float64(s.cpu()-before), used[1]}, nil
		})
		s.end()
		if err != nil {
			return nil, nil, err
		}
		rows = append(rows, one...)
	}
	if _, err := exec.LookPath("wrk"); err != nil {
		return rows, []string{trafficHTTP + ": left out: wrk is not installed"}, nil
	}
	server, stop, err := startHTTP()
	if err != nil {
		return nil, nil, err
	}
	defer stop()
	http, err := l.rates(trafficHTTP, "requests", counted, httpRounds, func(c *configuration) (sample, error) {
		before := processorTime(processClock(server))
		s, err := l.wrk(c)
		s.cpu += float64(processorTime(processClock(server)) - before)
		return s, err
	})
	return append(rows, http...), nil, err
}

// rates measures one kind of traffic in turns of all configurations.
func (l *lab) rates(traffic, unit, counted string, rounds int, turn func(*configuration) (sample, error)) ([]rateRow, error) {
	defer l.end(len(l.stop))
	all := []*configuration{
		{name: rowNone},
		{name: rowCounted, policy: counted},
		{name: rowUntracked, policy: elsewhere},
		{name: rowBesideUDP, policy: udpElsewhere},
		{name: rowPackets, empty: true, packets: true},
	}
	for _, c := range all {
		if err := l.start(c); err != nil {
			return nil, err
		}
	}
	perCPU, perWall := make([][]float64, len(all)), make([][]float64, len(all))
	err := l.rounds("throughput: "+traffic, rounds, all, func(round, i int) error {
		s, err := turn(all[i])
		if err == nil && round >= 0 {
			perCPU[i] = append(perCPU[i], s.amount/s.cpu*1e9)
			perWall[i] = append(perWall[i], s.amount/s.wall*1e9)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", traffic, err)
	}
	var rows []rateRow
	for i, c := range all {
		rows = append(rows, rateRow{
			Traffic: traffic, Name: c.name, Unit: unit,
			PerSecond: median(perWall[i]), PerCPUSecond: median(perCPU[i]), Ratio: estimated(ratios(perCPU[i], perCPU[0])),
		})
	}
	return rows, nil
}

// wrk runs the load generator for a second, born in the configuration's cgroup. Like the
// worker it is on one CPU with the server.
func (l *lab) wrk(c *configuration) (sample, error) {
	if err := l.ctx.Err(); err != nil {
		return sample{}, err
	}
	dir, err := os.Open(c.inner)
	if err != nil {
		return sample{}, err
	}
	defer dir.Close()
	cmd := exec.CommandContext(l.ctx, "/proc/self/exe", "pinned", "wrk", "--threads=1", "--connections=16", "--duration=1s", fmt.Sprintf("http://127.0.0.1:%d/", httpPort))
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd()), Pdeathsig: syscall.SIGKILL}
	wall := time.Now()
	out, err := cmd.Output()
	s := sample{wall: float64(time.Since(wall))}
	if err != nil {
		return s, fmt.Errorf("wrk: %w", err)
	}
	s.cpu = float64(cmd.ProcessState.SystemTime() + cmd.ProcessState.UserTime())
	s.amount, err = requests(string(out))
	return s, err
}

// requests is what wrk says that it has done: "  1234 requests in 1.00s, 1.23MB read".
func requests(report string) (float64, error) {
	if strings.Contains(report, "Socket errors") || strings.Contains(report, "Non-2xx") {
		return 0, fmt.Errorf("wrk had errors: %s", report)
	}
	for _, line := range strings.Split(report, "\n") {
		if number, rest, ok := strings.Cut(strings.TrimSpace(line), " "); ok && strings.HasPrefix(rest, "requests in ") {
			return strconv.ParseFloat(number, 64)
		}
	}
	return 0, fmt.Errorf("wrk says nothing of requests: %s", report)
}
