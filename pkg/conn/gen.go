package conn

// The kernel programs and the Go form of every structure they share with us.
// Written by `make generate` with the clang version that the Makefile names, and
// committed, so that building needs only Go.
//
//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -target bpfel -cc clang-19 -strip llvm-strip-19 -cflags "$BPF_CFLAGS" -type control_word -type gen -type dest_key -type dest -type port_range -type hold -type route -type bulkhead -type traffic_count -type refusal -type slot_key -type slot -type udp_socket -type retire -type adopt -type layout_field -type bulkhead_name -type traffic_name -type plan_chunk -type route_flag -type slot_flag -type reason -type total -type constant kernel ../../bpf/bulkhead.bpf.c
