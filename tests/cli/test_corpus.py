"""The demo's text is cut the same way everywhere, and what is to be beaten is computed right."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from shoal.cli.demo.model import entropies, load_corpus, source_files


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for number in range(200):
        folder = tmp_path / f"package{number % 7}"
        folder.mkdir(exist_ok=True)
        (folder / f"module{number}.py").write_text(f"# {number}\n" + f"value_{number} = {number}\n" * 120)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_nothing.py").write_text("assert True\n")
    (tmp_path / "README.txt").write_text("not Python\n")
    return tmp_path


def test_cut_is_reproducible_and_parts_are_disjoint(library: Path) -> None:
    first, second = load_corpus(3, library), load_corpus(3, library)
    assert all(torch.equal(a, b) for a, b in zip(first.shards, second.shards, strict=True))
    assert torch.equal(first.held_out, second.held_out)
    parts = [bytes(part.numpy()).decode() for part in (*first.shards, first.held_out)]
    headers = [{line for line in part.splitlines() if line.startswith("# ")} for part in parts]
    assert sum(len(found) for found in headers) == len(set.union(*headers)) == 200 == first.files


def test_tests_and_other_files_are_left_out(library: Path) -> None:
    names = {path.name for path in source_files(library)}
    assert len(names) == 200
    assert "test_nothing.py" not in names


def test_too_little_text_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_corpus(2, tmp_path)


def test_entropy_of_alternating_bytes() -> None:
    text = torch.tensor([65, 66] * 5000, dtype=torch.uint8)
    unigram, bigram = entropies(text)
    assert unigram == pytest.approx(math.log(2), abs=1e-3)  # either byte is as likely
    assert bigram == pytest.approx(0.0, abs=1e-9)  # and each follows from the one before


def test_entropy_of_random_bytes() -> None:
    text = torch.randint(0, 4, (200_000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    unigram, bigram = entropies(text)
    assert unigram == pytest.approx(math.log(4), abs=1e-3)
    assert bigram == pytest.approx(math.log(4), abs=1e-3)


def test_standard_library_of_this_machine_is_enough() -> None:
    corpus = load_corpus(5)
    assert all(len(part) > 100_000 for part in (*corpus.shards, corpus.held_out))
    assert 2.0 < corpus.bigram_entropy < corpus.unigram_entropy < 4.0
