"""Which response tokens make up the action: characters of the last action block, mapped to the sampled ids."""

import re
from collections.abc import Callable, Sequence

import numpy as np

# Search and answer blocks are the actions of search tasks.
_BLOCK = re.compile(r"<(action|search|answer)>.*?</\1>", re.IGNORECASE | re.ASCII | re.DOTALL)


def action_tokens(tokens: Sequence[int] | np.ndarray, decode: Callable[[Sequence[int]], str]) -> np.ndarray:
    """[R] bool: tokens that overlap the last action block, its tags included; all tokens if there is none.

    The ids are never encoded again: where the block begins and ends is found by decoding prefixes of them.
    """
    tokens = list(tokens)
    text = decode(tokens)
    blocks = list(_BLOCK.finditer(text))
    if not blocks:
        return np.ones(len(tokens), bool)
    start, end = blocks[-1].span()

    def decoded(n: int) -> int:
        """Characters that the first n tokens settle; an unfinished character does not count."""
        prefix = decode(tokens[:n])
        return next((i for i, (a, b) in enumerate(zip(prefix, text)) if a != b), min(len(prefix), len(text)))

    # Tags are ASCII, so the first and the last token of the block settle at least one character of it.
    first = _smallest(len(tokens), lambda n: decoded(n + 1) > start)
    after = _smallest(len(tokens), lambda n: decoded(n) >= end)
    places = np.arange(len(tokens))
    return (places >= first) & (places < after)


def _smallest(n: int, holds: Callable[[int], bool]) -> int:
    """Smallest number in 0..n for which ``holds`` (once true, always true); n if there is none."""
    low, high = 0, n
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
