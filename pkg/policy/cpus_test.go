package policy

import (
	"slices"
	"testing"
)

// Sets of CPUs do what sets do, and read and write as the kernel does.
func TestCPUSet(t *testing.T) {
	parse := func(s string) CPUSet {
		set, err := ParseCPUs(s)
		if err != nil {
			t.Fatal(err)
		}
		return set
	}
	for _, c := range []struct {
		got  CPUSet
		want string
	}{
		{parse(""), ""}, {parse("0"), "0"}, {parse("0-1"), "0-1"}, {parse("3,0-1,1"), "0-1,3"}, {parse("8191"), "8191"},
		{parse("0-7").Minus(parse("0,3-4")), "1-2,5-7"}, {parse("0-7").Minus(nil), "0-7"}, {parse("1").Minus(parse("0-9")), ""},
		{parse("0-3").Both(parse("2-9")), "2-3"}, {parse("0-3").Both(nil), ""}, {parse("0,4").Or(parse("1,4")), "0-1,4"},
		{(&CPU{}).On(parse("0-3")), "0-3"}, {(&CPU{CPUs: "2,9"}).On(parse("0-3")), "2,9"}, {(&CPU{CPUs: "not 0,9"}).On(parse("0-3")), "1-3"},
	} {
		if got := c.got.String(); got != c.want || !slices.Equal(parse(c.want), c.got) {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
	for _, s := range []string{"0-", "-1", "0,", " 0", "0x1", "1:2", "0-8192", "00", "+1", "0-3/2"} {
		if set, err := ParseCPUs(s); err == nil {
			t.Errorf("%q was read as %v", s, set)
		}
	}
}
