package containers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"bulkhead/pkg/cgroup"
)

const (
	// askTimeout bounds a request. Podman answers about a container that is about to start only
	// when it has.
	askTimeout = 10 * time.Second
	// listEvery is how often all containers are asked for although each change is told, and
	// listSoon when that is done first: containerd does not say when it begins to tell.
	listEvery = time.Minute
	listSoon  = time.Second
	// listSilent is how often that is done while a runtime does not tell of changes, as Podman with
	// events_logger=none, and followAtMost the longest wait before it is asked again to tell of them.
	listSilent   = 5 * time.Second
	followAtMost = time.Minute
	// appearEvery is how often a socket is looked for that is not there.
	appearEvery = time.Second
	// pingTimeout bounds the first request of a connection: who does not answer that is away.
	pingTimeout = 2 * time.Second
	// atOnce is how many requests a runtime has to answer at the same time.
	atOnce = 8
	// againAfter and againAtMost are the waits before a runtime that does not answer is asked again.
	againAfter  = 200 * time.Millisecond
	againAtMost = 5 * time.Second
)

// Runtime is the state of one socket.
type Runtime struct {
	Runtime string `json:"runtime"`
	Socket  string `json:"socket"`
	// Answers is whether the last request was answered. What a runtime that does not has told
	// before holds on.
	Answers bool `json:"answers"`
	// Error is why not; "" also where there is no socket. Of one that answers it is why
	// changes are seen late: it does not tell of them.
	Error      string `json:"error"`
	Containers int    `json:"containers"`
}

// runtime is how to ask one.
type runtime interface {
	// ping finds out whether anybody answers.
	ping(ctx context.Context) error
	// list gives all containers that there are, running or not, and which have to be asked
	// about for their process or the name of their image.
	list(ctx context.Context) (all []cgroup.Container, ask map[string]bool, err error)
	// get gives one; ok is false if there is none of that id.
	get(ctx context.Context, id string) (c cgroup.Container, ok bool, err error)
	// follow tells of changes until it fails or ctx is done. since is when those begin that have
	// to be told, where the runtime can do that. It calls subscribed once it will tell of all that
	// comes, which may be late.
	follow(ctx context.Context, since time.Time, subscribed func(), tell func(change)) error
	close()
}

// change is an event. What is not nil is known at once; the rest is asked for.
type change struct {
	id string
	// made is what the event says of a container, nil if nothing.
	made *cgroup.Container
	// pid is that of its first process, where the event says so; 0 if it has ended.
	pid     *int
	removed bool
}

// Watcher knows the containers of a node. Its methods may be called from any goroutine.
type Watcher struct {
	log  *slog.Logger
	wake chan struct{}
	stop func()
	done sync.WaitGroup

	mu      sync.Mutex
	sources []*source
}

// source is what is known from one socket. Watcher.mu guards it.
type source struct {
	Socket
	containers map[string]cgroup.Container // by id
	answers    bool
	asked      bool // something is there that was asked
	err        error
	silent     error         // why it does not tell of changes, although it answers
	settled    chan struct{} // closed once it has answered or failed, or is not there
	once       sync.Once
	// events counts the events; touched is the one that was the last about a container. An answer to
	// what was asked before that is no news.
	events  uint64
	touched map[string]uint64
}

// Watch begins to ask. What it learns is announced on Wake.
func Watch(sockets []Socket, log *slog.Logger) *Watcher {
	ctx, stop := context.WithCancel(context.Background())
	w := &Watcher{log: log, wake: make(chan struct{}, 1), stop: stop}
	for _, at := range sockets {
		s := &source{Socket: at, containers: map[string]cgroup.Container{}, settled: make(chan struct{}), touched: map[string]uint64{}}
		w.sources = append(w.sources, s)
		w.done.Go(func() { w.run(ctx, s) })
	}
	return w
}

// Close ends all asking.
func (w *Watcher) Close() {
	w.stop()
	w.done.Wait()
}

// Wake is ready when there is something new.
func (w *Watcher) Wake() <-chan struct{} { return w.wake }

// Settled waits until every runtime has said which containers there are, or is known not to
// answer, or ctx is done.
func (w *Watcher) Settled(ctx context.Context) {
	for _, s := range w.sources {
		select {
		case <-s.settled:
		case <-ctx.Done():
			return
		}
	}
}

