"""The demo's transformer looks back only, learns, and writes."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.cli.demo.model import (
    ByteTransformer,
    ModelSize,
    even_windows,
    held_out_loss,
    loss_on,
    parameter_groups,
    random_windows,
    sample,
    warm_up,
)

SMALL = ModelSize(context=16, width=16, heads=2, layers=2)


@pytest.fixture
def model() -> ByteTransformer:
    torch.manual_seed(0)
    return ByteTransformer(SMALL)


def test_a_byte_changes_nothing_before_it(model: ByteTransformer) -> None:
    tokens = torch.randint(0, 256, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (tokens[:, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=0)
    assert (before[:, 9:] != after[:, 9:]).any(dim=-1).all()


def test_untrained_model_is_about_as_good_as_guessing(model: ByteTransformer) -> None:
    windows = torch.randint(0, 256, (8, 17))
    assert loss_on(model, windows).item() == pytest.approx(math.log(256), abs=0.2)


def test_learns_a_repeated_text(model: ByteTransformer) -> None:
    text = torch.tensor(list(b"the same words again and again, " * 40), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(parameter_groups(model))
    for _ in range(120):
        optimizer.zero_grad()
        loss_on(model, random_windows(text, 16, 17, generator)).backward()
        optimizer.step()
    assert held_out_loss(model, even_windows(text, 32, 17)) < 0.3
    assert "words again" in sample(model, "the same ", 30, seed=0, temperature=0.3)


def test_groups_hold_every_parameter_once(model: ByteTransformer) -> None:
    grouped = [id(parameter) for group in parameter_groups(model) for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())


def test_measuring_in_batches_changes_nothing(model: ByteTransformer) -> None:
    windows = torch.randint(0, 256, (10, 17))
    assert held_out_loss(model, windows, batch_size=3) == pytest.approx(loss_on(model, windows).item(), rel=1e-5)


def test_even_windows_reach_both_ends() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    windows = even_windows(text, 5, 10)
    assert windows.shape == (5, 10)
    assert windows[0, 0] == 0
    assert windows[-1, -1] == 199


def test_sample_is_as_long_as_asked_and_repeatable(model: ByteTransformer) -> None:
    first, second = (sample(model, "ab", 40, seed=3) for _ in range(2))
    assert first == second
    assert first.startswith("ab")


def test_learning_rate_warms_up_and_stays() -> None:
    assert [warm_up(epoch) for epoch in (0, 4, 5, 500)] == [pytest.approx(0.2), 1.0, 1.0, 1.0]
