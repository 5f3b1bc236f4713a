"""Facts of the benchmark's text engine, on a hand-made house and on the fixture games."""

import random

import pytest

from sdjax.envs.alfworld.engine import HELP, NOTHING_HAPPENS, Episode, Game
from sdjax.envs.alfworld.planner import plan
from sdjax.errors import DataError
from tests.envs.conftest import read_rows

HOUSE = """
(define (problem house) (:domain alfred) (:objects agent1 - agent)
(:init
  (receptacleType Drawer_bar_1 DrawerType) (receptacleType Drawer_bar_2 DrawerType)
  (receptacleType Fridge_bar_1 FridgeType) (receptacleType
  Desk_bar_1 DeskType) (receptacleType Microwave_bar_1 MicrowaveType)
  (receptacleType Sink_bar_1_bar_SinkBasin SinkBasinType)
  (openable Drawer_bar_1) (openable Drawer_bar_2) (openable Fridge_bar_1) (openable Microwave_bar_1)
  (receptacleAtLocation Drawer_bar_1 loc_a) (receptacleAtLocation Drawer_bar_2 loc_a)
  (receptacleAtLocation Fridge_bar_1 loc_b) (receptacleAtLocation Desk_bar_1 loc_c)
  (receptacleAtLocation Microwave_bar_1 loc_d) (receptacleAtLocation Sink_bar_1_bar_SinkBasin loc_e)
  (objectType Apple_bar_1 AppleType) (objectType Apple_bar_2 AppleType) (objectType Knife_bar_1 KnifeType)
  (objectType TeddyBear_bar_1 TeddyBearType) (objectType DeskLamp_bar_1 DeskLampType) (objectType Mug_bar_1 MugType)
  (pickupable Apple_bar_1) (pickupable Apple_bar_2) (pickupable Knife_bar_1) (pickupable TeddyBear_bar_1)
  (pickupable Mug_bar_1) (isReceptacleObject Mug_bar_1) (toggleable DeskLamp_bar_1) (sliceable Apple_bar_1)
  (cleanable Apple_bar_1) (heatable Apple_bar_1) (coolable Apple_bar_1) (cleanable Apple_bar_2)
  (inReceptacle Apple_bar_1 Desk_bar_1) (objectAtLocation Apple_bar_1 loc_c)
  (inReceptacle Apple_bar_2 Drawer_bar_2) (objectAtLocation Apple_bar_2 loc_a)
  (inReceptacle Knife_bar_1 Desk_bar_1) (objectAtLocation Knife_bar_1 loc_c)
  (inReceptacle TeddyBear_bar_1 Desk_bar_1) (objectAtLocation TeddyBear_bar_1 loc_c)
  (inReceptacle Mug_bar_1 Desk_bar_1) (objectAtLocation Mug_bar_1 loc_c)
  (inReceptacle DeskLamp_bar_1 Drawer_bar_1) (objectAtLocation DeskLamp_bar_1 loc_a)
  (canContain DrawerType KnifeType) (canContain FridgeType AppleType) (canContain DeskType AppleType)
  (canContain DeskType KnifeType) (canContain DrawerType AppleType) (canContain DeskType MugType)
  (atLocation agent1 loc_start))
(:goal %s))
"""
PICK = """(and (exists (?r - receptacle) (exists (?o - object)
  (and (inReceptacle ?o ?r) (objectType ?o AppleType) (receptacleType ?r FridgeType)))))"""
LIGHT = """(and (exists (?ot - object) (and (objectType ?ot DeskLampType) (isToggled ?ot)))
  (exists (?o - object ?a - agent) (and (objectType ?o AppleType) (holds ?a ?o))))"""
HOT = """(and (exists (?r - receptacle) (exists (?o - object) (and (heatable ?o) (objectType ?o AppleType)
  (receptacleType ?r DeskType) (isHot ?o) (inReceptacle ?o ?r)))))"""


def start(goal: str = PICK) -> Episode:
    return Episode(Game(HOUSE % goal, "put an apple in fridge."))


def play(episode: Episode, *commands: str) -> str:
    for command in commands:
        assert command in episode.admissible, (command, episode.admissible)
        episode.step(command)
    return episode.text


