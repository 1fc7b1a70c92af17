"""What the constructor of DiLoCo refuses, and leaves nothing behind."""

from __future__ import annotations

import pytest
import torch

from shoal.compression import Blockwise4BitQuantization, Float16Compression, Uniform8BitQuantization
from shoal.optim.outer.diloco import DiLoCo


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sync_every": None}, ValueError, "either sync_every"),
        ({"target_batch_size": 64}, ValueError, "either sync_every"),
        ({"sync_every": None, "target_batch_size": -1}, ValueError, "must be positive"),
        ({"sync_every": 1, "fragments": 2}, ValueError, "do not fit"),
        ({"fragment_sync_delay": 4}, ValueError, "less than sync_every=4"),
        ({"fragment_sync_delay": -1}, ValueError, "fragment_sync_delay"),
        ({"fragment_update_alpha": 2}, ValueError, "fragment_update_alpha"),
        ({"average": "gradients"}, ValueError, "average must be one of"),
        ({"averager_opts": {"target_group_size": 2}}, ValueError, "average='parameters'"),
        ({"compression": Float16Compression}, TypeError, "write Float16Compression"),
        ({"compression": Blockwise4BitQuantization()}, ValueError, "error feedback"),
        ({"return_compression": Uniform8BitQuantization()}, ValueError, "same bits"),
        ({"weighting": "tokens"}, ValueError, "weighting"),
        ({"max_staleness": -1}, ValueError, "max_staleness"),
        ({"batch_size_per_step": 0}, ValueError, "batch_size_per_step"),
    ],
)
def test_options_that_cannot_be(make_dhts, options, error, message):
    (dht,) = make_dhts(1)
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    training = {"dht": dht, "run_id": "run", "optimizer": torch.optim.SGD(parameters, lr=1.0), "sync_every": 4}
    with pytest.raises(error, match=message):
        DiLoCo(**{**training, **options})
    DiLoCo(**training).shutdown()


def test_steps_need_to_know_their_samples(make_dhts, closing):
    (dht,) = make_dhts(1)
    parameter = torch.nn.Parameter(torch.zeros(3))
    opt = closing(DiLoCo(dht=dht, run_id="run", optimizer=torch.optim.SGD([parameter], lr=1.0), sync_every=4))
    with pytest.raises(ValueError, match="give batch_size"):
        opt.step()
    with pytest.raises(ValueError, match="cannot be added"):
        opt.add_param_group({"params": []})
