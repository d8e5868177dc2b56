// Package systemd tests bulkhead on hosts that systemd runs: installed Debians in virtual
// machines, with the slices, scopes and properties of a real systemd.
//
// Its tests have the build tag vm and run only in the guest of test/vm:
//
//	make build
//	go run ./test/vm -system all -boots 2 -file bin/bulkhead:/bin/bulkhead ./test/systemd
//
// What is claimed to be in force is read from the files of the cgroup and never from a
// property, and while the agent is stopped, so that it is systemd that keeps it. The
// second boot is for what has to be there after a reboot.
package systemd
