"""Many ScienceWorld simulators in one Java process, each as if it were alone.

Only worker processes and the commands of this package import this module: it loads py4j. The simulator shares state
between instances, and texts, ambiguity and heat flow depend on it. Three measures make a trace a function of the task
and its commands alone:

* ``-XX:hashCode=2``, a constant identity hash: the simulator iterates over sets of objects that have no other hash;
* the random generator, one for the whole process, is seeded before every step from the task and the step's number;
* the object counter, which every load sets back to 0, never falls: objects with equal numbers would count as equal.

The list of all valid commands, on which the package's own wrapper spends most of its time, is not computed.
"""

import contextlib
import hashlib
import os
import re
import subprocess
import sys
from typing import Any

from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway  # pyright: ignore[reportMissingImports]

from sdjax.envs.scienceworld.java import find_jar, find_java
from sdjax.errors import ConfigError, EnvError

_OPTIONS = (
    "-XX:+UnlockExperimentalVMOptions",
    "-XX:hashCode=2",
    "-XX:+UseSerialGC",
    "-XX:+ExitOnOutOfMemoryError",
    "-Duser.language=en",  # the simulator lower-cases and formats by the locale
    "-Duser.country=US",
    "-Dfile.encoding=UTF-8",
)
# The longest command that means something has fewer than 200 characters. Longer text is not worth parsing.
_LONGEST_COMMAND = 1000
# Sent in place of what must not reach the simulator; like any unknown text it costs no time in the world.
_UNKNOWN_COMMAND = "-"
_NOT_UNDERSTOOD = ("No known action matches that input.", "Unknown action.")
_RESET_TEXT = "You reset the goal progress and focus."
# What the simulator's parser skips: control characters around the command, white space, articles.
_SKIPPED = re.compile(r"[\x00-\x20\s]+")
_ARTICLES = {"", "a", "an", "the"}