// Containers are all that are known, in an order that stays.
func (w *Watcher) Containers() []cgroup.Container {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []cgroup.Container
	for _, s := range w.sources {
		out = append(out, slices.SortedFunc(maps.Values(w.own(s)), func(a, b cgroup.Container) int { return cmp.Compare(a.ID, b.ID) })...)
	}
	return out
}

// own are the containers that a runtime is believed about. An engine runs its own by a containerd, which knows them by
// their ids alone: in a namespace that has no fixed name (dockerd --containerd-namespace) they are there once more.
// Watcher.mu is held.
func (w *Watcher) own(s *source) map[string]cgroup.Container {
	if s.Runtime != Containerd {
		return s.containers
	}
	out := make(map[string]cgroup.Container, len(s.containers))
	for key, c := range s.containers {
		id := key[strings.LastIndexByte(key, '/')+1:]
		engines := slices.ContainsFunc(w.sources, func(e *source) bool {
			_, known := e.containers[id]
			return known && e.Runtime != Containerd
		})
		// Any other id than an engine's is somebody's own choice, and the same by chance.
		if !engines || !engineID.MatchString(id) {
			out[key] = c
		}
	}
	return out
}

// engineID matches the ids that engines give.
var engineID = regexp.MustCompile(`^[0-9a-f]{64}$`)

// Runtimes says of each socket that is there, or was, how it is.
func (w *Watcher) Runtimes() []Runtime {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := []Runtime{}
	for _, s := range w.sources {
		own := len(w.own(s))
		if !s.answers && s.err == nil && own == 0 && !s.asked && !s.Named {
			continue
		}
		r := Runtime{Runtime: s.Runtime, Socket: s.Path, Answers: s.answers, Containers: own}
		if s.err != nil {
			r.Error = s.err.Error()
		} else if s.answers && s.silent != nil {
			r.Error = fmt.Sprintf("it does not tell of changes, so it is asked every %v: %v", listSilent, s.silent)
		} else if s.asked && !s.answers {
			r.Error = "it has not answered yet"
		}
		out = append(out, r)
	}
	return out
}

func (w *Watcher) announce() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// errAbsent: there is no socket, or nobody behind it.
var errAbsent = errors.New("not running")

