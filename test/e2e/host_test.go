//go:build !vm

package e2e

import "time"

// killTime bounds the rounds of killing an agent, on a machine that is slow for once.
const killTime = 4 * time.Minute
