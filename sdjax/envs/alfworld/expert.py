"""Experts that play whole episodes with short thoughts, for warm starts.

``search`` plays like an agent: it reads observations and admissible commands only, visits places in a sensible order
until it has *seen* what it needs, then acts. ``plan`` follows the oracle, which knows hidden places: shorter, but a
student that imitates it learns to guess. Thoughts come from our own templates and have at most eight words. Either can
be made imperfect: with some probability a turn plays a random command, so that imitation leaves something to learn.
"""

import functools
import random
import re

from sdjax.envs.alfworld.engine import TREATMENT, Episode, Game
from sdjax.envs.alfworld.planner import plan
from sdjax.envs.alfworld.vocabulary import load_vocabulary
from sdjax.envs.base import ExpertTurn, Observation
from sdjax.errors import ConfigError

EXPERTS = ("search", "plan")
_CONTENTS = re.compile(r"(?:^|\. )(?:On|The) (?:the )?([a-z]+ \d+)(?: is open\. In it)?, you see ([^.]*)\.")
_THING = re.compile(r"\ban? ([a-z]+ \d+)")
# What a random turn may play, and what it thinks.
_CHANGES = frozenset({"go", "open", "take", "move", "use", "clean", "heat", "cool"})
RANDOM_THOUGHT = "I need to see."
_STATION_KIND = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}


def expert_episode(
    game: Game, kind: str = "search", seed: int = 0, *, max_turns: int = 50, stray: float = 0.0, noise: float = 0.0
) -> list[ExpertTurn]:
    """Plays ``game`` from its start and returns the turns of a winning episode; the last turn wins.

    Args:
      kind: ``"search"`` or ``"plan"``. max_turns: turns allowed.
      seed, stray: the searching expert looks into a random unvisited place instead of the most sensible one with
        probability ``stray``, drawn from ``seed``.
      noise: probability that a turn plays a random command that changes something, drawn from ``seed``.
    Returns:
      The turns. An expert without noise that did not win in time gives an empty list, one with noise what it played.
    Raises:
      ConfigError: unknown ``kind``.
    """
    if kind not in EXPERTS:
        raise ConfigError(f"no expert {kind!r}.", f"use one of {', '.join(EXPERTS)}.")
    episode = Episode(game)
    rng = random.Random(f"alfworld expert {seed}")
    searcher = _Searcher(game, rng, stray)
    turns: list[ExpertTurn] = []
    while len(turns) < max_turns and not episode.won():
        searcher.read(episode.text, episode.admissible)
        choices = [command for command in episode.admissible if command.split()[0] in _CHANGES]
        if noise > 0 and choices and rng.random() < noise:
            decision = rng.choice(choices), RANDOM_THOUGHT
        elif kind == "plan":
            commands = plan(episode)
            decision = (commands[0], _thought(game, commands[0])) if commands else None
        else:
            decision = searcher.decide(episode.admissible)
        if decision is None:
            break
        searcher.note(decision[0])
        turns.append(ExpertTurn(_observation(episode), *decision))
        episode.step(decision[0])
    return turns if episode.won() or noise > 0 else []


def _observation(episode: Episode) -> Observation:
    return Observation(episode.text, episode.game.goal_text, episode.admissible)


def _kind(name: str) -> str:
    return name.rsplit(" ", 1)[0]


def _order(name: str) -> tuple[str, int]:
    kind, number = name.rsplit(" ", 1)
    return kind, int(number)


def _thought(game: Game, command: str) -> str:
    """A thought for a command of the oracle."""
    words = command.split()
    if words[0] == "go":
        return f"Next I need the {words[2]}."
    if words[0] == "open":
        return f"The {words[1]} must be open."
    if words[0] == "take":
        return f"I take the {words[1]}."
    if words[0] == "use":
        return f"I turn on the {words[1]}."
    if words[0] == "move":
        return f"I put the {words[1]} here."
    return f"Now I {words[0]} the {words[1]}."


