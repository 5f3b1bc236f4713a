"""One tiny checkpoint for all tests of this area."""

import pytest

from sdjax.models.tiny import write_tiny_checkpoint

CORPUS = [
    "You are in the middle of a room. Looking quickly around you, you see a shelf 12, a desk 2, and a bed 1.",
    "<think>the apple may be there</think><action>go to shelf 12</action>",
    "take apple 1 from fridge 1\nopen fridge 1\nput apple 1 in shelf 12",
] * 10
SIZES = {"vocab_size": 400, "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 48}


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(directory, CORPUS, **SIZES)
    return directory
