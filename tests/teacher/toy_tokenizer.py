"""Tokenizers small enough to count by hand."""

import re


class WordTokenizer:
    """One id for each word, each space and each line break; the chat template adds five ids around the user's text."""

    BEFORE = ("<|user|>", "role", "\n")
    AFTER = ("<|end|>", "<|assistant|>")

    def __init__(self):
        self.words: list[str] = []

    def _id(self, word: str) -> int:
        if word not in self.words:
            self.words.append(word)
        return self.words.index(word)

    def encode(self, text: str) -> list[int]:
        return [self._id(word) for word in re.findall(r"[^ \n]+|[ \n]", text)]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.words[token] for token in ids)

    def render_chat(self, user_text: str) -> list[int]:
        frame = [[self._id(word) for word in part] for part in (self.BEFORE, self.AFTER)]
        return frame[0] + self.encode(user_text) + frame[1]


class MergingTokenizer(WordTokenizer):
    """Merges neighbouring line breaks into one token, also across the template's border, as byte-level BPE does."""

    def encode(self, text: str) -> list[int]:
        return [self._id(word) for word in re.findall(r"[^ \n]+| |\n+", text)]

    def render_chat(self, user_text: str) -> list[int]:
        head = [self._id(word) for word in self.BEFORE[:2]]
        return head + self.encode("\n" + user_text) + [self._id(word) for word in self.AFTER]


class SpecialTokenizer(WordTokenizer):
    """Has the option ``special``; records how it was called."""

    def __init__(self):
        super().__init__()
        self.calls: list[bool] = []

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        self.calls.append(special)
        return super().encode(text)
