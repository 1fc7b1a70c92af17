"""What each process of a group of two checks about communication hooks of DDP."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from shoal.lightning.distributed import register_ddp_comm_hook

ROWS, COLUMNS = 16, 12


def average_gradients() -> None:
    fp16 = functools.partial(register_ddp_comm_hook, ddp_comm_hook=default_hooks.fp16_compress_hook)
    assert_equal(mean_gradient(fp16), expected(torch.float16), rtol=2e-3)
    assert not torch.equal(mean_gradient(fp16), mean_gradient(lambda model: None)), "half precision leaves its mark"

    # the gradient of each process is an outer product: their mean has rank 2, so this approximation is exact
    power = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    power_sgd = functools.partial(
        register_ddp_comm_hook, ddp_comm_state=power, ddp_comm_hook=powerSGD_hook.powerSGD_hook
    )
    assert_equal(mean_gradient(power_sgd, steps=4), expected(), rtol=1e-4)
    assert power.compression_stats()[2] > 0, "something was compressed"

    wrapped = functools.partial(
        register_ddp_comm_hook,
        ddp_comm_state=powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2),
        ddp_comm_hook=functools.partial(powerSGD_hook.powerSGD_hook),  # a partial function has no name
        ddp_comm_wrapper=default_hooks.fp16_compress_wrapper,
    )
    assert_equal(mean_gradient(wrapped, steps=4), expected(), rtol=5e-3)

    # averaged with everybody until step 2, then only in a group, which here is each process alone
    for name in ("ddp_comm_state", "state"):
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        state = post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=2)
        local = functools.partial(
            register_ddp_comm_hook, ddp_comm_hook=post_localSGD_hook.post_localSGD_hook, **{name: state}
        )
        assert_equal(mean_gradient(local, steps=1), expected())
        assert_equal(mean_gradient(local, steps=3), own_gradient(dist.get_rank()))


def inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(1, COLUMNS, generator=generator), torch.randn(1, ROWS, generator=generator)


def own_gradient(rank: int) -> torch.Tensor:
    x, factors = inputs(rank)
    return factors.T @ x


def expected(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (own_gradient(0).to(dtype).float() + own_gradient(1).to(dtype).float()) / 2


def mean_gradient(register: Callable[[DistributedDataParallel], None], steps: int = 1) -> torch.Tensor:
    torch.manual_seed(0)
    module = nn.Linear(COLUMNS, ROWS, bias=False)
    model = DistributedDataParallel(module)
    register(model)
    x, factors = inputs(dist.get_rank())
    for _ in range(steps):
        module.weight.grad = None
        (model(x) * factors).sum().backward()
    return module.weight.grad


def assert_equal(actual: torch.Tensor, wanted: torch.Tensor, rtol: float = 1e-6) -> None:
    torch.testing.assert_close(actual, wanted, rtol=rtol, atol=rtol)
