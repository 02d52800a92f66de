"""One class for each kind of user mistake; each also derives from the builtin exception that fits.

In: nothing. Out: exception classes and warnings. A message says what is wrong, what was passed, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SerrateError(Exception):
    """The base class of everything serrate raises on purpose."""


class StructureError(SerrateError, ValueError):
    """Invalid offsets, lengths or nesting (decreasing, negative, not ending at the number of values ...)."""


class StructureMismatch(SerrateError, ValueError):
    """Two ragged operands whose structures differ, or a component paired with another partition's ragged domain."""


class ShapeError(SerrateError, ValueError):
    """Dims, ranks or extents that do not fit together."""


class RowError(SerrateError, IndexError):
    """A row, or a position in a row, that does not exist."""


class UnknownKey(SerrateError, KeyError):
    """A key that a keyed tensor does not have."""

    __str__ = Exception.__str__  # KeyError shows the repr of its message


class IndexOutOfRange(SerrateError, IndexError):
    """An index out of range in one of torch's indexing operators."""


class RaggedSizeError(SerrateError, TypeError):
    """The size of a ragged dim used as an int."""


class DtypeError(SerrateError, TypeError):
    """A dtype that an operation does not support."""


class DeviceError(SerrateError, ValueError):
    """Tensors on different devices, or a backend that cannot run on the tensors' device."""


class DomainError(SerrateError, ValueError):
    """A domain transform that is not defined for its arguments."""


class ScheduleError(SerrateError, ValueError):
    """A schedule step that is illegal for the program it is applied to."""


class StrategyError(SerrateError, ValueError):
    """A strategy that is unknown, or that does not apply to a program."""


class InvarianceError(SerrateError, RuntimeError):
    """Under `serrate.batch_invariant()`, an operation that may compute rows together."""


class VerificationError(SerrateError, AssertionError):
    """A pass produced an illegal program: a bug in serrate, not in the user's program."""


class TraceError(SerrateError, TypeError):
    """Code in a `@serrate.jit` function that cannot be traced."""


class InPlaceError(SerrateError, RuntimeError):
    """An in-place write in a `@serrate.jit` function to a tensor that outlives the call or has aliases."""


class TraceAttributeError(TraceError, AttributeError):
    """An attribute of a ragged tensor that is not known while tracing, such as its device or its longest row."""


class GradientError(SerrateError, RuntimeError):
    """A gradient was requested from an operation that has none."""


class SyncError(SerrateError, RuntimeError):
    """A copy of lengths to the host was needed under `serrate.no_sync()`."""


class FormatError(SerrateError, ValueError):
    """Data that another library's format, a file, or serrate cannot hold."""


class CopyError(SerrateError, ValueError):
    """A bridge was called with `copy=False`, but the two formats cannot share memory."""


class CopyWarning(UserWarning):
    """A bridge copied values because the two formats cannot share memory; pass `copy=True` if that is intended."""


class PackageMissing(SerrateError, ImportError):
    """A bridge to a package that is not installed."""


class CompilerError(SerrateError, RuntimeError):
    """The system compiler rejected generated code; the message names the source file, which is kept."""


class CompilerMissing(CompilerError):
    """No system compiler was found."""


class CacheError(SerrateError, RuntimeError):
    """The cache folder is writable by other users or cannot store a program, or an archive cannot be exported or imported."""


class CacheWarning(UserWarning):
    """The cache folder cannot be used, and compiled programs are kept only until the process ends; or an entry is damaged, and is
    built again."""


class BackendError(SerrateError, ValueError):
    """A backend that is unknown or not installed."""


class CallError(SerrateError, TypeError):
    """The wrong number or kind of arguments."""


class KernelError(SerrateError, TypeError):
    """Code in a `@serrate.kernel` function that is not part of the tile language; the message shows the user's line."""


class KernelIndexError(SerrateError, IndexError):
    """A computed index out of bounds in a lane that exists, found by the checked mode of tile kernels."""


class PartitionError(SerrateError, ValueError):
    """Partitions, counts or owners that do not describe a tensor spread over ranks, or a layout that an operation refuses."""


class ExchangeError(SerrateError, RuntimeError):
    """Ranks disagree about an exchange, or another rank failed or stopped; raised on every rank that takes part."""


class SettingError(SerrateError, ValueError):
    """An invalid value of one of serrate's environment variables."""


class IgnoredWarning(UserWarning):
    """A setting that has no effect here."""


class RaceError(SerrateError, RuntimeError):
    """Two lanes store different values to one address: seen by the compiler, or found by the checked mode of kernels."""


def choices(got: object, known: Iterable[str]) -> str:
    """Suggests replacements for an unknown name: the closest one, and all known names.

    >>> choices("num_warp", ["num_stages", "num_warps"])
    "did you mean 'num_warps'? Choose from num_stages, num_warps"
    >>> choices("x", ["cpp", "reference"])
    'choose from cpp, reference'
    """
    names = list(known)
    near = difflib.get_close_matches(str(got), names, 1)
    every = ", ".join(names)
    return f"did you mean {near[0]!r}? Choose from {every}" if near else f"choose from {every}"
