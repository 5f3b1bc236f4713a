"""The phases of a step add up to its wall time, and totals survive a restart."""

import time

import jax
import jax.numpy as jnp
import pytest

from sdjax.train.ledger import NET, PHASES, Ledger


@pytest.fixture
def ledger():
    made = Ledger(devices=8, attempt=2, totals={"rollout": 5.0})
    yield made
    made.close()


def test_parts_add_up_to_wall_time(ledger):
    ledger.begin()
    ledger.close_step(0)
    start = time.perf_counter()
    with ledger.phase("rollout"):
        time.sleep(0.05)
        with ledger.phase("sync"):
            time.sleep(0.03)
    time.sleep(0.02)
    with ledger.phase("update"):
        time.sleep(0.04)
    seconds, lines = ledger.close_step(1)
    wall = time.perf_counter() - start
    assert sum(seconds.values()) == pytest.approx(wall, rel=0.01)
    assert seconds["rollout"] >= 0.05 and seconds["sync"] >= 0.03 and seconds["other"] >= 0.02
    by_phase = dict.fromkeys(PHASES, 0.0)
    for line in lines:
        assert line["step"] == 1 and line["attempt"] == 2 and line["devices"] == 8
        by_phase[line["phase"]] += line["seconds"]
    assert sum(by_phase.values()) == pytest.approx(wall, rel=0.01)


def test_compilation_is_taken_out_of_its_phase(ledger):
    ledger.begin()
    start = time.perf_counter()
    with ledger.phase("update"):
        jax.jit(lambda x: jnp.tanh(x @ x) * 1.2345)(jnp.ones((31, 31))).block_until_ready()
    seconds, lines = ledger.close_step(1)
    assert seconds["compile"] > 0
    assert sum(seconds.values()) == pytest.approx(time.perf_counter() - start, rel=0.05)
    assert "compile" not in NET and any(line["phase"] == "compile" for line in lines)


def test_totals_start_from_the_checkpoint_and_include_the_open_step(ledger):
    ledger.begin()
    with ledger.phase("rollout"):
        time.sleep(0.02)
    inside = ledger.running_totals()
    assert inside["rollout"] >= 5.02 and ledger.totals["rollout"] == 5.0
    ledger.close_step(1)
    assert ledger.totals["rollout"] == pytest.approx(inside["rollout"])
    assert ledger.net_seconds() >= 5.02


def test_a_failing_block_is_still_charged(ledger):
    ledger.begin()
    with pytest.raises(ValueError), ledger.phase("save"):
        time.sleep(0.01)
        raise ValueError
    seconds, _ = ledger.close_step(1)
    assert seconds["save"] >= 0.01
