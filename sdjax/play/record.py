"""How an episode ended."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    """status: a Status value, or "stopped" where the player gave up. ret: sum of rewards. score: the benchmark's."""

    task: str
    family: str
    status: str
    score: float
    ret: float
    turns: int
