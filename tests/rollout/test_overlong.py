"""What happens to a prompt that is longer than the limit."""

from dataclasses import replace

import numpy as np
import pytest

from sdjax.envs.base import Observation
from sdjax.errors import DataError
from tests.methods.corridor import make_player

PAST = [("seen " + "x" * 30, "go 1"), ("seen " + "y" * 30, "go 2")]


def prompt(player, past):
    observation = Observation("here", "find it", ("look",))
    return player.prompt(observation, past, "task")


@pytest.fixture
def player():
    return make_player(engine=None)


def text(player, ids):
    return player.tokenizer.decode(ids)


def test_a_prompt_within_the_limit_is_left_alone(player):
    ids, overlong = prompt(player, PAST)
    assert not overlong and "y" * 30 in text(player, ids)


def test_error_names_the_task_and_the_limit(player):
    with pytest.raises(DataError, match=r"task, turn 2.*limit is 50"):
        prompt(replace(player, prompt_tokens=50), PAST)


def test_cut_left_keeps_the_end(player):
    whole, _ = prompt(player, PAST)
    ids, overlong = prompt(replace(player, prompt_tokens=50, overlong="cut_left"), PAST)
    assert overlong and len(ids) == 50
    np.testing.assert_array_equal(ids, whole[-50:])


def test_drop_history_leaves_out_the_oldest_turn_first(player):
    whole, _ = prompt(player, PAST)
    shorter = replace(player, prompt_tokens=len(whole) - 1, overlong="drop_history")
    ids, overlong = prompt(shorter, PAST)
    assert overlong and "x" * 30 not in text(player, ids) and "y" * 30 in text(player, ids)
    first, _ = prompt(player, [])
    ids, overlong = prompt(replace(shorter, prompt_tokens=len(first)), PAST)
    assert overlong and text(player, ids) == text(player, first)
    with pytest.raises(DataError, match="limit is 10"):
        prompt(replace(shorter, prompt_tokens=10), PAST)
