"""Made-up ALFWorld games: six task types, difficulty knobs, each game proven solvable, a pure function of its number.

A game number fixes everything: the household is drawn from vocabulary.toml, the goal is put on it as PDDL, the oracle
must win it and it must not be won at the start. The result has the same form as a released game, so the native engine
and the real one play it. What decides the split is the *content* of the household: a layout that occurs in ``train``
cannot occur in ``valid``, whatever the seeds and counts are.
"""

import functools
import hashlib
import random
from dataclasses import dataclass
from typing import Any

from sdjax.envs.alfworld.engine import TASK_TYPES, Episode, Game
from sdjax.envs.alfworld.planner import plan
from sdjax.envs.alfworld.vocabulary import Vocabulary, load_vocabulary
from sdjax.envs.config import GeneratorKnobs
from sdjax.errors import ConfigError, DataError

GENERATOR_VERSION = 1
SPLITS: tuple[str, ...] = ("train", "valid", "test")
_SPLIT_BUCKETS = {"train": range(2, 8), "valid": range(1), "test": range(1, 2)}  # of eight content buckets
_SPLIT_OFFSET = {"train": 0, "valid": 8_000_000, "test": 9_000_000}
_NUMBERS_PER_SEED = 10_000_000
_ATTEMPTS = 400
_STATION = {
    "pick_clean_then_place_in_recep": ("cleanable", "SinkBasin"),
    "pick_heat_then_place_in_recep": ("heatable", "Microwave"),
    "pick_cool_then_place_in_recep": ("coolable", "Fridge"),
}
_TREATED = {
    "pick_clean_then_place_in_recep": "isClean",
    "pick_heat_then_place_in_recep": "isHot",
    "pick_cool_then_place_in_recep": "isCool",
}


@dataclass(frozen=True)
class Draft:
    """What a game number fixes before the household is drawn; enough for the game's id.

    target: object kind. goal: receptacle kind or lamp kind.
    """

    number: int
    task_type: str
    room: str
    target: str
    goal: str
    scene: int

    @property
    def task_id(self) -> str:
        return f"generated/{self.task_type}-{self.target}-None-{self.goal}-{self.scene}/trial_gen_{self.number}"


def game_number(seed: int, split: str, index: int) -> int:
    """Number of the ``index``-th game of a split. Numbers of different splits and seeds never coincide."""
    if split not in _SPLIT_OFFSET:
        raise DataError(f"generated games have no split {split!r}.", f"use one of {', '.join(SPLITS)}.")
    if not 0 <= index < 1_000_000 or seed < 0:
        raise DataError(f"generated game {index} of seed {seed}.", "use a seed >= 0 and fewer than a million games.")
    return seed * _NUMBERS_PER_SEED + _SPLIT_OFFSET[split] + index


def split_of(number: int) -> str:
    """The split that a game number belongs to."""
    rest = number % _NUMBERS_PER_SEED
    return max((offset, split) for split, offset in _SPLIT_OFFSET.items() if offset <= rest)[1]


def check_knobs(knobs: GeneratorKnobs) -> None:
    """Raises ConfigError for knobs that no household can satisfy."""
    vocabulary = load_vocabulary()
    unknown = set(knobs.task_types) - set(TASK_TYPES)
    if unknown or not knobs.task_types:
        raise ConfigError(f"generator.task_types = {knobs.task_types}.", f"use some of {', '.join(TASK_TYPES)}.")
    unknown = set(knobs.rooms) - set(vocabulary.rooms)
    if unknown or not knobs.rooms:
        raise ConfigError(f"generator.rooms = {knobs.rooms}.", f"use some of {', '.join(vocabulary.rooms)}.")
    if not 3 <= knobs.receptacles_min <= knobs.receptacles_max:
        raise ConfigError(
            f"generator.receptacles_min = {knobs.receptacles_min}, receptacles_max = {knobs.receptacles_max}.",
            "use 3 <= receptacles_min <= receptacles_max.",
        )
    if not 0 <= knobs.distractors_min <= knobs.distractors_max:
        raise ConfigError(
            f"generator.distractors_min = {knobs.distractors_min}, distractors_max = {knobs.distractors_max}.",
            "use 0 <= distractors_min <= distractors_max.",
        )
    for name in ("closed_share", "shared_places", "spare_targets"):
        if not 0.0 <= getattr(knobs, name) <= 1.0:
            raise ConfigError(f"generator.{name} = {getattr(knobs, name)}.", "use a share between 0 and 1.")
    for task_type in knobs.task_types:
        if not any(_goals(room, task_type) for room in knobs.rooms):
            raise ConfigError(
                f"generator.task_types has {task_type}, which fits none of generator.rooms = {knobs.rooms}.",
                "add a room (heat and cool need kitchen, lamps living_room or bedroom) or drop the task type.",
            )


