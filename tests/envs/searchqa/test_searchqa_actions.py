"""The parser of the model's text: which block counts, and that hostile text is only text."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdjax.envs.prompts import PromptTemplate, project
from sdjax.envs.searchqa.actions import Action, last_answer, parse

TEMPLATE = PromptTemplate.load("searchqa", "verl_agent")


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<search> who was it </search>", Action("search", "who was it")),
        ("<think>hm</think>\n<answer>Beijing</answer>", Action("answer", "Beijing")),
        ("<search>a</search><answer>b</answer>", Action("search", "a")),
        ("<answer>b</answer> then <search>a</search>", Action("search", "a")),
        ("<answer>b</answer><answer>c</answer>", Action("answer", "b")),
        ("<search>a</search><search>b</search>", Action("search", "a")),
        ("<search>a <answer>b</answer></search>", Action("search", "a <answer>b</answer>")),
        ("<answer>b <search>a</search></answer>", Action("search", "a")),
        ("<search>a", Action("invalid")),
        ("a</search>", Action("invalid")),
        ("</search><search>a", Action("invalid")),
        ("<answer>b</answer></search>", Action("answer", "b")),
        ("<Search>a</Search>", Action("invalid")),
        ("", Action("invalid")),
        ("<search></search>", Action("search", "")),
        ("<answer>ü 中 🙂</answer>", Action("answer", "ü 中 🙂")),
    ],
)
def test_one_block_counts(text, action):
    assert parse(text) == action


blocks = st.lists(
    st.sampled_from(["<search>", "</search>", "<answer>", "</answer>", "<think>", "</think>", "a", " b ", "\n", "é"]),
    max_size=12,
).map("".join)


@given(blocks)
def test_the_agents_projection_loses_nothing_that_counts(text):
    """What the prompt template sends on is read as what the whole response says."""
    assert parse(project(text, TEMPLATE).action) == parse(text)


@given(blocks)
def test_last_answer_is_the_last_complete_block(text):
    found = re.findall("<answer>(.*?)</answer>", text, re.DOTALL)
    assert last_answer(text) == (found[-1].strip() if found else None)


@pytest.mark.parametrize("unit", ["<search>", "<answer>", "</answer><search>", "<search><answer>", "x", "中"])
def test_a_megabyte_of_open_tags_is_read_in_one_pass(unit):
    text = unit * (1_000_000 // len(unit))  # with backtracking this takes hours
    assert parse(text).kind == "invalid" and last_answer(text) is None
    assert parse(text + "<search>q</search>").kind == "search"
