"""Rows that are longer than a model has positions."""

import dataclasses

import pytest

from sdjax.errors import ConfigError
from sdjax.train.session import check_positions
from tests.train.tiny_run import tiny_config


def test_rows_beyond_the_positions_of_a_model_are_refused_with_their_limits(tmp_path):
    alone, taught = tiny_config(tmp_path), tiny_config(tmp_path, "sdar")
    check_positions(alone, 232)
    with pytest.raises(ConfigError, match=r"has 232 tokens \(rollout.prompt_tokens = 220 \+ rollout.resp.*has 231 pos"):
        check_positions(alone, 231)
    # The teacher reads its privileged text in front of the same prompt.
    check_positions(taught, 488)
    with pytest.raises(ConfigError, match=r"488 tokens .*teacher.privileged_tokens = 256"):
        check_positions(taught, 487)
    longer = dataclasses.replace(taught, teacher=dataclasses.replace(taught.teacher, privileged_tokens=1000))
    with pytest.raises(ConfigError, match="1232 tokens"):
        check_positions(longer, 512)
