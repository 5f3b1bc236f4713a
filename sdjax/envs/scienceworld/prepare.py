"""``--mode=prepare --env=scienceworld``: the benchmark itself comes with its package, so this checks the installation
and joins files of gold paths into the folder that ``env.data`` names."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from sdjax.envs.scienceworld.java import find_jar, find_java, java_version
from sdjax.envs.scienceworld.store import Gold, Tasks, read_gold, write_gold
from sdjax.errors import DataError


def prepare(sources: Sequence[str], out: Path, console: Console) -> None:
    """Writes ``out/gold.jsonl.xz`` from ``sources``, files made by ``make_gold``.

    Raises:
      ConfigError: no Java, or not the package's supported version. DataError: no sources, one that is missing or
      damaged, a task that does not exist, or one with two different gold paths.
    """
    console.print(f"simulator: {find_jar()}; {java_version(find_java())}", highlight=False)
    if not sources:
        raise DataError(
            "no sources for ScienceWorld.",
            "none are needed to play (env.data = generated); to add gold paths, name files made by "
            "python -m sdjax.envs.scienceworld.make_gold.",
        )
    rows: dict[tuple[str, str], Gold] = {}
    tasks = Tasks()
    for source in sources:
        for row in read_gold(Path(source)):
            tasks.parse(row.task_id)
            known = rows.setdefault((row.task_id, row.simplification), row)
            if known != row:
                raise DataError(f"{source} has another path of {row.task_id} than the files before it.", "keep one.")
    out.mkdir(parents=True, exist_ok=True)
    write_gold(out / "gold.jsonl.xz", rows.values())
    console.print(f"{len(rows)} gold paths in {out / 'gold.jsonl.xz'}", highlight=False)
