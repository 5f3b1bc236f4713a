"""One element of an array job: ``python -m sdjax.study.element MANIFEST INDEX`` becomes the command of that entry."""

import os
import sys
from pathlib import Path

from sdjax.errors import CONFIG_EXIT_CODE, FAILED_EXIT_CODE, ConfigError, RunDirError, SdjaxError
from sdjax.study import manifest as manifests


def command(path: Path, index: str) -> tuple[list[str], Path]:
    """The command of entry ``index`` and the directory to run it in.

    Raises:
      ConfigError: there is no such entry or no such manifest.
      RunDirError: a run that it needs is not done.
    """
    manifest = manifests.read(path.parent)
    if not index.isdecimal() or int(index) >= len(manifest.entries):
        raise ConfigError(
            f"{path} has no entry {index!r}; it has 0 to {len(manifest.entries) - 1}.",
            "write the launch files again with --study=launch after --study=plan.",
        )
    entry, root = manifest.entries[int(index)], Path(manifest.root)
    for name in entry.needs:
        needed = manifest.entry(name)
        if not (root / needed.workdir / "DONE.json").exists():
            raise RunDirError(
                f"{entry.name} needs {name}, which is not done.",
                f"look at {needed.workdir}/FAILED.json and finish it first (entry {needed.index}).",
            )
    program, *arguments = entry.command
    return [sys.executable if program == "python" else program, *arguments], root


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or Path(arguments[0]).name != manifests.FILE:
        print(f"usage: python -m sdjax.study.element STUDY/{manifests.FILE} INDEX", file=sys.stderr)
        return CONFIG_EXIT_CODE
    try:
        argv, root = command(Path(arguments[0]), arguments[1])
    except SdjaxError as error:
        print(error, file=sys.stderr)
        return CONFIG_EXIT_CODE if isinstance(error, ConfigError) else FAILED_EXIT_CODE
    os.chdir(root)
    os.execv(argv[0], argv)  # the same process: signals and the exit code are those of the run


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
