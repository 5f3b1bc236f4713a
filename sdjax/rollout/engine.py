"""The engine protocol: token ids in, token ids and their log-probabilities out."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is drawn. The parameters *used* are stored with every episode.

    temperature: 0 is greedy. Nucleus and top-k sampling do not exist here on purpose: they would renormalise the
    log-probabilities that the trainer compares with the full softmax.
    """

    temperature: float = 1.0
    max_new_tokens: int = 512


@dataclass(frozen=True)
class Request:
    """One completion to draw. ``seed`` comes from ``sdjax.seeds.derive_seed``; ``name`` is for messages and logs.

    session: the same for all turns of one episode, so that an engine of several servers can keep them together.
    """

    prompt: np.ndarray  # [P] int32
    seed: int
    sampling: SamplingParams
    name: str = ""
    session: str = ""


@dataclass(frozen=True)
class Completion:
    """What was drawn.

    tokens: [R] int32, the stop token included when one was drawn.
    logps: [R] float32, nats, log softmax(logits / temperature) of each token (temperature 0: of the plain logits).
    finish: "stop" (a stop id was drawn), "length" (budget spent) or "abort" (engine gave up; tokens may be empty).
    weight_version: version of the weights that drew every token.
    """

    tokens: np.ndarray
    logps: np.ndarray
    finish: str
    weight_version: int


@dataclass
class EngineStats:
    """Counters since start; the rollout loop logs their differences."""

    prompt_tokens: int = 0  # tokens of all prompts asked for
    prefill_tokens: int = 0  # of these, tokens that went through the model (the rest was shared)
    decode_tokens: int = 0  # tokens returned
    decode_steps: int = 0
    seconds: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """A rollout engine. ``generate`` may be awaited by any number of episodes at the same time."""

    stats: EngineStats

    async def generate(self, request: Request) -> Completion: ...

    def update_weights(self, params: Any, version: int) -> None: ...

    def sleep(self) -> None:
        """Gives memory back that nobody needs until the next ``update_weights``."""
        ...

    def health(self) -> dict[str, Any]: ...

    def close(self) -> None: ...
