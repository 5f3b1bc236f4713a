"""Exact match as the originals compute it, substring match, F1."""

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdjax.envs.searchqa.actions import last_answer
from sdjax.envs.searchqa.scoring import normalize, score_answer

# (text of a whole response, golden answers, exact match, substring match, extracted answer)
CASES = [
    ("<answer>The Rolling Stones</answer>", ["Rolling Stones"], 1, 1, "The Rolling Stones"),
    ("<answer> stones! </answer>", ["The Stones"], 1, 1, "stones!"),
    ("<answer>N.A.S.A.</answer>", ["NASA"], 1, 1, "N.A.S.A."),
    ("<answer>U.K.</answer>", ["u k", "uk"], 1, 1, "U.K."),
    ("<answer>José</answer>", ["Jose"], 0, 0, "José"),
    ("<answer>Jos\\u00e9</answer>", ["José"], 0, 0, "Jos\\u00e9"),
    ("<answer>3 May 1968</answer>", ["May 3, 1968"], 0, 0, "3 May 1968"),
    ("<answer>the an a</answer>", [""], 1, 1, "the an a"),
    ("<answer></answer>", ["an"], 1, 1, ""),
    ("<answer>one</answer> and <answer>Rome</answer>", ["Rome"], 1, 1, "Rome"),
    ("it is Rome", ["Rome"], 0, 0, None),
    ("<answer>Rome", ["Rome"], 0, 0, None),
    ("<ANSWER>Rome</ANSWER>", ["Rome"], 0, 0, None),
    ("<answer>Rome, Italy</answer>", ["Rome"], 0, 1, "Rome, Italy"),
    ("<answer>forty-two</answer>", ["forty two", "fortytwo"], 1, 1, "forty-two"),
    ("<answer>drum'n'bass</answer>", ["drum n bass"], 0, 0, "drum'n'bass"),
    ("<answer>1,500</answer>", ["1500"], 1, 1, "1,500"),
    ("<answer>\nTwo\n words </answer>", ["two words"], 1, 1, "Two\n words"),
    ("<answer>anthem</answer>", ["them"], 0, 1, "anthem"),
    ("<answer>‘Quoted’</answer>", ["Quoted"], 0, 1, "‘Quoted’"),
    ("<answer>Ann—Marie</answer>", ["AnnMarie"], 0, 0, "Ann—Marie"),
    ("<answer>Rome</answer> <information><answer>Oslo</answer></information>", ["Rome"], 0, 0, "Oslo"),
    ("<search>x</search><answer>No</answer>", ["no"], 1, 1, "No"),
    ("<answer>yes!</answer>", ["Yes"], 1, 1, "yes!"),
]


def check(text, golds, em, sub_em, extracted):
    answer = last_answer(text)
    assert answer == extracted
    if answer is not None:
        score = score_answer(answer, golds)
        assert (score.em, score.sub_em) == (em, sub_em)
    else:
        assert em == sub_em == 0


@pytest.mark.parametrize("case", CASES)
def test_exact_match_on_known_answers(case):
    check(*case)


@pytest.mark.shared
def test_exact_match_on_recorded_scores(closed_corpus):
    cases = json.loads((closed_corpus / "em_cases.json").read_text(encoding="utf-8"))
    assert len(cases) == 24
    for case in cases:
        check(case["text"], case["target"], case["em"], case["subem"], case["extracted"])


def test_f1_counts_shared_words():
    assert score_answer("the red river", ["river"]).f1 == pytest.approx(2 / 3)
    assert score_answer("red red river", ["red river"]).f1 == pytest.approx(4 / 5)
    assert score_answer("a sea", ["ocean", "sea"]).f1 == 1.0
    assert score_answer("the", ["river"]).f1 == 0.0
    assert score_answer("river", []) == score_answer("", [])


words = st.text(alphabet=string.ascii_letters + string.digits + string.punctuation + " \t\u00e9\u4e2d", max_size=40)


@given(words, st.lists(words, max_size=4))
def test_scores_are_ordered(answer, golds):
    score = score_answer(answer, golds)
    assert 0 <= score.f1 <= 1 and score.em <= score.sub_em
    assert score.em == 0 or score.f1 == 1.0
    assert score_answer(answer, [*golds, answer]).em == 1.0


@given(words)
def test_normalising_twice_changes_nothing_but_new_articles(text):
    once = normalize(text)
    assert once == once.strip() and "  " not in once
    assert not set(once) & set(string.punctuation)
