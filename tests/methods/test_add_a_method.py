"""Adding a method takes one file and one line of config: a toy method trains without any change elsewhere."""

import importlib
import sys

import pytest

import sdjax.methods
from sdjax import jsonl
from sdjax.methods import registry
from tests.methods.lucky import lucky_config, make_lucky
from tests.train.tiny_run import run

TOY = '''
"""Pulls towards the teacher where it is surer than the student, and halves all advantages."""

from dataclasses import dataclass

import jax.numpy as jnp

from sdjax import losses
from sdjax.methods.base import Advantages, Coefficients, Method
from sdjax.methods.registry import register


@register
class Toy(Method):
    name = "toy"
    views = ("skills",)
    weight_name = "surer"

    @dataclass(frozen=True)
    class Config(Method.Config):
        share: float = 0.5

    def coefficients(self, step, total_steps):
        return Coefficients(auxiliary=0.1 * step)

    def advantages(self, batch, step, total_steps):
        plain = super().advantages(batch, step, total_steps)
        return Advantages(self.config.share * plain.adv_NL, {"share": self.config.share})

    def auxiliary(self, student, fields, mask):
        weight = self.token_weight(student, fields, mask)
        return losses.masked.token_sum(-weight * student, mask, {"surer": weight})

    def token_weight(self, student, fields, mask):
        return jnp.where(mask & (fields["skills"] > student), 1.0, 0.0)
'''


@pytest.fixture
def toy_file(tmp_path, monkeypatch):
    """Puts the file where method files are found, and takes it away again."""
    folder = tmp_path / "methods"
    folder.mkdir()
    (folder / "toy.py").write_text(TOY)
    monkeypatch.setattr(sdjax.methods, "__path__", [*sdjax.methods.__path__, str(folder)])
    importlib.invalidate_caches()
    yield
    sys.modules.pop("sdjax.methods.toy", None)
    vars(sdjax.methods).pop("toy", None)
    registry._METHODS.pop("toy", None)


def test_one_file_and_one_line_of_config_make_a_method(toy_file, tiny_model, tmp_path, monkeypatch):
    assert "toy" in registry.names()
    make_lucky(monkeypatch)
    run(lucky_config(tiny_model, "toy"), tmp_path / "run")
    first, second = jsonl.read(tmp_path / "run" / "metrics.jsonl")[1:]
    for line in (first, second):
        assert line["method/share"] == 0.5 and 0 < line["method/surer_mean"] < 1
        assert line["train/loss_auxiliary"] > 0 and line["teacher/context_frac"] == 1.0
    assert (tmp_path / "run" / "teacher_prompt_skills.txt").exists()
