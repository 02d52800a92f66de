"""One-line mistakes that a test must notice, across the compiler.

In: nothing. Out: `MUTATIONS`: a piece of the source, the same piece made wrong, and the tests that should fail then. Each stands
for a mistake that a person could make: a bound off by one, a dropped guard, a wrong identity, a lost part of a key, stale data.
Changes that only cost speed have no place here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """`before`, which stands once in the file at `path`, becomes `after`; one of `tests` (files or pytest ids) must fail."""

    path: str
    before: str
    after: str
    tests: tuple[str, ...]


def _cases(names: str, *files: str) -> tuple[str, ...]:
    """The tests of some files (of the operators, if none is named) whose names pytest's `-k` finds by an expression."""
    return (*(files or (OPS,)), "-k", names)


def _of(path: str, tests: tuple[str, ...], *changes: tuple[str, str] | tuple[str, str, tuple[str, ...]]) -> list[Mutation]:
    """Mutations of one file; a change may name tests of its own."""
    return [Mutation(path, before, after, own[0] if own else tests) for before, after, *own in changes]


OPS, ACROSS, MOVES = "tests/engine/test_ops.py", "tests/engine/test_across.py", "tests/engine/test_movement.py"
COMPOSED = "tests/engine/test_compositions.py"
WORKED = ("tests/ir/test_worked_domains.py", "tests/ir/test_transforms.py", "tests/ir/test_ragged.py")
GUARDS = ("tests/analysis/test_worked_guards.py", "tests/analysis/test_guards.py")
BY_HAND = ("tests/schedule/test_by_hand.py",)
JIT = ("tests/engine/test_jit.py", "tests/engine/test_jit_effects.py")
EAGER = ("tests/engine/test_eager.py",)
RANDOM = ("tests/engine/test_random.py",)
NEW_OFFSETS = ("tests/test_new_offsets.py",)
NEW_ROWS = ("tests/language/test_new_rows.py",)
AUTOCAST = ("tests/engine/test_autocast.py",)
DERIVED = ("tests/autograd/test_derived_kernels.py", "-k", "not examples and not differences and not new_lengths")
INVARIANCE = ("tests/engine/test_batch_invariance.py",)
STRUCTURE = ("tests/tensor/test_structure.py", "tests/tensor/test_jagged.py")

IR = [
    *_of(
        "serrate/ir/expr.py",
        ("tests/ir/test_expr.py",),
        ("if array.data[first + k] <= position)", "if array.data[first + k] < position)"),
        ("return (low, high) if factor >= 0 else (high, low)", "return (low, high)"),
        ("return (as_expr(a) + b - 1) // b", "return as_expr(a) // b + 1", WORKED),
        ("return whole + low // divisor\n", "return whole\n"),
        ("bounds = (_known(max, lows), _each(max, highs))", "bounds = (_known(max, lows), _known(max, highs))"),
        ("_floordiv(a.left, const(a.right.value * divisor))", "_floordiv(a.left, const(a.right.value + divisor))"),
        ("right, left = right - left.constant,", "right, left = right + left.constant,"),
        ("return high is not None and high < 0", "return high is not None and high <= 0", ("tests/ir/test_expr.py", *GUARDS)),
    ),
    *_of(
        "serrate/ir/transforms.py",
        WORKED,
        (
            "return (outer * self.outputs[1].extent_at(known) + inner,)",
            "return (outer * self.outputs[0].extent_at(known) + inner,)",
        ),
        ("output = domain.with_rows(maximum(extent, 0), name", "output = domain.with_rows(extent, name"),
        ("end = minimum(high, domain.row_length) if domain.is_ragged else high", "end = high"),
    ),
    *_of(
        "serrate/ir/partition.py",
        WORKED,
        (
            "return self.lengths is None and self.group is None",
            "return self.lengths is None",
            ("tests/runtime/test_partitions.py",),
        ),
        ("place = COORDINATE + COORDINATE // divisor(count)", "place = COORDINATE"),
        (
            "boundaries = count if self.lengths is None else maximum(count - 1, 0)",
            "boundaries = count",
            ("tests/analysis/test_indices.py", *GUARDS),
        ),
        ("and start + length > starts[k + 1]:", "and start + length >= starts[k + 1]:"),
        ("if total is not None and start + length > total:", "if total is not None and start > total:"),
    ),
    *_of(
        "serrate/ir/ragged_transforms.py",
        ("tests/ir/test_pairing.py", *WORKED),
        (
            "paired = component.pairing == ragged.pairing and component.extent == ragged.component.extent",
            "paired = component.pairing == ragged.pairing",
        ),
        (
            "return (owner - first, position - self.offsets[owner])",
            "return (owner, position - self.offsets[owner])",
            ("tests/analysis/test_indices.py", *GUARDS),
        ),
        ("old = (COORDINATE % size) * parts + COORDINATE // size", "old = (COORDINATE // size) * parts + COORDINATE % size"),
        ("else COORDINATE * component.extent_expr", "else COORDINATE", ("tests/ir/test_transforms.py",)),
        ("if not paired or isinstance(component, RaggedIterDomain):", "if not paired:"),
        ("if a.component.uid != b.component.uid:", "if a.component.extent != b.component.extent:"),
    ),
    *_of(
        "serrate/ir/reductions.py",
        _cases("var or arg or logsumexp_rows or softmax_rows or all_rows or amax_rows", OPS, ACROSS),
        ('ALL = _simple("logical_and", _true)', 'ALL = _simple("logical_and", _false)'),
        (
            "return False if dtype == torch.bool else torch.iinfo(dtype).min",
            "return True if dtype == torch.bool else torch.iinfo(dtype).min",
            _cases("amax_rows or amin_rows"),
        ),
        ("    return NO_PLACE", "    return 0"),
        ('_call("mul", count, share)', '_call("mul", seen, share)'),
        ('_call("minimum", place, first)', '_call("maximum", place, first)'),
        ('better = _is("logical_or", better, news)', 'better = _is("logical_or", better, _nan(seen))'),
        (
            'power = _where(_is("eq", m2, m1), constant(1.0, m1.dtype), _call("exp", _call("neg", apart)))',
            'power = _call("exp", _call("neg", apart))',
            _cases("several_infinities", "tests/engine/test_row_by_row.py"),
        ),
        ('_call("sub", average, carried[MEAN])', '_call("sub", average, average)', _cases("var_rows or var_both")),
        ("commutative: bool = False", "commutative: bool = True", ("tests/engine/test_own_reductions.py",)),
    ),
    *_of(
        "serrate/ir/domains.py",
        ("tests/lower/test_naive.py",),
        ("pending += each.definition.inputs if each.definition is not None else ()", "pending += ()"),
    ),
    *_of(
        "serrate/ir/values.py",
        ("tests/engine/test_elementwise.py", *EAGER),
        (
            "return reindex(value, domains) if all(connected.isdisjoint(origins(d)) for d in others) else None",
            "return reindex(value, domains)",
            ("tests/schedule/test_primitives.py", "tests/engine/test_pairs_of_positions.py"),
        ),
        ("number = (int(number) - low) % 2 ** (8 * dtype.itemsize) + low", "number = int(number) % 2 ** (8 * dtype.itemsize)"),
        (
            "return intern(Constant, dtype, number, repr(number))",
            'return intern(Constant, dtype, number, "")',
            ("tests/ir/test_fusion.py", *JIT, *EAGER),
        ),
        (
            "if dtype in (torch.bfloat16, torch.float16) else dtype",
            "if dtype in (torch.bfloat16,) else dtype",
            ("tests/engine/test_rounding.py",),
        ),
    ),
]

