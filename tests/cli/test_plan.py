"""``shoal plan``: its arithmetic against hand-computed cases, what more of everything changes, and what it prints."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from shoal.cli.__main__ import main
from shoal.cli.plan.arithmetic import (
    Averaging,
    Estimate,
    Situation,
    all_reduced,
    averaging,
    guess_layers,
    guess_width,
    held,
    improve,
    methods,
    recommend,
)

# A model of round numbers: 12 layers of width 1000 have 144 million parameters.
SMALL = Situation(
    parameters=144e6,
    layers=12,
    width=1000,
    sequence=1000,
    batch=120,
    peers=4,
    cards=1,
    memory=100e9,
    flops=144e9,
    uplink=1.04e6,  # so that 1 MB takes a second
    downlink=1.04e6,
    round_trip=0.1,
)
LARGE = replace(
    SMALL, parameters=7e9, layers=33, width=4224, sequence=2048, batch=512, peers=20, memory=16e9, flops=4e13
)


def named(situation: Situation, name: str) -> Estimate:
    return next(each for each in methods(situation) if each.name == name)


@pytest.mark.parametrize(
    ("parameters", "layers", "width"),
    [(7e9, 33, 4224), (124e6, 9, 1088), (70e9, 71, 9088), (1e5, 1, 64)],
)
def test_guessed_shapes_are_those_of_usual_models(parameters: float, layers: int, width: int) -> None:
    assert (guess_layers(parameters, None), guess_width(parameters, layers)) == (layers, width)
    assert guess_layers(12 * 24 * 1024**2, width=1024) == 24


@pytest.mark.parametrize(
    ("values", "members", "bits", "sent"), [(1e6, 2, 64, 4e6), (1e6, 4, 32, 3e6), (1e6, 1, 64, 0), (8e6, 8, 16, 14e6)]
)
def test_bytes_of_an_all_reduce(values: float, members: int, bits: float, sent: float) -> None:
    assert all_reduced(values, members, bits) == pytest.approx(sent)


def test_seconds_of_averaging() -> None:
    """Gradients in every step and parameters in every 100th, 1 MB/s, 0.1 s and two round trips."""
    assert averaging(SMALL, Averaging(32), 1e6, 4) == pytest.approx((3.03e6, 3.03 + 0.1 + 0.2))
    assert averaging(SMALL, Averaging(32, sync_every=10), 1e6, 4) == pytest.approx((0.3e6, 0.33))
    assert averaging(SMALL, Averaging(32), 1e6, 4, users=2) == pytest.approx((3.03e6, 6.06 + 0.3))
    assert averaging(SMALL, Averaging(32), 1e6, 1) == (0, 0)
    fast = replace(SMALL, uplink=1e12, downlink=1e12)
    assert averaging(fast, Averaging(32, 1), 1e9, 4)[1] == pytest.approx(3e9 / (200e6 / 0.28) * 1.04 + 0.3), (
        "encryption"
    )


def test_activations_are_kept_if_they_fit_or_computed_again() -> None:
    assert held(SMALL, 1e9, 12) == (pytest.approx(1e9 + 34 * 12e6), 6)
    tight = replace(SMALL, memory=1.4e9 / 0.9)
    assert held(tight, 1e9, 12) == (pytest.approx(1e9 + (2 + 2 * 12 + 34) * 1e6), 8)


def test_methods_computed_by_hand() -> None:
    """A step has 120,000 tokens, which take 6 · 144e6 · 120,000 FLOP, or 180 s of four cards."""
    exact = named(SMALL, "Optimizer, float16")
    assert exact.card == pytest.approx(20 * 144e6 + 34 * 12e6)
    assert exact.computing == pytest.approx(180)
    assert exact.sent == pytest.approx(0.75 * 144e6 * 4 * 1.01)
    assert exact.step == pytest.approx(180 + 436.32 + 0.3)
    assert exact.share == pytest.approx(180 / 616.62)
    assert named(SMALL, "Optimizer, PowerSGD").sent == pytest.approx(0.75 * 144e6 * 4 * (1 / 9 + 0.01))
    assert named(SMALL, "DiLoCo, 4 bits").step == pytest.approx(180 + (0.75 * 144e6 * 12.25 / 8e6 + 0.3) / 100)


def test_stages_computed_by_hand() -> None:
    """Two of six peers hold each of three stages. Each of them gets 60 samples of 1 MB, and sends as much back."""
    found = named(replace(SMALL, peers=6, layers=3, memory=1.8e9), "stages, Optimizer")
    assert (found.layout, found.problem) == ("3 × 2", "")
    part = 48e6
    averaged = 0.5 * part * 2 * 1.01
    assert found.card == pytest.approx(20 * part + 3 * 34 * 1e6)
    assert found.computing == pytest.approx(6 * part * 60_000 / 144e9)
    assert found.sent == pytest.approx(120e6 + averaged)
    assert found.step == pytest.approx(120 + 2 * (120 / 60 + 0.1) + averaged / 1e6 + 0.3)
    narrow = replace(SMALL, peers=6, layers=3, memory=1.8e9, boundary=100, activation_bits=4)
    assert named(narrow, "stages, Optimizer").sent == pytest.approx(6e6 + averaged)


def test_experts_computed_by_hand() -> None:
    """A third is in all peers. Two of four experts of each layer compute a token, three quarters of them elsewhere."""
    found = named(SMALL, "experts")
    calls = 0.75 * 2 * 12 * 5 * 30e6
    assert found.card == pytest.approx(20 * 48e6 + 16 * 24e6 + 34 * 12e6)
    assert found.computing == pytest.approx(6 * (48e6 + 48e6) * 30_000 / 144e9)
    assert found.sent == pytest.approx(calls + 0.75 * 48e6 * 4 * 1.01)
    assert found.step == pytest.approx(found.computing + found.sent / 1e6 + 0.3 + 24 * 0.1)


@pytest.mark.parametrize("situation", [SMALL, LARGE, replace(LARGE, cards=8, memory=80e9)])
def test_more_of_everything_never_harms(situation: Situation) -> None:
    def steps(changed: Situation) -> dict[str, float]:
        return {each.name: each.step for each in methods(changed)}

    for factor in (1.5, 3, 30, 1000):
        faster = replace(situation, uplink=factor * situation.uplink, downlink=factor * situation.downlink)
        nearer = replace(situation, round_trip=situation.round_trip / factor)
        for better in (faster, nearer, replace(situation, flops=factor * situation.flops)):
            before, after = steps(situation), steps(better)
            assert all(after[name] <= before[name] * (1 + 1e-9) for name in before)
        for better in (faster, nearer):
            pairs = zip(methods(situation), methods(better), strict=True)
            assert all(b.share >= a.share for a, b in pairs if a.layout == b.layout), "a line that computes nothing"
        fits = {each.name for each in methods(situation) if not each.problem}
        roomier = methods(replace(situation, memory=factor * situation.memory))
        assert not {each.name for each in roomier if each.problem} & fits


def test_the_simplest_way_that_is_fast_enough_is_recommended() -> None:
    def recommended(**changes: float) -> str | None:
        found = recommend(methods(replace(LARGE, **changes)))  # type: ignore[arg-type]
        return found and found.name

    line = {"uplink": 1e8, "downlink": 1e8}
    assert recommended(
        parameters=1e8, layers=8, width=1024, memory=80e9, **{each: 1e10 for each in line}, flops=1e12
    ) == ("Optimizer, float16")
    assert recommended(memory=200e9) == "DiLoCo, 4 bits"
    assert recommended(memory=80e9, cards=2) == "sharded, DiLoCo"
    assert recommended(memory=80e9, cards=2, ram=100e9) == "stages, DiLoCo"
    assert recommended() == "stages, Optimizer"
    assert recommended(**line, boundary=256) == "stages, Optimizer"
    assert recommended(peers=4) is None, "not even experts, which are another model"


def test_what_would_help_is_the_change_that_helps_most() -> None:
    def help_for(**changes: float) -> tuple[str, str] | None:
        situation = replace(LARGE, **changes)  # type: ignore[arg-type]
        best = recommend(methods(situation))
        assert best is not None
        found = improve(situation, best)
        assert found is None or found[1].share > 1.2 * best.share
        return found and (found[0], found[1].name)

    assert help_for(uplink=6e6, downlink=6e6) == ("--boundary 264", "stages, DiLoCo")
    assert help_for(memory=200e9, sync_every=2) == ("--batch 2048", "Optimizer, PowerSGD")
    assert help_for(boundary=64, sync_every=2, batch=64) == ("--sync-every 10", "stages, DiLoCo")
    assert help_for(uplink=1e9, downlink=1e9, boundary=64) is None


COMMAND = "plan --parameters 7e9 --peers 20 --uplink 50 --memory 16"


@pytest.mark.parametrize(
    "options", ["", " --cards 8", " --uplink 1 --downlink 0.1", " --parameters 900e12 --layers 9999"]
)
def test_table_fits_the_terminal(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main((COMMAND + options).split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith("►") for line in lines) == ("900e12" not in options)


def test_json_has_all_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND.split(), "--json", "--tokens_per_second", "1000"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["situation"]["flops"] == 1000 * 6 * 7e9
    assert told["recommended"] in {each["name"] for each in told["ways"] if each["fits"]}
    assert told["reason"].startswith(f"Recommended: {told['recommended']}. No peer can hold the model")
    assert all(0 < each["share"] <= 1 for each in told["ways"])
    assert told["measured"]
    assert told["assumed"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            "--layers 96 --width 12288",
            "96 layers of width 12288 have about 174 billion parameters, and --parameters says 7",
        ),
        ("--batch 19", "--batch 19 is less than a sample for each of 20 peers: raise it"),
        ("--boundary 5000", "--boundary 5000 is wider than the model, which is 4224 wide: lower it"),
    ],
)
def test_numbers_that_contradict_each_other(options: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND.split(), *options.split()]) == 1
    assert text in capsys.readouterr().err
