package cgroup

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	systemd1 "github.com/coreos/go-systemd/v22/dbus"
	"github.com/godbus/dbus/v5"

	"bulkhead/pkg/policy"
)

// Values of units of others are properties that are set until the next boot. What they
// replaced is on record beside the drop-ins that systemd writes for them, in
// DIR/UNIT.d/bulkhead.json: systemd reads only what ends in .conf. The record lives as long
// as the drop-ins do, which outlive the unit's cgroup, and goes with them
// (docs/decisions/unit-properties.md).

// recordName is the file of a unit's record.
const recordName = "bulkhead.json"

// runtimeDirs have the drop-ins of properties that are set until the next boot: those of units, and
// those of units that were made by StartTransientUnit.
var runtimeDirs = [...]string{"/run/systemd/system.control", "/run/systemd/transient"}

// unitTypes are the kinds of units that have a cgroup, and the interface that has its
// properties.
var unitTypes = [...]struct{ suffix, iface string }{
	{".service", "Service"}, {".scope", "Scope"}, {".slice", "Slice"},
	{".socket", "Socket"}, {".mount", "Mount"}, {".swap", "Swap"},
}

// unitRecord is what we have replaced in a unit.
type unitRecord struct {
	Unit  string `json:"unit"`
	Iface string `json:"interface"`
	// Path is the cgroup.
	Path       string               `json:"cgroup"`
	Properties map[string]*replaced `json:"properties"`
	// dir is where it is, and the drop-ins.
	dir string
}

// replaced is one property.
type replaced struct {
	// Was is what it was, as systemd says it ("@t 900"): all bits are set where it was not set.
	Was string `json:"was"`
	// DropIn is the drop-in that was there; null for none.
	DropIn *string `json:"drop_in"`
	// Set is what we made of it: while it is being changed, all that it can be then. Wrote is
	// the drop-in that systemd wrote for it; null before it has.
	Set   []string `json:"set"`
	Wrote *string  `json:"wrote"`
}

// unitNameOf is the unit that a cgroup has by its path alone: all around it are slices, for what is
// below a service or scope is another manager's, a user's or a container's.
func unitNameOf(p string) (unit, iface string, ok bool) {
	for around := path.Dir(p); around != "/"; around = path.Dir(around) {
		if !strings.HasSuffix(around, ".slice") {
			return "", "", false
		}
	}
	// Where the name would be that of a control file, systemd puts "_" before it.
	unit = strings.TrimPrefix(path.Base(p), "_")
	for _, t := range unitTypes {
		if strings.HasSuffix(unit, t.suffix) && !policy.IsOurs(p) {
			return unit, t.iface, true
		}
	}
	return "", "", false
}

// unit is one of somebody else's.
type unit struct{ name, iface, dir string }

// unitAt is the unit of somebody else whose cgroup is p: systemd says so itself. What it
// said of a cgroup is true for as long as the cgroup exists. The error is of a systemd that does
// not answer: then it is not known what the cgroup is.
func (b *systemd) unitAt(p string) (unit, bool, error) {
	name, iface, ok := unitNameOf(p)
	if !ok {
		return unit{}, false, nil
	}
	c, err := b.t().Get(p)
	if err != nil {
		return unit{}, false, nil
	}
	b.look.Lock()
	defer b.look.Unlock()
	u, known := b.units[c.ID]
	if !known {
		at, err := b.get(b.asking, name, iface, "ControlGroup")
		if err != nil {
			return unit{}, false, unanswered(err) // asked again
		}
		if at.Value() == p {
			u = unit{name, iface, runtimeDirs[0]}
			transient, err := b.get(b.asking, name, "Unit", "Transient")
			if err != nil {
				return unit{}, false, unanswered(err)
			}
			if transient.Value() == true {
				u.dir = runtimeDirs[1]
			}
			u.dir = filepath.Join(u.dir, name+".d")
		}
		if b.units == nil || len(b.units) > 1<<14 {
			b.units = map[uint64]unit{}
		}
		b.units[c.ID] = u
	}
	return u, u.name != "", nil
}

// unanswered is an error that is not systemd's own answer.
func unanswered(err error) error {
	var answer dbus.Error
	if errors.As(err, &answer) {
		return nil
	}
	return err
}

// get reads a property of a unit.
func (b *systemd) get(ctx context.Context, unit, iface, property string) (value dbus.Variant, err error) {
	err = b.call(ctx, func(ctx context.Context, c *systemd1.Conn) error {
		p, err := c.GetUnitTypePropertyContext(ctx, unit, iface, property)
		if err == nil {
			value = p.Value
		}
		return err
	})
	return value, err
}

func (b *systemd) Keeps(p, file string) (bool, error) {
	// Which value does not matter here; one that cannot be written still has its name.
	named, _ := properties(Value{file, "max"})
	if len(named) == 0 {
		return false, nil
	}
	_, ok, err := b.unitAt(p)
	return ok, err
}

