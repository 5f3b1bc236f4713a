"""The environment protocol on WebShop: rewards, status, replay, snapshots, privileged facts, panels, prompts."""

import asyncio
import random

import pytest
from webshop_shops import write_files  # type: ignore[import-not-found]

from sdjax.envs import EnvConfig, make_benchmark
from sdjax.envs.base import Status
from sdjax.envs.prompts import PromptTemplate, load_protocol, project
from sdjax.envs.webshop import adapter
from sdjax.envs.webshop.adapter import WebshopBenchmark
from sdjax.envs.webshop.config import WebshopConfig
from sdjax.envs.webshop.nouns import NounTable, write_nouns
from sdjax.errors import ConfigError, DataError, EnvError
from sdjax.teacher.routing import route


def run(coroutine):
    return asyncio.run(coroutine)


def made_with(**settings) -> WebshopBenchmark:
    return WebshopBenchmark(EnvConfig(name="webshop", webshop=WebshopConfig(generator_products=120, **settings)))


@pytest.fixture(scope="module")
def fixed():
    """A shop where every goal can be won."""
    return made_with(reward="fixed")


def test_only_a_perfect_purchase_is_rewarded(fixed):
    async def play(task_id, spoil):
        environment = fixed.make()
        await environment.reset(task_id, seed=0)
        plan = environment.privileged("plan")
        if spoil:
            plan = [action for action in plan if action.startswith(("search", "click[b0", "click[buy"))]
        assert environment.privileged("reward_parts") is None
        results = [await environment.step(action) for action in plan]
        assert environment.privileged("reward_parts")["r_att"] == 1.0
        with pytest.raises(EnvError, match="finished"):
            await environment.step("click[back to search]")
        return results

    with_options = [task_id for task_id in fixed.task_ids("train") if fixed.shop.goals[task_id].options][:10]
    for task_id in with_options:
        won, lost = run(play(task_id, False)), run(play(task_id, True))
        assert [result.reward for result in won] == [0.0] * (len(won) - 1) + [10.0]
        assert (won[-1].status, won[-1].score) == (Status.SUCCESS, 1.0)
        assert won[-1].info["termination"] == "bought" and won[-1].info["reward_rule"] == "fixed"
        assert (lost[-1].status, lost[-1].reward) == (Status.FAILED, 0.0) and 0 < lost[-1].score < 1
        assert all(result.info == {"admissible": True} for result in won[:-1])
        assert all((result.status, result.score) == (Status.RUNNING, 0.0) for result in won[:-1])


HOSTILE = ["", "\x00\x1b[2J", "{action}", "__import__('os')", "<action>look</action>", "[" * 1_000_000, "click[]", "看"]


def test_hostile_actions_are_plain_text(small):
    async def play():
        environment = small.make()
        first = await environment.reset(small.task_ids("train")[0], seed=0)
        key = environment.state_key()
        for action in HOSTILE:
            result = await environment.step(action)
            assert result.observation == first and result.info == {"admissible": False}
            assert result.status == Status.RUNNING
        assert environment.state_key() == key

    run(play())


def test_before_reset_everything_is_an_env_error(small):
    environment = small.make()
    with pytest.raises(EnvError, match="reset"):
        run(environment.step("search[x]"))
    for method in (environment.state_key, environment.snapshot, lambda: environment.privileged("plan")):
        with pytest.raises(EnvError, match="reset"):
            method()
    with pytest.raises(DataError, match="no goal 'nothing'"):
        run(environment.reset("nothing", 0))


async def random_play(benchmark, task_id, seed, turns=12):
    rng = random.Random(seed)
    environment = benchmark.make()
    seen, actions = [await environment.reset(task_id, seed)], []
    while len(actions) < turns:
        await asyncio.sleep(0)
        action = rng.choice(seen[-1].admissible).replace("<your query>", " ".join(rng.sample(seen[-1].task.split(), 3)))
        result = await environment.step("fly" if rng.random() < 0.1 else action)
        actions.append(action)
        seen.append(result.observation)
        if result.status != Status.RUNNING:
            break
    return environment, seen, actions


@pytest.mark.parametrize("mode", ["quoted", "text_rich"])
def test_restore_replays_every_observation(mode):
    benchmark = made_with(observation=mode)

    async def play():
        for number, task_id in enumerate(benchmark.task_ids("train")[:8]):
            _, _, actions = await random_play(benchmark, task_id, number)
            other, third = benchmark.make(), benchmark.make()
            seen = await other.restore(task_id, 0, actions)
            assert await third.restore(task_id, 1, actions) == seen
            assert third.state_key() == other.state_key()

    run(play())


