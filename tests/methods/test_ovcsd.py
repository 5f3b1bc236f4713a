"""OVCSD from the trigger to the update: contrast rows, suffix rows, and whole runs in which the teacher wins."""

import contextvars
import dataclasses
import functools
import json
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdjax import jsonl, losses, sharding
from sdjax.config import defaults, load
from sdjax.envs.alfworld.adapter import AlfworldBenchmark
from sdjax.envs.prompts import load_protocol
from sdjax.errors import ConfigError
from sdjax.methods import registry
from sdjax.methods.base import Coefficients, SiteRows
from sdjax.rollout.engine import Completion
from sdjax.teacher.prompt import HEADER
from sdjax.train import trainer
from sdjax.train.acting import ActingTeacher
from sdjax.train.optimize import Optimizer, SuffixRows, minibatches
from sdjax.train.packing import Sequences
from sdjax.train.rows import Row, append_rows, make_batch, make_rows
from sdjax.train.update import Updater
from tests.methods.corridor import STUDENTS, Script, make_group, make_player, oracle
from tests.train.test_update import COEFFICIENTS, TRAIN, VOCAB, N, assert_same, make_data, make_model
from tests.train.tiny_run import run, tiny_config

S, K = 5, 4


# --- the method -----------------------------------------------------------------------------------------------------


def small_batch(returns, success=None):
    """Two rows for each trajectory, two trajectories for each group."""
    batch, _, _ = make_data()
    n = 2 * len(returns)
    ret = np.repeat(np.asarray(returns, np.float32), 2)
    won = ret > 0 if success is None else np.repeat(success, 2)
    arrays = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name[-2:] in ("_N", "NL")}
    rows = {name: x[:n] for name, x in arrays.items() if x is not None}
    rows |= {"return_N": ret, "success_N": won, "views": {}}
    return dataclasses.replace(batch, **rows)


@pytest.mark.parametrize(
    ("environment", "returns", "success", "groups"),
    [
        ("alfworld", [0, 0, 0, 10], None, {0}),
        ("alfworld", [0, 0, 10, 10], None, {0}),
        ("alfworld", [0, 10, 10, 0], None, set()),
        ("alfworld", [3, 3, 0, 4], [False] * 4, {0}),
        ("scienceworld", [3, 3, 0, 4], [False] * 4, {0, 1}),  # graded returns: only successes count
        ("scienceworld", [3, 3, 0, 10], [False, False, False, True], {0}),
    ],
)
def test_groups_without_success_and_spread_are_triggered(environment, returns, success, groups):
    method = registry.make("ovcsd", environment)
    batch = small_batch(returns, success)
    triggered_N = method.triggered(batch)
    assert set(batch.group_N[triggered_N]) == groups
    assert all(triggered_N[batch.group_N == g].all() for g in groups)


def test_a_run_without_a_skill_bank_is_refused():
    config = defaults("ovcsd")
    config.model.path, config.teacher.bank = "x", ""
    with pytest.raises(ConfigError, match=r"'ovcsd' reads a skill bank, but teacher.bank is empty"):
        load(config)


def test_contrast_replaces_the_advantages_of_triggered_groups_only():
    method = registry.make("ovcsd")
    batch = small_batch([0, 0, 0, 10])
    n = len(batch.ok_N)
    plain = registry.make("grpo").advantages(batch, 1, 10).adv_NL
    np.testing.assert_array_equal(method.advantages(batch, 1, 10).adv_NL, plain)
    site_N = np.array([0, -1, 0, -1, -1, -1, -1, 0])
    teacher_N = np.arange(n) == 7
    first_NL = batch.mask_NL & (np.arange(batch.mask_NL.shape[1]) == 0)
    sites = SiteRows(site_N, teacher_N, first_NL, np.isin(np.arange(n), [0, 1, 2, 3, 7]), batch.group_N)
    got = method.advantages(dataclasses.replace(batch, sites=sites), 1, 10).adv_NL
    np.testing.assert_allclose(got[[0, 2, 7], 0], [-1 / np.sqrt(2), -1 / np.sqrt(2), np.sqrt(2)], rtol=1e-6)
    assert got[:, 0][site_N == 0].sum() == pytest.approx(0, abs=1e-6)
    assert not got[[1, 3]].any() and not got[[0, 2, 7], 1:].any()
    np.testing.assert_array_equal(got[4:7], plain[4:7])


# --- rows and order -------------------------------------------------------------------------------------------------


