package main

import (
	"errors"
	"testing"
)

const deb822 = `Types: deb deb-src
# where it was before
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates bookworm-backports
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main

Types: deb
URIs: http://vendor.example/linux
Suites: bookworm
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mQINBGO
 -----END PGP PUBLIC KEY BLOCK-----
`

const oneLine = `# deb cdrom:[Debian 12]/ bookworm main
deb cdrom:[Debian GNU/Linux 12]/ bookworm main
deb http://mirror.example/debian bookworm main non-free-firmware # ours
deb-src http://mirror.example/debian bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://mirror.example/debian-security	bookworm-security main
deb [signed-by=/usr/share/keyrings/vendor.gpg] http://vendor.example/linux bookworm main
deb http://vendor.example/docker bookworm stable
`

const keyring = "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"

// TestForSuite: both formats give Debian's own archives and nobody else's, of
// another suite.
func TestForSuite(t *testing.T) {
	entry := func(uri, suites, signed string) string {
		return "Types: deb\nURIs: " + uri + "\nSuites: " + suites + "\nComponents: main\nArchitectures: amd64\nTargets: Packages\n" + signed + "\n"
	}
	for _, c := range []struct {
		name, suite, want string
		sources           []source
	}{
		{"deb822", "trixie", entry("http://mirror.example/debian", "trixie trixie-updates", keyring) +
			entry("http://mirror.example/debian-security", "trixie-security", keyring), parseDeb822(deb822)},
		{"sid has one suite", "sid", entry("http://mirror.example/debian", "sid", keyring), parseDeb822(deb822)},
		{"one line", "bookworm", entry("http://mirror.example/debian", "bookworm", "") +
			entry("http://mirror.example/debian-security", "bookworm-security", keyring), parseOneLine(oneLine)},
		{"named by standing", "sid", entry("http://mirror.example/debian", "sid", ""), parseOneLine("deb http://mirror.example/debian stable main")},
		{"own key", "sid", entry("http://mirror.example/debian", "sid", "Signed-By: /etc/apt/keyrings/ours.gpg\n"),
			parseOneLine("deb [signed-by=/etc/apt/keyrings/ours.gpg] http://mirror.example/debian bookworm main")},
	} {
		got, err := forSuite(c.sources, "bookworm", c.suite)
		if err != nil || got != c.want {
			t.Errorf("%s: %v\ngot:\n%s\nwant:\n%s", c.name, err, got, c.want)
		}
	}
	if got, err := forSuite(parseOneLine("deb http://vendor.example/linux noble main"), "bookworm", "sid"); !errors.Is(err, errNoSource) {
		t.Errorf("no Debian source: %q, %v", got, err)
	}
}

// TestInlineKey: a key that stands in the sources file goes along whole.
func TestInlineKey(t *testing.T) {
	all := parseDeb822(deb822)
	want := "\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQINBGO\n -----END PGP PUBLIC KEY BLOCK-----"
	if got := all[len(all)-1].signedBy; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestCodename reads os-release with and without quotes.
func TestCodename(t *testing.T) {
	for _, text := range []string{"ID=debian\nVERSION_CODENAME=trixie\n", "VERSION_CODENAME=\"trixie\""} {
		if got := codename(text); got != "trixie" {
			t.Errorf("%q: %q", text, got)
		}
	}
}
