"""One softmax, three strategies: the same program and the same results from three loop nests.

Run as `python examples/ragged_softmax.py`; add `--source` to read the generated code.
"""

import sys

import torch

from serrate import ir, ops


def main() -> None:
    with ir.Fusion("ragged_softmax") as f:
        x, offsets = f.input((None, 16), torch.float32), f.input((None,), torch.int64)
        f.output(ops.softmax(ops.as_nested(x, offsets), dim=1))
    lengths = torch.tensor([5, 0, 300, 1, 40])
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    values = torch.randn(int(bounds[-1]), 16)
    wanted = torch.cat([torch.softmax(row, 0) for row in values.split(lengths.tolist())])
    for strategy in ("maskless", "masked", "persistent_dynamic"):
        compiled = f.compile(strategy=strategy)
        torch.testing.assert_close(compiled(values, bounds).values, wanted)
        print(f"{strategy}: {len(compiled.plan(values, bounds).steps)} steps, correct on all {len(lengths)} rows")
        if "--source" in sys.argv:
            print(compiled.source(values, bounds))


if __name__ == "__main__":
    main()