def extended(**keys):
    """A group of failures in a corridor whose teacher wins in five turns; returns the students' rows and the extension.

    The students of trajectories 7 and 8 leave the teacher's way at turn 1, that of 9 at turn 2, that of 10 at turn 0.
    """
    win = ["a", "b", "c", "d", "e"]
    player = make_player(Script([[*s, "x", "x"] for s in STUDENTS], lambda sample, turn: win[turn]), turns=6)
    player.benchmark.win = win
    trajectories = make_group(player, 4)
    rows = make_rows(trajectories)
    config = defaults("ovcsd", **keys)
    config.model.path, config.teacher.bank = "x", "alfworld_brief"
    config.rollout.prompt_tokens, config.rollout.max_length, config.train.pack_length = 10_000, 10_600, 10_600
    config = load(config)
    protocol = load_protocol("alfworld")
    session = SimpleNamespace(config=config, player=player, tokenizer=player.tokenizer, protocol=protocol)
    batch = make_batch(rows, protocol, 80, config.train)
    return rows, ActingTeacher(config.method.build(), session).extend(trajectories, rows, batch)


def test_sites_and_suffix_of_a_branch():
    rows, out = extended()
    n, sites, names = len(rows), out.batch.sites, [(r.trajectory.assignment.trajectory, r.index) for r in out.rows]
    assert [names[i] for i in np.flatnonzero(sites.site_N == 0)] == [(7, 1), (8, 1), (11, 1)]
    assert [names[i] for i in np.flatnonzero(sites.site_N == 1)] == [(9, 2), (12, 2)]
    assert (
        np.flatnonzero(sites.teacher_N).tolist()
        == [n, n + 1]
        == np.flatnonzero(sites.home_N != out.batch.group_N).tolist()
    )
    assert sites.triggered_N.sum() == n + 2 == len(out.rows)
    action = len("<action>b</action>")
    assert set(sites.action_NL[sites.site_N >= 0].sum(axis=1)) == {action}
    np.testing.assert_array_equal(out.rows[n].turn.prompt, out.rows[names.index((7, 1))].turn.prompt)
    # Turns 2 to 4 follow the first site, turns 3 and 4 the second as well.
    first, second = 1 / (2 * 3 * action), 1 / (2 * 2 * action)
    np.testing.assert_allclose(out.suffix.weight_SL.max(axis=1), [first, first + second, first + second], rtol=1e-6)
    assert (out.suffix.weight_SL > 0).sum() == 3 * action and out.suffix.weight_SL.sum() == pytest.approx(1)
    assert out.metrics["acting/sites"] == 2 and out.metrics["acting/students_per_site_mean"] == 1.5
    assert out.metrics["acting/suffix_rows"] == 3 and out.metrics["acting/overflow_rows"] == 0
    assert (out.suffix.home_S == 0).all()


def test_an_overflow_drops_the_last_suffix_rows_and_is_counted():
    _, out = extended(reserve_rows=4)
    action = len("<action>b</action>")
    np.testing.assert_allclose(
        out.suffix.weight_SL.max(axis=1), [1 / (4 * action), 1 / (4 * action) + 1 / (2 * action)]
    )
    assert out.metrics["acting/overflow_rows"] == 1 and out.metrics["acting/sites"] == 2
    _, out = extended(reserve_rows=1)
    assert out.suffix is None and out.metrics["acting/overflow_rows"] == 4 and out.metrics["acting/sites"] == 1


def test_scope_response_takes_all_tokens():
    _, out = extended(scope="response")
    sites, mask_NL = out.batch.sites, out.batch.mask_NL
    np.testing.assert_array_equal(sites.action_NL[sites.site_N >= 0], mask_NL[sites.site_N >= 0])
    assert out.suffix.weight_SL.sum() == pytest.approx(1)


def test_a_group_that_is_not_triggered_comes_back_unchanged(monkeypatch):
    monkeypatch.setattr(registry.method_class("ovcsd"), "triggered", lambda self, batch: np.zeros_like(batch.ok_N))
    rows, out = extended()
    assert out.rows is rows and out.batch.sites is None and out.suffix is None
    assert out.metrics["acting/attempts"] == 0 and out.metrics["acting/sites"] == 0


