"""Speed of whole training steps, read from the run directories of finished runs.

    python -m benchmarks.step runs/quickstart/grpo runs/quickstart/sdar

Prints rollout turns/s, tokens/s and update tokens/s (medians over steps, compilation taken out) and writes them to
benchmarks/results/step.json, with the ratio of each run's net step time to that of the first.
"""

import json
import statistics
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sdjax import jsonl
from sdjax.train.ledger import NET

RESULTS = Path(__file__).parent / "results" / "step.json"


def measure(run: Path) -> dict[str, float]:
    """Medians over the steps of one run; the first step, which compiles, is left out."""
    lines = [line for line in jsonl.read(run / "metrics.jsonl") if line["step"] > 1]

    def median(value) -> float:
        return statistics.median(value(line) for line in lines)

    tokens = lambda r: r["rollout/rows"] * (r["rollout/prompt_tokens_mean"] + r["rollout/response_tokens_mean"])  # noqa: E731
    return {
        "steps": len(lines),
        "net_step_s": median(lambda r: sum(r[f"time/{phase}_s"] for phase in NET)),
        "rollout_turns_per_s": median(lambda r: r["rollout/rows"] / r["time/rollout_s"]),
        "rollout_drawn_tokens_per_s": median(lambda r: r["engine/decode_tokens"] / r["time/rollout_s"]),
        "rollout_prefill_tokens_per_s": median(lambda r: r["engine/prefill_tokens"] / r["time/rollout_s"]),
        "update_tokens_per_s": median(lambda r: tokens(r) / r["time/update_s"]),
        "score_tokens_per_s": median(lambda r: 2 * tokens(r) / r["time/score_s"]),
        "teacher_share": median(lambda r: r["time/teacher_s"] / sum(r[f"time/{phase}_s"] for phase in NET)),
    }


def main(paths: list[str]) -> None:
    results = {Path(path).name: measure(Path(path)) for path in paths}
    first = next(iter(results.values()))["net_step_s"]
    for result in results.values():
        result["net_step_ratio_to_first"] = result["net_step_s"] / first
    table = Table("measure", *results)
    for name in next(iter(results.values())):
        table.add_row(name, *(f"{result[name]:,.3g}" for result in results.values()))
    Console().print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
