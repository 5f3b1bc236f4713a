"""Metrics logs of other trainers as runs: JSON lines with verl's names (plain, .xz, .gz) and W&B history CSV.

A log has scores and times but no episodes, no panel hash and no config. What it does not say can be declared in a file
``labels.json`` in the same folder, by file name or by its stem:

    {"my_grpo": {"method": "grpo", "env": "alfworld", "model": "Qwen2.5-3B", "seed": 0, "tasks": 140, "devices": 4}}

What is neither declared nor in the log is read from the file's name or from keys that only one environment or method
has, and the report says so. Models that are not declared are told apart by their score before training.
"""

import csv
import functools
import gzip
import hashlib
import io
import json
import lzma
import math
import re
import statistics
import tomllib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdjax.errors import DataError
from sdjax.report import checks
from sdjax.report.records import ENV_NAMES, METHOD_NAMES, NET_PHASES, Metrics, Run, Validation

_SUFFIXES = (".jsonl", ".jsonl.xz", ".jsonl.gz", ".csv")
_STEP_KEYS = ("step", "_step", "global_step", "training/global_step", "trainer/global_step")
_MARKERS = ("timing_s/", "val/", "val-core/", "time/", "actor/")
_ROUNDING = 5e-7  # logs round scores to six decimals
_LARGEST_PANEL = 1000  # beyond it six decimals fit any score
_LABELS = frozenset({"method", "env", "model", "seed", "tasks", "devices"})

Row = dict[str, Any]


def is_log(path: Path) -> bool:
    """True if ``path`` looks like a metrics log: a known suffix, a step, and a metric of a trainer."""
    if not path.is_file() or not path.name.endswith(_SUFFIXES):
        return False
    try:
        with _open(path) as file:
            head = list(_first_lines(file, 3))
        if path.name.endswith(".csv"):
            return bool(head) and _step_column(next(csv.reader(head[:1]))) is not None and "/" in head[0]
        rows = [_flat(json.loads(line)) for line in head if line.strip().startswith("{")]
    except (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError, csv.Error):
        return False
    return any(_step(row) is not None and any(key.startswith(_MARKERS) for key in row) for row in rows)


def load_logs(path: Path | str) -> list[Run]:
    """Reads one file; a W&B CSV with several runs ("<run> - <metric>" columns) gives several.

    Raises:
      DataError: the file has no steps or no metric, or ``labels.json`` is wrong.
    """
    path = Path(path)
    found: list[str] = []
    if path.name.endswith(".csv"):
        tables, source = _csv_tables(path, found), "W&B CSV"
    else:
        tables, source = {_stem(path): _json_rows(path, found)}, "metrics log"
    runs = [_run(path, name, rows, source, found) for name, rows in tables.items() if rows]
    if not runs:
        raise DataError(
            f"{path} has no line with a step and a metric.",
            "give a run directory, or a log with one JSON object per step and keys such as val/success_rate.",
        )
    return runs


