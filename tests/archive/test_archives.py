"""An archive of a run that lives: what is in it, what it costs the run, and how the run goes on from it."""

from __future__ import annotations

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from shoal import DHT, DecentralizedAverager, DiLoCo, Optimizer, load_archive
from shoal.access.badges import ROLES_BY_NAME
from shoal.access.tokens import DAY, Token
from shoal.archive.keeping import Archiver
from shoal.archive.reviving import Revival
from shoal.archive.store import Store
from shoal.compression import NoCompression
from shoal.data import SharedPass
from shoal.errors import ArchiveError, NotAMemberError
from tests.archive.states import small_state
from tests.optim.conftest import in_parallel, values, wait_until

RUN = "run"


TORCH_TAKES_NAMES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)


def make_model(seed: int = 0, *, buffers: bool = False) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    norm = [torch.nn.BatchNorm1d(8)] if buffers else []
    return torch.nn.Sequential(torch.nn.Linear(6, 8), *norm, torch.nn.Tanh(), torch.nn.Linear(8, 2))


def adam(params) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.05)


def name_afterwards(opt: Optimizer | DiLoCo, net: torch.nn.Module, *, named: bool) -> None:
    """What users of older versions of torch do."""
    if named and not TORCH_TAKES_NAMES:
        opt.name_parameters(net)


def make_optimizer(dht, net, *, named: bool = True, **options) -> Optimizer:
    inner = adam(net.named_parameters() if named and TORCH_TAKES_NAMES else net.parameters())
    rest = {"matchmaking_time": 10.0, "averaging_timeout": 20.0, **options}
    opt = Optimizer(dht=dht, run_id=RUN, target_batch_size=16, optimizer=inner, **rest)
    name_afterwards(opt, net, named=named)
    return opt


def make_diloco(dht, model, *, named: bool = True, **options) -> DiLoCo:
    params = model.named_parameters() if named and TORCH_TAKES_NAMES else model.parameters()
    rest = {"sync_every": 2, "compression": NoCompression(), "matchmaking_time": 10.0, "averaging_timeout": 20.0}
    opt = DiLoCo(dht=dht, run_id=RUN, optimizer=adam(params), batch_size_per_step=8, **{**rest, **options})
    name_afterwards(opt, model, named=named)
    return opt


def step(opt, model, rng) -> None:
    opt.zero_grad()
    batch = torch.randn(8, 6, generator=rng)
    (model(batch) - batch[:, :2].cos()).square().mean().backward()
    opt.step(batch_size=8)


def train_until(opt, model, epoch: int, seed: int = 1) -> None:
    rng, pause = torch.Generator().manual_seed(seed), threading.Event()
    while opt.local_epoch < epoch:
        step(opt, model, rng)
        pause.wait(0.02)


def archive(dhts, folder: Path, **options):
    archiver = Archiver(dhts(1, clients=1)[0], RUN, Store(folder), **options)
    try:
        return archiver.write_one()
    finally:
        archiver.close()


def statistics_of(optimizer) -> list[torch.Tensor]:
    return [value.clone() for each in optimizer.state.values() for value in each.values()]


def same(one, other) -> bool:
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


@pytest.mark.parametrize("named", [True, False], ids=["names", "numbers"])
def test_archived_state_loads_into_model_and_torch_optimizer(make_dhts, closing, tmp_path, named) -> None:
    [dht], model = make_dhts(1), make_model()
    opt = closing(make_optimizer(dht, model, named=named))
    train_until(opt, model, 3)
    assert archive(make_dhts, tmp_path).epoch == 3
    other = make_model(seed=9)
    inner = adam(other.parameters())
    found = load_archive(tmp_path, other, inner)
    assert (found.run_id, found.epoch, found.kind) == (RUN, 3, "Optimizer")
    assert torch.equal(values(other), values(model))
    assert same(statistics_of(inner), statistics_of(opt.opt))
    name = "2.weight" if named else "2"
    assert torch.equal(found.tensors[name], model[2].weight)
    assert found.tensors[f"statistic.exp_avg.{name}"].shape == model[2].weight.shape


