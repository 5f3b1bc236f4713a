"""What the client relies on, asked of a real server: a new SGLang release that breaks one of these is seen here."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sdjax.errors import EngineError
from sdjax.rollout import sglang_process, sglang_sync
from sdjax.rollout.sglang_http import Server

PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def server(urls):
    opened = Server(urls("qwen3"))
    yield opened
    opened.close()


def generate(server, prompt=PROMPT, *, key="contract", new=4, **sampling):
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True, **sampling},
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 8,
        "extra_key": key,
    }
    return server.post("/generate", body)


def logps(answer):
    return np.array([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])


def test_a_server_says_what_it_is(server):
    facts = server.facts
    assert facts.version >= (0, 5, 17) and facts.tensor_parallel == 1
    assert (facts.model_type, facts.longest) == ("qwen3", 1024)
    assert sglang_process.ready(server)


def test_an_answer_has_one_logp_a_token_and_the_version(server):
    server.post("/update_weight_version", {"new_version": "a label", "abort_all_requests": False})
    answer = generate(server)
    meta = answer["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert len(answer["output_ids"]) == 4 and meta["finish_reason"] == {"type": "length", "length": 4}
    assert meta["prompt_tokens"] == len(PROMPT) and meta["weight_version"] == "a label"
    assert meta["weight_versions"] == [{"version": "a label", "start": 0, "end": 4}]


def test_a_stop_id_is_part_of_the_answer(server):
    first = generate(server)["output_ids"][0]
    stopped = generate(server, stop_token_ids=[first], ignore_eos=False)
    assert stopped["output_ids"] == [first] and stopped["meta_info"]["finish_reason"]["type"] == "stop"
    assert len(stopped["meta_info"]["output_token_logprobs"]) == 1


def test_another_key_shares_no_cache(server):
    sglang_sync.flush(server)
    assert [generate(server, key=key)["meta_info"]["cached_tokens"] for key in ("a", "a", "b")] == [0, 39, 0]


def test_logps_are_those_of_the_scaled_logits(server):
    plain, scaled = (generate(server, new=1, temperature=t, top_k=-1)["meta_info"] for t in (1.0, 2.0))
    one = {token: logp for logp, token, _ in plain["output_top_logprobs"][0]}
    two = {token: logp for logp, token, _ in scaled["output_top_logprobs"][0]}
    shared = sorted(one.keys() & two.keys())
    assert len(shared) >= 4
    # log softmax(z / 2) - log softmax(z) / 2 is the same number for every token.
    offsets = np.array([two[token] - one[token] / 2 for token in shared])
    assert np.ptp(offsets) < 2e-3


def test_a_bias_takes_an_id_out_of_the_distribution(server):
    best = generate(server, new=1)
    token, logp = best["output_ids"][0], logps(best)[0]
    other = generate(server, new=1, logit_bias={str(token): -1e9})
    second = {t: p for p, t, _ in best["meta_info"]["output_top_logprobs"][0]}[other["output_ids"][0]]
    assert other["output_ids"][0] != token
    assert logps(other)[0] == pytest.approx(second - np.log1p(-np.exp(logp)), abs=2e-3)


def test_ids_outside_the_vocabulary_are_known_by_their_bias(server):
    with pytest.raises(EngineError, match="logit_bias"):
        generate(server, logit_bias={"512": 0.0})


def test_unknown_sampling_fields_are_refused(server):
    with pytest.raises(EngineError, match="400"):
        generate(server, seed=3)


def test_a_directory_without_weights_is_refused_and_the_server_lives(server):
    with pytest.raises(EngineError, match="400"):
        server.post("/update_weights_from_disk", {"model_path": "/nowhere", "weight_version": "x"})
    assert len(generate(server)["output_ids"]) == 4


def test_tensors_outside_an_update_are_refused(server):
    assert server.facts.update_session
    with pytest.raises(EngineError, match="400"):
        server.post("/update_weights_from_tensor", {"serialized_named_tensors": ["AAAA"]})


def test_pausing_aborts_and_the_cache_is_emptied_before_going_on(server):
    with ThreadPoolExecutor() as pool:
        running = pool.submit(generate, server, new=800)
        time.sleep(0.5)
        server.post("/pause_generation", {"mode": "abort"})
        answer = running.result()
        sglang_sync.flush(server)
        server.post("/continue_generation")
    meta = answer["meta_info"]
    assert meta["finish_reason"]["type"] == "abort" and len(answer["output_ids"]) < 800
    assert len(meta["output_token_logprobs"] or []) == len(answer["output_ids"])


def test_checksums_tell_weights_apart(server):
    sums = sglang_sync.checksums(server)
    assert sums and sums == sglang_sync.checksums(server)


def test_memory_routes_exist(server):
    server.post("/release_memory_occupation", {"tags": ["kv_cache"]})
    server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