ANALYSIS = [
    *_of(
        "serrate/analysis/guards.py",
        GUARDS,
        ("if Less(limit - 1, size).proven:", "if Less(limit - 2, size).proven:"),
        (
            'yield Need(source, "rows are shorter than their cover")',
            'yield Need(source, "rows are shorter than their cover", lower=True)',
        ),
        ("if not _at_least(0 - transform.right, 0):", "if not _at_least(transform.right, 0):"),
        (
            "return (wanted | path.read) & {d.uid for d in path.domains} <= inside",
            "return wanted & {d.uid for d in path.domains} <= inside",
        ),
        ("if last.bounds[1] is None or last.bounds[1] > 0:", "if last.bounds[1] is not None and last.bounds[1] > 0:"),
        ("if width.value != 0 and (not isinstance(transform, RaggedProduct) or _at_least(width, 1)):", "if width.value != 0:"),
    ),
    *_of(
        "serrate/analysis/indices.py",
        ("tests/analysis/test_indices.py", "tests/ir/test_pairing.py", *GUARDS),
        ("for domain, same in ((one, other), (other, one)):", "for domain, same in ((one, other),):"),
        (
            "for domain in transform.beside:\n                    self._derive(domain)",
            "for domain in ():\n                    self._derive(domain)",
        ),
    ),
    *_of(
        "serrate/analysis/inspection/iteration.py",
        ("tests/analysis/inspection/test_iteration.py",),
        ("low >= 0 and high < factor:", "low >= 0 and high <= factor:"),
        ("if any(e.value not in (None, 0) for e in apart):", "if any(e.value is None for e in apart):"),
    ),
    *_of(
        "serrate/analysis/vectors.py",
        ("tests/analysis/test_vectors.py",),
        ("needs.append(_extent(size, run[-1]))", "pass"),
        ("if all(d.uid != domain.uid for d in found):", "if True:"),
        ("needs.append(_extent(size, domain))", "pass"),
    ),
    *_of(
        "serrate/analysis/contiguity.py",
        ("tests/analysis/test_contiguity.py",),
        ("return value.constant % size == 0", "return True"),
    ),
]

SCHEDULE = [
    *_of(
        "serrate/schedule/dependences.py",
        ("tests/language/test_dependences.py",),
        ("if not any(moves.along(e) or (other.stores and moves.by_numbers(e)) for e in dims):", "if not dims:"),
        ("if access.stores and access.tensor in needed:", "if access.stores and access.tensor is None:"),
    ),
    *_of(
        "serrate/schedule/cutting.py",
        ("tests/language/test_dependences.py", "tests/language/test_strategies.py", "tests/schedule/test_kernel_primitives.py"),
        ("if isinstance(node, ByLength) and any(n is wanted for n in statements(node.other)):", "if len(inner(node)) == 2:"),
        (
            "replace(node, least=1, short=(), other=self._over_rows(node.other))",
            "replace(node, short=(), other=self._over_rows(node.other))",
        ),
        ("if is_read_inside(carry, self.loop):", "if False:"),
        ("        require_independent(self.program, self.loop)\n", ""),
        ("        require_movable_ahead(self.phase, self.loop)\n", ""),
    ),
    *_of(
        "serrate/schedule/primitives.py",
        ("tests/schedule/test_primitives.py",),
        (
            "if wanted is GRID and not _known(leaf.index).knows(loops[k][0]):",
            "if wanted is GRID and not _known(leaf.index).knows(loops[0][0]):",
        ),
        ("any(d.uid == loops[k + 1][0].uid for d in leaf.over)", "any(d.uid == loops[k][0].uid for d in leaf.over)"),
        (
            "met = {t.memory for t in a.writes | a.reads} & between.writes | a.writes & {t.memory for t in between.reads}",
            "met = {t.memory for t in a.writes | a.reads} & between.writes",
        ),
        ("if left.domain.uid != right.domain.uid or left.kind is not right.kind:", "if left.domain.uid != right.domain.uid:"),
        ("if _places(other) != _places(index):", "if len(_places(other)) != len(_places(index)):"),
        ("if any(known.knows(d) for d in chosen):", "if all(known.knows(d) for d in chosen):"),
        (
            "if any(r.memory is tensor and r is not tensor for r in b.reads):",
            "if any(r is tensor and r.base is not None for r in b.reads):",
        ),
    ),
    *_of(
        "serrate/schedule/partitions.py",
        ("tests/schedule/test_partitions.py", "tests/schedule/test_primitives.py"),
        ("!= whole.is_ragged or domain.row_length is not whole.row_length:", "!= whole.is_ragged:"),
        (".value == 0:\n            return tuple(outside)", ".value != 1:\n            return tuple(outside)"),
    ),
    *_of(
        "serrate/schedule/strategies/persistent_dynamic.py",
        _cases("(cumsum_rows or sum_rows or softmax_rows) and persistent", OPS, ACROSS),
        ("return None if isinstance(shape.leaf, Scan) else shape.own_rows[0]", "return shape.own_rows[0]"),
    ),
    *_of(
        "serrate/schedule/strategies/maskless.py",
        _cases("softmax and maskless"),
        ("if t in p.writes | p.reads) > 1 for t in private)", "if t in p.writes | p.reads) > 2 for t in private)"),
    ),
    *_of(
        "serrate/schedule/strategies/masked.py",
        _cases("products_of_heads and masked", "tests/engine/test_row_by_row.py"),
        ("for rows in shape.own_rows:", "for rows in shape.own_rows[:1]:"),
    ),
    *_of(
        "serrate/schedule/prepare.py",
        _cases("sum_groups or matmul or sum_positions or sum_square"),
        ("if not _kept(phase, component):\n        return True", "if _kept(phase, component):\n        return True"),
    ),
    *_of(
        "serrate/ir/storage.py",
        ("tests/schedule/test_row_blocks.py",),
        (
            "for owner in owners if owner.uid not in there and picks(d, owner)",
            "for owner in owners if owner.uid not in there and False",
        ),
    ),
    *_of(
        "serrate/schedule/by_hand.py",
        BY_HAND,
        ("3 if kind is LANES else 2 if domain.uid in over else 1", "3 if kind is LANES else 1"),
        ("if order[:depth] != shared:", "if order[:1] != shared[:1]:"),
        (
            "if kind is LANES and target.power_of_two_lanes and extent is not None",
            "if kind is LANES and not target.power_of_two_lanes and extent is not None",
        ),
    ),
    *_of(
        "serrate/schedule/heuristic.py",
        ("tests/schedule/test_heuristic.py",),
        (">= LONG_BYTES and rows.longest * SHARES > rows.total", ">= LONG_BYTES or rows.longest * SHARES > rows.total"),
    ),
    *_of(
        "serrate/schedule/heuristic.py",
        ("tests/schedule/test_gpu_sizes.py",),
        ("    if mean <= SHORT:", "    if rows.longest <= SHORT:"),
        ("if about_pivot and _longest_bytes(rows) > PIVOT_BYTES:", "if pivots and _longest_bytes(rows) < 0:"),
    ),
]

