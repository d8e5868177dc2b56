package metrics

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Handler serves a Collector's metrics, and nothing else: no process or Go
// runtime metrics, whose names are not bulkhead's to promise. A metric that
// cannot be made leaves the others in the answer.
func Handler(c *Collector) (http.Handler, error) {
	r := prometheus.NewRegistry()
	if err := r.Register(c); err != nil {
		return nil, err
	}
	return promhttp.HandlerFor(r, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}), nil
}
