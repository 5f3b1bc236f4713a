"""Seeds as a pure function of what is being drawn.

A draw never depends on how many workers run, on the order in which episodes finish or on how often a run was resumed.
"""

import hashlib


def derive_seed(run_seed: int, purpose: str, *, step: int = 0, task: str = "", sample: int = 0, turn: int = 0) -> int:
    """Returns a 31-bit seed for one draw, e.g.

    ``derive_seed(7, "rollout", step=3, task=game_id, sample=2, turn=5)``.
    """
    key = f"{run_seed}|{purpose}|{step}|{task}|{sample}|{turn}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") & 0x7FFFFFFF