def _run(path: Path, name: str, rows: list[Row], source: str, found: Sequence[str]) -> Run:
    warnings = list(found)
    steps, raw = _columns(rows, warnings)
    labels = _labels(path, name)
    warnings += checks.foreign_warnings(raw)
    metrics = _translate(steps, raw, warnings)
    env, method = labels.get("env"), labels.get("method")
    guessed = [] if method else ["method"]
    guessed += [] if env else ["environment"]
    env, method = (
        env or _kind("environments", ENV_NAMES, name, raw),
        method or _kind("methods", METHOD_NAMES, name, raw),
    )
    if guessed:
        warnings.append(
            f"{' and '.join(guessed)} are not declared; read as {method} on {env} from the file's name and its keys."
        )
    values = _scores(raw, warnings)
    tasks = labels.get("tasks") or panel_size(list(values.values()))
    validations = tuple(_validation(step, values[step], tasks, metrics) for step in sorted(values))
    model = labels.get("model")
    if model is None:
        start = f"start {validations[0].value:.1f} %" if validations and validations[0].step == 0 else name
        model = f"unnamed, {start}"
        warnings.append("the model is not declared; runs of one environment that start at the same score are compared.")
    if tasks and not labels.get("tasks"):
        warnings.append(
            f"the panel size is not in the log; {tasks} tasks explain all scores and are used for the floor."
        )
    elif validations and not tasks:
        warnings.append(
            "the panel size is not in the log and cannot be derived: no noise floor, no collapse detection."
        )
    warnings += checks.metric_warnings(steps, metrics)
    warnings += checks.panel_warnings(validations, ())
    return Run(
        path=path,
        method=str(method),
        env=str(env),
        model=str(model),
        seed=labels.get("seed"),
        state="log",
        failure={},
        config={},
        provenance={},
        steps=steps,
        metrics=metrics,
        attempts=1,
        validations=validations,
        final=(),
        sampling={},
        ledger=(),
        rollout_files=(),
        warnings=tuple(warnings),
        source=source,
        name=name,
        fingerprint=hashlib.sha256(repr(sorted(raw.items())).encode()).hexdigest(),
        devices_stated=labels.get("devices") or _devices(raw),
    )


def panel_size(values: Sequence[float]) -> int:
    """The fewest tasks that explain shares with six decimals, 0 if unknown.

    The true panel may be a multiple of it, so a noise floor made from it is an upper bound. With fewer than three
    different scores, or beyond 1,000 tasks, many sizes fit and none is returned.
    """
    shares = sorted({value / 100 for value in values if 0 < value < 100})
    if len(shares) < 3:
        return 0
    for tasks in range(2, _LARGEST_PANEL + 1):
        if all(abs(share * tasks - round(share * tasks)) <= 1.2 * _ROUNDING * tasks for share in shares):
            return tasks
    return 0


def _validation(step: int, value: float, tasks: int, metrics: Metrics) -> Validation:
    share = min(1.0, max(0.0, value / 100))
    # Sample SD of n zeros and ones with this mean, over the root of n.
    error = 100 * math.sqrt(share * (1 - share) / (tasks - 1)) if tasks > 1 else math.nan
    net = 0.0 if step == 0 else metrics.get("cost/net_s", {}).get(step, math.nan)
    return Validation(step, value, error, tasks, 0, (checks.NO_HASH,), net)


def _columns(rows: Sequence[Row], warnings: list[str]) -> tuple[tuple[int, ...], Metrics]:
    """Numeric columns by step; of a repeated step the last value counts (W&B writes one step in several rows)."""
    columns: dict[str, dict[int, float]] = {}
    infinite: dict[str, list[int]] = {}
    repeated = 0
    previous = -1
    for row in rows:
        step = _step(row)
        if step is None:
            continue
        repeated += step < previous
        previous = step
        for key, value in row.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or key in _STEP_KEYS:
                continue
            if math.isfinite(value):
                columns.setdefault(key, {})[step] = float(value)
            else:
                infinite.setdefault(key, []).append(step)
    if repeated:
        warnings.append(f"the steps go back {repeated} times: a restart; the last line of each step counts.")
    warnings += [f"{key} is not finite at {checks.steps_text(at)}." for key, at in infinite.items()]
    steps = sorted({step for key, column in columns.items() if not key.startswith("val") for step in column})
    ordered = {key: dict(sorted(column.items())) for key, column in columns.items()}
    return tuple(step for step in steps if step > 0), ordered