def test_snapshot_survives_play_and_serves_many(fixed):
    async def play():
        task_id = fixed.task_ids("train")[1]
        environment = fixed.make()
        await environment.reset(task_id, seed=0)
        await environment.step(environment.privileged("plan")[0])
        snapshot, key, plan = environment.snapshot(), environment.state_key(), environment.privileged("plan")
        for action in plan:
            result = await environment.step(action)
        assert result.status == Status.SUCCESS
        for _ in range(2):
            other = fixed.make()
            assert other.resume(snapshot).admissible and other.state_key() == key
            for action in plan:
                result = await other.step(action)
            assert result.status == Status.SUCCESS
        await environment.close()
        with pytest.raises(EnvError):
            environment.snapshot()

    run(play())


def test_concurrent_episodes_do_not_leak(small):
    async def play(job):
        return (await random_play(small, *job))[1]

    async def together(jobs):
        return await asyncio.gather(*(play(job) for job in jobs))

    jobs = [(task_id, seed) for task_id in small.task_ids("train")[:5] for seed in range(4)]
    assert run(together(jobs)) == [run(play(job)) for job in jobs]


def test_privileged_facts(fixed):
    async def play():
        for task_id in fixed.task_ids("train")[:25]:
            environment = fixed.make()
            first = await environment.reset(task_id, seed=0)
            goal, target = environment.privileged("goal"), environment.privileged("target")
            assert target["asin"] in task_id and target["title"] not in first.text + first.task
            assert target["asin"].lower() not in str(first).lower()
            assert list(target["options"].values()) and set(target["options"].values()) == set(goal["options"])
            assert all(goal["pages"][name] for name in goal["attributes"])
            assert environment.privileged("task_family") == fixed.family(task_id)
            with pytest.raises(EnvError, match="target, goal"):
                environment.privileged("thoughts")

    tasks = [task_id for task_id in fixed.task_ids("train") if fixed.shop.goals[task_id].options]
    assert len(tasks) > 25
    run(play())


def test_the_target_is_only_seen_where_the_shop_shows_it(small):
    """No page names the target, its attributes or the reward unless it is listed or open there."""

    async def play():
        pages = 0
        for number, task_id in enumerate(small.task_ids("train")[:60]):
            environment, seen, _ = await random_play(small, task_id, number)
            asin = environment.privileged("target")["asin"]
            for observation in seen:
                pages += 1
                if observation.text.startswith("Thank you"):
                    continue
                listed = f"click[{asin.lower()}]" in observation.admissible
                assert (asin in observation.text) == listed
                assert "r_type" not in observation.text and "score" not in observation.text
        return pages

    assert run(play()) > 400


def test_experts_of_the_benchmark(fixed):
    assert fixed.experts == ("oracle", "rule")
    task_id = fixed.task_ids("train")[0]
    turns = run(fixed.expert_episode(task_id, fixed.experts[0], 0, 15))
    assert turns[0].observation.admissible == ("search[<your query>]", "click[search]")
    assert turns[-1].action == "click[buy now]"
    with pytest.raises(DataError, match="no goal"):
        run(fixed.expert_episode("nothing", "oracle", 0, 15))


def test_splits_and_panels(benchmark):
    panel = benchmark.panel("eval")
    assert len(set(panel.task_ids)) == 128 and set(panel.task_ids) <= set(benchmark.task_ids("test"))
    assert panel.task_ids[0].startswith("generated/B0") and "#" in panel.task_ids[0]
    some = benchmark.panel("eval:16")
    assert set(some.task_ids) < set(panel.task_ids) and len(some.task_ids) == 16
    assert benchmark.panel("test").task_ids == benchmark.task_ids("test")
    assert len(benchmark.panel("valid:20").task_ids) == 20
    for wrong in ("dev", "eval:0", "eval:200"):
        with pytest.raises(DataError):
            benchmark.panel(wrong)
    asins = {split: {task_id.split("#")[0] for task_id in benchmark.task_ids(split)} for split in ("train", "test")}
    assert not asins["train"] & asins["test"]
    assert benchmark.provenance()["goal_counts"]["train"] == len(benchmark.task_ids("train"))


def test_a_changed_evaluation_set_is_noticed(benchmark, monkeypatch):
    monkeypatch.setattr(adapter, "_stored_panels", lambda: {"eval": "0" * 64})
    with pytest.raises(DataError, match="expected 0000000000000000"):
        benchmark.panel("eval")


def test_other_settings_are_other_panels():
    hashes = {
        made_with(**settings).panel("test").sha256
        for settings in ({}, {"seed": 1}, {"split_seed": 1}, {"generator_seed": 1})
    }
    assert len(hashes) == 4
    assert made_with(reward="fixed").panel("test") == made_with().panel("test")


