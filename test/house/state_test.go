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
	files := 0
	for _, p := range packages(t) {
		self := strings.TrimPrefix(p.ImportPath, module+"/")
		if forTests(self) {
			continue
		}
		for _, name := range p.GoFiles {
			set := token.NewFileSet()
			f, err := parser.ParseFile(set, filepath.Join(p.Dir, name), nil, parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			if ast.IsGenerated(f) {
				continue
			}
			files++
			for _, decl := range f.Decls {
				check(t, set, decl)
			}
			if !strings.HasPrefix(self, "cmd/") {
				exits(t, set, f)
			}
		}
	}
	if files < 20 {
		t.Errorf("looked at %d files only", files)
	}
}

func check(t *testing.T, set *token.FileSet, decl ast.Decl) {
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
				if name.Name == "_" || i < len(v.Values) && constant(v.Values[i]) {
					continue
				}
				t.Errorf("%s: package-level variable %s: state belongs to whoever makes it", set.Position(name.Pos()), name.Name)
			}
		}
	}
}

// constant reports whether a value is one that nobody changes: a sentinel
// error, a compiled pattern, an array of literals.
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
		array, ok := e.Type.(*ast.ArrayType)
		return ok && array.Len != nil
	}
	return false
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
