package cgroup

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"bulkhead/pkg/policy"
)

func walkOf(paths ...string) []Cgroup {
	out := []Cgroup{{Path: "/", ID: 1}}
	for i, p := range paths {
		out = append(out, Cgroup{Path: p, ID: uint64(100 + i), Level: strings.Count(p, "/")})
	}
	return out
}

func TestAdopt(t *testing.T) {
	all := walkOf(
		"/bulkhead.slice", "/bulkhead.slice/bulkhead-chat.slice",
		"/kubepods.slice", "/kubepods.slice/burst", "/kubepods.slice/burst/pod1", "/kubepods.slice/burst/pod1/c1",
		"/kubepods.slice/pod2", "/kubepods.slice/pod2/c2",
		"/system.slice", "/system.slice/chat.service", "/system.slice/chat.service/sub",
		"/system.slice/foo\\x2dbar.service",
	)
	p := plan(policy.Enforce, []string{"free"},
		feature("chat", nil, nil,
			policy.Match{Cgroup: "/system.slice/chat.service"},
			policy.Match{Cgroup: "/kubepods.slice/**/pod1", Tenant: "free"},
			policy.Match{Cgroup: `/system.slice/foo\x2dbar.service`}),
		feature("batch", nil, nil,
			policy.Match{Cgroup: "/kubepods.slice/**"},
			policy.Match{Cgroup: "/system.slice/*"},
			policy.Match{Cgroup: "/bulkhead.slice/**"},
			policy.Match{Cgroup: "/**/sub", User: "root"},
			policy.Match{Unit: "chat.service"}))
	var got []string
	for _, a := range Adopt(p, all, nil) {
		c := p.Compartments[a.Compartment]
		got = append(got, fmt.Sprintf("%s=%s/%s", a.Path, c.Feature, c.Tenant))
		if a.Path != all[a.ID-99].Path || a.Level != strings.Count(a.Path, "/") {
			t.Errorf("%+v", a)
		}
	}
	want := []string{
		"/kubepods.slice=batch/",
		"/kubepods.slice/burst/pod1=chat/free", // deeper, other compartment
		"/kubepods.slice/burst/pod1/c1=batch/", // inside chat's, batch again
		"/system.slice/chat.service=chat/",     // the first item in file order
		"/system.slice/foo\\x2dbar.service=chat/",
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}

	// Protection wins over every glob, at the cgroup and below.
	wide := plan(policy.Enforce, nil, feature("batch", nil, nil, policy.Match{Cgroup: "/system.slice/*/**"}))
	wide.Protect = []string{"chat.service"}
	if a := Adopt(wide, all, nil); len(a) != 1 || a[0].Path != all[12].Path {
		t.Errorf("with chat.service protected: %+v", a)
	}

	// A unit's name is that of a directory wherever it is, and nothing else is a unit.
	units := plan(policy.Enforce, nil, feature("chat", nil, nil, policy.Match{Unit: "chat.service"}),
		feature("batch", nil, nil, policy.Match{Unit: "*", Cgroup: "/kube*"}), feature("rest", nil, nil, policy.Match{Unit: "*[cd]*"}))
	got = nil
	for _, a := range Adopt(units, all, nil) {
		got = append(got, a.Path+"="+units.Compartments[a.Compartment].Feature)
	}
	if want := []string{"/kubepods.slice=batch", "/system.slice=rest", "/system.slice/chat.service=chat"}; !reflect.DeepEqual(got, want) {
		t.Errorf("by unit: %q, want %q", got, want)
	}

	before, after := Adopt(p, all[:11], nil), Adopt(p, all[6:], nil)
	appeared, gone := Diff(before, after)
	if len(appeared) != 2 || appeared[1].Path != all[12].Path || len(gone) != 2 || gone[0].Path != "/kubepods.slice" {
		t.Errorf("appeared %+v\ngone %+v", appeared, gone)
	}
	again := append([]Adopted(nil), after...)
	again[0].ID++ // removed and made anew
	if appeared, gone := Diff(after, again); len(appeared) != 1 || len(gone) != 1 {
		t.Errorf("appeared %+v, gone %+v", appeared, gone)
	}
	if c := Adopt(plan(policy.Enforce, nil, feature("chat", nil, nil, policy.Match{Cgroup: "/**"})), walkOf(), nil); len(c) != 0 {
		t.Errorf("the root was adopted: %+v", c)
	}
}

func TestProtected(t *testing.T) {
	all := walkOf(
		"/init.scope", "/kubepods.slice", "/kubepods.slice/pod", "/kubepods.slice/pod/ssh.service",
		"/system.slice", "/system.slice/ssh.service", "/system.slice/ssh.service/sub", "/system.slice/sshx.service",
		"/system.slice/system-foo.slice", "/system.slice/system-foo.slice/foo@1.service", "/system.slice/a\\x2db.service",
		"/user.slice", "/user.slice/user-1000.slice", "/user.slice/user-1000.slice/s.scope")
	p := &policy.Plan{Protect: []string{"/user.slice", "/kube*/pod/*", `a\x2db.service`, "foo@*.service", "init.scope", "ssh.service"}}
	var got []string
	for _, c := range Protected(p, all) {
		got = append(got, c.Path)
	}
	want := []string{"/init.scope", "/kubepods.slice/pod/ssh.service", "/system.slice/ssh.service",
		"/system.slice/system-foo.slice/foo@1.service", "/system.slice/a\\x2db.service", "/user.slice"}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	if got := Protected(&policy.Plan{Protect: []string{"/"}}, all); len(got) != 1 || got[0].Path != "/" {
		t.Errorf("%+v", got)
	}
}