class Jvm:
    """One Java process. It ends when this process does. Not thread-safe, like the simulator.

    Raises:
      ConfigError: no Java, no simulator, or Java does not start with these options.
    """

    def __init__(self, heap_mb: int):
        java, jar = find_java(), find_jar()
        # A large young generation: most of what a step allocates is garbage at once.
        options = [f"-Xmx{heap_mb}m", f"-Xmn{heap_mb // 4}m", *_OPTIONS]
        try:
            launched: Any = launch_gateway(
                classpath=str(jar),
                javaopts=options,
                java_path=java,
                cwd=str(jar.parent),
                die_on_exit=True,
                enable_auth=True,
                redirect_stderr=sys.stderr,
                return_proc=True,
            )
        except (ValueError, OSError) as error:  # ValueError: the first line that Java printed is not a port
            raise ConfigError(
                f"{java} {' '.join(options)} did not start the simulator ({error}).",
                "see Java's own message above; use a Java of version 8 or later, or another env.scienceworld.heap_mb.",
            ) from error
        port, token, self.process = launched
        self._gateway = JavaGateway(
            gateway_parameters=GatewayParameters(port=port, auth_token=token, auto_field=True),
            java_process=self.process,
        )
        self.java: Any = self._gateway.jvm
        # The simulator prints several lines a step. Scala keeps the stream that it finds when it is first used.
        self.java.java.lang.System.setOut(self.java.java.io.PrintStream(os.devnull))
        self._random = self.module("scala.util.Random$")
        self._identifiers = self.module("util.UniqueIdentifier$")
        self._top_identifier = 0

    def module(self, name: str) -> Any:
        """A Scala singleton."""
        return self.java.java.lang.Class.forName(name).getField("MODULE$").get(None)

    def new_interface(self) -> Any:
        return self.java.scienceworld.runtime.pythonapi.PythonInterface()

    def join(self, strings: Any) -> list[str]:
        """A Java list of strings in one exchange instead of one for each item."""
        text = self.java.java.lang.String.join("\n", strings)
        return text.split("\n") if text else []

    @contextlib.contextmanager
    def isolated(self, seed: int | None):
        """Around every call that changes a simulator. seed: of the random generator; None leaves it."""
        if seed is not None:
            self._random.setSeed(seed)
            getattr(self._identifiers, "count_$eq")(self._top_identifier)
        try:
            yield
        finally:
            self._top_identifier = max(self._top_identifier, self._identifiers.count())

    def gold(self, task_name: str, variation: int, simplification: str) -> list[str]:
        """The simulator's own solution; it need not be short, and may fail. Takes up to half a minute.

        In a simulator of its own: once asked for gold, a simulator makes it again at every load.
        """
        interface = self.new_interface()
        with self.isolated(None):
            error = interface.load(task_name, variation, simplification, True)
        if error:
            raise EnvError(f"{task_name}/{variation}: {error}", "use a task and variation of the simulator.")
        return self.join(interface.getGoldActionSequence())

    def ranges(self, task_name: str) -> dict[str, list[int]]:
        """The simulator's own variations of a task, by split."""
        interface = self.new_interface()
        with self.isolated(None):
            interface.load(task_name, 0, "", False)
        return {
            "train": list(interface.getVariationsTrain()),
            "dev": list(interface.getVariationsDev()),
            "test": list(interface.getVariationsTest()),
        }

    def close(self) -> None:
        """Ends the Java process: it reads its input and exits at the end of it."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._gateway.close()


class Simulator:
    """One episode at a time. Answers are JSON objects:

    text: what the agent sees. score: -100 to 100. completed: whether all goals are reached. admissible: whether the
    command was understood. ambiguous: whether the text asks for a number. moves: the simulator's own count of time.
    objects: names for the templates. progress: goals and their state. look, inventory: views that cost no time.
    A reset also gives ``task`` and ``templates``.
    """

    def __init__(self, jvm: Jvm):
        self._jvm = jvm
        self._interface = jvm.new_interface()
        # Parts of the episode in Java, fetched once: each fetch is an exchange with the process.
        self._agent: Any = None
        self._parser: Any = None
        self._seed = 0
        self._turns = 0

    def reset(self, task_name: str, variation: int, simplification: str) -> dict[str, Any]:
        """Starts an episode.

        Raises:
          EnvError: the simulator has no such task or variation.
        """
        key = f"{task_name}/{variation}/{simplification}"
        self._seed = int(hashlib.sha256(key.encode()).hexdigest()[:8], 16)
        self._turns = 0
        with self._jvm.isolated(None):
            error = self._interface.load(task_name, variation, simplification, False)
        if error:
            raise EnvError(f"{task_name}/{variation}: {error}", "use a task and variation of the simulator.")
        self._agent = self._interface.agentInterface().get()
        self._parser = self._agent.inputParser()
        templates = self._jvm.join(self._interface.getPossibleActions())
        answer = self._play("look around")
        answer["task"] = self._interface.getTaskDescription()
        answer["templates"] = [template for template in templates if not _is_reset(template)]
        return answer

    def step(self, command: str) -> dict[str, Any]:
        """Plays any text. ``reset task`` in any spelling is not understood: it would undo the goals that are reached.

        Raises:
          EnvError: the simulator failed on this command.
        """
        self._turns += 1
        # A lone surrogate (JSON may carry one) cannot be sent to Java.
        command = command.encode(errors="replace").decode()
        if len(command) > _LONGEST_COMMAND or _is_reset(command):
            command = _UNKNOWN_COMMAND
        return self._play(command)

    def _play(self, command: str) -> dict[str, Any]:
        with self._jvm.isolated(self._seed + self._turns):
            return self._answer(command, self._interface.step(command))

    def _answer(self, command: str, text: str) -> dict[str, Any]:
        interface = self._interface
        # After an error of its own the simulator answers -100 to everything: that is no score of the agent.
        if self._agent.isInErrorState():
            raise EnvError(
                f"the simulator failed on {command[:80]!r}: {self._agent.getErrorStateMessage()}",
                "report the task and its commands; the episode cannot go on.",
            )
        if text == _RESET_TEXT:
            raise EnvError(f"{command[:80]!r} reset the goals although that is blocked.", "report the command.")
        return {
            "text": text,
            "score": round(100 * interface.getScore()),
            "completed": bool(interface.getCompleted()),
            "admissible": not text.startswith(_NOT_UNDERSTOOD),
            "ambiguous": bool(self._parser.isInAmbiguousState()),
            "moves": int(interface.getNumMoves()),
            "objects": self._jvm.join(interface.getPossibleObjects()),
            "progress": interface.getGoalProgressStr(),
            "look": interface.freeActionLook(),
            "inventory": interface.freeActionInventory(),
        }


def _is_reset(command: str) -> bool:
    words = [word for word in _SKIPPED.split(command.lower()) if word not in _ARTICLES]
    return words == ["reset", "task"]
