"""The tables of vocabulary.toml, read once and checked for dangling names."""

import functools
import hashlib
import tomllib
from dataclasses import dataclass
from importlib import resources

from sdjax.errors import DataError


@dataclass(frozen=True)
class Room:
    """first_scene: lowest scene number. receptacles: kind -> most a room has. objects, lamps: kinds found there."""

    first_scene: int
    receptacles: dict[str, int]
    objects: tuple[str, ...]
    lamps: tuple[str, ...]


@dataclass(frozen=True)
class Vocabulary:
    """goals: task type -> sentences. holds: receptacle kind -> object kinds. traits: trait -> kinds. sha256: of the
    file."""

    goals: dict[str, tuple[str, ...]]
    rooms: dict[str, Room]
    holds: dict[str, tuple[str, ...]]
    traits: dict[str, frozenset[str]]
    sha256: str

    def places_of(self, kind: str) -> tuple[str, ...]:
        """Receptacle kinds in which an object of ``kind`` may lie, sorted."""
        return tuple(sorted(place for place, things in self.holds.items() if kind in things))


@functools.cache
def load_vocabulary() -> Vocabulary:
    data = resources.files("sdjax.envs.alfworld").joinpath("vocabulary.toml").read_bytes()
    table = tomllib.loads(data.decode())
    vocabulary = Vocabulary(
        goals={task_type: tuple(sentences) for task_type, sentences in table["goals"].items()},
        rooms={
            name: Room(room["first_scene"], room["receptacles"], tuple(room["objects"]), tuple(room["lamps"]))
            for name, room in table["rooms"].items()
        },
        holds={place: tuple(things) for place, things in table["holds"].items()},
        traits={trait: frozenset(kinds) for trait, kinds in table["traits"].items()},
        sha256=hashlib.sha256(data).hexdigest(),
    )
    held = {thing for things in vocabulary.holds.values() for thing in things}
    for name, room in vocabulary.rooms.items():
        unknown = (set(room.receptacles) - set(vocabulary.holds)) | (set(room.objects) - held)
        if unknown:
            raise DataError(
                f"vocabulary.toml: room {name} names {sorted(unknown)}, which [holds] does not know.",
                "add these kinds to [holds] or take them out of the room.",
            )
    return vocabulary
