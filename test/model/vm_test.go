//go:build vm

package model

import "time"

// In an emulated machine, ten times slower.
const (
	defaultDuration = 30 * time.Second
	defaultCycles   = 4_000
	patience        = 60 * time.Second
	replayPatience  = 10 * time.Second
)
