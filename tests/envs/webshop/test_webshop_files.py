"""Tables of nouns and the preparation of a store."""

import sys
from types import SimpleNamespace

import pytest
from webshop_shops import HUMAN, INSTRUCTIONS, ITEMS, write_files  # type: ignore[import-not-found]

from sdjax.envs import EnvConfig
from sdjax.envs.webshop import check, nouns
from sdjax.envs.webshop.adapter import WebshopBenchmark
from sdjax.envs.webshop.catalogue import read_catalogue
from sdjax.envs.webshop.config import WebshopConfig
from sdjax.envs.webshop.nouns import NounTable, find_nouns, tag_titles, write_nouns
from sdjax.envs.webshop.prepare import prepare
from sdjax.errors import ConfigError, DataError

TABLE = NounTable("hand 1.0", {row["asin"]: tuple(row["name"].lower().split()) for row in ITEMS})


class Console:
    def __init__(self):
        self.lines: list[str] = []

    def print(self, line):
        self.lines.append(line)


def test_tables_are_found_beside_the_catalogue(tmp_path):
    write_files(tmp_path)
    catalogue = read_catalogue(tmp_path)
    with pytest.raises(DataError, match=r"no title_nouns\*\.jsonl\.gz"):
        find_nouns(catalogue)
    write_nouns(TABLE, tmp_path / "title_nouns.jsonl.gz")
    assert find_nouns(catalogue) == TABLE
    (tmp_path / "title_nouns_other.jsonl").write_text('{"asin": "B000000001", "nouns": ["shoe"]}\n')
    with pytest.raises(DataError, match=r"title_nouns\.jsonl\.gz, title_nouns_other"):
        find_nouns(catalogue)
    assert find_nouns(catalogue, str(tmp_path / "title_nouns.jsonl.gz")) == TABLE
    with pytest.raises(DataError, match="lacks 2 products, first B000000002"):
        find_nouns(catalogue, str(tmp_path / "title_nouns_other.jsonl"))


@pytest.mark.parametrize("content", ["[1]", "{", '{"asin": "a"}', '{"asin": "a", "nouns": 3}'])
def test_damaged_tables(content, tmp_path):
    write_files(tmp_path)
    path = tmp_path / "title_nouns.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match="no table of nouns"):
        find_nouns(read_catalogue(tmp_path))


def test_nouns_are_nouns_and_names_in_lower_case():
    def token(text, kind):
        return SimpleNamespace(text=text, pos_=kind)

    def pipe(titles, disable):
        assert disable == ["parser", "ner"]
        return [[token("Red", "ADJ"), token("Nike", "PROPN"), token(title, "NOUN")] for title in titles]

    assert list(tag_titles(["Shoe", "Hat"], SimpleNamespace(pipe=pipe))) == [("nike", "shoe"), ("nike", "hat")]


def test_the_tagger_is_optional(tmp_path, monkeypatch):
    write_files(tmp_path, size="_few")
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(SystemExit, match=r"sdjax\[nouns\]"):
        nouns.main([f"--data={tmp_path}"])
    with pytest.raises(ConfigError, match="spaCy is not installed"):
        prepare([str(tmp_path)], tmp_path / "store", Console())


def test_the_command_tags_with_spacy(tmp_path):
    pytest.importorskip("spacy")
    pytest.importorskip(nouns.DEFAULT_MODEL)
    write_files(tmp_path)
    nouns.main([f"--data={tmp_path}"])
    table = find_nouns(read_catalogue(tmp_path))
    assert table.tagger.startswith("spaCy ") and "lamp" in table.nouns["B000000002"]


def test_prepare_writes_a_store_that_opens(tmp_path):
    source, out, console = tmp_path / "source", tmp_path / "store", Console()
    source.mkdir()
    write_files(source, size="_few")
    write_nouns(TABLE, source / "title_nouns.jsonl.gz")
    prepare([str(source)], out, console)
    assert sorted(path.name for path in out.iterdir()) == [
        "bm25.npz",
        "products.jsonl.gz",
        "store.json",
        "title_nouns.jsonl.gz",
    ]
    assert "3 products" in console.lines[0] and "hand 1.0" in console.lines[0]
    stored = WebshopBenchmark(EnvConfig(name="webshop", data=str(out)))
    read = WebshopBenchmark(EnvConfig(name="webshop", data=str(source)))
    assert stored.provenance() == read.provenance() and stored.shop.goals == read.shop.goals
    assert next(iter(stored.shop.goals)).startswith("items_shuffle_few/B00")
    assert stored.shop.find("leather lamp") == read.shop.find("leather lamp")


def test_sources_may_be_spread_over_folders(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    items = write_files(one, size="_few")
    (one / "items_ins_v2_few.json").rename(two / "items_ins_v2_few.json")
    (one / "items_human_ins.json").unlink()
    write_nouns(TABLE, two / "title_nouns.jsonl.gz")
    console = Console()
    prepare([str(items), str(two)], tmp_path / "store", console)
    assert "goals=human is not available" in console.lines[-1]
    with pytest.raises(DataError, match=r"items_ins_v2_few\.json .* is not in"):
        prepare([str(one)], tmp_path / "other", console)


def test_prepare_says_what_is_missing_or_wrong(tmp_path):
    console = Console()
    with pytest.raises(DataError, match="does not exist"):
        prepare([str(tmp_path / "nowhere")], tmp_path / "out", console)
    with pytest.raises(DataError, match=r"no items_shuffle\*\.json \(the products\)"):
        prepare([str(tmp_path)], tmp_path / "out", console)
    write_files(tmp_path)
    with pytest.raises(DataError, match="the published file f88a36314a397b53"):
        prepare([str(tmp_path)], tmp_path / "out", console)
    (tmp_path / "items_ins_v2_1000.json").unlink()
    (tmp_path / "items_ins_v2_1000.json.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match=r"items_ins_v2_1000\.json\.gz"):
        prepare([str(tmp_path)], tmp_path / "out", console)


def test_an_unreachable_hub_is_one_clear_error(tmp_path, monkeypatch):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(DataError, match=r"some/dataset is no path here.*ConnectionError.*setup\.sh"):
        prepare(["some/dataset"], tmp_path / "out", Console())


@pytest.mark.shared
def test_prepare_of_the_published_files(real_folder, tmp_path):
    console = Console()
    prepare([str(real_folder)], tmp_path / "store", console)
    assert "415 products with a synthetic instruction, 13 with crowd-written ones" in console.lines[1]
    config = WebshopConfig(seed=42)
    made = WebshopBenchmark(EnvConfig(name="webshop", data=str(tmp_path / "store"), webshop=config))
    assert len(made.shop.goals) == 6910 and len(made.panel("eval").task_ids) == 128


def test_check_prints_and_explains_itself(tmp_path, capsys):
    write_files(tmp_path, ITEMS, INSTRUCTIONS, HUMAN, size="_few")
    with pytest.raises(SystemExit, match="title_nouns"):
        check.main([f"--data={tmp_path}"])
    write_nouns(TABLE, tmp_path / "title_nouns.jsonl.gz")
    check.main([f"--data={tmp_path}"])
    printed = capsys.readouterr().out
    assert "3 products" in printed and "4 synthetic" in printed and "eval        none" in printed
