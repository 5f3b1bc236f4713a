"""Damaged manifests, and choosing cells."""

import json

import pytest

from sdjax.errors import ConfigError, DataError
from sdjax.study import manifest
from tests.study.studies import plan, small


@pytest.fixture
def planned(tmp_path):
    return plan(small(), tmp_path)


def test_it_reads_what_was_written(planned, tmp_path):
    assert manifest.read(tmp_path, "small") == planned
    assert (tmp_path / "manifest.json").read_text() == planned.text()


def test_without_a_manifest_the_plan_is_asked_for(tmp_path):
    with pytest.raises(ConfigError, match="--study=plan"):
        manifest.read(tmp_path)


def test_a_manifest_of_another_study_is_refused(planned, tmp_path):
    with pytest.raises(ConfigError, match="belongs to the study 'small'"):
        manifest.read(tmp_path, "large")
    with pytest.raises(ConfigError, match="belongs to the study 'small'"):
        plan(small(name="large"), tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "not whole"),
        (lambda text: "[1, 2]", "not a JSON object"),
        (lambda text: text.replace('"version": 1', '"version": 7'), "version 7"),
        (lambda text: text.replace("sdjax study manifest", "other"), "format 'other'"),
        (lambda text: text.replace('"needs"', '"wants"'), "lacks a key"),
        (lambda text: json.dumps(json.loads(text) | {"entries": 3}), "lacks a key"),
    ],
)
def test_damage_is_named(planned, tmp_path, damage, message):
    path = tmp_path / "manifest.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(DataError, match=message):
        manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ([], [0, 1, 2]),
        (["2", "0"], [0, 2]),
        (["1-2"], [1, 2]),
        (["alfworld-tiny-sdar"], [1]),
        (["*-sdar", "0"], [0, 1]),
        (["alfworld-*"], [0, 1, 2]),
    ],
)
def test_cells_by_number_range_name_and_pattern(planned, wanted, chosen):
    assert [entry.index for entry in manifest.select(planned, wanted)] == chosen
    full = [planned.entries[index].name for index in chosen]
    assert [entry.name for entry in manifest.select(planned, full)] == full


@pytest.mark.parametrize("wanted", ["3", "1-9", "2-1", "alfworld-tiny-sdra", "webshop-*", "-1"])
def test_a_filter_that_names_nothing_is_refused(planned, wanted):
    with pytest.raises(ConfigError, match="none of the 3 runs"):
        manifest.select(planned, [wanted])


def test_a_near_name_is_proposed(planned):
    with pytest.raises(ConfigError, match="did you mean alfworld-tiny-sdar"):
        manifest.select(planned, ["alfworld-tiny-sdra"])
