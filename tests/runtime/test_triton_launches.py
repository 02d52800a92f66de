"""Launches of Triton kernels: the first compiles, later ones go straight to the compiled kernel.

In: a function that stands for a Triton kernel and notes how it is launched. Out: failures that show the launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from serrate import JaggedTensor, ir, jit, ops
from serrate.ir.fusion import NOTHING
from serrate.runtime import derivation
from serrate.runtime import triton as runtime
from serrate.runtime.memory import Scratch
from serrate.runtime.triton import MOST_REGISTERS, TritonFunction

CPU = torch.device("cpu")


class Function:
    """What Triton's decorator makes of a function, as far as launches use it."""

    def __init__(self) -> None:
        self.through_triton: list[tuple[Any, ...]] = []
        self.direct: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **options: int) -> Any:
            self.through_triton.append((grid, args[-1]))
            return CompiledFunction(self)

        return launch


class CompiledFunction:
    """What Triton compiles, as far as launches use it."""

    function, packed_metadata = "the kernel", "its metadata"

    def __init__(self, function: Function) -> None:
        self._function = function

    def run(self, x: int, y: int, z: int, stream: int, kernel: str, metadata: str, *args: Any) -> None:
        assert (stream, kernel, metadata, *args[:3]) == (0, "the kernel", "its metadata", None, None, None)
        self._function.direct.append(((x, y, z), *args[3:]))


def test_programs_of_many_warps_use_the_registers_of_two_programs() -> None:
    """Half the registers of a multiprocessor, whether they would use more or fewer; others are only limited."""
    many, few = (TritonFunction(Function(), {}, registers) for registers in (64, MOST_REGISTERS))
    assert [many.limit(used) for used in (40, 64, 90)] == [64, None, 64]
    assert [few.limit(used) for used in (40, MOST_REGISTERS, 155)] == [None, None, MOST_REGISTERS]
    assert TritonFunction(Function(), {}).limit(155) is None


def test_integers_of_one_width_share_a_compiled_kernel() -> None:
    function = Function()
    kernel, tensor = TritonFunction(function, {}), torch.zeros(8)
    for number in (5, 1, 16, 0, (1 << 31) - 1, 1 << 31, (1 << 31) + 1):
        kernel((2, 3), [tensor], [number], CPU)
    assert function.through_triton == [((2, 3, 1), 5), ((2, 3, 1), 1 << 31)]
    assert function.direct == [((2, 3, 1), tensor.data_ptr(), n) for n in (1, 16, 0, (1 << 31) - 1, (1 << 31) + 1)]
    kernel((2, 3), [tensor], [5], torch.device("meta"))
    assert function.through_triton[2:] == [((2, 3, 1), 5)], "another device has a kernel of its own"


def test_tensors_that_are_not_aligned_go_through_triton() -> None:
    function = Function()
    kernel, room = TritonFunction(function, {}), torch.zeros(8)
    for _ in range(2):
        kernel((1, 1), [room[1:]], [5], CPU)
    assert len(function.through_triton) == 2 and not kernel.compiled
    scratch = Scratch(torch.zeros(512, dtype=torch.uint8), 256, (4,), torch.float32)
    kernel((1, 1), [room, scratch], [5], CPU)
    kernel((1, 1), [room, scratch], [5], CPU)
    assert function.direct == [((1, 1, 1), room.data_ptr(), scratch.data_ptr(), 5)]
    kernel((1, 1), [room[1:], scratch], [5], CPU)
    assert len(function.through_triton) == 4


def test_profilers_that_hook_into_triton_see_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    function = Function()
    kernel, room = TritonFunction(function, {}), torch.zeros(8)

    def launched() -> tuple[int, int]:
        kernel((1, 1), [room], [5], CPU)
        return len(function.through_triton), len(function.direct)

    assert [launched(), launched()] == [(1, 0), (1, 1)]
    with monkeypatch.context() as patched:
        patched.setattr(knobs.runtime, "launch_exit_hook", lambda metadata: None)
        assert launched() == (2, 1)
    assert launched() == (2, 2)


