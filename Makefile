# make help lists the targets. Everything but deps runs from Go, git and make
# plus what deps installs; what needs root is run through sudo if you are not.

# Packages of Debian 12 and 13. Clang's version is pinned because the generated
# objects are committed and compared; both releases have this one.
CLANG_VERSION   := 19
DEPS_GENERATE   := clang-$(CLANG_VERSION) llvm-$(CLANG_VERSION) libbpf-dev linux-libc-dev
DEPS_VM         := qemu-system-x86 busybox-static xz-utils zstd mmdebstrap e2fsprogs
DEPS_TEST       := bpftool curl iproute2 postgresql python3
# What the benchmark compares with; a row of what is not installed is left out.
DEPS_BENCH      := wrk iptables nftables
DEPS            := $(DEPS_GENERATE) $(DEPS_VM) $(DEPS_TEST)

# Go packages by ring. What is listed under VM runs on the other kernels too;
# what measures CPU latency runs there in virtual time, on one CPU.
UNIT_PACKAGES    := ./pkg/policy ./internal/metrics ./internal/containers ./test/generated ./test/house ./test/vm ./test/bench
KERNEL_PACKAGES  := ./pkg/conn ./test/model ./pkg/cgroup ./internal/agent ./internal/demo ./internal/sockets ./internal/procevents ./cmd/agent ./test/e2e ./test/upgrade
VM_PACKAGES      := ./test/vm/guest ./pkg/conn ./test/model ./pkg/cgroup ./internal/sockets
# These wait for answers: one machine at a time.
VM_ALONE         := ./test/e2e
VIRTUAL_PACKAGES := ./test/cpu
# These run on installed Debians with systemd, started twice. One processor each: with two,
# what the emulator makes of code that the kernel patches has crashed it (text_poke).
SYSTEM_PACKAGES  := ./test/systemd
# In make test, which has to end, the two share most tests out, and programs of systemd's own beside ours, of which pkg/conn
# tests the kernel's part, are left to vm-all. That runs all on both.
SYSTEM_SHARES    := -skip TestSystemdsPrograms \
	-only '12:^(TestContainers|TestAdoptedUnitRestarts|TestValues|TestDetachInhabited)$$' \
	-only '13:^(TestUnits|TestUnitBurst|TestForeignChange|TestDisabledControllers|TestLooseProcesses|TestExec)$$'
# make test runs all on the newest kernel but the model, which is in ring 2, and on the others what they decide most;
# vm-all runs everything on all, for an hour, before a release.
VM_HEART         := ^(TestAdmission|TestSlotLife|TestReconcile|TestAdopt|TestNeighbours|TestWithoutErrno|TestUDPHooks)$$
# Of test/e2e those that want controllers of cgroup v2, which the machine at hand may not have: the others are in ring 2, and
# all on all kernels in vm-all.
VM_CONTROLLERS   := ^(TestCPU|TestContainer.*|TestMemoryBelowUse|TestObserveCPU|TestOwnCPUs|TestScheduling|TestValuesPutBack)$$
# What takes long in an emulated machine and is decided by our code or by tools and not by
# the kernel, is left to ring 2: names, plans, sizes, pins, files. The kernel's part of each
# is in what is not left out.
VM_SKIP          := ^(TestMatching|TestCompartments|TestMaxSlots|TestFlips|TestSuccession.*|TestAdoptBusy|TestNoSuccession|TestTwoInstances|TestForeignPins|TestInterruptedStart|TestOnlyOneAgent|TestLockBesideHolder|TestWrongPlaces|TestClients|TestNeighbourFlags|TestNeighboursStay|TestExclusiveNeighbourIsNamed|TestUnreadPrograms|TestKilledUnderLoad|TestKilledFirstStart|TestTwoAgentsAtOnce|TestDetachUnderLoad|TestReloadUnderLoad|TestPins.*|TestPrivateBPFFS|TestDetachMany|TestExec.*|TestPlan|TestPolicyDirectory|TestConfigMap|TestHalfWritten|TestBadReload|TestBadStart|TestRefusals.*|TestNoRoom.*|TestStatus.*|TestMetricNames|TestVersionAndWrongUse|TestCheck|TestUnbuilt|TestSecondAgent|TestProtect|TestObserve|TestExplainFrom|TestLeak|TestKilledAtAnyMoment|TestDetachInhabited|TestDetachOtherSocket|TestBadEnvironment|TestNoRoot|TestFailedTakeOver|TestSlicesTakenBack|TestReload|TestStoppedAgent|TestRealPrograms)$$|^TestSlotLife$$/^as_guests$$

