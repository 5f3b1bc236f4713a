"""What a training method is, to a trainer that knows none of them.

A method turns a batch of rows into advantages (once per global step) and, optionally, adds an auxiliary loss on the
student's log-probabilities (in every mini-batch). It declares the log-probabilities it needs; the trainer provides them
and divides every sum by the global count.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from jax import Array

from sdjax.errors import ConfigError
from sdjax.losses import TokenSum
from sdjax.rollout.continuations import ContinuationRules


@dataclass(frozen=True)
class ActingRules:
    """What a method wants of an acting teacher: verified continuations, and from them extra rows.

    scope: which tokens of a response count: those of its last action block, or all. suffix_topk: teacher
    log-probabilities kept for each token after a site. reserve_rows: extra rows of one step at most; the last suffix
    rows are dropped first.
    """

    search: ContinuationRules
    scope: Literal["action", "response"]
    suffix_topk: int
    reserve_rows: int


@dataclass(frozen=True)
class SiteRows:
    """What verified continuations add to a batch (N as there). A site is one action of the teacher, which is a row of
    its own with the student's plain prompt, and the students' actions in the same state.

    site_N: site of the row, -1 for none. teacher_N: the row is a teacher's action. action_NL: tokens in scope, only in
    rows of a site. triggered_N: rows of the groups in which a win was searched. home_N: group whose place in the order
    of training the row takes; it differs from ``group_N`` in extra rows, which have a group of their own in all
    statistics.
    """

    site_N: np.ndarray
    teacher_N: np.ndarray
    action_NL: np.ndarray
    triggered_N: np.ndarray
    home_N: np.ndarray


@dataclass(frozen=True)
class RowBatch:
    """All rows of one global step, on the host, padded to a static number of rows (methods.md, sections 1 and 2).

    N rows, L response tokens. ``mask_NL`` is false on padding rows and after the last generated token. ``ok_N`` marks
    real rows. Log-probabilities are float32 nats and may hold anything off the mask. ``views`` and ``context`` are
    keyed by the name of a view: its log-probabilities [N, L] (equal to the old ones in rows that were not scored), and
    [N] bool, whether the row has a privileged text of that kind.
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
    views: Mapping[str, np.ndarray] = field(default_factory=dict)
    context: Mapping[str, np.ndarray] = field(default_factory=dict)
    sites: SiteRows | None = None  # None: no continuation was verified
    engine_weight_NL: np.ndarray | None = None  # weight of each token's surrogate (losses.mismatch_weight); None: 1


@dataclass(frozen=True)
class Advantages:
    """adv_NL goes to the surrogate; metrics are scalars for ``metrics.jsonl``; weight_NL (optional) is what the
    transcript viewer shows as this method's token weight."""

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
    suffix: float = 0.0


class Method:
    """Base of all methods; as it stands it is GRPO. Subclasses set the class variables and override what differs.

    name: key in the registry. Config: frozen dataclass of this method's constants. presets: what ``Config.preset`` may
    be. views: log-probabilities the trainer must provide beside old and reference ones, e.g. ``("skills",)``.
    extra_validations: what to validate beside the usual decoding (``config.EXTRA_VALIDATIONS``).
    optional_context: whether rows without a privileged text are part of the method (elsewhere such a row is an error).
    teacher_weights: whose parameters score, unless the config says otherwise: theta_old, ema or init. separable:
    whether ``auxiliary`` treats every token alone (then any layout and any micro-batch split gives the same sum;
    otherwise the trainer takes its two-pass path). acts: whether a teacher has to act (``acting``). weight_name: what
    ``Advantages.weight_NL`` or ``token_weight`` means, for people.
    """

    name: ClassVar[str] = "grpo"
    presets: ClassVar[tuple[str, ...]] = ("default",)
    views: ClassVar[tuple[str, ...]] = ()
    optional_context: ClassVar[bool] = False
    extra_validations: ClassVar[tuple[str, ...]] = ()
    teacher_weights: ClassVar[str] = "theta_old"
    separable: ClassVar[bool] = True
    acts: ClassVar[bool] = False
    weight_name: ClassVar[str] = ""

    @dataclass(frozen=True)
    class Config:
        """A key that is None takes its value from the preset and the environment; a key that is set wins."""

        preset: str = "default"

    def __init__(self, config: Any):
        self.config = config

    @classmethod
    def preset_values(cls, preset: str, environment: str) -> dict[str, Any]:
        """Values of the keys that are None, for one preset and environment. A missing key stays None."""
        return {}

    @classmethod
    def resolve(cls, config: Any, environment: str) -> Any:
        """``config`` with every key filled in: constants as they are used, for ``config.json`` and for ``__init__``.

        Raises:
          ConfigError: the preset does not exist for this method.
        """
        preset = getattr(config, "preset", "default")  # a method with one set of constants needs no such key
        if preset not in cls.presets:
            raise ConfigError(
                f"method.preset = {preset!r} is not a preset of {cls.name}.", f"use one of {', '.join(cls.presets)}."
            )
        values = cls.preset_values(preset, environment)
        return dataclasses.replace(config, **{k: v for k, v in values.items() if getattr(config, k) is None})

    def clip_high(self) -> float | None:
        """Upper clip of the surrogate if the method sets its own; ``None`` keeps ``train.clip_high``."""
        return None

    def coefficients(self, step: int, total_steps: int) -> Coefficients:
        """Coefficients of global step ``step`` (from 1)."""
        return Coefficients()

    def select(self, batch: RowBatch) -> np.ndarray:
        """Rows [N] that the teacher has to score, from old log-probabilities and ``batch.context``."""
        return batch.ok_N

    def acting(self) -> ActingRules:
        """What the acting teacher has to do; asked only if ``acts``."""
        raise NotImplementedError(f"{self.name} has no acting teacher.")

    def triggered(self, batch: RowBatch) -> np.ndarray:
        """Rows [N] of the groups in which the acting teacher searches a win; asked only if ``acts``."""
        raise NotImplementedError(f"{self.name} has no acting teacher.")

    def suffix_weight(self, site_N: np.ndarray, mask_NL: np.ndarray) -> np.ndarray:
        """Weight [N, L] of the teacher's tokens after a site, over the whole global step; asked only if ``acts``.

        ``site_N`` is -1 in padding rows. The loss is the weighted sum of the forward KL over the teacher's top tokens.
        """
        raise NotImplementedError(f"{self.name} has no acting teacher.")

    def advantages(self, batch: RowBatch, step: int, total_steps: int) -> Advantages:
        """Advantages of all rows, once per global step, before the batch is cut into mini-batches."""
        return Advantages(np.where(batch.mask_NL, batch.adv_N[:, None], 0.0).astype(np.float32))

    def auxiliary(self, student: Array, fields: Mapping[str, Array], mask: Array) -> TokenSum | None:
        """Auxiliary loss as a sum over tokens; traced under jit.

        ``student`` carries the gradient. ``fields`` has ``old``, ``adv`` and one entry per view, all in the layout of
        ``student``: packed rows for a separable method, [rows, L] otherwise. ``mask`` is already cut to
        ``auxiliary_mask``.
        """
        return None

    def auxiliary_mask(self, batch: RowBatch) -> np.ndarray | None:
        """Tokens [N, L] of the auxiliary loss, which is divided by their number; ``None``: every valid token."""
        return None

    def step_metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        """Further metrics of a global step from its token means (names as in ``metrics.jsonl``)."""
        return {}

    def token_weight(self, student: Array, fields: Mapping[str, Array], mask: Array) -> Array | None:
        """The weight that ``auxiliary`` gives each token, for notebooks and the transcript viewer."""
        return None
