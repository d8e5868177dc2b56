package policy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// The contract's words for the scopes, which metrics and status use too.
func scopeNames() []string {
	return []string{
		ScopeFeatureTenantProvider: "feature_tenant_provider",
		ScopeFeatureProvider:       "feature_provider",
		ScopeTenantProvider:        "tenant_provider",
		ScopeFeatureTenant:         "feature_tenant",
		ScopeFeature:               "feature",
		ScopeTenant:                "tenant",
		ScopeProvider:              "provider",
	}
}

// String is the contract's word, "feature_provider".
func (s Scope) String() string {
	if names := scopeNames(); s > 0 && int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("scope(%d)", uint8(s))
}

// MarshalText is String for the seven scopes and an error for anything else.
func (s Scope) MarshalText() ([]byte, error) {
	if s < ScopeFeatureTenantProvider || s > ScopeProvider {
		return nil, fmt.Errorf("%d is not a scope", uint8(s))
	}
	return []byte(s.String()), nil
}

// UnmarshalText reads what MarshalText writes.
func (s *Scope) UnmarshalText(text []byte) error {
	for i, name := range scopeNames() {
		if name != "" && name == string(text) {
			*s = Scope(i)
			return nil
		}
	}
	return fmt.Errorf("%q is not a scope", text)
}

// String is the number, or "unlimited".
func (l Limit) String() string {
	if l == Unlimited {
		return "unlimited"
	}
	return strconv.FormatUint(uint64(l), 10)
}

// MarshalJSON is a number, or null for Unlimited.
func (l Limit) MarshalJSON() ([]byte, error) {
	if l == Unlimited {
		return []byte("null"), nil
	}
	return strconv.AppendUint(nil, uint64(l), 10), nil
}

// UnmarshalJSON reads what MarshalJSON writes.
func (l *Limit) UnmarshalJSON(text []byte) error {
	if bytes.Equal(text, []byte("null")) {
		*l = Unlimited
		return nil
	}
	n, err := strconv.ParseUint(string(text), 10, 32)
	if err != nil || n > uint64(MaxLimit) {
		return fmt.Errorf("%q is not a limit: a number from 0 to %d, or null", text, MaxLimit)
	}
	*l = Limit(n)
	return nil
}

// plainProvider is Provider without its methods.
type plainProvider Provider

// providerJSON is a Provider with its time in a unit that the name says.
type providerJSON struct {
	plainProvider
	IdleSec uint32 `json:"idle_sec,omitempty"`
}

// MarshalJSON is the fields, with Idle in seconds.
func (p Provider) MarshalJSON() ([]byte, error) {
	sec := p.Idle / time.Second
	if p.Idle < 0 || p.Idle > MaxIdle || p.Idle != sec*time.Second {
		return nil, fmt.Errorf("idle of provider %s: %s is not a whole number of seconds up to %s", p.Name, p.Idle, timeText(MaxIdle))
	}
	return json.Marshal(providerJSON{plainProvider(p), uint32(sec)})
}

// UnmarshalJSON reads what MarshalJSON writes.
func (p *Provider) UnmarshalJSON(text []byte) error {
	var in providerJSON
	if err := json.Unmarshal(text, &in); err != nil {
		return err
	}
	*p = Provider(in.plainProvider)
	if p.Idle = time.Duration(in.IdleSec) * time.Second; p.Idle > MaxIdle {
		return fmt.Errorf("idle of provider %s: %d seconds is more than %s", p.Name, in.IdleSec, timeText(MaxIdle))
	}
	return nil
}

// timeText is a time as a policy writes it, "2m" or "1h30m".
func timeText(d time.Duration) string {
	text := d.String() // "2m0s"
	if d > 0 && d%time.Minute == 0 {
		text = strings.TrimSuffix(text, "0s")
	}
	if d > 0 && d%time.Hour == 0 {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

// String is "tcp" or "udp".
func (p Proto) String() string {
	switch p {
	case TCP:
		return "tcp"
	case UDP:
		return "udp"
	}
	return fmt.Sprintf("proto(%d)", uint8(p))
}

// MarshalText is String for the protocols that a policy may name, and an error
// for anything else.
func (p Proto) MarshalText() ([]byte, error) {
	if p != TCP && p != UDP {
		return nil, fmt.Errorf("%d is neither tcp nor udp", uint8(p))
	}
	return []byte(p.String()), nil
}

// UnmarshalText reads what MarshalText writes.
func (p *Proto) UnmarshalText(text []byte) error {
	switch string(text) {
	case TCP.String():
		*p = TCP
	case UDP.String():
		*p = UDP
	default:
		return fmt.Errorf("%q is neither tcp nor udp", text)
	}
	return nil
}

// String is the scope and the names that it uses, "feature_provider chat/deepseek".
func (k Key) String() string {
	var names []string
	for _, n := range []string{k.Feature, k.Tenant, k.Provider} {
		if n != "" {
			names = append(names, n)
		}
	}
	return k.Scope.String() + " " + strings.Join(names, "/")
}

// String is "tcp 443" or "tcp 8000-8010".
func (r PortRange) String() string {
	if r.First == r.Last {
		return fmt.Sprintf("%s %d", r.Proto, r.First)
	}
	return fmt.Sprintf("%s %d-%d", r.Proto, r.First, r.Last)
}
