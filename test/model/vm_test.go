//go:build vm

package model

import "time"

// In an emulated machine, ten times slower.
const (
	defaultDuration = 20 * time.Second
	defaultCycles   = 2_000
	defaultSteady   = time.Second
	patience        = 60 * time.Second
	replayPatience  = 10 * time.Second
)