@functools.cache
def _goals(room_name: str, task_type: str) -> list[tuple[str, str]]:
    """(object kind, receptacle or lamp kind) pairs that a room can carry. Shared: read only."""
    vocabulary = load_vocabulary()
    room = vocabulary.rooms[room_name]
    if task_type == "look_at_obj_in_light":
        if not vocabulary.traits["lamp_places"] & set(room.receptacles):
            return []
        return [(thing, lamp) for thing in room.objects for lamp in room.lamps]
    trait, station = _STATION.get(task_type, ("", ""))
    if station and station not in room.receptacles:
        return []
    goals = []
    for thing in room.objects:
        if trait and thing not in vocabulary.traits[trait]:
            continue
        places = [place for place in vocabulary.places_of(thing) if place in room.receptacles]
        # The object must be able to start somewhere else than at the goal; a station is never the goal.
        goals += [
            (thing, place)
            for place in places
            if place != station and any(other not in (place, station) for other in places)
        ]
    return goals


def draft(number: int, knobs: GeneratorKnobs) -> Draft:
    """The goal of game ``number``, without its household (microseconds). Task types take turns."""
    vocabulary = load_vocabulary()
    rng = random.Random(f"alfworld goal {number}")
    task_type = knobs.task_types[number % _NUMBERS_PER_SEED % len(knobs.task_types)]
    rooms = [name for name in knobs.rooms if _goals(name, task_type)]
    name = rng.choice(rooms)
    room = vocabulary.rooms[name]
    # First the kind of goal place, then the object: otherwise large tables, which hold everything, would be most goals.
    goals = _goals(name, task_type)
    place = rng.choice(sorted({place for _, place in goals}))
    target = rng.choice([thing for thing, other in goals if other == place])
    return Draft(number, task_type, name, target, place, room.first_scene + rng.randrange(1000))


def generate(number: int, knobs: GeneratorKnobs) -> dict[str, Any]:
    """Returns game ``number`` as a row of a game store: ``id``, ``goal``, ``walkthrough``, ``pddl_problem``.

    Raises:
      DataError: the knobs leave too few different households for this goal.
    """
    made = draft(number, knobs)
    vocabulary = load_vocabulary()
    buckets = _SPLIT_BUCKETS[split_of(number)]
    rng = random.Random(f"alfworld household {number}")
    words = {"object": made.target.lower(), "receptacle": made.goal.lower(), "lamp": made.goal.lower()}
    goal_text = rng.choice(vocabulary.goals[made.task_type]).format(**words)
    for _ in range(_ATTEMPTS):
        household = _Household(made, knobs, vocabulary, rng)
        if not household.complete:
            continue
        problem = household.problem()
        game = Game(problem, goal_text)
        if int(household_key(game), 16) % 8 not in buckets:
            continue
        walkthrough = plan(Episode(game))
        if walkthrough and _wins_at_the_end(game, walkthrough):
            return {"id": made.task_id, "goal": goal_text, "walkthrough": walkthrough, "pddl_problem": problem}
    raise DataError(
        f"no household for {made.task_id} after {_ATTEMPTS} draws.",
        "allow more receptacles or distractors (generator.receptacles_max, generator.distractors_max).",
    )


