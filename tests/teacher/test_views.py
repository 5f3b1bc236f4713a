import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdjax.errors import TeacherContextError
from sdjax.teacher.views import (
    TrajectoryText,
    TurnText,
    best_sibling,
    future_views,
    guide_text,
    is_eligible,
    merge_prompt,
    reflection_labels,
    reflection_prompt,
    sibling_text,
    written_text,
)

HOSTILE = st.text(alphabet="ab$ {}<>\\\n\x00é", max_size=20)


def trajectory(number=0, *, turns=2, success=True, ret=10.0, opening="You are in a room."):
    steps = tuple(TurnText(f"saw {k}", f"do {k}", f"secret thought {k}") for k in range(turns))
    return TrajectoryText("put a mug on the desk", steps, success, ret, number, opening)


# Future observations --------------------------------------------------------------------------------------------------


@given(observations=st.lists(HOSTILE, min_size=1, max_size=4), action=HOSTILE, horizon=st.integers(1, 4))
def test_future_views_differ_only_in_observation_segments(observations, action, horizon):
    turns = tuple(TurnText(text, action) for text in observations)
    run = TrajectoryText("t", turns, False, 0.0, 3)
    if not is_eligible(run, 0):
        with pytest.raises(TeacherContextError, match="no observation"):
            future_views(run, 0, horizon=horizon)
        return
    views = future_views(run, 0, horizon=horizon)
    frames = [segment.text for segment in views.segments if not segment.observation]
    shown = [segment for segment in views.segments if segment.observation]
    assert [segment.text for segment in shown] == [" " + text.strip() for text in observations[: len(shown)]]
    assert 1 <= len(shown) <= horizon and all(segment.ablated == " not provided" for segment in shown)
    full, ablated = views.full, views.ablated
    for segment in views.segments:
        assert full.startswith(segment.text)
        other = segment.ablated if segment.observation else segment.text
        assert ablated.startswith(other)
        full, ablated = full[len(segment.text) :], ablated[len(other) :]
    assert full == ablated == ""
    assert all(action in frame for frame in frames[1:-1])


def test_future_views_show_what_follows_the_turn():
    run = trajectory(turns=3)
    assert "Observation: saw 1\n" in future_views(run, 1).full and "saw 2" not in future_views(run, 1).full
    two = future_views(run, 1, horizon=2).full
    assert "Observation: saw 1\nNext response: do 2\nObservation: saw 2\n" in two
    assert future_views(run, 2, horizon=5).full == future_views(run, 2).full  # the trajectory ends
    assert "secret" not in two


def test_the_final_answer_has_no_future():
    run = TrajectoryText(
        "q", (TurnText("passages", "<search>x</search>"), TurnText("", "<answer>y</answer>")), True, 1.0, 0
    )
    assert [is_eligible(run, turn) for turn in (0, 1)] == [True, False]
    assert "answer" not in future_views(run, 0, horizon=2).full  # nothing follows the answer, so it is not quoted
    with pytest.raises(TeacherContextError, match="no observation"):
        future_views(run, 1)
    with pytest.raises(TeacherContextError, match="1 or more"):
        future_views(run, 0, horizon=0)


def sibling_id(own, group, **options):
    found = best_sibling(own, group, **options)
    return None if found is None else found.trajectory


# Siblings -------------------------------------------------------------------------------------------------------------


def test_binary_sibling_is_the_shortest_success_then_the_lower_id():
    group = [trajectory(0, turns=1), trajectory(1, turns=4), trajectory(3, turns=2), trajectory(2, turns=2)]
    group.append(trajectory(4, turns=1, success=False, ret=0.0))
    assert sibling_id(group[1], group) == 0
    assert sibling_id(group[0], group) == 2  # never itself


def test_no_other_success_no_feedback():
    group = [trajectory(0), trajectory(1, success=False, ret=0.0)]
    assert best_sibling(group[0], group) is None
    assert sibling_id(group[1], group) == 0
    assert best_sibling(group[0], group[:1]) is None


@pytest.mark.parametrize(
    ("own", "other", "success", "found"), [(1, 3, False, True), (1, 2.9, False, False), (9, 10, True, True)]
)
def test_graded_sibling_needs_success_or_the_margin(own, other, success, found):
    group = [trajectory(0, success=False, ret=own), trajectory(1, success=success, ret=other)]
    assert (best_sibling(group[0], group, graded=True) is not None) == found


