"""Which rows get which privileged text, and what a guide is asked of the policy."""

import dataclasses

import numpy as np
import pytest

from sdjax.config import TeacherConfig
from sdjax.envs.base import Observation
from sdjax.errors import ConfigError, TeacherContextError
from sdjax.methods.base import Method
from sdjax.rollout.engine import Completion, EngineStats, SamplingParams
from sdjax.rollout.episodes import Assignment, Trajectory, Turn
from sdjax.seeds import derive_seed
from sdjax.train.rows import Row
from sdjax.train.teacher_pass import Teacher
from sdjax.train.views import ViewContext, make_views
from tests.methods.random_batch import make_batch
from tests.teacher.toy_tokenizer import WordTokenizer


class ViewTokenizer(WordTokenizer):
    def encode(self, text, *, special=True):
        return super().encode(text)

    def decode(self, ids, *, skip_special=True):
        return super().decode([int(i) for i in ids])


class Writer:
    """An engine that answers every request with ``answer(prompt text)`` and remembers the requests."""

    def __init__(self, tokenizer, answer):
        self.tokenizer, self.answer, self.stats, self.asked = tokenizer, answer, EngineStats(), []

    async def generate(self, request):
        text = self.tokenizer.decode(request.prompt)
        self.asked.append((request, text))
        tokens = np.asarray(self.tokenizer.encode(self.answer(text)), np.int32)
        return Completion(tokens, np.zeros(len(tokens), np.float32), "stop", 0)


def context(tokenizer, engine=None, *, graded=False, max_length=10_000, **teacher):
    return ViewContext(
        config=TeacherConfig(bank="alfworld", **teacher),
        tokenizer=tokenizer,
        engine=engine,
        prompt_tokens=500,
        max_length=max_length,
        temperature=1.0,
        run_seed=5,
        graded=graded,
    )


def episode(tokenizer, group, number, *, success, turns=2, ret=None, last_seen=True):
    seen = [f"seen {number} {k}" for k in range(turns + 1)]
    return Trajectory(
        assignment=Assignment(f"task {group}", group, number, number % 2, "train", 3),
        status="success" if success else "failed",
        ret=(10.0 if success else 0.0) if ret is None else ret,
        score=float(success),
        turns=tuple(
            Turn(
                prompt=np.asarray(tokenizer.render_chat(f"do it {k}"), np.int32),
                response=np.asarray(tokenizer.encode(f"answer {k}"), np.int32),
                engine_logps=np.zeros(3, np.float32),
                finish="stop",
                weight_version=0,
                observation=Observation(seen[k], f"goal {group}"),
                action=f"act {number} {k}",
                valid=True,
                invalid_reason=None,
                next_text=seen[k + 1] if last_seen or k + 1 < turns else "",
            )
            for k in range(turns)
        ),
        family="pick_and_place_simple",
        fields={"task_type": "pick_and_place_simple"},
        env_seed=0,
        sampling=SamplingParams(),
    )


def rows_of(*trajectories):
    return [Row(t, turn, k) for t in trajectories for k, turn in enumerate(t.turns)]


@pytest.fixture
def tokenizer():
    return ViewTokenizer()


def test_a_view_that_nobody_provides_is_named(tokenizer):
    with pytest.raises(ConfigError, match=r"view 'skils'.*future_full.*guide.*sibling.*skills"):
        make_views(("skills", "skils"), context(tokenizer))


def test_matched_views_come_as_a_pair_and_differ_in_the_observation_alone(tokenizer):
    rows = rows_of(episode(tokenizer, 0, 0, success=False, turns=3, last_seen=False))
    (view,) = make_views(("future_full", "future_ablated"), context(tokenizer))
    has_text, _ = view.prepare(rows, 1)
    assert has_text.tolist() == [True, True, False]  # the last turn was followed by nothing
    full, ablated = (tokenizer.decode(p.ids) for p in view.prompts(rows[1]))
    assert full.replace("seen 0 2", "not provided") == ablated and full != ablated
    assert full.startswith("<|user|>role\ndo it 1") and "seen 0 2" in view.text(rows[1])
    unseen = view.prompts(rows[2])
    assert view.text(rows[2]) == "" and all(np.array_equal(p.ids, rows[2].turn.prompt) for p in unseen)


def test_a_longer_horizon_shows_the_actions_between(tokenizer):
    rows = rows_of(episode(tokenizer, 0, 0, success=False, turns=3))
    (view,) = make_views(("future_full",), context(tokenizer, horizon=2))
    view.prepare(rows, 1)
    text = view.text(rows[0])
    assert "seen 0 1" in text and "act 0 1" in text and "seen 0 2" in text and "seen 0 3" not in text