LOWER = [
    *_of(
        "serrate/lower/passes/long_sums.py",
        ("tests/lower/test_long_sums.py",),
        ("functools.reduce(_with_lanes_summed, groups, kept(body, out))", "kept(body, out)"),
        ("replace(loop, body=within.body[1:])", "replace(loop, body=within.body[2:])"),
    ),
    *_of(
        "serrate/lower/passes/tabulate.py",
        ("tests/lower/test_pipeline.py", "tests/codegen/test_expressions.py"),
        ("and e.first.value == 0 and e.position in grids", "and e.position in grids"),
    ),
    *_of(
        "serrate/ir/solve.py",
        ("tests/lower/test_peel.py",),
        ("lambda factor: 1 if factor > 0 else 0", "lambda factor: 0"),
    ),
    *_of(
        "serrate/lower/passes/peel.py",
        ("tests/lower/test_peel.py",),
        ("limit = functools.reduce(minimum, dict.fromkeys(readable.values()), loop.extent)", "limit = loop.extent"),
    ),
    *_of(
        "serrate/lower/passes/reuse_last_block.py",
        ("tests/lower/test_reuse_last_block.py",),
        ("Bind(back, count - 2 - step, (), ())", "Bind(back, count - 1 - step, (), ())"),
        ("return all(end is not None and at_most_one_apart(loop.extent, end) for end in ends)", "return True"),
        ("return (blocks_read(read) | names_in(*expressions_of(read))).isdisjoint(changing)", "return True"),
        ("and node.index == stored[node.tensor.memory]", ""),
        ("node.tensor.memory not in loaded and", ""),
    ),
    *_of(
        "serrate/lower/passes/common.py",
        ("tests/lower/test_reuse_last_block.py",),
        ("return fixed and abs(factor_of(e, loop.symbol)) > span", "return True"),
    ),
    *_of(
        "serrate/lower/passes/barriers.py",
        ("tests/lower/test_barriers.py",),
        ("    if not later.stores:\n        return True", "    if not later.stores:\n        return False"),
        ("(a[1] < b[0] or b[1] < a[0])", "(a[0] < b[0] or b[1] < a[0])"),
        ("return (not same or moved) and not (access.adds and later.adds)", "return not same or moved"),
        ("return (not same or moved) and not", "return not same and not"),
        ("if not access.stores or access.adds or not _moves(loop, access) or _is_looked_up(loop, access):", "if True:"),
        ("not _moves(loop, access) or _is_looked_up(loop, access):", "not _moves(loop, access):"),
        ("    while count != sum(map(len, sources.values())):", "    for _ in range(2):"),
        ("return not same or moved or not in_place", "return not same"),
        ("if all(isinstance(n, Assign) or is_stored(n, each[1]) for n in found)}", "}"),
        ("        if _count(alone) < _count(made):", "        if False:"),
        ("            if grown == carried:", "            if carried or grown == carried:"),
        ("for e in self.pending if not _are_apart(loop, e.access.tensor)}", "for e in self.pending}"),
    ),
    *_of(
        "serrate/lower/passes/common.py",
        ("tests/lower/test_barriers.py",),
        (" | {n.symbol.name for n in inside if isinstance(n, For | Bind)}", ""),
    ),
    *_of(
        "serrate/lower/passes/peel.py",
        ("tests/lower/test_peel.py",),
        ("holds = (isinstance(node, If) and k == 0) or", "holds = isinstance(node, If) or"),
    ),
    *_of(
        "serrate/codegen/triton/printer.py",
        ("tests/language/test_read_again.py",),
        ("        self.forget_memory(node.tensor.memory)\n\n    def _reduce", "\n    def _reduce"),
    ),
    *_of(
        "serrate/codegen/triton/grid.py",
        ("tests/engine/test_resident_programs.py",),
        ("tl.swizzle2d({places}, {rows}, {columns}, {SQUARE})", "tl.swizzle2d({places}, {columns}, {columns}, {SQUARE})"),
        ("_reads_at(n.left, changing) != _reads_at(n.right, changing)", "False"),
    ),
    *_of(
        "serrate/tiles/aliasing.py",
        ("tests/language/test_calls.py", "-k", "memory"),
        ("return any(_follows(e, axis.position, moving) for e in stores[0].index)", "return True"),
    ),
    *_of(
        "serrate/lower/passes/row_ends.py",
        ("tests/lower/test_row_ends.py", "-k", "bounds or conditions"),
        ("            if not _grows(term, longest):", "            if False:"),
        ("isinstance(e, Element) and e.array in offsets]", "isinstance(e, Element)]"),
        ("and g.left is condition.left for t", "for t"),
        ("isinstance(inner, Minimum) and factor > 0 and", "isinstance(inner, Minimum) and"),
    ),
    *_of(
        "serrate/tiles/launch_site.py",
        ("tests/language/test_new_rows.py",),
        ("                check_rows(value for _, value in leaves.ragged)\n", "                pass\n"),
        ("return lambda x: numbers.setdefault(rows_key(x), len(numbers))", "return lambda x: 0"),
    ),
    *_of(
        "serrate/codegen/triton/prelude.txt",
        ("tests/engine/test_large_logits.py",),
        ("tl.exp2((x - m) * 1.4426950408889634)", "tl.exp2(tl.fma(x, 1.4426950408889634, m * -1.4426950408889634))"),
    ),
    *_of(
        "serrate/lower/passes/boxes.py",
        ("tests/engine/test_boxes.py",),
        ("and size >= LEAST and not missing", "and size >= LEAST"),
    ),
    *_of(
        "serrate/analysis/boxes.py",
        ("tests/analysis/test_boxes.py",),
        ("if not all(divides(max(ALIGNMENT // size, 1), e) for e in (columns, place[1])) or", "if"),
        ("flat_index(start[split:], extents[split:])", "start[-1]"),
    ),
    *_of(
        "serrate/lower/passes/end_loops.py",
        ("tests/lower/test_passes.py",),
        ("if not self.guarded or any(not isinstance(s, Assign) or not s.rests for s in self.lasting):", "if not self.guarded:"),
        ("if not all((loose or guard) in each for each in fed):", "if all((loose or guard) in each for each in fed):"),
    ),
    *_of(
        "serrate/lower/shifts.py",
        ("tests/lower/test_passes.py",),
        ("elif degree not in (PLAIN, None):", "elif degree is Unknown:"),
    ),
    *_of(
        "serrate/lower/names.py",
        ("tests/lower/test_pipeline.py",),
        (
            'return {a: f"{name}_index" if a.signed and not a.local else name',
            "return {a: name",
            ("tests/lower/test_pipeline.py",),
        ),
    ),
    *_of(
        "serrate/lower/blocks.py",
        _cases("var_rows or layer_norm_rows or softmax or two_outputs or intermediate"),
        (
            "found += [Less(const(-1), e), Less(e, extent_of(domain, indices))]",
            "found += [Less(e, extent_of(domain, indices))]",
            _cases("gather or index or select or pad", MOVES),
        ),
        ("0, None if high is None else max(high - 1, 0))", "0, None if high is None else max(high - 2, 0))"),
    ),
    *_of(
        "serrate/schedule/one_pass.py",
        ("tests/language/test_one_pass.py",),
        ("not _varies(center, {*one.reduced, *other.reduced}) and ", ""),
    ),
    *_of(
        "serrate/ir/expansion.py",
        ("tests/engine/test_own_reductions.py",),
        ("v if s is free else _reading(v, free, before)", "v"),
        ("for lane in reversed(fold.lanes):", "for lane in fold.lanes:"),
    ),
    *_of(
        "serrate/lower/stages.py",
        ("tests/engine/test_routing.py",),
        ("number = max(number, before + (alone or complete))", "number = max(number, before + complete)"),
        ("number = max(number, made[name][0] + 1)", "number = max(number, made[name][0])"),
    ),
    *_of(
        "serrate/lower/rounding.py",
        ("tests/engine/test_rounding.py",),
        (
            'EXACT = frozenset(("neg", "abs",',
            'EXACT = frozenset(("add", "neg", "abs",',
            _cases("read_unrounded", "tests/engine/test_rounding.py"),
        ),
    ),
]

