"""Rows whose prompts begin with the same tokens: the beginning is processed once and serves all of them.

A teacher's privileged text stands in front of hundreds of prompts of a step. All rows of one packed row share one
prefix, so that their tokens attend to it as to a cache; rows that would not fill a packed row of their own are left to
the plain path.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sdjax.train.packing import Packed, Sequences, Shape, assign, fill


@dataclass(frozen=True)
class PrefixBlock:
    """Up to B prefixes of at most P tokens and the micro-batches behind them.

    tokens_FP: int32, filled up with 0; length_F: tokens of each. batches: each with the prefix index_B of its packed
    rows.
    """

    tokens_FP: np.ndarray
    length_F: np.ndarray
    batches: list[tuple[Packed, np.ndarray]]


def divide(
    sequences: Sequences, shared: Sequence[int], shape: Shape, bucket: int
) -> tuple[list[PrefixBlock], list[int]]:
    """Blocks of the rows that share their prefix with enough others, and the other rows.

    shared: number of leading prompt tokens that a row may share. bucket: P is a multiple of it, so that few shapes are
    compiled. Enough means that the rows fill half a packed row.
    """
    groups: dict[bytes, list[int]] = {}
    for row, (prompt, count) in enumerate(zip(sequences.prompts, shared)):
        groups.setdefault(np.asarray(prompt[:count], np.int32).tobytes(), []).append(row)
    chosen, rest = [], list(groups.pop(b"", []))
    for rows in groups.values():
        own = sum(len(sequences.prompts[r]) - shared[r] + len(sequences.responses[r]) for r in rows)
        if len(rows) > 1 and 2 * own >= shape.T:
            chosen.append(rows)
        else:
            rest += rows
    # Prefixes of similar length together: all of a block are padded to its longest.
    chosen.sort(key=lambda rows: (-shared[rows[0]], rows[0]))
    parts = (chosen[i : i + shape.B] for i in range(0, len(chosen), shape.B))
    return [_block(part, sequences, shared, shape, bucket) for part in parts], sorted(rest)


def _block(
    groups: list[list[int]], sequences: Sequences, shared: Sequence[int], shape: Shape, bucket: int
) -> PrefixBlock:
    length_F = np.ones(shape.B, np.int32)  # unused prefixes too: a token must find at least one key
    longest = max(shared[rows[0]] for rows in groups)
    tokens_FP = np.zeros((shape.B, -(-longest // bucket) * bucket), np.int32)
    behind = Sequences([p[n:] for p, n in zip(sequences.prompts, shared)], sequences.responses)
    bins: list[tuple[int, list[int]]] = []
    for f, rows in enumerate(groups):
        length_F[f] = shared[rows[0]]
        tokens_FP[f, : length_F[f]] = sequences.prompts[rows[0]][: length_F[f]]
        bins += [(f, members) for members in assign(behind, rows, shape)]
    return PrefixBlock(tokens_FP, length_F, list(_batches(bins, behind, shape, length_F)))


def _batches(
    bins: list[tuple[int, list[int]]], behind: Sequences, shape: Shape, length_F: np.ndarray
) -> Iterator[tuple[Packed, np.ndarray]]:
    for start in range(0, len(bins), shape.B):
        part = bins[start : start + shape.B]
        index_B = np.zeros(shape.B, np.int32)
        index_B[: len(part)] = [f for f, _ in part]
        yield fill([members for _, members in part], behind, shape, length_F[index_B].tolist()), index_B
