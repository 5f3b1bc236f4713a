"""Configuration of environments: plain frozen dataclasses with scalar, tuple and nested dataclass fields only."""

from dataclasses import dataclass, field

from sdjax.envs.scienceworld.config import ScienceworldConfig
from sdjax.envs.searchqa.config import SearchqaConfig
from sdjax.envs.webshop.config import WebshopConfig


@dataclass(frozen=True)
class GeneratorKnobs:
    """Difficulty of generated ALFWorld games.

    task_types: which of the six task types, in turn. rooms: kitchen, living_room, bedroom, bathroom.
    receptacles_min/max: size of the house (at least 3). closed_share: share of receptacles that must be opened, and the
    chance that the wanted object starts in one. distractors_min/max: objects that are not wanted. spare_targets: chance
    of one more wanted object than needed. shared_places: chance that a drawer, cabinet or burner stands where its
    neighbour stands.
    """

    task_types: tuple[str, ...] = (
        "pick_and_place_simple",
        "look_at_obj_in_light",
        "pick_clean_then_place_in_recep",
        "pick_heat_then_place_in_recep",
        "pick_cool_then_place_in_recep",
        "pick_two_obj_and_place",
    )
    rooms: tuple[str, ...] = ("kitchen", "living_room", "bedroom", "bathroom")
    receptacles_min: int = 8
    receptacles_max: int = 20
    closed_share: float = 0.5
    distractors_min: int = 4
    distractors_max: int = 16
    spare_targets: float = 0.3
    shared_places: float = 0.2


@dataclass(frozen=True)
class GeneratorConfig(GeneratorKnobs):
    """Which games are generated. seed: another seed, other games. *_games: sizes of the splits train, valid, test."""

    seed: int = 0
    train_games: int = 2000
    valid_games: int = 140
    test_games: int = 140


@dataclass(frozen=True)
class EnvConfig:
    """The ``env`` part of a run's configuration.

    name: benchmark. data: ``"generated"`` (what needs no download) or a path in a form that the benchmark reads.
    engine: ALFWorld's ``"native"`` or ``"textworld"``. template: prompt template of the benchmark. turns, history:
    turn limit and (observation, action) pairs in the prompt. workers, worker_timeout_s: only for engines that run in
    processes of their own. train_split: split to draw tasks from. generator (ALFWorld's games), scienceworld,
    webshop, searchqa: settings of one benchmark.
    """

    name: str = "alfworld"
    data: str = "generated"
    engine: str = "native"
    template: str = "verl_agent"
    turns: int = 50
    history: int = 2
    workers: int = 2
    worker_timeout_s: float = 120.0
    train_split: str = "train"
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    scienceworld: ScienceworldConfig = field(default_factory=ScienceworldConfig)
    webshop: WebshopConfig = field(default_factory=WebshopConfig)
    searchqa: SearchqaConfig = field(default_factory=SearchqaConfig)
