"""Bad configurations fail at load with key, value, near match and fix."""

import dataclasses
import json
import re
import runpy
from pathlib import Path

import pytest

from sdjax import config as config_lib
from sdjax.errors import ConfigError
from sdjax.methods import registry
from sdjax.methods.base import Method

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def changed(method="sdar", **changes):
    values = config_lib.defaults(method)
    values.model.path, values.teacher.bank = "somewhere", "alfworld"
    values.train.pack_length = 8192
    plain = values.to_dict()
    for path, value in changes.items():
        node = plain
        *parents, leaf = path.split("__")
        for parent in parents:
            node = node[parent]
        node[leaf] = value
    return plain


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__lerning_rate": 1}, r"unknown key 'train.lerning_rate' \(value 1\).*did you mean 'learning_rate'"),
        ({"rolout": {}}, r"unknown key 'rolout'.*did you mean 'rollout'"),
        ({"method__bata": 1.0}, r"unknown key 'method.bata'.*did you mean 'beta'"),
        ({"method__name": "sdra"}, r"'sdra' is not known.*did you mean 'sdar'"),
        ({"train__steps": "ten"}, r"train.steps = 'ten' is a str.*type int"),
        ({"train__steps": True}, r"train.steps = True is a bool"),
        ({"train__steps": 1.5}, r"train.steps = 1.5 is a float"),
        ({"train__agg": "mini"}, r"train.agg = 'mini' is not one of 'minibatch', 'micro'"),
        ({"train": 3}, r"train = 3 is not a group of keys"),
        ({"env__generator__rooms": "kitchen"}, r"env.generator.rooms = 'kitchen' is not a list"),
        ({"rollout__temperature": 0.0}, r"rollout.temperature = 0.0: training needs samples"),
        ({"rollout__max_length": 100}, r"rollout.max_length = 100 holds no prompt of 2048"),
        ({"train__pack_length": 2048}, r"pack_length = 2048 is shorter than the longest row, 2560 tokens"),
        ({"train__loss_slots": 8}, r"train.loss_slots = 8 is below rollout.response_tokens = 512"),
        ({"teacher__bank": ""}, r"'sdar' reads a skill bank, but teacher.bank is empty"),
        ({"mesh__data": 3}, r"train.pack_rows = 4 does not divide"),
        ({"model__path": ""}, r"model.path is empty"),
        ({"train__group_size": 0}, r"train.group_size = 0 is too small"),
    ],
)
def test_bad_values_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        config_lib.load(changed(**changes))


def test_integers_become_floats_and_lists_tuples():
    config = config_lib.load(changed(train__kl_coef=0, env__generator__rooms=["kitchen"]))
    assert config.train.kl_coef == 0.0 and isinstance(config.train.kl_coef, float)
    assert config.env.generator.rooms == ("kitchen",)


def test_resolved_round_trip_and_fingerprint():
    config = config_lib.load(changed())
    plain = json.loads(json.dumps(config_lib.resolved(config)))
    again = config_lib.load(plain)
    assert again == config
    other = config_lib.resolved(dataclasses.replace(config, seed=1))
    assert config_lib.fingerprint(plain) == config_lib.fingerprint(config_lib.resolved(again))
    assert config_lib.fingerprint(plain) != config_lib.fingerprint(other)
    assert config_lib.difference(plain, other) == ["seed: 0 -> 1"]


@pytest.mark.parametrize("name", registry.names())
def test_every_method_has_a_default_config_that_loads(name):
    assert config_lib.load(changed(name)).method.build().name == name


@pytest.mark.parametrize(
    ("file", "arguments"),
    [("quickstart.py", "grpo"), ("quickstart.py", "sdar"), ("quickstart.py", "warm_start"), ("alfworld.py", "sdar")],
)
def test_shipped_configs_load(file, arguments):
    config = config_lib.load(runpy.run_path(str(EXPERIMENTS / file))["get_config"](arguments))
    assert re.search(arguments.partition(",")[0], config.name)


def test_a_duplicate_method_name_raises():
    with pytest.raises(ConfigError, match="two methods are called 'grpo'"):
        registry.register(type("Other", (Method,), {"name": "grpo"}))
