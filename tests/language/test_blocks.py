"""Block sizes: which entry of a configuration each loop takes, and blocks that are too large for a stack.

In: kernels with block sizes by configuration, registered ones, and values of many lanes. Out: a failure where a loop has another
block size than the interpreter gives it, or where a block does not fit the memory it is put in.
"""

from __future__ import annotations

import threading

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import Config, JaggedTensor, Kernel
from serrate.errors import CallError, KernelError

# --- which entry of a configuration ----------------------------------------------------------------------------------------


@serrate.kernel
def registered() -> torch.Tensor:
    out = torch.zeros(4)
    first = hl.register_block_size(32)
    second = hl.register_block_size(32)
    for i in hl.tile(32, block_size=first):
        for j in hl.tile(32, block_size=second):
            out[0] = first
            out[1] = second
            out[2] = i.block_size
            out[3] = j.block_size
    return out


@serrate.kernel
def in_a_list() -> torch.Tensor:
    out = torch.zeros(2)
    sizes = [hl.register_block_size(32) for _ in range(2)]
    for i in hl.tile(32, block_size=sizes[0]):
        for j in hl.tile(32, block_size=sizes[1]):
            out[0] = i.block_size
            out[1] = j.block_size
    return out


@serrate.kernel
def before_and_inside() -> torch.Tensor:
    out = torch.zeros(4)
    first = hl.register_block_size(32)
    for i in hl.tile(32):
        third = hl.register_block_size(32)
        for _j in hl.tile(32, block_size=third):
            for k in hl.tile(32):
                out[0] = first
                out[1] = i.block_size
                out[2] = third
                out[3] = k.block_size
    return out


@serrate.kernel
def several_loops() -> torch.Tensor:
    out = torch.zeros(5)
    for i in hl.tile(32):
        out[0] = i.block_size
    for i, j in hl.tile([32, 32]):
        out[1] = i.block_size
        out[2] = j.block_size
    last = hl.register_block_size(32)
    for i in hl.tile(32, block_size=last):
        out[3] = i.block_size
    for i in hl.tile(32):
        out[4] = i.block_size
    return out


@serrate.kernel
def repeated() -> torch.Tensor:
    out = torch.zeros(3)
    for n in range(2):
        for i in hl.tile(32):
            out[n] = i.block_size
    for i in hl.tile(32):
        out[2] = i.block_size
    return out


@pytest.mark.parametrize(
    ("kernel", "wanted"),
    [
        (registered, [4, 8, 4, 8]),
        (in_a_list, [4, 8]),
        (before_and_inside, [4, 8, 2, 16]),
        (several_loops, [4, 8, 2, 16, 32]),
        (repeated, [4, 4, 8]),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_block_sizes_of_a_configuration_are_taken_in_the_order_in_which_they_are_asked_for(
    kernel: Kernel, wanted: list[int]
) -> None:
    taken = [4, 8, 2, 16, 32][: len({*wanted})]
    made = Kernel(kernel.fn, Config(block_sizes=taken))
    for _ in range(2):
        assert made().tolist() == wanted
    assert made.interpreted()().tolist() == wanted
    assert len(made.on("cpp").variants()) == len(made.explain().stages)
    surplus = Kernel(kernel.fn, Config(block_sizes=[*taken, None]))
    for _ in range(2):
        with pytest.raises(CallError, match=f"block_sizes: .* leaves {len(taken)} open, got {len(taken) + 1}"):
            surplus()


def test_lanes_of_axes_that_a_kernel_does_not_have() -> None:
    """Of a kernel with several device loops, each may have some of them."""

    @serrate.kernel
    def two(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(2)
        for rows in hl.tile(x.size(0)):
            hl.atomic_add(out, [0], x[rows].sum())
        for columns in hl.tile(y.size(0)):
            hl.atomic_add(out, [1], y[columns].sum())
        return out

    given = torch.arange(5.0), torch.arange(7.0)
    for lanes in ({}, {"rows": 2}, {"columns": 3, "rows": 1}, {"chunk": 4}):
        assert serrate.kernel(two.fn, lanes=lanes)(*given).tolist() == [10, 21], lanes
    for _ in range(2):
        with pytest.raises(
            CallError, match=r"lanes: two has no axis 'colums': did you mean 'columns'\? Choose from chunk, columns, rows"
        ):
            serrate.kernel(two.fn, lanes={"rows": 2, "colums": 3})(*given)
    for lanes in ({"rows": 0}, {"rows": 2.0}, 4):
        with pytest.raises(CallError, match="lanes must map axis names to positive ints"):
            Config(lanes=lanes)


# --- large blocks ------------------------------------------------------------------------------------------------------------


@serrate.kernel
def wide(x: torch.Tensor, n: int) -> torch.Tensor:
    out = torch.zeros(x.size(0), n, dtype=x.dtype)
    for t in hl.tile(x.size(0)):
        acc = hl.zeros([t, n])
        for j in hl.tile(x.size(1)):
            acc = acc + x[t, j].to(torch.float32).sum(1)[:, None]
        out[t, :] = acc.to(x.dtype)
    return out


@serrate.kernel
def row_sums(jt: JaggedTensor) -> torch.Tensor:
    out = torch.empty(jt.num_rows, 8)
    for b in hl.tile(jt.num_rows):
        total = hl.zeros([b, 8])
        for k in hl.tile(jt.max_length):
            total = total + jt[b, k, :].sum(1)
        out[b, :] = total
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 50_000, 3_000_000])
def test_values_that_are_too_large_for_a_stack(n: int, dtype: torch.dtype) -> None:
    x = torch.arange(6).view(3, 2).to(dtype)
    assert torch.equal(wide(x, n), x.sum(1, keepdim=True).expand(3, n))


@pytest.mark.parametrize("strategy", ["maskless", "masked"])
def test_tiles_that_are_too_large_for_a_stack(strategy: str) -> None:
    lengths = [n % 3 for n in range(40_000)]
    jt = JaggedTensor.from_lengths(torch.randint(-9, 9, (sum(lengths), 8)).float(), lengths)
    wanted = torch.zeros(40_000, 8).index_add(0, torch.repeat_interleave(jt.lengths), jt.values)
    kernel = Kernel(row_sums.fn, Config(block_sizes=[32768, 2], strategy=strategy))
    for _ in range(2):
        assert torch.equal(kernel(jt), wanted)


def test_large_blocks_in_a_thread_with_a_small_stack() -> None:
    size = threading.stack_size(1 << 20)
    found: list[torch.Tensor] = []
    try:
        thread = threading.Thread(target=lambda: found.append(wide(torch.ones(2, 2), 400_000)))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(size)
    assert torch.equal(found[0], torch.full((2, 400_000), 2.0))


def test_blocks_that_no_thread_has_memory_for_are_refused() -> None:
    jt = JaggedTensor.from_lengths(torch.randn(3, 8), [1, 2])
    with pytest.raises(KernelError, match=r"MiB per thread, and the limit is 256 MiB: total alone has 1099511627776 x 8 lanes"):
        Kernel(row_sums.fn, Config(block_sizes=[1 << 40, 1]))(jt)
