//go:build vm

package cpu

import (
	"encoding/json"
	"errors"
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
	roleVar     = "BULKHEAD_CPU_TEST"
	roleHandler = "handler"
	roleParser  = "parser"
	roleProber  = "prober"      // enters SCHED_FIFO and becomes the next
	roleFIFO    = "prober-fifo" // probes

	// fifoVar is set for a process that shall enter SCHED_FIFO before it begins.
	fifoVar = "BULKHEAD_CPU_TEST_FIFO"
)

const (
	// warmup are the requests before those that are measured.
	warmup = 10
	// work is the handler's for one request, in rounds of a loop of six
	// instructions: about 2 ms in virtual time.
	work = 300_000
)

func TestMain(m *testing.M) { os.Exit(runTests(m)) }

func runTests(m *testing.M) int {
	role := os.Getenv(roleVar)
	if role == "" {
		return kerneltest.Main(m)
	}
	var err error
	if os.Getenv(fifoVar) != "" {
		err = errors.Join(os.Unsetenv(fifoVar), enterFIFO(role))
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	switch role {
	case roleHandler:
		err = handle(os.Stdin, os.Stdout)
	case roleParser:
		err = parse(os.Stdout)
	case roleProber:
		err = enterFIFO(roleFIFO)
	case roleFIFO:
		var number int
		if number, err = strconv.Atoi(os.Args[len(os.Args)-1]); err == nil {
			err = probe(number, os.NewFile(3, "to the handler"), os.NewFile(4, "from the handler"), os.Stdout)
		}
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

// handle answers each byte with one, after some work.
func handle(requests io.Reader, answers io.Writer) error {
	debug.SetGCPercent(-1) // nothing is allocated; latency shall be the scheduler's
	b := make([]byte, 1)
	for {
		if _, err := io.ReadFull(requests, b); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		b[0] = toil()
		if _, err := answers.Write(b); err != nil {
			return err
		}
	}
}

// toil needs CPU. Its result must be used, or the compiler leaves the loop out.
//
//go:noinline
func toil() byte {
	x := 0
	for i := range work {
		x += i * i
	}
	return byte(x)
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

// enterFIFO begins again in a role with all its threads in SCHED_FIFO: execve(2) keeps the
// policy and leaves one thread, which those that it makes take the policy from
// (sched(7)). It returns only if it failed.
func enterFIFO(role string) error {
	runtime.LockOSThread()
	fifo := unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1}
	if err := unix.SchedSetAttr(0, &fifo, 0); err != nil {
		return fmt.Errorf("enter SCHED_FIFO: %w", err)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if err := os.Setenv(roleVar, role); err != nil {
		return err
	}
	return syscall.Exec(self, os.Args, os.Environ())
}

// probe sends requests and reports how long each took, as JSON in nanoseconds.
func probe(number int, to io.Writer, from io.Reader, report io.Writer) error {
	debug.SetGCPercent(-1)
	random := rand.New(rand.NewPCG(1, 2))
	latencies := make([]time.Duration, 0, warmup+number)
	b := make([]byte, 1)
	for range warmup + number {
		time.Sleep(10*time.Millisecond + time.Duration(random.Int64N(int64(5*time.Millisecond))))
		began := time.Now()
		if _, err := to.Write(b); err != nil {
			return err
		}
		if _, err := io.ReadFull(from, b); err != nil {
			return err
		}
		latencies = append(latencies, time.Since(began))
	}
	return json.NewEncoder(report).Encode(latencies[warmup:])
}
