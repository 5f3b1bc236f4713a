"""Packs rows (prompt + response) of many lengths into few fixed-shape token rows.

Everything has a static shape, so one compilation serves the whole run; segment ids keep packed rows apart exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sdjax.errors import DataError


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


def pack(
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    rows: Sequence[int],
    *,
    length: int,
    slots: int,
    batch_rows: int,
) -> list[Packed]:
    """Packs ``rows`` (indices into prompts and responses), longest first, each into the first packed row with room.

    Returns micro-batches of ``batch_rows`` packed rows of ``length`` tokens and ``slots`` loss slots.

    Raises:
      DataError: a row is longer than a packed row, or has no prompt.
    """
    bins: list[list[int]] = []
    free: list[list[int]] = []  # [tokens, slots] left in each bin
    for row in sorted(rows, key=lambda r: (-(len(prompts[r]) + len(responses[r])), r)):
        need, answer = len(prompts[row]) + len(responses[row]), len(responses[row])
        if need > length or answer > slots or len(prompts[row]) == 0:
            raise DataError(
                f"row {row} has {len(prompts[row])} prompt and {answer} response tokens; a packed row holds {length} "
                f"tokens and {slots} response tokens.",
                "raise train.pack_length or train.loss_slots, or lower the prompt and response limits.",
            )
        if answer == 0:
            continue
        index = next((i for i, room in enumerate(free) if room[0] >= need and room[1] >= answer), len(bins))
        if index == len(bins):
            bins.append([])
            free.append([length, slots])
        bins[index].append(row)
        free[index][0] -= need
        free[index][1] -= answer
    return [
        _fill(bins[i : i + batch_rows], prompts, responses, length, slots, batch_rows)
        for i in range(0, len(bins), batch_rows)
    ]


def _fill(
    bins: list[list[int]],
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    length: int,
    slots: int,
    batch_rows: int,
) -> Packed:
    tokens, position, segment = (np.zeros((batch_rows, length), np.int32) for _ in range(3))
    source, target, owner, column = (np.zeros((batch_rows, slots), np.int32) for _ in range(4))
    mask = np.zeros((batch_rows, slots), bool)
    for b, members in enumerate(bins):
        t = m = 0
        for number, row in enumerate(members, start=1):
            prompt, answer = prompts[row], responses[row]
            p, r = len(prompt), len(answer)
            tokens[b, t : t + p] = prompt
            tokens[b, t + p : t + p + r] = answer
            position[b, t : t + p + r] = np.arange(p + r)
            segment[b, t : t + p + r] = number
            source[b, m : m + r] = np.arange(t + p - 1, t + p + r - 1)
            target[b, m : m + r] = answer
            owner[b, m : m + r] = row
            column[b, m : m + r] = np.arange(r)
            mask[b, m : m + r] = True
            t, m = t + p + r, m + r
    return Packed(tokens, position, segment, source, target, mask, owner, column)