// setUnit sets a value of a unit of somebody else's.
func (b *systemd) setUnit(p string, u unit, v Value, named []systemd1.Property) error {
	holds := func() bool {
		now, err := b.t().read(p, v.File)
		return err == nil && same(v, now)
	}
	// The weight, which comes next, is what ends idle; and by it idle is known to systemd.
	if v == (Value{"cpu.idle", "0"}) && (holds() || !b.t().has(p, v.File)) {
		return nil
	}
	r, err := readRecord(u.dir)
	if errors.Is(err, fs.ErrNotExist) {
		r, err = &unitRecord{Unit: u.name, Iface: u.iface, Properties: map[string]*replaced{}, dir: u.dir}, nil
	}
	if err != nil {
		return err
	}
	r.Path = p
	if holds() && r.has(named) {
		return nil
	}
	for _, n := range named {
		now, err := b.get(b.asking, u.name, u.iface, n.Name)
		if err != nil {
			return err
		}
		there, err := r.dropIn(n.Name)
		if err != nil {
			return err
		}
		old := r.Properties[n.Name]
		if old == nil {
			old = &replaced{Was: now.String(), DropIn: there}
			r.Properties[n.Name] = old
		} else {
			if !slices.Contains(old.Set, now.String()) {
				// Somebody has set it since, and gets that back.
				old.Was = now.String()
				if there == nil {
					old.DropIn = nil
				}
			}
			if !old.ours(there) {
				old.DropIn = there
			}
		}
		old.Set, old.Wrote = append(old.Set, n.Value.String()), nil
	}
	// First on record, then changed.
	if err := r.save(); err != nil {
		return err
	}
	err = b.call(b.asking, func(ctx context.Context, c *systemd1.Conn) error {
		return c.SetUnitPropertiesContext(ctx, u.name, true, named...)
	})
	if err != nil {
		return err
	}
	for _, n := range named {
		set := r.Properties[n.Name]
		set.Set = []string{n.Value.String()}
		if set.Wrote, err = r.dropIn(n.Name); err == nil {
			err = b.overrule(r, n.Name, set.Wrote)
		}
		if err != nil {
			return err
		}
	}
	if err := r.save(); err != nil {
		return err
	}
	there := func() bool { return b.t().has(p, "cgroup.procs") }
	err = b.awaitValue(p, u.name, v, named, func() bool { return holds() || !there() })
	if err == nil && !there() {
		err = fs.ErrNotExist // it has stopped meanwhile
	}
	return err
}

func readRecord(dir string) (*unitRecord, error) {
	text, err := os.ReadFile(filepath.Join(dir, recordName))
	if err != nil {
		return nil, err
	}
	r := &unitRecord{dir: dir}
	if err := json.Unmarshal(text, r); err != nil {
		return nil, fmt.Errorf("%s: %w (give the unit back by systemctl revert %s)", filepath.Join(dir, recordName), err, strings.TrimSuffix(filepath.Base(dir), ".d"))
	}
	if r.Properties == nil {
		r.Properties = map[string]*replaced{}
	}
	return r, nil
}

// overrule sees to it that a drop-in of ours is the last word at systemd's next reload. One of the same name that is
// set for good hides it, and one of a later name is read after it (override.conf of systemctl edit): then it is there
// again by a name that is read last.
func (b *systemd) overrule(r *unitRecord, property string, text *string) error {
	file, last := r.dropInFile(property), r.lastFile(property)
	others, err := b.get(b.asking, r.Unit, "Unit", "DropInPaths")
	if err != nil {
		return err
	}
	paths, _ := others.Value().([]string)
	if text == nil || !slices.ContainsFunc(paths, func(p string) bool {
		return p != file && p != last && filepath.Base(p) >= filepath.Base(file) && filepath.Dir(p) != r.dir
	}) {
		return remove(last)
	}
	return replaceFile(last, []byte(*text))
}

// has reports whether systemd has all of these from us, by what it keeps for its next reload.
func (r *unitRecord) has(named []systemd1.Property) bool {
	for _, n := range named {
		p := r.Properties[n.Name]
		if p == nil || p.Wrote == nil || !slices.Equal(p.Set, []string{n.Value.String()}) {
			return false
		}
		if there, err := r.dropIn(n.Name); err != nil || there == nil || *there != *p.Wrote {
			return false
		}
	}
	return true
}

// ours reports whether a drop-in is the one that was written for us.
func (p *replaced) ours(there *string) bool {
	if there == nil {
		return true // gone with the unit, or nothing written yet
	}
	if p.Wrote == nil { // killed before it was noted: it is not the one of before
		return p.DropIn == nil || *there != *p.DropIn
	}
	return *there == *p.Wrote
}

func (r *unitRecord) dropInFile(property string) string {
	for _, o := range ours {
		if o.property == property {
			property = o.dropIn
			break
		}
	}
	return filepath.Join(r.dir, "50-"+property+".conf")
}

// lastFile is a drop-in that only we write, see overrule.
func (r *unitRecord) lastFile(property string) string {
	return filepath.Join(r.dir, "zz-bulkhead-"+strings.TrimPrefix(filepath.Base(r.dropInFile(property)), "50-"))
}

