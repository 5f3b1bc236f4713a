"""The oracle: a short winning command list from any state of the native engine.

It sees the whole state, so its plans are privileged information: walkthroughs, hints for teachers, proofs that a
generated game can be solved. It tries every sensible choice of objects, receptacle and lamp on a copy of the episode
and keeps the shortest sequence that wins there; a returned plan is therefore always a proof. It is not always the
shortest possible plan.
"""

from collections.abc import Iterator

from sdjax.envs.alfworld.engine import STATIONS, TREATMENT, Episode


def plan(episode: Episode) -> list[str] | None:
    """Returns commands that win from the state of ``episode`` (empty if it is won), or None if none was found.

    None means that the state is a dead end in practice: the object in hand fits nowhere, or a needed object, lamp or
    appliance does not exist. ``episode`` is not changed.
    """
    if episode.won():
        return []
    best: list[str] | None = None
    for objects, receptacle, lamp in _choices(episode):
        attempt = _Attempt(episode.copy())
        wins = attempt.solve(objects, receptacle, lamp) and attempt.episode.won()
        if wins and (best is None or len(attempt.commands) < len(best)):
            best = attempt.commands
    return best


def describe_facts(episode: Episode) -> list[str]:
    """Where every wanted object, lamp and goal receptacle is, e.g. ``"apple 2 is in fridge 1 (closed)."``."""
    game = episode.game
    wanted = {game.goal_object_type, game.goal_lamp_type} - {""}
    facts = []
    for thing, receptacle in sorted(episode.contents):
        if game.object_type.get(thing) in wanted:
            closed = "" if episode.is_open(receptacle) else " (closed)"
            facts.append(f"{game.names[thing]} is in {game.names[receptacle]}{closed}.")
    if episode.holding is not None:
        facts.append(f"you hold {game.names[episode.holding]}.")
    return facts


def _choices(episode: Episode) -> Iterator[tuple[list[str], str, str]]:
    """Candidate (objects, goal receptacle, lamp); receptacle or lamp is "" where the task has none."""
    game = episode.game
    objects = [
        thing
        for thing, kind in game.object_type.items()
        if kind == game.goal_object_type and (thing in game.pickupable or thing == episode.holding)
    ]
    if game.task_type == "look_at_obj_in_light":
        lamps = [
            thing
            for thing, kind in game.object_type.items()
            if kind == game.goal_lamp_type and thing in game.toggleable
        ]
        yield from (([thing], "", lamp) for thing in objects for lamp in lamps)
        return
    receptacles = [name for name in game.locations_of if game.receptacle_type.get(name) == game.goal_receptacle_type]
    for receptacle in receptacles:
        if game.task_type != "pick_two_obj_and_place":
            yield from (([thing], receptacle, "") for thing in objects)
            continue
        placed = [thing for thing in objects if (thing, receptacle) in episode.contents]
        others = sorted(
            (thing for thing in objects if thing not in placed),
            key=lambda thing: (thing != episode.holding, _effort(episode, thing), thing),
        )
        pair = (placed + others)[:2]
        if len(pair) == 2:
            # What is in hand goes first, or it would have to be put down and fetched again.
            yield sorted(pair, key=lambda thing: thing != episode.holding), receptacle, ""


def _effort(episode: Episode, thing: str) -> int:
    """Commands before ``thing`` can be taken: one to walk, one to open."""
    places = [receptacle for other, receptacle in episode.contents if other == thing]
    locations = episode.game.locations_of
    return min(
        (
            any(location != episode.location for location in locations.get(receptacle, ()))
            + (not episode.is_open(receptacle))
            for receptacle in places
        ),
        default=9,
    )


class _Attempt:
    """Plays one choice to its end on its own copy of the episode, writing down the commands."""

    def __init__(self, episode: Episode):
        self.episode = episode
        self.commands: list[str] = []

    def solve(self, objects: list[str], receptacle: str, lamp: str) -> bool:
        if lamp:
            return self._light(objects[0], lamp)
        verb = TREATMENT.get(self.episode.game.task_type)
        return all(self._bring(thing, receptacle, verb) for thing in objects)

    def _light(self, thing: str, lamp: str) -> bool:
        episode = self.episode
        locations = episode.game.locations_of
        spots = [receptacle for other, receptacle in episode.contents if other == lamp and receptacle in locations]
        if not spots or not self._fetch(thing):
            return False
        spot = min(spots, key=lambda receptacle: (episode.location not in locations[receptacle], receptacle))
        return self._go(spot) and (episode.won() or self._do("use", lamp))

    def _bring(self, thing: str, receptacle: str, verb: str | None) -> bool:
        episode = self.episode
        untreated = verb is not None and thing not in episode.treated[verb]
        if (thing, receptacle) in episode.contents and not untreated:
            return True
        if not self._fetch(thing):
            return False
        if verb is not None and untreated and not self._treat(thing, verb):
            return False
        return self._go(receptacle) and self._open(receptacle) and self._do("move", thing, receptacle)

    def _treat(self, thing: str, verb: str) -> bool:
        game = self.episode.game
        stations = [name for name in game.locations_of if game.receptacle_type.get(name) in STATIONS[verb]]
        if not stations:
            return False
        station = min(stations, key=self._distance)
        return self._go(station) and self._do(verb, thing, station)

    def _fetch(self, thing: str) -> bool:
        episode = self.episode
        if episode.holding == thing:
            return True
        if episode.holding is not None and not self._put_down():
            return False
        places = [name for other, name in episode.contents if other == thing and name in episode.game.locations_of]
        if not places:
            return False
        place = min(places, key=lambda name: (*self._distance(name)[:1], not episode.is_open(name), name))
        return self._go(place) and self._open(place) and self._do("take", thing, place)

    def _put_down(self) -> bool:
        """Puts the object in hand anywhere it fits, nearest first."""
        episode, game = self.episode, self.episode.game
        held = episode.holding
        assert held is not None
        kind = game.object_type.get(held)
        fitting = [name for name in game.locations_of if (game.receptacle_type.get(name), kind) in game.can_contain]
        if not fitting:
            return False

        def cost(name: str) -> tuple[bool, bool, bool, str]:
            is_goal = game.receptacle_type.get(name) == game.goal_receptacle_type and kind == game.goal_object_type
            return (episode.location not in game.locations_of[name], not episode.is_open(name), is_goal, name)

        place = min(fitting, key=cost)
        return self._go(place) and self._open(place) and self._do("move", held, place)

    def _distance(self, receptacle: str) -> tuple[bool, str]:
        return (self.episode.location not in self.episode.game.locations_of[receptacle], receptacle)

    def _go(self, receptacle: str) -> bool:
        if self.episode.location in self.episode.game.locations_of[receptacle]:
            return True
        return self._do("go", receptacle)

    def _open(self, receptacle: str) -> bool:
        return self.episode.is_open(receptacle) or self._do("open", receptacle)

    def _do(self, verb: str, subject: str, place: str | None = None) -> bool:
        for command, operator in self.episode.operators().items():
            if operator.verb == verb and operator.subject == subject and place in (None, operator.place):
                self.commands.append(command)
                self.episode.step(command)
                return True
        return False
