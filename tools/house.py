"""The shape of the source: how many things a reader must hold in the head, and how files depend on each other.

``python tools/house.py`` prints it, and ``python tools/house.py --all`` names what it counts. The numbers are signals,
not limits: ``tests/test_house.py`` only holds that no file imports itself by way of others, all imports counted, and
that no two classes have one name.

*Floors*: a file stands one floor above the highest file of its own room that it imports. Imports for type checking do
not count, nor do those inside functions, which are there to load something late.

*Knots*: files that import each other in circles, counting all imports. Whoever reads one of them has to read all.

*Attributes* of a class: what its methods assign to ``self``, and the fields that are declared in its body.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import median, quantiles

SOURCE = Path(__file__).parents[1] / "src"
# A class with this many attributes or more is listed.
MANY_ATTRIBUTES = 15
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass
class Module:
    """One file.

    Args:
        name: its import path.
        text: what is in it.
    """

    name: str
    text: str
    is_package: bool
    path: str = ""
    """Below the source tree."""
    tree: ast.Module = field(init=False)

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.text)

    @property
    def room(self) -> str:
        """The package below ``shoal`` that it is in; empty at the root."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 2 or (self.is_package and len(parts) == 2) else ""

    def code_lines(self) -> int:
        """Lines that are neither empty nor comments nor docstrings."""
        docstrings = {
            line
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _NO_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
        return len(lines - docstrings)

    def comment_lines(self) -> int:
        """Lines with nothing but a comment."""
        return sum(line.lstrip().startswith("#") for line in self.text.splitlines())

    def function_lengths(self) -> list[int]:
        """Lines of each function, docstring included."""
        functions = (n for n in ast.walk(self.tree) if isinstance(n, _Function))
        return [(function.end_lineno or function.lineno) - function.lineno + 1 for function in functions]

    def classes(self) -> Iterator[tuple[str, int, set[str]]]:
        """The name of each class, the line where it begins, and its attributes."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                yield node.name, node.lineno, _attributes(node)

    def constants(self) -> Iterator[str]:
        """Names at the level of the module that stand for numbers."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _is_numeric(node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))

    def constructors(self) -> Iterator[tuple[str, int]]:
        """Each class that has a constructor, and how many parameters that takes."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                for each in node.body:
                    if isinstance(each, _Function) and each.name == "__init__":
                        arguments = each.args
                        yield node.name, len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]) - 1

    def imports(self, known: set[str], *, all_of_them: bool = False) -> set[str]:
        """Which of the known modules are loaded when this one is.

        Args:
            known: modules.
            all_of_them: count imports for type checking and those inside functions, too.
        """
        found: set[str] = set()
        left: list[ast.AST] = [self.tree]
        while left:
            node = left.pop()
            if isinstance(node, _Function | ast.Lambda) and not all_of_them:
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not all_of_them:
                left.extend(node.orelse)
                continue
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & known
                found.update(inner or {node.module})
            left.extend(ast.iter_child_nodes(node))
        return (found & known) - {self.name}


def _attributes(node: ast.ClassDef) -> set[str]:
    found = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for each in ast.walk(node):
        is_assigned = isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        if is_assigned and isinstance(each.value, ast.Name) and each.value.id == "self":
            found.add(each.attr)
    return found


def _is_numeric(value: ast.expr) -> bool:
    """Whether an expression is made of numbers only, such as ``2 * 2**20`` or ``4, 5.0``."""
    if isinstance(value, ast.Constant):
        return isinstance(value.value, int | float) and not isinstance(value.value, bool)
    if isinstance(value, ast.Tuple):
        return bool(value.elts) and all(map(_is_numeric, value.elts))
    if isinstance(value, ast.BinOp):
        return _is_numeric(value.left) and _is_numeric(value.right)
    return isinstance(value, ast.UnaryOp) and _is_numeric(value.operand)


class House:
    """All files of a source tree.

    Args:
        source: the folder that contains the package.
    """

    def __init__(self, source: Path = SOURCE) -> None:
        self.modules: dict[str, Module] = {}
        for path in sorted(source.rglob("*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            self.modules[name] = Module(
                name, path.read_text(encoding="utf-8"), is_package, str(path.relative_to(source))
            )
        known = set(self.modules)
        self.imports = {name: module.imports(known) for name, module in self.modules.items()}
        self.all_imports = {name: module.imports(known, all_of_them=True) for name, module in self.modules.items()}

    def cycle(self) -> list[str]:
        """Modules that import each other in a circle; empty if there are none. Packages are left out."""
        files = {name for name, module in self.modules.items() if not module.is_package}
        try:
            TopologicalSorter({name: self.imports[name] & files for name in files}).prepare()
        except CycleError as e:
            return list(e.args[1])
        return []

    def is_above(self, name: str, other: str) -> bool:
        """Whether a module imports another one, directly or by way of others, and not the other way round."""
        return other in self.reached_from(name) and name not in self.reached_from(other)

    @cache  # noqa: B019
    def reached_from(self, name: str) -> frozenset[str]:
        """All modules that are loaded because of this one."""
        reached: set[str] = set()
        left = [name]
        while left:
            new = self.imports[left.pop()] - reached
            reached |= new
            left.extend(new)
        return frozenset(reached)

    def knots(self) -> list[list[str]]:
        """Files that import each other in circles, counting all imports; the largest knot first.

        Packages are left out: that a file imports its own package, or that a package imports its files, ties no knot.
        """
        files = {name for name, module in self.modules.items() if not module.is_package}
        reached = {name: self._reached(name, files) for name in files}
        knots = {tuple(sorted(b for b in reached[a] if a in reached[b])) for a in files if a in reached[a]}
        return sorted(map(list, knots), key=lambda knot: (-len(knot), knot))

    def _reached(self, name: str, files: set[str]) -> set[str]:
        reached: set[str] = set()
        left = [name]
        while left:
            new = (self.all_imports[left.pop()] & files) - reached
            reached |= new
            left.extend(new)
        return reached

    def large_classes(self) -> list[tuple[int, str]]:
        """Classes with many attributes, the largest first."""
        found = [
            (len(attributes), f"{module.name}.{name}")
            for module in self.modules.values()
            for name, _, attributes in module.classes()
            if len(attributes) >= MANY_ATTRIBUTES
        ]
        return sorted(found, reverse=True)

    def double_names(self) -> dict[str, list[str]]:
        """Names of classes that stand in more than one file."""
        where: dict[str, set[str]] = defaultdict(set)
        for module in self.modules.values():
            for name, _, _ in module.classes():
                where[name].add(module.name)
        return {name: sorted(files) for name, files in sorted(where.items()) if len(files) > 1}

    def constants(self) -> list[str]:
        """Numbers that have a name at the level of their module."""
        return [f"{module.name}.{name}" for module in self.modules.values() for name in module.constants()]

    def largest_constructor(self) -> tuple[int, str]:
        """How many parameters it takes, and of which class it is."""
        return max((n, f"{m.name}.{name}") for m in self.modules.values() for name, n in m.constructors())

    def floors(self) -> dict[str, int]:
        """How many floors each room has. There must be no cycle."""
        files = {name: module.room for name, module in self.modules.items() if not module.is_package}

        @cache
        def floor(name: str) -> int:
            below = [other for other in self.imports[name] if files.get(other) == files[name]]
            return 1 + max(map(floor, below), default=0)

        heights: dict[str, int] = {}
        for name, room in files.items():
            if room:
                heights[room] = max(heights.get(room, 0), floor(name))
        return heights

    def lengths(self) -> dict[str, int]:
        """Lines of each file."""
        return {name: module.text.count("\n") for name, module in self.modules.items()}

    def code_lines(self) -> int:
        return sum(module.code_lines() for module in self.modules.values())

    def comment_share(self) -> float:
        """Lines with nothing but a comment, in percent of the lines of code."""
        return 100 * sum(module.comment_lines() for module in self.modules.values()) / self.code_lines()

    def function_lengths(self) -> list[int]:
        """Lines of all functions."""
        return [n for module in self.modules.values() for n in module.function_lengths()]


def main() -> None:
    parser = argparse.ArgumentParser(description="The shape of the source.")
    parser.add_argument("--all", action="store_true", help="name what is counted")
    names_all = parser.parse_args().all
    house = House()
    longest, length = max(house.lengths().items(), key=lambda item: item[1])
    lengths = house.function_lengths()
    print(f"files                  {len(house.modules)}")
    print(f"lines of code          {house.code_lines()}")
    print(f"lines of comments      {house.comment_share():.1f} % of those")
    print(f"longest file           {length} ({longest})")
    print(f"lines of a function    median {median(lengths):.0f}, 90th percentile {quantiles(lengths, n=10)[-1]:.0f}")
    print("largest constructor    {} parameters ({})".format(*house.largest_constructor()))
    circle = house.cycle()
    print(f"import cycle           {' -> '.join(circle) or 'none'}")
    if not circle:
        print("floors                 " + ", ".join(f"{room} {n}" for room, n in sorted(house.floors().items())))
    knots, classes, doubles, constants = house.knots(), house.large_classes(), house.double_names(), house.constants()
    print(f"knots of all imports   {len(knots)}: {', '.join(str(len(knot)) for knot in knots) or 'none'} files")
    print(f"large classes          {len(classes)} with {MANY_ATTRIBUTES} attributes or more")
    print(f"double names           {len(doubles)} of classes")
    print(f"numeric constants      {len(constants)}")
    if names_all:
        print("\nKnots", *(f"  {' '.join(knot)}" for knot in knots), sep="\n")
        print("\nLarge classes", *(f"  {n:3d} {name}" for n, name in classes), sep="\n")
        print("\nDouble names", *(f"  {name}: {' '.join(files)}" for name, files in doubles.items()), sep="\n")
        print("\nNumeric constants", *(f"  {name}" for name in constants), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