def test_extra_rows_change_no_statistic():
    protocol = load_protocol("alfworld")
    rows = make_rows(make_group(make_player(Script(STUDENTS, oracle)), 4))
    batch = make_batch(rows, protocol, 80, TRAIN)
    assert (batch.adv_N[: len(rows)] == 0).all()
    last = rows[-1].trajectory
    winner = dataclasses.replace(
        last, ret=10.0, status="success", assignment=dataclasses.replace(last.assignment, group=1, trajectory=99)
    )
    extra = [Row(winner, winner.turns[0], 0, extra=True)]
    longer = append_rows(batch, len(rows), extra, protocol, reserve=300)
    assert len(longer.ok_N) == 256 + 512 and longer.ok_N.sum() == len(rows) + 1
    for field in ("adv_N", "score_N", "group_N", "mask_NL"):
        np.testing.assert_array_equal(getattr(longer, field)[: len(rows)], getattr(batch, field)[: len(rows)])
    new = len(rows)
    assert longer.adv_N[new] == 0 and longer.group_N[new] == 1 and longer.outcome_N[new] == 1 and longer.success_N[new]
    assert longer.mask_NL[new].sum() == len(winner.turns[0].response) and not longer.mask_NL[new + 1 :].any()


def test_extra_rows_are_trained_next_to_their_group():
    train = dataclasses.replace(TRAIN, minibatch_rows=4)
    home = np.array([0, 0, 1, 1, 2, 0, 1, 1])  # five rows of students, one of the teacher, two of a suffix
    order = [list(m) for m in minibatches(6, train, 0, 1, home)]
    assert order == [[0, 1, 5, 2], [3, 6, 7, 4]]
    shuffled = dataclasses.replace(train, minibatch_order="shuffle")
    assert sorted(np.concatenate(list(minibatches(6, shuffled, 0, 1, home)))) == list(range(8))


# --- the update -----------------------------------------------------------------------------------------------------


@functools.cache
def make_updater():
    """Compiled once: nothing in it depends on what the tests vary."""
    return Updater(make_model(), registry.make("ovcsd"), TRAIN, 1.0, np.ones(VOCAB, bool))


def make_optimizer(train=TRAIN):
    updater = make_updater()
    return Optimizer(updater, train, sharding.make_mesh(1, 1, 1)), updater.init(make_model().init(jax.random.key(0)))


def make_suffix(home=0, seed=3):
    rng = np.random.default_rng(seed)
    tokens = lambda n: rng.integers(1, VOCAB, n).astype(np.int32)  # noqa: E731
    prompts, responses = [tokens(n) for n in (4, 9, 3, 6, 5)], [tokens(n) for n in (6, 1, 4, 3, 2)]
    scope_SL = np.arange(6) < np.array([len(r) for r in responses])[:, None]
    weight_SL = registry.make("ovcsd").suffix_weight(np.array([0, 0, 0, 1, 1]), scope_SL)
    return SuffixRows(
        plain=Sequences(prompts, responses),
        acting=Sequences([np.concatenate([tokens(7), p]) for p in prompts], responses),
        home_S=np.full(S, home, np.int32),
        weight_SL=weight_SL,
        top_ids_SLK=np.zeros((S, 6, K), np.int32),
        top_logps_SLK=np.zeros((S, 6, K), np.float32),
    )


def full_logps(params, prompt, response):
    """Log-probabilities [R, V] of one row that is alone in its packed row."""
    ids = np.concatenate([prompt, response])
    padded = np.pad(ids, (0, 32 - len(ids)))[None]
    segment = (np.arange(32) < len(ids)).astype(np.int32)[None]
    model = make_model()
    hidden = model.hidden(params, padded, np.arange(32)[None], segment)
    return jax.nn.log_softmax(model.logits(params, hidden[0, len(prompt) - 1 : len(ids) - 1]))


def suffix_loss(params, suffix):
    """L_suf row by row, from its definition."""
    total = 0.0
    for i in range(S):
        response = suffix.plain.responses[i]
        student = full_logps(params, suffix.plain.prompts[i], response)
        n = len(response)
        taken = jnp.take_along_axis(student, suffix.top_ids_SLK[i, :n], axis=-1)
        kl = losses.suffix_forward_kl(suffix.top_logps_SLK[i, None, :n], taken[None], suffix.weight_SL[i, None, :n])
        total += kl.total
    return total


@functools.cache
def known():
    """Filled suffix rows, and loss and gradient by definition."""
    optimizer, state = make_optimizer()
    suffix = taught(optimizer, make_suffix())
    return suffix, *jax.jit(jax.value_and_grad(lambda p: suffix_loss(p, suffix)))(state["params"])


def taught(optimizer, suffix):
    """Suffix rows with the top tokens of a teacher that is far from the student."""
    params = jax.tree.map(lambda x: 5 * x, make_model().init(jax.random.key(9)))
    return optimizer.top(params, suffix, extra_tokens=16)


def zeros(params):
    return jax.tree.map(jnp.zeros_like, params)


