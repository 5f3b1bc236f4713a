"""SkyPilot managed jobs: one YAML a run, and ``submit``, which launches them stage after stage.

SkyPilot starts a job again when its machine is taken away, and when it ends with the exit code of an interruption.
"""

import shlex
from dataclasses import dataclass
from pathlib import PurePosixPath

from sdjax.errors import INTERRUPTED_EXIT_CODE, ConfigError
from sdjax.study.launch.batch import PORT, Batch, machines, render, stored_folders, to_yaml
from sdjax.study.launch.names import LIMIT, cluster_names
from sdjax.study.manifest import Entry

_MOUNT = "/mnt/sdjax"


@dataclass(frozen=True)
class Options:
    """accelerator, gpus: of one machine. infra: ``aws/us-east-1``, ``k8s``, ... (SkyPilot's choice if empty). spot: yes
    or no. disk: GB. image: SkyPilot's ``image_id``. extra: of pyproject.toml, for the accelerators.

    Where the runs are kept: volume, the name of a SkyPilot volume, or bucket, a URL such as ``s3://name/folder``. A
    volume is a file system. A bucket is mounted with a cache that is uploaded in the background: what was not uploaded
    when a machine is taken away is lost, and a checkpoint that is half there has to be deleted by hand.
    shared: further folders of the repository that are kept there, separated by colons.
    """

    accelerator: str = "H100"
    gpus: int = 8
    infra: str = ""
    spot: str = "yes"
    disk: int = 512
    image: str = ""
    volume: str = ""
    bucket: str = ""
    shared: str = "models:data"
    extra: str = "cuda12"


def files(batch: Batch, options: Options) -> dict[str, str]:
    """File names and texts.

    Raises:
      ConfigError: no place for the runs is given, or a name does not fit.
    """
    if bool(options.volume) == bool(options.bucket):
        raise ConfigError(
            "the runs need one place that outlives their machines.",
            "add --options=volume=NAME (sky volumes apply) or --options=bucket=s3://NAME/FOLDER.",
        )
    if options.spot not in ("yes", "no"):
        raise ConfigError(f"--options: spot={options.spot!r}.", "write spot=yes or spot=no.")
    names = cluster_names(batch.entries, LIMIT)
    texts = {
        f"{names[entry.name]}.yaml": to_yaml(_task(entry, names[entry.name], batch, options)) for entry in batch.entries
    }
    stages = [[names[entry.name] for entry in stage] for stage in batch.stages()]
    root = batch.manifest.root
    return texts | {"submit": render("sky_submit.j2", root=shlex.quote(root), stages=stages)}


def _task(entry: Entry, name: str, batch: Batch, options: Options) -> dict[str, object]:
    nodes, gpus = machines(entry, options.gpus)
    resources: dict[str, object] = {
        "accelerators": f"{options.accelerator}:{gpus}",
        "use_spot": options.spot == "yes",
        "disk_size": options.disk,
        "job_recovery": {"strategy": "EAGER_NEXT_REGION", "recover_on_exit_codes": [INTERRUPTED_EXIT_CODE]},
    }
    if options.infra:
        resources["infra"] = options.infra
    if options.image:
        resources["image_id"] = options.image
    if options.volume:
        storage: dict[str, object] = {"volumes": {_MOUNT: options.volume}}
    else:
        storage = {"file_mounts": {_MOUNT: {"source": options.bucket, "mode": "MOUNT_CACHED"}}}
    command = shlex.join(entry.command)
    if nodes > 1:
        command += (
            f' --coordinator="$(head -n1 <<< "$SKYPILOT_NODE_IPS"):{PORT}"'
            ' --processes="$SKYPILOT_NUM_NODES" --process="$SKYPILOT_NODE_RANK"'
        )
    return {
        "name": name,
        "workdir": ".",
        "num_nodes": nodes,
        "resources": resources,
        **storage,
        "setup": _setup(entry, options),
        "run": f"source ~/sdjax-env/bin/activate\nexec {command}\n",
    }


def _setup(entry: Entry, options: Options) -> str:
    """Installs the package, and links folders into the storage."""
    lines = [
        "set -e",
        "python3 -m venv ~/sdjax-env",
        f"~/sdjax-env/bin/pip install --quiet {shlex.quote(f'.[{options.extra}]')}",
        "# Each link fails where a real folder is in the way: what is written to it would be lost with the machine.",
    ]
    for place, kept in stored_folders(entry, options.shared).items():
        kept = shlex.quote(f"{_MOUNT}/{kept}")
        lines.append(f"mkdir -p {kept} {shlex.quote(str(PurePosixPath(place).parent))}")
        lines.append(f"ln -sfnT {kept} {shlex.quote(place)}")
    return "\n".join(lines) + "\n"
