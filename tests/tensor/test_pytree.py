"""JaggedTensor in torch's trees: values are the leaf, the structure stays beside it.

In: trees that hold ragged tensors. Out: failures where a tree loses a structure or takes values that do not fit.
"""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_map, tree_map_with_path, tree_unflatten
from torch.utils.checkpoint import checkpoint

from serrate.errors import ShapeError
from serrate.tensor import JaggedTensor, keyed
from tests.tensor.compositions import Sample, samples


def example() -> JaggedTensor:
    return JaggedTensor.from_lengths(torch.arange(3.0), [1, 2]).with_hint(reuse="low")


def test_values_are_the_only_leaf() -> None:
    jt = example()
    leaves, spec = tree_flatten({"x": jt, "y": 1})
    assert leaves[0] is jt.values and leaves[1:] == [1]
    again = tree_unflatten(leaves, spec)["x"]
    assert again.structure is jt.structure and again.hints == jt.hints


def test_paths_name_the_values() -> None:
    seen = []
    doubled = tree_map_with_path(lambda path, leaf: (seen.append(keystr(path)), leaf * 2)[1], {"x": example()})
    assert seen == ["['x'].values"] and doubled["x"].values.tolist() == [0, 2, 4]
    (path, _), *_ = tree_flatten_with_path(keyed({"a": [[1], [2]]}))[0]
    assert keystr(path) == ".flat.values"


def test_specs_of_equal_structures_are_equal() -> None:
    assert tree_flatten(example())[1] == tree_flatten(example())[1]
    other = JaggedTensor.from_lengths(torch.arange(3.0), [2, 1]).with_hint(reuse="low")
    assert tree_flatten(example())[1] != tree_flatten(other)[1]


def test_maps_keep_the_structure_and_follow_the_device() -> None:
    assert tree_map(lambda values: values * 2, example()).to_list()[1].tolist() == [2, 4]
    assert tree_map(lambda values: values.to("meta"), example()).offsets.device.type == "meta"
    assert tree_map(lambda values: values.dtype, example()).values is torch.float32


def test_values_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match="the rows hold 3 positions together"):
        tree_map(lambda values: values[:2], example())


def test_pickles() -> None:
    jt = pickle.loads(pickle.dumps(example()))
    assert [row.tolist() for row in jt] == [[0], [1, 2]]
    assert jt.hints.reuse == "low"


@given(samples())
def test_every_composition_goes_through_a_map(sample: Sample) -> None:
    leaves, spec = tree_flatten({"x": [sample.jt]})
    assert len(leaves) == 1 and leaves[0] is sample.jt.values
    again = tree_unflatten(leaves, spec)["x"][0]
    assert again.structure is sample.jt.structure and again.tolist() == sample.rows


def test_checkpoints_compute_again_what_they_did_not_keep() -> None:
    jt = JaggedTensor.from_lengths(torch.arange(3.0), [1, 2]).requires_grad_()
    out = checkpoint(lambda jt: jt.with_values(jt.values.sin()), jt, use_reentrant=False)
    out.values.sum().backward()
    assert jt.values.grad is not None and torch.allclose(jt.values.grad, jt.values.cos())