def test_opening_lists_the_room_and_the_task_but_look_sees_nothing():
    episode = start()
    # Sorted by PDDL name; instances count from the last one back, so the first drawer listed is drawer 2.
    assert episode.text == (
        "-= Welcome to TextWorld, ALFRED! =-\n\n"
        "You are in the middle of a room. Looking quickly around you, you see a desk 1, a drawer 2, a drawer 1, "
        "a fridge 1, a microwave 1, and a sinkbasin 1.\n\nYour task is to: put an apple in fridge."
    )
    expected = "You are in the middle of a room. Looking quickly around you, you see nothing."
    assert episode.step("look") == expected


def test_admissible_commands_are_sorted_and_hold_the_constant_ones():
    episode = start()
    assert list(episode.admissible) == sorted(episode.admissible)
    assert {"look", "inventory", "help"} <= set(episode.admissible)
    assert episode.step("help") == HELP


@pytest.mark.parametrize("command", ["", "fly", "GO TO desk 1", "go to  desk 1", "go to desk 9", "look\nlook", "\x00"])
def test_anything_inadmissible_changes_nothing(command):
    episode = start()
    key, admissible = episode.state_key(), episode.admissible
    assert episode.step(command) == NOTHING_HAPPENS
    assert episode.state_key() == key and episode.admissible == admissible


def test_surrounding_blanks_do_not_matter():
    assert start().step("  go to desk 1 \n").startswith("You arrive at desk 1.")


def test_go_to_a_receptacle_at_the_own_place_is_not_admissible_but_its_commands_are():
    episode = start()
    assert play(episode, "go to drawer 1") == "You arrive at drawer 1. The drawer 1 is closed."
    assert "go to drawer 2" not in episode.admissible
    assert play(episode, "open drawer 2") == "You open the drawer 2. The drawer 2 is open. In it, you see a desklamp 1."
    assert episode.step("look") == "You are facing the drawer 2, and drawer 1. Next to it, you see nothing."


def test_closed_receptacles_hide_and_withhold_their_contents():
    episode = start()
    play(episode, "go to drawer 1")
    assert "take apple 1 from drawer 1" not in episode.admissible
    assert play(episode, "examine drawer 1") == "The drawer 1 is closed."
    play(episode, "open drawer 1", "take apple 1 from drawer 1")
    assert play(episode, "close drawer 1") == "You close the drawer 1."
    assert "move apple 1 to drawer 1" not in episode.admissible


def test_examine_object_only_in_hand_and_words_for_its_state():
    episode = start()
    play(episode, "go to desk 1")
    assert "examine apple 2" not in episode.admissible
    play(episode, "take apple 2 from desk 1")
    assert play(episode, "examine apple 2") == "There's nothing special about apple 2."
    assert play(episode, "inventory") == "You are carrying: a apple 2."
    play(episode, "go to fridge 1")
    assert play(episode, "cool apple 2 with fridge 1") == "You cool the apple 2 using the fridge 1."
    assert play(episode, "examine apple 2") == "This is a cold apple 2."
    play(episode, "go to sinkbasin 1", "clean apple 2 with sinkbasin 1")
    assert play(episode, "examine apple 2") == "This is a cool and clean apple 2."
    play(episode, "go to microwave 1", "heat apple 2 with microwave 1")  # a closed microwave is good enough
    assert play(episode, "examine apple 2") == "This is a hot and clean apple 2."
    play(episode, "go to desk 1", "move apple 2 to desk 1", "take knife 1 from desk 1", "slice apple 2 with knife 1")
    assert episode.text == "You sliced the apple 2 with the knife 1."
    play(episode, "move knife 1 to desk 1", "take apple 2 from desk 1", "examine apple 2")
    assert episode.text == "This is a hot and clean sliced apple 2."


def test_containers_and_moved_things_are_described():
    episode = start()
    play(episode, "go to desk 1", "take mug 1 from desk 1")
    assert play(episode, "examine mug 1") == "This is a normal mug 1. In it, you see nothing."
    assert play(episode, "go to desk 1" if "go to desk 1" in episode.admissible else "look").startswith(
        "You are facing"
    )
    assert play(episode, "move mug 1 to desk 1") == "You move the mug 1 to the desk 1."