CPP = [
    *_of(
        "serrate/codegen/cpp/prelude.h",
        ("tests/codegen/test_rows_without_features.py",),
        (
            "if ((i64)offsets[middle + 1] <= position) low",
            "if ((i64)offsets[middle + 1] < position) low",
            ("tests/codegen/test_expressions.py",),
        ),
        (
            "return (T)(a / b - (a % b != 0 && (a < 0) != (b < 0)));",
            "return (T)(a / b - ((a < 0) != (b < 0)));",
            ("tests/engine/test_elementwise.py",),
        ),
        ("<= (i32)as_bits(12583039.0f + 23.0f))", "<= (i32)as_bits(12583039.0f + 230.0f))", ("tests/engine/test_guess.py",)),
        ("if (d != next) flush();", "if (d == next) flush();"),
        ("groups * (k + 1) / threads)", "groups / threads * (k + 1))", ("tests/codegen/test_shared_positions.py",)),
        ("T g = x > m ? x : m; return x != x ? x : g;", "return x > m ? x : m;"),
        (
            "return low < count ? low : larger(count - 1, (i64)0);",
            "return low;",
            ("tests/codegen/test_expressions.py", "tests/codegen/test_sanitize.py"),
        ),
    ),
    *_of(
        "serrate/codegen/cpp/printer.py",
        ("tests/codegen/test_rows_without_features.py",),
        (
            'mine = f"{tensor.name}_all + omp_get_thread_num() * {tensor.name}_size"',
            'mine = f"{tensor.name}_all"',
            ("tests/engine/test_determinism.py",),
        ),
        ('self.open("if (k < (int)(count - done))")', 'self.open("if (k <= (int)(count - done))")'),
        ("self.put('asm volatile(\"\");')", "pass", ("tests/codegen/test_scans.py",)),
    ),
    *_of(
        "serrate/codegen/cpp/streams.py",
        _cases("past_the_cache"),
        (
            "if to - start != by - by.substitute(at) or (filled is not None and fill is None):",
            "if filled is not None and fill is None:",
            _cases("cpp and (slice or flip or transpose or select)", MOVES),
        ),
        (" or node.tensor.memory in text.read:", ":", ("tests/language/test_past_the_cache.py",)),
    ),
    *_of(
        "serrate/lower/nests.py",
        _cases("cpp and (var or layer_norm or softmax or arg)"),
        (
            "if earlier.local in read or written == earlier.local:",
            "if written == earlier.local:",
            ("tests/language/test_rules.py",),
        ),
    ),
    *_of(
        "serrate/codegen/cpp/values.py",
        ("tests/engine/test_elementwise.py", "tests/oracle/test_dtypes.py"),
        ('return f"({arg} != 0)"', 'return f"((i64){arg} != 0)"'),
    ),
    *_of(
        "serrate/codegen/cpp/index_set_split.py",
        _cases("cpp and (pad or cat or gather)", MOVES),
        (
            "tests = tuple(g for g in conditions if g not in bounds)",
            "tests: Guard = ()",
            ("tests/engine/test_padding.py",),
        ),
        (
            "if isinstance(value, Load) and value.guard == guard:",
            "if isinstance(value, Load) and value.guard:",
            ("tests/language/test_past_the_cache.py",),
        ),
    ),
    *_of(
        "serrate/lower/passes/guess_maxima.py",
        ("tests/engine/test_guess.py",),
        ("            found.total,\n", ""),
    ),
    *_of(
        "serrate/ir/solve.py",
        ("tests/ir/test_solve.py",),
        ("// -factor + 1 if factor < 0 else None", "// -factor if factor < 0 else None"),
        ("return ceildiv(wanted * factor - difference, factor)", "return (wanted * factor - difference) // factor"),
        ("if any(factor_of(difference, s) <= 0 for s in mine):", "if any(factor_of(difference, s) < 0 for s in mine):"),
    ),
    *_of(
        "serrate/codegen/expressions.py",
        ("tests/codegen/test_expressions.py",),
        ("return e.bounds[0] is None or e.bounds[0] < 0", "return e.bounds[0] is not None and e.bounds[0] < 0"),
    ),
]

OTHER_BACKENDS = [
    *_of(
        "serrate/codegen/triton/printer.py",
        _cases("triton and (sum_rows or softmax_rows or var_rows or amax_rows)"),
        ("elif head.extent is not ends[head]:", "elif False:"),
        ('text = f"tl.where({mask}, {text}, {number_text(identity)})"', "pass"),
    ),
    *_of(
        "serrate/codegen/triton/printer.py",
        ("tests/codegen/test_addresses.py",),
        ('self.put(f"{s} = sr_wide({s})")', "pass"),
    ),
    *_of(
        "serrate/codegen/triton/printer.py",
        ("tests/lower/test_reuse_last_block.py",),
        ("if node.undefined:\n            before = None\n        elif", "if not node.undefined and"),
    ),
    *_of(
        "serrate/codegen/triton/indices.py",
        ("tests/codegen/test_addresses.py",),
        ("narrow = is_narrow(expr, self.last)", "narrow = True"),
        ("limit = limit + further", "pass"),
    ),
    *_of(
        "serrate/codegen/triton/addresses.py",
        ("tests/codegen/test_addresses.py",),
        ("if own is not None) + abs(e.constant)", "if own is not None)"),
        ("reached = own[0] * own[1]", "reached = max(own)"),
    ),
    *_of(
        "serrate/codegen/reference.py",
        _cases("reference and (gather or index or select)", MOVES),
        (
            "value = torch.where(exists, value, torch.full((), identity, dtype=local.dtype, device=self.device))",
            "pass",
            ("tests/schedule/test_short_rows.py",),
        ),
    ),
]