def test_small_catalogues_say_what_they_lack(tmp_path):
    write_files(tmp_path, size="_few")
    table = dict.fromkeys(("B000000001", "B000000002", "B000000003"), ("hat",))
    write_nouns(NounTable("hand", table), tmp_path / "title_nouns.jsonl.gz")
    human = WebshopBenchmark(EnvConfig(name="webshop", data=str(tmp_path), webshop=WebshopConfig(goals="human")))
    split = next(name for name, count in human.provenance()["goal_counts"].items() if count)
    empty = next(name for name, count in human.provenance()["goal_counts"].items() if not count)
    assert human.task_ids(split) == ("items_shuffle_few/B000000001#h0",)
    with pytest.raises(DataError, match=f"'{empty}' of items_shuffle_few has no goals"):
        human.task_ids(empty)
    with pytest.raises(DataError, match=r"no goals|has 1"):
        human.panel("eval")


@pytest.mark.parametrize("key", ["goals", "split", "reward", "observation", "search"])
def test_wrong_settings(key):
    with pytest.raises(ConfigError, match=rf"env\.webshop\.{key} = 'x'"):
        made_with(**{key: "x"})


def test_make_benchmark_reads_the_config(tmp_path):
    made = make_benchmark(EnvConfig(name="webshop", webshop=WebshopConfig(generator_products=30, split="verl_agent")))
    assert made.name == "webshop" and made.provenance()["split"] == "verl_agent" and len(made.task_ids("test")) > 0
    with pytest.raises(ConfigError, match=r"env\.engine"):
        make_benchmark(EnvConfig(name="webshop", engine="textworld"))
    with pytest.raises(DataError, match="does not exist"):
        make_benchmark(EnvConfig(name="webshop", data=str(tmp_path / "nowhere")))


def test_skills_are_routed_for_every_goal(benchmark):
    families = {route("webshop", benchmark.fields(task_id)) for task_id in benchmark.shop.goals}
    assert {"apparel", "footwear", "electronics", "home_decor", "beauty_health"} <= {
        name for found in families for name in found
    }
    assert {benchmark.family(task_id) for task_id in benchmark.shop.goals} == {
        "fashion",
        "electronics",
        "garden",
        "beauty",
        "grocery",
    }


def test_the_prompt_of_the_lineage(small):
    template = PromptTemplate.load("webshop", "verl_agent")
    protocol = load_protocol("webshop")
    assert (protocol.turn_limit, protocol.history, protocol.reward_success, protocol.graded) == (15, 2, 10.0, False)

    async def play():
        environment = small.make()
        first = await environment.reset(small.task_ids("train")[0], seed=0)
        text = template.render(first.task, first.text, first.admissible, [], 0)
        assert text.startswith(
            "\nYou are an expert autonomous agent operating in the WebShop e‑commerce environment. \nYour"
        )
        assert f"Your task is to: {first.task}.\nYour current observation is: 'Search'.\n" in text
        assert "\n[\n'search[<your query>]',\n'click[search]',\n].\n" in text
        query = f"search[{first.task.split()[2]} shoes]"
        second = (await environment.step(query)).observation
        text = template.render(second.task, second.text, second.admissible, [(first.text, query)], 1)
        item = f"[Observation 1: ''Search'', Action 1: '{query}']\nYou are now at step 2"
        assert (
            f"the corresponding actions you took: {item} and your current observation is: 'Back to Search' [SEP]"
            in text
        )
        long = template.render("t", "x" * 9000, ("click[a]",), [("y" * 9000, "click[b]")], 1)
        assert "Prior to this step" not in long and "x" * 9000 in long

    run(play())
    answer = template.answer("I look.", "search[red shoes]")
    assert project(answer, template).action == "search[red shoes]" and project(answer, template).valid
    assert project("buy it now please thank you", template).action == "now please thank you"


def test_the_compact_prompt_has_no_buttons_in_the_page(fixed):
    template = PromptTemplate.load("webshop", "compact")

    async def play():
        environment = fixed.make()
        observation, history = await environment.reset(fixed.task_ids("train")[0], seed=0), []
        for action in environment.privileged("plan"):
            text = template.render(observation.task, observation.text, observation.admissible, history, len(history))
            page = text.split("\nActions: ")[0]
            assert not any(button in page for button in ("Search'", "< Prev", "Next >", "Buy Now", "Rating"))
            assert "click[search]" not in text and text.startswith(f"Goal: {observation.task}\n")
            history.append((observation.text, action))
            observation = (await environment.step(action)).observation

    run(play())
