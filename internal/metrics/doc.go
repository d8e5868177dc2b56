// Package metrics gives bulkhead's numbers their Prometheus names and labels.
// It is the only package that imports the Prometheus client.
//
//	c := metrics.New(build, metrics.Sources{Connections: reader.Snapshot, CPU: ..., Agent: ...})
//	http.Handle("/metrics", metrics.Handler(c))
//
// There are no counters in here: every scrape reads a conn.Snapshot, the
// cgroups' cpu.stat and the agent's own state, and makes constant metrics of
// them. The counts live in pinned kernel maps, so they go on where they were
// when the agent is started again.
//
// # Names
//
// Labels come from the policy only (feature_group, tenant, provider, scope) or
// from short fixed lists (reason, direction, collector), so the number of
// series is bounded by the policy. Addresses, pids and cgroups are never
// labels. A label that does not apply is "": the feature_group of a tenant's
// bulkhead, the tenant of a feature without tenants.
//
// One connection holds several bulkheads, one of each scope on its route. So a
// sum over bulkhead_concurrent_current and its four siblings must fix scope.
//
// # A slow or broken source
//
// Reading the kernel can fail, or take long where there are many network
// namespaces. A scrape waits a moment and then answers with the values of the
// last good reading; bulkhead_scrape_success says for which collector that was
// so. Scrapes that come together share one reading.
//
// # Only upwards
//
// See floor for why a byte counter may read a little lower than before, and
// ledger for cgroups that come and go. Both keep what was exported from going
// down; reading metrics changes nothing else.
//
// collector.go has the names, source.go the waiting, upwards.go the memory,
// handler.go the HTTP side.
package metrics
