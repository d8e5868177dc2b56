// Package containers asks the container runtimes of a node which containers there are: Docker and
// Podman over the Docker Engine API, containerd over its own. A Watcher is told of changes as they
// happen, before a container that was just created has started; List asks once.
//
// A runtime is believed in what it says of its containers, so only sockets of root's runtimes are
// asked unless somebody names others: who may start containers may give them any name.
package containers