GPU_CALLS = [
    *_of(
        "serrate/runtime/dispatch.py",
        ("tests/runtime/test_streams.py",),
        ("return object() if is_recorded(tensor) else stream_of(tensor.device)", "return object() if is_recorded(tensor) else 0"),
    ),
    *_of(
        "serrate/runtime/arguments.py",
        ("tests/runtime/test_streams.py",),
        ("key = (self._derivation.text, numbers, stream_of(call.device))", "key = (self._derivation.text, numbers)"),
    ),
    *_of(
        "serrate/runtime/host_code.py",
        ("tests/runtime/test_host_code.py",),
        ('scratch.append(f"p{k} = base + {end}" if', 'scratch.append(f"p{k} = base" if'),
        ("*(f's{k}' for k in range(symbols)), *counts", "*counts, *(f's{k}' for k in range(symbols))"),
        ("if components > 1:", "if components > 2:"),
    ),
    *_of(
        "serrate/tensor/rows.py",
        ("tests/runtime/test_streams.py",),
        ("            made_on[1].add(stream)\n", ""),
        ("wait_stream(made_on[0])", "wait_stream"),
    ),
    *_of(
        "serrate/runtime/arrays.py",
        ("tests/runtime/test_arrays.py",),
        ("    if is_recorded(owners[0]):", "    if False:"),
    ),
    *_of(
        "serrate/runtime/dispatch.py",
        ("tests/runtime/test_arrays.py",),
        ("return object() if is_recorded(tensor) else stream", "return is_recorded(tensor) or stream"),
    ),
    *_of(
        "serrate/runtime/triton.py",
        ("tests/runtime/test_triton_launches.py",),
        ("torch.cuda.device_count() > 1", "torch.cuda.device_count() > 9"),
        ("            self._options = options\n", "            pass\n"),
    ),
    *_of(
        "serrate/schedule/short_rows.py",
        ("tests/schedule/test_short_rows.py", "-k", "sixteen_bits"),
        ("    pairs += [(t, used.get(t.name)) for phase in short for t in phase.writes]\n", ""),
    ),
    *_of(
        "serrate/schedule/short_rows.py",
        ("tests/engine/test_routing.py", "-k", "sums_of_short_rows"),
        ("rows[-1].body, finishes=finishes)", "rows[-1].body)"),
    ),
    *_of(
        "serrate/schedule/short_rows.py",
        ("tests/schedule/test_short_rows.py", "-k", "several_tensors"),
        ("for each in (*short, *others.values())", "for each in others.values()"),
        (
            "        elif outer is not None and outer.uid in groups:",
            "        elif outer is not None and outer.uid == next(iter(groups)):",
        ),
    ),
    *_of(
        "serrate/codegen/triton/values.py",
        ("tests/engine/test_elementwise.py", "-k", "truth_values"),
        ('("add", "truth"): FUNCTIONS["logical_or"],', ""),
    ),
    *_of(
        "serrate/schedule/weighted_sums.py",
        ("tests/engine/test_attention.py", "-k", "no_weights"),
        ("if leaf.over[0].extent_expr.value is None:", "if False:"),
    ),
    *_of(
        "serrate/lower/passes/factor_operands.py",
        ("tests/engine/test_attention.py", "-k", "scaled_before"),
        ("operand.dtype not in (torch.float32, torch.bfloat16)", "not operand.dtype.is_floating_point"),
    ),
    *_of(
        "serrate/lower/passes/name_indices.py",
        ("tests/engine/test_expert_layers.py", "-k", "indices"),
        ("yield e, (*guard, *guarded.get(expr, ())), certain", "yield e, guard, certain"),
    ),
    *_of(
        "serrate/ir/ragged_transforms.py",
        ("tests/engine/test_decoding.py", "-k", "one_length"),
        ("if one is None else one[0] * one[1].host_bound", "if one is None else one[1].host_bound"),
    ),
    *_of(
        "serrate/schedule/prepare.py",
        ("tests/engine/test_expert_layers.py", "-k", "launches or kept_for_gradients"),
        ('found |= recorder.attempt("align", made.name, own.name, at.name)', "pass"),
    ),
    *_of(
        "serrate/schedule/sizes.py",
        ("tests/language/test_triton.py", "-k", "matrix_units"),
        ("alone = axis.position in facts.batches and target.least_matmul > 1", "alone = False"),
    ),
    *_of(
        "serrate/codegen/triton/block_values.py",
        ("tests/language/test_maxima.py", "-k", "widened and triton"),
        (
            'return self.others.get(self.shared.get((id(value), lanes, guard), ""))',
            "return self._other(value, lanes, guard)",
        ),
    ),
    *_of(
        "serrate/lower/passes/peel.py",
        ("tests/language/test_triton.py", "-k", "beside"),
        ("        if always:\n", "        if False:\n"),
    ),
    *_of(
        "serrate/codegen/triton/block_values.py",
        ("tests/language/test_triton.py", "-k", "scans_of and triton"),
        (
            "with self.protected(value.guard):\n                return self._existing(value, lanes)",
            "return self._existing(value, lanes)",
        ),
    ),
    *_of(
        "serrate/codegen/triton/block_values.py",
        ("tests/language/test_maxima.py", "-k", "empty and triton"),
        ('is_zero = value.function == "exp_diff" or self._has_terms(m, lanes, guard)', "is_zero = True"),
    ),
    *_of(
        "serrate/codegen/triton/block_values.py",
        ("tests/language/test_missing_rows.py", "-k", "triton"),
        ("any(len(g.symbols & counted) > 1 or _room(g, counted) is None for g in on_lanes)", "False"),
    ),
    *_of(
        "serrate/codegen/triton/indices.py",
        ("tests/language/test_missing_rows.py", "-k", "triton"),
        ("if g not in self.entered)", "if self.lanes_in(g.left) | self.lanes_in(g.right))"),
    ),
    *_of(
        "serrate/tiles/aliasing.py",
        ("tests/language/test_calls.py", "-k", "one_memory and cpp"),
        ("if reads and (before or not stores", "if reads and (not stores"),
        ("and not _once(program, node, x)", "and False"),
    ),
    *_of(
        "serrate/tiles/loops.py",
        ("tests/language/test_branches.py", "-k", "cpp or refused"),
        ("else self.before.get(name, Unset(name))", "else self.before.get(name, value)"),
    ),
    *_of(
        "serrate/tiles/source.py",
        ("tests/language/test_refused.py", "-k", "replaces or names_without"),
        ("after = exposed | (live - written)", "after = exposed"),
        ("after | again)", "after)"),
        ("every = [*names, *all_outside(function, others)]", "every = [*names, *others]"),
    ),
    *_of(
        "serrate/tiles/proof.py",
        ("tests/language/test_rules.py", "-k", "tiles or tile"),
        ("                elif depends or over & lanes:\n", "                elif over & lanes:\n"),
        ("                elif depends or over & lanes:\n", "                elif depends:\n"),
        ("- {lane.symbol for lane in local.lanes} | scanned", "- {lane.symbol for lane in local.lanes}"),
        ("if not is_sum and {s for e in node.index for s in e.symbols}.isdisjoint(tile) and", "if not is_sum and"),
    ),
    *_of(
        "serrate/tiles/read_back.py",
        ("tests/language/test_read_back.py",),
        ("both = store.adds and other.adds", "both = store.adds or other.adds"),
        ("self._distinct = self._own - {a.lane for a in mine}", "self._distinct = set()"),
        ("if a is not one for mine, its in", "if False for mine, its in"),
        ("(difference.value % stride if stride else difference.value)", "difference.value"),
        ("        return self._ends_before(a, b) or self._ends_before(b, a)\n", "        return False\n"),
        ("return self._unmasked(store, shifted) and", "return"),
    ),
    *_of(
        "serrate/interpret/races.py",
        ("tests/language/test_read_back.py", "-k", "interpreter"),
        ("            if found is not None and found[0] != program:\n", "            if False:\n"),
        ("                if reader is not None:\n", "                if False:\n"),
    ),
    *_of(
        "serrate/tiles/source.py",
        ("tests/language/test_strategies.py", "-k", "variable"),
        ("of in parameters and not written[of] and written[name] == 1", "of in parameters and not written[of]"),
        ("of in parameters and not written[of] and written[name] == 1", "of in parameters and written[name] == 1"),
        ("                attribute in ROW_NUMBERS and", "                attribute in () and"),
    ),
    *_of(
        "serrate/tiles/source.py",
        ("tests/language/test_branches.py", "-k", "cpp or refused"),
        ("read_later = [n for n in written if n in live]", "read_later = written"),
        ("again |= names_read(node.test) if isinstance(node, ast.While) else set()", "pass"),
    ),
    *_of(
        "serrate/schedule/statistics.py",
        ("tests/language/test_maxima.py", "-k", "cpp"),
        ("if guard <= _guard(n) else [])", "if True else [])"),
    ),
    *_of(
        "serrate/codegen/triton/values.py",
        ("tests/engine/test_rounding.py", "-k", "divides"),
        ('("div", "single"): "tl.div_rn({0}, {1})"', '("div", "single"): "({0} / {1})"'),
    ),
]

GRADIENTS = [
    *_of(
        "serrate/autograd/transpose.py",
        ("tests/autograd/test_gradients.py",),
        (
            "    offsets, order = group_by(_flat(keys, len(first)), count + 1)",
            "    offsets, order = group_by(_flat(keys, len(first)), count)",
        ),
        ("if factor not in (1, -1):", "if False:"),
        ('        conditions.append(call("eq", position(to), chosen, dtype=torch.bool))', "        pass"),
        ("(domain.is_ragged and not to.is_ragged)", "False"),
    ),
    *_of(
        "serrate/autograd/saved.py",
        ("tests/autograd/test_autograd.py",),
        ("    inputs = _with_sizes(fusion, plain, used, live, stored, grads)", "    inputs = plain"),
    ),
    *_of(
        "serrate/autograd/function.py",
        ("tests/autograd/test_autograd.py",),
        ("if x is not None and version(x) != before:", "if False:"),
    ),
    *_of(
        "serrate/autograd/derivatives.py",
        ("tests/autograd/test_derivatives.py",),
        ("tie = g if _is_bound(other) else zero(g) if _is_bound(own) else half", "tie = half"),
    ),
    *_of(
        "serrate/autograd/reductions.py",
        ("tests/autograd/test_derivatives.py",),
        ("select(alone, rest, zero(g[0]))", "zero(g[0])"),
        ('call("div", g[0], count, dtype=g[0].dtype)', "g[0]"),
    ),
]

