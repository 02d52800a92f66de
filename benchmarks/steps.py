"""A loop of training-like steps with new lengths in every step: eager operators, a traced function and a kernel.

In: a device. Out: a table and steps.json with the host time of a step, and the memory that the loop leaves behind. On a GPU every
host synchronisation is an error. Run as `serrate bench steps`.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from rich.console import Console
from rich.table import Table
from torch import Tensor

import serrate
import serrate.language as hl
from benchmarks.data import lengths, offsets
from benchmarks.gpu_timing import no_synchronisation
from benchmarks.options import Options
from serrate import JaggedTensor

ROWS, MEAN, FEATURES = 64, 24, 32
STEPS, WARM_UP = 1000, 200
"""Steps of the loop, and how many of them come before anything is measured."""


class Batches:
    """Rows of new lengths for every step, on a device before the loop begins, as a loader leaves them there."""

    def __init__(self, count: int, device: torch.device) -> None:
        drawn = [offsets(lengths("exponential", ROWS, MEAN, seed)) for seed in range(count)]
        self.totals = [int(each[-1]) for each in drawn]
        self.offsets = [each.to(device) for each in drawn]
        generator = torch.Generator().manual_seed(0)
        self.pool = torch.randn(max(self.totals), FEATURES, generator=generator).to(device)

    def __len__(self) -> int:
        return len(self.totals)

    def __getitem__(self, k: int) -> JaggedTensor:
        return JaggedTensor.from_csr(self.pool[: self.totals[k]], self.offsets[k])


@serrate.kernel
def pooled(x: JaggedTensor) -> Tensor:
    """The mean of each row. How long a tile's rows are is computed on the device: the host need not know."""
    out = torch.empty([x.num_rows, x.values.size(1)], dtype=x.dtype, device=x.device)
    for tile_b in hl.tile(x.num_rows):
        total = hl.zeros([tile_b, x.size(2)])
        lengths = x.lengths[tile_b]
        for tile_k in hl.tile(lengths.amax()):
            total = total + x[tile_b, tile_k, :].sum(1)
        out[tile_b, :] = total / lengths[:, None]
    return out


@serrate.jit
def gated(x: Any, weight: Tensor) -> Any:
    """Features times a gate that each row computes from its own softmax."""
    return functional.layer_norm(x, (FEATURES,)) * torch.softmax(x * weight, 1)


class Model:
    """What a step runs; the weights are all that stays from one step to the next."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.randn(FEATURES, FEATURES, generator=generator).to(device)
        self.scale = torch.randn(FEATURES, generator=generator).to(device)

    def __call__(self, x: Any) -> Any:
        hidden = torch.relu(functional.linear(x, self.weight))
        centred = hidden - hidden.mean(1, keepdim=True)
        return pooled(gated(centred, self.scale)) + x.amax(1)

    def of_row(self, x: Tensor) -> Tensor:
        """The same for one row, in plain torch."""
        hidden = torch.relu(functional.linear(x, self.weight))
        centred = hidden - hidden.mean(0, keepdim=True)
        result = functional.layer_norm(centred, (FEATURES,)) * torch.softmax(centred * self.scale, 0)
        return result.mean(0) + x.amax(0)


@dataclass(frozen=True)
class Outcome:
    """Microseconds of the host for a step, and what the second half of the loop added: bytes on the device, Python objects."""

    device: str
    steps: int
    median_us: float
    slowest_us: float
    bytes_added: int
    objects_added: int


def held(device: torch.device) -> tuple[int, int]:
    """Bytes of tensors on the device, and Python objects."""
    gc.collect()
    allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return allocated, len(gc.get_objects())


def run(device: torch.device, steps: int = STEPS, warm_up: int = WARM_UP) -> Outcome:
    """The loop. The caller may count what it builds."""
    batches, model = Batches(steps, device), Model(device)
    for k in range(warm_up):
        model(batches[k])
    times, half, middle = [], (steps + warm_up) // 2, (0, 0)
    with no_synchronisation(device):
        for k in range(warm_up, steps):
            if k == half:
                middle = held(device)
            begin = time.perf_counter()
            model(batches[k])
            times.append(1e6 * (time.perf_counter() - begin))
        end = held(device)
    added = [after - before for after, before in zip(end, middle, strict=True)]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return Outcome(name, steps, statistics.median(times), max(times), *added)


def main(options: Options) -> bool:
    """Runs the loop on a GPU if there is one, else on the CPU; prints and writes what it cost."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = run(device, 300, 200) if options.quick else run(device)
    table = Table("device", "steps", "us a step", "slowest", "bytes added", "objects added")
    table.add_row(
        found.device,
        str(found.steps),
        *(f"{number:.0f}" for number in (found.median_us, found.slowest_us)),
        *map(str, (found.bytes_added, found.objects_added)),
    )
    Console().print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "steps.json").write_text(json.dumps(asdict(found), indent=1))
    return True