def test_archive_keeps_buffers_and_names(make_dhts, closing, tmp_path) -> None:
    [dht], model = make_dhts(1), make_model(buffers=True)
    opt = closing(make_optimizer(dht, model, named=False, model=model))
    train_until(opt, model, 2)
    archive(make_dhts, tmp_path)
    other = make_model(seed=9, buffers=True)
    found = load_archive(tmp_path, other)
    assert {"0.weight", "1.running_mean", "1.running_var"} <= set(found.names)
    assert torch.equal(other[1].running_mean, model[1].running_mean)
    assert torch.equal(values(other), values(model))


def test_half_precision_and_offloaded_parameters(make_dhts, closing, tmp_path) -> None:
    """The archive has the parameters as the optimizer has them: in single precision."""
    [dht], model = make_dhts(1), make_model().to(torch.bfloat16)
    opt = closing(
        Optimizer(
            dht=dht, run_id=RUN, target_batch_size=16, optimizer=adam, params=[{"params": model.named_parameters()}]
        )
    )
    rng = torch.Generator().manual_seed(1)
    while opt.local_epoch < 2:
        opt.zero_grad()
        model(torch.randn(8, 6, generator=rng).bfloat16()).square().mean().backward()
        opt.step(batch_size=8)
    opt.state_averager.finish_jobs(10)
    archive(make_dhts, tmp_path)
    other = make_model(seed=9).to(torch.bfloat16)
    found = load_archive(tmp_path, other)
    assert found.tensors["0.weight"].dtype == torch.float32
    assert torch.equal(values(other), values(model))