def test_lamp_works_in_a_closed_drawer_and_stays_on():
    episode = start(LIGHT)
    play(episode, "go to desk 1", "take apple 2 from desk 1", "go to drawer 2")
    assert not episode.won()
    assert play(episode, "use desklamp 1") == "You turn on the desklamp 1."
    assert episode.won()
    play(episode, "use desklamp 1")
    assert episode.won()


def test_dead_end_is_proven_by_the_oracle():
    episode = start()
    assert plan(episode) is not None
    play(episode, "go to desk 1", "take teddybear 1 from desk 1")
    assert not [command for command in episode.admissible if command.startswith("move")]
    assert plan(episode) is None


def test_heating_after_cooling_and_the_goal_needs_the_treatment():
    episode = start(HOT)
    assert not episode.won()  # an apple is on the desk, but cold
    commands = plan(episode)
    assert commands is not None and "heat apple 2 with microwave 1" in commands
    for command in commands:
        assert not episode.won()
        play(episode, command)
    assert episode.won()


def test_copy_is_independent_and_state_key_sees_what_matters():
    episode = start()
    play(episode, "go to desk 1")
    other = episode.copy()
    assert other.state_key() == episode.state_key() and other.admissible == episode.admissible
    play(other, "take apple 2 from desk 1")
    assert other.state_key() != episode.state_key()
    assert "take apple 2 from desk 1" in episode.admissible
    play(other, "move apple 2 to desk 1")
    assert other.state_key() == episode.state_key()  # the way back leads to the same state


def test_fixture_walkthroughs_win_at_the_last_step_and_not_before(fixture_rows, fixture_games):
    assert len({game.task_type for game in fixture_games}) == 6
    for row, game in zip(fixture_rows, fixture_games, strict=True):
        episode = Episode(game)
        for command in row["walkthrough"]:
            assert not episode.won(), row["id"]
            play(episode, command)
        assert episode.won(), row["id"]


def test_oracle_wins_from_random_states_or_the_hand_is_stuck(fixture_games):
    rng = random.Random(0)
    for game in fixture_games:
        episode = Episode(game)
        for _ in range(25):
            episode.step(rng.choice(episode.admissible))
            if episode.won():
                break
        key = episode.state_key()
        commands = plan(episode)
        assert episode.state_key() == key
        assert commands is not None  # every object of these games fits somewhere
        for command in commands:
            play(episode, command)
        assert episode.won()


def test_interleaved_episodes_do_not_leak(fixture_games):
    rng = random.Random(1)
    scripts = []
    for game in fixture_games[:6]:
        alone, trace = Episode(game), []
        for _ in range(15):
            command = rng.choice(alone.admissible)
            trace.append((command, alone.step(command), alone.admissible, alone.won()))
        scripts.append((game, trace))
    players = [(Episode(game), iter(trace)) for game, trace in scripts for _ in range(3)]
    while players:
        player = rng.choice(players)
        expected = next(player[1], None)
        if expected is None:
            players.remove(player)
            continue
        command, text, admissible, won = expected
        assert (player[0].step(command), player[0].admissible, player[0].won()) == (text, admissible, won)


@pytest.mark.parametrize("problem", ["", "(:init", "(:init ) (:goal )", HOUSE % "(and )"])
def test_damaged_problem_is_a_data_error(problem):
    with pytest.raises(DataError):
        Game(problem, "x")


@pytest.mark.shared
@pytest.mark.parametrize("split", ["train", "valid_seen", "valid_unseen", "valid_train"])
def test_released_walkthroughs_win_at_the_last_step(released, split):
    rows = read_rows(released / f"{split}.jsonl.xz")
    for row in random.Random(0).sample(rows, 30):
        episode = Episode(Game(row["pddl_problem"], row["goal"]))
        for command in row["walkthrough"]:
            assert not episode.won(), row["id"]
            play(episode, command)
        assert episode.won(), row["id"]
        commands = plan(Episode(episode.game))
        assert commands is not None and len(commands) <= len(row["walkthrough"]) + 2
