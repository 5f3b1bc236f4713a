import re

import pytest

from sdjax.errors import TeacherContextError
from sdjax.teacher import SkillBank, check_static, shipped_banks
from tests.teacher.toy_tokenizer import WordTokenizer

FULL_BANKS = ("alfworld", "scienceworld", "searchqa", "webshop")


class Words:
    """Four thirds of a token for each word: close to the byte-level tokenizers of the Llama and Qwen families."""

    def encode(self, text):
        return [0] * (len(text.split()) * 4 // 3)

    def decode(self, ids):
        return ""

    def render_chat(self, user_text):
        return []


def write_bank(
    root,
    *,
    general: str | None = "general text",
    families=(("a", "text of a"),),
    manifest: str | None = 'environment = "alfworld"',
):
    (root / "families").mkdir(parents=True)
    if general is not None:
        (root / "general.md").write_text(general)
    for name, text in families:
        (root / "families" / f"{name}.md").write_text(text)
    if manifest is not None:
        (root / "bank.toml").write_text(manifest)
    return str(root)


def test_shipped_banks_are_the_four_environments_and_the_brief_one():
    assert shipped_banks() == ("alfworld", "alfworld_brief", "scienceworld", "searchqa", "webshop")
    assert [len(SkillBank.load(name).families) for name in shipped_banks()] == [5, 5, 10, 4, 7]


@pytest.mark.parametrize("name", FULL_BANKS)
def test_full_banks_have_the_promised_size(name):
    bank = SkillBank.load(name)
    principles = re.findall(r"(?m)^(\d+)\. ", bank.general)
    assert principles == [str(n) for n in range(1, len(principles) + 1)] and 10 <= len(principles) <= 15
    for family in bank.families:
        assert re.findall(r"(?m)^(\d+)\. ", bank.family_texts[family]) == list("12345")
        assert 600 <= len(bank.text(family)[0].split()) <= 1100
    assert max(check_static(bank, Words(), 2048).values()) <= 2048


def test_brief_bank_is_short_and_in_the_words_of_the_game():
    bank = SkillBank.load("alfworld_brief")
    assert len(bank.general.split()) <= 60
    assert all(len(text.split()) <= 30 for text in bank.family_texts.values())
    assert all(text == text.lower() for text in (bank.general, *bank.family_texts.values()))


def test_several_families_are_concatenated_in_order():
    bank = SkillBank.load("webshop")
    families = bank.route({"instruction": "women's dresses and a handbag"})
    text, general_only = bank.text(families)
    assert text == "\n\n".join([bank.general, bank.family_texts["apparel"], bank.family_texts["accessories"]])
    assert not general_only


@pytest.mark.parametrize("family", [None, (), []])
def test_no_family_is_the_general_part_alone(family):
    bank = SkillBank.load("alfworld")
    assert bank.text(family) == (bank.general, True)


def test_unknown_family_names_file_and_families():
    with pytest.raises(TeacherContextError, match=r"no text for the family 'wash'.*families/wash\.md.*clean"):
        SkillBank.load("alfworld").text("wash")


def test_a_directory_is_a_bank(tmp_path):
    bank = SkillBank.load(write_bank(tmp_path / "own", families=(("clean", "B"), ("heat", "A"))))
    assert bank.families == ("clean", "heat") and bank.text("heat") == ("general text\n\nA", False)
    assert bank.route({"task_type": "pick_heat_then_place_in_recep"}) == ("heat",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general": None}, "general.md"),
        ({"general": "  \n"}, "is empty"),
        ({"families": ()}, "no families"),
        ({"families": (("a", ""),)}, "is empty"),
        ({"manifest": "environment = "}, "cannot be read"),
        ({"manifest": "environment = 3"}, "no text value"),
    ],
)
def test_broken_banks_are_errors_with_a_fix(tmp_path, change, message):
    with pytest.raises(TeacherContextError, match=message) as caught:
        SkillBank.load(write_bank(tmp_path / "own", **change))
    assert caught.value.fix


def test_not_utf8_is_an_error(tmp_path):
    path = write_bank(tmp_path / "own")
    (tmp_path / "own" / "general.md").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(TeacherContextError, match="UTF-8"):
        SkillBank.load(path)


def test_unknown_bank_lists_the_shipped_ones():
    with pytest.raises(TeacherContextError, match="alfworld, alfworld_brief"):
        SkillBank.load("alfwrld")


def test_a_bank_without_environment_gives_texts_but_does_not_route(tmp_path):
    bank = SkillBank.load(write_bank(tmp_path / "own", manifest=None))
    assert bank.text("a")[0] == "general text\n\ntext of a"
    with pytest.raises(TeacherContextError, match=r"bank\.toml"):
        bank.route({"task_type": "pick_and_place_simple"})


def test_hash_depends_on_every_text(tmp_path):
    one = SkillBank.load(write_bank(tmp_path / "1")).sha256
    assert SkillBank.load(write_bank(tmp_path / "2")).sha256 == one
    assert SkillBank.load(write_bank(tmp_path / "3", general="x")).sha256 != one
    assert SkillBank.load(write_bank(tmp_path / "4", families=(("a", "x"),))).sha256 != one


def test_check_static_counts_every_text_and_names_what_is_too_long(tmp_path):
    bank = SkillBank.load(write_bank(tmp_path / "own", families=(("a", "x"), ("b", "x y z"))))
    tokens = check_static(bank, WordTokenizer(), 100, header="")
    # "general text" 3, blank line 2; a family adds its own words and spaces and one more blank line
    assert tokens == {"general": 5, "a": 8, "b": 12}
    with pytest.raises(TeacherContextError, match=r"budget of 11 tokens \(b: 12\).*at least 12"):
        check_static(bank, WordTokenizer(), 11, header="")


def test_check_static_bounds_concatenated_families(tmp_path):
    manifest = 'environment = "webshop"'
    bank = SkillBank.load(write_bank(tmp_path / "own", families=(("a", "x"), ("b", "y")), manifest=manifest))
    assert check_static(bank, WordTokenizer(), 100, header="")["all families"] == 11