// dropIn reads the drop-in of a property; nil if there is none.
func (r *unitRecord) dropIn(property string) (*string, error) {
	text, err := os.ReadFile(r.dropInFile(property))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	s := string(text)
	return &s, nil
}

// save writes the record in one step; an empty one is removed, and the directory if that was all.
func (r *unitRecord) save() error {
	file := filepath.Join(r.dir, recordName)
	if len(r.Properties) == 0 {
		err := remove(file)
		_ = os.Remove(r.dir)
		return err
	}
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(r.dir, 0o755); err != nil {
		return fmt.Errorf("keep the properties of %s: %w", r.Unit, err)
	}
	return replaceFile(file, text)
}

// remove removes a file, if it is there.
func remove(file string) error {
	if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// unfinished is where a file is written first: a name that is ours, for sweep, and that systemd does not read.
func unfinished(file string) string {
	return filepath.Join(filepath.Dir(file), "bulkhead-"+filepath.Base(file)+".new")
}

// replaceFile writes a file in one step, so that nobody reads half of it.
func replaceFile(file string, text []byte) error {
	tmp := unfinished(file)
	err := os.WriteFile(tmp, text, 0o644)
	if err == nil {
		err = os.Rename(tmp, file)
	}
	if err != nil {
		_ = os.Remove(tmp)
	}
	return err
}

// sweep removes what an agent that was killed has not finished writing, and the directories if that was all.
func sweep(dirs ...string) {
	for _, dir := range dirs {
		for _, name := range []string{"bulkhead*.new", "zz-bulkhead-*.new"} {
			files, _ := filepath.Glob(filepath.Join(dir, "*.d", name))
			for _, file := range files {
				_ = os.Remove(file)
				_ = os.Remove(filepath.Dir(file))
			}
		}
	}
}

func (b *systemd) Restore(wanted map[string][]Value) []Condition {
	sweep(runtimeDirs[:]...)
	var conds []Condition
	for _, dir := range runtimeDirs {
		files, _ := filepath.Glob(filepath.Join(dir, "*.d", recordName))
		for _, file := range files {
			r, err := readRecord(filepath.Dir(file))
			if err == nil {
				err = b.giveBack(r, wanted[r.Path])
			}
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				conds = append(conds, shortfall(TypeCPU, ReasonWriteFailed, "properties of %s are not put back: %v", strings.TrimSuffix(filepath.Base(filepath.Dir(file)), ".d"), err))
			}
		}
	}
	return conds
}

// giveBack puts back the properties of a unit that nothing in wanted needs.
func (b *systemd) giveBack(r *unitRecord, wanted []Value) error {
	if r.Unit+".d" != filepath.Base(r.dir) {
		return fmt.Errorf("%s is of %q", filepath.Join(r.dir, recordName), r.Unit)
	}
	var needed []string
	for _, v := range wanted {
		named, _ := properties(v)
		for _, n := range named {
			needed = append(needed, n.Name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(r.Properties)) {
		if slices.Contains(needed, name) {
			continue
		}
		if err := b.giveBackOne(r, name); err != nil {
			return err
		}
	}
	return nil
}

func (b *systemd) giveBackOne(r *unitRecord, name string) error {
	p := r.Properties[name]
	if err := remove(r.lastFile(name)); err != nil {
		return err
	}
	there, err := r.dropIn(name)
	if err != nil {
		return err
	}
	now, err := b.get(b.givingBack, r.Unit, r.Iface, name)
	if err != nil && !noSuchUnit(err) {
		return err
	}
	before := p.DropIn
	switch {
	case err == nil && slices.Contains(p.Set, now.String()):
		was, err := dbus.ParseVariant(p.Was, dbus.Signature{})
		if err != nil {
			return fmt.Errorf("%s is kept as %q: %w", name, p.Was, err)
		}
		// Whoever continues after a kill sees that it is on its way back.
		p.Set, p.Wrote = append(p.Set, p.Was), nil
		if err := r.save(); err != nil {
			return err
		}
		err = b.call(b.givingBack, func(ctx context.Context, c *systemd1.Conn) error {
			return c.SetUnitPropertiesContext(ctx, r.Unit, true, systemd1.Property{Name: name, Value: was})
		})
		if err != nil && !noSuchUnit(err) {
			return err
		}
		if err != nil {
			before = nil
		}
	case there == nil || !p.ours(there):
		// What somebody has set since stays.
		delete(r.Properties, name)
		return r.save()
	}
	// A drop-in that says what holds without it is not what was there.
	if before != nil {
		err = replaceFile(r.dropInFile(name), []byte(*before))
	} else {
		err = remove(r.dropInFile(name))
	}
	if err != nil {
		return err
	}
	delete(r.Properties, name)
	return r.save()
}

// noSuchUnit: systemd does not know it any more; then only its files are left.
func noSuchUnit(err error) bool {
	var answer dbus.Error
	return errors.As(err, &answer) && (answer.Name == "org.freedesktop.systemd1.NoSuchUnit" || answer.Name == "org.freedesktop.DBus.Error.UnknownObject")
}
