package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// errNoSource means that no apt source of this machine is Debian's own.
var errNoSource = errors.New("no apt source of this machine is a Debian archive of its own release with the component main")

// source is one entry of apt's sources, as far as it matters here.
type source struct {
	uris, suites, components []string
	// signedBy is the value of Signed-By as it stands: a path, fingerprints, or
	// an inline key of several lines; "" is apt's default keyrings.
	signedBy string
}

// parseDeb822 reads the *.sources format of sources.list(5).
func parseDeb822(text string) []source {
	var out []source
	for _, stanza := range strings.Split("\n"+text, "\n\n") {
		fields := map[string]string{}
		last := ""
		for _, line := range strings.Split(stanza, "\n") {
			name, value, ok := strings.Cut(line, ":")
			switch {
			case strings.HasPrefix(line, "#"):
			case line != "" && (line[0] == ' ' || line[0] == '\t'):
				fields[last] += "\n" + line
			case ok:
				last = strings.ToLower(name)
				fields[last] = strings.TrimSpace(value)
			}
		}
		if fields["enabled"] == "no" || !slices.Contains(strings.Fields(fields["types"]), "deb") {
			continue
		}
		out = append(out, source{
			uris:       strings.Fields(fields["uris"]),
			suites:     strings.Fields(fields["suites"]),
			components: strings.Fields(fields["components"]),
			signedBy:   fields["signed-by"],
		})
	}
	return out
}

// parseOneLine reads the *.list format of sources.list(5).
func parseOneLine(text string) []source {
	var out []source
	for _, line := range strings.Split(text, "\n") {
		line, _, _ = strings.Cut(line, "#")
		rest, ok := strings.CutPrefix(strings.TrimSpace(line), "deb")
		rest = strings.TrimLeft(rest, " \t")
		if !ok || strings.HasPrefix(rest, "-src") {
			continue
		}
		var s source
		if options, after, ok := strings.Cut(rest, "]"); ok && strings.HasPrefix(rest, "[") {
			for _, o := range strings.Fields(options[1:]) {
				if v, ok := strings.CutPrefix(o, "signed-by="); ok {
					s.signedBy = strings.ReplaceAll(v, ",", " ")
				}
			}
			rest = after
		}
		words := strings.Fields(rest)
		if len(words) < 3 || strings.HasPrefix(words[0], "cdrom:") {
			continue
		}
		s.uris, s.suites, s.components = words[:1], words[1:2], words[2:]
		out = append(out, s)
	}
	return out
}

// forSuite returns apt sources (deb822) that are the Debian ones among all
// with another suite in place of the running release's codename.
//
// Other vendors also name their suites after Debian's releases. Theirs are
// signed by keys of their own, so a source that names a keyring counts only if
// the keyring is the Debian archive's; unless none is, as on a private mirror
// that signs for itself.
func forSuite(all []source, codename, suite string) (string, error) {
	// Suites may also be named by what the release is at present.
	own := []string{codename, "stable", "oldstable", "testing", "unstable", "sid"}
	// sid has neither updates nor security; backports are another kernel.
	suffixes := []string{"", "-updates", "-security"}
	if suite == "sid" {
		suffixes = suffixes[:1]
	}
	var debian, others strings.Builder
	for _, s := range all {
		var suites []string
		for _, suffix := range suffixes {
			if slices.ContainsFunc(own, func(o string) bool { return slices.Contains(s.suites, o+suffix) }) {
				suites = append(suites, suite+suffix)
			}
		}
		if len(suites) == 0 || !slices.Contains(s.components, "main") {
			continue
		}
		to := &others
		if s.signedBy == "" || strings.Contains(s.signedBy, "debian-archive") {
			to = &debian
		}
		fmt.Fprintf(to, "Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nArchitectures: amd64\nTargets: Packages\n",
			strings.Join(s.uris, " "), strings.Join(suites, " "))
		if s.signedBy != "" {
			fmt.Fprintf(to, "Signed-By: %s\n", s.signedBy)
		}
		fmt.Fprintln(to)
	}
	if debian.Len() > 0 {
		return debian.String(), nil
	}
	if others.Len() > 0 {
		return others.String(), nil
	}
	return "", errNoSource
}

// sourcesOf returns the machine's own Debian sources for a suite, see forSuite.
func sourcesOf(suite string) (string, error) {
	osRelease, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return "", err
	}
	all, err := readSources("/")
	if err != nil {
		return "", err
	}
	return forSuite(all, codename(string(osRelease)), suite)
}

// readSources reads all of apt's sources below root ("/" but in tests).
func readSources(root string) ([]source, error) {
	names, err := filepath.Glob(filepath.Join(root, "etc/apt/sources.list.d/*"))
	if err != nil {
		return nil, err
	}
	var out []source
	for _, name := range append([]string{filepath.Join(root, "etc/apt/sources.list")}, names...) {
		parse := parseOneLine
		switch filepath.Ext(name) {
		case ".list":
		case ".sources":
			parse = parseDeb822
		default: // apt ignores other names too
			continue
		}
		text, err := os.ReadFile(name)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		out = append(out, parse(string(text))...)
	}
	return out, nil
}

// codename is VERSION_CODENAME of os-release(5).
func codename(osRelease string) string {
	for _, line := range strings.Split(osRelease, "\n") {
		if v, ok := strings.CutPrefix(line, "VERSION_CODENAME="); ok {
			return strings.Trim(v, `"'`)
		}
	}
	return ""
}
