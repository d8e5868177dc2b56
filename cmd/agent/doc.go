// Command agent is the one binary of bulkhead, installed under the name
// bulkhead. It holds what only a command line has: flags, their checks, the
// wiring of the packages, tables and JSON for people and tools, exit codes. It
// is the only place that exits.
//
// main.go has the root command, the flags that every command takes, and how an
// error becomes a line and a code. Each other file is one command, named after
// it. nouns read (status, conns, explain, doctor, plan, check), verbs change
// (agent, reload, exec, detach).
package main
