"""The stored batch: inputs and the numpy reference's outputs, so that a change of formula shows up as a diff of a file.

`python -m tests.losses.golden` in the repository root writes it anew.
"""

import json
from pathlib import Path

import numpy as np

from .batches import LOG_PROBS, Batch, make_batch
from .reference import REFERENCE_ADVANTAGES, REFERENCE_LOSSES

PATH = Path(__file__).parent / "data" / "golden.json"
INTEGERS = ("group", "trajectory", "turn")
FLAGS = ("action_valid", "success", "eligible", "ok")
FLOATS = ("ret", "score", "adv")


def load() -> tuple[Batch, dict]:
    """The batch (NaN off the mask) and its stored outputs: losses name -> total, advantages name -> valid tokens."""
    stored = json.loads(PATH.read_text())
    x = stored["inputs"]
    mask = np.array(x["mask"], bool)
    log_probs = {}
    for name in LOG_PROBS:
        log_probs[name] = np.full(mask.shape, np.nan)
        log_probs[name][mask] = x[name]
    batch = Batch(
        mask=mask,
        **{name: np.array(x[name], int) for name in INTEGERS},
        **{name: np.array(x[name], bool) for name in FLAGS},
        **{name: np.array(x[name], float) for name in FLOATS},
        **log_probs,
    )
    return batch.filled(np.nan), stored["outputs"]


def write() -> None:
    b = make_batch(11).filled(0.0)
    rounded = {name: np.round(getattr(b, name), 4) for name in (*LOG_PROBS, *FLOATS)}
    b = b.replace(**rounded)
    inputs = {name: getattr(b, name).astype(int).tolist() for name in (*INTEGERS, *FLAGS, "mask")}
    inputs |= {name: rounded[name].tolist() for name in FLOATS}
    inputs |= {name: rounded[name][b.mask].tolist() for name in LOG_PROBS}
    losses = {name: round(float(make(b)[0](b.lS)), 13) for name, make in REFERENCE_LOSSES.items()}
    advantages = {name: np.round(make(b)[b.mask], 12).tolist() for name, make in REFERENCE_ADVANTAGES.items()}
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(json.dumps({"inputs": inputs, "outputs": {"losses": losses, "advantages": advantages}}) + "\n")


if __name__ == "__main__":
    write()