def test_a_sibling_is_the_shortest_other_success(tokenizer):
    group = [
        episode(tokenizer, 0, 0, success=True, turns=3),
        episode(tokenizer, 0, 1, success=True, turns=2),
        episode(tokenizer, 0, 2, success=False),
        episode(tokenizer, 1, 3, success=True),  # alone in its group
    ]
    rows = rows_of(*group)
    (view,) = make_views(("sibling",), context(tokenizer))
    has_text, _ = view.prepare(rows, 1)
    assert [bool(h) for h in has_text] == [row.trajectory is not group[3] for row in rows]
    by_number = {row.trajectory.assignment.trajectory: view.text(row) for row in rows}
    assert "act 1 0" in by_number[0] and "act 1 0" in by_number[2] and "act 0 0" in by_number[1]
    assert "answer" not in by_number[0]  # no thoughts, only actions and observations
    assert by_number[3] == "" and np.array_equal(view.prompts(rows[-1])[0].ids, rows[-1].turn.prompt)


def test_graded_returns_show_a_clearly_better_sibling(tokenizer):
    rows = rows_of(
        episode(tokenizer, 0, 0, success=False, ret=3.0),
        episode(tokenizer, 0, 1, success=False, ret=4.0),
        episode(tokenizer, 0, 2, success=False, ret=6.0),
    )
    (view,) = make_views(("sibling",), context(tokenizer, graded=True))
    has_text, _ = view.prepare(rows, 1)
    assert has_text.tolist() == [True, True, True, True, False, False]
    (binary,) = make_views(("sibling",), context(tokenizer))
    assert not binary.prepare(rows, 1)[0].any()


def contrast_groups(tokenizer):
    return rows_of(
        episode(tokenizer, 0, 0, success=True),
        episode(tokenizer, 0, 1, success=False),
        episode(tokenizer, 1, 2, success=False),
        episode(tokenizer, 1, 3, success=False),
    )


def answer(text):
    return "<think>hm</think> DO: look" if "Reflection 1" in text else "<think>hm</think> it went well"


def test_a_guide_is_merged_from_reflections_of_groups_with_a_contrast(tokenizer):
    rows, engine = contrast_groups(tokenizer), Writer(tokenizer, answer)
    (view,) = make_views(("guide",), context(tokenizer, engine))
    has_text, metrics = view.prepare(rows, 3)
    assert has_text.tolist() == [True] * 4 + [False] * 4
    assert metrics | {"guide_chars_mean": 0} == {
        "contrast_groups": 1.0,
        "guides": 1.0,
        "guide_failures": 0.0,
        "guide_chars_mean": 0,
    }
    assert view.text(rows[0]) == view.text(rows[3]) and "DO: look" in view.text(rows[0])
    assert "hm" not in view.text(rows[0]) and view.text(rows[5]) == ""
    assert len(engine.asked) == 3 and "act 0 1" in engine.asked[0][1] and "solved" in engine.asked[0][1]
    merge = engine.asked[2][1]
    assert "it went well" in merge and "hm" not in merge


def test_every_draw_of_a_guide_has_its_own_seed(tokenizer):
    engine = Writer(tokenizer, answer)
    (view,) = make_views(("guide",), context(tokenizer, engine, reflection_tokens=77))
    view.prepare(contrast_groups(tokenizer), 3)
    seeds = [request.seed for request, _ in engine.asked]
    expected = [derive_seed(5, "reflect", step=3, task="task 0", sample=s) for s in (0, 1)]
    assert seeds == [*expected, derive_seed(5, "merge", step=3, task="task 0")]
    assert {request.sampling.max_new_tokens for request, _ in engine.asked} == {77}


@pytest.mark.parametrize("silent", ["reflections", "guide"])
def test_a_policy_that_writes_nothing_is_counted_and_its_group_has_no_guide(tokenizer, silent):
    def reply(text):
        return "" if ("Reflection 1" in text) is (silent == "guide") else answer(text)

    (view,) = make_views(("guide",), context(tokenizer, Writer(tokenizer, reply)))
    has_text, metrics = view.prepare(contrast_groups(tokenizer), 3)
    assert not has_text.any() and metrics["guide_failures"] == 1 and metrics["guides"] == 0


def test_long_episodes_lose_their_first_turns_until_the_reflection_fits(tokenizer):
    rows = rows_of(episode(tokenizer, 0, 0, success=True, turns=40), episode(tokenizer, 0, 1, success=False, turns=2))
    engine = Writer(tokenizer, answer)
    limit = 500
    (view,) = make_views(("guide",), context(tokenizer, engine, max_length=limit, reflection_tokens=40))
    view.prepare(rows, 1)
    request, text = next((r, t) for r, t in engine.asked if "Step 40: act 0 39" in t)
    assert limit - 40 - 30 < len(request.prompt) <= limit - 40 and "act 0 0\n" not in text
    (small,) = make_views(("guide",), context(tokenizer, engine, max_length=100, reflection_tokens=40))
    with pytest.raises(ConfigError, match=r"rollout.max_length = 100 less teacher.reflection_tokens leaves 60"):
        small.prepare(rows, 1)


# --- the pass -------------------------------------------------------------------------------------------------------


