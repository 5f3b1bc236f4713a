"""What one run directory says, as frozen records: the only input of tables, figures and page."""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

NET_PHASES = ("rollout", "teacher", "score", "update", "sync", "other")
EXCLUDED_PHASES = ("validation", "save", "compile", "startup")
LOST = "lost to restarts"
SCORE_ENVS = frozenset({"scienceworld", "searchqa"})  # the others are judged by success
METRIC_NAMES = {"scienceworld": "mean task score", "searchqa": "exact match"}
METHOD_NAMES = {
    "grpo": "GRPO",
    "grpo_opsd": "GRPO+OPSD",
    "sdar": "SDAR",
    "skill_sd": "Skill-SD",
    "rlsd": "RLSD",
    "ocsd": "OCSD",
    "ovcsd": "OVCSD",
    "agent_opsd": "AgentOPSD",
    "adrs": "ADRS",
    "icsd": "ICSD",
    "pcsd": "PCSD",
    "grsd": "GRSD",
    "fa_sd": "FA-SD",
    "gigpo": "GiGPO",  # not trained here; logs of other trainers have it
}
ENV_NAMES = {"alfworld": "ALFWorld", "scienceworld": "ScienceWorld", "webshop": "WebShop", "searchqa": "Search-QA"}

Metrics = Mapping[str, Mapping[int, float]]  # metric key -> step (completed updates) -> value


class Episode(NamedTuple):  # a study has millions of them
    """One evaluated episode. ``value`` is in percent, NaN if the episode failed (an error, not a lost game)."""

    task: str
    value: float
    failed: bool
    panel: str
    rollout_seed: int = 0


@dataclasses.dataclass(frozen=True)
class Validation:
    """One validation.

    Attributes:
      step: completed updates.
      value, se: mean over the scored episodes in percent, and its standard error over tasks.
      episodes, failed: episodes in the file, and how many of them failed. In a log without episodes, the tasks that the
        scores imply, 0 if they imply none.
      panels: hashes of the panel found (one, if all is well).
      net_s: cumulative net training seconds, NaN if unknown.
    """

    step: int
    value: float
    se: float
    episodes: int
    failed: int
    panels: tuple[str, ...]
    net_s: float


