import pytest

from sdjax.errors import TeacherContextError
from sdjax.teacher import SkillBank
from sdjax.teacher.routing import (
    route,
    route_alfworld,
    route_scienceworld,
    route_searchqa,
    route_webshop,
    tables,
)

ALFWORLD = {
    "pick_and_place_simple": "pick_and_place",
    "pick_two_obj_and_place": "pick_and_place",
    "look_at_obj_in_light": "look_at_obj_in_light",
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
}
SCIENCEWORLD = {
    "change_of_state": "boil melt freeze change-the-state-of-matter-of",
    "temperature_melting_point": "use-thermometer measure-melting-point-known-substance"
    " measure-melting-point-unknown-substance",
    "electricity_conductivity": "power-component power-component-renewable-vs-nonrenewable-energy test-conductivity"
    " test-conductivity-of-unknown-substances",
    "living_things": "find-living-thing find-non-living-thing find-plant find-animal",
    "growing_plants": "grow-plant grow-fruit",
    "chemistry_paint": "chemistry-mix chemistry-mix-paint-secondary-color chemistry-mix-paint-tertiary-color",
    "life_span": "lifespan-longest-lived lifespan-shortest-lived lifespan-longest-lived-then-shortest-lived",
    "life_stages": "identify-life-stages-1 identify-life-stages-2",
    "inclined_planes": "inclined-plane-determine-angle inclined-plane-friction-named-surfaces"
    " inclined-plane-friction-unnamed-surfaces",
    "genetics": "mendelian-genetics-known-plant mendelian-genetics-unknown-plant",
}


@pytest.mark.parametrize(("task_type", "family"), ALFWORLD.items())
def test_alfworld_task_type_and_game_path(task_type, family):
    assert route_alfworld({"task_type": task_type}) == (family,)
    name = f"{task_type}-Mug-None-Desk-308/trial_T20190909_1_2"
    for task_id in (f"valid_seen/{name}", name, f"json_2.1.1/train/{name}/game.tw-pddl"):
        assert route_alfworld({"task_id": task_id}) == (family,)


@pytest.mark.parametrize(
    ("task", "families"),
    [
        ("put two soapbar in garbagecan.", ("pick_and_place",)),
        ("put some spraybottle on toilet.", ("pick_and_place",)),
        ("look at alarmclock under the desklamp.", ("look_at_obj_in_light",)),
        ("examine the bowl with the desklamp.", ("look_at_obj_in_light",)),
        ("put a clean mug in coffeemachine.", ("clean",)),
        ("heat some egg and put it in diningtable.", ("heat",)),
        ("put a hot apple in fridge.", ("heat",)),
        ("cool some pan and put it in stoveburner.", ("cool",)),
        ("photograph the coolest cleaner", ()),
    ],
)
def test_alfworld_by_words_of_the_task(task, families):
    assert route_alfworld({"task": task}) == families


@pytest.mark.parametrize("fields", [{"task_type": "pick_heat_then_place"}, {"task_id": "valid_seen/other-Mug"}, {}])
def test_alfworld_unknown_or_missing_fields_are_errors(fields):
    with pytest.raises(TeacherContextError, match="To fix"):
        route_alfworld(fields)


@pytest.mark.parametrize(("family", "names"), SCIENCEWORLD.items())
def test_scienceworld_topics(family, names):
    for name in names.split():
        assert route_scienceworld({"task_name": name}) == (family,)
        assert route_scienceworld({"task_id": f"{name}/17"}) == (family,)


def test_scienceworld_table_is_complete():
    assert len(tables()["scienceworld"]["task"]) == 30
    assert sum(len(names.split()) for names in SCIENCEWORLD.values()) == 30
    with pytest.raises(TeacherContextError, match="did you mean 'grow-fruit'"):
        route_scienceworld({"task_name": "grow-fruits"})


@pytest.mark.parametrize(
    ("instruction", "families"),
    [
        ("Find me slim fit men's henleys with short sleeve with color: red", ("apparel",)),
        ("Find me men's loafers & slip-ons with rubber sole", ("footwear",)),
        ("Find me a rectangular area rug", ("home_decor",)),
        ("Find me a hdmi cable", ("electronics",)),
        ("Find me a leather wallet", ("accessories",)),
        ("Find me sulfate free shampoo", ("beauty_health",)),
        ("Find me gluten free snacks", ("other",)),
        ("Find me women's dresses and a matching handbag", ("apparel", "accessories")),
        ("Find me something nice", ()),
        ("Find me a photogenic standard", ()),  # no keyword as a whole word
        ("Find me a chat-dog treadmill with redress", ()),
    ],
)
def test_webshop_matches_all_families(instruction, families):
    assert route_webshop({"instruction": instruction}) == families
    assert route_webshop({"instruction": instruction.upper()}) == families


def test_webshop_prompt_wins_over_instruction():
    assert route_webshop({"instruction": "a shirt", "prompt": "page shows a laptop"}) == ("electronics",)


@pytest.mark.parametrize(
    ("source", "question", "families"),
    [
        ("nq", "", ("direct_retrieval",)),
        ("triviaqa", "", ("direct_retrieval",)),
        ("popqa", "", ("entity_attribute",)),
        ("hotpotqa", "Which is older, A or B?", ("multi_hop",)),
        ("2wiki", "Which film came out first, A or B?", ("comparison",)),
        ("2wikimultihopqa", "Which film came out first, A or B?", ("comparison",)),
        ("musique", "Which of A or B was made for C?", ("multi_hop",)),
        ("musique", "Which author before or after", ("comparison",)),  # "before" is not the word "for"
        ("bamboogle", "Who founded the orchestra?", ("multi_hop",)),
        ("webquestions", "Which is longer, A or B?", ("comparison",)),
        ("webquestions", "Who founded it?", ()),
    ],
)
def test_searchqa_by_source_then_text(source, question, families):
    assert route_searchqa({"data_source": source, "question": question}) == families


def test_searchqa_needs_a_source():
    with pytest.raises(TeacherContextError, match="data_source"):
        route_searchqa({"question": "Who?"})


def test_unknown_environment_names_the_known_ones():
    with pytest.raises(TeacherContextError, match="alfworld, webshop, searchqa, scienceworld"):
        route("alfword", {})


def test_every_family_of_every_table_has_a_text():
    expected = {
        "alfworld": set(ALFWORLD.values()),
        "alfworld_brief": set(ALFWORLD.values()),
        "webshop": set(tables()["webshop"]["keywords"]),
        "searchqa": {"direct_retrieval", "entity_attribute", "multi_hop", "comparison"},
        "scienceworld": set(SCIENCEWORLD),
    }
    for name, families in expected.items():
        bank = SkillBank.load(name)
        assert set(bank.families) == families
        for family in families:
            text, general_only = bank.text(family)
            assert text.startswith(bank.general) and bank.family_texts[family] in text and not general_only