class FakeOptimizer:
    """Scores every token with minus the length of its prompt."""

    def score(self, params, sequences, shape, *, extra_tokens, shared):
        out = np.zeros(shape, np.float32)
        for i, (prompt, response) in enumerate(zip(sequences.prompts, sequences.responses)):
            out[i, : len(response)] = -len(prompt)
        return out


class FakeSession:
    def __init__(self, tokenizer):
        from sdjax.config import RunConfig

        self.config = RunConfig(teacher=TeacherConfig(bank="alfworld"))
        self.tokenizer, self.engine = tokenizer, None
        self.protocol = type("Protocol", (), {"graded": False})()


def teacher_of(tokenizer, **variables):
    return Teacher(type("Some", (Method,), variables)(None), FakeSession(tokenizer))


def batch_of(rows, context, length=4):
    mask = np.arange(length) < np.array([[len(row.turn.response)] for row in rows])
    ones = np.ones(len(rows), bool)
    old = np.where(mask, -1.0, 0.0).astype(np.float32)
    return dataclasses.replace(make_batch(), ok_N=ones, mask_NL=mask, old_NL=old, context=context)


def test_rows_that_are_not_scored_keep_the_old_log_probabilities(tokenizer):
    rows = rows_of(episode(tokenizer, 0, 0, success=False, turns=3))
    teacher = teacher_of(tokenizer, views=("future_full", "future_ablated"))
    context, metrics = teacher.prepare(rows, len(rows), 1)
    batch = batch_of(rows, context)
    selected = np.array([False, True, False])
    views, scored = teacher.score(FakeOptimizer(), None, rows, batch, selected)
    for name in ("future_full", "future_ablated"):
        np.testing.assert_array_equal(views[name][[0, 2]], batch.old_NL[[0, 2]])
        assert (views[name][1][batch.mask_NL[1]] < -len(rows[1].turn.prompt)).all()
        assert not views[name][~batch.mask_NL].any() and scored[f"teacher/{name}/gap_mean"] < 0
    assert metrics["teacher/available_frac"] == 1 and scored["teacher/scored_frac"] == pytest.approx(1 / 3)
    assert scored["teacher/context_frac"] == 1


def test_a_row_without_context_is_an_error_unless_the_method_allows_it(tokenizer):
    rows = rows_of(episode(tokenizer, 0, 0, success=True), episode(tokenizer, 0, 1, success=False))
    everything = np.ones(len(rows), bool)
    strict = teacher_of(tokenizer, views=("sibling",))
    context, _ = strict.prepare(rows, len(rows), 1)
    batch = batch_of(rows, context)
    assert context["sibling"].tolist() == [False, False, True, True]
    with pytest.raises(TeacherContextError, match="task task 0, turn 0, has no privileged text"):
        strict.score(FakeOptimizer(), None, rows, batch, everything)
    lenient = teacher_of(tokenizer, views=("sibling",), optional_context=True)
    lenient.prepare(rows, len(rows), 1)
    views, scored = lenient.score(FakeOptimizer(), None, rows, batch, everything)
    np.testing.assert_array_equal(views["sibling"][:2], batch.old_NL[:2])
    assert scored["teacher/scored_frac"] == 0.5 and scored["teacher/context_frac"] == 1.0


def test_examples_show_the_first_row_that_has_a_text(tokenizer):
    rows = rows_of(episode(tokenizer, 0, 0, success=True), episode(tokenizer, 0, 1, success=False))
    teacher = teacher_of(tokenizer, views=("sibling",), optional_context=True)
    teacher.prepare(rows, len(rows), 1)
    assert "act 0 0" in teacher.examples(rows)["sibling"]
    teacher.prepare(rows[2:], 2, 1)
    assert teacher.examples(rows[2:]) == {}


def test_the_students_own_prompt_gives_the_students_own_log_probabilities():
    """No shift by one position, and packing with room for privileged text changes nothing."""
    import jax

    from sdjax import sharding
    from sdjax.methods import registry
    from sdjax.train.optimize import Optimizer
    from sdjax.train.update import Updater
    from tests.train.test_update import TRAIN, VOCAB, make_data, make_model

    model, (batch, _, sequences) = make_model(), make_data()
    updater = Updater(model, registry.make("grpo"), TRAIN, 0.7, np.ones(VOCAB, bool))
    optimizer = Optimizer(updater, TRAIN, sharding.make_mesh(1, 1, 1))
    params = model.init(jax.random.key(0))
    old = optimizer.score(params, sequences, batch.mask_NL.shape)
    teacher = optimizer.score(params, sequences, batch.mask_NL.shape, extra_tokens=32)
    np.testing.assert_allclose(teacher, old, atol=1e-5)
    longer = [np.concatenate([np.int32([7, 8, 9]), prompt]) for prompt in sequences.prompts]
    other = optimizer.score(
        params, dataclasses.replace(sequences, prompts=longer), batch.mask_NL.shape, extra_tokens=32
    )
    assert np.abs(other - old).max() > 1e-3
