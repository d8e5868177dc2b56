// Package guest is the test of the virtual machine rig itself: it runs inside
// the guest and asserts what the rig promises to tests. Its tests have the
// build tag vm, because they are about the guest and not about the host.
package guest
