"""Which kernels a session computes with."""

import jax
import pytest

from sdjax.config import ModelConfig
from sdjax.errors import ConfigError
from sdjax.models.config import ModelConfig as Shape
from sdjax.models.dense import DenseModel
from sdjax.models.qwen3_5 import Qwen35Model
from sdjax.train.session import with_kernels
from tests.models.test_qwen3_5 import BASE

DENSE = DenseModel(
    Shape(
        model_type="llama", vocab_size=8, hidden_size=4, intermediate_size=4, layers=1, heads=1, kv_heads=1, head_dim=4,
        max_positions=8, tie_embeddings=True,
    )
)  # fmt: skip


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what happens without an accelerator")
def test_on_a_cpu_auto_is_xla_and_kernels_are_refused():
    model = with_kernels(Qwen35Model(BASE), ModelConfig())
    assert (model.attention, model.delta_rule, model.scan_layers) == ("xla", "xla", True)
    for wrong in (ModelConfig(delta_rule="pallas"), ModelConfig(attention="cudnn", compute_dtype="bfloat16")):
        with pytest.raises(ConfigError, match="but the backend is cpu"):
            with_kernels(Qwen35Model(BASE), wrong)


def test_what_was_asked_for_is_taken():
    config = ModelConfig(delta_rule="xla_associative", scan_layers=False)
    model = with_kernels(Qwen35Model(BASE), config)
    assert (model.delta_rule, model.scan_layers) == ("xla_associative", False)


def test_a_dense_model_has_no_delta_rule():
    assert with_kernels(DENSE, ModelConfig(scan_layers=False)).scan_layers is False
    with pytest.raises(ConfigError, match="a llama model has no such layers"):
        with_kernels(DENSE, ModelConfig(delta_rule="xla"))