class _Searcher:
    """Knows what the task sentence says and what it has read so far; nothing else."""

    def __init__(self, game: Game, rng: random.Random, stray: float):
        # The task sentence states these kinds; taking them from the goal saves parsing its wordings.
        self._task_type = game.task_type
        self._object = game.goal_object_type.removesuffix("type")
        self._goal_place = game.goal_receptacle_type.removesuffix("type")
        self._lamp = game.goal_lamp_type.removesuffix("type")
        self._verb = TREATMENT.get(game.task_type)
        self._rng, self._stray = rng, stray
        self._seen: dict[str, list[str]] = {}  # receptacle -> contents when last read
        self._looked_at: set[str] = set()  # receptacles whose contents are known
        self._places: set[str] = set()  # all receptacles
        self._holding: str | None = None
        self._treated = False
        self._target: str | None = None  # the goal receptacle chosen, once one is chosen

    def decide(self, admissible: tuple[str, ...]) -> tuple[str, str] | None:
        """Returns (command, thought), or None when nothing sensible is left to do."""
        decision = self._decide(admissible)
        return None if decision is None or decision[0] not in admissible else decision

    def read(self, observation: str, admissible: tuple[str, ...]) -> None:
        """Takes in what the last command showed."""
        self._places |= {command[len("go to ") :] for command in admissible if command.startswith("go to ")}
        match = _CONTENTS.search(observation)
        if match:
            self._seen[match.group(1)] = _THING.findall(match.group(2))
            self._looked_at.add(match.group(1))

    def note(self, command: str) -> None:
        """Takes in the command that is about to be played."""
        words = command.split()
        if words[0] == "take":
            self._holding, self._treated = f"{words[1]} {words[2]}", False
            there = self._seen.get(f"{words[4]} {words[5]}", [])
            if self._holding in there:
                there.remove(self._holding)
        elif words[0] == "move":
            self._seen.setdefault(f"{words[4]} {words[5]}", []).append(f"{words[1]} {words[2]}")
            self._holding, self._treated = None, False
        elif words[0] in _STATION_KIND:
            self._treated = words[0] == self._verb

    def _decide(self, admissible: tuple[str, ...]) -> tuple[str, str] | None:
        if self._holding is None:
            return self._find(self._object, admissible)
        if _kind(self._holding) != self._object:
            return self._put_away(admissible)
        if self._lamp:
            return self._use_lamp(admissible)
        if self._verb and not self._treated:
            return self._treat(self._verb, admissible)
        return self._deliver(admissible)

    def _find(self, kind: str, admissible: tuple[str, ...]) -> tuple[str, str] | None:
        """Takes an object of ``kind`` or goes where one was seen or may be."""
        delivered = set(self._seen.get(self._target, [])) if self._target else set()
        for place in sorted(self._seen, key=_order):
            for thing in self._seen[place]:
                if _kind(thing) != kind or thing in delivered:
                    continue
                if self._task_type == "pick_two_obj_and_place" and _kind(place) == self._goal_place:
                    self._target = self._target or place  # one lies at a goal already: bring the second there
                    if place == self._target:
                        continue
                return self._reach(place, f"take {thing} from {place}", f"I see the {kind}. I take it.", admissible)
        return self._search(kind, admissible)

    def _put_away(self, admissible: tuple[str, ...]) -> tuple[str, str] | None:
        """Gets rid of a thing that a random command took."""
        thought = f"I do not need the {_kind(self._holding or '')}."
        usable = [command for command in admissible if command.startswith((f"move {self._holding} to ", "open "))]
        usable = usable or [command for command in admissible if command.startswith("go to ")]
        return (self._rng.choice(usable), thought) if usable else None

    def _use_lamp(self, admissible: tuple[str, ...]) -> tuple[str, str] | None:
        for command in admissible:
            if command.startswith(f"use {self._lamp} "):
                return command, f"The {self._lamp} is here. I use it."
        for place in sorted(self._seen, key=_order):
            if any(_kind(thing) == self._lamp for thing in self._seen[place]):
                return self._reach(place, "", f"I bring it to the {self._lamp}.", admissible)
        return self._search(self._lamp, admissible)

    def _treat(self, verb: str, admissible: tuple[str, ...]) -> tuple[str, str] | None:
        for command in admissible:
            if command.startswith(f"{verb} {self._holding} with "):
                return command, f"Now I {verb} the {self._object}."
        stations = [place for place in sorted(self._places, key=_order) if _kind(place) == _STATION_KIND[verb]]
        if not stations:
            return None
        return f"go to {stations[0]}", f"I must {verb} it at the {_kind(stations[0])}."

    def _deliver(self, admissible: tuple[str, ...]) -> tuple[str, str] | None:
        goals = [place for place in sorted(self._places, key=_order) if _kind(place) == self._goal_place]
        if not goals:
            return None
        self._target = self._target or goals[0]
        thought = f"I put the {self._object} in the {self._goal_place}."
        return self._reach(self._target, f"move {self._holding} to {self._target}", thought, admissible)

    def _reach(self, place: str, command: str, thought: str, admissible: tuple[str, ...]) -> tuple[str, str]:
        """``command`` if it can be done now, else the step that brings it nearer: open the place or go there."""
        if command in admissible:
            return command, thought
        if f"open {place}" in admissible:
            return f"open {place}", f"The {_kind(place)} must be open."
        return f"go to {place}", f"Next I need the {_kind(place)}."

    def _search(self, kind: str, admissible: tuple[str, ...]) -> tuple[str, str] | None:
        thought = f"I need to find the {kind}."
        for place in sorted(self._places - self._looked_at, key=lambda name: self._plausibility(kind, name)):
            if f"open {place}" in admissible:
                return f"open {place}", f"It may be in the {_kind(place)}."
            if f"examine {place}" in admissible:
                return f"examine {place}", thought
        left = [place for place in self._places - self._looked_at if f"go to {place}" in admissible]
        if not left:
            return None
        left.sort(key=lambda name: self._plausibility(kind, name))
        place = self._rng.choice(left) if self._stray > 0 and self._rng.random() < self._stray else left[0]
        return f"go to {place}", thought

    def _plausibility(self, kind: str, place: str) -> tuple[bool, bool, str, int]:
        """Sort key: places that may hold the kind first, of these the ones that need no opening, then by name."""
        return (_kind(place) not in _likely_places(kind), _kind(place) in _closed_kinds(), *_order(place))


@functools.cache
def _likely_places(kind: str) -> frozenset[str]:
    """Receptacle kinds (lower case) where an object or lamp of ``kind`` may be; empty for unknown kinds."""
    vocabulary = load_vocabulary()
    if kind in {lamp.lower() for room in vocabulary.rooms.values() for lamp in room.lamps}:
        return frozenset(name.lower() for name in vocabulary.traits["lamp_places"])
    held = {thing for things in vocabulary.holds.values() for thing in things}
    return frozenset(place.lower() for thing in held if thing.lower() == kind for place in vocabulary.places_of(thing))


@functools.cache
def _closed_kinds() -> frozenset[str]:
    return frozenset(name.lower() for name in load_vocabulary().traits["openable"])
