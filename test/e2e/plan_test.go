package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// check says everything at once, and needs neither root nor a node.
func TestCheck(t *testing.T) {
	n := newNode(t)
	n.write(wrong)
	r := n.wantRun(1, nil, "check", n.policy)
	wantPlaces(t, r.stderr)
	if r.stdout != "" {
		t.Errorf("errors belong on stderr; stdout:\n%s", r.stdout)
	}
	r = n.run("check", "-o", "json", n.policy)
	wantPlaces(t, r.stderr)
	if r.code != 1 || r.stdout != "" {
		t.Errorf("check -o json of a wrong policy: %s", r)
	}

	n.write(everything)
	nobody := n.asNobody("check", n.policy)
	if nobody.code != 0 {
		t.Errorf("check without root: %s", nobody)
	}
	var plan struct {
		Hash         string           `json:"hash"`
		Mode         string           `json:"mode"`
		Compartments []map[string]any `json:"compartments"`
		Bulkheads    []map[string]any `json:"bulkheads"`
		Routes       []map[string]any `json:"routes"`
	}
	out := n.must("check", "-o", "json", n.policy)
	if err := json.Unmarshal([]byte(out), &plan); err != nil {
		t.Fatalf("check -o json: %v\n%s", err, out)
	}
	// default, and each feature without and with each tenant; other and each provider.
	if plan.Mode != "enforce" || len(plan.Compartments) != 1+2*3 || len(plan.Bulkheads) != 11 || len(plan.Routes) != 7*3 {
		t.Errorf("mode %s, %d compartments, %d bulkheads, %d routes", plan.Mode, len(plan.Compartments), len(plan.Bulkheads), len(plan.Routes))
	}
	if again := n.must("check", "-o", "json", n.policy); again != out {
		t.Error("the same policy gave two plans")
	}
	n.start()
	if hash := n.status().PolicyHash; hash != plan.Hash {
		t.Errorf("hash in force %s, of the plan %s", hash, plan.Hash)
	}

	// What is legal and unwise is said, and is no error.
	n.write(strings.Replace(everything, "connections: 100", "connections: 1", 1))
	n.wantRun(0, []string{"policy.yaml:26:", "warning: ", "serial queue"}, "check", n.policy)

	n.wantRun(1, []string{"no-such-file"}, "check", filepath.Join(n.dir, "no-such-file"))
}

// asNobody runs bulkhead without any right.
func (n *node) asNobody(args ...string) result {
	n.t.Helper()
	u, err := user.Lookup("nobody")
	if err != nil {
		n.t.Fatal(err)
	}
	uid, err1 := strconv.Atoi(u.Uid)
	gid, err2 := strconv.Atoi(u.Gid)
	if err1 != nil || err2 != nil {
		n.t.Fatal(err1, err2)
	}
	// Where it is built nobody else may be able to go.
	binary := filepath.Join(n.dir, "bulkhead")
	if _, err := os.Stat(binary); err != nil {
		if err := copyFile(binary, os.Getenv(binaryVar)); err != nil {
			n.t.Fatal(err)
		}
	}
	cmd := exec.Command(binary, n.args(args...)[1:]...)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	return run(n.t, cmd)
}

// plan says what would change, with live counts, by its exit code too, and changes nothing.
func TestPlan(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	before := n.state()
	n.write(shares)
	r := n.run("plan", n.policy)
	wantResult(t, r, 2)
	wantWords(t, r.stdout, "nothing is in force", "feature_provider batch/deepseek")
	n.wantState(before)
	n.wantDetached()

	n.start()
	n.wantRun(0, nil, "plan", n.policy)
	dials(t, n.client("batch"), n.addr(1), 12, 0)
	adopt := n.Mkdir("apps/chat")
	n.place(adopt)
	before = n.state()
	generation := n.status().Generation

	next := filepath.Join(n.dir, "next.yaml")
	n.save(next, strings.NewReplacer("connections: 12", "connections: 5", "qwen:", "zhipu:",
		"chat:  {class: realtime", "chat: {class: timely, match: [{cgroup: /apps/*}]").Replace(shares))
	r = n.run("plan", next)
	wantResult(t, r, 2)
	wantWords(t, r.stdout, "feature_provider batch/deepseek: 12 -> 5", "12 in use now", "qwen", "zhipu", "realtime", "timely", "/apps/chat")

	var doc struct {
		InForce string `json:"policy_hash_in_force"`
		Hash    string `json:"policy_hash"`
		Changes []struct {
			Kind, What, Name, Old, New, Note string
			InUse                            *int `json:"in_use"`
		} `json:"changes"`
		Adopt []struct {
			Path, Feature, Tenant string
			Processes             int
		} `json:"adopt"`
		Release []any `json:"release"`
	}
	r = n.run("plan", "-o", "json", next)
	wantResult(t, r, 2)
	if err := json.Unmarshal([]byte(r.stdout), &doc); err != nil {
		t.Fatalf("plan -o json: %v\n%s", err, r.stdout)
	}
	found := false
	for _, c := range doc.Changes {
		if c.Name == "feature_provider batch/deepseek" {
			found = c.What == "limit" && c.Old == "12" && c.New == "5" && c.InUse != nil && *c.InUse == 12
		}
	}
	if !found || doc.InForce != n.status().PolicyHash || doc.Hash == doc.InForce {
		t.Errorf("plan -o json: %s", r.stdout)
	}
	if fmt.Sprint(doc.Adopt) != "[{/apps/chat chat  1}]" || len(doc.Release) != 0 {
		t.Errorf("adopt %v, release %v", doc.Adopt, doc.Release)
	}

	n.save(next, wrong)
	r = n.run("plan", next)
	wantResult(t, r, 1)
	wantPlaces(t, r.stderr)
	n.wantState(before)
	if g := n.status().Generation; g != generation {
		t.Errorf("generation %d, want %d", g, generation)
	}
}

// A directory of policies is one policy, whose files must not contradict one another.
func TestPolicyDirectory(t *testing.T) {
	n := newNode(t)
	n.serve(1)
	n.policy = filepath.Join(n.dir, "policies")
	put := func(name, text string) {
		t.Helper()
		n.save(filepath.Join(n.policy, name), text)
	}
	if err := os.Mkdir(n.policy, 0o755); err != nil {
		t.Fatal(err)
	}
	const head = "apiVersion: bulkhead/v1\nkind: Policy\n"
	put("10-node.yaml", head+"mode: enforce\nproviders:\n  deepseek: {cidrs: [@1/32], ports: [8000]}\n")
	put("20-chat.yaml", head+"features:\n  chat: {class: realtime, limits: {connections: 2}}\n")
	put("notes.txt", "not a policy")
	n.start()
	client := n.client("chat")
	dials(t, client, n.addr(1), 2, 0)
	wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))

	put("30-batch.yaml", head+"features:\n  chat: {class: batch}\n")
	n.wantRun(1, []string{"30-batch.yaml:4:3: ", "20-chat.yaml:4:3"}, "reload")
	put("30-batch.yaml", head+"features:\n  batch: {class: batch}\n")
	n.must("reload")
	n.exec("batch", "true")
	wantDial(t, client, syscall.ECONNREFUSED, n.addr(1))
}
