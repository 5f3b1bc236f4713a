"""Worker process around the real ALFWorld text engine (packages ``alfworld`` and ``textworld``).

These packages overwrite ``sys.argv``, swap ``sys.stdout``, load a native planner and create folders at import, so
they are imported here and nowhere else. Run by ``sdjax.envs.workers`` as ``python -m
sdjax.envs.alfworld.textworld_worker``.
"""

import json
import os
import sys
import tempfile
from typing import Any


class _Games:
    """One real environment per session; those of closed sessions are used again, since each holds a planner library."""

    def __init__(self) -> None:
        import textworld  # pyright: ignore[reportMissingImports]
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler  # pyright: ignore[reportMissingImports]
        from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH  # pyright: ignore[reportMissingImports]
        from textworld.envs import PddlEnv  # pyright: ignore[reportMissingImports]

        def make() -> Any:
            return AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))

        self._make = make
        with open(ALFRED_PDDL_PATH, encoding="utf-8") as file:
            self._domain = file.read()
        with open(ALFRED_TWL2_PATH, encoding="utf-8") as file:
            self._grammar = file.read()
        self._open: dict[int, Any] = {}
        self._free: list[Any] = []

    def handle(self, session: int, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method == "reset":
            if session not in self._open:
                self._open[session] = self._free.pop() if self._free else self._make()
            environment = self._open[session]
            environment.load(self._complete(params["game"]))
            return self._answer(environment.reset())
        if method == "step":
            state, _, _ = self._open[session].step(params["action"])
            return self._answer(state)
        if method == "close":
            if session in self._open:
                self._free.append(self._open.pop(session))
            return {}
        raise ValueError(f"unknown method {method!r}")

    def _complete(self, game: dict[str, Any]) -> dict[str, Any]:
        """Generated games come without domain and grammar: the installed package has them."""
        if "pddl_domain" in game:
            return game
        goal = json.dumps(game["goal"])[1:-1]
        grammar = self._grammar.replace("UNKNOWN GOAL.", goal)
        return {**game, "pddl_domain": self._domain, "grammar": grammar}

    @staticmethod
    def _answer(state: Any) -> dict[str, Any]:
        return {
            "text": state["feedback"],
            "admissible": sorted(state["admissible_commands"]),
            "won": bool(state["won"]),
        }


def serve(requests: Any, answers: Any) -> None:
    """Answers requests, one JSON object a line, until the input ends."""
    games: _Games | None = None
    for line in requests:
        request = json.loads(line)
        answer: dict[str, Any] = {"id": request["id"]}
        try:
            if games is None:
                games = _Games()
            answer["result"] = games.handle(request["session"], request["method"], request["params"])
        except ImportError as error:
            answer["error"] = f"{error}. The engine needs the packages of the extra: pip install 'sdjax[alfworld]'"
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    os.environ.setdefault(
        "ALFWORLD_DATA", tempfile.gettempdir()
    )  # else the import makes a folder in the home directory
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the libraries print must not mix with the answers
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
