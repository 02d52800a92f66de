"""What a user reads who made one of the mistakes that are easily made: shapes as `jt.shape` shows them, dims by number.

In: wrong calls. Out: failures where a message no longer says what is wrong, what was got, and what to do. Each is made twice:
eagerly and in a traced function.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from serrate import JaggedTensor, ir, jit, ops
from serrate.errors import CallError, DtypeError, RaggedSizeError, RowError, ShapeError, StructureMismatch, TraceError

ROWS = JaggedTensor.from_lengths(torch.randn(6, 4), [3, 1, 2])
OTHER = JaggedTensor.from_lengths(torch.randn(6, 4), [2, 2, 2])
FEWER = JaggedTensor.from_lengths(torch.randn(6, 4), [3, 3])
WIDE = JaggedTensor.from_lengths(torch.randn(6, 5), [3, 1, 2])
FLAT = JaggedTensor.from_lengths(torch.randn(6), [3, 1, 2])
WHOLE = JaggedTensor.from_lengths(torch.arange(6), [3, 1, 2])

Call = Callable[..., Any]
BOTH: list[tuple[type[Exception], str, Call, tuple[Any, ...]]] = [
    # a dim that is not there
    (
        ShapeError,
        "sum: dim 5 does not exist: a tensor of shape (3, r0, 4) has dims 0 to 2, or -3 to -1",
        lambda x: x.sum(5),
        (ROWS,),
    ),
    # three ragged dims that one dim counts
    (
        ShapeError,
        "cannot be returned: only the last two ragged dims can be counted by the same dim; reduce one of them",
        lambda x: x[:, :, None, None] * x[:, None, :, None] * x[:, None, None],
        (FLAT,),
    ),
    (ShapeError, "softmax: dim -4 does not exist: a tensor of shape (3, r0, 4)", lambda x: torch.softmax(x, -4), (ROWS,)),
    (ShapeError, "mean: dim 2 does not exist: a tensor of shape (3, r0) has dims 0 to 1", lambda x: x.mean((1, 2)), (FLAT,)),
    (
        CallError,
        "masked_fill: value must be a number or a 0-dim tensor, got shape (3, r0, 4); use torch.where",
        lambda x: x.masked_fill(x > 1, x),
        (ROWS,),
    ),
    (CallError, "sum: a dim must be an int, got 1.0 of type float", lambda x: x.sum(1.0), (ROWS,)),
    (ShapeError, "cumsum: dim 0 of (3, r0, 4) counts rows of different lengths", lambda x: x.cumsum(0), (ROWS,)),
    # rows that differ
    (
        StructureMismatch,
        "add of (B, r0, 4) and (B, r0, 4), dim 1: the rows differ: lengths [3, 1, 2] and [2, 2, 2]",
        lambda x, y: x + y,
        (ROWS, OTHER),
    ),
    (
        StructureMismatch,
        "where of (B, r0, 4), (B, r0, 4) and (B, r0, 4), dim 1: the rows differ",
        lambda x, y: torch.where(x > 0, x, y),
        (ROWS, OTHER),
    ),
    (ShapeError, "mul of (3, r0, 4) and (2, r0, 4), dim 0: the sizes differ: 3 and 2", lambda x, y: x * y, (ROWS, FEWER)),
    # sizes that differ
    (ShapeError, "add of (3, r0, 4) and (3, r0, 5), dim 2: the sizes differ: 4 and 5", lambda x, y: x + y, (ROWS, WIDE)),
    (
        ShapeError,
        "sub of (3, r0, 4) and (3,), dim 2: the sizes differ: 4 and 3; to use one value for each row, write y[:, None, None]",
        lambda x, y: x - y,
        (ROWS, torch.ones(3)),
    ),
    (ShapeError, "sub of (3, r0, 4) and (7,), dim 2: the sizes differ: 4 and 7", lambda x, y: x - y, (ROWS, torch.ones(7))),
    (
        ShapeError,
        "add of (3, r0, 4) and (6, 4): the 6 positions of (6, 4) are aligned with the ragged dim 1, but have no dim for the "
        "rows; use jt.with_values(y) for a flat [total, ...] tensor, [1, L, ...] for positions that all rows share",
        lambda x, y: x + y,
        (ROWS, torch.ones(6, 4)),
    ),
    (
        ShapeError,
        "add of (3, r0, 4) and (3, 4): dims are aligned from the last, so dim 0 of (3, 4) is aligned with the ragged dim 1; to "
        "use one value for each row, add a dim there: y[:, None]",
        lambda x, y: x + y,
        (ROWS, torch.ones(3, 4)),
    ),
    (
        ShapeError,
        "mul of (3,) and (3, r0): dims are aligned from the last, so dim 0 of (3,) is aligned with the ragged dim 1; to use "
        "one value for each row, add a dim there: y[:, None]",
        lambda x, y: y * x,
        (FLAT, torch.ones(3)),
    ),
    # arguments
    (CallError, "exp takes 1 positional argument but 2 were given; it takes input", lambda x: x.exp(3), (ROWS,)),
    (
        CallError,
        "where got an unexpected keyword argument 'foo'; it takes self, condition, other",
        lambda x: x.where(foo=1),
        (ROWS,),
    ),
    (
        CallError,
        "max: missing a required argument: 'dim'; it takes input, or input and other, or input, dim and keepdim",
        lambda x: x.max(foo=1),
        (ROWS,),
    ),
    (
        CallError,
        "softmax got an unexpected keyword argument 'foo'; it takes input, dim, dtype",
        lambda x: x.softmax(1, foo=1),
        (ROWS,),
    ),
    (
        ShapeError,
        "dim 1: the dense operand has 2 positions; the longest row has 3",
        lambda x, y: x + y,
        (ROWS, torch.ones(3, 2, 4)),
    ),
    (
        ShapeError,
        "add of (3, r0, 4) and (3, r0): dims are aligned from the last, so dim 0 of (3, r0), which counts rows, is aligned with "
        "the ragged dim 1; unsqueeze(-1) adds a last dim",
        lambda x, y: x + y,
        (ROWS, FLAT),
    ),
    (
        ShapeError,
        "linear of (3, r0, 4) and a weight (3, 5): the features of both differ: 4 and 5",
        lambda x, w: F.linear(x, w),
        (ROWS, torch.ones(3, 5)),
    ),
    # dtypes
    (
        DtypeError,
        "mean: needs a floating-point dtype, got torch.int64; convert it first, with .float()",
        lambda x: x.mean(1),
        (WHOLE,),
    ),
    (DtypeError, "where: the condition must be bool, got torch.float32", lambda x: torch.where(x, x, x), (ROWS,)),
    (
        DtypeError,
        "embedding: indices must be integers, got torch.float32; convert them first, with .long()",
        lambda x, w: F.embedding(x, w),
        (FLAT, torch.ones(4, 3)),
    ),
    (
        DtypeError,
        "matmul of (3, r0, 4) and (4, 3): dtypes must be equal, got torch.float32 and torch.float64; convert one of them",
        lambda x, w: x @ w,
        (ROWS, torch.ones(4, 3, dtype=torch.float64)),
    ),
    # products
    (
        ShapeError,
        "matmul of (3, r0, 4) and (5, 3): the sizes of the contracted dims differ: 4 and 5",
        lambda x, w: x @ w,
        (ROWS, torch.ones(5, 3)),
    ),
    (
        ShapeError,
        "matmul of (3, r0, 4) and (3, r0, 4): only one of the contracted dims, the last of the first operand and the "
        "second to last of the second, is ragged; transpose(-1, -2) swaps",
        lambda x: x @ x,
        (ROWS,),
    ),
    (CallError, "matmul: both operands must be tensors, got 3 of type int", lambda x: x @ 3, (ROWS,)),
    # attention
    (
        ShapeError,
        "attention: keys (3, 5, 4) and values (3, r0, 4) must both be ragged, or both dense: use "
        "JaggedTensor.from_padded(key, lengths)",
        lambda x, k: F.scaled_dot_product_attention(x, k, x),
        (ROWS, torch.ones(3, 5, 4)),
    ),
    (
        ShapeError,
        "attention: the numbers of sequences differ: 2 and 3",
        lambda x, q: F.scaled_dot_product_attention(q, x, x),
        (ROWS, torch.ones(2, 5, 4)),
    ),
    (
        ShapeError,
        "attention: dim 1 of query is ragged and must be the second to last: use query.permute(0, 2, 1, 3), "
        "which is (3, 2, r0, 2)",
        lambda x: F.scaled_dot_product_attention(x.unflatten(2, (2, 2)), x, x),
        (ROWS,),
    ),
    (
        ShapeError,
        "add of (3, r0, 4) and (3, 4, r0): ragged dims of one operand are aligned with regular dims of another, and the other "
        "way round; transpose one of them",
        lambda x: x + x.transpose(1, 2),
        (ROWS,),
    ),
    # something that is no operand
    (CallError, "add: an operand must be a tensor or a real number, got 'a' of type str", lambda x: x + "a", (ROWS,)),
    (CallError, "mul: an operand must be a tensor or a real number, got [1, 2] of type list", lambda x: x * [1, 2], (ROWS,)),
    (CallError, "sub: an operand must be a tensor or a real number, got None of type NoneType", lambda x: None - x, (ROWS,)),
    (CallError, "clamp: an operand must be a tensor or a real number, got 'a' of type str", lambda x: x.clamp("a"), (ROWS,)),
    # an index
    (ShapeError, "argmax: expected one dim, got (1, 2)", lambda x: x.argmax((1, 2)), (ROWS,)),
]


@pytest.mark.parametrize(("error", "message", "call", "args"), BOTH, ids=[message[:40] for _, message, _, _ in BOTH])
def test_mistakes(error: type[Exception], message: str, call: Call, args: tuple[Any, ...]) -> None:
    for run in (call, jit(call)):
        with pytest.raises(error, match=re.escape(message)) as raised:
            run(*args)
        # No names of the compiler's own.
        assert not re.search(r"\bT\d+\b|\{n\d|i\.c\d|ragged\.r", str(raised.value)), str(raised.value)


TRACED: list[tuple[type[Exception], str, Call, tuple[Any, ...]]] = [
    (
        ShapeError,
        "cat of (3, r0, 4) and (3, r0): tensors must have the same number of dims, and the same dims must be ragged",
        lambda x, y: torch.cat([x, y], 1),
        (ROWS, FLAT),
    ),
    (
        ShapeError,
        "cat of (3, r0, 4) and (3, r0, 5), dim 2, which is not joined: the sizes differ: 4 and 5",
        lambda x, y: torch.cat([x, y], 1),
        (ROWS, WIDE),
    ),
    (
        StructureMismatch,
        "cat of (B, r0, 4) and (B, r0, 4), dim 1, which is not joined: the rows differ: lengths [3, 1, 2] and [2, 2, 2]",
        lambda x, y: torch.cat([x, y], 2),
        (ROWS, OTHER),
    ),
    (ShapeError, "select: (3, r0, 4) has no position 9 in dim 2", lambda x: x[:, :, 9], (ROWS,)),
    (ShapeError, "4 indices are too many for a tensor of shape (3, r0, 4), which has 3 dims", lambda x: x[0, 0, 0, 0], (ROWS,)),
    (ShapeError, "indexed by integers, slices, None and tensors of integers, got 'a'", lambda x: x["a"], (ROWS,)),
    (
        TraceError,
        "a branch on data cannot be traced, because data is not known at trace time",
        lambda x: x if x.sum() > 0 else -x,
        (ROWS,),
    ),
    (TraceError, "item() needs the data of a traced tensor, which is not known while tracing", lambda x: x.sum().item(), (ROWS,)),
    (RaggedSizeError, "is the size of a ragged dim and differs from row to row", lambda x: x * (x.shape[1] + 1), (ROWS,)),
    (RaggedSizeError, "is the size of a ragged dim and differs from row to row", lambda x: x / int(x.size(1)), (ROWS,)),
]


@pytest.mark.parametrize(("error", "message", "call", "args"), TRACED, ids=[message[:40] for _, message, _, _ in TRACED])
def test_mistakes_in_a_traced_function(error: type[Exception], message: str, call: Call, args: tuple[Any, ...]) -> None:
    with pytest.raises(error, match=re.escape(message)):
        jit(call)(*args)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_torch_are_converted_first() -> None:
    message = "torch's nested tensors are not operands: convert with JaggedTensor.from_torch_nested(nt) first"
    for nested in (ROWS.to_torch_nested(), torch.nested.nested_tensor(list(ROWS.unbind()))):
        for call in (lambda x, y: x + y, lambda x, y: y * x, jit(lambda x, y: torch.maximum(x, y))):
            with pytest.raises(CallError, match=re.escape(message)):
                call(ROWS, nested)


def test_operations_called_outside_a_program_name_the_decorator() -> None:
    for tensor, kind in ((torch.tensor([1, 0]), "Tensor"), (WHOLE, "JaggedTensor")):
        message = (
            f"ops.group_by records a step of a program and does not run on a {kind}: call it inside a @serrate.jit function, or "
            "on the inputs of an ir.Fusion"
        )
        with pytest.raises(CallError, match=re.escape(message)):
            ops.group_by(tensor, 2)


def test_questions_about_the_dtype_have_answers() -> None:
    integers = ROWS.to(torch.int64)
    assert torch.is_floating_point(ROWS) and not torch.is_floating_point(integers) and not torch.is_complex(ROWS)


def test_unsupported_methods_are_named_as_such() -> None:
    for call in (lambda x: x.index_add(0, x, x), lambda x: x.median()):
        with pytest.raises(
            TraceError, match=r"(index_add|median)\(\) is not supported in a traced function \(.*; call it outside"
        ):
            jit(call)(torch.ones(3))


def test_rows_of_traced_tensors_are_made_by_as_nested() -> None:
    with pytest.raises(CallError, match=r"write ops\.as_nested\(values, offsets\), or construct it before the call"):
        jit(lambda values, lengths: JaggedTensor.from_lengths(values, lengths))(torch.ones(3), torch.tensor([1, 2]))


def test_results_of_a_fusion_are_tensors() -> None:
    with ir.Fusion() as f, pytest.raises(CallError, match="output: a result must be a tensor of the fusion, got 3"):
        f.output(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [None, 3, [1.0]])
def test_arguments_of_a_fusion_are_tensors(wrong: Any) -> None:
    with ir.Fusion("scale") as f:
        f.output(f.input((None, 4), torch.float32) * 2)
    with pytest.raises(CallError, match=r"argument 0 of scale must be a torch\.float32 tensor with 2 dims, got"):
        f.compile()(wrong)


def test_modules_that_ask_for_nested_tensors_are_told_what_to_use() -> None:
    message = (
        "torch's nn.MultiheadAttention and nn.Transformer layers read it and do not take ragged tensors: "
        "serrate.nn.MultiheadAttention and serrate.nn.TransformerEncoderLayer do, with the same parameters"
    )
    for module, given in ((torch.nn.MultiheadAttention(4, 2, batch_first=True), 3), (torch.nn.TransformerEncoderLayer(4, 2), 1)):
        for run in (module, jit(module)):
            with pytest.raises(AttributeError, match=re.escape(message)):
                run(*[ROWS] * given)


def test_methods_of_the_container_are_named_by_its_class() -> None:
    for call in (lambda: ROWS.half(1), lambda: ROWS.size(foo=1), lambda: ROWS.split(1, 2, 3)):
        with pytest.raises(TypeError, match=r"^JaggedTensor\.\w+\(\) "):
            call()


def test_rows_without_the_dim_that_counts_them() -> None:
    message = "a tensor of shape (r0, 4) cannot be stored: a ragged dim needs the dims that count its rows"
    with ir.Fusion() as f:
        rows = ops.as_nested(f.input((None, 4), torch.float32), f.input((None,), torch.int64))
        with pytest.raises(ShapeError, match=re.escape(message)):
            f.tensor(torch.float32, rows.domains[1:])
        with pytest.raises(ShapeError, match=re.escape("as_flattened: dim 2 of (B, r0, 4) is not ragged; flatten")):
            ops.as_flattened(rows, component_dim=1, ragged_dim=2)


def test_a_branch_on_data_names_its_line_and_the_way_out() -> None:
    def choose(x: Any) -> Any:
        return x if x.sum() > 0 else -x

    with pytest.raises(
        TraceError, match=r"test_messages\.py:\d+: return x if x\.sum\(\) > 0 else -x.*write torch\.where\("
    ) as raised:
        jit(choose)(ROWS)
    assert isinstance(raised.value, TypeError)


def test_later_calls_do_not_show_the_numbers_of_the_first() -> None:
    """A program serves any number of rows, so what it says later must not name those it was traced for."""
    add = jit(lambda x, y: x + y)
    add(ROWS, ROWS.clone())
    add(ROWS, JaggedTensor.from_lengths(torch.randn(6, 4), [3, 1, 2]))
    five, others = (JaggedTensor.from_lengths(torch.randn(6, 4), n) for n in ([2, 1, 1, 1, 1], [1, 1, 1, 1, 2]))
    with pytest.raises(StructureMismatch, match=re.escape("add of (B, r0, 4) and (B, r0, 4), dim 1: the rows differ")):
        add(five, others)


def test_operators_leave_what_they_do_not_know_to_others() -> None:
    class Other:
        def __radd__(self, other: Any) -> str:
            return "mine"

    assert ROWS + Other() == "mine"
    assert (ROWS == None) is False and (ROWS != "a") is True  # noqa: E711  as torch's tensors do
    with pytest.raises(TypeError, match="unsupported operand"):
        ROWS + object()


def test_indices_of_eager_tensors() -> None:
    with pytest.raises(RowError, match="row 7 does not exist: the tensor has 3 rows"):
        ROWS[7]
    with pytest.raises(
        StructureMismatch, match=re.escape("cat: tensor 1 must have the rows of tensor 0: its lengths are [2, 2, 2]")
    ):
        torch.cat([ROWS, OTHER], 2)
    assert isinstance(ROWS.sum(1), Tensor)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_torch_that_a_traced_function_closes_over() -> None:
    nested = ROWS.to_torch_nested()
    with pytest.raises(CallError, match="convert with JaggedTensor"):
        jit(lambda x: x + nested)(ROWS)


def test_split_in_a_traced_function_is_torchs() -> None:
    found = jit(lambda x: (*x.split([1, 3], 2), *x.split(2, dim=-1)))(ROWS)
    wanted = (*ROWS.values.split([1, 3], 1), *ROWS.values.split(2, 1))
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.values, want)
