"""What each process of a group checks about the distributed utilities. No collective may be left out by one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shoal.lightning.distributed import (
    AllGatherGrad,
    all_gather_ddp_if_available,
    distributed_available,
    gather_all_tensors,
    rank_zero_only,
    sync_ddp,
    sync_ddp_if_available,
)


def among_three() -> None:
    """Everybody, then a group of the processes 1 and 2, whose ranks in the group differ from those in the world."""
    rank = dist.get_rank()
    assert distributed_available()
    assert rank_zero_only(lambda: "ran")() == ("ran" if rank == 0 else None)
    check_all_functions(None, [0, 1, 2])
    part = dist.new_group([1, 2])
    if rank in (1, 2):
        check_all_functions(part, [1, 2])
    else:
        check_stranger(part)


def check_stranger(group: dist.ProcessGroup) -> None:
    for function in (gather_all_tensors, all_gather_ddp_if_available, sync_ddp, AllGatherGrad.apply):
        with pytest.raises(ValueError, match="process 0 does not belong to the group"):
            function(torch.ones(2), group)


def check_all_functions(group: dist.ProcessGroup | None, members: list[int]) -> None:
    check_gathering(group, members)
    check_reducing(group, members)
    check_gradients(group, members)


def check_gathering(group: dist.ProcessGroup | None, members: list[int]) -> None:
    rank = dist.get_rank()
    assert [t.item() for t in gather_all_tensors(torch.tensor(float(rank)), group)] == members
    equal = gather_all_tensors(torch.full((2, 3), float(rank)), group)
    assert all(torch.equal(t, torch.full((2, 3), float(m))) for t, m in zip(equal, members, strict=True))

    def uneven(member: int) -> torch.Tensor:  # transposed, so not contiguous; nothing at all in process 0
        return torch.arange(member * (4 - member)).reshape(member, 4 - member).T

    gathered = gather_all_tensors(uneven(rank), group)
    assert all(torch.equal(t, uneven(m)) for t, m in zip(gathered, members, strict=True))

    stacked = all_gather_ddp_if_available(torch.full((3, 2), float(rank)).T, group)
    assert stacked.shape == (len(members), 2, 3)
    assert stacked[:, 0, 0].tolist() == members
    leaf = torch.ones(2, requires_grad=True)
    assert not all_gather_ddp_if_available(leaf, group).requires_grad
    assert all_gather_ddp_if_available(leaf, group, sync_grads=True).requires_grad


def check_reducing(group: dist.ProcessGroup | None, members: list[int]) -> None:
    rank, total = dist.get_rank(), sum(members)
    for operation in (None, "sum", "SUM", dist.ReduceOp.SUM):
        tensor = torch.full((2,), float(rank))
        assert sync_ddp(tensor, group, operation) is tensor
        assert tensor.tolist() == [total, total]
    for operation in ("mean", "AVG", "Mean", dist.ReduceOp.AVG):
        tensor = torch.full((2,), float(rank))
        assert sync_ddp_if_available(tensor, group, operation) is tensor
        assert tensor.tolist() == [total / len(members)] * 2
    assert sync_ddp(torch.tensor(rank), group, "max").item() == max(members)
    assert sync_ddp(torch.tensor([rank, 0]), group, "mean").tolist() == [total / len(members), 0]

    whole = torch.zeros(2, 3)
    column = whole[:, 1]
    column.fill_(rank)
    sync_ddp(column, group)
    assert whole[:, 1].tolist() == [total, total], "a view that is not contiguous is reduced in place, too"
    assert whole[:, 0].tolist() == [0, 0]


def check_gradients(group: dist.ProcessGroup | None, members: list[int]) -> None:
    """Process r multiplies the tensor of the i-th member by 10 * r + i; each gets back the sum of what all did."""
    rank = dist.get_rank()
    own = torch.ones(2, 3, requires_grad=True)
    factors = torch.tensor([10.0 * rank + index for index in range(len(members))])
    stacked = AllGatherGrad.apply(own.T, group)
    (stacked * factors[:, None, None]).sum().backward()
    expected = sum(10.0 * member + members.index(rank) for member in members)
    assert torch.equal(own.grad, torch.full((2, 3), expected))

    expanded = torch.ones(2, requires_grad=True)  # the gradient of a sum is an expanded scalar: not contiguous
    AllGatherGrad.apply(expanded, group).sum().backward()
    assert expanded.grad.tolist() == [len(members)] * 2