def test_the_teachers_top_tokens_are_those_of_its_own_prompt():
    optimizer, state = make_optimizer()
    suffix = optimizer.top(state["params"], make_suffix(), extra_tokens=16)
    for i in range(S):
        want = full_logps(state["params"], suffix.acting.prompts[i], suffix.acting.responses[i])
        top, ids = jax.lax.top_k(want, K)
        np.testing.assert_array_equal(suffix.top_ids_SLK[i, : len(ids)], ids)
        np.testing.assert_allclose(suffix.top_logps_SLK[i, : len(ids)], top, atol=1e-5)


@pytest.mark.parametrize(("length", "rows", "slots"), [(64, 2, 24), (16, 1, 6)])
def test_suffix_gradient_is_that_of_its_definition(length, rows, slots):
    train = dataclasses.replace(TRAIN, pack_length=length, pack_rows=rows, loss_slots=slots)
    optimizer, state = make_optimizer(train)
    suffix, loss, want = known()
    grads, sums = optimizer._accumulate_suffix(state["params"], zeros(state["params"]), np.arange(S), suffix, 2.0)
    assert float(sums["loss"]) == pytest.approx(float(loss), rel=1e-5) and float(loss) > 0.1
    assert_same(grads, jax.tree.map(lambda g: 2.0 * g, want))


def test_mini_batches_add_up_to_the_whole_suffix():
    optimizer, state = make_optimizer()
    suffix, _, want = known()
    grads = zeros(state["params"])
    for part in (np.array([3, 0]), np.array([1]), np.array([4, 2])):
        grads, _ = optimizer._accumulate_suffix(state["params"], grads, part, suffix, 1.0)
    assert_same(grads, want)


def test_suffix_rows_have_no_surrogate_kl_or_entropy():
    """A teacher equal to the student leaves nothing of these rows, whatever the other coefficients are."""
    optimizer, state = make_optimizer()
    suffix = make_suffix()
    same = optimizer.top(state["params"], dataclasses.replace(suffix, acting=suffix.plain), extra_tokens=16)
    grads, sums = optimizer._accumulate_suffix(state["params"], zeros(state["params"]), np.arange(S), same, 1.0)
    assert float(sums["loss"]) == pytest.approx(0, abs=1e-6)
    assert all(np.abs(x).max() < 1e-6 for x in jax.tree.leaves(grads))


def updated(suffix_rows, coefficient, sites=True):
    """Parameters after one update of all rows; the students' rows are those of ``make_data``."""
    train = dataclasses.replace(TRAIN, minibatch_rows=N + S)
    optimizer, state = make_optimizer(train)
    batch, adv, sequences = make_data()
    none = np.zeros(N, bool)
    site_rows = SiteRows(np.full(N, -1), none, np.zeros_like(batch.mask_NL), none, batch.group_N)
    batch = dataclasses.replace(batch, views={}, sites=site_rows if sites else None)
    suffix = known()[0] if suffix_rows else None
    coefficients = Coefficients(suffix=coefficient)
    return optimizer.update(
        state, batch, adv, sequences, coefficients, step=1, seed=0, learning_rate=1e-3, suffix=suffix
    )


def test_suffix_rows_enter_no_denominator_and_change_the_update():
    (plain, plain_metrics), (off, off_metrics) = updated(False, 0.0, sites=False), updated(True, 0.0)
    for x, y in zip(*map(jax.tree.leaves, (plain["params"], off["params"]))):
        np.testing.assert_array_equal(x, y)
    shared = plain_metrics.keys() & off_metrics.keys()
    assert {k: plain_metrics[k] for k in shared} == {k: off_metrics[k] for k in shared}
    on, on_metrics = updated(True, COEFFICIENTS.auxiliary)
    assert on_metrics["acting/loss_suffix"] > 0 and on_metrics["acting/suffix_kl_mean"] > 0
    want = plain_metrics["train/loss_total"] + COEFFICIENTS.auxiliary * on_metrics["acting/loss_suffix"]
    assert on_metrics["train/loss_total"] == pytest.approx(want, rel=1e-5)
    assert any(np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (plain["params"], on["params"]))))


# --- whole runs -----------------------------------------------------------------------------------------------------

_RESTORED = contextvars.ContextVar[Any]("restored", default=None)


