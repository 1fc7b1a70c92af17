"""Python that the documents show runs: the blocks of a page one after the other, as one program.

A page takes for granted what its reader has: a model, its data, peers. That is given here, by its name in the page, and
stands also for the ``...`` among the arguments of what a page makes.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.access.tokens import Token
from shoal.archive.contents import CheckedState
from shoal.archive.keeping import Archiver
from shoal.archive.store import Store
from shoal.base.closeable import Facade
from shoal.compression.base import CompressionInfo
from shoal.moe import layers
from tests.documents.pages import PAGES, ROOT, Block, blocks_of, name_of

pytestmark = pytest.mark.timeout(240)
ELSEWHERE = {
    "README.md": "tests/documents/test_examples.py",
    "docs/index.md": "tests/documents/test_examples.py",
    "docs/sharded.md": "tests/optim/sharded.py",
    "docs/tutorial.md": "tests/documents/test_tutorial.py",
}
"""Pages whose programs are run by other tests, as processes."""
CODE = [block for page in PAGES for block in blocks_of(page) if block.language == "python"]


UNDER_TORCHRUN = "# under torchrun"
ONE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""What ``torchrun`` sets for a single process."""


class Setting:
    """What the reader of a page has.

    Args:
        folder: the one in which the code runs.
        stack: for what must end after it.
        monkeypatch: for what it changes in the process.
    """

    def __init__(self, folder: Path, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.stack, self.monkeypatch = folder, stack, monkeypatch
        self.names: dict[str, Any] = {"torch": torch, "shoal": shoal, "given": self.given}
        self.replaced: dict[str, str] = {}
        self.says = ""
        self._made = 0

    def dht(self, **options: Any) -> shoal.DHT:
        return self.stack.enter_context(shoal.DHT(start=True, **options))

    def given(self, kind: str, explicit: frozenset[str]) -> dict[str, Any]:
        """Arguments instead of ``...``, but for those that the page has."""
        if kind not in ("Optimizer", "StagedModel"):
            return {"target_batch_size": 4096}
        self._made += 1
        if kind == "StagedModel":
            self.names["dht"] = shoal.DHT(start=True)
            own = {
                "dht": self.names["dht"],
                "stages": [self.names[name] for name in ("Embedding", "make_layers", "Head")],
                "optimizer": functools.partial(torch.optim.SGD, lr=0.1),
            }
            return {**own, "run_id": f"run_{self._made}", "target_batch_size": 64}
        common = {
            "dht": self.names.get("dht") or self.dht(),
            "run_id": f"run_{self._made}",
            "target_batch_size": 16,
            "optimizer": torch.optim.SGD(self.names["model"].parameters(), lr=0.1),
            "matchmaking_time": 1.0,
        }
        return {name: value for name, value in common.items() if name not in explicit}

    def learns(self) -> None:
        """Most pages speak of a model, batches and a loss."""
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        batch, labels = torch.randn(8, 8), torch.randint(4, (8,))
        data = TensorDataset(torch.randn(32, 8), torch.randint(4, (32,)))
        self.names |= {"model": model, "batch": batch, "labels": labels, "batches": [batch] * 4, "dataset": data}
        self.names |= {"loss_of": lambda model, batch: model(batch).square().mean(), "DataLoader": DataLoader}


def archives(setting: Setting) -> None:
    setting.learns()
    model, seed, folder = setting.names["model"], setting.dht(), setting.folder / "archives"
    with shoal.Optimizer(
        dht=seed,
        run_id="my_run",
        target_batch_size=8,
        batch_size_per_step=8,
        optimizer=torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9),
        matchmaking_time=1.0,
    ) as optimizer:
        while optimizer.local_epoch < 1:
            model(setting.names["batch"]).mean().backward()
            optimizer.step()
        with shoal.DHT(seed.get_visible_maddrs(), start=True, client_mode=True) as dht:
            archiver = Archiver(dht, "my_run", Store(str(folder)), say=lambda *_: None, every=60, keep=5, rate=1e9)
            archiver.write_one()
            archiver.close()
    setting.names["optimizer"] = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    state, other = Store.open(folder).state, setting.folder / "stages"
    stages = {n: CheckedState.of(f"llama_stage_{n}", "Optimizer", state) for n in range(2)}
    Store(other).write_contents("llama", stages, count=2)
    setting.names["make_stages"] = [lambda: copy.deepcopy(model)] * 2
    setting.replaced = {"/mnt/archives/my_run": str(folder), "/mnt/archives/llama": str(other)}
    setting.says = "my_run 1 "


