"""Random numbers drawn while tracing are an error, because a trace would replay them.

In: the generators that a function reaches. Out: an error, if one of them, or one of the global ones (Python's, torch's, NumPy's),
was used.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from serrate.errors import TraceError


@contextmanager
def random_numbers_refused(generators: Sequence[Any] = ()) -> Iterator[None]:
    """Raises on exit if the global generators or any of these were used."""
    before = _states(generators)
    yield
    after = _states(generators)
    drawn = next((name for name, state in before.items() if after.get(name) != state), None)
    if drawn is not None:
        raise TraceError(
            f"random numbers were drawn while tracing (from {drawn}), and would be the same in every call; draw them before the "
            "call and pass them as an argument"
        )


def _states(generators: Sequence[Any]) -> dict[str, Any]:
    states: dict[str, Any] = {"Python's random": random.getstate(), "torch": bytes(torch.get_rng_state().numpy())}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        states["numpy.random"] = pickle.dumps(numpy.get_state(legacy=False)["state"])
    for k, generator in enumerate(generators):
        states[f"generator {k}, a {type(generator).__name__}"] = _state(generator)
    return states


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().cpu().numpy())
    bits = getattr(generator, "bit_generator", None)
    return pickle.dumps(bits.state if bits is not None else generator.get_state(legacy=False))
