#!/bin/busybox sh
# The guest's init. ttyS0 is the kernel's console, ttyS1 gets the output of the
# commands, ttyS2 the report: lines that begin with the boot's own word.
/bin/busybox --install -s /bin
export PATH=/bin HOME=/root
cd /
. /commands.sh

must() { "$@" || { report "fail $*"; poweroff -f; }; }

must mount -t devtmpfs dev /dev
# Nothing may be added to lines or echoed.
stty -F /dev/ttyS1 raw -echo
stty -F /dev/ttyS2 raw -echo
must mount -t proc proc /proc
must mount -t sysfs sys /sys
must ip link set lo up
if [ ! -d /stage ]; then
	# What the kernel patches in its code, an emulator with several CPUs may end by (int3 in run.go): what it would in the
	# middle of the tests, it does now, before our first word. With the first connections it turns off what draws their
	# secrets, and with the first quota of all, and the end of the last, it changes its scheduler. A quota that ends
	# with its cgroup leaves the kernel as it is then.
	nc -w 1 127.0.0.1 9 </dev/null
	nc -w 1 ::1 9 </dev/null
	must mount -t cgroup2 cgroup /sys/fs/cgroup
	must sh -c 'echo +cpu >/sys/fs/cgroup/cgroup.subtree_control'
	must mkdir /sys/fs/cgroup/first
	must sh -c 'echo 50000 >/sys/fs/cgroup/first/cpu.max'
	must rmdir /sys/fs/cgroup/first
	must sh -c 'echo -cpu >/sys/fs/cgroup/cgroup.subtree_control'
fi
report "kernel $(uname -r)"
must mount -t tmpfs run /run
for module in /modules/*; do must insmod "$module"; done

if [ -d /stage ]; then
	# The system on the disk takes over. It runs the commands as a service, once all else
	# is up: its state in /run stays, as it does when a system boots.
	must mkdir /new
	must mount -t ext4 /dev/vda /new
	# Debian's /bin is a link.
	(cd /stage && find . -type f) | while read -r file; do
		must mkdir -p "/new/${file%/*}"
		must cp -a "/stage/$file" "/new/$file"
	done
	must mkdir -p /run/guest /run/systemd/system/guest.target.wants
	must cp -a /commands /commands.sh /run/guest/
	cat >/run/systemd/system/guest.target <<-'E'
		[Unit]
		Requires=multi-user.target
		After=multi-user.target
		AllowIsolate=yes
	E
	cat >/run/systemd/system/guest.service <<-'E'
		[Unit]
		After=multi-user.target
		[Service]
		Environment=HOME=/root
		ExecStart=/bin/sh -c '. /run/guest/commands.sh; run_commands /run/guest/commands; [ @BOOT@ = @BOOTS@ ] && systemctl poweroff -ff; systemctl poweroff'
	E
	ln -s ../guest.service /run/systemd/system/guest.target.wants/guest.service
	must mount -o move /run /new/run
	umount /proc /sys
	mount -o move /dev /new/dev
	exec switch_root /new /lib/systemd/systemd
fi

must mount -t bpf bpf /sys/fs/bpf
must mount -t tmpfs -o mode=1777 tmp /tmp
mkdir -p /dev/shm && must mount -t tmpfs -o mode=1777 shm /dev/shm
run_commands /commands
poweroff -f
