#!/bin/busybox sh
# The guest's init. ttyS0 is the kernel's console, ttyS1 gets the output of the
# commands, ttyS2 the report: lines of the boot's own word, then
#   kernel VERSION | exit INDEX CODE | fail TEXT | done
/bin/busybox --install -s /bin
export PATH=/bin HOME=/root
# What a test may not skip here, and the binary that the end-to-end tests run.
export BULKHEAD_REQUIRE=cpu,memory BULKHEAD_BINARY=/bin/bulkhead
cd /

report() { echo "@NONCE@ $*" >/dev/ttyS2; }
must() { "$@" || { report "fail $*"; poweroff -f; }; }

must mount -t devtmpfs dev /dev
# Nothing may be added to lines or echoed.
stty -F /dev/ttyS1 raw -echo
stty -F /dev/ttyS2 raw -echo
must mount -t proc proc /proc
report "kernel $(uname -r)"
must mount -t sysfs sys /sys
must mount -t cgroup2 cgroup /sys/fs/cgroup
must mount -t bpf bpf /sys/fs/bpf
must mount -t tmpfs -o mode=1777 tmp /tmp
must mount -t tmpfs run /run
mkdir -p /dev/shm && must mount -t tmpfs -o mode=1777 shm /dev/shm
must ip link set lo up
for module in /modules/*; do must insmod "$module"; done

index=0
for command in /commands/*; do
	sh "$command" </dev/null >/dev/ttyS1 2>&1
	code=$?
	# Waits until the port has sent what was written to it.
	stty -F /dev/ttyS1 raw
	report "exit $index $code"
	index=$((index + 1))
done
report done
poweroff -f