class Remembering:
    """An environment that its own episode's engine can ask for a plan once it was restored from a prefix."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    async def restore(self, task_id, seed, actions):
        _RESTORED.set(self)
        return await self.inner.restore(task_id, seed, actions)


class OracleEngine:
    """The real engine, except that the acting teacher plays the shortest plan (each episode is a task of its own)."""

    def __init__(self, opened):
        self.opened, self.answers = opened, 0

    async def generate(self, request):
        tokenizer, environment = self.opened.tokenizer, _RESTORED.get()
        reads_skills = tokenizer.decode(request.prompt, skip_special=False).startswith(HEADER)
        assert reads_skills == (environment is not None)
        if environment is None:
            return await self.opened.engine.generate(request)
        self.answers += 1
        answer = self.opened.template.answer("ok", environment.privileged("plan")[0])
        tokens = np.array([*tokenizer.encode(answer), tokenizer.turn_end_id], np.int32)
        return Completion(tokens, np.zeros(len(tokens), np.float32), "stop", 0)


def acting_config(model, steps=2, **keys):
    config = tiny_config(model, "ovcsd", steps=steps)
    rollout = dataclasses.replace(config.rollout, response_tokens=28, max_length=248)
    env = dataclasses.replace(config.env, turns=10)
    evaluation = dataclasses.replace(config.eval, every=10, final_seeds=1)
    settings = dataclasses.replace(config.method.settings, **keys)
    method_config = dataclasses.replace(config.method, settings=settings)
    return dataclasses.replace(config, rollout=rollout, env=env, eval=evaluation, method=method_config)


def metrics_of(path):
    return jsonl.read(path / "metrics.jsonl")


@pytest.fixture(scope="module")
def winning(tiny_model, tmp_path_factory):
    """A run whose teacher wins, and the same with coefficient 0; metrics and directory."""
    make, open_session = AlfworldBenchmark.make, trainer.session.open_session

    def open_with_oracle(config, logs):
        opened = open_session(config, logs)
        return dataclasses.replace(opened, player=dataclasses.replace(opened.player, engine=OracleEngine(opened)))

    done = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AlfworldBenchmark, "make", lambda self: Remembering(make(self)))
        patch.setattr(trainer.session, "open_session", open_with_oracle)
        for name, keys in {"on": {}, "off": {"steps": 1, "coef": 0.0}}.items():
            path = tmp_path_factory.mktemp(name) / "run"
            run(acting_config(tiny_model, **keys), path)
            done[name] = metrics_of(path), path
    return done


def test_a_teacher_that_wins_makes_sites_and_suffix_rows(winning):
    lines, path = winning["on"]
    for line in lines[1:]:
        assert line["acting/triggered_groups"] == line["acting/verified_groups"] == 2
        assert line["acting/verified_frac"] == 1.0 and line["acting/attempts"] == 2
        assert line["acting/diverged_replays"] == line["acting/mismatched_prompts"] == 0
        assert line["acting/sites"] >= 2 and line["acting/students_per_site_mean"] >= 1
        assert line["acting/suffix_rows"] >= 2 and line["acting/suffix_tokens"] > line["acting/suffix_rows"]
        assert line["acting/loss_suffix"] > 0 and line["acting/overflow_rows"] == 0
        assert line["acting/env_steps"] > 0 and line["acting/context_frac"] == 1.0
        assert line["time/teacher_s"] > 0 and line["cost/acting_s"] > 0
        assert line["method/contrast_tokens"] > 0 and line["engine/logp_gap_abs_max"] < 1e-4
        assert line["optim/skipped_updates"] == 0
    assert (path / "teacher_prompt_acting.txt").read_text().startswith(HEADER)
    record = json.loads((path / "rollouts" / "step_000002.json").read_text())
    assert record["weight_name"] == "contrast" and all(e["status"] != "success" for e in record["episodes"])


def test_the_suffix_changes_the_gradient_and_nothing_before_it(winning):
    on, off = winning["on"][0][1], winning["off"][0][1]
    same = ("train/score_mean", "acting/sites", "acting/suffix_rows", "optim/tokens", "acting/tokens")
    assert all(on[k] == off[k] for k in same)
    assert on["optim/grad_norm"] != off["optim/grad_norm"]


def test_without_a_verified_branch_the_run_is_grpo(tiny_model, tmp_path):
    for method in ("ovcsd", "grpo"):
        config = tiny_config(tiny_model, method, steps=2)
        evaluation = dataclasses.replace(config.eval, every=10, final_seeds=1)
        run(dataclasses.replace(config, eval=evaluation), tmp_path / method)
    for a, b in zip(metrics_of(tmp_path / "ovcsd"), metrics_of(tmp_path / "grpo"), strict=True):
        timed = ("time/", "cost/")
        assert {k: a[k] for k in b if not k.startswith(timed)} == {
            k: v for k, v in b.items() if not k.startswith(timed)
        }
        if a["step"]:
            assert a["acting/triggered_groups"] == 2 and a["acting/env_steps"] > 0
            assert a["acting/verified_groups"] == a["acting/sites"] == a["acting/suffix_rows"] == 0