RUNTIME = [
    *_of(
        "serrate/runtime/bind.py",
        ("tests/runtime/test_partitions.py",),
        ("rows[:, -1] != ends\n", "rows[:, -1] > ends\n"),
        ("rows[:, 1:] < rows[:, :-1],", "rows[:, 1:] < 0,"),
        (
            "return {*arrays_of(_domains(fusion)), *(array for array in checked if not array.signed)}",
            "return {*arrays_of(_domains(fusion))}",
        ),
        ("if reach < longest:", "if reach < longest - 1:", ("tests/engine/test_padding.py::test_mistakes",)),
    ),
    *_of(
        "serrate/runtime/arguments.py",
        ("tests/runtime/test_partitions.py", *JIT),
        ('return ("structure", size)', 'return ("structure",)'),
    ),
    *_of(
        "serrate/runtime/arrays.py",
        ("tests/runtime/test_arrays.py",),
        ("if found is not None and found.versions == current:", "if found is not None:"),
        ("remember(owners, (array, numbers), lambda", "remember(owners, (array.name, numbers), lambda"),
        (
            "torch.searchsorted(offsets, positions, right=True)",
            "torch.searchsorted(offsets, positions, right=False)",
            _cases("triton and persistent and (sum_rows or softmax_rows)"),
        ),
        ("(key, *map(id, owners[1:]))", "(key,)"),
        ("while len(_memory) > TENSORS:", "while len(_memory) > TENSORS + 1_000_000:"),
    ),
    *_of(
        "serrate/runtime/results.py",
        ("tests/engine/test_jit.py", COMPOSED + "::test_elementwise"),
        ('return ("structure", dims, depths, sizes)', 'return ("structure", depths, sizes)'),
        ("if not rows.verified():", "if False:"),
    ),
    *_of(
        "serrate/runtime/memory.py",
        ("tests/runtime/test_memory.py",),
        ("return _free.pop(k)", "return _free[k]"),
        ("del _free[0]", "del _free[-1]"),
    ),
    *_of(
        "serrate/runtime/launch.py",
        _cases("chosen_plan or softmax_rows"),
        ("if kept is None or kept.numel() < count:", "if kept is None:"),
        (
            "return -(-max(elements, 1) * itemsize // 64) * 64 // itemsize",
            "return max(elements, 1) * itemsize // 64 * 64 // itemsize",
            ("tests/engine/test_determinism.py",),
        ),
    ),
    *_of(
        "serrate/runtime/cache.py",
        ("tests/runtime/test_cache.py",),
        ('"\\0".join((compiler.key, prelude, self.text))', '"\\0".join((prelude, self.text))'),
        ('"\\0".join((compiler.key, prelude, self.text))', '"\\0".join((compiler.key, self.text))'),
        ("if digest in _loaded or _load(folder, digest, unit.name):", "if digest in _loaded:"),
    ),
    *_of(
        "serrate/runtime/cache_folder.py",
        ("tests/runtime/test_cache.py",),
        ("if file not in found or hashlib.sha256(found[file]).hexdigest() != wanted:", "if file not in found:"),
        ("if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):", "if status.st_mode & stat.S_IWOTH:"),
        ("path.mkdir(mode=0o700, exist_ok=True)", "path.mkdir(exist_ok=True)"),
        ("    except (Timeout, OSError):\n        yield False", "    except (Timeout, OSError):\n        yield True"),
        ('if manifest["entry"] != name:', "if not manifest:"),
        ("sorted({name[:2] for name in names})", "()", ("tests/runtime/test_cache_together.py", "-k", "start_together")),
    ),
    *_of(
        "serrate/tuner/archive.py",
        ("tests/tuner/test_archive.py",),
        ("path.stat().st_mtime >= written and not replace", "not replace"),
        ("path.stat().st_mtime >= written and not replace", "path.stat().st_mtime >= written"),
        ("if sorted(names) != sorted(listed):", "if not names:"),
        (
            "if not _RECORD.fullmatch(name) or name !=",
            "if not _RECORD.fullmatch(name) and name ==",
        ),
    ),
    *_of(
        "serrate/analysis/inspection/lanes.py",
        ("tests/analysis/inspection/test_lanes.py",),
        ("at - (ends - extent)[owners]", "at"),
        ("self.existing += int((run & self._holds(", "self.existing += int((run | self._holds("),
    ),
    *_of(
        "serrate/report/collect.py",
        ("tests/report/test_report.py",),
        ("for strategy in STRATEGIES if current in STRATEGIES else (current,):", "for strategy in STRATEGIES:"),
        ('if tuning.source == "nearest":', 'if tuning.source != "nearest":'),
    ),
    *_of(
        "serrate/runtime/indices.py",
        ("tests/engine/test_indices_out_of_range.py",),
        ("return (k, *_first(row))", "return (0, *_first(row))"),
    ),
    *_of(
        "serrate/runtime/library.py",
        _cases("reference and (group_by or no_group)", "tests/engine/test_routing.py"),
        ("keys.clamp(0, max(count - 1, 0)) == keys", "keys.clamp(max=max(count - 1, 0)) == keys"),
    ),
]

