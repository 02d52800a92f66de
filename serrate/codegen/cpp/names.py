"""Reserved names in generated C++: keywords, the prelude, and the printer's own names.

In: the text of the prelude. Out: `RESERVED`, the names that a program may not use.
"""

from __future__ import annotations

import re
from pathlib import Path

from serrate.codegen.names import Reserved

PRELUDE = (Path(__file__).parent / "prelude.h").read_text()
"""The beginning of every generated source."""

KEYWORDS = (
    "alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class compl "
    "concept const consteval constexpr constinit const_cast continue co_await co_return co_yield decltype default delete do "
    "double dynamic_cast else enum explicit export extern false float for friend goto if inline int long mutable namespace "
    "new noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast requires return "
    "short signed sizeof static static_assert static_cast struct switch template this thread_local throw true try typedef "
    "typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq main std linux unix"
)
OWN = "given pointer threads stream positions position end done count run runs parts k"
"""Variables in every generated function."""

RESERVED = Reserved(
    frozenset((*KEYWORDS.split(), *OWN.split()))
    | {
        name
        for found in re.findall(r"(\w+)[(<]|(?:struct|using|define|class) (\w+)|typedef .* (\w+);", PRELUDE)
        for name in found
        if name
    },
    re.compile(r"(v|extent)\d+(_stage)?|__\w*|_[A-Z]\w*"),
    ("_all", "_at", "_heap", "_here", "_size", "_stream"),
)
