"""Equality of fusions: by what is recorded, whatever things are called.

In: pairs of small fusions. Out: failures to tell them apart, or to see that they are the same.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from serrate import ops
from serrate.ir import Fusion
from serrate.ir.view import TensorView


def recorded(make: Callable[[Fusion], TensorView], *, skip: int = 0, name: str = "f") -> Fusion:
    """A fusion; `skip` names of each kind are used up first."""
    with Fusion(name) as f:
        for prefix in ("T", "d", "n", "c", "r", "o"):
            for _ in range(skip):
                f.fresh(prefix)
        f.output(make(f))
    return f


def rows(f: Fusion, width: int = 4) -> TensorView:
    x, offsets = f.input((None, width), torch.float32), f.input((None,), torch.int64)
    return ops.as_nested(x, offsets)


def two(f: Fusion) -> tuple[TensorView, TensorView]:
    return f.input((None, 3), torch.float32), f.input((None, 3), torch.float32)


PROGRAMS: dict[str, Callable[[Fusion], TensorView]] = {
    "sum": lambda f: ops.sum(rows(f), 1),
    "sum of columns": lambda f: ops.sum(rows(f), 2),
    "softmax": lambda f: ops.softmax(rows(f), 1),
    "relu": lambda f: ops.relu(rows(f)),
    "relu, wider": lambda f: ops.relu(rows(f, 5)),
    "twice": lambda f: ops.mul(rows(f), 2.0),
    "thrice": lambda f: ops.mul(rows(f), 3.0),
    "times an int": lambda f: ops.mul(rows(f), 2),
    "flat": lambda f: ops.as_flattened(ops.relu(rows(f))),
    "first minus second": lambda f: ops.sub(*two(f)),
    "second minus first": lambda f: ops.sub(*two(f)[::-1]),
    "first minus itself": lambda f: (lambda x, y: ops.sub(x, x))(*two(f)),
    "first minus second, of one size": lambda f: ops.sub(f.input((3,), torch.float32), f.input((3,), torch.float32)),
    "second minus first, of one size": lambda f: (lambda x, y: ops.sub(y, x))(*(f.input((3,), torch.float32) for _ in "xy")),
    "doubles": lambda f: f.input((3,), torch.float64),
    "floats": lambda f: f.input((3,), torch.float32),
    "mean": lambda f: ops.mean(rows(f), 1),
    "nested": lambda f: ops.sum(ops.as_nested(rows(f), f.input((None,), torch.int64)), (1, 2)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_names_and_numbers_do_not_matter(name: str) -> None:
    plain, renamed = recorded(PROGRAMS[name]), recorded(PROGRAMS[name], skip=11, name="other")
    assert str(plain) != str(renamed)
    assert plain == renamed and plain.key() == renamed.key() and hash(plain.key()) == hash(renamed.key())
    assert plain == plain.clone()


def test_different_programs_differ() -> None:
    keys = {recorded(make).key(): name for name, make in PROGRAMS.items()}
    assert sorted(keys.values()) == sorted(PROGRAMS)


def test_the_schedule_is_no_part_of_it() -> None:
    plain, scheduled = recorded(PROGRAMS["sum"]), recorded(PROGRAMS["sum"])
    scheduled.outputs[0].split(1, 8).parallelize(0, "grid")
    assert plain == scheduled


def test_outputs_and_checks_are_part_of_it() -> None:
    f, g = recorded(PROGRAMS["relu"]), recorded(PROGRAMS["relu"])
    g.output(g.outputs[0])
    assert f != g
    h = recorded(PROGRAMS["first minus second"])
    fewer = h.clone()
    fewer.checks.clear()
    assert h.checks and h != fewer


def test_a_fusion_has_no_hash_because_it_can_grow() -> None:
    f = recorded(PROGRAMS["relu"])
    with pytest.raises(TypeError, match="unhashable"):
        hash(f)
    assert f != "f"
