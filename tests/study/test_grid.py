"""Axes, products and what a study file may return."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdjax.errors import ConfigError
from sdjax.study import Grid, axis, chain, grid, prod, rule, settings
from tests.study.studies import small

_NAMES = st.lists(st.from_regex(r"[a-z][a-z0-9._-]{0,6}", fullmatch=True), min_size=1, max_size=4, unique=True)


@given(_NAMES, _NAMES, _NAMES)
def test_a_product_has_every_combination_once(a, b, c):
    points = prod(axis("a", *a), axis("b", *b), axis("c", *c))
    assert len(points) == len(a) * len(b) * len(c) == len({tuple(point.items()) for point in points})
    assert points == prod(prod(axis("a", *a), axis("b", *b)), axis("c", *c))
    assert chain(points[:1], points[1:]) == points


@pytest.mark.parametrize("values", [(), ("a", "a"), ("a b",), ("../up",), ("",), (1, "1")])
def test_values_that_cannot_name_a_directory_are_refused(values):
    with pytest.raises(ConfigError, match="axis 'x'"):
        axis("x", *values)


def test_an_axis_twice_in_a_product_is_refused():
    with pytest.raises(ConfigError, match="every axis once"):
        prod(axis("a", 1), axis("a", 2))


def test_a_rule_applies_where_all_its_values_are():
    point = {"env": "webshop", "method": "sdar"}
    assert rule({}).applies(point, "sft") and rule({}, env="webshop", kind="train").applies(point, "train")
    assert not rule({}, env="webshop", kind="train").applies(point, "sft")
    assert not rule({}, model="x").applies(point, "train")


def test_paths_have_a_key_for_every_model_and_environment():
    points = prod(axis("model", "qwen3.5-2b", "b"), axis("env", "alfworld"))
    values = settings("s", Grid(points, "x.py"), models={"qwen3.5-2b": "models/a"})
    assert values.models.to_dict() == {"qwen3_5_2b": "models/a", "b": ""} and values.data.to_dict() == {"alfworld": ""}


@pytest.mark.parametrize(
    ("change", "message"),
    [({"seeds": 0}, "0 training seeds"), ({"name": "a b"}, "the study's name"), ({"grid": 3}, "no study file")],
)
def test_settings_out_of_range_are_refused(change, message):
    values = small().to_dict() | change
    with pytest.raises(ConfigError, match=message):
        grid.load(values)


def test_a_run_config_is_no_study():
    with pytest.raises(ConfigError, match="no study file"):
        grid.load({"name": "x", "seed": 0})
