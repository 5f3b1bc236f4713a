"""What one run directory says, as frozen records: the only input of tables, figures and page."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NET_PHASES = ("rollout", "teacher", "score", "update", "sync", "other")
EXCLUDED_PHASES = ("validation", "save", "compile", "startup")
LOST = "lost to restarts"
SCORE_ENVS = frozenset({"scienceworld", "searchqa"})  # the others are judged by success
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
}
ENV_NAMES = {"alfworld": "ALFWorld", "webshop": "WebShop", "scienceworld": "ScienceWorld", "searchqa": "Search-QA"}

Metrics = Mapping[str, Mapping[int, float]]  # metric key -> step (completed updates) -> value


@dataclasses.dataclass(frozen=True)
class Episode:
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
      episodes, failed: episodes in the file, and how many of them failed.
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


@dataclasses.dataclass(frozen=True, eq=False)  # identity: two runs are never "equal"
class Run:
    """One run directory.

    Attributes:
      path: the directory.
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
        return "mean task score" if self.env in SCORE_ENVS else "success rate"

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

    @property
    def validation_panels(self) -> frozenset[str]:
        return frozenset(panel for validation in self.validations for panel in validation.panels)

    @property
    def final_panels(self) -> frozenset[str]:
        return frozenset(episode.panel for episode in self.final)

    @property
    def final_seeds(self) -> list[int]:
        return sorted({episode.rollout_seed for episode in self.final})

    def net_seconds(self, step: int) -> float:
        """Cumulative net training time after ``step`` updates, NaN if it is not recorded."""
        return net_seconds(self.metrics, step)


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
