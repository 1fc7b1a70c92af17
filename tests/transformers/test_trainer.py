"""One peer with a ``SwarmTrainer``: its training is that of a plain ``Trainer`` whose steps are those of the swarm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

import shoal
from shoal.optim.report import parse_report
from shoal.transformers import SwarmTrainer
from tests.transformers.small import make_arguments, make_data, make_model

STEPS, BATCH, ACCUMULATED = 6, 4, 2
SAMPLES = 2 * BATCH * ACCUMULATED
"""Of a swarm step, which takes two local ones."""


def swarm_trainer(dht: shoal.DHT, arguments: Any, model: Any = None, **options: Any) -> SwarmTrainer:
    given = {"train_dataset": make_data(), "target_batch_size": SAMPLES, "swarm_steps": STEPS, **options}
    return SwarmTrainer(make_model() if model is None else model, arguments, dht=dht, run_id="run", **given)


def test_two_pieces_equal_a_plain_trainer(dht: shoal.DHT, tmp_path: Path) -> None:
    """The same data in the same order: schedule and clipping go by swarm steps, also after a checkpoint."""
    shared: dict[str, Any] = {"data_seed": 3, "lr_scheduler_type": "cosine", "warmup_steps": 2}
    reference = Trainer(
        make_model(),
        make_arguments(tmp_path, gradient_accumulation_steps=2 * ACCUMULATED, max_steps=STEPS, **shared),
        train_dataset=make_data(),
    )
    reference.train()
    arguments = make_arguments(
        tmp_path,
        gradient_accumulation_steps=ACCUMULATED,
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=STEPS,
        **shared,
    )
    swarm_trainer(dht, arguments).train()
    arguments.max_steps = 100
    resumed = swarm_trainer(dht, arguments, make_model(seed=1))
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS}"))
    assert arguments.max_grad_norm == 0.5, "the arguments of the caller stay theirs"
    assert resumed.state.global_step == 2 * STEPS, "it ends with the last swarm step"
    for name, parameter in reference.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], parameter, msg=name)
    logged = [entry for entry in resumed.state.log_history if "loss" in entry]
    rates = {int(entry["swarm_epoch"]): entry["learning_rate"] for entry in logged}
    # A plain trainer logs the rate of the last step, and here it is that of the next one.
    expected = {entry["step"] - 1: entry["learning_rate"] for entry in reference.state.log_history if "loss" in entry}
    assert {*range(STEPS // 2 + 1, STEPS + 1)} <= set(rates)
    assert rates == pytest.approx({epoch: expected.get(epoch, 0.0) for epoch in rates})
    norms = {entry["step"]: entry["grad_norm"] for entry in reference.state.log_history if "loss" in entry}
    own = {int(entry["swarm_epoch"]): entry["swarm_grad_norm"] for entry in logged if "swarm_grad_norm" in entry}
    assert max(norms.values()) > 0.5, "something was clipped"
    assert own == pytest.approx({epoch: norms[epoch] for epoch in own}, rel=1e-3)


def test_plain_checkpoints_do_not_bring_their_schedule(
    dht: shoal.DHT, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has counted batches. If its step were taken for that of the swarm, learning rates would stand still."""
    arguments = make_arguments(tmp_path, save_strategy="steps", save_steps=5, max_steps=5)
    Trainer(make_model(), arguments, train_dataset=make_data()).train()
    arguments.max_steps, arguments.save_strategy = 100, "no"
    trainer = swarm_trainer(dht, arguments, target_batch_size=BATCH)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert "of a Trainer without peers, whose schedule was at step 5" in caplog.text
    logged = {
        entry["swarm_epoch"]: entry["learning_rate"] for entry in trainer.state.log_history[5:] if "loss" in entry
    }
    assert logged == pytest.approx({epoch: 0.5 * (1 - epoch / STEPS) for epoch in logged})
    assert len(logged) >= STEPS - 1


def test_a_schedule_of_none_means_the_arguments(dht: shoal.DHT, tmp_path: Path) -> None:
    trainer = swarm_trainer(
        dht, make_arguments(tmp_path, max_steps=2), target_batch_size=BATCH, swarm_options={"scheduler": None}
    )
    trainer.train()
    assert trainer.state.log_history[0]["learning_rate"] == pytest.approx(0.5 * (1 - 1 / STEPS), rel=0.3)


def test_bf16_with_workers_is_logged(dht: shoal.DHT, tmp_path: Path) -> None:
    arguments = make_arguments(tmp_path, bf16=True, dataloader_num_workers=2, max_steps=100)
    trainer = swarm_trainer(dht, arguments)
    trainer.train()
    figures = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    assert figures["swarm_epoch"] == STEPS
    assert figures["swarm_peers"] == 1
    assert figures["swarm_samples_per_second"] > 0
    assert figures["loss"] < trainer.state.log_history[0]["loss"]
    assert trainer.swarm_figures() == {}, "the run is over for this peer"
    reports = dht.get("run_reports", latest=True)
    assert reports is not None
    [report] = reports.value.values()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert min(losses) - 0.2 < parse_report(report.value).metrics["loss"] < max(losses) + 0.2
    trainer.train()  # once more, with the state of the torch optimizer


