"""One global step's rows as a compressed ``.npz``, for notebooks and for questions asked after the run.

Only valid tokens are stored, in row order, so that a batch of mostly padding stays small. Nothing is pickled.
"""

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sdjax.errors import DataError
from sdjax.methods.base import RowBatch

_MASK = "mask_NL"
_GROUPS = ("views", "context")  # fields that hold arrays by name


@dataclass(frozen=True)
class SavedBatch:
    """What ``load_batch`` returns.

    batch: the step's rows, without the sites of verified continuations. Arrays `[N, L]` are 0 off the mask.
    adv_NL: advantages that went to the surrogate.
    tokens: the response tokens of each row as text, one list per row; empty for padding rows.
    """

    step: int
    method: str
    batch: RowBatch
    adv_NL: np.ndarray
    tokens: list[list[str]]


def save_batch(
    path: Path, batch: RowBatch, adv_NL: np.ndarray, tokens: Sequence[Sequence[str]], *, step: int, method: str
) -> None:
    """Writes ``path`` atomically. ``tokens`` has one entry per row that is not padding, in row order."""
    arrays: dict[str, Any] = {"step": np.int64(step), "method": np.array(method), "adv_NL": adv_NL}
    arrays |= {k: v for k, v in vars(batch).items() if isinstance(v, np.ndarray)}
    arrays |= {f"{group}/{k}": v for group in _GROUPS for k, v in getattr(batch, group).items()}
    arrays = {k: v[batch.mask_NL] if _per_token(k) else v for k, v in arrays.items()}
    arrays["tokens"] = np.frombuffer(json.dumps([list(row) for row in tokens]).encode(), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)
    temporary.replace(path)


def load_batch(path: Path | str) -> SavedBatch:
    """Reads a file of ``save_batch``.

    Raises:
      DataError: the file is missing, torn or of another kind.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return _assemble(arrays)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{path} holds no saved batch ({error}).", "give a rollouts/batch_*.npz file of a run of this version."
        ) from error


def _assemble(arrays: dict[str, np.ndarray]) -> SavedBatch:
    mask_NL = arrays.pop(_MASK)
    step, method = int(arrays.pop("step")), str(arrays.pop("method"))
    tokens = json.loads(arrays.pop("tokens").tobytes())

    def wide(flat: np.ndarray) -> np.ndarray:
        out = np.zeros(mask_NL.shape, flat.dtype)
        out[mask_NL] = flat
        return out

    arrays = {name: wide(x) if _per_token(name) else x for name, x in arrays.items()}
    groups = {
        g: {k.removeprefix(f"{g}/"): arrays.pop(k) for k in list(arrays) if k.startswith(f"{g}/")} for g in _GROUPS
    }
    adv_NL = arrays.pop("adv_NL")
    fields: dict[str, Any] = {_MASK: mask_NL, **groups, **arrays}
    tokens += [[] for _ in range(len(mask_NL) - len(tokens))]
    return SavedBatch(step, method, RowBatch(**fields), adv_NL, tokens)


def _per_token(name: str) -> bool:
    return name != _MASK and (name.endswith("_NL") or name.startswith("views/"))