@dataclasses.dataclass(frozen=True)
class Phase:
    """One ledger line. ``booked`` is the phase, or `LOST` for work that a restart repeated."""

    phase: str
    seconds: float
    step: int | None
    attempt: int
    devices: int
    start: float | None
    end: float | None
    booked: str


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One further look at the panel, kept per task for the decoding check.

    Attributes:
      name: "validation", "greedy validation", "sampled validation", ...
      step: completed updates.
      temperature: of the sampling, None if it is not recorded.
      values: percent per task, without failed episodes.
      panels: hashes of the panel found.
    """

    name: str
    step: int
    temperature: float | None
    values: Mapping[str, float]
    panels: frozenset[str]


@dataclasses.dataclass(frozen=True, eq=False)  # identity: two runs are never "equal"
class Run:
    """One run: a run directory, or the metrics log of another trainer.

    Attributes:
      path: the directory, or the file.
      method, env, model, seed: what was trained, from config.json ("unknown" and None where it is missing).
      state: "done", "failed", "unfinished" or "not run".
      failure: content of FAILED.json if the state is "failed".
      config, provenance: the JSON objects.
      steps: completed updates with a metrics line, in order.
      metrics: numeric metrics; of repeated steps the latest line.
      attempts: number of starts seen in metrics and ledger.
      validations: in the order of steps.
      final: episodes of the final evaluation, all rollout seeds.
      sampling: sampling parameters used, {"validation": {...}, "final": {...}}.
      ledger: in the order of the file.
      rollout_files: saved transcripts in the order of their steps.
      warnings: sentences for the reader.
      label: short name, unique among the runs of one setting.
      looks: evaluations at the last validated step, per task (see `Evaluation`).
      source: "run directory", or the kind of log.
      name: what tells the run from another one with the same method and seed.
      fingerprint: hash of its metrics, to recognise copies.
      devices_stated: accelerators, if the ledger does not say.
    """

    path: Path
    method: str
    env: str
    model: str
    seed: int | None
    state: str
    failure: Mapping[str, Any]
    config: Mapping[str, Any]
    provenance: Mapping[str, Any]
    steps: tuple[int, ...]
    metrics: Metrics
    attempts: int
    validations: tuple[Validation, ...]
    final: tuple[Episode, ...]
    sampling: Mapping[str, Mapping[str, Any]]
    ledger: tuple[Phase, ...]
    rollout_files: tuple[Path, ...]
    warnings: tuple[str, ...]
    label: str = ""
    looks: tuple[Evaluation, ...] = ()
    source: str = "run directory"
    name: str = ""
    fingerprint: str = ""
    devices_stated: int | None = None

    @property
    def devices(self) -> int:
        """Accelerators that the run held, 1 if nothing says."""
        return max((phase.devices for phase in self.ledger), default=self.devices_stated or 1)

    @property
    def copy_key(self) -> tuple | None:
        """Equal for copies of one run; None if it has no metrics to tell by."""
        return (*self.setting, self.method, self.seed, self.fingerprint) if self.fingerprint else None

    @property
    def method_name(self) -> str:
        return METHOD_NAMES.get(self.method, self.method)

    @property
    def setting(self) -> tuple[str, str]:
        return self.env, self.model

    @property
    def setting_name(self) -> str:
        return f"{ENV_NAMES.get(self.env, self.env)} / {self.model}"

    @property
    def metric_name(self) -> str:
        return METRIC_NAMES.get(self.env, "success rate")

    @property
    def steps_done(self) -> int:
        return self.steps[-1] if self.steps else 0

    @property
    def validation_steps(self) -> list[int]:
        return [validation.step for validation in self.validations]

    @property
    def validation_values(self) -> list[float]:
        return [validation.value for validation in self.validations]

    @property
    def validation_net(self) -> list[float]:
        return [validation.net_s for validation in self.validations]

    @functools.cached_property
    def validation_panels(self) -> frozenset[str]:
        return frozenset(panel for validation in self.validations for panel in validation.panels)

    @functools.cached_property  # over thousands of episodes
    def final_panels(self) -> frozenset[str]:
        return frozenset(episode.panel for episode in self.final)

    @functools.cached_property
    def final_seeds(self) -> list[int]:
        return sorted({episode.rollout_seed for episode in self.final})

    def net_seconds(self, step: int) -> float:
        """Cumulative net training time after ``step`` updates, NaN if it is not recorded."""
        return net_seconds(self.metrics, step)


def setting_order(setting: tuple[str, str]) -> tuple:
    """Sort key: environments as in `ENV_NAMES`, then models by the first number in their name, their size."""
    env, model = setting
    known = list(ENV_NAMES)
    size = re.search(r"\d+(\.\d+)?(?=[bB]\b)", model) or re.search(r"\d+(\.\d+)?", model)
    return known.index(env) if env in known else len(known), env, float(size[0]) if size else 0.0, model


def method_order(method: str) -> int:
    """Sort key: as in `METHOD_NAMES`, the baseline first, unknown methods last."""
    known = list(METHOD_NAMES)
    return known.index(method) if method in known else len(known)


def net_seconds(metrics: Metrics, step: int) -> float:
    """Cumulative net seconds after ``step`` updates: ``cost/net_s``, else the sum of the net phases up to there."""
    if step == 0:
        return 0.0
    if "cost/net_s" in metrics:
        return metrics["cost/net_s"].get(step, math.nan)
    phases = [metrics[f"time/{phase}_s"] for phase in NET_PHASES if f"time/{phase}_s" in metrics]
    if not any(step in phase for phase in phases):
        return math.nan
    return sum(value for phase in phases for at, value in phase.items() if at <= step)
