"""How fast the codecs of shoal and of hivemind are on one core, and how large their errors.

    python benchmarks/compression.py --library both

Megabytes per second are those of the fp32 input, per second of processor time, which hardly depends on what else the
machine does. The libraries take turns, each in a process of its own, so that a noisy moment hits both; medians count.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

CODECS = {
    "none": "NoCompression",
    "float16": "Float16Compression",
    "bfloat16": "BFloat16Compression",
    "scaled float16": "ScaledFloat16Compression",
    "uniform 8-bit": "Uniform8BitQuantization",
    "quantile 8-bit": "Quantile8BitQuantization",
    "blockwise 8-bit": "BlockwiseQuantization",
    "blockwise 4-bit": "Blockwise4BitQuantization",
    "top-k 2-bit": "TopKCompression",
}
SIZES = {"512 KiB": 2**17, "2 MiB": 2**19, "40 MB": 10**7}
"""Values, by their bytes as fp32. A part in the all-reduce takes 512 KiB when compressed: without a codec it is of the
first size, with an 8-bit codec of the second."""
BITSANDBYTES = "bitsandbytes~=0.45.2"
"""What hivemind's blockwise codec needs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=["shoal", "hivemind", "both"], default="both")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--codecs", nargs="+", choices=list(CODECS), default=list(CODECS))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        Worker(args.serve).serve()
    else:
        libraries = ["shoal", "hivemind"] if args.library == "both" else [args.library]
        report(measure(libraries, args), args)


# --- the process that works -------------------------------------------------------------------------------------------


