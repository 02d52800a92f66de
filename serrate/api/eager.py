"""Eager operations: torch's functions, methods and operators on ragged tensors, each a compiled program of one operation.

In: nothing. Out: the operations, installed in `JaggedTensor` when this module is imported. Everything that `serrate.ops` can do
to a traced tensor, torch's functions do to a ragged one:

    jt * 2 + bias      torch.relu(jt)      jt.sum(dim=1)      F.layer_norm(jt, (64,))      jt += 1      torch.exp(jt, out=other)

The container's own operations (indexing, cat, split, permute ...) only move elements, and are not replaced; `conversions.py` has
compiled copies for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as functional

from serrate.api.jit import Jitted
from serrate.api.row_gradients import tables
from serrate.errors import CallError, DtypeError, GradientError, SerrateError, StructureMismatch
from serrate.frontend.capture import captured, is_tracing
from serrate.frontend.keyed import by_key, pooled, side_by_side
from serrate.frontend.ops.common import Lifted, described, python_number
from serrate.frontend.ops.random import require_probability
from serrate.frontend.torch_names import ELEMENTWISE
from serrate.ir.view import TensorView
from serrate.tensor import JaggedTensor, KeyedJaggedTensor
from serrate.tensor.base import RaggedSize
from serrate.tensor.jagged import install_operators, installed_operators
from serrate.tensor.keyed_tensor import install_methods

_BINARY = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "div": "truediv",
    "floor_divide": "floordiv",
    "remainder": "mod",
    "pow": "pow",
    "matmul": "matmul",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "bitwise_left_shift": "lshift",
    "bitwise_right_shift": "rshift",
}
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_UNARY = {"neg": "neg", "abs": "abs", "bitwise_not": "invert"}

FEW = 8
"""The most numbers that are compiled into programs of an operation. Further ones are read from memory, so that a learning-rate
schedule does not compile at every step."""
POWERS = (2, 3, 0.5, -0.5, -1, -2)
"""Exponents that are compiled in: powers that become products and roots."""


def lifted(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Makes an operation take its numbers as tensors; they still promote like numbers."""

    def run(places: tuple[int | str, ...], numbers: Sequence[TensorView], *args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for place, number in zip(places, numbers, strict=True):
            read = Lifted(number.tensor, number.fusion)
            if isinstance(place, int):
                given[place] = read
            else:
                kwargs[place] = read
        return operation(*given, **kwargs)

    run.__name__ = f"{operation.__name__}_number"
    return run


def numeric(operation: Callable[..., Any]) -> frozenset[int | str]:
    """The parameters of an operation that take operands or other real numbers, by position and by name."""
    found: set[int | str] = set()
    for k, parameter in enumerate(inspect.signature(operation).parameters.values()):
        if any(word in str(parameter.annotation) for word in ("Operand", "Number", "float")):
            found |= {parameter.name} if parameter.kind is parameter.KEYWORD_ONLY else {k, parameter.name}
    return frozenset(found)


class Eager:
    """One operation on ragged tensors, with any other arguments."""

    def __init__(self, operation: Callable[..., Any]) -> None:
        self.program = Jitted(operation, alone=True)
        self._lifted = Jitted(lifted(operation), alone=True)
        self._numeric = numeric(operation)
        self._in_code: dict[type, set[Any]] = {float: set(), int: set()}
        """The numbers that programs of this operation were compiled for."""
        self._power = operation.__name__ == "pow"
        parameters = list(inspect.signature(operation).parameters)
        self._inplace = parameters.index("inplace") if "inplace" in parameters else None

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        if self._inplace is not None:
            positional = args[self._inplace : self._inplace + 1]
            args = args[: self._inplace]
            if kwargs.pop("inplace", *positional or (False,)):
                return self.in_place(*args, **kwargs)
        if out is None:
            if is_tracing():
                # A ragged tensor that the traced function reaches: an input of the program, like any captured tensor.
                return self.program(*captured(args), **captured(kwargs))
            places = self._new_numbers(args, kwargs)
            return self.program(*args, **kwargs) if places is None else self._read(places, args, kwargs)
        return self._into(out, args, kwargs)

    def _new_numbers(self, args: Any, kwargs: dict[str, Any]) -> list[int | str] | None:
        """The positions of numbers to read from memory, because too many have been compiled in; None to compile these in.

        A number in the code costs nothing at run time, but a compilation whenever it is new.
        """
        if not self._numeric:
            return None
        new = False
        places: list[int | str] = []
        for place, number in (*enumerate(args), *kwargs.items()) if kwargs else enumerate(args):
            known = self._in_code.get(type(number))
            if known is None or place not in self._numeric or (self._power and _is_code(number)):
                continue
            if type(number) is int and not -(2**63) <= number < 2**63:
                continue  # does not fit in memory; the operation raises for it
            places.append(place)
            if number not in known:
                if len(known) < FEW:
                    known.add(number)
                else:
                    new = True
        return places if new else None

    def _read(self, places: list[int | str], args: Any, kwargs: dict[str, Any], into: Sequence[torch.Tensor] = ()) -> Any:
        """A call that reads its numbers from memory; numbers that the operation must know are compiled in."""
        device = next((arg.device for arg in (*args, *kwargs.values()) if isinstance(arg, JaggedTensor)), None)
        if device is None:
            return self.program(*args, **kwargs)
        given = {place: args[place] if isinstance(place, int) else kwargs[place] for place in places}
        # Filled on the device, so that nothing waits for a copy.
        dtypes = {float: torch.float64, int: torch.int64}
        numbers = [torch.full((), number, dtype=dtypes[type(number)], device=device) for number in given.values()]
        positional = (None if k in given else arg for k, arg in enumerate(args))
        named = {name: value for name, value in kwargs.items() if name not in given}
        try:
            every = (tuple(places), numbers, *positional)
            return self._lifted.into(into, every, named) if into else self._lifted(*every, **named)
        except (SerrateError, TypeError, OverflowError):
            # If the error is not about numbers, the next call raises it again.
            result = self.program.into(into, args, kwargs) if into else self.program(*args, **kwargs)
            self._numeric -= given.keys()
            return result

    def in_place(self, *args: Any, **kwargs: Any) -> Any:
        """Writes the result into the values of the first argument, and returns it."""
        if isinstance(args[0], TensorView):
            return self.program(*args, inplace=True, **kwargs)
        return self._into(args[0], args, kwargs)

    def _into(self, out: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not isinstance(out, JaggedTensor | torch.Tensor):
            raise CallError(f"out= takes a single tensor, got a {type(out).__name__}; for several results, copy each with copy_")
        memory = out.values if isinstance(out, JaggedTensor) else out
        if memory.requires_grad and torch.is_grad_enabled():
            raise GradientError("a tensor that requires grad cannot be written to in place: do it under torch.no_grad()")
        # Write directly into the memory if no argument overlaps it, or if every element is read only where it is written.
        straight = memory.is_contiguous() and all(self._may_share(memory, a) for a in (*args, *kwargs.values()))
        if isinstance(out, JaggedTensor):
            straight = straight and out.format == "csr" and any(_alike(out, a) for a in args)
        places = self._new_numbers(args, kwargs)
        target = [memory] if straight else []
        if places is not None:
            result = self._read(places, args, kwargs, target)
        else:
            result = self.program.into(target, args, kwargs) if target else self.program(*args, **kwargs)
        known = type(result) is type(out) is JaggedTensor and result.structure is out.structure
        if not known or result.values.shape != memory.shape:
            _check_same(out, result)
        found = result.values if isinstance(result, JaggedTensor) else result
        if found.data_ptr() == memory.data_ptr() and found.dtype == memory.dtype:
            torch.autograd.graph.increment_version(memory)
        else:
            _check_dtype(out, result)
            _copy(out, result)
        return out

    def _may_share(self, memory: torch.Tensor, arg: Any) -> bool:
        """Whether an argument may be read while a result is written into this memory."""
        tensor = arg._values if type(arg) is JaggedTensor else arg
        if not isinstance(tensor, torch.Tensor):
            return True
        if tensor is memory:
            return self.program.fn in ELEMENTWISE
        if tensor.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr():
            return True
        there = tensor.data_ptr() == memory.data_ptr() and tensor.shape == memory.shape and tensor.dtype == memory.dtype
        return there and tensor.is_contiguous() and self.program.fn in ELEMENTWISE


def _is_code(exponent: float) -> bool:
    """Whether an exponent is compiled in: powers that become products, and negative integer powers, for which torch raises."""
    return exponent in POWERS or (type(exponent) is int and exponent < 0)


def _alike(out: JaggedTensor, arg: Any) -> bool:
    """Whether an argument has the rows of `out`, and values of the same shape."""
    if not isinstance(arg, JaggedTensor) or arg.values.shape != out.values.shape or arg.structure.ahead != out.structure.ahead:
        return False
    return arg.structure is out.structure or arg.structure.same_rows(out.structure)


def _check_same(out: Any, result: Any) -> None:
    if not isinstance(result, JaggedTensor | torch.Tensor):
        raise CallError(f"out= takes a single tensor, but there are {len(result)} results; copy each with copy_")
    if isinstance(result, JaggedTensor) != isinstance(out, JaggedTensor):
        raise CallError(f"out= is a {type(out).__name__}, but the result is a {type(result).__name__}")
    if isinstance(result, JaggedTensor) and not result.structure.same_rows(out.structure.back_to_back()):
        raise StructureMismatch(f"the result has the rows {result.structure}, out= has {out.structure}")
    if tuple(map(str, result.shape)) != tuple(map(str, out.shape)):
        raise StructureMismatch(f"the result has shape {tuple(result.shape)}, out= has {tuple(out.shape)}")


def _check_dtype(out: Any, result: Any) -> None:
    if not torch.can_cast(result.dtype, out.dtype):
        raise DtypeError(f"the result is {result.dtype}, which values of {out.dtype} cannot hold: convert one of them first")


def _copy(out: Any, result: Any) -> None:
    if isinstance(out, JaggedTensor):
        out[...] = result.to(out.dtype)
    else:
        out.copy_(result)


_NO_OPERANDS = (str, bytes, list, tuple, dict, set, complex)
"""Builtin types that are never operands; other classes may implement the operator themselves."""


def _method(program: Callable[..., Any], name: str, swapped: bool = False) -> Callable[..., Any]:
    def method(self: JaggedTensor, *args: Any, **kwargs: Any) -> Any:
        return program(*args, self) if swapped else program(self, *args, **kwargs)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"As `torch.{name.strip('_')}`, row by row; a compiled program."
    return method


def _operator(program: Callable[..., Any], name: str, swapped: bool = False) -> Callable[..., Any]:
    """A Python operator; operands of unknown classes get a chance to implement it."""

    plain = name.strip("_")
    plain = next((own for own, python in _BINARY.items() if plain in (python, f"r{python}", f"i{python}")), plain)

    def method(self: JaggedTensor, other: Any) -> Any:
        if type(other).__module__ == "numpy":
            other = python_number(other)
            if getattr(other, "ndim", None):
                raise CallError(f"{plain}: an operand must be a tensor or a real number, got {described(other)}")
        if not isinstance(other, JaggedTensor | torch.Tensor | float | int | TensorView):
            if plain not in ("eq", "ne") and (other is None or isinstance(other, _NO_OPERANDS)):
                given = f"{other!r} of type {type(other).__name__}"
                raise CallError(f"{plain}: an operand must be a tensor or a real number, got {given}")
            return NotImplemented
        return program(other, self) if swapped else program(self, other)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"As torch's `{name}`, row by row; a compiled program."
    return method


# --- random numbers ------------------------------------------------------------------------------------------------------


def _drops(program: Eager, name: str, training: str, usual: bool) -> Callable[..., Any]:
    """A dropout that returns its input if nothing is dropped; `training` is the name of torch's third argument, and `usual` its
    default."""

    def dropout(input: JaggedTensor, p: float = 0.5, *args: Any, **kwargs: Any) -> Any:
        require_probability(name, p)
        on = args[0] if args else kwargs.get(training, usual)
        return program(input, p, *args, **kwargs) if on and p > 0 else input

    return dropout


def _draws(program: Eager) -> Callable[..., Any]:
    """A function that uses only the shape of its input, so the input may require grad."""

    def like(input: JaggedTensor, *args: Any, requires_grad: bool = False, **kwargs: Any) -> Any:
        made = program(input.detach() if input.requires_grad else input, *args, **kwargs)
        return made.requires_grad_() if requires_grad else made

    return like


def _install_random(eager: Callable[..., Eager]) -> None:
    table = TensorView.operators
    for owner, training in ((functional, "training"), (torch, "train")):
        for name, usual in (("dropout", True), ("alpha_dropout", False)):
            function = getattr(owner, name)
            install_operators({function: _drops(eager(table[function]), name, training, usual)})
    install_operators({f: _draws(eager(table[f])) for f in (torch.rand_like, torch.randn_like, torch.randint_like)})


# --- split and chunk -----------------------------------------------------------------------------------------------------


def _install_pieces(eager: Callable[..., Eager]) -> None:
    """`split` and `chunk` along a ragged dim, which split every row; along other dims the container returns views."""
    table = TensorView.operators
    views = {name: getattr(JaggedTensor, name) for name in ("split", "chunk")}

    def split(self: JaggedTensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[Any, ...]:
        if isinstance(self.shape[dim], int):
            pieces: tuple[Any, ...] = views["split"](self, sizes, dim)
            return pieces
        if isinstance(sizes, int):
            sizes = [sizes] * max(1, -(-self.max_length // sizes))
        return tuple(eager(table["split"])(self, tuple(sizes), dim))

    def chunk(self: JaggedTensor, chunks: int, dim: int = 0) -> tuple[Any, ...]:
        ragged = not isinstance(self.shape[dim], int)
        return tuple(eager(table["chunk"])(self, chunks, dim) if ragged else views["chunk"](self, chunks, dim))

    for name, method in (("split", split), ("chunk", chunk)):
        method.__qualname__, method.__doc__ = f"JaggedTensor.{name}", views[name].__doc__
        setattr(JaggedTensor, name, method)


def _new(name: str) -> Callable[..., torch.Tensor]:
    made = getattr(torch.Tensor, name)

    def method(self: JaggedTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # A size of a ragged dim raises here, and says why; torch's message would not.
        found: torch.Tensor = made(self._values, *map(_numbers, args), **{key: _numbers(each) for key, each in kwargs.items()})
        return found

    method.__name__, method.__qualname__ = name, f"JaggedTensor.{name}"
    method.__doc__ = f"As `torch.Tensor.{name}`: a dense tensor with the dtype and on the device of the values."
    return method


def _numbers(size: Any) -> Any:
    if isinstance(size, tuple | list):
        return type(size)(map(_numbers, size))
    return int(size) if isinstance(size, RaggedSize) else size


def install() -> None:
    """Installs every operation of traced tensors in `JaggedTensor`, under torch's names."""
    by_operation: dict[Any, Eager] = {}

    def eager(operation: Callable[..., Any]) -> Eager:
        if operation not in by_operation:
            by_operation[operation] = Eager(operation)
        return by_operation[operation]

    table = TensorView.operators
    _install_random(eager)
    _install_pieces(eager)
    for name in ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"):
        setattr(JaggedTensor, name, _new(name))
    for name in ("movedim", "moveaxis"):
        # A view, like permute.
        setattr(JaggedTensor, name, _method(getattr(torch, name), name))
    lookups = (functional.embedding, functional.embedding_bag)
    install_operators(dict(zip(lookups, tables(*(eager(table[f]) for f in lookups)), strict=True)))
    taken = installed_operators()
    install_operators({f: eager(op) for f, op in table.items() if not isinstance(f, str) and f not in taken})
    for name, operation in table.items():
        if isinstance(name, str) and callable(getattr(torch.Tensor, name, None)) and not hasattr(JaggedTensor, name):
            setattr(JaggedTensor, name, _method(eager(operation), name))
    for name in (n for n in table if isinstance(n, str) and table[n] in ELEMENTWISE and hasattr(torch.Tensor, f"{n}_")):
        setattr(JaggedTensor, f"{name}_", _method(eager(table[name]).in_place, f"{name}_"))
    for name, python in _BINARY.items():
        program = eager(table[name])
        setattr(JaggedTensor, f"__{python}__", _operator(program, f"__{python}__"))
        setattr(JaggedTensor, f"__r{python}__", _operator(program, f"__r{python}__", swapped=True))
        if table[name] in ELEMENTWISE:
            setattr(JaggedTensor, f"__i{python}__", _operator(program.in_place, f"__i{python}__"))
    for name in _COMPARISONS:
        setattr(JaggedTensor, f"__{name}__", _operator(eager(table[name]), f"__{name}__"))
    for name, python in _UNARY.items():
        setattr(JaggedTensor, f"__{python}__", _method(eager(table[name]), f"__{python}__"))
    # `==` returns a tensor, as in torch, so hashing stays by identity.
    JaggedTensor.__hash__ = object.__hash__  # type: ignore[method-assign]


install()


_pooling = Jitted(pooled, alone=True)


def _embedding_bag(keyed: KeyedJaggedTensor, tables: Any, *, mode: Any, padding_idx: int | None, concat: bool) -> Any:
    found = _pooling(keyed, by_key(tables), mode, padding_idx)
    return side_by_side(keyed, found) if concat else found


install_methods(embedding_bag=_embedding_bag)
