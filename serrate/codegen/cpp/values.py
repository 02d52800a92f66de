"""Values in C++: one scalar expression per value node; shared nodes are computed once.

In: value nodes, and the text of loads and private blocks. Out: C++ text. 16-bit floats are float32 here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from serrate.codegen.expressions import OPERATORS, Spelling, unwrapped, written
from serrate.errors import DtypeError, VerificationError
from serrate.ir.expr import Element, Expr
from serrate.ir.loops import Existing, Held, Load, Number
from serrate.ir.values import LIBRARY_BINARY, LIBRARY_UNARY, Call, Constant, Value, carried_dtype

CTYPES: dict[torch.dtype, str] = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "bool",
}

_PLAIN = {
    **OPERATORS,
    "logical_and": "({0} && {1})",
    "logical_or": "({0} || {1})",
    "logical_not": "(!{0})",
    "reciprocal": "(1 / {0})",
    "rsqrt": "(1 / fn_sqrt({0}))",
    "where": "({0} ? {1} : {2})",
    "maximum": "max_nan({0}, {1})",
    "minimum": "min_nan({0}, {1})",
}
_CALLED = "exp log sqrt sigmoid tanh relu silu gelu erf floor ceil abs sin cos"
FUNCTIONS: dict[str, str] = {
    **_PLAIN,
    **{n: f"fn_{n}({{0}})" for n in (*_CALLED.split(), *LIBRARY_UNARY)},
    **{n: f"fn_{n}({{0}}, {{1}})" for n in ("pow", "shl", "shr", "gcd", *LIBRARY_BINARY)},
    "exp_diff": "fn_exp_diff({0}, {1})",
    "exp_below": "fn_exp_below({0}, {1})",
    **{n: f"fn_{n}({{0}}, {{1}})" for n in ("exp_near", "exp_rough", "height", "too_high")},
    "fmod": "fn_fmod({0}, {1})",
    "bitand": "({0} & {1})",
    "bitor": "({0} | {1})",
    "bitxor": "({0} ^ {1})",
    "floordiv": "whole_div({0}, {1})",
    "rem": "whole_rem({0}, {1})",
    "random_bits": "random_bits({0}, {1}, {2})",
}
WRAPPING = frozenset(("add", "sub", "mul", "neg", "square"))
"""Integer operations whose overflow wraps in torch; computed unsigned in C++, where wrapping is defined."""


def ctype(dtype: torch.dtype) -> str:
    """The C++ type a dtype is stored as."""
    if dtype not in CTYPES:
        raise DtypeError(f"programs do not compute with {dtype} on a CPU: convert it, to one of {', '.join(map(str, CTYPES))}")
    return CTYPES[dtype]


def computed(dtype: torch.dtype) -> str:
    """The C++ type a dtype is computed in."""
    return CTYPES[carried_dtype(dtype)]


def number(value: float | int | bool, dtype: torch.dtype) -> str:
    """A literal of the type that `dtype` is computed in."""
    kind = computed(dtype)
    if dtype.is_floating_point:
        suffix = "f" if kind == "f32" else ""
        if math.isnan(value):
            return f'__builtin_nan{suffix}("")'
        if math.isinf(value):
            return f"{'-' if value < 0 else ''}__builtin_inf{suffix}()"
        rounded = torch.tensor(float(value), dtype=carried_dtype(dtype), device="cpu").item()
        text = repr(rounded)
        return text + suffix if math.isfinite(rounded) else number(rounded, dtype)
    if dtype == torch.bool:
        return "true" if value else "false"
    if value == -(2**63):
        return "(-9223372036854775807LL - 1)"
    return f"({kind}){int(value)}{'LL' if kind == 'i64' else ''}"


def index_text(expr: Expr, arrays: dict[object, str]) -> str:
    """An index expression in C++."""
    spelling = Spelling(
        helper="",
        divide="/",
        minimum="smaller<i64>",
        maximum="larger<i64>",
        symbol=lambda s: s.name,
        element=lambda e, go: _element(f"(i64){arrays[e.array]}[{unwrapped(go(e.index))}]", e, go),
        search=lambda e, go: f"owner({_row(arrays[e.array], e.first, go)}, {go(e.count)}, {go(e.position)})",
    )
    return unwrapped(written(expr, spelling))


def _element(text: str, e: Element, go: Callable[[Expr], str]) -> str:
    return text if e.most is None else f"clamped({text}, {unwrapped(go(e.most))})"


def _row(array: str, first: Expr, go: Callable[[Expr], str]) -> str:
    """The start of the searched row of offsets."""
    return array if first.value == 0 else f"{array} + {go(first)}"


class Scalars:
    """Turns value nodes into C++ expressions; shared nodes get a name in `lines`."""

    def __init__(
        self,
        load: Callable[[Load], str],
        held: Callable[[Held], str],
        existing: Callable[[Existing], str],
        index: Callable[[Expr], str],
        fresh: Callable[[], str],
        ready: Mapping[Value, str],
    ) -> None:
        self._load, self._held, self._existing, self._index, self._fresh = load, held, existing, index, fresh
        self._ready = ready
        """Values computed before the loop, with their names."""
        self.lines: list[str] = []
        self._names: dict[int, str] = {}
        self._kept: list[Value] = []

    def text(self, value: Value) -> str:
        """The value as an expression; every call becomes a named constant, so that the code reads line by line."""
        if value in self._ready:
            return self._ready[value]
        if id(value) in self._names:
            return self._names[id(value)]
        text = self._build(value)
        if isinstance(value, Call | Load):
            name = self._fresh()
            self.lines.append(f"const {computed(value.dtype)} {name} = {text};")
            text = name
        self._names[id(value)] = text
        self._kept.append(value)
        return text

    def known(self, value: Value) -> bool:
        """Whether the value has already been computed."""
        return id(value) in self._names

    def forget(self, value: Value) -> None:
        """Invalidates everything computed from `value` (a private block that changed)."""
        self._names = {k: v for k, v in self._names.items() if k not in {id(x) for x in self._kept if value in set(x.walk())}}

    def _build(self, value: Value) -> str:
        if isinstance(value, Constant):
            return number(value.number, value.dtype)
        if isinstance(value, Load):
            return self._load(value)
        if isinstance(value, Held):
            return self._held(value)
        if isinstance(value, Existing):
            return f"({computed(value.dtype)}){self._existing(value)}"
        if isinstance(value, Number):
            return f"({computed(value.dtype)})({self._index(value.expr)})"
        assert isinstance(value, Call), value
        return self._call(value)

    def _call(self, value: Call) -> str:
        kind = computed(value.dtype)
        args = [self.text(a) for a in value.args]
        if value.function == "cast":
            return self._cast(value, args[0])
        if value.function not in FUNCTIONS:
            raise VerificationError(f"the cpp backend has no function {value.function!r}")
        integers = not value.dtype.is_floating_point and value.dtype != torch.bool
        if integers and value.function in WRAPPING:
            args = [f"(unsigned long long){a}" for a in args]
        text = FUNCTIONS[value.function].format(*args)
        if value.function in ("div", "where", "pow", "floordiv", "rem") or (integers and value.function in WRAPPING):
            return f"({kind}){text}"
        return text

    def _cast(self, value: Call, arg: str) -> str:
        source = value.args[0].dtype
        if value.dtype == torch.bool:
            return f"({arg} != 0)"
        if value.dtype in (torch.bfloat16, torch.float16):
            return f"round_{ctype(value.dtype)}((f32){arg})"
        if source.is_floating_point and not value.dtype.is_floating_point and value.dtype != torch.int32:
            return f"({computed(value.dtype)})(i64){arg}"
        return f"({computed(value.dtype)}){arg}"
