"""The plan of the whole study: which cells, which settings, and what a second plan may change."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from experiments import mini_study, smoke_study
from experiments import study as full_study
from sdjax import config as config_lib
from sdjax.errors import ConfigError, RunDirError
from sdjax.study import Grid, rule
from tests.study.studies import METHODS, path_of, plan, small, write_progress

ROOT = Path(__file__).parents[2]
# methods.md, section 3.8: turns, prompt tokens, tasks, mini-batch rows, KL, warm-up share, validation T, panel.
_SETTINGS = {
    "alfworld": (50, 2048, 16, 256, 0.01, 0.0, 0.4, "valid_seen"),
    "scienceworld": (30, 4096, 16, 256, 0.01, 0.0, 0.4, "panel200"),
    "webshop": (15, 4096, 16, 64, 0.01, 0.0, 0.4, "eval"),
    "searchqa": (4, 4096, 64, 256, 0.001, 0.1, 0.0, "eval_3125"),
}


@pytest.fixture(scope="module", autouse=True)
def in_repository():
    before = Path.cwd()
    os.chdir(ROOT)
    yield
    os.chdir(before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("study")
    values = full_study.get_config()
    values.models.qwen3_5_4b = "/models/four"
    values.data.webshop = "/data/shop"
    return plan(values, workdir), workdir


def _config(whole, cell):
    manifest, workdir = whole
    entry = next(entry for entry in manifest.entries if entry.cell == cell)
    return json.loads((workdir / entry.config_file).read_text()), entry


def test_it_has_132_cells_each_once(whole):
    manifest, workdir = whole
    assert len(manifest.entries) == 132 == len({entry.name for entry in manifest.entries})
    assert len({entry.config_sha256 for entry in manifest.entries}) == len({e.workdir for e in manifest.entries}) == 132
    assert [entry.index for entry in manifest.entries] == list(range(132))
    assert set(Counter(entry.axes["method"] for entry in manifest.entries).values()) == {12}
    assert len(list((workdir / "configs").iterdir())) == 132
    assert all(entry.kind == "train" and entry.devices == 8 and not entry.needs for entry in manifest.entries)


def test_hashes_and_names_are_those_of_the_resolved_configs(whole):
    manifest, workdir = whole
    for entry in manifest.entries[::7]:
        plain = json.loads((workdir / entry.config_file).read_text())
        assert config_lib.fingerprint(plain) == entry.config_sha256
        assert entry.name == f"{entry.cell}-{entry.config_sha256[:8]}" and entry.workdir.endswith(entry.name)


@pytest.mark.parametrize("env", _SETTINGS)
def test_cells_have_the_settings_of_the_study(whole, env):
    config, entry = _config(whole, f"{env}-qwen3.5-9b-pcsd")
    train, rollout, evaluation = config["train"], config["rollout"], config["eval"]
    found = (
        *(config["env"]["turns"], rollout["prompt_tokens"], train["tasks_per_step"], train["minibatch_rows"]),
        *(train["kl_coef"], train["warmup_share"], evaluation["temperature"], evaluation["panel"]),
    )
    assert found == _SETTINGS[env]
    assert (train["steps"], train["group_size"], rollout["response_tokens"], train["learning_rate"]) == (
        100,
        8,
        512,
        1e-6,
    )
    assert (train["entropy_coef"], train["dual_clip"], rollout["temperature"]) == (0.001, 3.0, 1.0)
    assert (evaluation["every"], evaluation["final_seeds"], evaluation["final_temperature"]) == (5, 8, 0.4)
    assert config["method"]["name"] == "pcsd" and config["env"]["name"] == env and config["mesh"]["fsdp"] == 8
    assert config["model"]["name"] == entry.axes["model"] == "qwen3.5-9b" and config["teacher"]["bank"] == env


def test_paths_come_from_the_settings(whole):
    config, entry = _config(whole, "webshop-qwen3.5-4b-grpo")
    assert (config["model"]["path"], config["env"]["data"]) == ("/models/four", "/data/shop")
    assert "--config.model.path=/models/four" in entry.command
    assert _config(whole, "alfworld-qwen3.5-2b-grpo")[0]["model"]["path"] == "models/Qwen3.5-2B"


def test_the_command_makes_the_planned_config(whole):
    """In a process of its own, as a launcher would start it; the model is missing, so that it ends there."""
    _, entry = _config(whole, "searchqa-qwen3.5-2b-sdar")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    program = (
        "import sys; from sdjax import main; from absl import app; from sdjax.config import *;"
        "app.run(lambda _: print(fingerprint(resolved(load(main._CONFIG.value)))), flags_parser=main._parse_flags)"
    )
    command = [sys.executable, "-c", program, *entry.command[3:]]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == entry.config_sha256, done.stderr
    assert entry.command[:3] == ("python", "-m", "sdjax.main") and "--mode=train" in entry.command
    assert entry.eval is not None and [*entry.eval] == [a.replace("=train", "=eval") for a in entry.command]


def test_planning_twice_gives_the_same_bytes(tmp_path):
    contents = []
    for _ in range(2):
        plan(small(), tmp_path)
        contents.append({path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*.json")})
    assert contents[0] == contents[1] and len(contents[0]) == 1 + len(METHODS)


def test_seeds_and_overrides_multiply_and_change_every_cell(tmp_path):
    manifest = plan(small(seeds=3, overrides="train.steps=7 eval.every=3"), tmp_path)
    assert [entry.cell for entry in manifest.entries[:3]] == [
        f"alfworld-tiny-grpo{s}" for s in ("", "-seed1", "-seed2")
    ]
    configs = [json.loads((tmp_path / entry.config_file).read_text()) for entry in manifest.entries]
    assert [config["seed"] for config in configs] == [0, 1, 2] * 3
    assert all(config["train"]["steps"] == 7 and config["eval"]["every"] == 3 for config in configs)


def test_cells_of_an_environment_share_their_warm_start(tmp_path):
    manifest = plan(mini_study.get_config(), tmp_path)
    warm = [entry for entry in manifest.entries if entry.kind == "sft"]
    trained = [entry for entry in manifest.entries if entry.kind == "train"]
    assert len(warm) == 4 and len(trained) == 44 and manifest.entries[:4] == tuple(warm)
    assert all("--mode=sft" in entry.command and entry.eval is None for entry in warm)
    for entry in trained:
        (need,) = entry.needs
        start = manifest.entry(need)
        assert start.axes["env"] == entry.axes["env"]
        config = json.loads((tmp_path / entry.config_file).read_text())
        assert config["model"]["path"] == f"{start.workdir}/model" and config["model"]["name"] == "smollm2-135m"
        assert (config["train"]["tasks_per_step"], config["train"]["group_size"]) == (16, 8)
        assert (config["eval"]["every"], config["eval"]["final_seeds"], config["mesh"]["fsdp"]) == (5, 8, 1)


def test_the_mini_study_takes_official_panels_with_official_data(tmp_path):
    manifest = plan(mini_study.get_config("all13,official"), tmp_path)
    panels = {
        entry.axes["env"]: json.loads((tmp_path / entry.config_file).read_text())["eval"]["panel"]
        for entry in manifest.entries
    }
    assert len(manifest.entries) == 56 and panels == {env: values[-1] for env, values in _SETTINGS.items()}


def test_the_smoke_study_has_thirteen_methods_in_four_environments(tmp_path):
    manifest = plan(smoke_study.get_config(), tmp_path)
    assert Counter(entry.kind for entry in manifest.entries) == {"sft": 4, "train": 52}
    assert {entry.axes["method"] for entry in manifest.entries if entry.kind == "train"} >= {"grsd", "fa_sd"}


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (lambda: small("grpo", "sdra"), r"cell env=alfworld, model=tiny, method=sdra.*did you mean 'sdar'"),
        (lambda: small(rules=[rule({"train.lerning_rate": 1}, method="sdar")]), r"method=sdar.*lerning_rate"),
        (lambda: small(rules=[rule({"train.steps": "many"})]), r"method=grpo.*train.steps=many"),
        (lambda: small(overrides="train.steps"), "has no '='"),
        (lambda: small(rules=[rule({"rollout.max_length": 9})]), r"method=grpo.*set rollout.max_length"),
    ],
)
def test_a_cell_that_does_not_load_is_named(values, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        plan(values(), tmp_path)
    assert not (tmp_path / "manifest.json").exists()


def test_a_config_file_that_is_missing_or_broken_is_named(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("def get_config(_=''):\n    return 1 / 0\n")
    for path, message in ((broken, "ZeroDivisionError"), (tmp_path / "none.py", "none.py")):
        values = small()
        values.grid = Grid(values.grid.points, str(path))
        with pytest.raises(ConfigError, match=rf"method=grpo.*{message}"):
            plan(values, tmp_path / "study")


def test_an_axis_that_the_config_asks_for_must_exist(tmp_path):
    values = small()
    values.grid = Grid(values.grid.points, "x.py:{size}")
    with pytest.raises(ConfigError, match="asks for an axis that the grid lacks"):
        plan(values, tmp_path)


def test_the_same_cell_twice_is_refused(tmp_path):
    values = small()
    points = values.grid.points
    values.grid = Grid(points + points[:1], values.grid.config)
    with pytest.raises(ConfigError, match="more than once: alfworld-tiny-grpo"):
        plan(values, tmp_path)
    values.grid = Grid(values.grid.points, values.grid.config.replace("{method}", "grpo"))
    with pytest.raises(ConfigError, match="more than once"):
        plan(values, tmp_path)


def test_a_changed_config_replaces_what_was_not_started_and_refuses_what_was(tmp_path):
    first = plan(small(), tmp_path)
    second = plan(small(overrides="train.steps=3"), tmp_path)
    assert [entry.cell for entry in first.entries] == [entry.cell for entry in second.entries]
    assert not {entry.name for entry in first.entries} & {entry.name for entry in second.entries}
    path = write_progress(second, tmp_path, second.entries[1], 1)
    before = (tmp_path / "manifest.json").read_bytes()
    with pytest.raises(RunDirError, match=r"alfworld-tiny-sdar already has results(.|\n)*train.steps: 3 -> 2"):
        plan(small(), tmp_path)
    assert (tmp_path / "manifest.json").read_bytes() == before
    again = plan(small(overrides="train.steps=3"), tmp_path)
    assert [entry.name for entry in again.entries] == [entry.name for entry in second.entries]
    without = plan(small("grpo", "rlsd"), tmp_path)  # that cell is gone, its run stays
    assert [entry.name for entry in without.entries] == [first.entries[0].name, first.entries[2].name]
    assert path_of(second, second.entries[1]) == path and path.exists()