def _translate(steps: Sequence[int], raw: Metrics, warnings: list[str]) -> dict[str, dict[int, float]]:
    """Their metrics under our names, and net time: step - validation - saving, cumulative."""
    metrics: dict[str, dict[int, float]] = {key: dict(column) for key, column in raw.items() if _is_own(key)}
    for theirs, ours in _aliases()["metrics"].items():
        if theirs in raw and ours not in metrics:
            metrics[ours] = dict(raw[theirs])
    wall = raw.get("timing_s/step")
    if wall is None:
        return metrics
    metrics["time/step_s"] = dict(wall)
    parts: dict[str, dict[int, float]] = {}
    for theirs, phase in _aliases()["times"].items():
        for step, value in raw.get(theirs, {}).items():
            column = parts.setdefault(phase, {})
            column[step] = column.get(step, 0.0) + value
    net, over, cumulative = 0.0, [], {}
    for step in steps:
        if step not in wall:
            warnings.append(f"no timing_s/step at step {step}: net time is unknown from there on.")
            break
        rest = wall[step] - sum(column.get(step, 0.0) for column in parts.values())
        if rest < -0.01 * wall[step]:
            over.append(step)
        parts.setdefault("other", {})[step] = max(0.0, rest)
        net += wall[step] - sum(parts.get(phase, {}).get(step, 0.0) for phase in ("validation", "save"))
        cumulative[step] = net
    if over:
        warnings.append(f"the parts of timing_s exceed timing_s/step at {checks.steps_text(over)}.")
    names = (*NET_PHASES, "validation", "save")
    metrics |= {f"time/{phase}_s": parts[phase] for phase in names if phase in parts}
    return metrics | {"cost/net_s": cumulative}


def _is_own(key: str) -> bool:
    return key.startswith(("train/", "rollout/", "engine/", "teacher/", "optim/", "method/", "time/", "cost/"))


def _scores(raw: Metrics, warnings: list[str]) -> dict[int, float]:
    """Validation scores in percent by step."""
    for entry in _aliases()["scores"]:
        keys = [key for key in raw if re.fullmatch(entry.get("pattern") or re.escape(entry["key"]), key)]
        if len(keys) == 1:
            factor = 100.0 if entry["unit"] == "share" else 1.0
            values = {step: factor * value for step, value in raw[keys[0]].items()}
            outside = [step for step, value in values.items() if not 0 <= value <= 100]
            if outside:
                warnings.append(f"{keys[0]} is impossible at {checks.steps_text(outside)}; these are left out.")
            return {step: value for step, value in values.items() if step not in set(outside)}
    seen = ", ".join(key for key in raw if key.startswith("val"))[:200]
    warnings.append(f"no single validation score is known ({'found ' + seen if seen else 'no val/ metric'}).")
    return {}


def _devices(raw: Metrics) -> int | None:
    """Devices = tokens / (seconds * tokens per second and device), if that is near a whole number."""
    keys = ("perf/total_num_tokens", "perf/time_per_step", "perf/throughput")
    columns = [raw.get(key, {}) for key in keys]
    counts = [
        columns[0][step] / (columns[1][step] * columns[2][step])
        for step in columns[0]
        if columns[1].get(step) and columns[2].get(step)
    ]
    middle = statistics.median(counts) if counts else 0.0
    return round(middle) if middle >= 0.98 and abs(middle - round(middle)) < 0.02 * middle else None


def _kind(table: str, names: Mapping[str, str], name: str, raw: Metrics) -> str:
    words = re.split(r"[^a-z0-9]+", name.lower())
    compact = {candidate.replace("_", ""): candidate for candidate in names}
    joined = [word for pair in zip(words, [*words[1:], ""], strict=True) for word in (pair[0] + pair[1], pair[0])]
    for word in joined:  # two words first: "skill_sd" before "sd", "grpo_opsd" before "grpo"
        if word in compact:
            return compact[word]
    for kind, pattern in _aliases()[table].items():
        if any(re.fullmatch(pattern, key) for key in raw):
            return kind
    return "unknown"


