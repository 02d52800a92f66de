"""torch's result dtypes, found by calling torch itself on one-element tensors.

In: a torch function and the arguments of a traced call. Out: the dtype of each result, or `DtypeError` for operands that torch
rejects too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from serrate.errors import DtypeError
from serrate.frontend.ops.common import fits, stand_in
from serrate.ir.view import Size, TensorView

Dtypes = torch.dtype | tuple[torch.dtype, ...]


def dtypes_of(name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Dtypes | None:
    """The result dtypes of `function` for arguments of these dtypes; None if it cannot tell.

    >>> dtypes_of("mean", torch.mean, (torch.ones(2).half(),), {})
    torch.float16
    """
    given, named = [_stand_in(arg) for arg in args], {key: _stand_in(arg) for key, arg in kwargs.items()}
    try:
        found = function(*given, **named)
    except (RuntimeError, OverflowError) as error:
        if str(error) == "ZeroDivisionError" or not any(_succeeds(function, given, named, kept) for kept in ((), (torch.bool,))):
            return None  # scalars, dims or options, for which the operation has its own message
        dtypes = ", ".join(str(arg.dtype) for arg in (*args, *kwargs.values()) if isinstance(arg, TensorView))
        raise DtypeError(f"{name}: {dtypes} is not supported, as in torch: {error}; convert it first") from None
    except (TypeError, IndexError, ValueError):
        return None
    if isinstance(found, torch.Tensor):
        return found.dtype
    return tuple(part.dtype for part in found)


def _stand_in(arg: Any) -> Any:
    large = isinstance(arg, int) and not fits(arg, torch.int64)
    return stand_in(arg) if isinstance(arg, TensorView | Size) or large else arg


def _succeeds(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], kept: tuple[torch.dtype, ...]
) -> bool:
    """Whether torch accepts the same arguments in float32, leaving tensors of the dtypes `kept` unchanged."""

    def floating(arg: Any) -> Any:
        return arg.float() if isinstance(arg, torch.Tensor) and arg.dtype not in kept else arg

    try:
        function(*map(floating, args), **{key: floating(arg) for key, arg in kwargs.items()})
    except Exception:  # any other error is not about dtypes
        return False
    return True
