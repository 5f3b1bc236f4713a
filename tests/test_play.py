"""Playing in the terminal: moves from a pipe, agents that play themselves, and texts that must stay texts."""

import asyncio
import dataclasses
import io
import os
import random
import signal

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from sdjax import play
from sdjax.config import resolved
from sdjax.envs import BENCHMARKS, EnvConfig, GeneratorConfig, make_benchmark
from sdjax.envs.base import Observation, Status, StepResult
from sdjax.errors import ConfigError, DataError
from sdjax.play.agents import random_action
from sdjax.play.checkpoint import open_newest
from sdjax.play.screen import Screen, TeacherView, plain
from sdjax.train.checkpoints import Checkpoints
from sdjax.train.rundir import write_json
from tests.train.tiny_run import run, tiny_checkpoint, tiny_config

SMALL = GeneratorConfig(train_games=4, valid_games=4, test_games=4, receptacles_min=3, receptacles_max=5)
ALFWORLD = play.Settings(EnvConfig(generator=SMALL, turns=30), "valid", "alfworld")


def started(lines: str = "", settings: play.Settings = ALFWORLD, workdir=None, **options) -> tuple[list, str]:
    """Plays; returns the records and everything that was shown."""
    console = Console(file=io.StringIO(), width=160)
    records = play.play(settings, play.Options(**options), console, io.StringIO(lines), workdir)
    return records, console.file.getvalue()


def winning_commands() -> list[str]:
    async def ask():
        environment = make_benchmark(ALFWORLD.env).make()
        await environment.reset(make_benchmark(ALFWORLD.env).panel("valid").task_ids[0], 0)
        return environment.privileged("plan")

    return asyncio.run(ask())


def test_a_person_wins_with_the_plan():
    commands = winning_commands()
    records, shown = started("\n".join(["/plan", *commands, "more lines", "are not read"]))
    assert [r.status for r in records] == ["success"] and records[0].ret == 10 and records[0].turns == len(commands)
    assert "reward +10   score 1.00   success" in shown and f"> {commands[-1]}" in shown
    assert "are not read" not in shown and "human: 1 episode" in shown


def test_commands_of_the_program_are_no_moves():
    records, shown = started("/help\n/dance\n\n   \nlook\n/quit\ngo to hell\n")
    assert records[0].status == "stopped" and records[0].turns == 1 and "go to hell" not in shown
    assert "/plan  commands that win from here" in shown and "/dance: no such command" in shown


def test_the_end_of_the_input_ends_the_game():
    records, _ = started("look")
    assert records[0].status == "stopped" and records[0].turns == 1


def test_the_turn_limit_truncates():
    chosen = dataclasses.replace(ALFWORLD, env=dataclasses.replace(ALFWORLD.env, turns=3))
    records, shown = started("look\n" * 9, chosen)
    assert records[0].status == "truncated" and records[0].turns == 3 and "the end" in shown


def test_an_interrupt_at_the_prompt_ends_with_the_summary():
    class Impatient(io.StringIO):
        def readline(self, *_):
            os.kill(os.getpid(), signal.SIGINT)
            return "look\n"

    before = signal.getsignal(signal.SIGINT)
    console = Console(file=io.StringIO(), width=160)
    assert play.play(ALFWORLD, play.Options(), console, Impatient()) == []
    assert "interrupted" in console.file.getvalue() and signal.getsignal(signal.SIGINT) is before


def test_what_a_person_types_is_shown_as_typed():
    _, shown = started("[bold red]x[/] [link=http://a.b]y[/link] :smile: \x1b[2J\x07\u202e end\n")
    assert "[bold red]x[/] [link=http://a.b]y[/link] :smile: �[2J�� end" in shown and "\x1b" not in shown


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=60))
def test_no_text_is_markup_or_moves_the_cursor(text):
    console = Console(file=io.StringIO(), width=400, force_terminal=True, color_system=None)
    screen = Screen(console)
    hostile = f"A{text}Z"
    seen = Observation(hostile, hostile, (hostile,), (hostile,))
    screen.start(hostile, hostile, seen, TeacherView(hostile, True, hostile))
    screen.turn(1, seen, [hostile], teacher=True)
    screen.move(hostile, hostile, hostile)
    screen.result(StepResult(seen, 0.0, 0.0, Status.RUNNING), "running")
    screen.last(seen)
    screen.notes([hostile])
    screen.summary([play.Record(hostile, hostile, "stopped", 0.0, 0.0, 1)], hostile)
    assert not set(console.file.getvalue()) & set("\x1b\r\x08\x07\x9b\u202e")
    assert len(plain(hostile).plain) == len(hostile)  # nothing is swallowed


