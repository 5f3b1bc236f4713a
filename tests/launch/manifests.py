"""Manifests of invented runs."""

import json
from pathlib import Path

from sdjax.study.manifest import FILE, Cost, Entry, Manifest


def write(
    workdir: Path, root: Path, commands: dict[str, list[str]], *, needs=None, devices=8, grace_s=100.0
) -> Manifest:
    """A manifest in ``workdir`` with one entry for each command; ``needs``: name -> names."""
    entries = []
    for index, (name, command) in enumerate(commands.items()):
        entries.append(
            Entry(
                index=index,
                kind="train",
                name=name,
                cell=name,
                axes={},
                workdir=f"runs/study/{name}",
                command=tuple(command),
                eval=None,
                needs=tuple((needs or {}).get(name, ())),
                config_file=f"configs/{name}.json",
                config_sha256="0" * 64,
                devices=devices,
                steps=1,
                cost=Cost(None, None, "unknown"),
            )
        )
        path = workdir / entries[-1].config_file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"save": {"grace_s": grace_s}}))
    manifest = Manifest("study", "0" * 40, str(root), tuple(entries))
    (workdir / FILE).write_text(manifest.text())
    return manifest