// run asks one socket for as long as it takes.
func (w *Watcher) run(ctx context.Context, s *source) {
	again := againAfter
	for ctx.Err() == nil {
		err := errAbsent
		if s.there() {
			var answered bool
			if answered, err = w.ask(ctx, s); answered {
				again = againAfter
			}
		}
		if ctx.Err() != nil {
			return
		}
		w.failed(s, err)
		wait := again
		if errors.Is(err, errAbsent) {
			wait = appearEvery
		} else {
			again = min(2*again, againAtMost)
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
}

// failed notes that a runtime does not answer, and tells if it did before.
func (w *Watcher) failed(s *source, err error) {
	if errors.Is(err, errAbsent) && !s.Named {
		err = nil
	}
	w.mu.Lock()
	text := func(e error) string {
		if e == nil {
			return ""
		}
		return e.Error()
	}
	news := s.answers || text(s.err) != text(err)
	was := s.answers
	s.answers, s.err, s.silent = false, err, nil
	s.asked = s.asked && err != nil
	w.mu.Unlock()
	s.once.Do(func() { close(s.settled) })
	if !news {
		return
	}
	if was || err != nil {
		if err == nil {
			err = errAbsent
		}
		w.log.Warn("a container runtime does not answer; what it has told holds on", "runtime", s.Runtime, "socket", s.Path, "error", err.Error())
	}
	w.announce()
}

// ask follows one runtime until it fails. answered is whether it said which containers there are.
func (w *Watcher) ask(ctx context.Context, s *source) (answered bool, err error) {
	// A socket may have outlived who listened there.
	probe, err := (&net.Dialer{Timeout: pingTimeout}).DialContext(ctx, "unix", s.Path)
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist) {
		return false, errAbsent
	}
	if err != nil {
		return false, err
	}
	probe.Close()
	w.mu.Lock()
	s.asked = true
	w.mu.Unlock()
	r, err := open(s.Socket)
	if err != nil {
		return false, err
	}
	defer r.close()
	limited, cancel := context.WithTimeout(ctx, pingTimeout)
	err = r.ping(limited)
	cancel()
	if err != nil {
		return false, err
	}
	ctx, end := context.WithCancel(ctx)
	a := &asker{w: w, s: s, r: r, todo: map[string]bool{}, free: make(chan struct{}, atOnce)}
	defer func() {
		end()
		a.busy.Wait()
	}()

	failed := make(chan error, 1)
	var subscribed chan struct{}
	follow := func() {
		told := make(chan struct{})
		subscribed = told
		a.busy.Go(func() { failed <- a.follow(ctx, sync.OnceFunc(func() { close(told) })) })
	}
	follow()
	// Podman says that it tells of events when there is one: the list does not wait for that.
	select {
	case <-subscribed:
		subscribed = nil
	case <-time.After(100 * time.Millisecond):
	case err := <-failed:
		failed <- err // whether it answers the list shows
	}
	every := time.NewTicker(listSoon)
	defer every.Stop()
	var again <-chan time.Time // when one that is silent is asked again to tell
	pause := listSilent
	for {
		if err := a.list(ctx); err != nil {
			return answered, err
		}
		answered = true
		select {
		case err := <-failed:
			if !errors.Is(err, errSilent) {
				return true, err
			}
			// The list that comes now finds out whether it still answers.
			subscribed = nil
			again, pause = time.After(pause), min(2*pause, followAtMost)
			every.Reset(listSilent)
		case <-subscribed:
			subscribed = nil
		case <-again:
			again = nil
			follow()
			every.Reset(listSoon)
		case <-ctx.Done():
			return true, ctx.Err()
		case <-every.C:
			if again == nil {
				a.silent(nil)
				pause = listSilent
				every.Reset(listEvery)
			}
		}
	}
}

// errSilent: a runtime does not tell of changes.
var errSilent = errors.New("no events")

// follow has the runtime tell of changes until it fails. That is errSilent if it never did: it told of none and failed
// at once, which is not what becomes of a stream when a daemon is stopped.
func (a *asker) follow(ctx context.Context, subscribed func()) error {
	begin, told := time.Now(), false
	err := a.r.follow(ctx, begin, subscribed, func(c change) {
		told = true
		a.changed(ctx, c)
	})
	if told || time.Since(begin) >= listSoon || ctx.Err() != nil {
		return err
	}
	a.silent(err)
	return errSilent
}

// silent notes why a runtime does not tell of changes, nil if it does. The list that comes next tells everybody.
func (a *asker) silent(why error) {
	a.w.mu.Lock()
	defer a.w.mu.Unlock()
	a.s.silent = why
}

// asker asks one runtime about containers, several at a time and none twice at once.
type asker struct {
	w    *Watcher
	s    *source
	r    runtime
	busy sync.WaitGroup
	free chan struct{}
	// listed is whether there was a list over this connection, and quiet whether it was silent at the last.
	listed, quiet bool

	mu   sync.Mutex
	todo map[string]bool // asked about now; true: to be asked about again after that
}

// list asks for all containers, and about those of which it does not say all.
func (a *asker) list(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	began := a.w.begin(a.s)
	list, lacking, err := a.r.list(limited)
	if err != nil {
		return err
	}
	all := make(map[string]cgroup.Container, len(list))
	var ask []string
	a.w.mu.Lock()
	for _, c := range list {
		if known, ok := a.s.containers[c.ID]; ok && lacking[c.ID] {
			// A list may have the id of an image in place of its name.
			c.PID, c.Image = known.PID, known.Image
		}
		// While nobody told of them they may have been restarted.
		if lacking[c.ID] && (!a.listed || c.PID == 0 || !alive(c.PID)) {
			ask = append(ask, c.ID)
		}
		all[c.ID] = c
	}
	for id, when := range a.s.touched {
		if when <= began {
			delete(a.s.touched, id)
			continue
		}
		if now, ok := a.s.containers[id]; ok {
			all[id] = now
		} else {
			delete(all, id)
		}
	}
	first := !a.s.answers
	news := first || !maps.EqualFunc(all, a.s.containers, equal)
	a.s.containers, a.s.answers, a.s.err = all, true, nil
	silent := a.s.silent
	a.w.mu.Unlock()
	switch {
	case silent != nil && !a.quiet:
		a.w.log.Warn("a container runtime does not tell of changes; it is asked for all containers instead",
			"runtime", a.s.Runtime, "socket", a.s.Path, "every", listSilent.String(), "error", silent.Error())
		news = true
	case silent == nil && a.quiet:
		a.w.log.Info("a container runtime tells of changes", "runtime", a.s.Runtime, "socket", a.s.Path)
		news = true
	}
	a.quiet = silent != nil
	if news {
		a.w.announce()
	}
	if a.listed {
		// An answer about one that is about to start may take its time, and the next list does not wait for that.
		for _, id := range ask {
			a.about(ctx, id)
		}
		return nil
	}
	a.listed = true
	var asked sync.WaitGroup
	for _, id := range ask {
		select {
		case a.free <- struct{}{}:
			asked.Go(func() {
				a.one(limited, id)
				<-a.free
			})
		case <-limited.Done():
		}
	}
	asked.Wait()
	if first {
		a.w.log.Info("a container runtime tells of its containers", "runtime", a.s.Runtime, "socket", a.s.Path, "containers", len(list))
	}
	a.s.once.Do(func() { close(a.s.settled) })
	return nil
}

// begin is when a question is asked, in events.
func (w *Watcher) begin(s *source) uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return s.events
}

