"""Kubernetes JobSets (jobset.x-k8s.io/v1alpha2): one a run, and ``submit``, which applies them stage after stage.

A pod that was interrupted, evicted or found its run locked ends its job by the pod failure policy, and the JobSet is
made again, at most ``restarts`` times. Any other failure ends the JobSet: it would only repeat.
"""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from sdjax.errors import INTERRUPTED_EXIT_CODE, LOCKED_EXIT_CODE, ConfigError
from sdjax.study.launch.batch import PORT, Batch, machines, render, stored_folders, to_yaml
from sdjax.study.launch.names import LIMIT, cluster_names
from sdjax.study.manifest import Entry

_JOB, _CONTAINER = "run", "sdjax"
_TERMINATED = 128 + 15  # SIGTERM before the run listened


@dataclass(frozen=True)
class Options:
    """image: has sdjax's repository at ``root`` and its environment first in PATH. claim: PersistentVolumeClaim for the
    runs and for ``shared``, further folders of the repository, separated by colons; writable from several machines.
    gpus, cpus, memory: of one machine. resource: name of the accelerator. namespace; queue: a Kueue local queue;
    restarts: after interruptions, all together."""

    image: str = ""
    claim: str = ""
    shared: str = "models:data"
    root: str = "/sdjax"
    gpus: int = 8
    cpus: int = 64
    memory: str = "512Gi"
    resource: str = "nvidia.com/gpu"
    namespace: str = "default"
    queue: str = ""
    restarts: int = 100


def files(batch: Batch, options: Options) -> dict[str, str]:
    """File names and texts.

    Raises:
      ConfigError: no image or claim is given, or a name does not fit.
    """
    if not (options.image and options.claim):
        raise ConfigError(
            "a JobSet needs an image with sdjax and a claim for the runs.",
            "add --options=image=REGISTRY/NAME:TAG,claim=NAME.",
        )
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", options.namespace):
        raise ConfigError(f"--options: namespace={options.namespace!r}.", "use small letters, digits and '-'.")
    most = max(machines(entry, options.gpus)[0] for entry in batch.entries)
    suffix = len(f"-{_JOB}-0-{most - 1}-abcde")  # what JobSet and Kubernetes add for a pod
    names = cluster_names(batch.entries, LIMIT - suffix)
    texts = {
        f"{names[entry.name]}.yaml": to_yaml(_jobset(entry, names[entry.name], batch, options))
        for entry in batch.entries
    }
    stages = [[names[entry.name] for entry in stage] for stage in batch.stages()]
    return texts | {"submit": render("jobset_submit.j2", stages=stages, namespace=options.namespace)}


def _jobset(entry: Entry, name: str, batch: Batch, options: Options) -> dict[str, object]:
    nodes, gpus = machines(entry, options.gpus)
    labels = {"app.kubernetes.io/part-of": "sdjax", "app.kubernetes.io/instance": name}
    if options.queue:
        labels["kueue.x-k8s.io/queue-name"] = options.queue
    spec: dict[str, object] = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": options.restarts,
            "rules": [
                {"name": "interrupted", "action": "RestartJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                {"name": "failed", "action": "FailJobSet"},
            ],
        },
    }
    if nodes > 1:
        spec["coordinator"] = {"replicatedJob": _JOB, "jobIndex": 0, "podIndex": 0}
    spec["replicatedJobs"] = [
        {"name": _JOB, "replicas": 1, "template": {"spec": _job(entry, name, nodes, gpus, batch, options)}}
    ]
    metadata = {"name": name, "namespace": options.namespace, "labels": labels}
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def _job(entry: Entry, name: str, nodes: int, gpus: int, batch: Batch, options: Options) -> dict[str, object]:
    codes = sorted((LOCKED_EXIT_CODE, INTERRUPTED_EXIT_CODE, _TERMINATED))  # Kubernetes wants them in order
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": codes},
                },
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": batch.notice_s,
                "containers": [_container(entry, name, nodes, gpus, options)],
                "volumes": [
                    {"name": "storage", "persistentVolumeClaim": {"claimName": options.claim}},
                    # NCCL talks through shared memory, of which a pod has 64 MB by default.
                    {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
                ],
            }
        },
    }


def _container(entry: Entry, name: str, nodes: int, gpus: int, options: Options) -> dict[str, object]:
    wanted = {"cpu": str(options.cpus), "memory": options.memory, options.resource: str(gpus)}
    container: dict[str, object] = {
        "name": _CONTAINER,
        "image": options.image,
        "workingDir": options.root,
        "command": list(entry.command),
        "resources": {"requests": wanted, "limits": wanted},
        "volumeMounts": [
            *(
                {"name": "storage", "mountPath": str(PurePosixPath(options.root) / place), "subPath": kept}
                for place, kept in stored_folders(entry, options.shared).items()
            ),
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    if nodes > 1:  # JOB_COMPLETION_INDEX, the number of the process, comes from Kubernetes
        first = f"{name}-{_JOB}-0-0.{name}"
        container["env"] = [
            {"name": "SDJAX_COORDINATOR", "value": f"{first}:{PORT}"},
            {"name": "SDJAX_PROCESSES", "value": str(nodes)},
        ]
    return container