def test_half_precision_with_the_scaler_of_shoal(dht: shoal.DHT, tmp_path: Path) -> None:
    """A checkpoint has its scale, too."""
    scalers = [shoal.GradScaler(init_scale=2.0**20, growth_interval=1, device="cpu"), shoal.GradScaler(device="cpu")]
    for scaler, steps in zip(scalers, (6, 8), strict=True):
        try:
            arguments = make_arguments(tmp_path, fp16=True, max_steps=steps, save_strategy="steps", save_steps=6)
            trainer = swarm_trainer(dht, arguments, target_batch_size=2 * BATCH, grad_scaler=scaler)
        except ValueError as e:  # of older versions
            pytest.skip(f"not on this machine: {e}")
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6") if steps > 6 else None)
        last = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
        assert last["swarm_epoch"] == steps // 2
        assert 0 < last["swarm_grad_norm"] < 100, "it was unscaled"
    assert scalers[0].get_scale() > 2.0**20, "it grows with each swarm step"
    assert scalers[1].get_scale() > scalers[0].get_scale()


def test_each_peer_has_an_order_of_its_own(dht: shoal.DHT, tmp_path: Path) -> None:
    arguments = make_arguments(tmp_path)
    with shoal.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"]) as other:
        trainers = [swarm_trainer(each, arguments) for each in (dht, dht, other)]
        orders = [[batch["input_ids"].tolist() for batch in trainer.get_train_dataloader()] for trainer in trainers]
    assert orders[0] == orders[1] != orders[2]
    assert arguments.data_seed is None


REFUSED = [
    ({"fp16": True}, {}, r"fp16=True with grad_scaler=None.*bf16=True"),
    ({}, {"grad_scaler": shoal.GradScaler(enabled=False)}, "grad_scaler is for fp16=True"),
    ({"deepspeed": {"zero_optimization": {"stage": 2}}}, {}, "deepspeed=.*whole model"),
    ({"fsdp": "full_shard"}, {}, "fsdp=.*whole model"),
    ({"n_gpu": 2}, {}, r"n_gpu=2.*CUDA_VISIBLE_DEVICES=0"),
    ({"world_size": 2}, {}, "world_size=2.*without the launcher"),
    ({"auto_find_batch_size": True}, {}, "set per_device_train_batch_size"),
    ({"optim": "lomo"}, {}, "optim='lomo' steps during backward"),
    ({"lr_scheduler_type": "reduce_lr_on_plateau"}, {}, "'reduce_lr_on_plateau' depends on a metric"),
    ({}, {"swarm_steps": None}, r"'linear' with warmup_steps=0 needs the length of the run.*swarm_steps"),
    ({}, {"swarm_steps": 0}, "swarm_steps=0"),
    ({}, {"swarm_options": {"reuse_grad_buffers": True}}, "zeroes gradients"),
    ({}, {"swarm_options": {"offload_optimizer": True}}, "steps the model's own parameters"),
    ({}, {"optimizers": (None, object())}, "would count the batches"),
]


class Pretended:
    """Arguments of which some cannot be made on this machine."""

    def __init__(self, arguments: Any, **values: Any) -> None:
        self.__dict__ = {**vars(arguments), **values}
        self.arguments = arguments

    def __getattr__(self, name: str) -> Any:
        return getattr(self.arguments, name)


@pytest.mark.parametrize(("arguments", "options", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_work_is_refused_early(
    dht: shoal.DHT, tmp_path: Path, arguments: dict, options: dict, message: str
) -> None:
    pretended = Pretended(make_arguments(tmp_path), **arguments)
    with pytest.raises(ValueError, match=message):
        swarm_trainer(dht, pretended if arguments else pretended.arguments, **options)


def test_options_that_do_not_exist(dht: shoal.DHT, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"\['matchmaking'\]; it takes these of shoal.Optimizer: .*matchmaking_time"):
        swarm_trainer(dht, make_arguments(tmp_path), swarm_options={"matchmaking": 3})
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    with (
        shoal.Optimizer(dht=dht, run_id="other", target_batch_size=4, optimizer=inner) as optimizer,
        pytest.raises(ValueError, match="SwarmTrainer makes one"),
    ):
        swarm_trainer(dht, make_arguments(tmp_path), model, optimizers=(optimizer, None))


def test_arguments_of_a_wrong_type(dht: shoal.DHT, tmp_path: Path) -> None:
    for steps in ("3", 2.5, True):
        with pytest.raises(TypeError, match="swarm_steps must be a whole number of swarm steps, got"):
            swarm_trainer(dht, make_arguments(tmp_path), swarm_steps=steps)
    with pytest.raises(TypeError, match="dht must be a DHT, got None"):
        swarm_trainer(None, make_arguments(tmp_path))  # type: ignore[arg-type]


def test_an_optimizer_of_another_model_is_refused(dht: shoal.DHT, tmp_path: Path) -> None:
    other = torch.optim.SGD(make_model().parameters(), 0.1)
    trainer = swarm_trainer(dht, make_arguments(tmp_path), optimizers=(other, None))
    with pytest.raises(ValueError, match="parameters are not those of the model, which would not learn"):
        trainer.train()


def test_a_batch_without_tensors(dht: shoal.DHT, tmp_path: Path) -> None:
    trainer = swarm_trainer(
        dht, make_arguments(tmp_path, remove_unused_columns=False), data_collator=lambda rows: {"rows": len(rows)}
    )
    with pytest.raises(ValueError, match=r"\['rows'\] has no tensor"):
        trainer.train()
    assert trainer.swarm is None, "it has left the run"
