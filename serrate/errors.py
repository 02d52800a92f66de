"""Every mistake a user can make has one class here; each is also the builtin exception that fits.

In: nothing. Out: exception classes and warnings. A message says what is wrong, what was got, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SerrateError(Exception):
    """The root of everything serrate raises on purpose."""


class StructureError(SerrateError, ValueError):
    """Offsets, lengths or nesting that do not describe rows (decreasing, not ending at the values, negative ...)."""


class StructureMismatch(SerrateError, ValueError):
    """Two ragged operands whose structures differ, or a component paired with another partition's ragged domain."""


class ShapeError(SerrateError, ValueError):
    """Dims, ranks or extents that do not fit together."""


class RowError(SerrateError, IndexError):
    """A row, or a position in a row, that does not exist."""


class IndexOutOfRange(SerrateError, IndexError):
    """An index given to one of torch's indexing operators that is not a position of the dim it indexes."""


class RaggedSizeError(SerrateError, TypeError):
    """The size of a ragged dim used as if it were one number."""


class DtypeError(SerrateError, TypeError):
    """A dtype an operation does not take."""


class DeviceError(SerrateError, ValueError):
    """Tensors on different devices, or a backend that cannot run on the device at hand."""


class DomainError(SerrateError, ValueError):
    """A domain transform that is not defined for its arguments."""


class ScheduleError(SerrateError, ValueError):
    """A schedule step that is illegal for the program it is applied to."""


class StrategyError(SerrateError, ValueError):
    """A strategy that is unknown, or that does not apply to a program."""


class InvarianceError(SerrateError, RuntimeError):
    """Something that is not computed for each row alone, under `serrate.batch_invariant()`."""


class VerificationError(SerrateError, AssertionError):
    """A pass left a program that is not legal after its stage: a bug in serrate, not in the user's program."""


class TraceError(SerrateError, TypeError):
    """Something inside a `@serrate.jit` function that cannot be traced."""


class InPlaceError(SerrateError, RuntimeError):
    """A write in place, inside a `@serrate.jit` function, to something that outlives it or is known under other names."""


class TraceAttributeError(TraceError, AttributeError):
    """An attribute of a ragged tensor that is not known while tracing, such as its values or its lengths."""


class GradientError(SerrateError, RuntimeError):
    """A gradient was asked of something that has none."""


class SyncError(SerrateError, RuntimeError):
    """A copy of lengths to the host was needed under `serrate.no_sync()`."""


class FormatError(SerrateError, ValueError):
    """Rows that another library's format, or a file, cannot hold; or the other way round."""


class CopyError(SerrateError, ValueError):
    """`copy=False` was asked of a bridge, and the two formats cannot share memory."""


class CopyWarning(UserWarning):
    """A bridge copied values because the two formats cannot share memory; `copy=True` says that this is meant."""


class PackageMissing(SerrateError, ImportError):
    """A bridge to a package that is not installed."""


class CompilerError(SerrateError, RuntimeError):
    """The system compiler refused generated code; the message names the kept source."""


class CompilerMissing(CompilerError):
    """No system compiler was found."""


class CacheError(SerrateError, RuntimeError):
    """The cache folder is damaged, open to other users, or cannot hold a built program."""


class CacheWarning(UserWarning):
    """The cache folder cannot be used; built programs are kept only until the process ends."""


class BackendError(SerrateError, ValueError):
    """A backend that is unknown or not installed."""


class CallError(SerrateError, TypeError):
    """A compiled program called with the wrong number or kind of arguments."""


class KernelError(SerrateError, TypeError):
    """Something in a `@serrate.kernel` function that is not part of the tile language; the message shows the user's line."""


class KernelIndexError(SerrateError, IndexError):
    """A computed index outside its tensor in a lane that exists, found by the checked mode of tile kernels."""


class SettingError(SerrateError, ValueError):
    """An environment variable of serrate's has a value that means nothing."""


class IgnoredWarning(UserWarning):
    """Something that was asked for has no effect here."""


class RaceError(SerrateError, RuntimeError):
    """Two lanes that store different values to one address: seen by the compiler, or found by the checked mode of kernels."""


def choices(got: object, known: Iterable[str]) -> str:
    """What to write instead of a name that means nothing: the nearest one, and all that there are.

    >>> choices("num_warp", ["num_stages", "num_warps"])
    "did you mean 'num_warps'? There are num_stages, num_warps"
    >>> choices("x", ["cpp", "reference"])
    'there are cpp, reference'
    """
    names = list(known)
    near = difflib.get_close_matches(str(got), names, 1)
    every = ", ".join(names)
    return f"did you mean {near[0]!r}? There are {every}" if near else f"there are {every}"
