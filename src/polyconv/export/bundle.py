"""One file out of several modules of this package: the definitions that an entry module needs, in their own words.

The text of a definition is taken as it stands, comments and docstrings included. Only these things change: imports from
the package disappear, a name that two modules define gets its module's name in front, methods that nobody calls are
left out, and what Python 3.8 lacks (``dataclass(slots=True)``, ``tuple[int, int]`` outside annotations) is spelled as
it knows it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

_TOLD_TO_CHECKERS = re.compile(r"  # (type: ignore|noqa)\b.*$")
_OLD_GENERICS = {"tuple": "Tuple", "dict": "Dict", "list": "List", "type": "Type"}


class BundleError(RuntimeError):
    """The modules use something that cannot be carried into one file."""


@dataclass(frozen=True)
class _Definition:
    """A name at the top of a module of the package."""

    module: str
    name: str


@dataclass(frozen=True)
class _Submodule:
    name: str


@dataclass(frozen=True)
class _External:
    """A name from outside the package: ``import module`` or ``from module import name``."""

    module: str
    name: str | None


_Binding = _Definition | _Submodule | _External


@dataclass(frozen=True)
class _Reference:
    node: ast.expr
    written: str
    binding: _Binding
    shadows: frozenset[str]
    """Local names around the reference, which a global name must not take."""
    inside: ast.JoinedStr | None
    """The f-string around it: there Python before 3.12 does not tell positions."""


@dataclass
class _Unit:
    """A top-level statement, or a method of a top-level class."""

    module: _Module
    name: str
    first: int
    last: int
    references: list[_Reference]
    attributes: set[str]
    methods: dict[str, _Unit] = field(default_factory=dict)
    edits: list[tuple[ast.expr | ast.keyword, str]] = field(default_factory=list)
    simple: bool = False
    """An assignment or an expression: needs no blank lines around it."""
    called_from_outside: bool = False
    """A class whose base is not ours: the base may call any method."""


@dataclass
class _Module:
    name: str
    source: str
    tree: ast.Module
    bindings: dict[str, _Binding] = field(default_factory=dict)
    units: dict[str, _Unit] = field(default_factory=dict)
    imported: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        return self.source.splitlines()

    @property
    def title(self) -> str:
        """The first sentence of the module's docstring."""
        text = " ".join((ast.get_docstring(self.tree) or "").split("\n\n")[0].split())
        return re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"\1", text)


def bundle(entry: str, *, package: str, replaced: Mapping[str, str], dropped: Iterable[str] = ()) -> str:
    """The text of the module whose source is ``entry``, with everything it needs of ``package`` in front.

    Args:
        entry: source of the module that the file stands for; its docstring comes first, all its statements are kept.
        package: the package whose modules are dissolved into the file; everything else stays an import.
        replaced: module name -> source to take in place of the module's file.
        dropped: methods (``module.Class.method``) that are left out although their name is used somewhere.
    """
    return _Bundle(package, {**replaced, "": entry}, frozenset(dropped)).text()