def household_key(game: Game) -> str:
    """Hash of everything an agent could tell apart: goal, receptacles, shared places, contents. Ignores coordinates."""
    names = game.names
    parts = [
        game.task_type,
        game.goal_object_type,
        game.goal_receptacle_type,
        game.goal_lamp_type,
        sorted(sorted(names[receptacle] for receptacle in group) for group in game.receptacles_at.values()),
        sorted((names[thing], names[receptacle]) for thing, receptacle in game.start_contents),
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _wins_at_the_end(game: Game, walkthrough: list[str]) -> bool:
    episode = Episode(game)
    for command in walkthrough:
        if episode.won() or episode.operator(command) is None:
            return False
        episode.step(command)
    return episode.won()


class _Household:
    """One random household for a draft. ``complete`` is False when a needed object found no place."""

    def __init__(self, made: Draft, knobs: GeneratorKnobs, vocabulary: Vocabulary, rng: random.Random):
        self._made, self._knobs, self._vocabulary, self._rng = made, knobs, vocabulary, rng
        self._room = vocabulary.rooms[made.room]
        self._used: set[str] = set()
        self.receptacles: list[tuple[str, str]] = []  # (kind, PDDL name)
        self.objects: list[tuple[str, str, str]] = []  # (kind, PDDL name, receptacle's PDDL name)
        self._draw_receptacles()
        self.complete = self._draw_objects()
        self._draw_places()

    def _is_lamp_task(self) -> bool:
        return self._made.task_type == "look_at_obj_in_light"

    def _forbidden(self) -> set[str]:
        """Receptacle kinds where the wanted object must not start: it would be at the goal, or cooled already."""
        if self._is_lamp_task():
            return set()
        return {self._made.goal, _STATION.get(self._made.task_type, ("", ""))[1]}

    def _draw_receptacles(self) -> None:
        made, rng, limits = self._made, self._rng, self._room.receptacles
        openable = self._vocabulary.traits["openable"]
        starts = [
            kind for kind in self._vocabulary.places_of(made.target) if kind in limits and kind not in self._forbidden()
        ]
        closed_starts = [kind for kind in starts if kind in openable]
        open_starts = [kind for kind in starts if kind not in openable]
        wants_closed = rng.random() < self._knobs.closed_share
        kinds = [rng.choice((closed_starts if wants_closed else open_starts) or starts)]
        if self._is_lamp_task():
            kinds.append(rng.choice(sorted(self._vocabulary.traits["lamp_places"] & set(limits))))
        else:
            kinds.append(made.goal)
            if made.task_type in _STATION:
                kinds.append(_STATION[made.task_type][1])
        if len(set(kinds)) < len(kinds) and limits[kinds[0]] < 2:
            kinds = kinds[1:]
        size = rng.randint(self._knobs.receptacles_min, self._knobs.receptacles_max)
        wanted_closed = round(self._knobs.closed_share * size)
        while len(kinds) < size:
            free = [kind for kind, limit in limits.items() for _ in range(limit - kinds.count(kind))]
            if not free:
                break
            take_closed = sum(kind in openable for kind in kinds) < wanted_closed
            matching = [kind for kind in free if (kind in openable) == take_closed]
            kinds.append(rng.choice(matching or free))
        self.receptacles = [(kind, self._name(kind)) for kind in sorted(kinds)]

    def _draw_objects(self) -> bool:
        made, rng, knobs = self._made, self._rng, self._knobs
        needed = 2 if made.task_type == "pick_two_obj_and_place" else 1
        spare = 1 if rng.random() < knobs.spare_targets else 0
        for count in range(needed + spare):
            if not self._put(made.target, self._forbidden()) and count < needed:
                return False
        present = {kind for kind, _ in self.receptacles}
        others = [
            kind
            for kind in self._room.objects
            if kind != made.target and present & set(self._vocabulary.places_of(kind))
        ]
        if others:
            for _ in range(rng.randint(knobs.distractors_min, knobs.distractors_max)):
                self._put(rng.choice(others), set())
        if self._is_lamp_task():
            spots = [name for kind, name in self.receptacles if kind in self._vocabulary.traits["lamp_places"]]
            if not spots:
                return False
            self.objects.append((made.goal, self._name(made.goal), rng.choice(spots)))
        return True

    def _put(self, kind: str, forbidden: set[str]) -> bool:
        holds = self._vocabulary.holds
        spots = [name for place, name in self.receptacles if kind in holds[place] and place not in forbidden]
        if not spots:
            return False
        self.objects.append((kind, self._name(kind), self._rng.choice(spots)))
        return True

    def _draw_places(self) -> None:
        """Gives each receptacle a standing place; some neighbours of one kind share theirs, as in the released
        games."""
        rng = self._rng
        self.start = "loc_bar_0_bar_0_bar_0_bar_0"
        self.place_of: dict[str, str] = {}
        taken = {self.start}
        previous = ("", "")
        for kind, name in self.receptacles:
            shares = kind in self._vocabulary.traits["shares_place"] and previous[0] == kind
            if shares and rng.random() < self._knobs.shared_places:
                self.place_of[name] = self.place_of[previous[1]]
            else:
                place = self.start
                while place in taken:
                    numbers = (
                        rng.randint(-12, 12),
                        rng.randint(-12, 12),
                        rng.randint(0, 3),
                        rng.choice((15, 30, 45, 60)),
                    )
                    place = "loc" + "".join(f"_bar_{'_minus_' if n < 0 else ''}{abs(n)}" for n in numbers)
                taken.add(place)
                self.place_of[name] = place
            previous = (kind, name)
        self.places = sorted(taken)

    def _name(self, kind: str) -> str:
        """A PDDL name in AI2-THOR's style. A basin is named after its furniture; the engine turns that back."""
        stem = kind.removesuffix("Basin")
        while True:
            values = [round(self._rng.uniform(-3.9, 3.9), 2) for _ in range(3)]
            parts = [f"_{'plus' if v >= 0 else 'minus'}_{abs(v):05.2f}".replace(".", "_dot_") for v in values]
            name = "_bar_".join([stem, *parts, *([kind] if stem != kind else [])])
            if name not in self._used:
                self._used.add(name)
                return name

    def problem(self) -> str:
        """The household and its goal as a PDDL problem of the domain ``alfred``."""
        object_kinds = sorted({kind for kind, _, _ in self.objects})
        place_kinds = sorted({kind for kind, _ in self.receptacles})
        declared = [
            "agent1 - agent",
            *(f"{name} - object" for _, name, _ in self.objects),
            *(f"{kind}Type - otype" for kind in object_kinds),
            *(f"{kind}Type - rtype" for kind in place_kinds),
            *(f"{name} - receptacle" for _, name in self.receptacles),
            *(f"{place} - location" for place in self.places),
        ]
        holds = self._vocabulary.holds
        facts = [
            *(f"(receptacleType {name} {kind}Type)" for kind, name in self.receptacles),
            *(f"(objectType {name} {kind}Type)" for kind, name, _ in self.objects),
            *(f"(canContain {p}Type {kind}Type)" for p in place_kinds for kind in object_kinds if kind in holds[p]),
            *(fact for thing in self.objects for fact in self._object_facts(*thing)),
            *(f"(openable {name})" for kind, name in self.receptacles if kind in self._vocabulary.traits["openable"]),
            *(f"(receptacleAtLocation {name} {self.place_of[name]})" for _, name in self.receptacles),
            f"(atLocation agent1 {self.start})",
        ]
        lines = ["", f"(define (problem plan_gen_{self._made.number})", "(:domain alfred)", "(:objects"]
        lines += [f"    {line}" for line in declared] + [")", "(:init"] + [f"    {fact}" for fact in facts] + [")"]
        return "\n".join([*lines, f"(:goal {_goal_pddl(self._made)})", ")", ""])

    def _object_facts(self, kind: str, name: str, where: str) -> list[str]:
        traits = self._vocabulary.traits
        place_kind = {other: kind for kind, other in self.receptacles}[where]
        if kind in self._room.lamps:
            facts = [f"(toggleable {name})"]
        else:
            facts = [f"(pickupable {name})"]
            for trait in ("isReceptacleObject", "cleanable", "heatable", "coolable", "sliceable"):
                if kind in traits[trait]:
                    facts.append(f"({trait} {name})")
            if place_kind == "Fridge" and kind in traits["coolable"]:
                facts.append(f"(isCool {name})")
        return [*facts, f"(inReceptacle {name} {where})", f"(objectAtLocation {name} {self.place_of[where]})"]


def _goal_pddl(made: Draft) -> str:
    if made.task_type == "look_at_obj_in_light":
        return (
            "(and (exists (?ot - object ?r - receptacle ?a - agent ?l - location)"
            f" (and (objectType ?ot {made.goal}Type) (toggleable ?ot) (isToggled ?ot) (inReceptacle ?ot ?r)"
            " (receptacleAtLocation ?r ?l) (atLocation ?a ?l)))"
            f" (exists (?o - object ?a - agent) (and (objectType ?o {made.target}Type) (holds ?a ?o))))"
        )
    if made.task_type == "pick_two_obj_and_place":
        first, second = (
            f"(objectType ?o{n} {made.target}Type) (receptacleType ?r {made.goal}Type) (inReceptacle ?o{n} ?r)"
            for n in (1, 2)
        )
        return (
            f"(and (exists (?r - receptacle) (exists (?o1 - object) (and {first}"
            f" (exists (?o2 - object) (and (not (= ?o1 ?o2)) {second}))))))"
        )
    treated = ""
    if made.task_type in _STATION:
        treated = f" ({_STATION[made.task_type][0]} ?o) ({_TREATED[made.task_type]} ?o)"
    return (
        f"(and (exists (?r - receptacle) (exists (?o - object) (and (objectType ?o {made.target}Type)"
        f" (receptacleType ?r {made.goal}Type){treated} (inReceptacle ?o ?r)))))"
    )
