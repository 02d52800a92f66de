"""C++ files in this directory, compiled at run time.

In: a source's name and its constants. Out: a loaded library, built in a temporary directory.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch  # loaded first, so that the libraries share its OpenMP runtime instead of starting a second pool of threads

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="benchmarks-")


def compiler() -> str:
    """The compiler's path; without it nothing can be compared, so its absence is an error."""
    found = shutil.which("g++")
    if found is None:
        raise RuntimeError("benchmarks need g++ on the PATH")
    return found


@functools.cache
def load(source: str, *constants: str) -> ctypes.CDLL:
    """Compiles `source` with `constants` ("NAME=1") defined."""
    path = Path(__file__).with_name(source)
    target = Path(_directory().name) / "-".join([path.stem, *constants, "lib.so"])
    command = [compiler(), *FLAGS, *(f"-D{constant}" for constant in constants), str(path), "-o", str(target)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(target))


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    """The address of a contiguous tensor; the caller keeps the tensor alive."""
    if not tensor.is_contiguous():
        raise ValueError(f"a contiguous tensor is needed, got strides {tensor.stride()} for shape {tuple(tensor.shape)}")
    return ctypes.c_void_p(tensor.data_ptr())