def _labels(path: Path, name: str) -> dict[str, Any]:
    file = path.parent / "labels.json"
    if not file.exists():
        return {}
    fix = f"write one object per log with keys out of {', '.join(sorted(_LABELS))}."
    try:
        table = json.loads(file.read_bytes())
    except ValueError as error:
        raise DataError(f"{file} is not valid JSON ({error}).", fix) from error
    entry = table.get(path.name, table.get(name, {})) if isinstance(table, dict) else None
    if not isinstance(entry, dict) or not entry.keys() <= _LABELS:
        raise DataError(f"{file}: the entry of {path.name} is {entry!r}.", fix)
    return entry


def _json_rows(path: Path, warnings: list[str]) -> list[Row]:
    lines, rows, bad = _read_lines(path, warnings), [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
        except ValueError:
            bad.append(number)
            continue
        rows.append(_flat(row))
    if bad:
        last = bad == [len(lines)]
        what = "the last line is torn" if last else f"{len(bad)} lines are no JSON objects (first: line {bad[0]})"
        warnings.append(f"{path.name}: {what}; left out.")
    without = sum(_step(row) is None for row in rows)
    if without:
        warnings.append(f"{path.name}: {without} lines without a step were left out.")
    return [row for row in rows if _step(row) is not None]


def _flat(row: Mapping[str, Any]) -> Row:
    """verl's file logger writes {"step": n, "data": {...}}."""
    data = row.get("data")
    return {**row, **data} if isinstance(data, dict) else dict(row)


def _csv_tables(path: Path, warnings: list[str]) -> dict[str, list[Row]]:
    """One table per run: a history ("_step", "val/success_rate") or a panel export ("Step", "run - metric")."""
    reader = csv.DictReader(io.StringIO("\n".join(_read_lines(path, warnings))), restkey="")
    header = list(reader.fieldnames or [])
    column = _step_column(header)
    if column is None:
        raise DataError(f"{path} has no step column (columns: {', '.join(header[:8])}).", "export it with the step.")
    tables: dict[str, list[Row]] = {}
    unreadable = 0
    for cells in reader:
        step = _number(cells.get(column))
        if step is None or step != int(step):
            unreadable += 1
            continue
        rows: dict[str, Row] = {}
        for key, text in cells.items():
            value = _number(text)
            if value is None or key == column or re.search(r"__(MIN|MAX)$", key):
                continue
            run, _, metric = key.rpartition(" - ")
            rows.setdefault(run or _stem(path), {"step": int(step)})[metric] = value
        for run, row in rows.items():
            tables.setdefault(run, []).append(row)
    if unreadable:
        warnings.append(f"{path.name}: {unreadable} rows without a whole step were left out.")
    return tables


def _step_column(header: Iterable[str]) -> str | None:
    by_name = {name.strip().lower(): name for name in header}
    return next((by_name[key] for key in ("training/global_step", *_STEP_KEYS) if key in by_name), None)


def _step(row: Mapping[str, Any]) -> int | None:
    for key in _STEP_KEYS:
        value = row.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
            return int(value) if value == int(value) else None
    return None


def _number(text: Any) -> float | None:
    try:
        return float(text) if isinstance(text, str) and text.strip() else None
    except ValueError:
        return None


def _open(path: Path) -> Any:
    opener = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    return opener(path, "rt", encoding="utf-8", errors="replace")


def _first_lines(file: Iterable[str], count: int) -> Iterable[str]:
    for _, line in zip(range(count), file, strict=False):
        yield line


def _read_lines(path: Path, warnings: list[str]) -> list[str]:
    """Lines of a file; of a damaged archive those before the damage."""
    lines: list[str] = []
    try:
        with _open(path) as file:
            lines.extend(file)
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        warnings.append(f"{path.name}: the archive is damaged ({error}); what stands before the damage was read.")
    return [line.rstrip("\n") for line in lines]


def _stem(path: Path) -> str:
    return re.sub(r"\.(jsonl|csv)(\.xz|\.gz)?$", "", path.name)


@functools.cache
def _aliases() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "aliases.toml").read_text(encoding="utf-8"))
