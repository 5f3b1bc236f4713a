"""What a training method is, to a trainer that knows none of them.

A method turns a batch of rows into advantages (once per global step) and, optionally, adds an auxiliary loss on the
student's log-probabilities (in every mini-batch). It declares the log-probabilities it needs; the trainer provides them
and divides every sum by the global count.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from jax import Array

from sdjax.losses import TokenSum


@dataclass(frozen=True)
class RowBatch:
    """All rows of one global step, on the host, padded to a static number of rows (methods.md, sections 1 and 2).

    N rows, L response tokens. ``mask_NL`` is false on padding rows and after the last generated token. ``ok_N`` marks real
    rows. Log-probabilities are float32 nats and may hold anything off the mask.
    """

    group_N: np.ndarray
    trajectory_N: np.ndarray
    turn_N: np.ndarray
    ok_N: np.ndarray
    valid_N: np.ndarray
    return_N: np.ndarray
    outcome_N: np.ndarray
    success_N: np.ndarray
    score_N: np.ndarray
    adv_N: np.ndarray
    mask_NL: np.ndarray
    old_NL: np.ndarray
    reference_NL: np.ndarray
    views: Mapping[str, np.ndarray] = field(default_factory=dict)  # name of a view -> its log-probs [N, L]


@dataclass(frozen=True)
class Advantages:
    """adv_NL goes to the surrogate; metrics are scalars for ``metrics.jsonl``; weight_NL (optional) is what the transcript
    viewer shows as this method's token weight."""

    adv_NL: np.ndarray
    metrics: dict[str, float] = field(default_factory=dict)
    weight_NL: np.ndarray | None = None


@dataclass(frozen=True)
class Coefficients:
    """Weights of the loss parts in one global step; ``None`` keeps the value of the ``train`` config."""

    surrogate: float = 1.0
    auxiliary: float = 0.0
    entropy: float | None = None
    kl: float | None = None


class Method:
    """Base of all methods; as it stands it is GRPO. Subclasses set the class variables and override what differs.

    name: key in the registry. Config: frozen dataclass of this method's constants. views: log-probabilities the trainer
    must provide beside old and reference ones, e.g. ``("skills",)``. separable: whether ``auxiliary`` treats every token
    alone (then any layout and any micro-batch split gives the same sum; otherwise the trainer takes its two-pass path).
    weight_name: what ``Advantages.weight_NL`` or ``token_weight`` means, for people.
    """

    name: ClassVar[str] = "grpo"
    views: ClassVar[tuple[str, ...]] = ()
    separable: ClassVar[bool] = True
    weight_name: ClassVar[str] = ""

    @dataclass(frozen=True)
    class Config:
        pass

    def __init__(self, config: Any):
        self.config = config

    def coefficients(self, step: int, total_steps: int) -> Coefficients:
        """Coefficients of global step ``step`` (from 1)."""
        return Coefficients()

    def advantages(self, batch: RowBatch, step: int, total_steps: int) -> Advantages:
        """Advantages of all rows, once per global step, before the batch is cut into mini-batches."""
        return Advantages(np.where(batch.mask_NL, batch.adv_N[:, None], 0.0).astype(np.float32))

    def auxiliary(self, student: Array, fields: Mapping[str, Array], mask: Array) -> TokenSum | None:
        """Auxiliary loss as a sum over tokens; traced under jit.

        ``student`` carries the gradient. ``fields`` has ``old``, ``adv`` and one entry per view, all in the layout of
        ``student``: packed rows for a separable method, [rows, L] otherwise.
        """
        return None

    def token_weight(self, student: Array, fields: Mapping[str, Array], mask: Array) -> Array | None:
        """The weight that ``auxiliary`` gives each token, for notebooks and the transcript viewer."""
        return None