@pytest.mark.parametrize("buffers", [True, False])
def test_triton_chooses_the_kernel_for_the_sizes_of_tensors_on_amd(buffers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffer instructions reach 2 GiB: a kernel that has them is not launched for larger tensors."""
    from triton import knobs

    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(knobs.amd, "use_buffer_ops", buffers)
    function = Function()
    kernel, room = TritonFunction(function, {}), torch.zeros(8)
    for _ in range(3):
        kernel((1, 1), [room], [5], CPU)
    assert (len(function.through_triton), len(function.direct)) == ((3, 0) if buffers else (1, 2))


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Function]:
    """Everything that is launched, by name and by the text of its module."""
    found: dict[str, Function] = {}

    class Module:
        def __init__(self, text: str) -> None:
            self.text = text

        def __getattr__(self, name: str) -> Function:
            return found.setdefault(f"{name} of {self.text}", Function())

    for module in (runtime, derivation):
        monkeypatch.setattr(module, "load", lambda text, name: Module(text))
    return found


def program(operation: Callable[..., Any]) -> Any:
    with ir.Fusion("program") as f:
        x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        f.output(operation(ops.as_nested(x, offsets), 1))
    return f.compile("triton", "persistent_dynamic", chunk=16, tile=8)


def test_new_offsets_go_to_the_compiled_kernels(functions: dict[str, Function]) -> None:
    def launches() -> list[tuple[int, int]]:
        found = [(len(each.through_triton), len(each.direct)) for each in functions.values()]
        # Few rows need no sums of blocks.
        return [each for each in found if each != (0, 0)]

    run = program(ops.softmax)
    for lengths in ([40, 3, 0], [1, 50, 2], [20, 20, 20], [17, 5, 33, 2]):
        counted = launches()
        values = torch.zeros(sum(lengths), 4)
        run(values, JaggedTensor.from_lengths(values, torch.tensor(lengths)).offsets)
        now = launches()
        if counted:
            assert now == [(1, direct + 1) for _, direct in counted]
        else:
            assert len(now) > 2 and set(now) == {(1, 0)}


@pytest.mark.usefixtures("functions")
def test_kernels_without_work_are_compiled_with_the_first_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[int] = []
    monkeypatch.setattr(runtime, "prepare_all", lambda launches, memory, symbols: prepared.append(len(launches)))
    run, x = jit(lambda x: torch.softmax(x, 1), backend="triton"), JaggedTensor.from_lengths(torch.zeros(60, 4), [40, 20])
    counts = []
    for _ in range(5):
        run(x)
        counts.append(len(prepared))
    assert counts[0] >= 1 and counts[-1] == counts[0]


def test_programs_over_the_same_rows_share_what_they_derive(functions: dict[str, Function]) -> None:
    first, second, values, offsets = program(ops.softmax), program(ops.sum), torch.zeros(43, 4), torch.tensor([0, 40, 43])
    first(values, offsets)
    second(values, offsets)
    launches = {name.split()[0]: each for name, each in functions.items() if each.through_triton}
    assert len(launches["all_arrays"].through_triton) == 1 and not launches["all_arrays"].direct
    second(values, offsets.clone())
    assert launches["all_arrays"].direct or len(launches["all_arrays"].through_triton) == 2


def test_a_kernel_that_does_not_fit_has_fewer_stages() -> None:
    tried: list[int | None] = []

    class Large(Function):
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
            def launch(*args: Any, **options: int) -> Any:
                tried.append(options.get("num_stages"))
                if options.get("num_stages", 9) > fits:
                    raise OutOfResources(200_000, 100_000, "shared memory")
                return CompiledFunction(self)

            return launch

    fits = 2
    kernel = TritonFunction(Large(), {"num_warps": 4, "num_stages": 4})
    for _ in range(2):
        kernel.launch((1, 1), [torch.zeros(8)], [5])
    assert tried == [4, 3, 2, 2]
    fits = 0
    with pytest.raises(OutOfResources):
        kernel.launch((1, 1), [torch.zeros(8)], [5])
    with pytest.raises(OutOfResources):
        TritonFunction(Large(), {}).launch((1, 1), [torch.zeros(8)], [5])


def test_launches_are_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the warm ones, and nothing is switched where there is only one device."""
    current: list[torch.device] = []

    @contextmanager
    def switched(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.append(CPU)

    second = torch.device("cuda", 1)
    for count, wanted in ((1, []), (2, [second, CPU])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        monkeypatch.setattr(torch.cuda, "device", switched)
        function = Function()
        run, own, metadata = runtime.direct(CompiledFunction(function), second)
        run(1, 1, 1, 0, own, metadata, None, None, None, 16, 5)
        assert function.direct == [((1, 1, 1), 16, 5)] and current == wanted


def test_warm_calls_read_the_indices_of_the_call(functions: dict[str, Function]) -> None:
    """Indices are an array of the program, and another tensor in every call."""
    run = jit(lambda i, table: torch.nn.functional.embedding(i, table), backend="triton", tune="never")
    indices, table = JaggedTensor.from_lengths(torch.zeros(60, dtype=torch.int64), [40, 20]), torch.zeros(100, 16)
    # The check of indices finds nothing: its result is not computed here.
    for each in range(3):
        given = indices.with_values(torch.full((60,), each))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("serrate.runtime.indices.on_host", lambda _: True)
            patched.setattr(torch.Tensor, "item", lambda _: NOTHING)
            run(given, table)
        launched = [each for each in functions.values() if each.through_triton]
        assert len(launched) == 3
        if each:
            # The first call compiles; then every launch goes to the compiled kernels, and one of them is given these indices.
            assert {(len(f.through_triton), len(f.direct)) for f in launched} == {(1, each)}
            assert any(given.values.data_ptr() in f.direct[-1] for f in launched if table.data_ptr() in f.direct[-1])