# Arguments of the rig, for one kernel say: make vm VM_FLAGS='-kernel 6.12 -run Admit'
VM_FLAGS        := -timeout 25m
VIRTUAL_FLAGS   := -timeout 20m -jobs 2
SYSTEM_FLAGS    := -timeout 20m -jobs 2

# Of make soak: random operations for so long, and so many connections.
SOAK_DURATION   := 1h
SOAK_CYCLES     := 1000000

STATICCHECK     := honnef.co/go/tools/cmd/staticcheck@v0.8.2

# Distributions may set this to local; go.mod names the Go that we need.
export GOTOOLCHAIN ?= auto
# Compiler flags of the kernel programs, read by go generate. The multiarch
# directory holds asm/types.h, which -target bpf does not look for.
export BPF_CFLAGS ?= -O2 -g -Wall -Werror -mcpu=v3 -I/usr/include/$(shell uname -m)-linux-gnu

AS_ROOT         := $(if $(filter 0,$(shell id -u)),,sudo)
# Tests are built as you and run as root.
EXEC_AS_ROOT    := $(if $(AS_ROOT),-exec 'sudo -E')

# The rings share this machine, and test is in order of cost.
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help deps deps-bench go-version root build generate generate-check vet lint unit kernel vm vm-all systems vm-kernels-refresh soak mutants test demo demo-vm bench-build bench bench-check clean

# The tests start PostgreSQL themselves: where its package is not installed yet, it
# is told to make and start no cluster. Somebody's own setting stays.
NO_CLUSTER      := [ -e /etc/postgresql-common/createcluster.conf ] || { \
		$(AS_ROOT) mkdir -p /etc/postgresql-common && \
		echo 'create_main_cluster = false' | $(AS_ROOT) tee /etc/postgresql-common/createcluster.conf >/dev/null; }

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

deps: PACKAGES := $(DEPS)
deps: ## install the Debian packages that are missing
deps-bench: PACKAGES := $(DEPS_BENCH)
deps-bench: ## install those that make bench compares with
deps deps-bench:
	@command -v dpkg-query >/dev/null || { echo "not a Debian machine: install the equivalents of $(PACKAGES)" >&2; exit 1; }; \
	missing=$$(for p in $(PACKAGES); do \
		dpkg-query -W -f '$${db:Status-Status}' $$p 2>/dev/null | grep -qx installed || echo $$p; done | xargs); \
	[ -n "$$missing" ] || exit 0; \
	[ $$(id -u) = 0 ] || command -v sudo >/dev/null || { echo "not root and no sudo: as root, apt-get install $$missing" >&2; exit 1; }; \
	echo "installing $$missing"; \
	case " $$missing " in *" postgresql "*) $(NO_CLUSTER) ;; esac && \
	$(AS_ROOT) apt-get -qq update && \
	$(AS_ROOT) env DEBIAN_FRONTEND=noninteractive apt-get -qq -y install --no-install-recommends $$missing >/dev/null

go-version:
	@go version | awk '{split(substr($$3, 3), v, "."); exit !(v[1] > 1 || v[2] >= 21)}' || \
		{ echo "$$(go version) is too old: install Go 1.21 or later, which fetches the one that go.mod names" >&2; exit 1; }

root:
	@[ $$(id -u) = 0 ] || command -v sudo >/dev/null || { echo "needs root: run as root or install sudo" >&2; exit 1; }

build: go-version ## build bin/bulkhead
	CGO_ENABLED=0 go build -trimpath -buildvcs=auto -o bin/bulkhead ./cmd/agent

generate: go-version ## compile the kernel programs (clang) and their Go side
	go generate ./...

generate-check: go-version ## fail if the committed objects are not what the sources give
	go run ./test/generated

vet: go-version ## go vet, for the guest's tests too
	go vet -tags vm ./...

lint: go-version ## gofmt and staticcheck
	@unformatted=$$(gofmt -l .); [ -z "$$unformatted" ] || { echo "gofmt: $$unformatted" >&2; exit 1; }
	go run $(STATICCHECK) -tags vm ./...

unit: go-version ## ring 1: tests that need nothing
	go test $(UNIT_PACKAGES)

kernel: go-version root build ## ring 2: tests with this kernel, as root
	BULKHEAD_BINARY=$(CURDIR)/bin/bulkhead go test -count=1 -p 1 $(EXEC_AS_ROOT) $(KERNEL_PACKAGES)

