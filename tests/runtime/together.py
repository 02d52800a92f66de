"""Processes that need the same programs at the same moment, some of which are killed.

A script. In: the number of processes, of rounds, and what they do: `live`, `kill` (one process of each round is killed) or `tune`
(they measure plans too); the cache folder and the compiler from the environment. Out: a line for every round, and exit status 1
if an answer is wrong or a process fails. Processes are forked after torch is imported, so that they start within a millisecond of
each other.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
import warnings

import torch

from serrate import JaggedTensor, Structure, ir, jit, ops
from serrate.compiled import Compiled
from serrate.errors import CacheWarning

ARGS = (torch.arange(12.0).reshape(6, 2), torch.tensor([0, 2, 2, 6]))
SUMS = torch.tensor([[2.0, 4.0], [0.0, 0.0], [28.0, 32.0]])
STRATEGIES = ("maskless", "masked", "persistent_dynamic")


def answers(scale: float) -> None:
    """Runs one program under every strategy and checks what it computes."""
    with ir.Fusion("scaled") as f:
        x, offsets = f.input((None, 2), torch.float32), f.input((None,), torch.int64)
        f.output(ops.sum(ops.mul(ops.as_nested(x, offsets), scale), 1))
    for strategy in STRATEGIES:
        found = Compiled(f, "cpp", strategy)(*ARGS)
        assert torch.equal(found, SUMS * scale), (strategy, found)


def tuned_answers(scale: float) -> None:
    """Runs a function whose plans are measured, and checks what it computes."""
    function = jit(lambda jt: (jt * scale).sum(dim=1), backend="cpp", effort="quick", tune="first_call")
    jt = JaggedTensor(ARGS[0], Structure.from_offsets(ARGS[1]))
    found = function(jt)
    assert torch.allclose(found, SUMS * scale), found
    (known,) = function.tunings(jt)
    assert known.source in ("measured", "remembered"), known.source


def start(scale: float, gate: int) -> int:
    """A process that computes as soon as something arrives at the gate."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        warnings.simplefilter("error", CacheWarning)
        os.read(gate, 1)
        (tuned_answers if sys.argv[3] == "tune" else answers)(scale)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def round_of(count: int, scale: float, victim_after: float | None) -> list[int]:
    """The exit statuses of processes that start together; the first is killed after so many seconds."""
    gate, opened = os.pipe()
    children = [start(scale, gate) for _ in range(count)]
    os.write(opened, b"x" * count)
    if victim_after is not None:
        time.sleep(victim_after)
        os.kill(children[0], signal.SIGKILL)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main() -> int:
    count, rounds, killing = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "kill"
    failed, spread = 0, 1.0
    for k in range(rounds):
        begun = time.monotonic()
        after = random.Random(k).uniform(0.0, spread) if killing else None
        statuses = round_of(count, k + 2.0, after)
        # Later victims die while the others still build.
        spread = max(0.1, time.monotonic() - begun) if k == 0 else spread
        wrong = [s for s in statuses if s not in ((0, -signal.SIGKILL) if killing else (0,))]
        # A process that starts afterwards finds everything.
        wrong += [s for s in round_of(1, k + 2.0, None) if s]
        print(k, after, statuses, flush=True)
        failed += bool(wrong)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
