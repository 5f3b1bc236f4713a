import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdjax.errors import TeacherContextError
from sdjax.teacher import TeacherCounters, TeacherPrompt
from sdjax.teacher.prompt import HEADER
from sdjax.teacher.views import TrajectoryText, TurnText, future_views
from tests.teacher.toy_tokenizer import MergingTokenizer, SpecialTokenizer, WordTokenizer

TEXTS = st.text(alphabet="abc <>|\n\t\x00é", max_size=40)


def test_prompt_is_header_text_blank_line_then_the_students_ids():
    tokenizer = WordTokenizer()
    student = tokenizer.render_chat("put a mug")
    built = TeacherPrompt.build("be kind", student, tokenizer)
    block = tokenizer.encode(HEADER + "be kind\n\n")
    assert built.ids.dtype == np.int32 and built.ids.tolist() == block + student
    assert (built.privileged_tokens, built.lost_tokens, built.has_context) == (len(block), 0, True)


@pytest.mark.parametrize("text", ["", "  \n"])
@pytest.mark.parametrize("placement", ["before_chat", "user_turn", "user_end"])
def test_empty_text_is_the_students_prompt(text, placement):
    tokenizer = WordTokenizer()
    student = tokenizer.render_chat("put a mug")
    built = TeacherPrompt.build(text, student, tokenizer, placement=placement)
    assert built.ids.tolist() == student
    assert (built.privileged_tokens, built.lost_tokens, built.has_context) == (0, 0, False)


def test_placements_inside_the_user_message():
    tokenizer = WordTokenizer()
    student = tokenizer.render_chat("put a mug")
    block = tokenizer.encode("[P]\nbe kind\n\n")
    start = TeacherPrompt.build("be kind", student, tokenizer, placement="user_turn", header="[P]\n")
    assert start.ids.tolist() == student[:3] + block + student[3:]
    end = TeacherPrompt.build("be kind", student, tokenizer, placement="user_end", header="[P]\n")
    assert end.ids.tolist() == student[:-2] + block + student[-2:]


def test_user_turn_when_the_users_text_merges_with_the_template():
    tokenizer = MergingTokenizer()
    student = tokenizer.render_chat("\nput a mug")  # "role", "\n\n", "put" ...
    built = TeacherPrompt.build("be kind", student, tokenizer, placement="user_turn", header="[P]\n")
    assert built.ids.tolist() == student[:2] + tokenizer.encode("\n[P]\nbe kind\n\n") + student[2:]


def test_a_prompt_of_another_template_is_an_error():
    tokenizer = WordTokenizer()
    foreign = tokenizer.encode("put a mug")
    for placement in ("user_turn", "user_end"):
        with pytest.raises(TeacherContextError, match="same tokenizer and template"):
            TeacherPrompt.build("be kind", foreign, tokenizer, placement=placement)


def test_a_template_that_rewrites_the_text_is_an_error():
    class Rewriting(WordTokenizer):
        def render_chat(self, user_text):
            return super().render_chat(user_text.upper())

    with pytest.raises(TeacherContextError, match="cannot be found in the rendered chat"):
        TeacherPrompt.build("x", [1, 2, 3], Rewriting(), placement="user_turn")


@pytest.mark.parametrize("placement", ["before_chat", "user_turn", "user_end"])
@given(text=TEXTS, user=TEXTS, budget=st.integers(9, 30))
def test_students_ids_are_never_changed(placement, text, user, budget):
    tokenizer = WordTokenizer()
    student = tokenizer.render_chat(user)
    prompt = TeacherPrompt(tokenizer, placement=placement, budget=budget)
    built = prompt.ids(text, student)
    where = {"before_chat": 0, "user_turn": 3, "user_end": len(student) - 2}[placement]
    rest = built.ids.tolist()
    del rest[where : where + built.privileged_tokens]
    assert rest == student
    assert built.privileged_tokens <= budget
    if text.strip():
        whole = len(tokenizer.encode(HEADER + text + "\n\n"))
        assert built.privileged_tokens + built.lost_tokens == whole and built.has_context
    assert prompt.ids(text, student).ids.tolist() == built.ids.tolist()  # remembered text


def test_own_budget_shortens_at_the_end_and_keeps_header_and_blank_line():
    tokenizer = WordTokenizer()
    built = TeacherPrompt.build("a b c d", tokenizer.encode("x"), tokenizer, budget=7, header="[P]\n")
    assert tokenizer.decode(built.ids.tolist()) == "[P]\na b\n\nx"
    assert (built.privileged_tokens, built.lost_tokens) == (7, 4)


