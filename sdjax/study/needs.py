"""What a run needs on this machine before it can start: weights, data, Java."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sdjax.errors import SdjaxError
from sdjax.study.grid import key


def missing(config: Mapping[str, Any], root: Path, *, model_is_made: bool) -> str:
    """What of a resolved configuration is not here, in words; ``""`` if it can start.

    model_is_made: a warm start of the study makes the model.
    """
    env = config["env"]
    found = [] if model_is_made else [_model(config["model"], root)]
    if env["data"] != "generated" and not (root / env["data"]).exists():
        found.append(
            f"env.data = {env['data']} does not exist (--mode=prepare --env={env['name']} makes it; "
            f"--config.data.{env['name']}=PATH at --study=plan names another place)"
        )
    if env["name"] == "scienceworld":
        found.append(_simulator())
    return "; ".join(text for text in found if text)


def _model(model: Mapping[str, str], root: Path) -> str:
    from sdjax.models import gguf

    path = model["path"]
    if path == gguf.SMOLLM2:
        try:
            gguf.find_smollm2()
        except SdjaxError as error:
            return f"{error.found} {error.fix}"
        return ""
    if (root / path).exists():
        return ""
    name = key(model["name"]) if model["name"] else "NAME"
    return f"model.path = {path} does not exist (--config.models.{name}=PATH at --study=plan names another place)"


def _simulator() -> str:
    from sdjax.envs.scienceworld import java

    try:
        java.find_jar()
        java.find_java()
    except SdjaxError as error:
        return f"{error.found} {error.fix}"
    return "" if find_spec("py4j") else "the package py4j is not installed."
