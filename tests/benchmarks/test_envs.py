"""The environment benchmark: what it counts, and that both sides of a comparison play the same episodes."""

import asyncio
import io
import subprocess
import sys
import time

import pytest
from rich.console import Console

from benchmarks import envs


class Recorder:
    """Notes what is played. A reset burns a known CPU time."""

    most_open = 4

    def __init__(self, reset_s: float = 0.0):
        self.resets, self.steps, self.opened, self.reset_s = [], [], 0, reset_s

    def open(self):
        self.opened += 1

        async def reset(task: str) -> None:
            self.resets.append(task)
            end = time.process_time() + self.reset_s
            while time.process_time() < end:
                pass

        async def step(action: str) -> None:
            self.steps.append(action)

        return reset, step

    def close(self) -> None:
        pass


EPISODES = [envs.Episode(f"task {i}", tuple(f"{i}/{k}" for k in range(10))) for i in range(12)]


def test_every_step_is_played_and_counted():
    player = Recorder()
    found = asyncio.run(envs.measure(player, EPISODES, 35))
    assert found["steps"] == 40  # whole episodes
    memory = [action for episode in EPISODES[6:10] for action in episode.actions[: envs._MEMORY_STEPS]]
    timed = [action for episode in EPISODES[:4] for action in episode.actions]
    assert player.steps == [*memory, *EPISODES[6].actions, *timed]  # in the middle the warm-up
    numbers = [5, 6, 7, 8, 9, 6, 0, 1, 2, 3, 0, 1, 2, 3]  # what is timed was not played before
    assert player.resets == [f"task {number}" for number in numbers]
    assert player.opened == 1 + 4 and found["open_episodes"] == 4
    assert found["memory_128_mb"] < 128 * 100 / 4


def test_more_steps_than_episodes_go_round_again():
    found = asyncio.run(envs.measure(Recorder(), EPISODES, 100))
    assert found["steps"] == 100


def test_reset_times_are_apart_from_steps():
    found = asyncio.run(envs.measure(Recorder(reset_s=0.01), EPISODES, 20))
    assert found["first_reset_ms"] >= 10 and found["reset_ms"] >= 10
    assert found["steps_per_cpu_s"] > found["steps_per_wall_s"]


def test_cpu_and_memory_include_child_processes():
    hog = "import time; x = bytearray(80_000_000); x[::4096] = b'1' * len(x[::4096])\nprint(1, flush=True); input()\n"
    spin = "end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nprint(2, flush=True); input()"
    before = envs.memory_mb()
    with subprocess.Popen([sys.executable, "-c", hog + spin], stdin=-1, stdout=-1, text=True) as child:
        assert child.pid in envs.processes()
        clock = envs.CpuClock()
        child.stdout.readline()
        assert envs.memory_mb() - before > 80
        start = clock.now()
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        assert clock.now() - start >= 0.28  # counted in steps of 10 ms
        child.communicate("\n")
    assert child.pid not in envs.processes()


@pytest.mark.parametrize("name", ["alfworld", "searchqa"])
def test_the_adapter_plays_the_drawn_episodes(name):
    episodes = envs.draw_episodes(name)
    assert len(episodes) == 2 * envs.OPEN == len({episode.task for episode in episodes})
    assert all(episode.actions for episode in episodes)
    player = envs.make_player(name, "adapter")
    found = asyncio.run(envs.measure(player, episodes, 60))
    player.close()
    assert found["open_episodes"] == envs.OPEN and 60 <= found["steps"] < 60 + envs.env_config(name).turns
    assert all(value >= 0 for key, value in found.items() if key != "memory_128_mb")


def test_table_names_ratios_and_what_was_not_measured():
    side = {"first_reset_ms": 2.0, "reset_ms": 1.0, "steps_per_cpu_s": 50.0, "memory_128_mb": 10.0, "open_episodes": 16}
    fast = {**side, "first_reset_ms": 1.0, "steps_per_cpu_s": 200.0, "memory_128_mb": 5.0, "open_episodes": 128}
    results = {"alfworld": {"adapter": fast, "original": side} | envs._ratios({"adapter": fast, "original": side})}
    assert results["alfworld"] | {"adapter": 0, "original": 0} == {
        "adapter": 0,
        "original": 0,
        "ratio_steps": 4.0,
        "ratio_reset": 2.0,
        "ratio_memory": 2.0,
    }
    assert envs._ratios({"adapter": fast}) == {}
    console = Console(file=io.StringIO(), width=120)
    envs.show(results, {"webshop original": "no [package]"}, console)
    shown = console.file.getvalue()
    assert "10 (from 16)" in shown and "4.0 x" in shown and "webshop original: not measured (no [package])" in shown