def test_graded_sibling_has_the_highest_return_then_fewest_turns():
    group = [
        trajectory(n, turns=t, success=False, ret=r)
        for n, (t, r) in enumerate([(1, 0), (5, 8), (3, 8), (3, 8), (1, 7)])
    ]
    assert sibling_id(group[0], group, graded=True) == 2


def test_sibling_text_has_actions_and_observations_without_thoughts():
    text = sibling_text(trajectory(turns=2))
    lines = text.split("\n")
    assert lines[-5:] == [
        "Start: You are in a room.",
        "Action 1: do 0",
        "Observation 1: saw 0",
        "Action 2: do 1",
        "Observation 2: saw 1",
    ]
    assert "put a mug on the desk" in text and "succeeded" in text and "secret" not in text
    failed = sibling_text(trajectory(success=False, ret=6.5))
    assert "succeeded" not in failed and "6.5" in failed


@given(text=HOSTILE)
def test_foreign_text_is_never_read_as_a_template(text):
    run = TrajectoryText(text, (TurnText(text, text),), True, 1.0, 0)
    assert f"Action 1: {text}".strip() in sibling_text(run)
    assert text in reflection_prompt(run, True)
    assert text.strip() in merge_prompt(text, [(text, True), ("x", False)])


# Group reflection -----------------------------------------------------------------------------------------------------


def test_binary_labels_and_contrast():
    def labels(*returns, **options):
        return reflection_labels([trajectory(n, ret=r) for n, r in enumerate(returns)], **options)

    assert labels(10, 0, 0) == ((True, False, False), True)
    assert labels(10, 10) == ((True, True), False)
    assert labels(0, 0) == ((False, False), False)
    assert labels() == ((), False)
    assert labels(5.0, 4.5, graded=True) == ((True, False), False)  # spread below 1
    assert labels(5.0, 4.0, 4.0, graded=True) == ((True, False, False), True)
    assert labels(4.0, 4.0, graded=True) == ((False, False), False)


def test_reflection_prompt_shows_task_outcome_and_cut_history():
    run = TrajectoryText(
        "the task", (TurnText("x" * 500, "first"), TurnText("short", "second", "hidden")), True, 10.0, 0
    )
    prompt = reflection_prompt(run, True, observation_chars=400)
    assert "Task: the task" in prompt and "the task was solved" in prompt and "hidden" not in prompt
    assert "x" * 400 + " ..." in prompt and "x" * 401 not in prompt
    assert "Step 1: first" in prompt and "Step 2: second\n  Result: short" in prompt
    assert "the task was not solved" in reflection_prompt(run, False)
    assert "$" not in prompt


def test_reflection_prompt_keeps_the_last_turns_and_says_so():
    prompt = reflection_prompt(trajectory(turns=6), False, turns=2)
    assert "(4 earlier steps are left out.)" in prompt and "Step 5: do 4" in prompt and "Step 4" not in prompt
    assert "no step was taken" in reflection_prompt(trajectory(turns=0), False)


def test_merge_prompt_lists_labelled_reflections():
    prompt = merge_prompt("the task", [("open the drawer first", True), ("I went in circles", False)])
    assert "Reflection 1 (the task was solved):\nopen the drawer first" in prompt
    assert "Reflection 2 (the task was not solved):\nI went in circles" in prompt
    assert "DO:" in prompt and "AVOID:" in prompt


@pytest.mark.parametrize("reflections", [[], [("a", True)], [("a", False), ("b", False)]])
def test_merge_needs_a_contrast(reflections):
    with pytest.raises(TeacherContextError, match="contrast"):
        merge_prompt("t", reflections)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("<think>hm</think>\nDO:\n- x", "DO:\n- x"),
        ("<think>never closed", ""),
        ("<action>DO: x</action>", "DO: x"),
        ("  plain ", "plain"),
    ],
)
def test_written_text_drops_thoughts_and_tags(answer, text):
    assert written_text(answer) == text


def test_guide_text():
    assert guide_text(" \n") == ""
    assert guide_text("DO: $x\n").endswith("DO: $x")
