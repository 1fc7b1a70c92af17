"""Files do not import each other in circles, and the map of the source is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.house import SOURCE, House
from tools.tests_for import find_tests, read_tables

pytestmark = pytest.mark.xdist_group("house")


@pytest.fixture(scope="module")
def house() -> House:
    return House()


def test_nothing_imports_itself_by_way_of_others(house: House) -> None:
    """Nor do imports for type checking and those inside functions make a circle."""
    assert not house.cycle()
    assert not house.knots()


def test_no_two_classes_have_one_name(house: House) -> None:
    assert not house.double_names()


def test_every_test_is_in_the_table_of_its_folder_and_every_file_has_tests(house: House) -> None:
    root = SOURCE.parent
    tables = read_tables()
    assert set(tables) == {path.relative_to(root).as_posix() for path in (root / "tests").rglob("test_*.py")}
    source = {
        name.removeprefix("shoal.").replace(".", "/") + ".py" for name, m in house.modules.items() if not m.is_package
    }
    told = set().union(*tables.values())
    assert told <= source
    assert source <= told | {"metrics.py"}, "files without tests"  # plain numbers
    assert "tests/net/test_tcp.py" in find_tests(SOURCE / "shoal" / "net" / "tcp" / "transport.py")
    assert "tests/averaging/test_rounds.py" in find_tests(SOURCE / "shoal" / "averaging" / "round")
    with pytest.raises(ValueError, match="no file under src/shoal"):
        find_tests(SOURCE / "shoal" / "net" / "tpc.py")


def test_every_file_on_the_map_exists() -> None:
    """In a row of a table, a file that is named without its room is in that of the one before."""
    text = (SOURCE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    room, named = Path(), 0
    for path in map(Path, re.findall(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)`", text)):
        if path.parts[0] in ("benchmarks", "tests", "tools"):
            assert (SOURCE.parent / path).is_file(), path
            continue
        path = path.relative_to("shoal") if path.parts[0] == "shoal" else path
        room = path.parent if len(path.parts) > 1 else room
        assert (SOURCE / "shoal" / path).is_file() or (SOURCE / "shoal" / room / path.name).is_file(), path
        named += 1
    assert named > 60


def test_whatever_a_docstring_refers_to_exists(house: House) -> None:
    source = "\n".join(module.text for module in house.modules.values())
    defined = set(re.findall(r"(?:def|class) (\w+)|^    (\w+)(?=: )|self\.(\w+) =", source, re.MULTILINE))
    names = {name for found in defined for name in found if name}
    missing = []
    for name, module in house.modules.items():
        room = name if module.is_package else name.rpartition(".")[0]
        for kind, target in re.findall(r":(mod|class|func|meth|attr):`~?([\w.]+)`", module.text):
            path = f"{room}{target}" if target.startswith(".") else target
            exists = path in house.modules if kind == "mod" else path.rpartition(".")[2] in names
            if not exists and (path.startswith("shoal") or "." not in path):
                missing.append(f"{name}: {target}")
    assert not missing
