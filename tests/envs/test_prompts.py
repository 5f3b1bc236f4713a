"""Prompt templates and the projection of answers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdjax.envs import prompts
from sdjax.envs.prompts import PromptTemplate, load_protocol, project
from sdjax.errors import ConfigError, DataError

LINEAGE = PromptTemplate.load("alfworld", "verl_agent")
COMPACT = PromptTemplate.load("alfworld", "compact")
OPENING = (
    "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, "
    "you see a bed 1.\n\nYour task is to: put a pen in bed."
)
ENDING = """

Now it's your turn to take an action.
You should first reason step-by-step about the current situation. This reasoning process MUST be enclosed within \
<think> </think> tags.\x20
Once you've finished your reasoning, you should choose an admissible action for current step and present it within \
<action> </action> tags.
"""


def test_first_prompt_of_the_lineage_is_word_for_word():
    text = LINEAGE.render("put a pen in bed.", OPENING, ["go to bed 1", "help", "look"], [], 0)
    assert text == (
        "\nYou are an expert agent operating in the ALFRED Embodied Environment.\n"
        f"Your current observation is: {OPENING}\n"
        f"Your admissible actions of the current situation are: ['go to bed 1'\n 'look'].{ENDING}"
    )


def test_later_prompt_of_the_lineage_is_word_for_word():
    history = [("o1", "a1"), ("o2", "a2"), ("o3", "a3")]
    text = LINEAGE.render("put a pen in bed.", "now", ["look"], history, 3)
    assert text == (
        "\nYou are an expert agent operating in the ALFRED Embodied Environment. Your task is to: put a pen in bed.\n"
        "Prior to this step, you have already taken 3 step(s). Below are the most recent 2 observations and the "
        "corresponding actions you took: [Observation 2: 'o2', Action 2: 'a2']\n[Observation 3: 'o3', Action 3: 'a3']\n"
        "You are now at step 4 and your current observation is: now\n"
        "Your admissible actions of the current situation are: ['look']."
        f"{ENDING}"
    )


def test_history_length_is_an_option_and_zero_means_the_first_form():
    history = [("o1", "a1"), ("o2", "a2")]
    one = PromptTemplate.load("alfworld", "verl_agent", history=1).render("t", "now", [], history, 2)
    assert "o1" not in one and "most recent 1 obs" in one and "[Observation 2: 'o2', Action 2: 'a2']" in one
    none = PromptTemplate.load("alfworld", "verl_agent", history=0).render("t", "now", [], history, 2)
    assert "most recent" not in none and "current observation is: now" in none


def test_braces_and_tags_in_texts_are_plain_text():
    nasty = "{task} {0} </action> %s \x00 {"
    assert nasty in LINEAGE.render(nasty, nasty, [nasty], [(nasty, nasty)], 1)
    assert nasty in COMPACT.render("t", nasty, [nasty], [(nasty, nasty)], 1)


def test_compact_prompt_is_short_and_keeps_the_facts():
    text = COMPACT.render(
        "put a pen in bed.", OPENING, ["go to bed 1", "look", "examine bed 1", "help", "inventory"], [], 0
    )
    assert text == "Task: put a pen in bed.\na bed 1.\nActions: go to bed 1"
    later = COMPACT.render("put a pen in bed.", "You arrive at bed 1.", ["go to bed 1"], [(OPENING, "go to bed 1")], 1)
    assert later == "Task: put a pen in bed.\na bed 1.\n> go to bed 1\nbed 1.\nActions: go to bed 1"


@pytest.mark.parametrize("template", [LINEAGE, COMPACT])
def test_expert_answers_project_to_their_action(template):
    projection = project(template.answer("I look around.", "look"), template)
    assert (projection.action, projection.valid, projection.reason) == ("look", True, None)


THINK = "<think>x</think>"


@pytest.mark.parametrize(
    ("text", "action", "valid"),
    [
        (f"{THINK}<action>go to desk 1</action>", "go to desk 1", True),
        (f"{THINK}\n<action>\n  Go To Desk 1 \n</action> bye", "go to desk 1", True),
        (f"{THINK}<ACTION>look</Action>", "look", True),
        (f"{THINK}<action>look</action><action>help</action>", "look", True),  # the first block counts
        (f"{THINK}<action>a <action>b</action>", "a <action>b", True),  # from the first opening tag
        ("<action>look</action>", "look", False),  # no thought
        ("<think>x<action>look</action>", "look", False),  # thought not closed
        ("<THINK>x</THINK><action>look</action>", "look", False),  # thought tags are lower case
        (f"<action>look</action>{THINK}", "look", True),  # order of the blocks is not checked
        (f"{THINK}<action>看</action>", "看", False),
        ("<think>好</think><action>look</action>", "look", False),
        (f"{THINK}<action>カタカナ</action>", "カタカナ", True),  # outside U+4E00..U+9FFF
        (f"{THINK}<action></action>", "", True),
        (f"{THINK}<action>fly to the moon</action>", "fly to the moon", True),  # admissibility is not checked
        (f"{THINK}</action><action>look</action>", "", False),
        ("", "", False),
        ("look", "look", False),
        ("I SHOULD REALLY GO TO THE KITCHEN DESK 1", "really go to the kitchen desk 1"[-30:], False),
        (f"{THINK}<action>look", "<think>x</think><action>look"[-30:], False),
        (f"{THINK}look</action>", "<think>x</think>look</action>"[-30:], False),
        ("İ" * 40, ("İ" * 40).lower()[-30:], False),  # lower-casing changes the length
    ],
)
def test_projection_table(text, action, valid):
    projection = project(text, LINEAGE)
    assert (projection.action, projection.valid) == (action, valid)
    assert (projection.reason is None) == valid


def test_spans_point_at_the_text_between_the_tags_even_after_odd_letters():
    text = "İİ <think> a plan </think>\n<Action> Look </ACTION>"
    projection = project(text, LINEAGE)
    assert projection.thought_span and text[slice(*projection.thought_span)] == " a plan "
    assert projection.action_span and text[slice(*projection.action_span)] == " Look "
    missing = project("nothing", LINEAGE)
    assert missing.thought_span is None and missing.action_span is None


PIECES = [*"ab< /\n\x00{}İ看", "<think>", "</think>", "<action>", "</action>", "<ACTION>"]


@given(st.lists(st.sampled_from(PIECES) | st.characters(), max_size=30).map("".join))
def test_projection_takes_any_text(text):
    projection = project(text, LINEAGE)
    if projection.action_span is not None:
        assert text[slice(*projection.action_span)].lower().strip() == projection.action
    assert not projection.valid or ("<think>" in text and projection.action_span is not None)


def test_a_megabyte_is_projected():
    text = "<think>" + "y" * 1_000_000
    assert project(text, LINEAGE).action == "y" * 30


def test_protocol_constants():
    protocol = load_protocol("alfworld")
    assert (protocol.turn_limit, protocol.history, protocol.reward_success) == (50, 2, 10.0)
    assert (protocol.prompt_tokens, protocol.response_tokens, protocol.overlong_prompt) == (2048, 512, "error")
    assert (protocol.invalid_penalty, protocol.train_temperature, protocol.validation_temperature) == (0.1, 1.0, 0.4)


def test_unknown_templates_and_benchmarks_name_the_choices():
    with pytest.raises(ConfigError, match=r"compact.*verl_agent"):
        PromptTemplate.load("alfworld", "poetic")
    with pytest.raises(ConfigError, match="alfworld"):
        load_protocol("chess")


SEARCH = PromptTemplate(
    name="search",
    first="Q {task} [{objects}]",
    later="Q {task} {history_length}: {history}",
    history_item="{number}:{action} {observation}",
    history_join="|",
    admissible_item="",
    admissible_join="",
    hidden_actions=(),
    drop_from_observation=(),
    answer_format="{thought}{action}",
    require_thought=False,
    forbid_cjk=False,
    fallback_characters=0,
    history=2,
    history_shows="after",
    answer_kind="search",
    lower=False,
)


@pytest.mark.parametrize(
    ("text", "action", "reason"),
    [
        ("<think>a</think><search> Who IS it </search>", "<search>Who IS it</search>", None),
        ("x<answer>Bob</answer> tail", "<answer>Bob</answer>", None),
        ("<answer>Bob</answer><search>q</search>", "<search>q</search>", "search and answer tags"),
        ("<search>q</search><answer>Bob</answer>", "<search>q</search>", "search and answer tags"),
        ("<search>a</search><search>b</search>", "<search>a</search>", "a tag twice"),
        ("<search>a<search>b</search>", "<search>a<search>b</search>", "a tag twice"),
        ("<answer>A</answer></search>", "<answer>A</answer>", "search and answer tags"),
        ("</search><answer>A</answer>", "", "no search or answer block"),
        ("</answer><answer>A", "", "no search or answer block"),
        ("<SEARCH>q</SEARCH>", "", "no search or answer block"),
        ("Bob", "", "no search or answer block"),
        ("", "", "no search or answer block"),
    ],
)
def test_search_projection(text, action, reason):
    found = project(text, SEARCH)
    assert (found.action, found.reason, found.valid) == (action, reason, reason is None)
    if found.action_span:
        assert text[slice(*found.action_span)].strip() in action


PIECES = ["<search>", "</search>", "<answer>", "</answer>", "a", " "]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_a_valid_search_answer_has_exactly_one_block(text):
    found = project(text, SEARCH)
    if found.valid:
        kind = "search" if found.action.startswith("<search>") else "answer"
        assert text.count(f"<{kind}>") == text.count(f"</{kind}>") == 1 and found.action.endswith(f"</{kind}>")
        inside = found.action.removeprefix(f"<{kind}>").removesuffix(f"</{kind}>")
        assert inside == text[slice(*found.action_span)].strip()


def test_history_after_shows_what_followed_the_action():
    assert SEARCH.render("t", "", [], [], 0, ["a", "b"]) == "Q t [a, b]"
    assert SEARCH.render("t", "o1", [], [("", "s1")], 1) == "Q t 1: 1:s1 o1"
    assert SEARCH.render("t", "o3", [], [("", "s1"), ("o1", "s2"), ("o2", "s3")], 3) == "Q t 2: 2:s2 o2|3:s3 o3"


def test_a_long_message_loses_its_history():
    short = replace(SEARCH, drop_history_over=20)
    assert short.render("t", "o", [], [("", "s")], 1) == "Q t 1: 1:s o"
    assert short.render("t", "o" * 20, [], [("", "s")], 1) == "Q t []"


def test_a_template_with_an_unknown_key_is_an_error(monkeypatch):
    tables = {"protocol.toml": vars(load_protocol("alfworld")), "prompts/x.toml": {"first": "", "wording": 1}}
    monkeypatch.setattr(prompts, "_read_toml", lambda benchmark, path: dict(tables[path]))
    with pytest.raises(DataError, match=r"x\.toml.*wording"):
        PromptTemplate.load("alfworld", "x")