class _Bundle:
    def __init__(self, package: str, sources: Mapping[str, str], dropped: frozenset[str]) -> None:
        self.package = package
        self.sources = sources
        self.dropped = dropped
        self.modules: dict[str, _Module] = {}
        self.order: list[_Module] = []
        self.kept: list[_Unit] = []

    def text(self) -> str:
        entry = self.load("")
        self.keep(entry)
        names = self.choose_names()
        head = entry.source[: entry.source.index('"""')]  # comments for the linter
        parts = [f'{head}"""{ast.get_docstring(entry.tree, clean=False)}"""', "from __future__ import annotations"]
        parts.append(_imports({r.binding for u in self.kept for r in u.references if isinstance(r.binding, _External)}))
        kept = {id(unit) for unit in self.kept}
        body = ""
        for module in self.order:
            units = [unit for unit in module.units.values() if id(unit) in kept]
            if not units:
                continue
            body += "\n\n" if body else "\n"
            if module.title and module is not entry:
                body += f"\n{_comment(module.title)}\n" + ("" if units[0].simple else "\n")
            before: _Unit | None = None
            for unit in units:
                if before is not None:
                    tight = before.simple and unit.simple
                    body += "" if tight and unit.first - before.last == 1 else "\n" if tight else "\n\n"
                body += "\n" + self.render(unit, names, kept)
                before = unit
        return "\n\n".join(parts) + body + "\n"

    # ---- reading modules

    def load(self, name: str) -> _Module:
        if name in self.modules:
            return self.modules[name]
        source = self.sources[name] if name in self.sources else _read(name)
        module = self.modules[name] = _Module(name, source, ast.parse(source))
        for node in module.tree.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._bind_imports(module, node)
        for name in module.imported:
            self.load(name)
        for unit in _units(module):
            module.bindings[unit.name] = _Definition(module.name, unit.name)
            module.units[unit.name] = unit
        for node in module.tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)):
                _read_references(module, module.units[_defined(node)], node)
        self.order.append(module)
        return module

    def _bind_imports(self, module: _Module, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                module.bindings[alias.asname or alias.name.partition(".")[0]] = _External(alias.name, None)
            return
        base = node.module or ""
        if node.level:
            parents = module.name.split(".")[: -node.level]
            base = ".".join([*parents, base] if base else parents)
        if base == "__future__":
            return
        inside = base == self.package or base.startswith(self.package + ".")
        for alias in node.names:
            local, submodule = alias.asname or alias.name, f"{base}.{alias.name}"
            if not inside:
                if alias.asname:
                    raise BundleError(f"{module.name}: import {alias.name} under its own name")
                module.bindings[local] = _External(base, alias.name)
            elif submodule in self.sources or _exists(submodule):
                module.bindings[local] = _Submodule(submodule)
                module.imported.append(submodule)
            else:
                module.bindings[local] = _Definition(base, alias.name)
                module.imported.append(base)

    # ---- what is needed

    def find(self, binding: _Definition) -> _Unit:
        module = self.load(binding.module)
        onward = module.bindings.get(binding.name)
        if isinstance(onward, _Definition) and onward != binding:
            return self.find(onward)
        if binding.name not in module.units:
            raise BundleError(f"{binding.module} does not define {binding.name}")
        return module.units[binding.name]

    def keep(self, entry: _Module) -> None:
        """Everything that the entry's statements reach, methods by the name under which they may be called."""
        kept: dict[int, _Unit] = {}
        waiting = list(entry.units.values())
        attributes: set[str] = set()
        while waiting:
            unit = waiting.pop()
            if id(unit) not in kept:
                kept[id(unit)] = unit
                attributes |= unit.attributes
                waiting += [self.find(r.binding) for r in unit.references if isinstance(r.binding, _Definition)]
            if not waiting:
                waiting += [
                    method
                    for owner in kept.values()
                    for name, method in owner.methods.items()
                    if id(method) not in kept and self.is_called(owner, name, attributes)
                ]
        self.kept = list(kept.values())

    def is_called(self, owner: _Unit, method: str, attributes: set[str]) -> bool:
        if f"{owner.module.name}.{owner.name}.{method}" in self.dropped:
            return False
        special = method.startswith("__") and method.endswith("__")
        return special or method in attributes or owner.called_from_outside

    def choose_names(self) -> dict[int, str]:
        """Every definition's name in the file."""
        top = [unit for unit in self.kept if unit.module.units.get(unit.name) is unit]
        taken: dict[str, int] = {}
        for unit in top:
            taken[unit.name] = taken.get(unit.name, 0) + 1
        shadowed = {
            id(self.find(r.binding))
            for unit in self.kept
            for r in unit.references
            if isinstance(r.binding, _Definition) and self.find(r.binding).name in r.shadows
        }
        names = {}
        for unit in top:
            names[id(unit)] = _prefixed(unit) if taken[unit.name] > 1 or id(unit) in shadowed else unit.name
        for unit in top:  # a name with a prefix may be another one's without
            if any(names[id(other)] == names[id(unit)] for other in top if other is not unit):
                names[id(unit)] = _prefixed(unit)
        return names

    # ---- writing

    def render(self, unit: _Unit, names: dict[int, str], kept: set[int]) -> str:
        module = unit.module
        lines = [line.encode() for line in module.lines]
        removed: set[int] = set()
        edits: list[tuple[int, int, int, int, str]] = []
        in_strings: list[tuple[ast.JoinedStr, str, str]] = []
        for part in (unit, *unit.methods.values()):
            if id(part) not in kept:
                removed |= set(range(part.first, part.last + 1))
                continue
            edits += [_edit(node, text) for node, text in part.edits]
            for reference in part.references:
                if not isinstance(reference.binding, _Definition):
                    continue
                name = names[id(self.find(reference.binding))]
                if name == reference.written:
                    continue
                if reference.inside is not None:
                    in_strings.append((reference.inside, reference.written, name))
                else:
                    edits.append(_edit(reference.node, name))
        if names[id(unit)] != unit.name:
            lines[_heading(unit) - 1] = re.sub(
                rf"\b{unit.name}\b", names[id(unit)], lines[_heading(unit) - 1].decode(), count=1
            ).encode()
            shift = len(names[id(unit)]) - len(unit.name)
            edits = [_shifted(edit, _heading(unit), shift) for edit in edits]
        for first, start, last, end, text in sorted(set(edits), reverse=True):
            tail = lines[last - 1][end:]
            lines[first - 1] = lines[first - 1][:start] + text.encode() + tail
            for gone in range(first, last):
                lines[gone] = b""
                removed.add(gone + 1)
        for string, written, name in in_strings:
            for number in range(string.lineno, (string.end_lineno or string.lineno) + 1):
                pattern = rf"(?<![\w.]){re.escape(written)}\b(?=[^{{}}]*\}})"
                lines[number - 1] = re.sub(pattern, name, lines[number - 1].decode()).encode()
        chosen = [
            _TOLD_TO_CHECKERS.sub("", lines[n - 1].decode())
            for n in range(unit.first, unit.last + 1)
            if n not in removed
        ]
        return re.sub(r"\n{3,}", "\n\n", "\n".join(chosen)).rstrip("\n")


def _edit(node: ast.expr | ast.keyword, text: str) -> tuple[int, int, int, int, str]:
    return (node.lineno, node.col_offset, node.end_lineno or node.lineno, node.end_col_offset or 0, text)


def _shifted(edit: tuple[int, int, int, int, str], line: int, shift: int) -> tuple[int, int, int, int, str]:
    first, start, last, end, text = edit
    return (first, start + shift * (first == line), last, end + shift * (last == line), text)


def _heading(unit: _Unit) -> int:
    """The line on which a definition's name stands."""
    pattern = rf"\s*(?:def |class |){unit.name}\b"
    return next(n for n in range(unit.first, unit.last + 1) if re.match(pattern, unit.module.lines[n - 1]))


def _prefixed(unit: _Unit) -> str:
    module = unit.module.name.rpartition(".")[2]
    if unit.name.isupper():
        module = module.upper()
    return f"_{module}{unit.name}" if unit.name.startswith("_") else f"{module}_{unit.name}"


def _read(name: str) -> str:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise BundleError(f"there is no module {name}")
    return Path(spec.origin).read_text(encoding="utf-8")


def _exists(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is a module, not a package
        return False


def _comment(text: str) -> str:
    lines, line = [], "# ----"
    for word in text.split():
        if len(line) + 1 + len(word) > 120:
            lines.append(line)
            line = "#"
        line += " " + word
    return "\n".join([*lines, line])


def _imports(externals: set[_External]) -> str:
    """Import statements, sorted as isort does: the standard library, then torch."""
    groups: list[list[str]] = [[], []]
    plain = sorted({e.module for e in externals if e.name is None})
    for module in plain:
        groups[module.startswith("torch")].append(f"import {module}")
    for module in sorted({e.module for e in externals if e.name is not None}):
        names = sorted({e.name for e in externals if e.module == module and e.name}, key=_isort_key)
        groups[module.startswith("torch")].append(f"from {module} import {', '.join(names)}")
    return "\n\n".join("\n".join(group) for group in groups if group)


def _isort_key(name: str) -> tuple[int, str]:
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


# ---- what a module's statements are


def _defined(node: ast.stmt) -> str:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    if len(targets) != 1 or not isinstance(targets[0], ast.Name):
        raise BundleError(f"cannot carry over the statement in line {node.lineno}")
    return targets[0].id


def _units(module: _Module) -> Iterator[_Unit]:
    last: _Unit | None = None
    for node in module.tree.body:
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if text and last is not None and last.simple:  # the docstring of a constant
            last.last = node.end_lineno or node.lineno
            continue
        if text or isinstance(node, (ast.Import, ast.ImportFrom)) or _for_checkers(node):
            continue
        last = _unit(module, _defined(node), node, above=True)
        if isinstance(node, ast.ClassDef):
            bases = {base.partition(".")[0] for base in map(ast.unparse, node.bases)}
            last.called_from_outside = any(isinstance(module.bindings.get(base), _External) for base in bases)
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    last.methods[member.name] = _unit(module, member.name, member, above=True)
        yield last


def _for_checkers(node: ast.stmt) -> bool:
    """``if TYPE_CHECKING:``. Annotations are never evaluated, so what is imported there may stay unknown."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _unit(module: _Module, name: str, node: ast.stmt, *, above: bool) -> _Unit:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)])
    lines = module.lines
    while above and first > 1 and lines[first - 2].lstrip().startswith("#"):
        first -= 1
    simple = isinstance(node, (ast.Assign, ast.AnnAssign))
    return _Unit(module, name, first, node.end_lineno or node.lineno, [], set(), simple=simple)


def _read_references(module: _Module, unit: _Unit, node: ast.stmt) -> None:
    for part, nodes in _parts(unit, node):
        reader = _Reader(module)
        for each in nodes:
            reader.visit(each)
        part.references, part.attributes, part.edits = reader.found, reader.attributes, reader.edits
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        _spell_old_generics(unit, node.value)


def _parts(unit: _Unit, node: ast.stmt) -> Iterator[tuple[_Unit, list[ast.AST]]]:
    if not isinstance(node, ast.ClassDef):
        yield unit, [node]
        return
    own = [member for member in node.body if not isinstance(member, ast.FunctionDef)]
    yield unit, [*node.decorator_list, *node.bases, *node.keywords, *own]
    for member in node.body:
        if isinstance(member, ast.FunctionDef):
            yield unit.methods[member.name], [member]


def _spell_old_generics(unit: _Unit, value: ast.expr) -> None:
    """``Pair = tuple[int, int]`` is evaluated; Python 3.8 wants ``Tuple`` there."""
    for node in ast.walk(value):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in _OLD_GENERICS:
            name = _OLD_GENERICS[node.value.id]
            unit.edits.append((node.value, name))
            unit.references.append(_Reference(node.value, name, _External("typing", name), frozenset(), None))


class _Reader(ast.NodeVisitor):
    """Collects what a statement refers to outside itself."""

    def __init__(self, module: _Module) -> None:
        self.module = module
        self.scopes: list[set[str]] = []
        self.inside: ast.JoinedStr | None = None
        self.found: list[_Reference] = []
        self.attributes: set[str] = set()
        self.edits: list[tuple[ast.expr | ast.keyword, str]] = []

    def _refer(self, node: ast.expr, written: str, binding: _Binding) -> None:
        shadows = frozenset(name for scope in self.scopes for name in scope)
        self.found.append(_Reference(node, written, binding, shadows, self.inside))

    def _binding(self, name: str) -> _Binding | None:
        return None if any(name in scope for scope in self.scopes) else self.module.bindings.get(name)

    def visit_Name(self, node: ast.Name) -> None:
        binding = self._binding(node.id)
        if isinstance(binding, _Submodule):
            raise BundleError(f"{self.module.name}, line {node.lineno}: the module {node.id} is used as a value")
        if binding is not None and isinstance(node.ctx, ast.Load):
            self._refer(node, node.id, binding)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.attributes.add(node.attr)
        if isinstance(node.value, ast.Name):
            binding = self._binding(node.value.id)
            if isinstance(binding, _Submodule):
                self._refer(node, f"{node.value.id}.{node.attr}", _Definition(binding.name, node.attr))
                return
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        outer, self.inside = self.inside, self.inside or node
        self.generic_visit(node)
        self.inside = outer

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "dataclass":
            kept = [k for k in node.keywords if k.arg != "slots"]
            if len(kept) < len(node.keywords):
                arguments = ", ".join(f"{k.arg}={ast.unparse(k.value)}" for k in kept)
                self.edits.append((node, f"dataclass({arguments})"))
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for each in (*node.decorator_list, *node.args.defaults, *node.args.kw_defaults):
            if each is not None:
                self.visit(each)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments += [a for a in (node.args.vararg, node.args.kwarg) if a is not None]
        for annotation in (*(a.annotation for a in arguments), node.returns):
            if annotation is not None:
                self.visit(annotation)
        self.scopes.append({a.arg for a in arguments} | _assigned(node.body))
        for statement in node.body:
            self.visit(statement)
        self.scopes.pop()

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.scopes.append({a.arg for a in node.args.args})
        self.generic_visit(node)
        self.scopes.pop()

    def _visit_comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        self.scopes.append(_assigned([generator.target for generator in node.generators]))
        self.generic_visit(node)
        self.scopes.pop()

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _visit_comprehension  # noqa: N815


def _assigned(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that a function's own statements bind; nested functions and comprehensions bind theirs elsewhere."""
    found: set[str] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif not isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp, ast.Lambda)):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            waiting += ast.iter_child_nodes(node)
    return found
