"""Packs rows (prompt + response) of many lengths into few fixed-shape token rows.

Everything has a static shape, so one compilation serves the whole run; segment ids keep packed rows apart exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sdjax.errors import DataError


@dataclass(frozen=True)
class Sequences:
    """Token ids of all rows: what is scored and trained. Lists of int32 arrays, one entry per row."""

    prompts: Sequence[np.ndarray]
    responses: Sequence[np.ndarray]


@dataclass(frozen=True)
class Shape:
    """Static shape of a micro-batch: B packed rows of T tokens with M loss slots, each of at most ``segments`` rows."""

    B: int
    T: int
    M: int
    segments: int


@dataclass(frozen=True)
class Packed:
    """One micro-batch. B packed rows, T tokens each, M loss slots each.

    tokens_BT, position_BT, segment_BT: int32; segment 0 is padding. source_BM: position in the packed row whose hidden
    state predicts the slot's token. target_BM: that token. mask_BM: slot in use. row_BM, column_BM: where the slot
    belongs in [N, L] arrays (host only).
    """

    tokens_BT: np.ndarray
    position_BT: np.ndarray
    segment_BT: np.ndarray
    source_BM: np.ndarray
    target_BM: np.ndarray
    mask_BM: np.ndarray
    row_BM: np.ndarray
    column_BM: np.ndarray

    def device_arrays(self) -> dict[str, np.ndarray]:
        return {
            "tokens_BT": self.tokens_BT,
            "position_BT": self.position_BT,
            "segment_BT": self.segment_BT,
            "source_BM": self.source_BM,
            "target_BM": self.target_BM,
            "mask_BM": self.mask_BM,
        }

    def gather(self, values_NL: np.ndarray) -> np.ndarray:
        """[N, L] -> [B, M]; unused slots are 0."""
        return np.where(self.mask_BM, values_NL[self.row_BM, self.column_BM], 0).astype(np.float32)

    def scatter(self, values_BM: np.ndarray, out_NL: np.ndarray) -> None:
        """[B, M] -> the matching places of [N, L], in place."""
        mask = self.mask_BM
        out_NL[self.row_BM[mask], self.column_BM[mask]] = np.asarray(values_BM)[mask]


def pack(sequences: Sequences, rows: Sequence[int], shape: Shape) -> list[Packed]:
    """Packs ``rows`` (indices into the sequences) into micro-batches.

    Raises:
      DataError: a row is longer than a packed row, or has no prompt.
    """
    bins = assign(sequences, rows, shape)
    return [fill(bins[i : i + shape.B], sequences, shape) for i in range(0, len(bins), shape.B)]


def assign(sequences: Sequences, rows: Sequence[int], shape: Shape) -> list[list[int]]:
    """The rows of each packed row: longest first, each into the first packed row with room."""
    prompts, responses = sequences.prompts, sequences.responses
    bins: list[list[int]] = []
    free: list[list[int]] = []  # [tokens, slots, segments] left in each bin
    for row in sorted(rows, key=lambda r: (-(len(prompts[r]) + len(responses[r])), r)):
        need, answer = len(prompts[row]) + len(responses[row]), len(responses[row])
        if need > shape.T or answer > shape.M or len(prompts[row]) == 0:
            raise DataError(
                f"row {row} has {len(prompts[row])} prompt and {answer} response tokens; a packed row holds {shape.T} "
                f"tokens and {shape.M} response tokens.",
                "raise train.pack_length or train.loss_slots, or lower the prompt and response limits.",
            )
        if answer == 0:
            continue
        fits = (i for i, (t, m, s) in enumerate(free) if t >= need and m >= answer and s)
        index = next(fits, len(bins))
        if index == len(bins):
            bins.append([])
            free.append([shape.T, shape.M, shape.segments])
        bins[index].append(row)
        free[index] = [left - used for left, used in zip(free[index], (need, answer, 1))]
    return bins


def fill(
    bins: Sequence[Sequence[int]], sequences: Sequences, shape: Shape, offsets: Sequence[int] | None = None
) -> Packed:
    """At most B packed rows as one micro-batch. ``offsets``: tokens that come before everything in each packed row."""
    tokens, position, segment = (np.zeros((shape.B, shape.T), np.int32) for _ in range(3))
    source, target, owner, column = (np.zeros((shape.B, shape.M), np.int32) for _ in range(4))
    mask = np.zeros((shape.B, shape.M), bool)
    for b, members in enumerate(bins):
        t = m = 0
        for number, row in enumerate(members, start=1):
            prompt, answer = sequences.prompts[row], sequences.responses[row]
            p, r = len(prompt), len(answer)
            tokens[b, t : t + p] = prompt
            tokens[b, t + p : t + p + r] = answer
            position[b, t : t + p + r] = np.arange(p + r) + (0 if offsets is None else offsets[b])
            segment[b, t : t + p + r] = number
            source[b, m : m + r] = np.arange(t + p - 1, t + p + r - 1)
            target[b, m : m + r] = answer
            owner[b, m : m + r] = row
            column[b, m : m + r] = np.arange(r)
            mask[b, m : m + r] = True
            t, m = t + p + r, m + r
    return Packed(tokens, position, segment, source, target, mask, owner, column)