def compression(setting: Setting) -> None:
    setting.learns()
    gradient = torch.randn(100)
    setting.names |= {
        "codec": shoal.BlockwiseQuantization(),
        "gradient": gradient,
        "residual": torch.zeros(100),
        "info": CompressionInfo.from_tensor(gradient),
    }


def data(setting: Setting) -> None:
    setting.learns()
    setting.names["dht"] = setting.dht()
    setting.replaced = {"num_workers=4": "num_workers=0", "range(10)": "range(2)"}


def experts(setting: Setting) -> None:
    def end() -> None:
        for each in setting.names.values():
            if isinstance(each, shoal.Server):
                each.shutdown()
                each.join()

    setting.stack.callback(end)
    for registered in (layers.name_to_block, layers.name_to_input):
        setting.stack.callback(registered.pop, "perceptron", None)  # type: ignore[attr-defined]


def gradients(setting: Setting) -> None:
    setting.learns()
    setting.names["path"] = setting.folder / "checkpoint.pt"


def huggingface(setting: Setting) -> None:
    pytest.importorskip("transformers")
    setting.stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")  # peft says which settings fit GPT-2
    setting.monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # a thread that would stay
    small = importlib.import_module("tests.transformers.small")
    model, dataset = small.make_model(), small.make_data()
    model.save_pretrained(setting.folder / "checkpoint")
    setting.names |= {"model": model, "dataset": dataset, "loader": DataLoader(dataset, batch_size=8)}
    setting.replaced = {
        "/ip4/203.0.113.7/tcp/40123/p2p/12D3KooW…": str(setting.dht().get_visible_maddrs()[0]),
        '"checkpoints", ': '"checkpoints", use_cpu=True, report_to=[], dataloader_pin_memory=False, ',
        "path/to/checkpoint": str(setting.folder / "checkpoint"),
        "target_batch_size=1024": "target_batch_size=32",
        "2000": "2",
        "Accelerator(": "Accelerator(cpu=True, ",
    }


def lightning(setting: Setting) -> None:
    package = pytest.importorskip("lightning")
    setting.stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")  # Lightning has much to say about small data

    class Module(package.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 4)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    samples = TensorDataset(torch.randn(4096, 8), torch.randint(4, (4096,)))
    setting.names |= {"model": Module(), "loader": DataLoader(samples, batch_size=4096), "initial_peers": []}
    setting.replaced = {"203.0.113.7:40123": setting.dht().address}


def low_communication(setting: Setting) -> None:
    setting.names["initial_peers"] = []
    setting.says = "made 150 inner and 3 outer steps"


def monitoring(setting: Setting) -> None:
    setting.learns()
    setting.names["dht"] = setting.dht()
    arguments = setting.given("Optimizer", frozenset())
    setting.names["optimizer"] = shoal.Optimizer(**arguments, batch_size_per_step=8)


def private_swarms(setting: Setting) -> None:
    key = Token.new_run("friends")
    address = str(setting.dht(token=key.text).get_visible_maddrs()[0])
    setting.replaced = {"ADDRESS": address, "shoal-invite-...": key.invite(shoal.p2p.Roles.TRAIN, 2**32).text}


def stages(setting: Setting) -> None:
    setting.replaced = {'stage="auto"': "stage=[0, 1, 2]", "model.serve()": "assert model.is_alive()"}
    setting.replaced |= {"def make_layers(count):": "def make_layers(count=4):"}
    setting.says = "32 samples, loss "


def which_one(setting: Setting) -> None:
    setting.names = {"torch": torch}
    setting.says = (
        "350 MB for each exchange of 100 million parameters in float16\n64 values for each sample instead of 512"
    )


def training(setting: Setting) -> None:
    setting.replaced = {"time.sleep(0.1)": "time.sleep(0)"}
    setting.says = "trained for 3 epochs"


