package policy

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// CPUSet are CPUs by number, in ascending order and each once.
type CPUSet []int

// maxCPU is the largest number that a policy may name: 8192 CPUs are the most that any
// kernel configuration of Linux has.
const maxCPU = 8191

var cpuRange = regexp.MustCompile(`^(0|[1-9][0-9]{0,3})(?:-(0|[1-9][0-9]{0,3}))?$`)

// ParseCPUs reads a list as the kernel writes it: "0-3,6". The kernel's empty list is no
// CPU.
func ParseCPUs(s string) (CPUSet, error) {
	var set CPUSet
	if s == "" {
		return set, nil
	}
	for _, part := range strings.Split(s, ",") {
		m := cpuRange.FindStringSubmatch(part)
		if m == nil {
			return nil, fmt.Errorf("%s is not %s", show(s), wantCPUs)
		}
		if m[2] == "" {
			m[2] = m[1]
		}
		first, err1 := strconv.Atoi(m[1])
		last, err2 := strconv.Atoi(m[2])
		switch {
		case err1 != nil || err2 != nil || last > maxCPU:
			return nil, fmt.Errorf("%s is out of range; write numbers from 0 to %d", show(s), maxCPU)
		case first > last:
			return nil, fmt.Errorf("%s runs backwards; write \"%d-%d\"", show(part), last, first)
		}
		for n := first; n <= last; n++ {
			set = append(set, n)
		}
	}
	slices.Sort(set)
	return slices.Compact(set), nil
}

// Minus are those of s that are not in other.
func (s CPUSet) Minus(other CPUSet) CPUSet {
	var left CPUSet
	for _, n := range s {
		if _, in := slices.BinarySearch(other, n); !in {
			left = append(left, n)
		}
	}
	return left
}

// Both are those that are in s and in other.
func (s CPUSet) Both(other CPUSet) CPUSet { return s.Minus(s.Minus(other)) }

// Or are those that are in s or in other.
func (s CPUSet) Or(other CPUSet) CPUSet {
	all := slices.Concat(s, other)
	slices.Sort(all)
	return slices.Compact(all)
}

// String is the list as the kernel writes it.
func (s CPUSet) String() string {
	var parts []string
	for i := 0; i < len(s); {
		last := i
		for last+1 < len(s) && s[last+1] == s[last]+1 {
			last++
		}
		part := strconv.Itoa(s[i])
		if last > i {
			part += "-" + strconv.Itoa(s[last])
		}
		parts, i = append(parts, part), last+1
	}
	return strings.Join(parts, ",")
}

const (
	wantCPUs = "a list of CPUs such as \"0-3,6\", or \"not 0\" for all but those"
	// allBut begins what a policy says of CPUs that a feature may not use: nodes have
	// different numbers of them, and the same first ones.
	allBut = "not "
)

// parseCPUs reads what a policy may say of CPUs, and gives it in one form.
func parseCPUs(s string) (string, error) {
	list, not := strings.CutPrefix(s, allBut)
	set, err := ParseCPUs(list)
	if err == nil && len(set) == 0 {
		err = fmt.Errorf("%s is not %s", show(s), wantCPUs)
	}
	if err != nil {
		return "", err
	}
	if not {
		return allBut + set.String(), nil
	}
	return set.String(), nil
}

// On are the CPUs that CPU.CPUs means on a node that has all of those given.
func (c *CPU) On(all CPUSet) CPUSet {
	list, not := strings.CutPrefix(c.CPUs, allBut)
	set, err := ParseCPUs(list)
	switch {
	case c.CPUs == "" || err != nil: // a Plan has no other than parseCPUs gives
		return all
	case not:
		return all.Minus(set)
	}
	return set
}
