"""ALFWorld's text games in plain Python: same text, same admissible commands, same outcome as the real engine.

The real stack (TextWorld + alfworld) grounds the PDDL problem with a planner library and derives every sentence
through a grammar interpreter, which costs about a second a reset and 0.1 s a step. All games share one domain and one
grammar, so both are written out here as code. What is modelled was read off the game files and off the real engine's
answers; the differential test in tests/envs compares the two.

Quirks of the benchmark that are kept on purpose:

* A command must be in the admissible list exactly. Anything else is answered "Nothing happens." and changes nothing.
* ``go to R`` is not admissible when R stands where the agent already is (drawers and burners share places), although
  every other command for R works there at once.
* ``look`` before the first move lists nothing, though the opening text lists the whole room.
* ``examine OBJECT`` is admissible only for the object in hand; ``examine RECEPTACLE`` also when it is closed.
* Lamps can be used inside closed drawers; heating and cooling need no open door; a lamp is never switched off.
* Some objects fit into no receptacle of the house: whoever picks one up can never put it down again.
"""

import hashlib
import re
from typing import NamedTuple

from sdjax.errors import DataError

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
NOTHING_HAPPENS = "Nothing happens."
WELCOME = "-= Welcome to TextWorld, ALFRED! =-\n\n"
STATIONS = {  # verb -> receptacle types where it can be done
    "clean": ("sinkbasintype", "sinktype"),
    "heat": ("microwavetype",),
    "cool": ("fridgetype",),
}
TREATMENT = {  # task type -> the verb its object needs
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
}
_KNIVES = ("knifetype", "butterknifetype")
_FACT = re.compile(r"\(([A-Za-z]+)((?: [^()\s]+)*)\)")
_GOAL_TYPE = re.compile(r"\((objectType|receptacleType) \?(\w+) (\w+)\)")

