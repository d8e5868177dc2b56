package house

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

// Tests that skip where cgroup v2 has no controllers run in make test nevertheless: in the virtual machine.
func TestControllers(t *testing.T) {
	makefile, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	listed := regexp.MustCompile(`(?m)^VM_CONTROLLERS +:= (.*)\$\$$`).FindSubmatch(makefile)
	if listed == nil {
		t.Fatal("the Makefile has no VM_CONTROLLERS")
	}
	runs := regexp.MustCompile(string(listed[1]) + "$")
	files, err := filepath.Glob("../e2e/*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range regexp.MustCompile(`(?ms)^func (Test\w+)\(.*?^}`).FindAllSubmatch(text, -1) {
			if !regexp.MustCompile(`\.(needControllers|missing)\(`).Match(f[0]) {
				continue
			}
			found++
			if !runs.Match(f[1]) {
				t.Errorf("%s of %s wants controllers, and is not in the Makefile's VM_CONTROLLERS", f[1], filepath.Base(file))
			}
		}
	}
	if found == 0 {
		t.Error("no test wants controllers")
	}
}
