package model

import (
	"flag"
	"os"
	"testing"
	"time"

	"bulkhead/internal/kerneltest"
)

var (
	seedFlag     = flag.Uint64("seed", 0, "of the random operations; 0 is a new one")
	durationFlag = flag.Duration("duration", defaultDuration, "how long random operations go on")
	workersFlag  = flag.Int("workers", 7, "processes that do them")
	shrinkFlag   = flag.Duration("shrink", 2*time.Minute, "how long a sequence that fails is made shorter")
	cyclesFlag   = flag.Int("cycles", defaultCycles, "connections of the churn")
	steadyFlag   = flag.Duration("steady", defaultSteady, "how long the rate and the flood go on")
)

func TestMain(m *testing.M) {
	switch os.Getenv(roleVar) {
	case roleWorker:
		os.Exit(workerMain())
	case roleCopy:
		os.Exit(copyMain())
	case roleMany:
		os.Exit(manyMain())
	case roleChurn:
		os.Exit(churnMain())
	}
	os.Exit(kerneltest.Main(m))
}
