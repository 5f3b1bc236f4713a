"""Division over a mesh: rules, equality with one device, and what the programs send between devices."""

import warnings

import jax
import numpy as np
import pytest

from sdjax import sharding
from sdjax.errors import ConfigError
from tests.train import sharded

MESHES = ("1,8,1", "1,4,2", "1,2,4", "2,2,2")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["dense", "qwen3_5"])
def test_every_mesh_computes_the_step_of_one_device(family, tmp_path):
    sharded.run([str(tmp_path), family, "1,1,1", *MESHES])
    expected = dict(np.load(tmp_path / "1,1,1.npz"))
    scale = max(np.abs(x).max() for name, x in expected.items() if name.startswith("grads/"))
    for mesh in MESHES:
        found = dict(np.load(tmp_path / f"{mesh}.npz"))
        assert found.keys() == expected.keys()
        np.testing.assert_allclose(found["loss"], expected["loss"], rtol=0, atol=1e-6)
        np.testing.assert_allclose(found["scores"], expected["scores"], rtol=3e-6, atol=1e-6)
        for name, x in expected.items():
            if name.startswith("grads/"):
                np.testing.assert_allclose(found[name], x, rtol=1e-4, atol=1e-6 * scale, err_msg=f"{mesh} {name}")
            if name.startswith("params/"):
                np.testing.assert_allclose(found[name], x, rtol=0, atol=1e-5, err_msg=f"{mesh} {name}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh", "remat"),
    [
        ("dense", (1, 8, 1), "full"),
        ("dense", (1, 4, 2), "none"),
        ("qwen3_5", (1, 8, 1), "dots"),
        ("qwen3_5", (1, 4, 2), "full"),
    ],
)
def test_only_one_layers_weights_in_the_compute_dtype_are_ever_gathered(family, mesh, remat, tmp_path):
    name = ",".join(map(str, mesh))
    dump = f"--xla_dump_to={tmp_path} --xla_dump_hlo_module_re=.*gradient.* --xla_dump_hlo_pass_re=spmd.*"
    sharded.run([str(tmp_path), family, "compile", name, remat], flags=dump)
    # The program right after its division: later passes of the CPU compute bfloat16 in float32.
    programs = [path for path in tmp_path.glob("*after_spmd-partitioning*") if "gradient" in path.name]
    assert len(programs) == 1, sorted(path.name for path in tmp_path.iterdir())
    gathered = [x for x in sharded.collectives(programs[0].read_text()) if x[0] == "all-gather"]

    model, parts = sharded.make_model(family), {"fsdp": 1, "tensor": mesh[2]}
    layers, forbidden = set(), set()
    for axes, leaf in _parameters(model):
        whole = leaf.shape
        if len(whole) == 1:
            continue
        divided = tuple(n // parts.get(sharding.RULES[axis] or "", 1) for axis, n in zip(axes, whole))
        forbidden |= {whole, divided}
        if axes[0] == "layers" and len(whole) == 3 and "embed" in axes:
            layers.add(divided[1:])
            forbidden |= {whole[1:]} - {divided[1:]}
    shapes = {shape for _, _, shape in gathered}
    assert not shapes & forbidden, shapes & forbidden
    weights = {(kind, shape) for _, kind, shape in gathered if shape in layers}
    assert weights == {("bf16", shape) for shape in layers}
    largest = max(int(np.prod(shape)) for shape in layers)
    # Beside them the head collects the states of all loss tokens.
    states = (sharded.TRAIN.pack_rows * sharded.TRAIN.loss_slots, model.config.hidden_size)
    assert all(np.prod(shape) <= largest for shape in shapes - {states}), shapes


def _parameters(model):
    is_axes = lambda x: isinstance(x, tuple)  # noqa: E731
    axes = jax.tree.leaves(model.logical_axes(), is_leaf=is_axes)
    return zip(axes, jax.tree.leaves(model.shapes()), strict=True)


def test_the_reader_of_programs_finds_what_it_must():
    program = """
      %a = bf16[32,88]{1,0} all-gather(%x), channel_id=1
      %b = (f32[4,8]{1,0}, f32[32,8]{1,0}) all-gather-start(%x)
      %c = (f32[], f32[3]{0}) all-reduce(%x, %y), metadata={op_name="f32[9,9] all-gather("}
      %d = f32[2,2]{1,0} add(%a, %b)
    """
    assert sharded.collectives(program) == [
        ("all-gather", "bf16", (32, 88)), ("all-gather", "f32", (4, 8)), ("all-gather", "f32", (32, 8)),
        ("all-reduce", "f32", ()), ("all-reduce", "f32", (3,)),
    ]  # fmt: skip