vm: go-version root build ## ring 3: tests on other kernels and on hosts with systemd, in virtual machines
	go test -tags vm ./test/vm
	go run ./test/vm -kernel newest -skip '$(VM_SKIP)' $(VM_FLAGS) $(filter-out ./test/model,$(VM_PACKAGES))
	go run ./test/vm -kernel 6.1,6.12 -jobs 2 -run '$(VM_HEART)' -skip '$(VM_SKIP)' $(VM_FLAGS) ./pkg/conn
	go run ./test/vm -kernel newest -run '$(VM_CONTROLLERS)' $(VM_FLAGS) -file bin/bulkhead:/bin/bulkhead $(VM_ALONE)
	@# Beside many parsers it takes five minutes for each kernel: vm-all.
	go run ./test/vm $(VIRTUAL_FLAGS) -skip Many -virtual -file bin/bulkhead:/bin/bulkhead $(VIRTUAL_PACKAGES)
	$(MAKE) systems

vm-all: go-version build ## everything of ring 3 on all kernels, an hour: before a release
	go run ./test/vm -jobs 2 -skip '$(VM_SKIP)' -timeout 40m $(VM_PACKAGES)
	go run ./test/vm -skip '$(VM_SKIP)' $(VM_FLAGS) -file bin/bulkhead:/bin/bulkhead $(VM_ALONE)
	go run ./test/vm $(VIRTUAL_FLAGS) -virtual -file bin/bulkhead:/bin/bulkhead $(VIRTUAL_PACKAGES)
	$(MAKE) systems SYSTEM_SHARES=

systems: go-version root build ## those on hosts with systemd alone, Debian 12 and 13
	go build -o bin/vm ./test/vm
	$(AS_ROOT) env PATH="$$PATH" bin/vm -system all -boots 2 -smp 1 $(SYSTEM_SHARES) $(SYSTEM_FLAGS) -file bin/bulkhead:/bin/bulkhead $(SYSTEM_PACKAGES)

vm-kernels-refresh: go-version ## fetch the virtual machines' kernels again
	go run ./test/vm -refresh

soak: go-version root ## an hour of random socket operations against the model, and a million connections: SOAK_DURATION=10m
	go test -count=1 -v -timeout 0 $(EXEC_AS_ROOT) ./test/model -duration $(SOAK_DURATION) -cycles $(SOAK_CYCLES) -steady 30s

mutants: go-version root ## show that the model test fails with any one way of giving back removed from the kernel programs
	go run ./test/model/mutants $(MUTANTS_FLAGS)

test: deps vet lint generate-check unit kernel vm ## everything, as CI does

demo: root build ## see it work on this machine, before and after; DEMO_FLAGS="--only flood --keep"
	$(AS_ROOT) bin/bulkhead demo $(DEMO_FLAGS)

# Python as the demo's workloads load it, with its libraries: the guest has
# none of them. It does without what would bring OpenSSL.
bin/python.tar: Makefile
	@mkdir -p bin
	{ /usr/bin/python3 -IBS -c 'import sys, os; sys.modules.update(_ssl=None, _hashlib=None, _bz2=None, _lzma=None); \
		import json, random, subprocess, concurrent.futures.thread, http.server, urllib.request, encodings.idna; \
		print(sys.executable, *{f for m in sys.modules.values() for a in ("__file__", "__cached__") if (f := getattr(m, a, None)) and os.path.exists(f)}, sep="\n")'; \
		ldd /usr/bin/python3 | grep -o '/[^ ]*'; } | \
		tar --create --file $@ --dereference --hard-dereference --absolute-names --files-from -

demo-vm: build bin/python.tar ## see the CPU experiment on Debian's newest kernel in a virtual machine, in virtual time
	go run ./test/vm -kernel newest -virtual -timeout 15m $(DEMO_VM_FLAGS) -file bin/bulkhead:/bin/bulkhead -file bin/python.tar:/python.tar -- sh -c \
		'set -o pipefail && tar -x -f /python.tar -C / && echo "+cpu +memory" >/sys/fs/cgroup/cgroup.subtree_control && \
		PATH=/bin:/usr/bin bulkhead demo --only cpu 2>&1 | cat'

bench-build: build
	go build -o bin/bench ./test/bench
	go build -o bin/vm ./test/vm
	CGO_ENABLED=0 go test -c -tags vm -o bin/cpu.test ./test/cpu

bench: go-version root bench-build ## measure what it costs, half an hour: see docs/benchmarks.md and BENCH_FLAGS=-help
	$(AS_ROOT) bin/bench $(BENCH_FLAGS)

bench-check: go-version root bench-build ## fail if the costs are above the limits, as root; before a release
	$(AS_ROOT) bin/bench -check $(BENCH_FLAGS)

clean: ## remove what was built; kernels stay in the cache
	rm -rf bin
