"""What all launchers read of a study: which runs wait for which, on how many machines each runs."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import jinja2
import yaml

from sdjax.errors import ConfigError
from sdjax.study.manifest import Entry, Manifest

PORT = 8476  # of process 0 of a run that spans machines, inside the cluster


@dataclass(frozen=True)
class Batch:
    """Entries of one submission. notice_s: seconds between a scheduler's SIGTERM and the end it sets."""

    manifest: Manifest
    entries: tuple[Entry, ...]
    workdir: Path
    notice_s: int

    def stages(self) -> list[list[Entry]]:
        """Entries one stage after the other; each needs only entries of earlier ones (or ones left out here)."""
        stage_of: dict[str, int] = {}
        left = list(self.entries)
        names = {entry.name for entry in left}
        stages: list[list[Entry]] = []
        while left:
            ready = [e for e in left if all(need in stage_of or need not in names for need in e.needs)]
            if not ready:
                raise ConfigError(f"{left[0].name} waits for itself through {', '.join(left[0].needs)}.", "plan again.")
            stage_of |= {entry.name: len(stages) for entry in ready}
            stages.append(ready)
            left = [entry for entry in left if entry.name not in stage_of]
        return stages


def machines(entry: Entry, gpus: int) -> tuple[int, int]:
    """(machines, accelerators of each) for one run, on machines with ``gpus`` accelerators.

    Raises:
      ConfigError: its devices do not fill whole machines.
    """
    if entry.devices <= gpus:
        return 1, entry.devices
    if entry.devices % gpus:
        raise ConfigError(
            f"{entry.name} wants {entry.devices} devices, which do not fill machines with {gpus}.",
            "change the mesh of the run, or give the number of accelerators of a machine as option gpus=N.",
        )
    return entry.devices // gpus, gpus


def stored_folders(entry: Entry, shared: str) -> dict[str, str]:
    """Folders of a run that outlive its machine: where they are used -> where in the storage they are kept.

    Relative paths start in the repository. shared: further ones beside the study's, separated by colons.
    """
    places = [str(PurePosixPath(entry.workdir).parent), *filter(None, shared.split(":"))]
    kept = {place: place.strip("/") for place in places}
    if any(path in ("", ".") or ".." in PurePosixPath(path).parts for path in kept.values()):
        raise ConfigError(f"{', '.join(places)}: not all are folders below another.", "name the folders in full.")
    return kept


def render(template: str, **values: object) -> str:
    """Fills a template of this folder."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sdjax.study.launch", "."),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(values)


class _Dumper(yaml.SafeDumper):
    """Scripts as blocks, everything in full."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def to_yaml(value: object) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)