# The real game's answer to `help`, which is admissible everywhere.
HELP = """Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""


class Operator(NamedTuple):
    """What a command does. ``subject`` is the object (or, for go/open/close/examine, the receptacle); ``place`` is the
    receptacle it is done with (for ``go`` the location, for ``slice`` the knife)."""

    verb: str
    subject: str = ""
    place: str = ""


def _enumerate(names: list[str]) -> str:
    if not names:
        return "nothing"
    if len(names) == 1:
        return names[0]
    return ", ".join(names[:-1]) + ", and " + names[-1]


def _display_names(identifiers: list[str]) -> dict[str, str]:
    """PDDL identifier -> name shown to the agent. ``identifiers`` are sorted; instances of a kind count down, as in the
    released games."""

    def kind(identifier: str) -> str:
        stem = identifier.split("_bar_", 1)[0]
        return stem + "basin" if "basin" in identifier else stem

    left: dict[str, int] = {}
    for identifier in identifiers:
        if "_bar_" in identifier:
            left[kind(identifier)] = left.get(kind(identifier), 0) + 1
    names = {}
    for identifier in identifiers:
        if "_bar_" in identifier:
            names[identifier] = f"{kind(identifier)} {left[kind(identifier)]}"
            left[kind(identifier)] -= 1
        else:
            names[identifier] = identifier + " "
    return names


def _task_type(goal: str) -> str:
    lowered = goal.lower()
    for mark, task_type in (
        ("istoggled", "look_at_obj_in_light"),
        ("?o1", "pick_two_obj_and_place"),
        ("ishot", "pick_heat_then_place_in_recep"),
        ("iscool", "pick_cool_then_place_in_recep"),
        ("isclean", "pick_clean_then_place_in_recep"),
    ):
        if mark in lowered:
            return task_type
    return "pick_and_place_simple"


class Game:
    """The constant part of one game. Parse it once; any number of episodes may share it.

    Object and receptacle identifiers are the PDDL names in lower case (as the real translator makes them); ``names``
    maps them to what the agent reads. Types are lower-case PDDL type names such as ``"fridgetype"``.
    """

    def __init__(self, problem: str, goal_text: str):
        """Parses ``problem`` (PDDL text). ``goal_text`` is the task sentence without "Your task is to: ".

        Raises:
          DataError: the problem is not an ALFWorld problem.
        """
        start, end = problem.find("(:init"), problem.find("(:goal")
        if not 0 <= start < end:
            raise DataError(
                "a PDDL problem without an (:init ...) section followed by (:goal ...).",
                "check that the game file is complete; download or rebuild it.",
            )
        # A fact may be broken over two lines in the released files.
        body = re.sub(r"\s+", " ", problem[start + len("(:init") : end])
        facts: dict[str, list[tuple[str, ...]]] = {}
        for match in _FACT.finditer(body):
            facts.setdefault(match.group(1).lower(), []).append(tuple(match.group(2).lower().split()))
        self.goal_text = goal_text
        self._read_facts(facts)
        self._read_goal(problem[end:])
        self._go_commands: dict[str, dict[str, Operator]] = {}

    def _read_facts(self, facts: dict[str, list[tuple[str, ...]]]) -> None:
        def unary(predicate: str) -> frozenset[str]:
            return frozenset(arguments[0] for arguments in facts.get(predicate, ()))

        def binary(predicate: str) -> list[tuple[str, str]]:
            return [(arguments[0], arguments[1]) for arguments in facts.get(predicate, ())]

        self.names = _display_names(sorted({name for rows in facts.values() for row in rows for name in row}))
        self.receptacle_type = dict(binary("receptacletype"))
        self.object_type = dict(binary("objecttype"))
        self.can_contain = frozenset(binary("cancontain"))  # (receptacle type, object type)
        self.locations_of: dict[str, list[str]] = {}
        self.receptacles_at: dict[str, list[str]] = {}
        for receptacle, location in sorted(binary("receptacleatlocation")):
            self.locations_of.setdefault(receptacle, []).append(location)
            self.receptacles_at.setdefault(location, []).append(receptacle)
        self.openable = unary("openable")
        self.pickupable = unary("pickupable")
        self.toggleable = unary("toggleable")
        self.sliceable = unary("sliceable")
        self.holds_objects = unary("isreceptacleobject")
        self.treatable = {"clean": unary("cleanable"), "heat": unary("heatable"), "cool": unary("coolable")}
        self.contents_of_object: dict[str, list[str]] = {}
        for inner, outer in sorted(binary("inreceptacleobject")):
            self.contents_of_object.setdefault(outer, []).append(inner)
        places = binary("atlocation")
        if len(places) != 1 or not self.locations_of:
            raise DataError(
                f"a PDDL problem with {len(places)} agent places and {len(self.locations_of)} receptacles.",
                "an ALFWorld problem has one (atLocation agent place) fact and some receptacles; rebuild the game.",
            )
        self.start_location = places[0][1]
        self.start_contents = frozenset(binary("inreceptacle"))
        self.start_object_places = frozenset(binary("objectatlocation"))
        self.start_flags = {
            flag: unary(flag) for flag in ("opened", "isclean", "ishot", "iscool", "istoggled", "issliced")
        }

    def _read_goal(self, goal: str) -> None:
        types = {variable: name.lower() for _, variable, name in _GOAL_TYPE.findall(goal)}
        self.task_type = _task_type(goal)
        self.goal_object_type = types.get("o") or types.get("o1") or ""
        self.goal_receptacle_type = types.get("r", "")
        self.goal_lamp_type = types.get("ot", "")
        lamp_task = self.task_type == "look_at_obj_in_light"
        if not self.goal_object_type or not (self.goal_lamp_type if lamp_task else self.goal_receptacle_type):
            raise DataError(
                f"a goal of the kind {self.task_type} that names no object type or no receptacle type.",
                "check the end of the PDDL problem; rebuild the game.",
            )

    def go_commands(self, location: str) -> dict[str, Operator]:
        """``go to`` commands that are admissible at ``location``. Shared: copy before changing."""
        commands = self._go_commands.get(location)
        if commands is None:
            commands = {}
            for receptacle, locations in self.locations_of.items():
                for place in locations:
                    if place != location:
                        commands.setdefault(f"go to {self.names[receptacle]}", Operator("go", receptacle, place))
            self._go_commands[location] = commands
        return commands


class Episode:
    """One play of a game. ``text`` is the last answer, ``admissible`` the sorted commands that would do something now.

    The state consists of sets of PDDL facts; a copy is cheap (a few microseconds), so search may branch freely.
    """

    __slots__ = (
        "_operators",
        "admissible",
        "contents",
        "displaced",
        "game",
        "holding",
        "location",
        "object_places",
        "opened",
        "sliced",
        "text",
        "toggled",
        "treated",
    )

    def __init__(self, game: Game):
        self.game = game
        self.location = game.start_location
        self.holding: str | None = None
        self.contents = set(game.start_contents)  # (object, receptacle)
        self.object_places = set(game.start_object_places)  # (object, location)
        self.displaced: set[tuple[str, str]] = set()  # (object, receptacle) it was taken from and not put back into
        self.opened = set(game.start_flags["opened"])
        flags = (("clean", "isclean"), ("heat", "ishot"), ("cool", "iscool"))
        self.treated = {verb: set(game.start_flags[flag]) for verb, flag in flags}
        self.toggled = set(game.start_flags["istoggled"])
        self.sliced = set(game.start_flags["issliced"])
        room = _enumerate(["a " + game.names[receptacle] for receptacle in sorted(game.locations_of)])
        opening = self._look() if game.receptacles_at.get(self.location) else self._middle_of_room(room)
        self.text = f"{WELCOME}{opening}\n\nYour task is to: {game.goal_text}"
        self._list_commands()

    def copy(self) -> "Episode":
        other = Episode.__new__(Episode)
        other.game, other.location, other.holding, other.text = self.game, self.location, self.holding, self.text
        other.contents, other.object_places = set(self.contents), set(self.object_places)
        other.displaced, other.opened = set(self.displaced), set(self.opened)
        other.treated = {verb: set(objects) for verb, objects in self.treated.items()}
        other.toggled, other.sliced = set(self.toggled), set(self.sliced)
        # Both are replaced, never changed in place, so they can be shared.
        other._operators, other.admissible = self._operators, self.admissible
        return other

    def state_key(self) -> str:
        """Equal exactly for states from which every continuation looks the same (the last answer plays no part)."""
        parts = [
            self.location,
            self.holding,
            *(sorted(facts) for facts in (self.contents, self.object_places, self.displaced, self.opened)),
            *(sorted(self.treated[verb]) for verb in ("clean", "heat", "cool")),
            sorted(self.toggled),
            sorted(self.sliced),
        ]
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def operator(self, command: str) -> Operator | None:
        """What ``command`` would do here, or None if it is not admissible."""
        return self._operators.get(command.strip())

    def operators(self) -> dict[str, Operator]:
        """All admissible commands with what they do. Read only."""
        return self._operators

    def is_open(self, receptacle: str) -> bool:
        return receptacle not in self.game.openable or receptacle in self.opened

    def contents_of(self, receptacle: str) -> list[str]:
        return sorted(thing for thing, where in self.contents if where == receptacle)

    # commands -------------------------------------------------------------------------------------------------------

    def _list_commands(self) -> None:
        """Lists the admissible commands. Of two commands with equal text the first one listed counts."""
        game, names = self.game, self.game.names
        operators = dict(game.go_commands(self.location))
        for receptacle in game.receptacles_at.get(self.location, ()):
            name = names[receptacle]
            operators.setdefault(f"examine {name}", Operator("examine receptacle", receptacle))
            if receptacle in game.openable:
                verb = "close" if receptacle in self.opened else "open"
                operators.setdefault(f"{verb} {name}", Operator(verb, receptacle))
            can_reach_in = self.is_open(receptacle)
            for thing in self.contents_of(receptacle):
                if can_reach_in and self.holding is None and thing in game.pickupable:
                    operators.setdefault(f"take {names[thing]} from {name}", Operator("take", thing, receptacle))
                if thing in game.toggleable:
                    operators.setdefault(f"use {names[thing]}", Operator("use", thing))
            if self.holding is not None:
                self._list_uses_of_held(operators, self.holding, receptacle)
        if self.holding is not None:
            self._list_held_alone(operators, self.holding)
        for command in ("look", "inventory", "help"):
            operators[command] = Operator(command)
        self._operators = operators
        self.admissible = tuple(sorted(operators))

    def _list_uses_of_held(self, operators: dict[str, Operator], held: str, receptacle: str) -> None:
        game, names = self.game, self.game.names
        kind = game.receptacle_type.get(receptacle)
        if self.is_open(receptacle) and (kind, game.object_type.get(held)) in game.can_contain:
            operators.setdefault(f"move {names[held]} to {names[receptacle]}", Operator("move", held, receptacle))
        for verb, stations in STATIONS.items():
            if held in game.treatable[verb] and kind in stations:
                operators.setdefault(f"{verb} {names[held]} with {names[receptacle]}", Operator(verb, held, receptacle))

    def _list_held_alone(self, operators: dict[str, Operator], held: str) -> None:
        game, names = self.game, self.game.names
        operators.setdefault(f"examine {names[held]}", Operator("examine object", held))
        if game.object_type.get(held) in _KNIVES:
            for thing, location in self.object_places:
                if location == self.location and thing in game.sliceable:
                    operators.setdefault(f"slice {names[thing]} with {names[held]}", Operator("slice", thing, held))

    def step(self, command: str) -> str:
        """Plays ``command`` (any text) and returns the answer. ``won()`` tells whether the game is won now."""
        operator = self._operators.get(command.strip())
        if operator is None:
            self.text = NOTHING_HAPPENS
            return self.text
        self.text = self._apply(operator)
        self._list_commands()
        return self.text

    def _apply(self, operator: Operator) -> str:
        verb, subject, place = operator
        name = self.game.names.get(subject, "")
        if verb == "go":
            self.location = place
            return f"You arrive at {name}. {self._see(subject)}"
        if verb == "open":
            self.opened.add(subject)
            return f"You open the {name}. {self._see(subject)}"
        if verb == "close":
            self.opened.discard(subject)
            return f"You close the {name}."
        if verb == "use":
            self.toggled.add(subject)
            return f"You turn on the {name}."
        if verb == "examine receptacle":
            return self._see(subject)
        if verb == "examine object":
            return self._describe(subject)
        if verb == "look":
            return self._look()
        if verb == "inventory":
            held = self.holding
            return "You are not carrying anything." if held is None else f"You are carrying: a {self.game.names[held]}."
        if verb == "help":
            return HELP
        return self._handle(verb, subject, place)

    def _handle(self, verb: str, thing: str, place: str) -> str:
        """Commands that move or change an object."""
        name, where = self.game.names[thing], self.game.names[place]
        if verb == "take":
            self.contents.discard((thing, place))
            self.displaced.add((thing, place))
            self.object_places.discard((thing, self.location))
            self.holding = thing
            return f"You pick up the {name} from the {where}."
        if verb == "move":
            self.contents.add((thing, place))
            self.displaced.discard((thing, place))
            self.object_places.add((thing, self.location))
            self.holding = None
            return f"You move the {name} to the {where}."
        if verb == "slice":
            self.sliced.add(thing)
            return f"You sliced the {name} with the {where}."
        self.treated[verb].add(thing)
        if verb == "heat":
            self.treated["cool"].discard(thing)
        elif verb == "cool":
            self.treated["heat"].discard(thing)
        return f"You {verb} the {name} using the {where}."

    # text -----------------------------------------------------------------------------------------------------------

    @staticmethod
    def _middle_of_room(seen: str) -> str:
        return f"You are in the middle of a room. Looking quickly around you, you see {seen}."

    def _look(self) -> str:
        game, names = self.game, self.game.names
        here = game.receptacles_at.get(self.location, ())
        if not here:
            return self._middle_of_room("nothing")
        beside = [
            "a " + names[thing]
            for thing, location in sorted(self.object_places)
            if location == self.location
            for receptacle in here
            if (thing, receptacle) in self.displaced
        ]
        facing = _enumerate([names[receptacle] for receptacle in here])
        return f"You are facing the {facing}. Next to it, you see {_enumerate(beside)}."

    def _see(self, receptacle: str) -> str:
        name = self.game.names[receptacle]
        inside = _enumerate(["a " + self.game.names[thing] for thing in self.contents_of(receptacle)])
        if receptacle not in self.game.openable:
            return f"On the {name}, you see {inside}."
        if receptacle in self.opened:
            return f"The {name} is open. In it, you see {inside}."
        return f"The {name} is closed."

    def _describe(self, thing: str) -> str:
        game, name = self.game, self.game.names[thing]
        if thing in game.holds_objects:
            inside = _enumerate(["a " + game.names[inner] for inner in game.contents_of_object.get(thing, ())])
            return f"This is a normal {name}. In it, you see {inside}."
        hot, cool, clean = (thing in self.treated[verb] for verb in ("heat", "cool", "clean"))
        sliced = thing in self.sliced
        words = []
        if hot or cool:
            # The real grammar says "cold" when nothing else is to be said, else "cool".
            words.append("hot" if hot else "cool" if (clean or sliced) else "cold")
        if clean:
            words.append("clean")
        if words:
            return f"This is a {' and '.join(words)}{' sliced' if sliced else ''} {name}."
        if thing in game.toggleable and thing in self.toggled:
            return f"This {name} is on."
        if sliced and thing in game.sliceable:
            return f"This is a sliced {name}."
        return f"There's nothing special about {name}."

    # outcome --------------------------------------------------------------------------------------------------------

    def won(self) -> bool:
        """Whether the goal holds now."""
        game = self.game
        if game.task_type == "look_at_obj_in_light":
            if self.holding is None or game.object_type.get(self.holding) != game.goal_object_type:
                return False
            here = set(game.receptacles_at.get(self.location, ()))
            return any(
                receptacle in here and thing in self.toggled and game.object_type.get(thing) == game.goal_lamp_type
                for thing, receptacle in self.contents
            )
        verb = TREATMENT.get(game.task_type)
        placed: dict[str, int] = {}
        for thing, receptacle in self.contents:
            if (
                game.object_type.get(thing) == game.goal_object_type
                and game.receptacle_type.get(receptacle) == game.goal_receptacle_type
                and (verb is None or (thing in self.treated[verb] and thing in game.treatable[verb]))
            ):
                placed[receptacle] = placed.get(receptacle, 0) + 1
        needed = 2 if game.task_type == "pick_two_obj_and_place" else 1
        return any(count >= needed for count in placed.values())
