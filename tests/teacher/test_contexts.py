"""Every task of ScienceWorld, WebShop and Search-QA gets a privileged text: what the teacher's counters say of it."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from sdjax.envs import EnvConfig, make_benchmark
from sdjax.envs.scienceworld.store import Tasks
from sdjax.envs.searchqa.config import SearchqaConfig
from sdjax.envs.searchqa.questions import SOURCES
from sdjax.envs.searchqa.store import open_store
from sdjax.envs.webshop.config import WebshopConfig
from sdjax.errors import ConfigError
from sdjax.teacher import SkillBank, TeacherCounters, TeacherPrompt
from tests.teacher.toy_tokenizer import WordTokenizer

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
NOUNS = "golden/title_nouns_en_core_web_sm_3.8.0.jsonl.gz"


def contexts(bank_name: str, tasks: Iterable[dict[str, Any]]) -> tuple[dict[str, float], Counter]:
    """The counters' numbers over tasks with these fields, and how many tasks have which families."""
    bank, tokenizer = SkillBank.load(bank_name), WordTokenizer()
    prompt, counters, families = TeacherPrompt(tokenizer, budget=6000), TeacherCounters(), Counter()
    student = tokenizer.render_chat("What next?")
    for fields in tasks:
        route = bank.route(fields)
        text, general_only = bank.text(route)
        counters.add(prompt.ids(text, student), general_only=general_only, name=str(fields))
        families[route] += 1
    return counters.metrics(), families


def fields_of(benchmark, *splits: str) -> list[dict[str, Any]]:
    return [benchmark.fields(task_id) for split in splits for task_id in benchmark.task_ids(split)]


def all_found(metrics: dict[str, float]) -> bool:
    return metrics["teacher/context_frac"] == 1.0 and metrics["teacher/lost_tokens_max"] == 0


def test_every_scienceworld_task_has_its_family():
    names = Tasks().names
    metrics, families = contexts("scienceworld", ({"task_name": name} for name in names))
    assert len(names) == 30 and all_found(metrics) and metrics["teacher/general_only_frac"] == 0
    assert set(families) == {(family,) for family in SkillBank.load("scienceworld").families}


@pytest.mark.scienceworld
def test_scienceworld_reports_the_name_that_routes():
    try:
        benchmark = make_benchmark(EnvConfig(name="scienceworld"))
    except ConfigError as error:
        pytest.skip(f"the simulator is not here: {error}")
    tasks = fields_of(benchmark, "train", "dev", "test")
    benchmark.close()
    metrics, families = contexts("scienceworld", tasks)
    assert len(tasks) == 7207 and all_found(metrics) and metrics["teacher/general_only_frac"] == 0
    assert len(families) == 10


def test_every_goal_of_the_generated_catalogue_has_a_family():
    benchmark = make_benchmark(EnvConfig(name="webshop"))
    tasks = fields_of(benchmark, "train", "valid", "test")
    metrics, families = contexts("webshop", tasks)
    assert len(tasks) == len(benchmark.shop.goals) > 5000  # type: ignore[attr-defined]
    assert all_found(metrics) and metrics["teacher/general_only_frac"] == 0
    assert {name for route in families for name in route} >= {"apparel", "footwear", "home_decor", "electronics"}


@pytest.mark.shared
@pytest.mark.parametrize(("goals", "general_only"), [("synthetic", 0.005), ("human", 0.0)])
def test_goals_of_the_published_products(goals, general_only):
    """The general part is a context too, but it should be rare."""
    folder = SHARED / "webshop"
    if not (folder / NOUNS).is_file():
        pytest.skip("the published products are not here")
    settings = WebshopConfig(goals=goals, nouns=str(folder / NOUNS), split="verl_agent")
    benchmark = make_benchmark(EnvConfig(name="webshop", data=str(folder), webshop=settings))
    metrics, _ = contexts("webshop", (benchmark.fields(goal) for goal in benchmark.shop.goals))  # type: ignore[attr-defined]
    assert all_found(metrics) and metrics["teacher/general_only_frac"] <= general_only


def test_every_source_of_the_generated_questions_has_a_family():
    benchmark = make_benchmark(EnvConfig(name="searchqa", turns=4))
    tasks = fields_of(benchmark, "train", "eval")
    benchmark.close()
    assert {task["data_source"] for task in tasks} == set(SOURCES)
    metrics, families = contexts("searchqa", tasks)
    assert all_found(metrics) and metrics["teacher/general_only_frac"] == 0
    assert set(families) == {(family,) for family in SkillBank.load("searchqa").families}


@pytest.mark.shared
def test_the_published_questions():
    folder = SHARED / "searchqa"
    if not (folder / "eval_3125.jsonl.gz").is_file():
        pytest.skip("the published questions are not here")
    questions = open_store(str(folder), SearchqaConfig()).questions.values()
    tasks = [{"data_source": question.source, "question": question.question} for question in questions]
    assert {task["data_source"] for task in tasks} == set(SOURCES) and len(tasks) >= 3125
    metrics, _ = contexts("searchqa", tasks)
    assert all_found(metrics) and metrics["teacher/general_only_frac"] == 0