class Worker:
    """Obeys the commands that it reads, one JSON line each; runs in the environment of its library."""

    def __init__(self, library: str) -> None:
        import torch

        torch.set_num_threads(1)
        self.torch, self.module = torch, importlib.import_module(f"{library}.compression")
        self.inputs = {name: self.make(count, seed=0) for name, count in SIZES.items()}

    def make(self, count: int, seed: int) -> Any:
        return self.torch.randn(count, generator=self.torch.Generator().manual_seed(seed))

    def gradients(self, count: int) -> Any:
        """Heavy tails, and rows of very different scale: a Student t with three degrees of freedom, times e^N(0, 1)."""
        torch = self.torch
        denominator = sum(self.make(count, seed) ** 2 for seed in (1, 2, 3)) / 3
        rows = (self.make(count, seed=0) / denominator.sqrt())[: count // 1000 * 1000].view(-1, 1000)
        return (rows * self.make(len(rows), seed=4).exp().unsqueeze(1) * 1e-4).flatten().to(torch.float32)

    def serve(self) -> None:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print is no answer
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            command, *arguments = json.loads(line)
            try:
                result = {"result": getattr(self, command)(*arguments)}
            except ImportError as error:
                result = {"missing": str(error)}
            print(json.dumps(result), file=answers, flush=True)

    def codec(self, name: str) -> Any:
        if not hasattr(self.module, CODECS[name]):
            raise ImportError("there is no such codec")
        return getattr(self.module, CODECS[name])()

    def errors(self, name: str) -> list[float]:
        """Mean squared errors on normal values of variance 1, and on gradients, there relative to their mean square."""
        codec = self.codec(name)
        normal, gradients = self.inputs["2 MiB"], self.gradients(SIZES["2 MiB"])
        errors = []
        for values in (normal, gradients):
            decoded = codec.extract(codec.compress(values, self.module.CompressionInfo.from_tensor(values)))
            errors.append(float((decoded - values).double().square().mean() / values.double().square().mean()))
        return errors

    def time(self, name: str, size: str) -> list[float]:
        """Processor seconds to compress and to extract once."""
        codec, values = self.codec(name), self.inputs[size]
        info = self.module.CompressionInfo.from_tensor(values)
        serialized = codec.compress(values, info)
        repetitions = max(1, 10**7 // len(values))
        compress = self.processor_seconds(lambda: codec.compress(values, info), repetitions)
        return [compress, self.processor_seconds(lambda: codec.extract(serialized), repetitions)]

    def processor_seconds(self, work: Callable[[], Any], repetitions: int) -> float:
        work()
        began = time.process_time()
        for _ in range(repetitions):
            work()
        return (time.process_time() - began) / repetitions


# --- the process that asks --------------------------------------------------------------------------------------------


def measure(libraries: list[str], args: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {library: {"errors": {}, "speeds": defaultdict(dict)} for library in libraries}
    with contextlib.ExitStack() as stack:
        processes = {library: stack.enter_context(worker(library)) for library in libraries}
        for codec in args.codecs:
            able = []
            for library, process in processes.items():
                answer = ask(process, "errors", codec)
                if "missing" in answer:
                    print(f"{library} without {codec}: {answer['missing']}", file=sys.stderr)
                else:
                    able.append(library)
                    results[library]["errors"][codec] = answer["result"]
            for size in args.sizes:
                seconds = defaultdict(list)
                for _ in range(args.rounds):
                    for library in able:
                        seconds[library].append(ask(processes[library], "time", codec, size)["result"])
                for library in able:
                    megabytes = SIZES[size] * 4 / 1e6
                    medians = [median(column) for column in zip(*seconds[library], strict=True)]
                    results[library]["speeds"][size][codec] = [megabytes / each for each in medians]
    return results


@contextlib.contextmanager
def worker(library: str) -> Iterator[subprocess.Popen[str]]:
    from crew import interpreter

    python = interpreter(library)
    if library == "hivemind":
        provide_bitsandbytes(python)
    one_core = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "QUANTIZATION_THREADS": "1"}
    process = subprocess.Popen(
        [python, "-W", "ignore", __file__, "--serve", library],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **one_core},
    )
    assert process.stdin
    assert process.stdout
    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the process of {library} could not start")
        yield process
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


def provide_bitsandbytes(python: str) -> None:
    """hivemind's blockwise codec needs it; without it the benchmark goes on and says so."""
    if subprocess.run([python, "-c", "import bitsandbytes"], capture_output=True).returncode == 0:
        return
    print(f"adding {BITSANDBYTES} to hivemind's environment", file=sys.stderr)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", BITSANDBYTES]
    if subprocess.run(install).returncode != 0:
        print(f"{BITSANDBYTES} could not be installed: hivemind has no blockwise codec here", file=sys.stderr)


def ask(process: subprocess.Popen[str], command: str, *arguments: str) -> dict[str, Any]:
    assert process.stdin
    assert process.stdout
    print(json.dumps([command, *arguments]), file=process.stdin, flush=True)
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} ended during {command} {arguments}")
    answer: dict[str, Any] = json.loads(line)
    return answer


def report(results: dict[str, Any], args: argparse.Namespace) -> None:
    libraries = list(results)
    for size in args.sizes:
        print(f"{size} of values: MB/s of them, compress / extract")
        for codec in args.codecs:
            speeds = [results[library]["speeds"][size].get(codec) for library in libraries]
            cells = [
                f"{name} {speed[0]:7.0f} / {speed[1]:7.0f}"
                for name, speed in zip(libraries, speeds, strict=True)
                if speed
            ]
            if len(speeds) == 2 and all(speeds):
                cells.append("{:5.2f} × / {:5.2f} ×".format(*(a / b for a, b in zip(*speeds, strict=True))))
            print(f"  {codec:<16}", "   ".join(cells))
    print("mean squared error relative to the mean square: normal values / gradient-like values")
    for codec in args.codecs:
        errors = [(library, results[library]["errors"].get(codec)) for library in libraries]
        cells = [f"{library} {error[0]:9.3e} / {error[1]:9.3e}" for library, error in errors if error]
        print(f"  {codec:<16}", "   ".join(cells))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
