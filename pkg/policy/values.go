package policy

import (
	"fmt"
	"math/bits"
	"net/netip"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bmatcuk/doublestar/v4"
)

// The functions here read one notation each. They return an error without a
// place, which names the value and the cure.

// parsePrefix reads "10.0.0.0/8" or "fd00::/8" strictly: masked, with a length,
// without a zone. IPv4 in IPv6 (::ffff:10.0.0.0/104) is returned as IPv4: the
// kernel sees one address for both.
func parsePrefix(s string) (netip.Prefix, error) {
	if strings.Contains(s, "%") {
		return netip.Prefix{}, fmt.Errorf("%s has a zone; leave it out: addresses match in every zone", show(s))
	}
	if a, err := netip.ParseAddr(s); err == nil {
		a = a.Unmap()
		return netip.Prefix{}, fmt.Errorf("%s has no length; write \"%s/%d\"", show(s), a, a.BitLen())
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return p, fmt.Errorf("%s is not a prefix such as 10.0.0.0/24 or \"fd00:20::/64\"", show(s))
	}
	if p.Addr().Is4In6() && p.Bits() >= 96 {
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	if p != p.Masked() {
		return p, fmt.Errorf("%s has bits beyond its length; write %q or \"%s/%d\"", show(s), p.Masked(), p.Addr(), p.Addr().BitLen())
	}
	return p, nil
}

// The shortest prefixes that need no wide: true.
const (
	shortest4 = 8
	shortest6 = 16
)

func tooWide(p netip.Prefix) bool {
	if p.Addr().Is4() {
		return p.Bits() < shortest4
	}
	return p.Bits() < shortest6
}

var portRange = regexp.MustCompile(`^([1-9][0-9]{0,4})(?:-([1-9][0-9]{0,4}))?$`)

const wantPort = "a port from 1 to 65535 or a range such as \"8000-8010\""

func parsePorts(s string) (first, last uint16, err error) {
	m := portRange.FindStringSubmatch(s)
	if m == nil {
		return 0, 0, fmt.Errorf("%s is not %s", show(s), wantPort)
	}
	if m[2] == "" {
		m[2] = m[1]
	}
	a, errA := strconv.ParseUint(m[1], 10, 16)
	b, errB := strconv.ParseUint(m[2], 10, 16)
	switch {
	case errA != nil || errB != nil:
		return 0, 0, fmt.Errorf("%s is out of range; write %s", show(s), wantPort)
	case a > b:
		return 0, 0, fmt.Errorf("%s runs backwards; write \"%d-%d\"", show(s), b, a)
	}
	return uint16(a), uint16(b), nil
}

var hostLabel = regexp.MustCompile(`^[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?$`)

// parseHost reads a host name and returns it in lower case without a trailing
// dot: it is always looked up as it stands, never with a search domain.
func parseHost(s string) (string, error) {
	if strings.Contains(s, "*") {
		return "", fmt.Errorf("%s is a wildcard, which cannot be looked up; name each host", show(s))
	}
	if a, err := netip.ParseAddr(s); err == nil {
		return "", fmt.Errorf("%s is an address; write it under cidrs as \"%s/%d\"", show(s), a, a.BitLen())
	}
	if _, err := netip.ParsePrefix(s); err == nil {
		return "", fmt.Errorf("%s is a prefix; write it under cidrs", show(s))
	}
	if strings.ContainsAny(s, "/:") {
		return "", fmt.Errorf("%s is not a host name; write the name alone, and a port under ports", show(s))
	}
	host := strings.TrimSuffix(strings.ToLower(s), ".")
	labels := strings.Split(host, ".")
	last := labels[len(labels)-1]
	if len(host) > 253 || decimal.MatchString(last) || slices.ContainsFunc(labels, func(l string) bool { return !hostLabel.MatchString(l) }) {
		return "", fmt.Errorf("%s is not a host name", show(s))
	}
	return host, nil
}

// Memory limits, in bytes. Below the smallest nothing runs and everything is
// killed; the largest keeps sums in 64 bits.
const (
	minMemory = 1 << 20
	maxMemory = 1 << 50
)

const wantSize = "a size such as 512Mi or 2Gi (Ki, Mi, Gi, Ti), or max"

var size = regexp.MustCompile(`^(0|[1-9][0-9]{0,15})(Ki|Mi|Gi|Ti)$`)

// parseSize reads a number of bytes; 0 is "max".
func parseSize(s string) (uint64, error) {
	if s == "max" {
		return 0, nil
	}
	m := size.FindStringSubmatch(s)
	if m == nil {
		return 0, fmt.Errorf("%s is not %s", show(s), wantSize)
	}
	v, err := strconv.ParseUint(m[1], 10, 64)
	unit := uint64(1) << (10 * (1 + strings.Index("KMGT", m[2][:1])))
	over, bytes := bits.Mul64(v, unit)
	if err != nil || over != 0 || bytes < minMemory || bytes > maxMemory {
		return 0, fmt.Errorf("%s is out of range; write a size from 1Mi to 1024Ti, or max", show(s))
	}
	return bytes, nil
}

// maxPids is the most that pids.max takes: PID_MAX_LIMIT of a 64-bit kernel
// (include/linux/threads.h).
const maxPids = 4_194_304

// cpu.max: kernel/sched/core.c refuses a quota or period below 1 ms and a period
// above 1 s (min_cfs_quota_period, max_cfs_quota_period). systemd keeps whole
// percents, so the language has no others. 8192 CPUs are the most that any
// kernel configuration of Linux names.
const (
	minQuotaUsec   = 1_000
	minPeriod      = time.Millisecond
	maxPeriod      = time.Second
	cpuPeriodUsec  = 100_000 // the kernel's default
	maxCPUPercent  = 819_200
	wantCPUPercent = "a share of one CPU from 1% to 819200% (150% is one and a half CPUs), or max"
)

var percent = regexp.MustCompile(`^([1-9][0-9]{0,8})%$`)

// parseCPUPercent reads the quota of cpu.max; 0 is "max".
func parseCPUPercent(s string) (uint64, error) {
	if s == "max" {
		return 0, nil
	}
	return parsePercent(s, maxCPUPercent, wantCPUPercent)
}

// parsePercent reads "50%", from 1% up to most.
func parsePercent(s string, most uint64, want string) (uint64, error) {
	m := percent.FindStringSubmatch(s)
	if m == nil {
		return 0, fmt.Errorf("%s is not %s", show(s), want)
	}
	v, err := strconv.ParseUint(m[1], 10, 64)
	if err != nil || v > most {
		return 0, fmt.Errorf("%s is out of range; write %s", show(s), want)
	}
	return v, nil
}

// wantUclamp is of both: a CPU that is clamped to nothing could not run at all.
const wantUclamp = "a share of the largest CPU at its highest frequency from 1% to 100%"

func parseUclamp(s string) (uint64, error) { return parsePercent(s, 100, wantUclamp) }

// maxBurst is the largest quota of the longest period.
const maxBurst = maxCPUPercent / 100 * maxPeriod

// What may stand for the period of cpu.max, its burst, and for idle.
const (
	wantBurst  = "a time from 1ms up to the quota of a period, such as 50ms"
	wantPeriod = "a time from 1ms to 1s, such as 100ms"
	wantIdle   = "a time from 1s to 24h in whole seconds, such as 30s, 2m or 1h30m"
)

// Whole numbers, each with its unit, the largest unit first. Six digits of each
// are far beyond every range here and far within a time.Duration.
var (
	timeLike = regexp.MustCompile(`^-?(?:(?:0|[1-9][0-9]{0,5})h)?(?:(?:0|[1-9][0-9]{0,5})m)?(?:(?:0|[1-9][0-9]{0,5})s)?(?:(?:0|[1-9][0-9]{0,5})ms)?$`)
	unitless = regexp.MustCompile(`^[-+]?[0-9](.*[0-9])?$`)
)

// parseTime reads "100ms" or "1h30m", from least to most, in whole numbers of
// least. 0 needs no unit to be out of range.
func parseTime(s, want string, least, most time.Duration) (time.Duration, error) {
	like := s == "0" || timeLike.MatchString(s)
	d, err := time.ParseDuration(s)
	switch {
	case !like && unitless.MatchString(s):
		return 0, fmt.Errorf("%s is missing its unit; write %s", show(s), want)
	case !like || err != nil:
		return 0, fmt.Errorf("%s is not %s", show(s), want)
	case d < least || d > most:
		return 0, fmt.Errorf("%s is out of range; write %s", show(s), want)
	case d%least != 0:
		return 0, fmt.Errorf("%s is not %s", show(s), want)
	}
	return d, nil
}

// isGlob is true of a pattern that can match more than the text itself.
func isGlob(s string) bool { return strings.ContainsAny(s, `*?[{\`) }

func checkGlob(s string) error {
	if !doublestar.ValidatePattern(s) {
		return fmt.Errorf("%s is not a glob: a bracket, a brace or a backslash is not closed", show(s))
	}
	return nil
}

// unitTypes are the kinds of systemd unit that have processes of their own or
// below them (systemd.unit(5), org.freedesktop.systemd1(5)).
var unitTypes = []string{".service", ".scope", ".slice", ".socket", ".mount", ".swap"}

// checkUnit checks a glob over the full names of units. A name without its type
// would silently match nothing.
func checkUnit(s string) error {
	switch {
	case strings.ContainsAny(s, "/ \t\r\n"):
		return fmt.Errorf("%s is not a unit: a unit has neither / nor spaces", show(s))
	case len(s) > 255:
		return fmt.Errorf("%s is not a unit: a unit has at most 255 characters", show(s))
	}
	if err := checkGlob(s); err != nil {
		return err
	}
	if strings.ContainsAny(s[len(s)-1:], "*?]}") {
		return nil
	}
	for _, t := range unitTypes {
		if strings.HasSuffix(s, t) && s != t {
			return nil
		}
	}
	return fmt.Errorf("%s has no unit type; write %q", show(s), s+".service")
}

// checkCgroup checks a path below the cgroup root.
func checkCgroup(s string) error {
	switch {
	case !strings.HasPrefix(s, "/"):
		return fmt.Errorf("%s does not start with /; write the path below the cgroup root, as in /proc/PID/cgroup", show(s))
	case s == "/":
		return fmt.Errorf("\"/\" is the whole machine; processes in the root cgroup are never refused")
	case strings.HasPrefix(s, "/sys/fs/cgroup"):
		return fmt.Errorf("%s has the mount point in it; write the path below the cgroup root, as in /proc/PID/cgroup", show(s))
	case path.Clean(s) != s:
		return fmt.Errorf("%s is not clean; write %q", show(s), path.Clean(s))
	}
	return nil
}

// checkPathGlob checks a glob over full paths.
func checkPathGlob(s string) error {
	if !strings.ContainsAny(s[:1], "/*{") {
		return fmt.Errorf("%s is compared with the full path and would match nothing; write %q", show(s), "**/"+s)
	}
	return checkGlob(s)
}

var userName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.-]{0,30}\$?$`)
