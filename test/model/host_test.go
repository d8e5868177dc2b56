//go:build !vm

package model

import "time"

// On this machine.
const (
	defaultDuration = time.Minute
	defaultCycles   = 20_000
	defaultSteady   = 3 * time.Second
	patience        = 10 * time.Second // until what must become true has
	replayPatience  = 2 * time.Second
)
