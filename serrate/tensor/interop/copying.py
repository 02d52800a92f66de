"""Whether a bridge shares the values or copies them, and how it says so.

In: the `copy=` argument of a bridge. Out: the values or a copy of them; a CopyError or a CopyWarning where sharing is impossible.
`copy=` speaks of values. Offsets are shared where both sides keep them in the same form, and made anew without a word where not.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass

from torch import Tensor

from serrate.errors import CopyError, CopyWarning, GradientError
from serrate.tensor.sync import host_copy


@dataclass(frozen=True)
class Copying:
    """What the caller of a bridge wants: `None` shares where it can and warns where it cannot, `True` copies, `False` shares.

    >>> Copying("to_arrow", copy=False).forced("arrow packs bools into bits")
    Traceback (most recent call last):
    serrate.errors.CopyError: to_arrow: copy=False, but arrow packs bools into bits: allow the copy with copy=True
    """

    bridge: str
    copy: bool | None

    def forced(self, reason: str) -> None:
        """Says that the values are about to be copied, and why."""
        if self.copy is False:
            raise CopyError(f"{self.bridge}: copy=False, but {reason}: allow the copy with copy=True")
        if self.copy is None:
            text = f"{self.bridge} copied the values: {reason} (copy=True silences this)"
            warnings.warn(text, CopyWarning, stacklevel=_users_level())

    def kept(self, values: Tensor) -> Tensor:
        """Values that both sides can share: themselves, or a copy if that was asked for.

        >>> import torch
        >>> values = torch.zeros(2)
        >>> Copying("from_numpy", copy=None).kept(values) is values
        True
        """
        return values.clone() if self.copy else values

    def on_cpu(self, values: Tensor, peer: str) -> Tensor:
        """Values without a gradient on the CPU, as libraries that know neither gradients nor devices want them.

        >>> import torch
        >>> Copying("to_numpy", copy=None).on_cpu(torch.zeros(2, requires_grad=True), "numpy")
        Traceback (most recent call last):
        serrate.errors.GradientError: to_numpy: numpy keeps no gradients, and the values require them: call jt.detach() first
        """
        if values.requires_grad:
            raise GradientError(f"{self.bridge}: {peer} keeps no gradients, and the values require them: call jt.detach() first")
        if values.is_cpu:
            return values
        self.forced(f"the values are on {values.device}")
        return host_copy(values, self.bridge)


def _users_level() -> int:
    """How many calls lie between `warnings.warn` above and the user's line, which is the one to show."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "serrate":
        frame, level = frame.f_back, level + 1
    return level
