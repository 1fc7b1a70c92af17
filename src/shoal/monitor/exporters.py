"""Figures of a run for other programs: TensorBoard, Weights & Biases, and Prometheus.

The first two get the state of the swarm once per epoch, with the epoch as the step, and at least twice a minute.
Prometheus asks whenever it likes, and also gets the figures of each peer.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any, Protocol

from shoal.base.logs import one_line
from shoal.errors import ShoalError
from shoal.metrics import PrometheusEndpoint, start_prometheus
from shoal.monitor.run import PeerState, RunView, Summary


def figures_of(summary: Summary) -> dict[str, float]:
    """The state of the swarm as numbers by name, without unknown ones."""
    told = {f"swarm/{name}": value for name, value in summary.values().items() if name not in ("loss", "loss_median")}
    told |= {f"mean/{name}": value for name, value in summary.means.items()}
    told |= {f"median/{name}": value for name, value in summary.medians.items()}
    return {name: value for name, value in told.items() if math.isfinite(value)}


class Exporter(Protocol):
    """Passes on the state of a run."""

    def note(self, view: RunView) -> None:
        """Called once a second."""

    def close(self) -> None:
        """Stop exporting."""


class _ByEpoch:
    """Passes on the state of the swarm at each new epoch, and at least every half minute."""

    def __init__(self) -> None:
        self._epoch, self._next = -1, -math.inf

    def note(self, view: RunView) -> None:
        """Pass on the state of the swarm if that is due."""
        with view.lock:
            summary = view.summary
        if summary is None or not summary.peers:
            return
        if summary.epoch != self._epoch or summary.time >= self._next:
            self._epoch, self._next = summary.epoch, summary.time + 30.0
            self.write(summary, figures_of(summary))

    def write(self, summary: Summary, figures: dict[str, float]) -> None:
        raise NotImplementedError


class TensorBoard(_ByEpoch):
    """Writes events into a folder, for TensorBoard.

    Args:
        folder: where they go.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._writer: Any = _load("tensorboardX", "tensorboard").SummaryWriter(folder)

    def write(self, summary: Summary, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, summary.epoch, walltime=summary.time)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb(_ByEpoch):
    """Logs a run to Weights & Biases.

    Args:
        project: the project in which it appears.
        run: its name there.

    Raises:
        ShoalError: Weights & Biases refuses this program.
    """

    def __init__(self, project: str, run: str) -> None:
        super().__init__()
        wandb = _load("wandb", "wandb")
        try:
            # Otherwise it also uploads the terminal's output: a table that is redrawn every second.
            self._run: Any = wandb.init(project=project, name=run, settings={"console": "off"})
        except Exception as e:  # its errors have no common base that all versions know
            raise ShoalError(
                f"Weights & Biases cannot log to {project!r} ({one_line(str(e))}): run `wandb login` before, or set "
                "WANDB_MODE=offline"
            ) from e

    def write(self, summary: Summary, figures: dict[str, float]) -> None:
        # Its own steps must grow, but epochs may go back, so the epoch is one of the figures.
        self._run.log({"epoch": summary.epoch, **figures})

    def close(self) -> None:
        self._run.finish()


class Prometheus:
    """Answers Prometheus with the state of the swarm and of each peer.

    Args:
        view: the run.
        port: 0 = any free one.
        host: where to listen; by default only programs of this machine can ask.
    """

    def __init__(self, view: RunView, port: int, host: str = "127.0.0.1") -> None:
        self._view = view
        self._endpoint: PrometheusEndpoint = start_prometheus(port, self._collect, host)
        self.url = self._endpoint.url
        """The URL of the figures."""

    def _collect(self) -> Iterator[tuple[str, str, dict[str, str], float]]:
        view = self._view
        with view.lock:
            run = {"run": view.run}
            if view.summary is not None:
                for name, value in figures_of(view.summary).items():
                    kind, _, figure = name.partition("/")
                    if kind == "swarm":
                        yield f"shoal_swarm_{figure}", f"Of the swarm: {figure}", run, value
                    else:
                        yield (
                            f"shoal_swarm_figure_{kind}",
                            f"The {kind} of what users report",
                            {
                                **run,
                                "name": figure,
                            },
                            value,
                        )
            for row in view.stages.rows:
                of_stage = {**run, "stage": str(row.stage)}
                yield "shoal_stage_peers", "Peers that serve the stage", of_stage, float(row.serving)
                yield "shoal_stage_queue", "Microbatches that wait there", of_stage, float(row.queue)
                if row.rate is not None:
                    yield "shoal_stage_microbatches_per_second", "What its peers can do", of_stage, row.rate
            for peer in view.peers.values():
                of_peer = {**run, "peer": str(peer.peer)}
                yield "shoal_peer_up", "1 if it is there, 0 if it is gone", of_peer, float(not peer.state.is_gone)
                yield "shoal_peer_training", "1 if it trains", of_peer, float(peer.state is PeerState.TRAINING)
                yield "shoal_peer_epoch", "Its epoch", of_peer, float(peer.epoch)
                yield "shoal_peer_samples_per_second", "Its speed", of_peer, peer.samples_per_second
                if peer.report is not None:
                    yield "shoal_peer_rounds_failed", "Rounds that failed", of_peer, float(peer.report.rounds_failed)
                    yield "shoal_peer_bytes_sent", "Bytes sent", of_peer, float(peer.report.bytes_sent)
                    for name, value in peer.report.metrics.items():
                        yield "shoal_peer_figure", "What it reports", {**of_peer, "name": name}, value

    def note(self, view: RunView) -> None:
        """Do nothing: Prometheus asks by itself."""

    def close(self) -> None:
        self._endpoint.close()


def _load(module: str, extra: str) -> Any:
    """Import an optional package.

    Raises:
        ModuleNotFoundError: it is not installed; the text says how to get it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError(f"{module} is not installed: pip install 'shoal[{extra}]'", name=e.name) from None
