"""A tiny policy trained end to end on ScienceWorld, WebShop and Search-QA: every kind of context, two steps each."""

import importlib
import math

import pytest

from sdjax.config import load
from sdjax.envs.prompts import PromptTemplate, load_protocol
from sdjax.methods import registry
from sdjax.teacher.prompt import HEADER
from tests.methods.env_runs import ENVIRONMENTS, open_environment, play_run, run_config, write_policy

_science = pytest.mark.scienceworld
EVERYWHERE = [pytest.param(name, marks=_science if name == "scienceworld" else ()) for name in ENVIRONMENTS]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return write_policy(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(scope="module")
def environment():
    """Opens a benchmark once for all runs; returns it with its configuration."""
    opened = {}

    def get(name):
        if name not in opened:
            opened[name] = open_environment(name)
        return opened[name]

    yield get
    for _, benchmark in opened.values():
        benchmark.close()


@pytest.fixture
def trained(policy, environment, tmp_path):
    """Trains; returns the metrics of both steps and the run's directory. All numbers are finite."""

    def train(name, method, *, may_win=True, **settings):
        config, benchmark = environment(name)
        first, *steps = play_run(
            run_config(config, policy, method, **settings), benchmark, tmp_path / "run", may_win=may_win
        )
        assert first["step"] == 0 and [line["step"] for line in steps] == [1, 2]
        for line in (first, *steps):
            assert not [k for k, v in line.items() if isinstance(v, float) and not math.isfinite(v)]
        for line in steps:
            assert line["rollout/failed_episodes"] == line["rollout/retried_episodes"] == 0
            assert line["optim/grad_norm"] > 0 and line["optim/skipped_updates"] == 0
            assert line["engine/logp_gap_abs_max"] < 1e-3
        return steps, tmp_path / "run"

    return train


@pytest.mark.parametrize("name", EVERYWHERE)
def test_grpo_learns_from_wins_and_failures(trained, name):
    steps, _ = trained(name, "grpo")
    assert any(0 < line["train/win_rate"] < 1 for line in steps)
    assert any(line["train/flat_groups_frac"] < 1 and line["train/adv_abs_mean"] > 0 for line in steps)
    assert all(line["rollout/admissible_frac"] > 0.2 for line in steps)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_ocsd_sees_what_followed(trained, name):
    steps, path = trained(name, "ocsd")
    for line in steps:
        assert line["teacher/context_frac"] == 1.0 and line["teacher/scored_frac"] > 0
        assert line["teacher/truncated_frac"] == 0 and line["method/evidence_abs_mean"] > 0
        # Search-QA says nothing after an answer and, by verl-agent's rule, after an invalid turn.
        assert 0 < line["teacher/available_frac"] < 1 if name == "searchqa" else line["teacher/available_frac"] == 1
    full, ablated = ((path / f"teacher_prompt_future_{kind}.txt").read_text() for kind in ("full", "ablated"))
    assert "Observation: not provided" in ablated and "Observation: not provided" not in full


@pytest.mark.parametrize("name", EVERYWHERE)
def test_ovcsd_verifies_continuations_of_restored_states(trained, name):
    steps, path = trained(name, "ovcsd", may_win=False, fallback_depth=2)
    for line in steps:
        assert line["train/win_rate"] == 0 and line["acting/triggered_groups"] == 1
        assert line["acting/verified_groups"] == 1 and line["acting/sites"] >= 1
        assert line["acting/replayed_steps"] > 0 and line["acting/env_steps"] > 0
        assert line["acting/diverged_replays"] == line["acting/failed_continuations"] == 0
        assert line["acting/context_frac"] == 1.0 and line["acting/general_only_frac"] == 0
        assert line["method/contrast_tokens"] > 0
    assert sum(line["acting/suffix_tokens"] for line in steps) > 0
    assert (path / "teacher_prompt_acting.txt").read_text().startswith(HEADER)


@_science
@pytest.mark.parametrize("method", ["fa_sd", "grsd"])
def test_graded_returns_give_siblings_and_guides(trained, method):
    steps, path = trained("scienceworld", method)
    shown = [line for line in steps if line["teacher/available_frac"] > 0]
    assert shown and all(line["teacher/context_frac"] == 1.0 for line in shown)
    (view,) = registry.method_class(method).views
    assert (path / f"teacher_prompt_{view}.txt").read_text()


# (tasks, group, mini-batch rows, c_kl, warm-up share, panel): methods.md, section 3.8, what protocol.toml does not say.
CONSTANTS = {
    "scienceworld": (16, 8, 256, 0.01, 0.0, "panel200"),
    "webshop": (16, 8, 64, 0.01, 0.0, "eval"),
    "searchqa": (64, 8, 256, 0.001, 0.1, "eval_3125"),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
@pytest.mark.parametrize("model", ["smollm2-135m", "qwen3-1.7b"])
@pytest.mark.parametrize("method", registry.names())
def test_the_shipped_configs_have_the_constants_of_their_benchmark(name, model, method):
    values = importlib.import_module(f"experiments.{name}").get_config(f"{method},{model}")
    values.model.path = values.model.path or "given on the command line"
    config = load(values)
    train, protocol = config.train, load_protocol(name)
    found = (train.tasks_per_step, train.group_size, train.minibatch_rows, train.kl_coef, train.warmup_share)
    assert (*found, config.eval.panel) == CONSTANTS[name] and train.entropy_coef == 0.001
    assert config.env.name == config.teacher.bank == name and config.method.name == method
    assert (config.env.turns, config.env.history) == (protocol.turn_limit, protocol.history)
    limits = (config.rollout.prompt_tokens, config.rollout.response_tokens)
    assert limits == (protocol.prompt_tokens, protocol.response_tokens)
    temperatures = (config.rollout.temperature, config.eval.temperature)
    assert temperatures == (protocol.train_temperature, protocol.validation_temperature)
    assert config.teacher.reflection_turns == protocol.turn_limit
    PromptTemplate.load(name, config.env.template)