FRONTEND = [
    *_of(
        "serrate/frontend/classes.py",
        JIT,
        ("return class_of(*args) if len(args) == 1", "return type(*args) if len(args) == 1"),
        ("if names.get(name) is ANSWERING[name]:", "if False:"),
    ),
    *_of(
        "serrate/frontend/signatures/reducing.py",
        ("tests/engine/test_composed_functions.py",),
        ("return ops.where(zero, 0.0, root(ops.where(zero, 1.0, x)))", "return root(x)"),
    ),
    *_of(
        "serrate/frontend/ops/elementwise.py",
        _cases("numbers_are_rounded and cpp", "tests/engine/test_rounding.py"),
        ('if comparison or name == "pow":', 'if name == "pow":'),
    ),
    *_of(
        "serrate/frontend/ops/reductions.py",
        _cases("var_rows or arg", OPS, ACROSS),
        ("result = div(squares, maximum(sub(count, correction), 0.0))", "result = div(squares, sub(count, correction))"),
        ("NO_PLACE), -1, place)", "NO_PLACE), 0, place)"),
    ),
    *_of(
        "serrate/frontend/ops/reducing.py",
        ("tests/engine/test_levels.py",),
        ("if gone and gone != counts:", "if gone and gone[0] != counts[0]:"),
    ),
    *_of(
        "serrate/frontend/ops/sorting.py",
        _cases("sorted or best", "tests/engine/test_row_by_row.py"),
        ("first = min(counting(x, dim), default=dim)", "first = max(counting(x, dim), default=dim)"),
    ),
    *_of(
        "serrate/frontend/ops/normalise.py",
        _cases("infinities and softmax"),
        (
            "scale = keep(x, add(reciprocal(total), _undefined(largest)), dims, True)",
            "scale = keep(x, reciprocal(total), dims, True)",
        ),
        ("scale = keep(x, add(log(total), _undefined(largest)), dims, True)", "scale = keep(x, log(total), dims, True)"),
    ),
    *_of(
        "serrate/frontend/ops/padding.py",
        ("tests/engine/test_padding.py",),
        (
            'return 0 if repr(number) in ("0", "0.0", "False") else number',
            'return 0 if repr(number) in ("0", "0.0", "-0.0", "False") else number',
        ),
    ),
    *_of(
        "serrate/frontend/ops/levels.py",
        _cases("index or slice or cat", MOVES),
        (
            "return minimum(maximum(position + 1, 0), 1) * minimum(maximum(size - position, 0), 1)",
            "return minimum(maximum(position + 1, 0), 1)",
        ),
        (
            "flat, found[level.dim] = owner, flat - level.offsets[owner]",
            "flat, found[level.dim] = owner, flat",
            ("tests/engine/test_movement_along_every_dim.py",),
        ),
        (
            "flat, found[level.dim] = flat // size, flat % size",
            "flat, found[level.dim] = flat % size, flat // size",
            ("tests/engine/test_movement_along_every_dim.py",),
        ),
    ),
    *_of(
        "serrate/frontend/ops/movement.py",
        _cases("index or slice or cat", MOVES),
        (
            "return position + minimum(maximum(position * -1, 0), 1) * end",
            "return position + maximum(position * -1, 0) * end",
            ("tests/engine/test_movement.py", "tests/engine/test_indices_out_of_range.py"),
        ),
        ('truth("ge", at, size)', 'truth("gt", at, size)', ("tests/engine/test_indices_out_of_range.py",)),
        ("return minimum(const(position), length) if position >= 0", "return const(position) if position >= 0"),
        ("ends = [_total(sizes[: k + 1]) for k in range(len(sizes))]", "ends = [_total(sizes[:k]) for k in range(len(sizes))]"),
    ),
    *_of(
        "serrate/frontend/ops/losses.py",
        _cases("cross_entropy", "tests/engine/test_row_by_row.py"),
        (
            "share = where(counted, cast(index(weight, target), cost.dtype), 0.0)",
            "share = cast(index(weight, target), cost.dtype)",
        ),
    ),
    *_of(
        "serrate/frontend/ops/attention.py",
        _cases("attention_is_torch", *EAGER),
        (
            'seen = call("le", number, place, dtype=torch.bool) if is_causal else None',
            'seen = call("lt", number, place, dtype=torch.bool) if is_causal else None',
        ),
    ),
    *_of(
        "serrate/frontend/trace.py",
        JIT,
        (
            "(kind is float and (value == 0 or value != value))",
            "(kind is float and value != value)",
            ("tests/engine/test_jit.py",),
        ),
        ("place = (id(leaf), version(leaf))", "place = (id(leaf), 0)"),
        (
            "return packed[0] == packed[1] and a.structure.known_equal(b.structure)",
            "return a.structure.known_equal(b.structure)",
            ("tests/engine/test_jit.py",),
        ),
    ),
    *_of(
        "serrate/frontend/ops/random.py",
        RANDOM,
        ("BITS = {torch.bfloat16: 8,", "BITS = {torch.bfloat16: 9,"),
        ("v = uniform(bits, dtype, 2 if wide else 1)", "v = uniform(bits, dtype, 0)"),
        ("if limit <= 2**31:", "if limit <= 2**33:"),
        ("(*domains[:-1], IterDomain(ROOM", "(*domains[:-1], IterDomain(8", ("tests/engine/test_attention_dropout.py",)),
    ),
    *_of(
        "serrate/runtime/seeds.py",
        RANDOM,
        ("return lambda: empty_like(several).random_().unbind()", "return lambda: several.random_()[:1].expand(count).unbind()"),
    ),
    *_of(
        "serrate/ir/philox.py",
        RANDOM,
        ("counter = (block & LOW, (block >> 32) & LOW,", "counter = (block & LOW, zero,"),
        ("picked = (position & 3)", "picked = (position & 1)"),
    ),
    *_of(
        "serrate/codegen/cpp/prelude.h",
        RANDOM,
        ("return (const i32*)to + (first & 3);", "return (const i32*)to;"),
    ),
    *_of(
        "serrate/schedule/weighted_sums.py",
        ("tests/engine/test_attention_dropout.py",),
        ("with_totals(2, parts.scale is not None,", "with_totals(2, False,"),
        (
            "if v not in own and all(d.uid != along.uid for d in domains_in(v)))",
            "if v not in own)",
        ),
    ),
    *_of(
        "serrate/frontend/broadcast.py",
        ("tests/engine/test_operands.py", "tests/engine/test_errors.py"),
        (
            "if chosen.pairing == other.pairing and chosen.length is other.length:",
            "if chosen.pairing == other.pairing:",
            ("tests/engine/test_operands.py",),
        ),
        ('fusion.checks.append(AtLeastLongest(other.extent_expr, chosen, f"{later}: the dense operand"))', "pass"),
        (
            "if any(entangled(chosen, d) for d in result)",
            "if any(chosen.uid == d.uid for d in result)",
            ("tests/engine/test_pairs_of_positions.py",),
        ),
    ),
    *_of(
        "serrate/frontend/python_objects.py",
        ("tests/engine/test_jit.py",),
        (
            "if type(a) is float or type(a) is complex:\n        return repr(a) != repr(b)",
            "if type(a) is complex:\n        return repr(a) != repr(b)",
        ),
    ),
    *_of(
        "serrate/frontend/dependencies.py",
        ("tests/engine/test_jit_redefined.py",),
        ('self._check(f"{expression} is not {known}", path)', "pass"),
    ),
    *_of(
        "serrate/frontend/specialise.py",
        ("tests/engine/test_specialisation.py",),
        ("return size > 1 or place in self._ragged", "return size > 0 or place in self._ragged"),
    ),
    *_of(
        "serrate/frontend/autocast.py",
        ("tests/engine/test_autocast.py",),
        ("eligible = value.dtype.is_floating_point and value.dtype != torch.float64", "eligible = value.dtype.is_floating_point"),
    ),
]

CALLS = [
    *_of(
        "serrate/runtime/dispatch.py",
        JIT,
        ("settings.current().plans, is_batch_invariant(), is", "is_batch_invariant(), is", ("tests/test_calls.py",)),
        ("settings.current().plans, is_batch_invariant(), is", "settings.current().plans, is", INVARIANCE),
        ("[get_num_threads(), is_grad_enabled()", "[is_grad_enabled()", ("tests/language/test_calls.py",)),
        ("key += rows.versions()", "pass"),
        ("own.dtype, own.ndim, structure.form, number(value))", "own.dtype, own.ndim, number(value))", NEW_OFFSETS),
        (
            "own.dtype, own.ndim, structure.form, number(value))",
            "own.ndim, structure.form, number(value))",
            NEW_OFFSETS,
        ),
        ("own.ndim, structure.form, number(value))", "own.ndim, structure.form)", NEW_OFFSETS),
        ("form += (value.dtype, value.ndim)", "form += (value.ndim,)", ("tests/engine/test_jit.py",)),
        ("key += (kind, variant)", "key.append(kind)", ("tests/test_calls.py",)),
        (
            "own.shape == (shape if shown is None else shown) and own.dtype == dtype",
            "own.shape == (shape if shown is None else shown)",
            EAGER,
        ),
        ("own.shape == (shape if shown is None else shown) and", "own.numel() and", EAGER),
        ("\n            apart(pointers)\n", "\n            pass\n", ("tests/language/test_calls.py",)),
        ("\n                apart(pointers)\n", "\n                pass\n", ("tests/language/test_calls.py",)),
        ("if len(bindings) > BINDINGS:", "while len(bindings) >= BINDINGS + 1_000_000:", ("tests/runtime/test_arrays.py",)),
    ),
    *_of(
        "serrate/api/jit.py",
        JIT,
        (
            "key += (torch.get_default_dtype(), autocast.state())",
            "key += (torch.get_default_dtype(),)",
            ("tests/engine/test_autocast.py",),
        ),
        (
            "form += (torch.get_default_dtype(), autocast.state())",
            "form += (torch.get_default_dtype(),)",
            ("tests/engine/test_autocast.py",),
        ),
        ("results[k] = results[k].clone()", "pass"),
        ("while len(self.kinds) > KINDS:", "while len(self.kinds) > KINDS + 1_000_000:", ("tests/engine/test_jit.py",)),
    ),
    *_of(
        "serrate/fusion_stage.py",
        (*JIT, "tests/engine/test_specialisation.py"),
        ("key = (self._number, call.numbers, call.device,", "key = (self._number, call.device,"),
        ("key = (self._number, call.numbers, call.device,", "key = (call.numbers, call.device,"),
        ("modes = (settings.current().plans, is_batch_invariant(), is", "modes = (settings.current().plans, is", INVARIANCE),
        ("        if is_batch_invariant():\n", "        if False:\n", INVARIANCE),
        ("similar_mean(mean, self._means))\n        known: ", "1)\n        known: ", ("tests/schedule/test_heuristic.py",)),
    ),
    *_of(
        "serrate/api/kernel.py",
        INVARIANCE,
        ("if read is not settings.current() or alone is not is_batch_invariant():", "if read is not settings.current():"),
    ),
    *_of(
        "serrate/tiles/signature.py",
        NEW_OFFSETS,
        ("if not structure.fits(values):", "if False:"),
        ("if grad and x.requires_grad:", "if False:"),
        ("if dual and has_tangent(x):", "if False:"),
    ),
    *_of(
        "serrate/tiles/whole_tiles.py",
        DERIVED,
        ("elif isinstance(node, Write) and not node.add:", "elif False:"),
        ("over = self.single or any(lane.symbol in self.own for lane in node.lanes)", "over = True"),
        ("return value.what == wanted and value.top == now.top", "return True or value.top == now.top"),
        ("            elif part in self.sizes:\n", "            elif False:\n"),
    ),
    *_of(
        "serrate/tiles/lift.py",
        DERIVED,
        ("        if test.proven and not ends:\n", "        if test.proven:\n"),
        ("whole = rows is None and not conditions", "whole = rows is None"),
    ),
    *_of(
        "serrate/api/kernel_gradients.py",
        DERIVED,
        ("            if left < 0 or (exact and left > 0):\n", "            if left < 0:\n"),
        (
            "ctx.save_for_backward(*(inputs[k] for k in call.saved))",
            "ctx.save_for_backward(*(inputs[k].clone() for k in call.saved))",
        ),
    ),
    *_of(
        "serrate/tiles/specialise.py",
        INVARIANCE,
        ("self.changing |= named.keys() - form.static - widths(env)", "pass"),
        ("*[number(items) for number in needed])", "*[0 for number in needed])", NEW_OFFSETS),
        ("return all(x.structure.dims == (0,) for x in ragged) and not any(", "return not any(", NEW_ROWS),
        ("and not any(f.needs_lengths() for f in self.forms.values())", "", NEW_ROWS),
        ("return (fixed, *[sizes[k] for k in fixed],", "return (fixed, *[0 for k in fixed],", NEW_OFFSETS),
        ("if is_telling(stage.traced, suspects, stage.environment(items), env):", "if True:", ("tests/language/test_rules.py",)),
    ),
    *_of(
        "serrate/api/eager.py",
        EAGER,
        ("return self.program.fn in ELEMENTWISE", "return True"),
        ("there = tensor.data_ptr() == memory.data_ptr() and tensor.shape", "there = tensor.shape"),
        ("torch.autograd.graph.increment_version(memory)", "pass"),
        ("if not torch.can_cast(result.dtype, out.dtype):", "if not torch.can_cast(out.dtype, result.dtype):"),
    ),
]

