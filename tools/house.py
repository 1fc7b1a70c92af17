"""The shape of the source: how large its files are, how they depend on each other, and how much of it is explained.

``python tools/house.py`` prints it. The numbers are signals, not limits: ``tests/test_house.py`` only holds that no
file imports itself by way of others.

*Floors*: a file stands one floor above the highest file of its own room that it imports. Imports for type checking do
not count, nor do those inside functions, which are there to load something late.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import quantiles

SOURCE = Path(__file__).parents[1] / "src"
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
        functions = (n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
        return [(function.end_lineno or function.lineno) - function.lineno + 1 for function in functions]

    def imports(self, known: set[str]) -> set[str]:
        """Which of the known modules are loaded when this one is."""
        found: set[str] = set()
        left: list[ast.AST] = [self.tree]
        while left:
            node = left.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                left.extend(node.orelse)
                continue
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & known
                found.update(inner or {node.module})
            left.extend(ast.iter_child_nodes(node))
        return (found & known) - {self.name}


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
            self.modules[name] = Module(name, path.read_text(encoding="utf-8"), is_package)
        known = set(self.modules)
        self.imports = {name: module.imports(known) for name, module in self.modules.items()}

    def cycle(self) -> list[str]:
        """Modules that import each other in a circle; empty if there are none. Packages are left out."""
        files = {name for name, module in self.modules.items() if not module.is_package}
        try:
            TopologicalSorter({name: self.imports[name] & files for name in files}).prepare()
        except CycleError as e:
            return list(e.args[1])
        return []

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

    def long_function(self) -> float:
        """Nine of ten functions are not longer than this, in lines."""
        return quantiles([n for module in self.modules.values() for n in module.function_lengths()], n=10)[-1]


def main() -> None:
    house = House()
    longest, length = max(house.lengths().items(), key=lambda item: item[1])
    print(f"files                  {len(house.modules)}")
    print(f"lines of code          {house.code_lines()}")
    print(f"lines of comments      {house.comment_share():.1f} % of those")
    print(f"longest file           {length} ({longest})")
    print(f"nine of ten functions  up to {house.long_function():.0f} lines")
    circle = house.cycle()
    print(f"import cycle           {' -> '.join(circle) or 'none'}")
    if not circle:
        print("floors                 " + ", ".join(f"{room} {n}" for room, n in sorted(house.floors().items())))


if __name__ == "__main__":
    sys.exit(main())
