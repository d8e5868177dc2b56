package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// command is one thing to run in the guest.
type command struct {
	args []string
	// test is the package whose test binary it is, or "".
	test string
}

// machine is what the guest runs on.
type machine struct {
	cpus, memoryMiB int
	// virtual makes the clock count instructions, those of all CPUs together.
	virtual bool
	// disk is a file with an installed system that takes over from our init; "" for none.
	// boots is how many times it is started and the commands are run.
	disk  string
	boots int
	// timeout is the host's time for the whole run.
	timeout time.Duration
}

func (m machine) args() []string {
	cpus := strconv.Itoa(m.cpus)
	if m.virtual {
		return []string{"-accel", "tcg,thread=single", "-icount", "shift=0,sleep=off", "-smp", cpus, "-m", strconv.Itoa(m.memoryMiB)}
	}
	if m.disk != "" {
		cpus += ",maxcpus=4" // a cpuset of one CPU says something where there may be others
	}
	return []string{"-accel", "tcg,thread=multi", "-smp", cpus, "-m", strconv.Itoa(m.memoryMiB)}
}

// errUnfair is an emulator that several CPUs in virtual time are not to be had from.
var errUnfair = errors.New("several CPUs in virtual time need QEMU 10 or later, which lets them take turns (Debian 13 has it)")

// fairTurns is nil if qemu's CPUs share virtual time. In 7.2 one that is busy has all of it until
// the next timer, and then again; 10.0 was seen to be fair, and nothing in between was tried.
func fairTurns(ctx context.Context) error {
	out, err := exec.CommandContext(ctx, "qemu-system-x86_64", "--version").Output()
	if err != nil {
		return fmt.Errorf("qemu-system-x86_64 --version: %w (install qemu-system-x86)", err)
	}
	return fair(string(out))
}

// fair judges what --version says.
func fair(says string) error {
	var major int
	if _, err := fmt.Sscanf(says, "QEMU emulator version %d.", &major); err != nil {
		return fmt.Errorf("qemu's version: %q: %w", says, err)
	}
	if major < 10 {
		return fmt.Errorf("%w: this is %d", errUnfair, major)
	}
	return nil
}

// boot runs the commands on k and returns what became of them. The guest's
// output goes to out line by line while it runs.
func boot(ctx context.Context, k kernel, m machine, files []guestFile, commands []command, out io.Writer) (*run, error) {
	dir, err := os.MkdirTemp("", "bulkhead-vm-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	ctx, cancel := context.WithTimeout(ctx, m.timeout)
	defer cancel()
	if m.disk == "" {
		return bootSafely(ctx, k, m, dir, 1, files, commands, out)
	}
	copied := filepath.Join(dir, "disk")
	if out, err := exec.CommandContext(ctx, "cp", "--sparse=always", "--reflink=auto", m.disk, copied).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("copy the disk: %w: %s", err, out)
	}
	m.disk = copied
	var r *run
	for n := 1; n <= m.boots; n++ {
		next, err := bootSafely(ctx, k, m, dir, n, files, commands, out)
		if err != nil {
			return nil, err
		}
		if r = next.after(r); r.err() != nil {
			break
		}
	}
	return r, nil
}

// bootTries is how often a guest is started whose kernel panics before anything of ours
// runs in it, or at any time by an int3, which is the emulator's fault: see int3. Any other panic is a failure.
const bootTries = 3

func bootSafely(ctx context.Context, k kernel, m machine, dir string, number int, files []guestFile, commands []command, out io.Writer) (*run, error) {
	for try := 1; ; try++ {
		r, err := bootOnce(ctx, k, m, dir, number, files, commands, out)
		if err != nil || !r.emulators(m) || try == bootTries || ctx.Err() != nil {
			return r, err
		}
		fmt.Fprintf(out, "# the kernel panicked before the guest's first word, or by an int3, as it does only in an emulator: start %d of %d\n", try+1, bootTries)
	}
}

// bootOnce is the number-th start of a guest.
func bootOnce(ctx context.Context, k kernel, m machine, dir string, number int, files []guestFile, commands []command, out io.Writer) (*run, error) {
	nonce := rand.Text()
	image, err := buildImage(k, nonce, m, number, files, commands)
	if err != nil {
		return nil, err
	}
	initrd := filepath.Join(dir, "initrd")
	if err := os.WriteFile(initrd, image, 0o600); err != nil {
		return nil, err
	}

	args := append(m.args(),
		"-cpu", "max", "-kernel", k.vmlinuz, "-initrd", initrd,
		// A panic or an oops ends the guest at once: it reboots, and -no-reboot.
		"-append", "console=ttyS0 quiet panic=-1 oops=panic mitigations=off random.trust_cpu=on systemd.show_status=error systemd.unit=guest.target",
		"-no-reboot", "-nodefaults", "-display", "none", "-monitor", "none")
	if m.disk != "" {
		// What is lost with the host's machine may be lost.
		args = append(args, "-drive", "file="+m.disk+",format=raw,if=none,id=disk,cache=unsafe", "-device", "virtio-blk-pci,drive=disk")
	}
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", args...)
	// qemu must not outlive us, however we end (see LockOSThread in main).
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Stderr = out

	r := newRun(nonce, commands, out)
	var readers sync.WaitGroup
	for i, port := range []func(string){r.console, r.output, r.report} {
		pr, pw, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		defer pr.Close()
		defer pw.Close()
		cmd.ExtraFiles = append(cmd.ExtraFiles, pw)
		cmd.Args = append(cmd.Args, "-serial", fmt.Sprintf("file:/dev/fd/%d", 3+i))
		readers.Add(1)
		go func() {
			defer readers.Done()
			readLines(pr, port)
		}()
	}
	err = cmd.Start()
	for _, pw := range cmd.ExtraFiles {
		pw.Close() // the readers end when qemu's own copies are closed
	}
	if err == nil {
		err = cmd.Wait()
	}
	readers.Wait()
	if errors.Is(err, exec.ErrNotFound) {
		return nil, fmt.Errorf("%w (install qemu-system-x86)", err)
	}
	if ctx.Err() != nil {
		err = ctx.Err()
		if errors.Is(err, context.DeadlineExceeded) {
			err = fmt.Errorf("not done after %v", m.timeout)
		}
	}
	r.ended = err
	return r, nil
}

// readLines calls f for each line until the end, without its line ending.
func readLines(r io.Reader, f func(string)) {
	br := bufio.NewReader(r)
	for {
		line, err := br.ReadString('\n')
		if line != "" {
			f(strings.TrimRight(line, "\r\n"))
		}
		if err != nil {
			return
		}
	}
}