TENSOR = [
    *_of(
        "serrate/tensor/structure.py",
        STRUCTURE,
        ("if self._extents is not None and all(rows.unmodified() for rows in self._rows):", "if self._extents is not None:"),
        ("gone += rows.storage_dims - 1", "gone += rows.storage_dims"),
        ("return rows.total(own, why) / room if room else 1.0", "return rows.total(own, why) / room if room else 0.0"),
    ),
    *_of(
        "serrate/tensor/rows.py",
        (*STRUCTURE, "tests/tensor/indexing/test_indexing.py"),
        ("return self._facts.get((name, level)) if self._is_current() else None", "return self._facts.get((name, level))"),
        (
            "self._versions, self._rewritten, self._same = found, True, None",
            "self._versions, self._rewritten = found, True",
        ),
        ("starts = self.starts[start:stop] - first", "starts = self.starts[start:stop]"),
        ("if level < self.depth - 1:", "if level < self.depth:"),
        ("return self._is_current() and not self._rewritten", "return self._is_current()", (*STRUCTURE, *JIT)),
    ),
    *_of(
        "serrate/tensor/checks/validate.py",
        ("tests/tensor/checks/test_validate.py", "tests/tensor/checks/test_deferred.py"),
        ("(extent is not None and end > extent) or (between", "(extent is not None and end > extent + 1) or (between"),
        ("or count * longest > LARGEST[torch.int64]:", "or longest > LARGEST[torch.int64]:"),
        (
            'check_extreme("min_length", self.shortest[level], "shortest", shortest)',
            'check_extreme("min_length", self.shortest[level], "shortest", longest)',
        ),
        (
            "if first or shortest < 0 or (expected is not None and end != expected) or (least and least[0] < 0):",
            "if first or (expected is not None and end != expected) or (least and least[0] < 0):",
        ),
    ),
    *_of(
        "serrate/tensor/checks/agreement.py",
        ("tests/tensor/checks/test_validate.py", *STRUCTURE),
        (
            'within = rows.known("within", 0)\n    if within is not None and within <= count:',
            'within = rows.known("within", 0)\n    if within is not None:',
        ),
    ),
    *_of(
        "serrate/tensor/indexing/slicing.py",
        ("tests/tensor/indexing/test_indexing.py",),
        ("(0, lengths) if forward else (-1, lengths - 1)", "(0, lengths) if forward else (0, lengths - 1)"),
        ("return not (start is not None and start < 0 and stop is not None and stop >= 0)", "return True"),
    ),
    *_of(
        "serrate/tensor/keyed_tensor.py",
        ("tests/tensor/test_keyed_tensor.py",),
        ("if versions != self._versions:", "if not self._versions:"),
        ("order = [own[k] for k in range(len(first)) for own in ranges]", "order = [block for own in ranges for block in own]"),
    ),
]
GATHERS = [
    *_of(
        "serrate/lower/passes/split_selects.py",
        ("tests/lower/test_passes.py", "-k", "concatenated or pooled_rows"),
        ("value.args[1 if known else 2]", "value.args[2 if known else 1]"),
        ("{lane.symbol: short.symbol + begin}", "{lane.symbol: short.symbol}"),
    ),
    *_of(
        "serrate/lower/passes/unswitch.py",
        ("tests/lower/test_passes.py", "-k", "gathered or spoils"),
        ("() if _is_identity(other) else (other,)", "()"),
        ("return constant(value.other, value.dtype) if", "return constant(1, value.dtype) if"),
    ),
]

DISTRIBUTED = [
    *_of(
        "serrate/distributed/layout.py",
        ("tests/distributed/test_layout.py",),
        ("return _runs(starts.T.flatten(), counts.T.flatten())", "return _runs(starts.flatten(), counts.T.flatten())"),
        (
            "for a, n in zip(self.starts.tolist(), self.lengths.tolist(), strict=True) if n)",
            "for a, n in zip(self.starts.tolist(), self.lengths.tolist(), strict=True))",
        ),
        ("first = sum(owned[:rank])", "first = sum(owned[: rank + 1])"),
        ("within = counts.cumsum(1) - counts", "within = counts.cumsum(1)"),
    ),
    *_of(
        "serrate/distributed/convert.py",
        ("tests/distributed/test_convert.py",),
        ("transpose_back(rows, self.exchange)", "transpose_received(rows, self.exchange)"),
        ("return Ranges(self.group, self.dim, self.after, self.before)", "return self", ("tests/distributed/test_tensor.py",)),
    ),
    *_of(
        "serrate/distributed/collectives.py",
        ("tests/distributed/test_convert.py", "-k", "fail"),
        ("if int(row.sum()) != size:", "if int(row.sum()) < size:"),
        ("if mine != theirs:", "if mine > theirs:"),
    ),
    *_of(
        "serrate/distributed/local_ops.py",
        ("tests/distributed/test_tensor.py",),
        ("return all_reduce(func(*local), layout.group)", "return func(*local)"),
        ("layout.with_dim(dim, scaled // rest)", "layout.with_dim(dim)"),
    ),
]

MUTATIONS: tuple[Mutation, ...] = (
    *DISTRIBUTED,
    *(*IR, *ANALYSIS, *SCHEDULE, *LOWER, *GATHERS, *CPP, *OTHER_BACKENDS),
    *(*GPU_CALLS, *GRADIENTS, *RUNTIME, *FRONTEND, *CALLS, *TENSOR),
)
