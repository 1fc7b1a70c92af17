"""What the constructor of DiLoCo refuses, and leaves nothing behind."""

from __future__ import annotations

import functools

import pytest
import torch

from shoal.compression import (
    Blockwise4BitQuantization,
    Float16Compression,
    TopKCompression,
    Uniform8BitQuantization,
)
from shoal.optim.diloco.diloco import DiLoCo


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
        ({"compression": Uniform8BitQuantization()}, ValueError, "Blockwise4BitQuantization or TopKCompression"),
        ({"return_compression": Uniform8BitQuantization()}, ValueError, "same bits"),
        ({"return_compression": Blockwise4BitQuantization()}, ValueError, "same bits"),
        ({"error_feedback": 1.5}, ValueError, "error_feedback must be from 0 to 1, got 1.5"),
        ({"sparse_mean": "median"}, ValueError, "sparse_mean must be one of"),
        ({"check_every": 0}, ValueError, "check_every must be a number of updates from 1, got 0"),
        ({"average": "parameters", "error_feedback": 1.0}, ValueError, "knows no error feedback"),
        ({"average": "parameters", "compression": TopKCompression()}, ValueError, "TopKCompression loses too much"),
        ({"weighting": "tokens"}, ValueError, "weighting"),
        ({"max_staleness": -1}, ValueError, "max_staleness"),
        ({"batch_size_per_step": 0}, ValueError, "batch_size_per_step"),
        ({"sync_every": 2.5}, TypeError, "sync_every must be a whole number of inner steps, got 2.5"),
        ({"fragment_sync_delay": 1.5}, TypeError, "fragment_sync_delay must be a whole number"),
        ({"straggler_patience": -1.0}, ValueError, "straggler_patience must be a number of seconds from 0, got -1"),
        ({"load_state_compression": Float16Compression()}, ValueError, "newcomers must get the same bits"),
        ({"run_id": "a.b"}, AssertionError, "must not contain dots"),
        ({"run_id": ""}, ValueError, "run_id is empty"),
        ({"auxiliary": True, "client_mode": True}, ValueError, "must accept connections"),
        ({"auxiliary": True, "batch_size_per_step": 8}, ValueError, "no batches: leave batch_size_per_step=8 out"),
        (
            {"auxiliary": True, "average": "parameters", "averager_opts": {"target_group_size": 2}},
            ValueError,
            "has nobody to help",
        ),
        ({"extra_tensors": [3]}, TypeError, "extra_tensors must be tensors"),
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


@pytest.mark.parametrize(
    ("options", "feedback", "rates"),
    [
        ({}, 0.0, (0.7, 0.9, True)),
        ({"error_feedback": 0.5}, 0.5, (0.7, 0.9, True)),
        ({"compression": Blockwise4BitQuantization()}, 1.0, (0.7, 0.9, True)),
        ({"compression": TopKCompression()}, 0.95, (0.7, 0, False)),
        ({"compression": TopKCompression(), "error_feedback": 0.0}, 0.0, (0.7, 0, False)),
        ({"average": "parameters"}, 0.0, (0.7, 0.5, False)),
    ],
    ids=["dense", "dense with feedback", "4 bits", "sparse", "sparse without feedback", "parameters"],
)
def test_what_suits_a_codec(make_dhts, closing, options, feedback, rates):
    (dht,) = make_dhts(1)
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0)
    opt = closing(DiLoCo(dht=dht, run_id="run", optimizer=inner, sync_every=4, **options))
    assert opt.options.error_feedback == feedback
    (group,) = opt.outer_optimizers[0].param_groups
    assert (group["lr"], group["momentum"], group["nesterov"]) == rates


@pytest.mark.parametrize(
    ("options", "is_told"),
    [
        ({"average": "parameters"}, True),
        ({"compression": TopKCompression()}, True),
        ({}, False),
    ],
    ids=["parameters", "sparse", "dense"],
)
def test_momentum_that_ruins_training(make_dhts, closing, caplog, options, is_told):
    (dht,) = make_dhts(1)
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0)
    outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9)
    closing(DiLoCo(dht=dht, run_id="run", optimizer=inner, sync_every=4, outer_optimizer=outer, **options))
    assert ("a momentum of 0.9, which ruins training" in caplog.text) == is_told
