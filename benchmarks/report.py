"""Time and size of the report over a study of full size: 132 runs, 21 validations, 8 rollout seeds, full panels.

    python -m benchmarks.report [--keep=FOLDER]

The study is synthetic (3.4 million episode lines, 1.3 GB) and is written first; that is not timed. Target: at most
60 s on two cores and at most 8 MB. The wall clock includes what else the machine does; ``cpu_s`` does not.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sdjax.report import build_report, find_runs
from tests.report.synthetic_study import write_study

RESULT = Path(__file__).parent / "results" / "report.json"
TARGET_S, TARGET_BYTES = 60.0, 8_000_000


def measure(folder: Path) -> dict[str, Any]:
    """Builds the report once; ``cpu_s`` is the work of all its processes, ``load_before`` what else the machine did."""
    study = folder / "study"
    if not study.exists():
        write_study(study)
    runs = find_runs([study])
    busy, used = os.getloadavg()[0], _cpu_seconds()
    start = time.perf_counter()
    out = build_report(runs, folder / "report.html")
    wall = time.perf_counter() - start
    memory = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "runs": len(runs),
        "validations": sum(len(list(run.glob("val/*.jsonl"))) for run in runs),
        "megabytes_read": round(sum(file.stat().st_size for file in study.rglob("*.jsonl")) / 1e6),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(busy, 1),
        "wall_s": round(wall, 1),
        "cpu_s": round(_cpu_seconds() - used, 1),
        "target_s": TARGET_S,
        "bytes": out.stat().st_size,
        "target_bytes": TARGET_BYTES,
        "memory_largest_process_gb": round(max(memory) / 1e6, 2),
    }


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="write the study and the report here and leave them")
    options = parser.parse_args()
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        result = measure(options.keep)
    else:
        with tempfile.TemporaryDirectory() as folder:
            result = measure(Path(folder))
    table = Table(title="report over a full-size study")
    table.add_column("quantity")
    table.add_column("value", justify="right")
    for name, value in result.items():
        table.add_row(name, f"{value:,}")
    Console().print(table)
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
