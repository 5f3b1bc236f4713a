"""Pages and moves on a tiny shop; actions are only text."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from webshop_shops import make_shop, tiny_catalogue  # type: ignore[import-not-found]

from sdjax.envs.webshop.simulator import Episode, observe, split_action

TASK = "Find me rubber sole men's shoes with color: red, and size: 9, and price lower than"


def start(shop, goal="tiny/B000000001#0", *actions):
    episode = Episode(shop, shop.goals[goal])
    for action in actions:
        episode.step(action)
    return episode


def test_pages_as_text(tiny):
    episode = start(tiny)
    goal = episode.goal.text
    assert goal.startswith(TASK)
    assert episode.observation("text") == f"WebShop [SEP] Instruction: [SEP] {goal} [SEP] Search"
    episode.step("search[shoe]")
    head = f"Instruction: [SEP] {goal} [SEP] Back to Search [SEP]"
    tail = "[SEP] Next > [SEP] B000000001 [SEP] B000000001 Red Shoe [SEP] $12.5"
    assert episode.observation("text") == f"{head} Page 1 (Total results: 1) {tail}"
    episode.step("click[b000000001]")
    options = "color [SEP] red [SEP] blue | grey [SEP] size [SEP] 9"
    item = f"{options} [SEP] B000000001 Red Shoe [SEP] Price: $12.5 [SEP] Rating: N.A."
    buttons = "Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    assert episode.observation("text") == f"{head} < Prev [SEP] {item} [SEP] {buttons}"
    for page, shown in (
        ("description", " [SEP] A shoe of soft leather."),
        ("features", " [SEP] rubber sole [SEP] daily wear"),
        ("reviews", ""),
    ):
        episode.step(f"click[{page}]")
        assert episode.page == page and episode.observation("text") == f"{head} < Prev{shown}"
        episode.step("click[< prev]")


def test_quoted_pages_leave_out_the_instruction(tiny):
    episode = start(tiny)
    assert episode.observation("quoted") == "'Search'"
    episode.step("search[shoe]")
    shown = ["Back to Search", "Page 1 (Total results: 1)", "Next >", "B000000001", "B000000001 Red Shoe", "$12.5"]
    assert episode.observation("quoted") == " [SEP] ".join(f"'{part}'" for part in shown)
    done = start(tiny, "tiny/B000000001#0", "search[shoe]", "click[b000000001]", "click[buy now]")
    assert done.observation("quoted") == done.observation("text").strip()


def test_rich_pages_mark_choices_and_opened_products(tiny):
    episode = start(tiny, "tiny/B000000001#0", "search[shoe]", "click[b000000001]", "click[red]")
    text = episode.observation("text_rich")
    assert text.startswith("You have clicked red.\nInstruction:\n")
    assert "\n  [clicked button] red [clicked button_]\n  [button] blue | grey [button_]\n" in text
    assert episode.observation("text") == start(
        tiny, "tiny/B000000001#0", "search[shoe]", "click[b000000001]"
    ).observation("text")
    episode.step("click[< prev]")
    assert "\n\n[clicked button] B000000001 [clicked button_]\n" in episode.observation("text_rich")
    episode.step("click[back to search]")
    episode.step("search[shoe]")
    assert "\n\n[button] B000000001 [button_]\n" in episode.observation("text_rich")


def test_what_each_page_offers(tiny):
    episode = start(tiny)
    assert (episode.clickables(), episode.has_search_bar()) == (("search",), True)
    episode.step("search[lamp leather hat rubber]")
    assert episode.clickables() == ("back to search", "next >", *(asin.lower() for asin in episode.results))
    assert set(episode.results) == {"B000000001", "B000000002", "B000000003"}
    episode.step("click[next >]")
    assert episode.clickables() == ("back to search", "< prev", "next >") and episode.number == 2
    for _ in range(5):
        episode.step("click[next >]")
    assert episode.number == 7 and "Page 7 (Total results: 3)" in episode.observation("text")
    episode.step("search[lamp]")
    episode.step("click[b000000002]")
    assert episode.clickables() == ("back to search", "< prev", "description", "features", "reviews", "buy now")
    episode.step("click[reviews]")
    assert episode.clickables() == ("back to search", "< prev") and not episode.has_search_bar()


def test_a_value_hides_a_button_and_the_last_group_of_a_value_counts(tiny):
    episode = start(tiny, "tiny/B000000003#0", "search[hat]", "click[b000000003]")
    assert episode.clickables().count("features") == 1
    episode.step("click[features]")
    assert (episode.page, episode.chosen) == ("item", {"style": "features"})
    episode.step("click[plain]")
    assert episode.chosen == {"style": "features", "kind": "plain"}


def test_results_forget_the_choice_and_sub_pages_keep_it(tiny):
    episode = start(tiny, "tiny/B000000001#0", "search[shoe]", "click[b000000001]", "click[red]", "click[features]")
    assert episode.chosen == {"color": "red"}
    episode.step("click[< prev]")
    assert (episode.page, episode.chosen) == ("item", {"color": "red"})
    episode.step("click[< prev]")
    assert (episode.page, episode.chosen, episode.asin) == ("results", {}, None)


def test_searching_is_possible_everywhere_unless_strict(tiny):
    strict = make_shop(tiny_catalogue(), strict_search=True)
    for shop, page in ((tiny, "results"), (strict, "item")):
        episode = start(shop, "tiny/B000000001#0", "search[shoe]", "click[b000000001]")
        assert episode.accepts("search[lamp]") == (page == "results")
        episode.step("search[lamp]")
        assert episode.page == page
    assert start(strict).accepts("search[lamp]")


def test_back_doors_are_plain_words(tiny):
    for query in ("<r>", "<a>", "<c>", "<c> garden", "<q> lamps", "<q>"):
        episode = start(tiny, "tiny/B000000001#0", f"search[{query}]")
        assert episode.page == "results" and set(episode.results) <= {"B000000001", "B000000002"}
    assert start(tiny, "tiny/B000000001#0", "search[<r>]").results == ()


def test_buying_ends_the_episode(tiny):
    episode = start(tiny, "tiny/B000000001#0", "search[shoe]", "click[b000000001]", "click[red]", "click[9]")
    episode.step("click[buy now]")
    assert (episode.page, episode.purchase.score, episode.clickables()) == ("done", 1.0, ())
    text = episode.observation("text")
    assert '[SEP] B000000001 [SEP] options [SEP] {"color": "red", "size": "9"} [SEP] attrs' in text
    assert "Your score (min 0.0, max 1.0) [SEP] 1.0 [SEP] Reward Details" in text
    assert not episode.accepts("search[lamp]")
    episode.step("search[lamp]")
    assert episode.page == "done"


IGNORED = [
    "",
    "search",
    "search[]",
    "search[x",
    "click[]",
    "click[search]",
    "click[lamp]",
    "Search[x]",
    "buy now",
    "[x]",
]
IGNORED += ["\nsearch[x]", "click[b000000001", "click [red]", "\x00", "{0.__class__}", "看"]


@pytest.mark.parametrize("action", IGNORED)
def test_what_is_no_action_changes_nothing(action, tiny):
    for actions in ((), ("search[shoe]",), ("search[shoe]", "click[b000000001]")):
        episode = start(tiny, "tiny/B000000001#0", *actions)
        before = episode.state_key("text"), episode.observation("text")
        assert not episode.accepts(action)
        episode.step(action)
        assert (episode.state_key("text"), episode.observation("text")) == before


def test_actions_of_a_megabyte(tiny):
    for action in (
        "[" * 1_000_000,
        "a[" * 500_000 + "]",
        "]" * 1_000_000,
        "x" * 1_000_000,
        "search[" + "é " * 300_000 + "]",
    ):
        episode = start(tiny)
        episode.step(action)
        assert episode.observation("text") and episode.state_key("text")


@settings(max_examples=500)
@given(st.text(st.sampled_from("[]ab \n\r<")) | st.text())
def test_actions_are_split_as_the_original_does(action):
    match = re.match(r"(.+)\[(.+)\]", action)
    expected = None if match is None else (match.group(1), match.group(2).lower())
    assert split_action(action) == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 10_000), max_size=15))
def test_any_walk_keeps_its_promises(small, draws):
    shop = small.shop
    episode = Episode(shop, next(iter(shop.goals.values())))
    for draw in draws:
        if episode.page == "done":
            break
        seen = observe(episode, "text")
        assert seen.task == episode.goal.text and seen.text == episode.observation("text")
        options = [*episode.clickables(), None]
        target = options[draw % len(options)]
        words = episode.goal.text.split()
        action = f"search[{words[draw % len(words)]}]" if target is None else f"click[{target}]"
        assert episode.accepts(action) == (target != "search")
        copy = episode.copy()
        assert copy.state_key("text_rich") == episode.state_key("text_rich")
        episode.step(action)
        copy.step(action)
        assert copy.observation("text_rich") == episode.observation("text_rich")
        assert copy.state_key("text_rich") == episode.state_key("text_rich")


def test_copies_are_independent_and_keys_tell_states_apart(tiny):
    episode = start(tiny, "tiny/B000000001#0", "search[shoe]", "click[b000000001]")
    copy = episode.copy()
    copy.step("click[red]")
    assert episode.chosen == {} and copy.state_key("text") != episode.state_key("text")
    fresh = start(tiny, "tiny/B000000001#0", "search[lamp]", "click[b000000002]", "search[shoe]", "click[b000000001]")
    assert fresh.state_key("text") == episode.state_key("text")
    assert fresh.state_key("text_rich") != episode.state_key("text_rich")


def test_text_that_the_original_loses(tiny):
    from dataclasses import replace

    catalogue = tiny_catalogue()
    blank = replace(catalogue.products[0], title="", description=" \n ", bullets=("", " ", "a <b> & 'c'"))
    shop = make_shop(replace(catalogue, products=(blank, *catalogue.products[1:])))
    episode = start(shop, "tiny/B000000001#0", "search[red]", "click[b000000001]")
    assert "[SEP] 9 [SEP] Price: $12.5" in episode.observation("text")
    episode.step("click[description]")
    assert episode.observation("text").endswith("[SEP] < Prev")
    episode.step("click[< prev]")
    episode.step("click[features]")
    assert episode.observation("text").endswith("[SEP] < Prev [SEP]  [SEP]  [SEP] a <b> & 'c'")
