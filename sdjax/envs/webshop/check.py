"""What a catalogue is and how hard it is: counts, the ceiling of the success rate, the rule agent, speed.

    python -m sdjax.envs.webshop.check [--data=PATH] [--nouns=FILE] [--goals=human] [--split=verl_agent] [--seed=42]

The ceiling is the share of goals that score 1.0 when the target is bought with exactly the goal's options. In the
reward ``compat`` it is below 100 %; compare success rates with it, not with 100 %.
"""

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sdjax.envs.config import EnvConfig
from sdjax.envs.webshop.adapter import EVAL_PANEL, WebshopBenchmark
from sdjax.envs.webshop.config import WebshopConfig
from sdjax.envs.webshop.expert import plan, rule_purchase, wanted_choices
from sdjax.envs.webshop.goals import Goal
from sdjax.envs.webshop.reward import RULES
from sdjax.envs.webshop.shop import CHOICES, Shop
from sdjax.envs.webshop.simulator import Episode, observe
from sdjax.errors import DataError, SdjaxError

_SPEED_SECONDS = 2.0
_RULE_GOALS = 1000


@dataclass(frozen=True)
class Difficulty:
    """Shares in [0, 1]. ceiling: by reward rule. rule_score, rule_success: of the rule agent. first_page, found: goals
    whose target is among the first 10 or 50 hits for the instruction. plan_turns: mean turns of the oracle."""

    ceiling: dict[str, float]
    rule_score: float
    rule_success: float
    first_page: float
    found: float
    plan_turns: float


def ceiling(shop: Shop, goals: Sequence[Goal], rule: str) -> float:
    """Share of ``goals`` that score 1.0 for the target with exactly the goal's options, in the reward ``rule``."""
    shop = replace(shop, reward_rule=rule)
    wins = 0
    for goal in goals:
        chosen = dict(wanted_choices(shop.products[goal.asin], goal))
        wins += shop.purchase(goal, goal.asin, chosen).score == 1.0
    return wins / len(goals)


def measure(shop: Shop, goals: Sequence[Goal]) -> Difficulty:
    """Measures ``goals``; the rule agent and the searches on the first 1,000 of them."""
    some = goals[:_RULE_GOALS]
    purchases = [rule_purchase(shop, goal) for goal in some]
    scores = [0.0 if purchase is None else purchase.score for purchase in purchases]
    hits = [shop.find(goal.text.lower()) for goal in some]
    plans = [plan(Episode(shop, goal)) for goal in some]
    lengths = [len(commands) for commands in plans if commands is not None]
    return Difficulty(
        ceiling={rule: ceiling(shop, goals, rule) for rule in RULES},
        rule_score=sum(scores) / len(some),
        rule_success=sum(score == 1.0 for score in scores) / len(some),
        first_page=sum(goal.asin in found[:10] for goal, found in zip(some, hits)) / len(some),
        found=sum(goal.asin in found for goal, found in zip(some, hits)) / len(some),
        plan_turns=sum(lengths) / max(1, len(lengths)),
    )


def steps_per_second(shop: Shop, goals: Sequence[Goal], mode: str, seconds: float = _SPEED_SECONDS) -> float:
    """Random play with observations, one process."""
    rng = random.Random(0)
    steps, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        episode = Episode(shop, rng.choice(goals))
        for _ in range(15):
            seen = observe(episode, mode)
            words = rng.sample(seen.task.split(), min(4, len(seen.task.split())))
            action = f"search[{' '.join(words)}]" if episode.has_search_bar() else rng.choice(seen.admissible)
            episode.step(action)
            steps += 1
            if episode.page == "done":
                break
    return steps / elapsed


def report(config: EnvConfig) -> list[str]:
    """The lines that the command prints."""
    start = time.perf_counter()
    benchmark = WebshopBenchmark(config)
    opened = time.perf_counter() - start
    shop, facts = benchmark.shop, benchmark.provenance()
    lines = [
        f"catalogue   {facts['catalogue']}: {facts['products']} products, sha256 {facts['catalogue_sha256'][:16]}",
        f"nouns       {facts['nouns_by']}",
        f"search      {facts['search']}",
        f"goals       {len(shop.goals)} {facts['goals']}, seed {facts['seed']}, reward {facts['reward']}",
        f"split       {facts['split']}: "
        + ", ".join(f"{name} {count}" for name, count in facts["goal_counts"].items()),
    ]
    if facts["split"] == "verl_agent":
        lines.append("            the index rule does not separate products: scores on test are not on unseen products")
    sets = {"all goals": tuple(shop.goals.values())}
    try:
        panel = benchmark.panel(EVAL_PANEL)
        sets[EVAL_PANEL] = tuple(shop.goals[task_id] for task_id in panel.task_ids)
        lines.append(f"eval        {len(panel.task_ids)} goals, sha256 {panel.sha256[:16]}")
    except DataError as error:
        lines.append(f"eval        none: {error.found}")
    for name, goals in sets.items():
        found = measure(shop, goals)
        ceilings = ", ".join(f"{rule} {share:.1%}" for rule, share in found.ceiling.items())
        lines += [
            f"{name} ({len(goals)})",
            f"  success ceiling   {ceilings}",
            f"  rule agent        score {found.rule_score:.3f}, success {found.rule_success:.1%}",
            f"  target found      in the first 10 hits {found.first_page:.1%}, first 50 {found.found:.1%}",
            f"  oracle            {found.plan_turns:.1f} turns",
        ]
    speed = steps_per_second(shop, sets["all goals"], facts["observation"])
    lines.append(f"speed       opened in {opened:.1f} s; {speed:,.0f} steps/s in one process")
    return lines


def main(arguments: list[str] | None = None) -> None:
    defaults = WebshopConfig()
    parser = argparse.ArgumentParser(prog="python -m sdjax.envs.webshop.check", description="Describes a catalogue.")
    parser.add_argument("--data", default="generated", help='"generated" or the path of a catalogue')
    parser.add_argument("--nouns", default=defaults.nouns, help="table of nouns, if not beside the catalogue")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of prices and goals")
    for key, allowed in CHOICES.items():
        parser.add_argument(f"--{key}", default=getattr(defaults, key), choices=allowed)
    options = vars(parser.parse_args(arguments))
    data = options.pop("data")
    try:
        print("\n".join(report(EnvConfig(name="webshop", data=data, webshop=replace(defaults, **options)))))
    except SdjaxError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