def test_released_left_cuts_the_privileged_text_first():
    tokenizer = WordTokenizer()
    student = tokenizer.encode("x y z")  # 5 tokens
    options = {"truncation": "released_left", "header": "[P]\n"}

    def build(limit):
        return TeacherPrompt.build("a b", student, tokenizer, student_limit=limit, **options)

    whole = tokenizer.encode("[P]\na b\n\n") + student  # 7 + 5 tokens
    for limit, privileged, lost, has_context in [(12, 7, 0, True), (11, 6, 1, True), (8, 3, 4, True), (7, 2, 5, False)]:
        built = build(limit)
        assert built.ids.tolist() == whole[-limit:]
        assert (built.privileged_tokens, built.lost_tokens, built.has_context) == (privileged, lost, has_context)
    assert build(5).ids.tolist() == student
    assert (build(5).privileged_tokens, build(5).lost_tokens) == (0, 7)


@pytest.mark.parametrize("truncation", ["own_budget", "released_left"])
def test_a_students_prompt_over_its_limit_is_an_error(truncation):
    tokenizer = WordTokenizer()
    with pytest.raises(TeacherContextError, match="has 5 tokens, the limit is 4"):
        TeacherPrompt.build("a", tokenizer.encode("x y z"), tokenizer, student_limit=4, truncation=truncation)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": "middle"}, "before_chat, user_turn"),
        ({"truncation": "left"}, "own_budget, released_left"),
        ({"truncation": "released_left", "placement": "user_turn"}, "cut the chat template"),
        ({"budget": 8}, "set it to 9 or more"),
    ],
)
def test_impossible_settings_fail_at_once(options, message):
    with pytest.raises(TeacherContextError, match=message):
        TeacherPrompt(WordTokenizer(), **options)


@pytest.mark.parametrize("student", [[], [[1, 2]]])
def test_malformed_student_prompts_are_errors(student):
    with pytest.raises(TeacherContextError, match="shape"):
        TeacherPrompt(WordTokenizer()).ids("a", student)


def test_privileged_text_is_encoded_without_special_tokens():
    tokenizer = SpecialTokenizer()
    prompt = TeacherPrompt(tokenizer)
    student = tokenizer.encode("x")
    tokenizer.calls.clear()
    prompt.ids("a <|im_end|> b", student)
    assert tokenizer.calls and not any(tokenizer.calls)


# Counters -------------------------------------------------------------------------------------------------------------


def test_counters_in_own_budget():
    tokenizer = WordTokenizer()
    prompt = TeacherPrompt(tokenizer, budget=7, header="[P]\n")
    counters = TeacherCounters()
    counters.add(prompt.ids("a b", tokenizer.encode("x")))  # 7 + 1 tokens, fits exactly
    counters.add(prompt.ids("a b c d", tokenizer.encode("x y z")), general_only=True)  # 7 + 5, 4 lost
    counters.add(prompt.ids("a", tokenizer.encode("x y")))  # 5 + 3
    counters.add(prompt.ids("a b c", tokenizer.encode("x")))  # 7 + 1, 2 lost
    metrics = counters.metrics()
    assert metrics.pop("teacher/prompt_tokens_p99") == pytest.approx(np.percentile([8, 12, 8, 8], 99))
    assert metrics == {
        "teacher/truncated_frac": 0.5,
        "teacher/lost_tokens_mean": 1.5,
        "teacher/lost_tokens_max": 4.0,
        "teacher/context_frac": 1.0,
        "teacher/empty_frac": 0.0,
        "teacher/general_only_frac": 0.25,
        "teacher/prompt_tokens_mean": 9.0,
    }


def test_counters_in_released_left():
    tokenizer = WordTokenizer()
    prompt = TeacherPrompt(tokenizer, student_limit=8, truncation="released_left", header="[P]\n")
    counters = TeacherCounters()
    counters.add(prompt.ids("a b", tokenizer.encode("x")))  # 7 + 1: fits
    counters.add(prompt.ids("a b", tokenizer.encode("x y")))  # 7 + 3: 2 lost
    counters.add(prompt.ids("a b", tokenizer.encode("x y z 0")))  # 7 + 7: 6 lost, only a line break is left
    counters.add(prompt.ids("a b", tokenizer.encode("x y z 0\n")))  # 7 + 8: all 7 lost
    metrics = counters.metrics()
    assert metrics["teacher/truncated_frac"] == 0.75
    assert metrics["teacher/lost_tokens_mean"] == 15 / 4 and metrics["teacher/lost_tokens_max"] == 7
    assert metrics["teacher/context_frac"] == 0.5 and metrics["teacher/empty_frac"] == 0.5
    assert metrics["teacher/prompt_tokens_mean"] == 8 and metrics["teacher/prompt_tokens_p99"] == 8