def test_markup_of_an_environment_is_shown():
    console = Console(file=io.StringIO(), width=200)
    screen = Screen(console)
    screen.turn(1, Observation("a [red]b[/red] [/nope] c", "", ("[x]",)), ["[bold]p"], teacher=True)
    shown = console.file.getvalue()
    assert "a [red]b[/red] [/nope] c" in shown and "commands  [x]" in shown and "[bold]p" in shown


def test_the_teacher_stands_beside_the_player():
    commands = winning_commands()
    _, shown = started("look\n", teacher=True)
    assert "Household tasks: general skills" in shown and "teacher: plan" in shown and commands[-1] in shown
    line = next(line for line in shown.splitlines() if commands[0] in line)
    assert line.count("│") == 4  # in a second column
    _, hidden = started("look\n")
    assert "teacher" not in hidden and "Household" not in hidden


@pytest.mark.parametrize("agent", ["expert", "random"])
def test_agents_play_tasks_of_the_panel(agent):
    records, shown = started(agent=agent, episodes=3)
    panel = make_benchmark(ALFWORLD.env).panel("valid")
    assert [r.task for r in records] == list(panel.task_ids[:3])
    assert agent != "expert" or all(r.status == "success" for r in records)
    assert f"success {sum(r.status == 'success' for r in records)} of 3" in shown and "turn 1" not in shown
    assert (records, shown) == started(agent=agent, episodes=3)


def test_one_episode_of_an_agent_is_shown_turn_by_turn():
    records, shown = started(agent="expert", task=make_benchmark(ALFWORLD.env).task_ids("test")[1])
    assert records[0].task.startswith("generated/") and records[0].status == "success"
    assert f"turn {records[0].turns}" in shown and "I need to find" in shown


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "scienceworld"])
def test_every_benchmark_plays_by_name(name):
    chosen = play.find_settings(None, name, None)
    for agent in ("expert", "random") if name == "alfworld" else ("expert", "random", "rule"):
        records, shown = started(settings=chosen, agent=agent, teacher=True)
        assert records[0].status in ("success", "failed", "truncated") and "teacher" in shown
        assert agent != "expert" or records[0].status == "success"


@pytest.mark.scienceworld
def test_scienceworld_plays_by_name():
    pytest.importorskip("scienceworld")
    try:
        chosen = play.find_settings(None, "scienceworld", None)
        make_benchmark(chosen.env).close()
    except ConfigError as error:
        pytest.skip(str(error))
    records, shown = started("look around\nopen [door]\n/quit\n", chosen, teacher=True)
    assert records[0].turns == 2 and "open [door]" in shown and "objects" in shown and "teacher: plan" in shown


def test_a_rule_agent_also_shows_what_it_loses():
    chosen = play.find_settings(None, "searchqa", None)
    records, _ = started(settings=chosen, agent="rule", episodes=12)
    assert {r.status for r in records} == {"success", "failed"} and all(r.turns == 2 for r in records)


def test_options_that_do_not_fit():
    with pytest.raises(ConfigError, match="no expert 'rule'; it has search, plan"):
        started(agent="rule")
    for options in ({"episodes": 0, "agent": "random"}, {"episodes": 2}):
        with pytest.raises(ConfigError, match="--episodes"):
            started(**options)
    with pytest.raises(DataError, match="nothing/of/it"):
        started(task="nothing/of/it", agent="random")
    with pytest.raises(ConfigError, match="names no model"):
        started(agent="checkpoint")


