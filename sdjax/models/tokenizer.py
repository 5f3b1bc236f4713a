"""The checkpoint's tokenizer and chat template.

Text becomes ids here and nowhere else. What the engine sampled is never decoded and encoded again: ``decode`` serves
environments and people.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from sdjax.errors import ModelError
from sdjax.models.config import read_json, text_config, token_ids

# Two neutral texts and one with outer white space (some templates trim): the template is verbatim if all three survive.
_PROBES = ("sdjaxprobe", "another\n\nprobe: 12", " \n probe \n ")


def _byte_of_char() -> dict[str, int]:
    """Inverse of the byte-level alphabet of GPT-2: printable bytes stand for themselves, the others are moved up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(moved)}


_BYTE_OF_CHAR = _byte_of_char()


class Tokenizer:
    """A fast tokenizer with the ids that matter for sampling. Make it with ``Tokenizer.load``.

    vocab_size: number of ids the tokenizer can produce. stop_ids: every end-of-sequence id of the checkpoint, sorted.
    turn_end_id: the stop id that ends an assistant turn in training data.
    pad_id: an id to fill unused positions with; masks never depend on it.
    sampling_mask_V: bool, one entry per row of the model's embedding, True on ids that the tokenizer knows.
    """

    def __init__(self, hf_tokenizer: Any, *, stop_ids: Sequence[int], model_vocab_size: int, enable_thinking: bool):
        self._hf = hf_tokenizer
        self._fast: tokenizers.Tokenizer = hf_tokenizer.backend_tokenizer
        # A second copy that reads special tokens inside foreign text as plain characters.
        self._plain = tokenizers.Tokenizer.from_str(self._fast.to_str())
        self._plain.encode_special_tokens = True
        self._enable_thinking = enable_thinking
        ids = self._fast.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids) + 1
        if self.vocab_size > model_vocab_size:
            raise ModelError(
                f"the tokenizer has {self.vocab_size} ids, but the model's embedding has {model_vocab_size} rows.",
                "use the tokenizer files of the same checkpoint.",
            )
        self.sampling_mask_V = np.zeros(model_vocab_size, bool)
        self.sampling_mask_V[list(ids)] = True
        self.stop_ids = tuple(sorted(set(stop_ids)))
        unknown = [i for i in self.stop_ids if not 0 <= i < model_vocab_size or not self.sampling_mask_V[i]]
        if unknown or not self.stop_ids:
            raise ModelError(
                f"end-of-sequence ids {unknown} are not tokens." if unknown else "the checkpoint names no eos token.",
                "set eos_token_id in generation_config.json to ids of this tokenizer.",
            )
        # What ends an assistant turn in training data: the tokenizer's own eos; chat models set it to their turn end.
        self.turn_end_id: int = (
            self.stop_ids[0] if hf_tokenizer.eos_token_id is None else int(hf_tokenizer.eos_token_id)
        )
        pad = hf_tokenizer.pad_token_id
        self.pad_id: int = self.stop_ids[0] if pad is None else int(pad)
        added = self._fast.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_texts = tuple(t.content for t in added.values() if t.special)

    @classmethod
    def load(
        cls, directory: str | Path, *, model_vocab_size: int | None = None, enable_thinking: bool = False
    ) -> "Tokenizer":
        """Loads tokenizer.json, the chat template and the end-of-sequence ids of a checkpoint directory.

        model_vocab_size: rows of the model's embedding (None: read from config.json). enable_thinking is always passed
        to the chat template, because templates disagree about its default. Raises ModelError.
        """
        # transformers takes seconds to import; engines and reports that never tokenize should not pay for it.
        from transformers import AutoTokenizer

        directory = Path(directory)
        if not (directory / "tokenizer.json").is_file():
            raise ModelError(f"{directory} has no tokenizer.json.", "add the checkpoint's (fast) tokenizer files.")
        config = read_json(directory / "config.json")
        if model_vocab_size is None:
            model_vocab_size = int(text_config(config)["vocab_size"])
        try:
            hf = AutoTokenizer.from_pretrained(directory, local_files_only=True, use_fast=True)
        except (ValueError, OSError, KeyError, TypeError) as e:
            raise ModelError(f"the tokenizer in {directory} does not load: {e}.", "restore its files.") from e
        stop: list[int] = [] if hf.eos_token_id is None else [int(hf.eos_token_id)]
        sources = [text_config(config), config]
        if (directory / "generation_config.json").is_file():
            sources.append(read_json(directory / "generation_config.json"))
        for source in sources:
            stop += token_ids(source.get("eos_token_id"))
        return cls(hf, stop_ids=stop, model_vocab_size=model_vocab_size, enable_thinking=enable_thinking)

    def _render(self, user_text: str) -> str:
        if self._hf.chat_template is None:
            raise ModelError("the checkpoint has no chat template.", "add chat_template to tokenizer_config.json.")
        return self._hf.apply_chat_template(
            [{"role": "user", "content": user_text}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=self._enable_thinking,
        )

    @cached_property
    def _frame(self) -> tuple[str, str, bool]:
        """(text before the user's, text after it, whether the template leaves the user's text as it is)."""
        before, found, after = self._render(_PROBES[0]).partition(_PROBES[0])
        if not found:
            raise ModelError("the chat template drops the user's message.", "restore the checkpoint's chat template.")
        verbatim = all(self._render(probe) == before + probe + after for probe in _PROBES)
        return before, after, verbatim

    def render_chat_text(self, user_text: str) -> str:
        """Returns the prompt that ``render_chat`` encodes, as text."""
        before, after, verbatim = self._frame
        return before + user_text + after if verbatim else self._render(user_text)

    def render_chat(self, user_text: str) -> list[int]:
        """Returns the prompt ids of one user message, generation prompt included.

        Special tokens that occur inside ``user_text`` (an environment or a model may print them) become ordinary
        characters: text can never open or close a message.
        """
        if any(text in user_text for text in self._special_texts):
            before, after, _ = self._frame
            return self.encode(before) + self.encode(user_text, special=False) + self.encode(after)
        return self.encode(self.render_chat_text(user_text))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Returns ids without adding any; ``special=False`` reads special tokens in ``text`` as plain characters."""
        return (self._fast if special else self._plain).encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> str:
        """Returns the text of ``ids`` as it is (no clean-up of spaces); special tokens are left out by default."""
        return self._fast.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def token_strings(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """Returns one display text per id; a part of a character is shown as ``\\xNN`` escapes."""
        return [self._token_string(int(i)) for i in ids]

    def _token_string(self, token_id: int) -> str:
        piece = self._fast.id_to_token(token_id)
        if piece is None:
            return f"<{token_id}>"
        if token_id in self._added_ids:
            return piece
        if all(c in _BYTE_OF_CHAR for c in piece):
            return bytes(_BYTE_OF_CHAR[c] for c in piece).decode("utf-8", errors="backslashreplace")
        return piece.replace("\u2581", " ")
