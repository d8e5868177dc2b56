//go:build vm

package e2e

import "time"

// killTime bounds the rounds of killing an agent where ten times less is done in a time.
const killTime = time.Minute