// alive reports whether there is a process of that number here.
func alive(pid int) bool {
	_, err := os.Stat("/proc/" + strconv.Itoa(pid))
	return err == nil
}

func equal(a, b cgroup.Container) bool {
	return a.Name == b.Name && a.Image == b.Image && a.PID == b.PID && a.Cgroup == b.Cgroup && maps.Equal(a.Labels, b.Labels)
}

// changed brings what an event says into force at once, and asks for the rest.
func (a *asker) changed(ctx context.Context, e change) {
	a.w.mu.Lock()
	a.s.events++
	a.s.touched[e.id] = a.s.events
	c, known := a.s.containers[e.id]
	before := c
	switch {
	case e.removed:
		delete(a.s.containers, e.id)
	case e.made != nil:
		if known { // it may have another name now
			c.Name = e.made.Name
		} else {
			c = *e.made
		}
		a.s.containers[e.id] = c
	case e.pid != nil && known:
		c.PID = *e.pid
		a.s.containers[e.id] = c
	}
	now, there := a.s.containers[e.id]
	a.w.mu.Unlock()
	if there != known || !equal(now, before) {
		a.w.announce()
	}
	if !e.removed {
		a.about(ctx, e.id)
	}
}

// about asks about one container, aside.
func (a *asker) about(ctx context.Context, id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, asked := a.todo[id]; asked {
		a.todo[id] = true
		return
	}
	a.todo[id] = false
	a.busy.Go(func() {
		for {
			select {
			case a.free <- struct{}{}:
			case <-ctx.Done():
				return
			}
			a.one(ctx, id)
			<-a.free
			a.mu.Lock()
			again := a.todo[id]
			if again {
				a.todo[id] = false
			} else {
				delete(a.todo, id)
			}
			a.mu.Unlock()
			if !again {
				return
			}
		}
	})
}

func (a *asker) one(ctx context.Context, id string) {
	limited, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	began := a.w.begin(a.s)
	c, ok, err := a.r.get(limited, id)
	if err != nil {
		return // the next list sees to it
	}
	a.w.mu.Lock()
	if a.s.touched[id] > began {
		a.w.mu.Unlock()
		return // and is asked about again, unless it is gone
	}
	before, known := a.s.containers[id]
	switch {
	case ok:
		a.s.containers[id] = c
	case known:
		delete(a.s.containers, id)
	}
	a.w.mu.Unlock()
	if ok != known || ok && !equal(before, c) {
		a.w.announce()
	}
}

// open connects to a runtime, without asking it anything.
func open(s Socket) (runtime, error) {
	if s.Runtime == Containerd {
		return openContainerd(s)
	}
	return openEngine(s)
}

// List asks once: the containers, and how each runtime that is there answered.
func List(ctx context.Context, sockets []Socket) ([]cgroup.Container, []Runtime) {
	w := Watch(sockets, slog.New(slog.DiscardHandler))
	defer w.Close()
	w.Settled(ctx)
	return w.Containers(), w.Runtimes()
}
