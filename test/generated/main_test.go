package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// source has a map, a program, and a context struct as headers define it.
const source = `
struct context { int a; FIELD };
struct {
	int (*type)[1];
	int (*key_size)[4];
	int (*value_size)[ENTRIES];
	int (*max_entries)[ENTRIES];
} counts __attribute__((section(".maps"), used));
__attribute__((section("cgroup/connect4"), used)) int connect4(struct context *c) { return c->a + CODE; }
`

// TestSameObject: a newer context struct is the same object, another map size
// or instruction is not.
func TestSameObject(t *testing.T) {
	base := compile(t, "", "8", "1")
	if err := sameObject(base, compile(t, "int added;", "8", "1")); err != nil {
		t.Errorf("a field more in the context: %v", err)
	}
	if err := sameObject(base, compile(t, "", "16", "1")); err == nil || !strings.Contains(err.Error(), "map counts") {
		t.Errorf("another map: %v", err)
	}
	if err := sameObject(base, compile(t, "", "8", "2")); err == nil || !strings.Contains(err.Error(), "connect4") {
		t.Errorf("another instruction: %v", err)
	}
}

// TestCompare: what is missing, new or different is named.
func TestCompare(t *testing.T) {
	got := compare(
		map[string][]byte{"a_bpfel.go": []byte("1"), "b_bpfel.go": []byte("1"), "c_bpfel.go": []byte("1")},
		map[string][]byte{"a_bpfel.go": []byte("1"), "b_bpfel.go": []byte("2"), "d_bpfel.go": []byte("1")})
	want := "b_bpfel.go: differs|c_bpfel.go: is not generated any more|d_bpfel.go: is not committed"
	if strings.Join(got, "|") != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func compile(t *testing.T, field, entries, code string) []byte {
	t.Helper()
	out := filepath.Join(t.TempDir(), "x.o")
	cmd := exec.Command("clang-19", "-O2", "-g", "-target", "bpf", "-DFIELD="+field, "-DENTRIES="+entries, "-DCODE="+code,
		"-x", "c", "-c", "-", "-o", out)
	cmd.Stdin = strings.NewReader(source)
	if msg, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, msg)
	}
	// As bpf2go does.
	if msg, err := exec.Command("llvm-strip-19", "-g", out).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, msg)
	}
	object, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return object
}
