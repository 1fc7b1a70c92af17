"""The source keeps its shape, and the map of it is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.house import SOURCE, House

MOST_FLOORS = 8
"""From the lowest file of a room to its highest; more is hard to keep in mind."""
LONGEST_FILE = 500
MOST_FILES = 135


@pytest.fixture(scope="module")
def house() -> House:
    return House()


def test_nothing_imports_itself_by_way_of_others(house: House) -> None:
    assert not house.cycle()


def test_rooms_are_not_too_high(house: House) -> None:
    heights = house.floors()
    assert {"averaging", "dht", "optim", "p2p"} <= heights.keys()
    assert max(heights.values()) <= MOST_FLOORS, heights


def test_files_are_neither_too_long_nor_too_many(house: House) -> None:
    lengths = house.lengths()
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}
    assert len(lengths) <= MOST_FILES


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
