"""Bytecode: what a function's code can read besides its own variables.

In: a code object. Out: chains of attributes and items that begin at a name from outside (`config.scale`, `weights["a"][0]`), and
the names of attributes read from any other object. Every read in the code is one of the two, so that together

chains                           exactly what is read through outside names
names x reachable objects        a superset of everything else that is read

bound what a run of the code depends on. A chain ends where its value is used other than by an attribute or an item with a
constant key.
"""

from __future__ import annotations

import dis
import functools
import types
from dataclasses import dataclass
from typing import Any

Step = tuple[str, Any]
"""("attribute", name) or ("item", key)."""

GLOBALS = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"))
CELLS = frozenset(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"))
ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
CONSTANTS = frozenset(("LOAD_CONST", "LOAD_SMALL_INT"))
SILENT = frozenset(("PUSH_NULL", "PRECALL", "KW_NAMES", "NOP", "EXTENDED_ARG", "CACHE", "RESUME", "COPY_FREE_VARS", "MAKE_CELL"))
"""Instructions that compute nothing."""
BY_NAME = frozenset(("getattr", "hasattr"))
BY_ANY_NAME = frozenset(("vars", "dir", "attrgetter", "methodcaller", "__dict__", "__getattribute__", "getmembers"))
ASKING = frozenset(("type", "isinstance"))
"""Builtins that tell the class of an object."""
UNKNOWABLE = frozenset(("eval", "exec", "globals"))


@dataclass(frozen=True)
class Chain:
    """Reads that begin at a name: `root` is "global", "cell" or "module"; a module's name may be relative."""

    root: str
    name: str
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Reads:
    """The reads of some code. `every`: some attribute names are computed, so any attribute may be read."""

    chains: tuple[Chain, ...]
    names: frozenset[str]
    every: bool = False
    stores: frozenset[str] = frozenset()
    """Attributes, global names and items (as "[]") that are written."""
    asks: frozenset[str] = frozenset()
    """Builtins that tell the class of an object. A plain call of `isinstance` does not count."""


@functools.lru_cache(maxsize=4096)
def reads_of(code: types.CodeType) -> Reads:
    """The reads from outside of some code and of the functions defined in it.

    >>> reads = reads_of((lambda x: config.scale * x.sum(1) + weights["a"][i]).__code__)
    >>> [(chain.name, *(key for _, key in chain.steps)) for chain in reads.chains]
    [('config', 'scale'), ('weights', 'a'), ('i',)]
    >>> sorted(reads.names)
    ['sum']
    """
    found = _CodeReader(code)
    chains, names, stores, every = dict.fromkeys(found.chains), set(found.names), set(found.stores), found.every
    asks = set(found.asks)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            reads = reads_of(inner)
            names |= reads.names
            stores |= reads.stores
            asks |= reads.asks
            every |= reads.every
            for chain in reads.chains:
                if chain.root == "cell" and chain.name not in code.co_freevars:
                    # A local variable of this code: it may be anything.
                    names.update(key for kind, key in chain.steps if kind == "attribute")
                else:
                    chains[chain] = None
    return Reads(tuple(chains), frozenset(names), every, frozenset(stores), frozenset(asks))


class _CodeReader:
    """One pass over the instructions of one code object."""

    def __init__(self, code: types.CodeType) -> None:
        self.chains: list[Chain] = []
        self.names: set[str] = set()
        self.stores: set[str] = set()
        self.asks: set[str] = set()
        self.every = False
        self._code = code
        self._all = [i for i in dis.get_instructions(code) if i.opname not in SILENT]
        at, imported = 0, ""
        while at < len(self._all):
            instruction = self._all[at]
            operation, name = instruction.opname, instruction.argval
            at += 1
            if operation in GLOBALS:
                self._special(name, at)
                # The lowest bit of the argument: the name is read in order to be called.
                called = operation == "LOAD_GLOBAL" and (instruction.arg or 0) & 1
                if name in ASKING and not (called and name == "isinstance"):
                    self.asks.add(name)
                at = self._chain("global", name, at)
            elif operation in CELLS and name in code.co_freevars:
                at = self._chain("cell", name, at)
            elif operation == "IMPORT_NAME":
                # Preceded by the relative level and the imported names.
                imported = "." * (self._all[at - 3].argval or 0) + name
                if at == len(self._all) or self._all[at].opname != "IMPORT_FROM":
                    at = self._chain("module", imported.partition(".")[0] or imported, at)
            elif operation == "IMPORT_FROM":
                self.chains.append(Chain("module", imported, (("attribute", name),)))
            elif operation in ATTRIBUTES or operation == "LOAD_SUPER_ATTR":
                self._attribute(name)
            elif operation in ("STORE_ATTR", "STORE_GLOBAL") or (operation == "STORE_DEREF" and name in code.co_freevars):
                self.stores.add(name)
            elif operation == "STORE_SUBSCR":
                self.stores.add("[]")
            elif operation == "MATCH_CLASS":
                constants = [c for c in code.co_consts if isinstance(c, tuple)]
                self.names.update(name for names in constants for name in names if isinstance(name, str))
                self.names.add("__match_args__")

    def _attribute(self, name: str) -> None:
        self.names.add(name)
        self.every |= name in BY_ANY_NAME

    def _chain(self, root: str, name: str, at: int) -> int:
        """Follows a chain from a name; returns the position of the first instruction after it."""
        steps: list[Step] = []
        # At a jump target, something else may be on the stack.
        while at < len(self._all) and not self._all[at].is_jump_target:
            instruction = self._all[at]
            if instruction.opname in ATTRIBUTES:
                self.every |= instruction.argval in BY_ANY_NAME
                steps.append(("attribute", instruction.argval))
                at += 1
            elif instruction.opname in CONSTANTS and self._is_item(at + 1):
                steps.append(("item", instruction.argval))
                at += 2
            else:
                break
        self.chains.append(Chain(root, name, tuple(steps)))
        return at

    def _is_item(self, at: int) -> bool:
        if at >= len(self._all) or self._all[at].is_jump_target:
            return False
        instruction = self._all[at]
        return instruction.opname == "BINARY_SUBSCR" or (instruction.opname == "BINARY_OP" and instruction.argrepr == "[]")

    def _special(self, name: str, at: int) -> None:
        """Handles functions that read attributes by name; a constant name counts as one in the code."""
        self.every |= name in BY_ANY_NAME
        if name not in BY_NAME:
            return
        constant = None
        for instruction in self._all[at:]:
            if instruction.opname in CONSTANTS and constant is None and isinstance(instruction.argval, str):
                constant = instruction.argval
            elif instruction.opname.startswith("CALL"):
                break
            elif not instruction.opname.startswith("LOAD_"):
                constant = None
                break
        if constant is None:
            self.every = True
        else:
            self.names.add(constant)
