"""Importing shoal does nothing but import: any room, in any order, with or without the optional packages."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

LIMIT_SECONDS = 270
pytestmark = [
    pytest.mark.oldest,
    pytest.mark.timeout(300),  # importing torch is pure computing, on a busy machine very long
]

OPTIONAL_PACKAGES = (
    *("uvloop", "rich", "matplotlib", "sklearn", "bitsandbytes", "lightning", "pytorch_lightning", "safetensors"),
    *("zeroconf", "segno"),
    *("starlette", "uvicorn", "tensorboardX", "wandb", "prometheus_client", "transformers", "accelerate", "peft"),
)
PAGE = "shoal.monitor.page"

PRELUDE = """
import importlib, importlib.util, logging, multiprocessing, os, pkgutil, signal, sys, threading
import torch, torch.optim

has_transformers = importlib.util.find_spec("transformers") is not None  # not with the oldest versions of the rest

def all_modules():
    import shoal
    names = [m.name for m in pkgutil.walk_packages(shoal.__path__, "shoal.") if not m.name.endswith("__main__")]
    return [name for name in names if has_transformers or not name.startswith("shoal.transformers.")]
"""


def run(script: str) -> str:
    command = [sys.executable, "-W", "error::Warning:shoal", "-c", PRELUDE + textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_no_side_effects() -> None:
    run("""
        def state():
            return {
                "threads": threading.enumerate(),
                "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
                "start method": multiprocessing.get_start_method(allow_none=True),
                "root handlers": list(logging.getLogger().handlers),
                "root level": logging.getLogger().level,
                "torch threads": torch.get_num_threads(),
                "default dtype": torch.get_default_dtype(),
                "random state": torch.get_rng_state().tolist(),
                # torch says where its compiler keeps files, once somebody loads it.
                "environment": {name: os.environ[name] for name in os.environ.keys() - {"TORCHINDUCTOR_CACHE_DIR"}},
                "children": multiprocessing.active_children(),
            }

        before = state()
        names = all_modules()
        assert "shoal.base.reactor" in names, names
        for name in names:
            importlib.import_module(name)
        after = state()
        changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
        assert not changed, changed
        assert sys.modules["shoal.base.reactor"].Reactor.current is None
    """)


@pytest.mark.slow_drill
@pytest.mark.slow
def test_every_module_can_be_imported_first() -> None:
    """Python imports the package of a module before it. What the package has imported then needs no try of its own."""
    run("""
        def imported_by(name):
            for loaded in [m for m in sys.modules if m == "shoal" or m.startswith("shoal.")]:
                del sys.modules[loaded]
            importlib.import_module(name)
            return set(sys.modules)

        names = all_modules()
        with_packages = {package: imported_by(package) for package in {name.rpartition(".")[0] for name in names}}
        for name in names:
            if name not in with_packages[name.rpartition(".")[0]]:
                imported_by(name)
    """)


def test_optional_packages_may_be_missing() -> None:
    """The demo needs those of ``shoal[demo]``, the page those of ``shoal[monitor]``, and nothing else needs any."""
    run(f"""
        sys.modules.update(dict.fromkeys({OPTIONAL_PACKAGES}))  # importing one raises ModuleNotFoundError
        for name in all_modules():
            if not name.startswith(("shoal.cli.demo.", "shoal.transformers.")) and name != {PAGE!r}:
                importlib.import_module(name)
        import shoal.cli.__main__  # whatever its commands load
        from shoal.base.reactor import Portal

        async def one():
            return 1

        assert Portal("test object").call(one()) == 1
    """)


def test_bare_import_does_not_load_the_rooms() -> None:
    output = run("""
        import shoal
        names = ("shoal.base.inherited", "shoal.proto")  # a table of import paths
        loaded = {name for name in sys.modules if name.startswith("shoal.") and not name.startswith(names)}
        print(sorted(loaded - {"shoal.base"}))  # whose own file holds a docstring only
        assert sorted(shoal.__all__) == sorted(shoal._HOME_OF), "the lists of public names differ"
        assert set(shoal.__all__) | set(shoal._ROOMS) <= set(dir(shoal))
    """)
    assert output.strip() == "[]"


def test_the_table_loads_neither_torch_nor_what_few_programs_need() -> None:
    script = """
        import sys
        from shoal.dht import DHT
        import shoal.cli.dht
        rooms = ("averaging", "compression", "optim", "utils", "testing", "base.extras")
        heavy = ["torch", "numpy", "pydantic", "cryptography.x509", "cryptography.hazmat.primitives.serialization"]
        print([name for name in [*heavy, *(f"shoal.{room}" for room in rooms)] if name in sys.modules])
        import shoal.cli.__main__
        print([name for name in ("torch", "matplotlib", "rich") if name in sys.modules])
        dht = DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
        assert dht.store("key", 1, 10**10) and dht.get("key").value == 1
        dht.shutdown()
        print([name for name in heavy[:3] if name in sys.modules])
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=True)
    assert done.stdout == "[]\n[]\n[]\n", "a process that only holds a part of the table would need much more memory"


def test_without_torch_the_table_works_and_each_room_with_tensors_says_what_is_missing() -> None:
    script = """
        import sys
        sys.modules.update(dict.fromkeys(["torch", "numpy"]))  # importing one raises ModuleNotFoundError
        import importlib, shoal
        with shoal.DHT(start=True, host_maddrs="127.0.0.1:0") as dht:
            assert dht.store("key", 1, shoal.get_dht_time() + 60) and dht.get("key").value == 1
        for what in ("Optimizer", "DiLoCo", "DecentralizedAverager", "NoCompression", "load_archive"):
            try:
                getattr(shoal, what)
            except ModuleNotFoundError as e:
                print(e.name, str(e).partition(":")[0])
        for room in ("archive", "averaging", "compression", "data", "optim", "optim.grad_scaler", "monitor.observer"):
            try:
                importlib.import_module(f"shoal.{room}")
            except ModuleNotFoundError as e:
                print(e.name, str(e).partition(":")[0])
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=True)
    wanted = "torch this part of shoal needs torch, which is not installed"
    assert done.stdout.splitlines() == [wanted] * 12


def test_the_optimizer_loads_what_checks_records_only_when_there_are_any() -> None:
    output = run("""
        import shoal.optim
        print([name for name in ("pydantic", "matplotlib", "rich") if name in sys.modules])
    """)
    assert output.strip() == "[]"