def test_archive_of_another_model_is_refused(make_dhts, closing, tmp_path) -> None:
    [dht], model = make_dhts(1), make_model()
    opt = closing(make_optimizer(dht, model))
    train_until(opt, model, 1)
    archive(make_dhts, tmp_path)
    wider = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))
    with pytest.raises(ValueError, match=r"'0\.bias' has shape \(8,\), and in the model \(9,\)"):
        load_archive(tmp_path, wider)
    with pytest.raises(ValueError, match=r"lacks '3\.weight'"):
        load_archive(tmp_path, torch.nn.Sequential(*make_model(), torch.nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"has '2\.bias', which the model lacks"):
        load_archive(tmp_path, make_model()[:2])
    with pytest.raises(ValueError, match="other statistics"):
        load_archive(tmp_path, None, torch.optim.SGD(make_model().parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"run with a shoal\.Optimizer, got a DiLoCo"):
        load_archive(tmp_path, None, closing(make_diloco(make_dhts(1)[0], make_model())))


@pytest.mark.parametrize("fragments", [1, 2])
def test_diloco_archive_uses_parameter_names(make_dhts, closing, tmp_path, fragments) -> None:
    [dht], model = make_dhts(1), make_model()
    opt = closing(make_diloco(dht, model, fragments=fragments))
    train_until(opt, model, 4)
    assert archive(make_dhts, tmp_path).epoch == 4
    other = make_model(seed=9)
    inner = adam(other.parameters())
    found = load_archive(tmp_path, other, inner)
    with opt.use_outer_parameters():
        assert torch.equal(values(other), values(model))
    assert same(statistics_of(inner), statistics_of(opt))
    assert any(name.endswith("momentum_buffer.2.weight") for name in found.tensors)
    newcomer = closing(make_diloco(make_dhts(1)[0], other, fragments=fragments))
    load_archive(tmp_path, other, newcomer)
    assert newcomer.outer_versions() == opt.outer_versions()
    assert newcomer.local_epoch == 4


@pytest.mark.parametrize("make", [make_optimizer, make_diloco], ids=["Optimizer", "DiLoCo"])
def test_lost_run_continues_from_its_archive(make_dhts, closing, tmp_path, make) -> None:
    [dht], model = make_dhts(1), make_model()
    opt = make(dht, model)
    train_until(opt, model, 5)
    archive(make_dhts, tmp_path)
    opt.shutdown()
    dhts = make_dhts(3)
    revival, stop = Revival(dhts[0], Store.open(tmp_path)), threading.Event()
    closing(revival)
    models = [make_model(seed=seed) for seed in (11, 12)]
    opts = [closing(make(dht, model)) for dht, model in zip(dhts[1:], models, strict=True)]
    with ThreadPoolExecutor(1) as pool:
        gone_on = pool.submit(revival.run, stop)
        try:
            for opt, model in zip(opts, models, strict=True):
                step(opt, model, torch.Generator().manual_seed(3))
                assert opt.local_epoch == 5
            assert same(statistics_of(opts[0]), statistics_of(opts[1]))
            assert revival.is_alive()
            # Nobody waits for the donor, and it does not count as a peer.
            in_parallel(*(functools.partial(train_until, *pair, 8) for pair in zip(opts, models, strict=True)))
            assert gone_on.result(60) in {dht.peer_id for dht in dhts[1:]}
        finally:
            stop.set()


def spoil(optimizer) -> None:
    next(iter(optimizer.state.values()))["exp_avg_sq"].view(-1)[0] = torch.nan


def test_donor_with_bad_statistics_is_asked_once(make_dhts, closing, tmp_path, caplog) -> None:
    [dht], model = make_dhts(1), make_model()
    opt = closing(make_optimizer(dht, model))
    train_until(opt, model, 1)
    archive(make_dhts, tmp_path)
    spoil(opt.opt)
    with pytest.raises(ArchiveError, match=r"1 peer gave a state that is no good; .*000001-epoch-1"):
        archive(make_dhts, tmp_path)
    assert f"state of {dht.peer_id} is not kept: values of 'statistic.exp_avg_sq.0." in caplog.text
    assert caplog.text.count("is not kept") == 1
    assert Store(tmp_path).folders() == ["000001-epoch-1"]


def test_bad_inner_statistics_are_left_out(make_dhts, closing, tmp_path, caplog) -> None:
    """Each peer has statistics of its own, and a newcomer can do without them."""
    [dht], model = make_dhts(1), make_model()
    opt = closing(make_diloco(dht, model))
    train_until(opt, model, 2)
    spoil(opt)
    assert archive(make_dhts, tmp_path).epoch == 2
    assert "inner" not in Store.open(tmp_path).state.metadata
    assert f"statistics of {dht.peer_id} are not kept: some are NaN or infinite" in caplog.text
    other = make_model(seed=9)
    newcomer = closing(make_diloco(make_dhts(1)[0], other))
    load_archive(tmp_path, other, newcomer)
    assert newcomer.local_epoch == 2


def test_archive_keeps_progress_of_the_data(make_dhts, closing, tmp_path) -> None:
    [dht], model = make_dhts(1), make_model()
    opt = make_optimizer(dht, model)
    with SharedPass(range(40), dht, RUN, batch_size=10, chunk=10) as shared:
        batches = iter(shared.loader())
        seen = [*next(batches).tolist(), *next(batches).tolist()]
        next(batches)
        train_until(opt, model, 1)
        wait_until(lambda: dht.get(f"{RUN}_data.0.40.10.{shared.state_dict()['order']}.0"), "it is published")
        found = load_archive(archive(make_dhts, tmp_path) and tmp_path)
        assert found.data == shared.state_dict()
    opt.shutdown()
    dhts = make_dhts(2)
    closing(Revival(dhts[0], Store.open(tmp_path)))
    with SharedPass(range(40), dhts[1], RUN, batch_size=10, chunk=10) as shared:
        rest = [sample for batch in shared.loader() for sample in batch.tolist()]
    assert sorted(seen + rest) == list(range(40))


def test_nobody_trains_yet_or_any_more(make_dhts, tmp_path) -> None:
    archiver = Archiver(make_dhts(2, clients=1)[1], RUN, Store(tmp_path))
    try:
        with pytest.raises(ArchiveError, match="no peer serves the state of run 'run'; there is no good archive yet"):
            archiver.write_one()
    finally:
        archiver.close()


def test_run_of_sharded_peers_is_a_clear_error(make_dhts, closing, tmp_path) -> None:
    first, other = make_dhts(2, clients=1)
    closing(DecentralizedAverager([torch.zeros(1)], first, prefix=f"{RUN}_outer_averager_0_of_4", start=True))
    wait_until(lambda: other.get(f"{RUN}_outer_averager_0_of_4.all_averagers"), "the donor is declared")
    archiver = Archiver(other, RUN, Store(tmp_path))
    try:
        with pytest.raises(ArchiveError, match="its peers have 4 processes each, which share the model"):
            archiver.write_one()
    finally:
        archiver.close()


def test_archiving_a_private_run_needs_the_train_role(tmp_path) -> None:
    secret = Token.new_run("friends")
    monitor = secret.invite(ROLES_BY_NAME["monitor"], int(time.time() + DAY)).text
    with (
        DHT(start=True, token=secret.text) as first,
        DHT(first.get_visible_maddrs(), start=True, token=monitor, client_mode=True) as dht,
        pytest.raises(NotAMemberError, match=r"token of this peer allows: monitor\. This call needs: train"),
    ):
        Archiver(dht, RUN, Store(tmp_path))


def test_private_run_is_not_revived_openly(make_dhts, closing, tmp_path) -> None:
    secret, model = Token.new_run("friends").text, make_model()
    with DHT(start=True, token=secret) as first:
        opt = make_optimizer(first, model)
        train_until(opt, model, 1)
        with DHT(first.get_visible_maddrs(), start=True, token=secret, client_mode=True) as dht:
            archiver = Archiver(dht, RUN, Store(tmp_path))
            archiver.write_one()
            archiver.close()
        opt.shutdown()
    found = Store.open(tmp_path)
    assert found.is_private
    with pytest.raises(ValueError, match="is of a private run, and without a token anyone could get its model"):
        Revival(make_dhts(1)[0], found)
    with DHT(start=True, token=secret) as dht, Revival(dht, found) as revival:
        assert revival.is_alive()


def test_archiver_waits_for_a_new_epoch(make_dhts, closing, tmp_path) -> None:
    [dht], model, lines, stop = make_dhts(1), make_model(), [], threading.Event()
    opt = closing(make_optimizer(dht, model))
    store = Store(tmp_path)
    store.write(RUN, "Optimizer", small_state(700))
    archiver = Archiver(make_dhts(1, clients=1)[0], RUN, store, every=0.05, keep=2, say=lines.append)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(archiver.run, stop)
        try:
            train_until(opt, model, 2)
            wait_until(lambda: any("epoch 2:" in line for line in lines), "epoch 2 is kept")
            train_until(opt, model, 4)
            wait_until(lambda: any("epoch 4:" in line for line in lines), "epoch 4 is kept")
        finally:
            stop.set()
            running.result()
            archiver.close()
    epochs = [line.split(":")[0] for line in lines if line.startswith("archive")]
    assert len(set(epochs)) == len(epochs), "an epoch was kept twice"
    assert len(store.folders()) == 3, "and the furthest one"
    assert Store.open(tmp_path).epoch == 4
    (line,) = [line for line in lines if "is behind" in line]
    assert f"shoal revive {store.url}/000001-epoch-700`" in line


def test_failed_write_waits_for_the_next_archive(make_dhts, closing, tmp_path, monkeypatch) -> None:
    [dht], model, lines, stop = make_dhts(1), make_model(), [], threading.Event()
    opt, attempts = closing(make_optimizer(dht, model)), []
    train_until(opt, model, 1)

    def write(self: Store, *_: object, **__: object) -> None:
        attempts.append(self)
        raise ArchiveError("the disk is full")

    monkeypatch.setattr(Store, "write_contents", write)
    archiver = Archiver(make_dhts(1, clients=1)[0], RUN, Store(tmp_path), every=3600.0, say=lines.append)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(archiver.run, stop)
        try:
            wait_until(lambda: lines, "the failure is told")
            train_until(opt, model, 3)
        finally:
            stop.set()
            running.result()
            archiver.close()
    assert lines == ["no archive: the disk is full"]
    assert len(attempts) == 1


def test_lone_peer_does_not_wait_for_an_archiver(make_dhts, closing, tmp_path) -> None:
    [dht], model = make_dhts(1), make_model()
    opt = closing(make_optimizer(dht, model))
    train_until(opt, model, 1)
    archive(make_dhts, tmp_path)
    assert opt.state_averager.newcomers() == set()
    assert opt.tracker.global_progress.num_peers <= 1


def test_bad_arguments(make_dhts, tmp_path) -> None:
    [dht] = make_dhts(1)
    for options in ({"keep": 0}, {"every": 0.0}, {"rate": 10.0}):
        with pytest.raises(ValueError, match="archives need keep"):
            Archiver(dht, RUN, Store(tmp_path), **options)
    Store(tmp_path).write("another", "Optimizer", small_state(1))
    with pytest.raises(ArchiveError, match="give 'run' a folder of its own"):
        Archiver(dht, RUN, Store(tmp_path))