def test_a_row_without_context_is_an_error_by_default():
    empty = TeacherPrompt(WordTokenizer()).ids("", [1, 2])
    with pytest.raises(TeacherContextError, match="turn 3 of task 7 has no privileged text"):
        TeacherCounters().add(empty, name="turn 3 of task 7")
    counters = TeacherCounters(missing="count")
    counters.add(empty)
    assert counters.metrics()["teacher/context_frac"] == 0 and counters.metrics()["teacher/empty_frac"] == 1
    with pytest.raises(TeacherContextError, match='"error" or "count"'):
        TeacherCounters(missing="ignore")


def test_no_rows_no_metrics():
    assert TeacherCounters().metrics() == {}


# Matched views --------------------------------------------------------------------------------------------------------

OBSERVATIONS = st.lists(st.text(alphabet="ab \n<", min_size=1, max_size=30).filter(str.strip), min_size=1, max_size=3)


@given(
    observations=OBSERVATIONS,
    budget=st.integers(0, 60),
    limit=st.none() | st.integers(1, 10),
    horizon=st.integers(1, 3),
)
def test_matched_prompts_differ_only_inside_observations(observations, budget, limit, horizon):
    tokenizer = WordTokenizer()
    turns = tuple(TurnText(text, f"act {number}") for number, text in enumerate(observations))
    views = future_views(TrajectoryText("task", turns, True, 10.0, 0), 0, horizon=horizon)
    student = tokenizer.render_chat("put a mug")
    prompt = TeacherPrompt(tokenizer, placement="user_end", budget=max(budget, 9))
    prompt.budget = budget
    full, ablated = prompt.matched(views, student, observation_limit=limit)
    assert max(full.privileged_tokens, ablated.privileged_tokens) <= budget
    assert full.has_context == ablated.has_context and ablated.lost_tokens == 0
    whole = sum(len(tokenizer.encode(segment.text)) for segment in views.segments)
    assert full.privileged_tokens + full.lost_tokens == whole
    left = [row.ids.tolist()[len(student) - 2 : -2] for row in (full, ablated)]
    for row in (full, ablated):
        assert row.ids.tolist()[: len(student) - 2] + row.ids.tolist()[-2:] == student
    for segment in views.segments:  # walk both blocks: frames equal, observations a prefix and the placeholder
        if not segment.observation:
            frame = tokenizer.encode(segment.text)
            if left[0][: len(frame)] != frame:
                break
            assert left[1][: len(frame)] == frame
            left = [row[len(frame) :] for row in left]
            continue
        tokens, hidden = tokenizer.encode(segment.text)[:limit], tokenizer.encode(segment.ablated)
        if not left[0]:
            break
        kept = min(len(tokens), len(left[0]))
        assert left[0][:kept] == tokens[:kept] and left[1][: len(hidden)] == hidden
        left = [left[0][kept:], left[1][len(hidden) :]]
    assert left == [[], []]


def test_observation_limit_counts_lost_tokens():
    tokenizer = WordTokenizer()
    views = future_views(TrajectoryText("t", (TurnText("a b c d", "go"),), True, 1.0, 0), 0)
    student = tokenizer.render_chat("x")
    full, ablated = TeacherPrompt(tokenizer, placement="user_end").matched(views, student, observation_limit=4)
    assert full.lost_tokens == 4  # of " a b c d" the tokens " c d" are gone
    assert "\nObservation: a b\n<|end|>" in tokenizer.decode(full.ids.tolist())
    assert "\nObservation: not provided\n<|end|>" in tokenizer.decode(ablated.ids.tolist())


@pytest.mark.parametrize("limit", [None, 1, 3, 1000])
@pytest.mark.parametrize("budget", range(80))
def test_both_views_fit_every_budget(budget, limit):
    tokenizer = WordTokenizer()
    # One observation shorter than the placeholder and one longer than any budget here.
    turns = (TurnText("a", "go"), TurnText("b", "go"), TurnText("c " * 100, "go"))
    views = future_views(TrajectoryText("t", turns, True, 1.0, 0), 0, horizon=3)
    student = tokenizer.render_chat("x")
    prompt = TeacherPrompt(tokenizer, placement="user_end", budget=100)
    prompt.budget = budget
    full, ablated = prompt.matched(views, student, observation_limit=limit)
    assert max(full.privileged_tokens, ablated.privileged_tokens) <= budget
    assert full.has_context == ("not provided" in tokenizer.decode(ablated.ids.tolist()))
