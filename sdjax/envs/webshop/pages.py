"""Pages as text, byte for byte as the original shows them in its modes ``text`` and ``text_rich``.

The original renders HTML and reads the strings back; a string that is empty, or blank with a line break in it, is lost
on the way. ``text`` joins the stripped strings; it does not show which options are chosen. ``text_rich`` has one line
for each string and marks buttons. ``quoted`` is verl-agent's form of ``text``: the parts after the instruction, each in
quotes.
"""

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sdjax.envs.webshop.simulator import Episode

MODES = ("quoted", "text", "text_rich")
PER_PAGE = 10
SEPARATOR = " [SEP] "

# Kinds of strings on a page; text_rich writes each in its way.
_PLAIN, _BUTTON, _OPTION, _PRODUCT = range(4)
_Part = tuple[int, str]
_RATING = "Rating: N.A."
_ITEM_BUTTONS = ("Description", "Features", "Reviews", "Buy Now")
_DONE_HEAD = (
    "Thank you for shopping with us!",
    "Your code: ",
    "None",
    " (Paste it in your MTurk interface.)",
    "Purchased",
    "asin",
)
_DONE_MIDDLE = (
    *("attrs", "None", "category", "None", "query", "None", "product category", "None", "Target", "asin", "options"),
    *("attrs", "price upper", "instuction text", "category", "product category", "query", "Goal ", "None", "Reward"),
    "Your score (min 0.0, max 1.0)",
)
_DONE_TAIL = ("Reward Details ", "None")


def render(episode: "Episode", mode: str) -> str:
    """The current page of ``episode``."""
    parts = [part for part in _parts(episode) if _survives(part[1])]
    if mode == "text_rich":
        return _rich(episode, parts)
    texts = [text.strip() for _, text in parts]
    if mode == "quoted" and episode.page != "done":
        return SEPARATOR.join(f"'{text}'" for text in texts[_instruction_end(episode) :])
    return SEPARATOR.join(texts)


def _survives(text: str) -> bool:
    return bool(text) and not (text.isspace() and "\n" in text)


def _instruction_end(episode: "Episode") -> int:
    """How many parts stand up to the instruction: ``WebShop``, ``Instruction:``, the instruction if it has text."""
    return (2 if episode.page == "start" else 1) + _survives(episode.goal.text)


def _parts(episode: "Episode") -> list[_Part]:
    if episode.page == "start":
        return [(_PLAIN, "WebShop"), (_PLAIN, "Instruction: "), (_PLAIN, episode.goal.text), (_BUTTON, "Search")]
    if episode.page == "done":
        return _done_parts(episode)
    parts = [(_PLAIN, "Instruction:"), (_PLAIN, episode.goal.text), (_BUTTON, "Back to Search")]
    if episode.page == "results":
        return parts + _results_parts(episode)
    product = episode.product
    assert product is not None  # every other page belongs to a product
    parts.append((_BUTTON, "< Prev"))
    if episode.page == "item":
        for name, values in product.options.items():
            parts.append((_PLAIN, name))
            parts += [(_OPTION, value) for value in values]
        parts += [(_PLAIN, product.title), (_PLAIN, f"Price: {product.price_tag}"), (_PLAIN, _RATING)]
        parts += [(_BUTTON, text) for text in _ITEM_BUTTONS]
    elif episode.page == "description":
        parts.append((_PLAIN, product.description))
    elif episode.page == "features":
        parts += [(_PLAIN, f" {bullet}") for bullet in product.bullets]
    return parts


def _results_parts(episode: "Episode") -> list[_Part]:
    parts = [(_PLAIN, f"Page {episode.number} (Total results: {len(episode.results)})")]
    if episode.number > 1:
        parts.append((_BUTTON, "< Prev"))
    parts.append((_BUTTON, "Next >"))
    for asin in episode.window():
        product = episode.shop.products[asin]
        parts += [(_PRODUCT, asin), (_PLAIN, product.title), (_PLAIN, product.price_tag)]
    return parts


def _done_parts(episode: "Episode") -> list[_Part]:
    assert episode.purchase is not None and episode.asin is not None
    # As Flask's template filter writes JSON into a page.
    chosen = json.dumps(episode.chosen, sort_keys=True)
    for character in "<>&'":
        chosen = chosen.replace(character, f"\\u{ord(character):04x}")
    bought = (episode.asin, "options", chosen)
    texts = (*_DONE_HEAD, *bought, *_DONE_MIDDLE, str(episode.purchase.score), *_DONE_TAIL)
    return [(_PLAIN, text) for text in texts]


def _rich(episode: "Episode", parts: list[_Part]) -> str:
    # The original looks for a quoted option value anywhere in the page's address, which has the query and the choice.
    address = f"{episode.query.replace(' ', '+')}/{episode.number}/{json.dumps(episode.chosen)}"
    lines, clicked = [], []
    for kind, text in parts:
        if kind == _BUTTON:
            lines.append(f"[button] {text} [button_]")
        elif kind == _PRODUCT:
            mark = "clicked button" if text in episode.opened else "button"
            lines.append(f"\n[{mark}] {text} [{mark}_]")
        elif kind == _OPTION and f'"{text}"' in address:
            lines.append(f"  [clicked button] {text} [clicked button_]")
            clicked.append(f"You have clicked {text}.\n")
        elif kind == _OPTION:
            lines.append(f"  [button] {text} [button_]")
        else:
            lines.append(text)
    return "".join(reversed(clicked)) + "".join(f"{line}\n" for line in lines)
