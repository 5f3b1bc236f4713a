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
        certain = total = 0
        assert found.keys() == expected.keys()
        np.testing.assert_allclose(found["loss"], expected["loss"], rtol=0, atol=1e-6)
        np.testing.assert_allclose(found["scores"], expected["scores"], rtol=1e-6, atol=3e-6)
        for name, x in expected.items():
            if name.startswith("grads/"):
                np.testing.assert_allclose(found[name], x, rtol=1e-4, atol=1e-6 * scale, err_msg=f"{mesh} {name}")
            if name.startswith("params/"):
                # Adam divides by the size of the gradient: one that is all rounding may move its parameter either way.
                sure = np.abs(expected[name.replace("params/", "grads/")]) > 1e-5 * scale
                apart = np.abs(found[name] - x)
                assert (apart <= np.where(sure, 1e-5, 2 * sharded.LEARNING_RATE)).all(), (mesh, name, apart.max())
                certain, total = certain + sure.sum(), total + sure.size
        assert certain > 0.8 * total


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


@pytest.mark.slow
def test_weights_checkpoints_and_the_reference_lie_where_the_mesh_says(tmp_path):
    sharded.run([str(tmp_path), "placement"])


def mesh_of(data, fsdp, tensor):
    return jax.sharding.AbstractMesh((data, fsdp, tensor), sharding.AXES)


def test_every_parameter_is_divided_by_the_table():
    for family in ("dense", "qwen3_5"):
        model = sharded.make_model(family)
        for axes, leaf in _parameters(model):
            spec = sharding.parameter_spec(mesh_of(1, 8, 4), axes, leaf.shape)
            assert list(spec) == [None if name == "vocab" else sharding.RULES[name] for name in axes]
            if "embed" in axes and len(axes) > 1:
                assert "fsdp" in spec
    embedding = sharding.parameter_spec(mesh_of(1, 2, 2), ("vocab", "embed"), (50, 32))
    assert embedding == jax.sharding.PartitionSpec("tensor", "fsdp")


@pytest.mark.parametrize(
    ("mesh", "named"),
    [
        ((1, 1, 3), ("mesh.tensor = 3", "num_key_value_heads = 4", "intermediate_size = 104", "use mesh.tensor = 1")),
        ((1, 1, 8), ("mesh.tensor = 8", "num_attention_heads = 12", "num_key_value_heads = 4", "use mesh.tensor = 4")),
        ((1, 3, 1), ("mesh.fsdp = 3", "hidden_size = 32", "use mesh.fsdp = 1")),
        ((1, 64, 1), ("mesh.fsdp = 64", "hidden_size = 32", "use mesh.fsdp = 32")),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_is_refused_with_the_fix(mesh, named):
    with pytest.raises(ConfigError) as error:
        sharding.check_divides(mesh_of(*mesh), sharded.make_model("dense").axis_sizes())
    for text in named:
        assert text in str(error.value), str(error.value)


def test_heads_of_linear_attention_are_checked_too():
    sizes = sharded.make_model("qwen3_5").axis_sizes()
    sharding.check_divides(mesh_of(2, 8, 4), sizes)
    with pytest.raises(ConfigError, match="linear_num_key_heads = 4"):
        sharding.check_divides(mesh_of(1, 1, 12), sizes)


def test_too_many_devices_are_refused_and_idle_ones_are_named(monkeypatch):
    with pytest.raises(ConfigError, match=r"the mesh 1 x 4096 x 2 needs 8192 devices"):
        sharding.make_mesh(1, 4096, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharding.make_mesh(1, 1, len(jax.devices()))
    devices = jax.devices()[:1] * 2
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.warns(UserWarning, match=r"uses 1 of 2 devices.*mesh\.fsdp"):
        sharding.make_mesh(1, 1, 1)


def test_unknown_rematerialisation_is_refused():
    with pytest.raises(ConfigError, match="'some'"):
        sharding.checkpoint_layer(lambda x: x, None, remat="some")