SETTINGS: dict[str, Callable[[Setting], None]] = {
    "docs/archives.md": archives,
    "docs/coming-from.md": Setting.learns,
    "docs/compression.md": compression,
    "docs/data.md": data,
    "docs/experts.md": experts,
    "docs/gradients.md": gradients,
    "docs/huggingface.md": huggingface,
    "docs/lightning.md": lightning,
    "docs/low-communication.md": low_communication,
    "docs/monitoring.md": monitoring,
    "docs/private-swarms.md": private_swarms,
    "docs/robust-averages.md": Setting.learns,
    "docs/stages.md": stages,
    "docs/training.md": training,
    "docs/which-one.md": which_one,
}


class _Given(ast.NodeTransformer):
    """Puts what is given in the place of ``...``."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value is ...:
            kind = ast.unparse(node.func).rpartition(".")[2]
            names = [each.arg for each in node.keywords if each.arg]
            given = ast.parse(f"given({kind!r}, frozenset({names!r}))", mode="eval").body
            node.args.pop(0)
            node.keywords.append(ast.keyword(arg=None, value=given))
        return node


def pages() -> Iterator[Any]:
    """Each page with code; gloo's own sockets outlive a group of processes."""
    for page in sorted({block.page for block in CODE}):
        groups = any(UNDER_TORCHRUN in block.code for block in CODE if block.page == page)
        yield pytest.param(page, id=page, marks=[pytest.mark.leaves_something] if groups else [])


@pytest.mark.parametrize("page", list(pages()))
def test_code_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if page in ELSEWHERE:
        assert Path(page).name in (ROOT / ELSEWHERE[page]).read_text(encoding="utf-8")
        return
    assert page in SETTINGS, "say what its code needs, or which test runs it"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with contextlib.ExitStack() as stack:
        setting = Setting(tmp_path, stack, monkeypatch)
        SETTINGS[page](setting)
        made: list[Facade] = []
        stack.callback(shut_down, made)
        for block in blocks_of(ROOT / page):
            if block.language == "python":
                run(block, setting)
                made += ending(setting.names)
    if setting.says:
        assert setting.says in capsys.readouterr().out


def run(block: Block, setting: Setting) -> None:
    code = block.code
    for shown, real in setting.replaced.items():
        code = code.replace(shown, real)
    if UNDER_TORCHRUN in code:
        for name, value in ONE_PROCESS.items():
            setting.monkeypatch.setenv(name, value)
    # Lines are those of the page, so that a traceback shows where it is.
    tree = ast.increment_lineno(_Given().visit(ast.parse(code)), block.line)
    exec(compile(ast.fix_missing_locations(tree), str(ROOT / block.page), "exec"), setting.names)


def ending(names: dict[str, Any]) -> Iterator[Facade]:
    """What of this must be shut down, and what objects of Lightning and accelerate have within."""
    for value in names.values():
        within = (getattr(value, name, None) for name in ("dht", "optimizer"))
        for each in (value, *within, getattr(getattr(value, "strategy", None), "dht", None)):
            if isinstance(each, Facade):
                yield each


def shut_down(made: list[Facade]) -> None:
    """What the code has not ended itself: first what uses a table, then tables."""
    for each in sorted(made, key=lambda each: isinstance(each, shoal.DHT)):
        each.shutdown()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("block", [pytest.param(block, id=block.place) for block in CODE])
def test_what_code_names_exists(block: Block) -> None:
    """All of it can be parsed, whatever starts with ``shoal.`` is there, and so is each argument by name."""
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shoal"):
            assert node.module is not None
            room = importlib.import_module(node.module)
            assert all(hasattr(room, name.name) for name in node.names), ast.unparse(node)
        if isinstance(node, ast.Attribute) and re.fullmatch(r"shoal(\.\w+)+", path := ast.unparse(node)):
            assert found(path) is not None, path
        if isinstance(node, ast.Call) and re.fullmatch(r"shoal(\.\w+)+", path := ast.unparse(node.func)):
            parameters = inspect.signature(found(path)).parameters
            if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
                assert {each.arg for each in node.keywords if each.arg} <= parameters.keys(), ast.unparse(node)


def found(path: str) -> Any:
    """What a dotted path such as ``shoal.dht.DHT`` leads to."""
    value: Any = importlib.import_module("shoal")
    for place, name in enumerate(path.split(".")[1:], 2):
        if not hasattr(value, name):
            importlib.import_module(".".join(path.split(".")[:place]))
        value = getattr(value, name)
    return value


def test_no_page_is_forgotten() -> None:
    assert {name_of(page) for page in PAGES} >= {*SETTINGS, *ELSEWHERE}