def test_settings_come_from_one_place(tmp_path):
    config = tiny_config(tmp_path, "sdar")
    assert play.find_settings(config, None, None).bank == "alfworld_brief"
    write_json(tmp_path / "config.json", resolved(config))
    assert play.find_settings(None, None, tmp_path) == play.find_settings(config, None, None)
    for arguments, message in {
        (config, "webshop", None): "both given",
        (None, "chess", None): "alfworld, scienceworld, webshop, searchqa",
        (None, None, None): "nothing says what to play",
        (None, None, tmp_path / "nowhere"): "nothing says what to play",
    }.items():
        with pytest.raises(ConfigError, match=message):
            play.find_settings(*arguments)


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_random_actions_leave_no_placeholder(seed):
    rng = random.Random(seed)
    templates = Observation("", "boil the water", ("connect OBJ to OBJ", "wait"), ("a", "OBJECT b"))
    names = ("a", "OBJECT b")
    assert random_action(templates, rng) in {"wait", *(f"connect {x} to {y}" for x in names for y in names)}
    page = Observation("", "red shoes", ("search[<your query>]",))
    assert random_action(page, rng) in ("search[red shoes]", "search[shoes red]")
    assert random_action(Observation("", ""), rng) in ("<search>look</search>", "<answer>look</answer>")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def config(model):
    """A run whose checkpoints hold more than the weights that play: a moving average for the teacher."""
    config = tiny_config(model, "sdar", steps=1)
    return dataclasses.replace(
        config,
        teacher=dataclasses.replace(config.teacher, weights="ema"),
        eval=dataclasses.replace(config.eval, panel="valid:2", final_seeds=0),
    )


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run"
    run(config, path)
    return path


def test_a_model_plays(config):
    chosen = play.find_settings(config, None, None)
    records, shown = started(settings=chosen, agent="checkpoint")
    assert records[0].status == "truncated" and records[0].turns == config.env.turns
    assert f"model: {config.model.path}" in shown.replace("\n", "") and "turn 3" in shown
    assert (records, shown) == started(settings=chosen, agent="checkpoint")
    assert len(started(settings=chosen, agent="checkpoint", episodes=2)[0]) == 2


@pytest.mark.slow
def test_the_newest_checkpoint_of_a_run_plays(config, trained):
    def listing():
        return sorted((str(p), p.stat().st_mtime_ns) for p in trained.rglob("*") if p.is_file())

    before = listing()
    chosen = play.find_settings(None, None, trained)  # the run's own config
    records, shown = started(settings=chosen, workdir=trained, agent="checkpoint")
    assert "after 1 updates" in shown and records[0].turns == 3
    assert listing() == before  # the run may be going on
    session, origin = open_newest(config, trained)
    saved = Checkpoints(trained / "checkpoints", keep=2, asynchronous=False)
    assert saved.steps() == [0, 1] and origin.endswith("(after 1 updates)")
    saved.close()
    assert session.engine.health()["weight_version"] == 1
    session.close()


@pytest.mark.slow
def test_the_weights_are_those_of_the_checkpoint(config, trained, monkeypatch):
    """What the engine gets differs from ``model.path`` and equals the state that was saved last."""
    from sdjax.rollout.embedded import EmbeddedEngine

    given_to_engine = []
    update = EmbeddedEngine.update_weights
    monkeypatch.setattr(
        EmbeddedEngine,
        "update_weights",
        lambda self, params, version: (given_to_engine.append((params, version)), update(self, params, version))[1],
    )
    session, _ = open_newest(config, trained)
    session.close()
    ((last, version),) = given_to_engine
    assert version == 1
    leaves = list(zip(jax.tree.leaves(session.params), jax.tree.leaves(last)))
    assert any(not np.array_equal(a, b) for a, b in leaves) and all(a.shape == b.shape for a, b in leaves)


def test_a_finished_warm_start_plays_its_model(config, model, tmp_path):
    (tmp_path / "model").symlink_to(model)
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, path="/nowhere"))
    session, origin = open_newest(other, tmp_path)
    session.close()
    assert origin == str(tmp_path / "model")
