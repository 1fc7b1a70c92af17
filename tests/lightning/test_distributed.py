"""The distributed utilities, alone and among real processes."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shoal.lightning import distributed
from tests.lightning import collectives, comm_hooks
from tests.processes import LIMIT_SECONDS, run_in_group

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("groups")]


@pytest.mark.timeout(LIMIT_SECONDS + 30)
def test_a_group_of_two_in_three_processes() -> None:
    run_in_group(collectives.among_three, 3)


@pytest.mark.timeout(LIMIT_SECONDS + 30)
def test_hooks_of_torch_under_ddp() -> None:
    run_in_group(comm_hooks.average_gradients, 2)


def test_a_process_alone_is_not_distributed() -> None:
    tensor = torch.ones(2)
    assert not distributed.distributed_available()
    assert not distributed.tpu_distributed()
    assert distributed.sync_ddp_if_available(tensor, reduce_op="mean") is tensor
    assert distributed.all_gather_ddp_if_available(tensor, sync_grads=True) is tensor


def test_backend_follows_the_device() -> None:
    assert distributed.get_default_process_group_backend_for_device(torch.device("cuda", 1)) == "nccl"
    assert distributed.get_default_process_group_backend_for_device(torch.device("cpu")) == "gloo"


def test_unknown_operation_is_named() -> None:
    with pytest.raises(ValueError, match="'median' is unknown"):
        distributed.sync_ddp(torch.ones(1), reduce_op="median")


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "SLURM_PROCID"])
@pytest.mark.parametrize("value", ["", "first", "0x1"])
def test_a_rank_that_is_no_number_is_named(monkeypatch, name, value):
    for each in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"environment variable {name} must be .* got '{value}': unset {name}"):
        distributed.rank_zero_only(lambda: "done")()


@pytest.mark.parametrize(("variables", "runs"), [({}, True), ({"RANK": "0"}, True), ({"LOCAL_RANK": "1"}, False)])
def test_rank_zero_only_believes_the_launcher(
    variables: dict[str, str], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert distributed.rank_zero_only(lambda number: number + 1)(1) == (2 if runs else None)


@dataclass
class OneMachine:
    main_address: str = "127.0.0.1"
    main_port: int = 0

    def global_rank(self) -> int:
        return 0

    def world_size(self) -> int:
        return 1


def test_connection_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "")  # so that they are as before afterwards
    monkeypatch.setenv("MASTER_PORT", "")
    with mock.patch.object(dist, "init_process_group") as init:
        distributed.init_dist_connection(OneMachine(main_port=1234), "gloo", timeout=None)
        init.assert_called_once_with("gloo", rank=0, world_size=1, timeout=None)
        with mock.patch.object(dist, "is_initialized", return_value=True):
            distributed.init_dist_connection(OneMachine(), "gloo", global_rank=1, world_size=2)
        assert init.call_count == 1
    with (
        mock.patch.object(dist, "is_available", return_value=False),
        pytest.raises(RuntimeError, match=r"no torch\.distributed"),
    ):
        distributed.init_dist_connection(OneMachine(), "gloo")


def test_no_hook_leaves_the_model_alone() -> None:
    model = mock.Mock()
    distributed.register_ddp_comm_hook(model, ddp_comm_state=object(), ddp_comm_wrapper=lambda hook: hook)
    assert not model.mock_calls


def test_wrapper_is_told_and_used(caplog: pytest.LogCaptureFixture) -> None:
    def hook(state: object, bucket: object) -> None: ...

    def wrapper(inner: object) -> object:
        assert inner is hook
        return "wrapped"

    model = mock.Mock()
    with caplog.at_level(logging.DEBUG, "shoal.lightning"):
        distributed.register_ddp_comm_hook(model, ddp_comm_hook=hook, ddp_comm_wrapper=wrapper)
    model.register_comm_hook.assert_called_once_with(state=None, hook="wrapped")
    assert hook.__qualname__ in caplog.text
    assert wrapper.__qualname__ in caplog.text


def test_the_state_has_two_names_but_one_value() -> None:
    with pytest.raises(ValueError, match="two names"):
        distributed.register_ddp_comm_hook(mock.Mock(), ddp_comm_state=1, state=2, ddp_comm_hook=print)


def test_importable_without_lightning() -> None:
    """With Lightning made impossible to import, the utilities work and the strategy says what is missing."""
    program = """
import sys
sys.modules.update(dict.fromkeys(["lightning", "lightning.pytorch", "pytorch_lightning", "lightning_fabric"]))
import shoal.lightning
import shoal.lightning.distributed as d
assert not d.distributed_available()
try:
    shoal.lightning.HivemindStrategy(target_batch_size=1)
except ModuleNotFoundError as e:
    assert "pip install 'shoal[lightning]'" in str(e)
else:
    raise AssertionError("a strategy without Lightning")
"""
    subprocess.run([sys.executable, "-c", program], check=True)
