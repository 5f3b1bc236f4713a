"""Range and consistency checks over one run: impossible values are named, not drawn quietly."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sdjax.report.records import EXCLUDED_PHASES, NET_PHASES, Episode, Metrics, Phase, Validation

NO_HASH = "no hash"
# Pattern of a key in other trainers' logs, lowest and highest possible value, what the value is.
_RANGES = (
    (r"perf/mfu(/.*)?", 0.0, 1.0, "a share of the hardware's peak"),
    (r"(val|episode)/(.*_)?success_rate", 0.0, 1.0, "a share of episodes"),
    (r".*(valid_action_ratio|clip_ratio|clipfrac(_lower)?|positive_ratio|active_ratio)", 0.0, 1.0, "a share"),
    (r"timing_s/.*", 0.0, math.inf, "a duration"),
    (r"perf/(throughput|total_num_tokens|time_per_step)", 0.0, math.inf, "a count or a duration"),
    (r"(actor|optim)/grad_norm", 0.0, math.inf, "a norm"),
)
_TOLERANCE = 0.01  # parts of a step must sum to its wall time within this share
_SLACK_S = 0.05  # and clocks of very short steps within this


def nonfinite_warnings(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Metrics written as NaN or infinity."""
    steps: dict[str, list[int]] = {}
    for line in lines:
        for key, value in line.items():
            if isinstance(value, float) and not math.isfinite(value):
                steps.setdefault(key, []).append(line["step"])
    return [f"{key} is not finite at {steps_text(found)}." for key, found in steps.items()]


def foreign_warnings(metrics: Metrics) -> list[str]:
    """Values in a log of another trainer that cannot be true (its own names)."""
    found = []
    for pattern, low, high, what in _RANGES:
        for key, column in metrics.items():
            if not re.fullmatch(pattern, key):
                continue
            outside = [value for value in column.values() if value < low or value > high]
            if outside:
                span = f"{min(outside):.3g}" if len(outside) == 1 else f"{min(outside):.3g} to {max(outside):.3g}"
                found.append(f"{key} is impossible at {len(outside)} of {len(column)} steps ({span}): {what}.")
    valid = metrics.get("episode/valid_action_ratio", {})
    success = metrics.get("episode/success_rate", {})
    if valid and max(valid.values()) == 0 and max(success.values(), default=0) > 0:
        found.append(
            f"episode/valid_action_ratio is 0 throughout ({len(valid)} steps) although up to "
            f"{100 * max(success.values()):.0f} % of the episodes succeed: it was not measured."
        )
    return found


def metric_warnings(steps: Sequence[int], metrics: Metrics) -> list[str]:
    """Shares outside 0..1, negative times, clocks that run backwards, missing steps, steps whose parts do not sum."""
    found = []
    for key, values in metrics.items():
        if key.endswith("_frac") or key == "train/win_rate":
            outside = [step for step, value in values.items() if value < 0 or value > 1]
            if outside:
                found.append(f"{key} is outside 0..1 at {steps_text(outside)}.")
        if key.startswith(("time/", "cost/")):
            negative = [step for step, value in values.items() if value < 0]
            if negative:
                found.append(f"{key} is negative at {steps_text(negative)}.")
        if key == "cost/net_s" or (key.startswith("cost/") and key.endswith("_gpu_h")):  # the cumulative ones
            backwards = [step for before, step in itertools.pairwise(values) if values[step] < values[before]]
            if backwards:
                found.append(f"{key} runs backwards at {steps_text(backwards)}: a clock was reset.")
    missing = sorted(set(range(1, max(steps, default=0) + 1)) - set(steps))
    if missing:
        found.append(f"metrics.jsonl has no line for {steps_text(missing)}.")
    wrong = [step for step, wall in metrics.get("time/step_s", {}).items() if not _sums_up(metrics, step, wall)]
    return found + ([f"time/* does not sum to time/step_s within 1 % at {steps_text(wrong)}."] if wrong else [])


def _sums_up(metrics: Metrics, step: int, wall: float) -> bool:
    def total(phases: Iterable[str]) -> float:
        return sum(metrics.get(f"time/{phase}_s", {}).get(step, 0.0) for phase in phases)

    slack = _TOLERANCE * abs(wall) + _SLACK_S
    # Both conventions occur: a step with or without the validation that follows it.
    parts = (total(NET_PHASES), total((*NET_PHASES, *EXCLUDED_PHASES)))
    return any(abs(part - wall) <= slack for part in parts)


def ledger_warnings(ledger: Sequence[Phase], metrics: Metrics) -> list[str]:
    """Negative durations, ends before starts, and a ledger that disagrees with the cumulative cost metric."""
    found = []
    negative = sum(phase.seconds < 0 for phase in ledger)
    if negative:
        found.append(f"ledger.jsonl: {negative} phases have negative seconds.")
    backwards = sum(p.start is not None and p.end is not None and p.end < p.start for p in ledger)
    if backwards:
        found.append(f"ledger.jsonl: {backwards} phases end before they start: a clock ran backwards.")
    cost = metrics.get("cost/net_s", {})
    if ledger and cost:
        last, metric = max(cost), cost[max(cost)]
        total = sum(p.seconds for p in ledger if p.booked in NET_PHASES and p.step is not None and p.step <= last)
        if abs(total - metric) > _TOLERANCE * max(total, metric) + _SLACK_S * len(cost):
            found.append(f"net time is {total:.1f} s in ledger.jsonl but {metric:.1f} s in metrics.jsonl.")
    return found


def panel_warnings(validations: Sequence[Validation], final: Sequence[Episode]) -> list[str]:
    """Panels that change inside one run, evaluations without a panel hash, evaluations of unequal size."""
    found = []
    seen = {
        "validations": {panel for validation in validations for panel in validation.panels},
        "final evaluation": {episode.panel for episode in final},
    }
    for name, panels in seen.items():
        if len(panels) > 1:
            listed = ", ".join(sorted(panel[:12] for panel in panels))
            found.append(f"the {name} mix the panels {listed}: no statistic over them.")
        if NO_HASH in panels:
            found.append(f"{name} without a panel hash, so that equal panels cannot be verified.")
    sizes = Counter(validation.episodes for validation in validations)
    if len(sizes) > 1:
        usual = sizes.most_common(1)[0][0]
        odd = [validation.step for validation in validations if validation.episodes != usual]
        found.append(f"validation at {steps_text(odd)} does not have the usual {usual} episodes.")
    per_seed = Counter(episode.rollout_seed for episode in final).values()
    if len(set(per_seed)) > 1:
        found.append(f"the final evaluation has between {min(per_seed)} and {max(per_seed)} episodes per seed.")
    return found


def steps_text(steps: Iterable[int], limit: int = 6) -> str:
    """ "step 4" or "steps 1, 2, … (9 in all)"."""
    numbers = list(steps)
    shown = ", ".join(map(str, numbers[:limit])) + (f", … ({len(numbers)} in all)" if len(numbers) > limit else "")
    return ("step " if len(numbers) == 1 else "steps ") + shown
