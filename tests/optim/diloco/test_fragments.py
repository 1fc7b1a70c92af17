"""Fragments: every parameter is in one of them, at a place that suits the codec, and comes back from there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.optim.diloco.fragments import Fragment, Fragments, strided_fragments


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Parameters of these sizes, all of whose values differ."""
    total, made = 0, []
    for size in sizes:
        made.append(torch.nn.Parameter(torch.arange(total + 1, total + size + 1).to(dtype)))
        total += size
    return made


def sizes_of(fragments: Fragments) -> list[list[int]]:
    return [[parameter.numel() for parameter in fragment.parameters] for fragment in fragments]


def test_fragments_are_balanced_and_the_same_everywhere():
    assert sizes_of(Fragments(parameters(3, 9, 4, 5, 4), 2)) == [[9, 4], [3, 4, 5]]
    assert sizes_of(Fragments(parameters(4, 4, 4), 2)) == [[4, 4], [4]]
    assert sizes_of(Fragments(parameters(1, 2, 3))) == [[1, 2, 3]]


def test_unnamed_parameters_fill_the_smallest_fragment():
    a, b, c, d = parameters(10, 2, 3, 1)
    assert sizes_of(Fragments([a, b, c, d], [[a], [b]])) == [[10], [2, 3, 1]]
    assert sizes_of(Fragments([a, b, c, d], [[d, c], iter([b, a])])) == [[3, 1], [10, 2]]


def test_tied_and_frozen_parameters_are_not_repeated():
    a, b, c = parameters(5, 6, 7)
    b.requires_grad_(False)
    (empty,) = parameters(0)
    assert sizes_of(Fragments([a, b, c, a, empty], [[a, b], [c, empty]])) == [[5], [7]]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 16))
def test_every_value_is_in_one_fragment_once(sizes, count, block):
    trained = parameters(*sizes)
    fragments = Fragments(trained, min(count, len(trained)), block)
    seen: list[float] = []
    for fragment in fragments:
        vector = fragment.read()
        assert fragment.length == len(vector)
        for offset, parameter in zip(fragment.offsets, fragment.parameters, strict=True):
            assert parameter.numel() < block or offset % block == 0
        assert int(torch.count_nonzero(vector)) == sum(each.numel() for each in fragment.parameters)
        seen += vector[vector != 0].tolist()
        with torch.no_grad():
            for parameter in fragment.parameters:
                parameter.zero_()
        fragment.write(vector)
        assert torch.equal(fragment.read(), vector)
    assert sorted(seen) == list(range(1, sum(sizes) + 1))


def test_large_parameters_begin_at_a_block():
    fragment = Fragment.of(parameters(3, 2, 8, 1, 9), block=4)
    assert fragment.offsets == (0, 3, 8, 16, 20)
    assert fragment.length == 29


def test_values_are_rounded_to_parameter_types():
    narrow, wide = parameters(2, dtype=torch.bfloat16)[0], parameters(2)[0]
    (fragment,) = Fragments([narrow, wide])
    vector = torch.tensor([1.001, 3.0, 1.001, 3.0])
    rounded = fragment.rounded(vector)
    assert torch.equal(rounded, torch.tensor([1.0, 3.0, 1.001, 3.0]))
    fragment.write(vector)
    assert torch.equal(fragment.read(), rounded)
    assert vector[0] != 1


def test_parameters_are_read_and_written_in_any_layout():
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
    fragment = Fragment.of([parameter])
    assert fragment.read().tolist() == [0, 3, 1, 4, 2, 5]
    fragment.write(fragment.read() * 2)
    assert parameter.detach().flatten().tolist() == [0, 6, 2, 8, 4, 10]


def test_peers_that_divide_differently_can_tell():
    def fingerprint(count: int, *sizes: int, block: int = 1) -> str:
        return Fragments(parameters(*sizes), count, block).fingerprint

    assert fingerprint(2, 4, 5, 6) == fingerprint(2, 4, 5, 6)
    others = [fingerprint(1, 4, 5, 6), fingerprint(2, 5, 4, 6), fingerprint(2, 4, 5, 6, block=3)]
    assert len({fingerprint(2, 4, 5, 6), *others}) == 4


def test_blocks_go_to_fragments_in_turn():
    blocks = [torch.nn.Linear(2, 2) for _ in range(5)]
    shared = torch.nn.Linear(2, 2)
    blocks[3].weight = blocks[0].weight
    chosen = strided_fragments(blocks, 2)
    assert [len(each) for each in chosen] == [6, 3]
    model = torch.nn.ModuleList([*blocks, shared])
    assert sizes_of(Fragments(model.parameters(), chosen)) == [[4, 2, 4, 2, 4, 2], [4, 2, 2, 4, 2]]
    with pytest.raises(ValueError, match="5 blocks can be divided into 1 to 5 fragments, not 6"):
        strided_fragments(blocks, 6)


def test_divisions_that_cannot_be():
    a, b = parameters(2, 3)
    whole = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    for arguments, message in [
        (([a, b], 3), "would be empty"),
        (([a, b], 0), "at least 1"),
        (([a, b], [[a], [a]]), "in another fragment"),
        (([a], [[a], [b]]), "no inner optimizer trains"),
        (([whole],), "only real numbers"),
        (([],), "nothing to train"),
    ]:
        with pytest.raises(ValueError, match=message):
            Fragments(*arguments)
