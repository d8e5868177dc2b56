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
	// roleFIFO enters SCHED_FIFO and becomes its arguments, the first of them a role.
	roleFIFO = "fifo"
	// noRole is that of a program that is not the test binary.
	noRole = "none"
)

const (
	// warmup are the requests before those that are measured.
	warmup = 10
	// handler answers each line with a character, after about 2 ms of work in virtual time.
	// It is a program of one thread. A Go program has one beside it that wakes up all the
	// time, and that one of the same SCHED_FIFO priority never gets the CPU from: the two
	// cases would differ by more than how they are scheduled.
	handler = `{ for (i = 0; i < 470; i++) x += i * i; printf "."; fflush() }`
)

// handlerCommand is the handler: busybox is in every guest.
func handlerCommand() []string { return []string{"busybox", "awk", handler} }

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
		if number, err = strconv.Atoi(os.Args[len(os.Args)-1]); err == nil {
			err = probe(number, os.NewFile(3, "to the handler"), os.NewFile(4, "from the handler"), os.Stdout)
		}
	case roleFIFO:
		err = enterFIFO(os.Args[1], os.Args[2:])
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

// enterFIFO becomes a program with all its threads in SCHED_FIFO: execve(2) keeps the
// policy and leaves one thread, which those that it makes take the policy from
// (sched(7)). It returns only if it failed.
func enterFIFO(role string, args []string) error {
	runtime.LockOSThread()
	fifo := unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1}
	if err := unix.SchedSetAttr(0, &fifo, 0); err != nil {
		return fmt.Errorf("enter SCHED_FIFO: %w", err)
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

// probe sends requests and reports how long each took, as JSON in nanoseconds.
func probe(number int, to io.Writer, from io.Reader, report io.Writer) error {
	debug.SetGCPercent(-1)
	random := rand.New(rand.NewPCG(1, 2))
	latencies := make([]time.Duration, 0, warmup+number)
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
		latencies = append(latencies, time.Since(began))
	}
	return json.NewEncoder(report).Encode(latencies[warmup:])
}
