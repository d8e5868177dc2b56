# Runs the commands, each in /, and reports how each ended. The shell is busybox's in a
# guest without a system, else the system's.
#   kernel VERSION | exit INDEX CODE | fail TEXT | done
report() { echo "@NONCE@ $*" >/dev/ttyS2; }

run_commands() {
	# What a test may not skip here, and the binary that the end-to-end tests run.
	export BULKHEAD_REQUIRE=cpu,memory BULKHEAD_BINARY=/bin/bulkhead BULKHEAD_BOOT=@BOOT@
	cd /
	index=0
	for command in "$1"/*; do
		sh "$command" </dev/null >/dev/ttyS1 2>&1
		code=$?
		# Waits until the port has sent what was written to it.
		stty -F /dev/ttyS1 raw
		report "exit $index $code"
		index=$((index + 1))
	done
	report done
}
