package upgrade

import (
	"fmt"
	"os"
	"testing"

	"bulkhead/internal/kerneltest"
)

// binariesVar is the directory of the releases.
const binariesVar = "BULKHEAD_UPGRADE_BINARIES"

func TestMain(m *testing.M) { os.Exit(runTests(m)) }

func runTests(m *testing.M) int {
	if os.Getenv(binariesVar) == "" {
		dir, err := os.MkdirTemp("", "bulkhead-upgrade-")
		if err == nil {
			defer os.RemoveAll(dir)
			err = buildAll(dir)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "build the releases:", err)
			return 1
		}
		os.Setenv(binariesVar, dir)
	}
	return kerneltest.Main(m)
}
