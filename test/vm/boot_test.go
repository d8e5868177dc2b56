//go:build vm

package main

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"
)

// TestFailsLoudly boots guests that go wrong in every way that we know, and
// one that does not.
func TestFailsLoudly(t *testing.T) {
	cache, err := cacheDir()
	if err != nil {
		t.Fatal(err)
	}
	k, err := getKernel(t.Context(), cache, releases()[0], false, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	sh := func(line string) []command { return []command{{args: []string{"sh", "-c", line}}} }
	for _, c := range []struct {
		name     string
		commands []command
		timeout  time.Duration
		want     error
		says     string
	}{
		{name: "good", commands: sh("echo it works")},
		{name: "exit code", commands: sh("exit 7"), want: errCommand, says: "exit code 7"},
		{name: "panic", commands: sh("echo c >/proc/sysrq-trigger"), want: errPanic, says: "sysrq"},
		{name: "power off", commands: sh("echo it begins; poweroff -f"), want: errNoReport, says: "the end of sh"},
		{name: "forged report", commands: sh("echo x exit 0 0 >/dev/ttyS2; echo x done >/dev/ttyS2; poweroff -f"), want: errNoReport, says: "the end of sh"},
		{name: "timeout", commands: sh("sleep 1000"), timeout: 6 * time.Second, want: errNoReport, says: "not done after 6s"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := machine{cpus: 1, memoryMiB: 512, timeout: 2 * time.Minute}
			if c.timeout != 0 {
				m.timeout = c.timeout
			}
			r, err := boot(t.Context(), k, m, nil, c.commands, t.Output())
			if err != nil {
				t.Fatal(err)
			}
			err = r.err()
			if !errors.Is(err, c.want) || (err == nil) != (c.want == nil) || err != nil && !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v, want %v saying %q", err, c.want, c.says)
			}
		})
	}
}

// TestInterrupted: an end from outside is not a success either.
func TestInterrupted(t *testing.T) {
	cache, err := cacheDir()
	if err != nil {
		t.Fatal(err)
	}
	k, err := getKernel(t.Context(), cache, releases()[0], false, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r, err := boot(ctx, k, machine{cpus: 1, memoryMiB: 512, timeout: time.Minute}, nil, []command{{args: []string{"true"}}}, t.Output())
	if err == nil {
		err = r.err()
	}
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want %v", err, context.Canceled)
	}
}
