//go:build vm

package cpu

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"bulkhead/internal/kerneltest"
)

// What a test binary is, from its environment.
const (
	roleVar    = "BULKHEAD_CPU_TEST"
	roleParser = "parser"
	roleProber = "prober"
	// These enter a policy of the scheduler and become their arguments, the first of them
	// a role.
	roleFIFO  = "fifo"
	roleBatch = "SCHED_BATCH"
	roleIdle  = "SCHED_IDLE"
	roleSlice = "slice"
	// noRole is that of a program that is not the test binary.
	noRole = "none"
)

const (
	// warmup are the requests before those that are measured.
	warmup = 10
	// idleWindow is how long the parsers are watched while there are none.
	// By its end the agent has found the new processes, too.
	idleWindow = 1200 * time.Millisecond
	// handler answers each line with a character, after about 2 ms of work in virtual time.
	// It is a program of one thread. A Go program has one beside it that wakes up all the
	// time, and that one of the same SCHED_FIFO priority never gets the CPU from: the two
	// cases would differ by more than how they are scheduled.
	handler = `{ for (i = 0; i < 470; i++) x += i * i; printf "."; fflush() }`
)

// handlerCommand is the handler: busybox is in every guest.
func handlerCommand() []string { return []string{"busybox", "awk", handler} }

// plainParser is a parser of one thread and without timers: a script, as a worker in Python is one. It works for about a
// millisecond of virtual time for each byte that it writes. A Go program's runtime has a thread beside that timers wake up
// while there is work, and interrupts take their time from whoever runs.
const plainParser = `BEGIN { for (;;) { for (i = 0; i < 235; i++) x += i * i; printf "."; fflush() } }`

// parserCommand is a parser and its role.
func (n *node) parserCommand() (role string, command []string) {
	if n.plain {
		return noRole, []string{"busybox", "awk", plainParser}
	}
	return roleParser, []string{n.self()}
}

func TestMain(m *testing.M) { os.Exit(runTests(m)) }

func runTests(m *testing.M) int {
	var err error
	switch role := os.Getenv(roleVar); role {
	case "":
		return kerneltest.Main(m)
	case roleParser:
		err = parse(os.Stdout)
	case roleProber:
		var number int
		if number, err = strconv.Atoi(os.Args[1]); err == nil {
			err = probe(number, os.Args[2], os.NewFile(3, "to the handler"), os.NewFile(4, "from the handler"), os.Stdout)
		}
	case roleFIFO, roleBatch, roleIdle, roleSlice:
		err = enter(role, os.Args[1], os.Args[2:])
	default:
		err = fmt.Errorf("no role %q", role)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// inRole is a command whose last program is this test binary.
func inRole(role string, args ...string) *exec.Cmd {
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(os.Environ(), roleVar+"="+role)
	return cmd
}

// parse parses a document again and again and writes a byte after each.
func parse(done io.Writer) error {
	var b strings.Builder
	b.WriteByte('[')
	for i := range 200 {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, `{"id":%d,"name":"n%d","v":[1,2,3]}`, i, i)
	}
	b.WriteByte(']')
	document := []byte(b.String())
	for {
		var v any
		if err := json.Unmarshal(document, &v); err != nil {
			return err
		}
		if _, err := done.Write([]byte{'.'}); err != nil {
			return err
		}
	}
}

// enter becomes a program with all its threads in a policy of the scheduler: execve(2)
// keeps the policy and leaves one thread, which those that it makes take the policy from
// (sched(7)). It returns only if it failed.
func enter(policy, role string, args []string) error {
	runtime.LockOSThread()
	attr := map[string]unix.SchedAttr{
		roleFIFO:  {Policy: unix.SCHED_FIFO, Priority: 1},
		roleBatch: {Policy: unix.SCHED_BATCH},
		roleIdle:  {Policy: unix.SCHED_IDLE},
		// The slice that fair scheduling gives, in nanoseconds, 0.1 ms at least (6.12; kernels
		// before do not heed it).
		roleSlice: {Policy: unix.SCHED_NORMAL, Runtime: 100_000},
	}[policy]
	attr.Size = unix.SizeofSchedAttr
	if err := unix.SchedSetAttr(0, &attr, 0); err != nil {
		return fmt.Errorf("enter %s: %w", policy, err)
	}
	path, err := exec.LookPath(args[0])
	if err != nil {
		return err
	}
	if err := os.Setenv(roleVar, role); err != nil {
		return err
	}
	return syscall.Exec(path, args, os.Environ())
}

// probed is what a prober reports.
type probed struct {
	Latencies []time.Duration
	// Idle is how many CPUs were at work on the parsers while the handler had nothing to do.
	Idle float64
}

// probe looks at what the parsers use for a while, then sends requests and reports, as
// JSON. stat is the cpu.stat of the parsers' cgroup, "" for none.
func probe(number int, stat string, to io.Writer, from io.Reader, report io.Writer) error {
	debug.SetGCPercent(-1)
	random := rand.New(rand.NewPCG(1, 2))
	p := probed{Latencies: make([]time.Duration, 0, warmup+number)}
	if stat != "" {
		before, err := usage(stat)
		if err != nil {
			return err
		}
		began := time.Now()
		time.Sleep(idleWindow)
		took := time.Since(began)
		after, err := usage(stat)
		if err != nil {
			return err
		}
		p.Idle = float64(after-before) / float64(took)
	}
	b := make([]byte, 1)
	for range warmup + number {
		b[0] = '\n'
		time.Sleep(10*time.Millisecond + time.Duration(random.Int64N(int64(5*time.Millisecond))))
		began := time.Now()
		if _, err := to.Write(b); err != nil {
			return err
		}
		if _, err := io.ReadFull(from, b); err != nil {
			return fmt.Errorf("the handler's answer: %w", err)
		}
		p.Latencies = append(p.Latencies, time.Since(began))
	}
	p.Latencies = p.Latencies[warmup:]
	return json.NewEncoder(report).Encode(p)
}

// usage is the CPU time in a cpu.stat.
func usage(stat string) (time.Duration, error) {
	text, err := os.ReadFile(stat)
	if err != nil {
		return 0, err
	}
	for _, line := range strings.Split(string(text), "\n") {
		if usec, ok := strings.CutPrefix(line, "usage_usec "); ok {
			n, err := strconv.ParseInt(usec, 10, 64)
			return time.Duration(n) * time.Microsecond, err
		}
	}
	return 0, fmt.Errorf("no usage_usec in %s", stat)
}
