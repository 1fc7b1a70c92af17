"""Mixtures of remote experts: weights, gradients, failures and time limits."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from shoal import DHT, RemoteExpert, RemoteMixtureOfExperts, RemoteSwitchMixtureOfExperts
from shoal.moe import mixture
from shoal.moe.declare import declare_experts
from shoal.moe.expert import DUMMY
from shoal.moe.mixture import _RemoteCallMany
from shoal.moe.uids import ExpertInfo
from tests.device import chosen_device
from tests.moe.servers import Row, expert, serving
from tests.moe.swarms import soon, swarm

ROWS = (Row(4),)


@contextmanager
def experts(*modules: Any, schema: Any = ROWS, **options: Any) -> Iterator[DHT]:
    """Serve ``e.0``, ``e.1``, …, and declare an expert for each ``None`` at a peer that is gone."""
    with swarm(2) as [first, client], ExitStack() as stack:
        backends = {f"e.{n}": expert(each, *schema, **options) for n, each in enumerate(modules) if each is not None}
        if gone := [f"e.{n}" for n, each in enumerate(modules) if each is None]:
            with DHT(initial_peers=first.get_visible_maddrs(), start=True) as dht:
                declare_experts(dht, gone, soon())
        stack.enter_context(serving(first, backends))
        declare_experts(first, [*backends], soon())
        yield client


def gated(client: DHT, kind: Any = RemoteMixtureOfExperts, size: int = 4, **options: Any) -> Any:
    """A mixture whose gate rates expert ``n`` by the ``n``-th value of the input."""
    layer = kind(**{"in_features": 4, "grid_size": (size,), "dht": client, "uid_prefix": "e.", "k_best": 2, **options})
    with torch.no_grad():
        layer.proj.weight.copy_(torch.eye(4)[:size])
        layer.proj.bias.zero_()
    return layer


def times(factor: float) -> Any:
    return lambda x, *rest: x * factor


def fails(*inputs: torch.Tensor) -> torch.Tensor:
    if inputs[0].any():  # not when it is tried
        raise ArithmeticError("broken")
    return inputs[0]


PREFERENCES = torch.tensor([[3.0, 2, 0, 0], [0, 3, 2, 0], [2, 0, 3, 0]])
"""The experts of the samples: 0 and 1, 1 and 2, 2 and 0."""


def test_calls_of_different_experts_equal_single_calls() -> None:
    with experts(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)) as client:
        mix = gated(client)
        (first, second, third) = mix.beam_search.find_best_experts([[3.0, 2, 1, 0]], 3)
        unusable = RemoteExpert(ExpertInfo("e.9", None), None)
        lists = [[first, second, third], [second, third], [first, second, unusable], []]
        inputs = torch.randn(4, 4, requires_grad=True)
        options = (1, 1, None, None, None, False, False, mix.info)
        mask, outputs = _RemoteCallMany.apply(DUMMY, lists, *options, inputs)
        assert mask.tolist() == [[True] * 3, [True, True, False], [True, True, False], [False] * 3]
        single = [
            torch.stack([each(inputs[n : n + 1])[0] for each in some if each is not unusable] or [torch.zeros(4)])
            for n, some in enumerate(lists)
        ]
        weights = torch.randn_like(outputs)
        for n, expected in enumerate(single[:3]):
            assert torch.allclose(outputs[n, : len(expected)], expected, atol=1e-5)
            assert not outputs[n, len(expected) :].any()
        (grad,) = torch.autograd.grad((outputs * weights).sum(), inputs)
        expected = sum((rows * weights[n, : len(rows)]).sum() for n, rows in enumerate(single[:3]))
        assert torch.allclose(grad, torch.autograd.grad(expected, inputs)[0], atol=1e-5)


def test_output_is_weighted_and_each_expert_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def note(uid: str, rows: Any, *args: Any) -> Any:
        asked.append((uid, len(rows[0])))
        return await call(uid, rows, *args)

    call = mixture.expert_forward
    monkeypatch.setattr(mixture, "expert_forward", note)
    with experts(times(1), times(10), times(100)) as client:
        mix, inputs = gated(client, size=3), PREFERENCES.clone().requires_grad_()
        output = mix(inputs)
        assert sorted(asked) == [("e.0", 2), ("e.1", 2), ("e.2", 2)]
        best, other = torch.softmax(torch.tensor([3.0, 2.0]), 0).tolist()
        factors = torch.tensor([best + 10 * other, 10 * best + 100 * other, 100 * best + other])
        assert torch.allclose(output, PREFERENCES * factors[:, None], atol=1e-4)
        output.sum().backward()
        assert mix.proj.weight.grad.norm() > 0
        assert inputs.grad is not None
        assert inputs.grad.norm() > 0
        asked.clear()
        mix.info["max_batch_size"] = 1
        assert torch.allclose(mix(PREFERENCES), output, atol=1e-4)
        assert sorted(asked) == [("e.0", 1)] * 2 + [("e.1", 1)] * 2 + [("e.2", 1)] * 2, "large groups are cut"


def test_failed_experts_have_no_weight_and_are_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def note(uid: str, *args: Any) -> Any:
        asked.append(uid)
        return await call(uid, *args)

    call = mixture.expert_forward
    monkeypatch.setattr(mixture, "expert_forward", note)
    with experts(None, times(10), fails) as client:
        mix, inputs = gated(client, size=3), torch.tensor([[3.0, 2, 1, 0], [0, 2, 3, 0]], requires_grad=True)
        output = mix(inputs)
        assert torch.allclose(output, inputs * 10), "also the schemas came from another expert than the dead one"
        assert sorted(asked) == ["e.0", "e.1", "e.2"]
        output.sum().backward()
        assert torch.allclose(inputs.grad, torch.full((2, 4), 10.0))
        asked.clear()
        assert torch.allclose(mix(inputs), inputs * 10)
        assert asked == ["e.1"]


def test_shape_of_outputs_is_that_of_most_samples() -> None:
    def widens(x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, 1000) if x.any() else x  # not when it is tried

    with experts(times(2), widens, widens) as client:
        inputs = torch.tensor([[4.0, 3, 2, 0], [4, 2, 3, 0], [4, 0, 0, 0]])
        first = gated(client, size=1, k_best=1).beam_search.find_best_experts([[1.0]], 1)
        second, third = gated(client, size=3).beam_search.find_best_experts([[-math.inf, 2.0, 1.0]], 2)
        lists = [[*first, second], [*first, third], first]
        options = (1, 1, None, None, None, False, False, gated(client).info)
        mask, outputs = _RemoteCallMany.apply(DUMMY, lists, *options, inputs)
        assert mask.tolist() == [[True, False]] * 3
        assert outputs[:, 0].equal(2 * inputs)


def test_each_sample_needs_answers() -> None:
    def picky(x: torch.Tensor) -> torch.Tensor:
        return fails(x) if x.any() and not x[0, 0] else x

    with experts(picky, max_batch_size=1) as client:  # samples are computed one by one
        inputs = torch.tensor([[3.0, 0, 0, 0], [0, 3, 2, 0]])
        with pytest.raises(TimeoutError, match=r"1 of 2 samples have fewer than k_min=1 .*ArithmeticError: broken"):
            gated(client, size=1)(inputs)
        with pytest.raises(RuntimeError, match=r"1 of 2 samples have no answer.*allow_zero_outputs=True"):
            gated(client, size=1, k_min=0)(inputs)
        output = gated(client, size=1, allow_zero_outputs=True)(inputs.requires_grad_())
        assert output.tolist() == [[3, 0, 0, 0], [0, 0, 0, 0]]
        output.sum().backward()
        assert inputs.grad.tolist() == [[1, 1, 1, 1], [0, 0, 0, 0]]
        with pytest.raises(TimeoutError, match="2 of 2 samples"):
            gated(client, size=1, allow_zero_outputs=True)(torch.eye(4)[1:3])
        with pytest.raises(ValueError, match="k_min must be from 0 to k_best"):
            gated(client, k_min=3)
        with pytest.raises(ValueError, match="k_best must be positive"):
            gated(client, k_best=0, k_min=0)
        for shape in ((4,), (0, 4)):
            with pytest.raises(ValueError, match=r"of shape \(samples, …, features\), with at least one sample, got"):
                gated(client)(torch.ones(shape))
        with pytest.raises(RuntimeError, match=r"no experts found with the prefix 'x\.'"):
            gated(client, uid_prefix="x.")(inputs)


def test_other_experts_are_asked_for_samples_without_answers() -> None:
    with experts(None, times(10), fails) as client:
        inputs = torch.tensor([[3.0, 2, 0, 0], [2, 0, 3, 0]])
        assert torch.allclose(gated(client, size=3, k_best=1)(inputs), inputs * 10)


def test_time_limits_hold() -> None:
    """Slow experts are waited for as long as the options say, and no longer."""
    end = threading.Event()

    def slow(x: torch.Tensor) -> torch.Tensor:
        if x.any():
            end.wait(20)
        return x

    with experts(times(2)) as quick_client, experts(slow) as client:
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"1 of 1 samples .*e\.0.* no answer in time"):
            gated(client, size=1, forward_timeout=0.2)(torch.eye(4)[:1])
        switch = gated(client, RemoteSwitchMixtureOfExperts, 1, k_best=1, timeout_after_k_min=0.2)
        inputs = torch.eye(4)[:1].requires_grad_()
        output, loss = switch(inputs)
        (output.sum() + loss).backward()
        assert torch.equal(output, inputs), "the clock of k_min=0 starts at once"
        assert time.monotonic() - began < 15
        end.set()
        assert torch.equal(gated(quick_client, size=1, timeout_after_k_min=0.0)(inputs), 2 * inputs)


def test_anomalies_are_detected() -> None:
    def poisoned(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x.sum() == 0, x, torch.nan)

    with experts(times(1), poisoned) as client:
        mix, inputs = gated(client, size=2, detect_anomalies=True), torch.tensor([[2.0, 3, 0, 0]], requires_grad=True)
        output = mix(inputs)
        assert torch.equal(output, inputs)
        with pytest.raises(ValueError, match=r"gradients .* must be finite"):
            (output * torch.inf).sum().backward()
        with pytest.raises(ValueError, match=r"inputs .* must be finite"):
            mix(inputs * torch.nan)


def test_scores_of_experts_follow_the_gate() -> None:
    with swarm(1) as [dht]:
        mix = RemoteMixtureOfExperts(in_features=4, grid_size=(3, 5), dht=dht, uid_prefix="e.", k_best=2)
        lists = [
            [RemoteExpert(ExpertInfo(uid, None), None) for uid in some]
            for some in (["e.0.4", "e.2.1", "e.1.1"], [], ["e.2.3"])
        ]
        first, second = torch.randn(3, 3, requires_grad=True), torch.randn(3, 5, requires_grad=True)
        scores = mix.compute_expert_scores([first, second], lists)
        assert scores.shape == (3, 3)
        expected = [first[0, 0] + second[0, 4], first[0, 2] + second[0, 1], first[0, 1] + second[0, 1]]
        assert torch.allclose(scores[0], torch.stack(expected))
        assert torch.allclose(scores[2, 0], first[2, 2] + second[2, 3])
        assert scores[1].isneginf().all()
        assert scores[2, 1:].isneginf().all()
        grads = torch.autograd.grad(scores[scores.isfinite()].sum(), (first, second))
        assert [each.count_nonzero() for each in grads] == [4, 3]


@pytest.mark.devices
def test_inputs_are_not_held_to_the_shape_of_the_schema() -> None:
    def attend(x: torch.Tensor, *, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": x * mask[..., None], "mask": mask}

    with experts(attend, attend, schema=(Row(7, 4),), kwargs_schema={"mask": Row(7, dtype=torch.int64)}) as client:
        device = chosen_device()
        inputs = torch.randn(2, 3, 4).to(device).requires_grad_()
        mask = torch.tensor([[1, 0, 1], [0, 0, 1]], device=device)
        output = gated(client, size=2).to(device)(inputs, mask=mask)
        assert torch.allclose(output["x"], inputs * mask[..., None], atol=1e-6)
        assert torch.allclose(output["mask"], mask.float())
        output["x"].sum().backward()
        assert torch.allclose(inputs.grad, mask[..., None].expand(2, 3, 4).float(), atol=1e-6)
        output, loss = gated(client, RemoteSwitchMixtureOfExperts, 2).to(device)(inputs, mask=mask)
        (output["x"].sum() + loss).backward()


# --- Switch -----------------------------------------------------------------------------------------------------------


def test_switch_balances_its_experts() -> None:
    with experts(times(1), times(1), None) as client:
        switch = gated(client, RemoteSwitchMixtureOfExperts, 3, k_best=1, utilization_alpha=0.5)
        assert switch.grid_utilization.tolist() == pytest.approx([1 / 3] * 3)
        inputs = torch.tensor([[3.0, 0, 0, 0], [3.0, 0, 0, 0], [0, 3.0, 0, 0], [0, 0, 3.0, 0]], requires_grad=True)
        before = inputs.detach().clone()
        output, loss = switch(inputs)
        assert torch.equal(inputs, before), "noise is for the gate alone"
        assert torch.allclose(switch.grid_utilization, torch.tensor([0.5, 1 / 3, 1 / 6]))
        probability = torch.softmax(torch.tensor([3.0, 0, 0]), 0)[0]
        assert torch.allclose(output[:3], before[:3] * (1 + probability), rtol=0.05)
        assert torch.equal(output[3], before[3])
        assert loss > 1, "the first expert is preferred, and used more"
        loss.backward()
        assert switch.proj.bias.grad[0] > 1e-3, "to prefer it less is rewarded"
        switch.eval()
        again = [switch(inputs)[0] for _ in range(2)]
        assert torch.equal(*again), "without noise"
        loss = switch.balancing_loss([torch.full((4, 3), 1 / 3)])
        assert loss.item() == pytest.approx(1.0)


def test_switch_takes_experts_with_several_outputs_and_drops_numbers() -> None:
    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x.sum(1, keepdim=True)

    with experts(two, two, two, two) as client:
        switch = gated(client, RemoteSwitchMixtureOfExperts, grid_dropout=1e-9, jitter_eps=0.0)
        (output, total), loss = switch(torch.ones(3, 4))
        assert torch.allclose(output, torch.full((3, 4), 2.0)), "one number is left, and has all the weight"
        assert torch.allclose(total, torch.full((3, 1), 4.0))
        assert loss.isfinite()
