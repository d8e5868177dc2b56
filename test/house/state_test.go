package house

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestNoStateOutsideFunctions holds: no init(), no package-level variable that
// could change, no exit outside of cmd.
func TestNoStateOutsideFunctions(t *testing.T) {
	looked := 0
	for _, p := range packages(t) {
		self := strings.TrimPrefix(p.ImportPath, module+"/")
		if forTests(self) {
			continue
		}
		set := token.NewFileSet()
		var files []*ast.File
		for _, name := range p.GoFiles {
			f, err := parser.ParseFile(set, filepath.Join(p.Dir, name), nil, parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			if !ast.IsGenerated(f) {
				files = append(files, f)
			}
		}
		looked += len(files)
		changed := assigned(files)
		for _, f := range files {
			for _, decl := range f.Decls {
				check(t, set, decl, changed)
			}
			if !strings.HasPrefix(self, "cmd/") {
				exits(t, set, f)
			}
		}
	}
	if looked < 20 {
		t.Errorf("looked at %d files only", looked)
	}
}

func check(t *testing.T, set *token.FileSet, decl ast.Decl, changed map[string]bool) {
	switch d := decl.(type) {
	case *ast.FuncDecl:
		if d.Recv == nil && d.Name.Name == "init" {
			t.Errorf("%s: init() runs before anybody can say how", set.Position(d.Pos()))
		}
	case *ast.GenDecl:
		if d.Tok != token.VAR {
			return
		}
		for _, s := range d.Specs {
			v := s.(*ast.ValueSpec)
			for i, name := range v.Names {
				made := embedded(d.Doc) || embedded(v.Doc) || i < len(v.Values) && constant(v.Values[i])
				if name.Name == "_" || made && !changed[name.Name] {
					continue
				}
				t.Errorf("%s: package-level variable %s: state belongs to whoever makes it", set.Position(name.Pos()), name.Name)
			}
		}
	}
}

// embedded reports whether a variable holds files that the compiler put there,
// which Go allows nowhere else.
func embedded(doc *ast.CommentGroup) bool {
	return doc != nil && slices.ContainsFunc(doc.List, func(c *ast.Comment) bool { return strings.HasPrefix(c.Text, "//go:embed ") })
}

// constant reports whether a value is one that is made once: a sentinel error,
// a compiled pattern, a list written out.
func constant(e ast.Expr) bool {
	switch e := e.(type) {
	case *ast.CallExpr:
		sel, ok := e.Fun.(*ast.SelectorExpr)
		if !ok {
			return false
		}
		from, ok := sel.X.(*ast.Ident)
		return ok && slices.Contains([]string{"errors.New", "fmt.Errorf", "regexp.MustCompile", "netip.MustParsePrefix", "netip.MustParseAddr"}, from.Name+"."+sel.Sel.Name)
	case *ast.CompositeLit:
		_, ok := e.Type.(*ast.ArrayType)
		return ok && len(e.Elts) > 0
	}
	return false
}

// assigned are the names that anything in the files assigns to, whole or in
// part.
func assigned(files []*ast.File) map[string]bool {
	names := map[string]bool{}
	note := func(e ast.Expr) {
		for {
			switch x := e.(type) {
			case *ast.IndexExpr:
				e = x.X
				continue
			case *ast.SelectorExpr:
				e = x.X
				continue
			case *ast.Ident:
				names[x.Name] = true
			}
			return
		}
	}
	for _, f := range files {
		ast.Inspect(f, func(n ast.Node) bool {
			switch s := n.(type) {
			case *ast.AssignStmt:
				if s.Tok != token.DEFINE {
					for _, e := range s.Lhs {
						note(e)
					}
				}
			case *ast.IncDecStmt:
				note(s.X)
			case *ast.UnaryExpr:
				if s.Op == token.AND {
					note(s.X)
				}
			}
			return true
		})
	}
	return names
}

// exits finds os.Exit and log.Fatal.
func exits(t *testing.T, set *token.FileSet, f *ast.File) {
	ast.Inspect(f, func(n ast.Node) bool {
		sel, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		from, ok := sel.X.(*ast.Ident)
		if ok && (from.Name == "os" && sel.Sel.Name == "Exit" || from.Name == "log" && strings.HasPrefix(sel.Sel.Name, "Fatal")) {
			t.Errorf("%s: only cmd exits", set.Position(n.Pos()))
		}
		return true
	})
}
