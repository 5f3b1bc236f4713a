"""Log-probabilities of real servers against the trainer's, before and after large changes of the weights."""

import asyncio

import numpy as np
import pytest

from sdjax.envs import make_benchmark
from sdjax.envs.prompts import PromptTemplate
from sdjax.errors import CompletionLost, EngineError
from sdjax.rollout.engine import Completion, Request, SamplingParams
from sdjax.rollout.episodes import Assignment, Player, play_all
from sdjax.rollout.sglang_http import Server
from sdjax.rollout.sglang_sync import DiskTransfer, checksums, push
from tests.sglang.scoring import Served, moved, random_prompts

MEAN_GAP, FAR = 0.02, 0.05  # nats; bfloat16 in the server, float32 here


@pytest.fixture
def serve(checkpoints, urls, tmp_path):
    opened = []

    def open_one(name, sync="disk", **sglang):
        opened.append(Served(checkpoints[name], urls(name), sync, tmp_path, **sglang))
        return opened[-1]

    yield open_one
    for served in opened:
        served.engine.close()


@pytest.mark.parametrize(
    ("name", "sync"),
    [("qwen3", "disk"), ("qwen3", "tensor"), ("qwen3", "gloo"), ("qwen3_5", "disk"), ("qwen3_5", "tensor"),
     ("llama", "disk")],
)  # fmt: skip
def test_new_weights_give_their_own_logps_on_the_same_prompts(serve, name, sync):
    served, prompts = serve(name, sync), random_prompts(6)
    before = served.ask(prompts)
    assert served.gap(served.params, prompts, before).mean() < MEAN_GAP
    assert all(served.tokenizer.sampling_mask_V[done.tokens].all() for done in before)
    params = served.params
    for version in (1, 2):
        params = moved(params, version)
        served.engine.update_weights(params, version)
        after = served.ask(prompts)
        assert {done.weight_version for done in after} == {version}
        assert served.gap(params, prompts, after).mean() < MEAN_GAP
        assert served.gap(served.params, prompts, after).mean() > FAR
    greedy = served.ask(prompts, temperature=0.0)
    assert served.gap(params, prompts, greedy).mean() < MEAN_GAP


def test_what_sdjax_exports_and_what_it_sends_are_the_same_weights(serve, tmp_path):
    """The first sync by tensors compares checksums; here both ways carry weights that the server never loaded."""
    served = serve("qwen3_5", "tensor")
    server = served.engine.servers[0]
    params = moved(served.params, 5)
    served.engine.update_weights(params, 1)
    sent = checksums(server)
    disk = DiskTransfer(served.model, "bfloat16", tmp_path)
    push(disk, params, "from disk", [server])
    disk.close()
    assert sent is not None and sent == checksums(server)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_episodes_of_several_turns(serve, name):
    served = serve(name)
    config = served.config
    benchmark = make_benchmark(config.env)
    player = Player(
        benchmark, served.engine, PromptTemplate.load("alfworld", "compact", 1), served.tokenizer, 0, turns=4,
        prompt_tokens=config.rollout.prompt_tokens, retries=1, overlong="cut_left",
    )  # fmt: skip
    tasks = benchmark.task_ids("train")[:2]
    assignments = [Assignment(task, g, 4 * g + k, k, "train", 1) for g, task in enumerate(tasks) for k in range(4)]
    episodes = play_all(player, assignments, SamplingParams(1.0, 12))
    benchmark.close()
    turns = [turn for episode in episodes for turn in episode.turns]
    assert all(episode.error is None and len(episode.turns) == 4 for episode in episodes)
    prompts, done = [turn.prompt.tolist() for turn in turns], [_completion(turn) for turn in turns]
    assert served.gap(served.params, prompts, done).mean() < MEAN_GAP
    stats = served.engine.stats
    assert stats.extra["lost"] == 0
    if name == "qwen3":  # samples of a group share their first prompt; the recurrent model caches longer pieces only
        assert stats.prefill_tokens < stats.prompt_tokens


def _completion(turn):
    return Completion(turn.response, turn.engine_logps, turn.finish, turn.weight_version)


def test_the_weights_of_somebody_else_are_seen_and_replaced(serve):
    served, prompts = serve("qwen3"), random_prompts(2)
    server = Server(served.engine.servers[0].url)
    server.post("/update_weight_version", {"new_version": "theirs", "abort_all_requests": False})
    with pytest.raises(CompletionLost, match="drew with weights theirs"):
        served.ask(prompts)
    assert served.gap(served.params, prompts, served.ask(prompts)).mean() < MEAN_GAP
    assert served.engine.stats.extra["wrong_version"] >= 1
    server.close()


def test_an_id_outside_the_vocabulary_never_reaches_the_server(serve):
    served = serve("qwen3")
    for token in (512, -1):
        with pytest.raises(EngineError, match=f"token id {token}"):
            asyncio.run(served.engine.generate(Request(np.array([5, token]), 1, SamplingParams(1.0, 4))))
    assert len(served.ask(random_prompts(1))[0].tokens)


def test_another_model_behind_the_address(checkpoints, urls, tmp_path):
    with pytest.raises(EngineError, match="serves a qwen3 model"):
        Served(checkpoints["llama"], urls("qwen3"), "disk", tmp_path)
