"""Reading catalogues: the published schema, its defects, the compact store, damaged files."""

import gzip
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from webshop_shops import HUMAN, INSTRUCTIONS, ITEMS, item, write_files  # type: ignore[import-not-found]

from sdjax.envs.webshop import catalogue as module
from sdjax.envs.webshop.catalogue import index_text, json_array, read_catalogue, write_store
from sdjax.errors import DataError


def test_products_are_read_as_the_original_reads_them(tmp_path):
    repeated = [*ITEMS, item("B000000001", name="again"), item("nan"), item("B0000000001234")]
    write_files(tmp_path, repeated)
    found = read_catalogue(tmp_path)
    assert found.label == "items_shuffle_1000" and found.folder == tmp_path
    shoe, lamp, hat = found.products
    assert shoe.options == {"color": ("red", "blue | grey"), "size": ("9",)} and shoe.query == "men's shoes"
    assert (shoe.prices, shoe.price_tag) == ((12.5,), "$12.5")
    assert (lamp.prices, lamp.price_tag) == ((3.78, 11.38), "$3.78 to $11.38")
    assert (lamp.bullets, lamp.options, lamp.attributes) == (("bright",), {}, ("DUMMY_ATTR",))
    assert (hat.prices, hat.price_tag, list(hat.options)) == ((100.0,), "$100.0", ["style", "kind"])
    assert shoe.human[0].options == ("red",) and lamp.instruction is None


def test_index_text(tiny):
    text = index_text(tiny.products["B000000001"])
    assert text == "b000000001 red shoe a shoe of soft leather. rubber sole color: red, blue | grey, and size: 9"


def test_one_file_picks_those_of_its_size(tmp_path):
    small = write_files(tmp_path)
    full = write_files(tmp_path, ITEMS[:2], INSTRUCTIONS, size="")
    assert (len(read_catalogue(small).products), len(read_catalogue(full).products)) == (3, 2)
    with pytest.raises(DataError, match=r"items_shuffle\.json, items_shuffle_1000\.json"):
        read_catalogue(tmp_path)


def test_gzipped_files(tmp_path):
    path = write_files(tmp_path)
    plain = read_catalogue(path)
    for name in (path.name, "items_ins_v2_1000.json", "items_human_ins.json"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
        (tmp_path / name).unlink()
    assert read_catalogue(tmp_path).products == plain.products


def test_store_gives_the_same_catalogue(tmp_path):
    write_files(tmp_path)
    read = read_catalogue(tmp_path)
    write_store(read, tmp_path / "store")
    stored = read_catalogue(tmp_path / "store")
    assert (stored.products, stored.label, stored.sha256) == (read.products, read.label, read.sha256)


def test_damaged_stores(tmp_path):
    write_files(tmp_path)
    folder = tmp_path / "store"
    write_store(read_catalogue(tmp_path), folder)
    store = json.loads((folder / "store.json").read_text())
    whole = (folder / "products.jsonl.gz").read_bytes()
    changed = gzip.compress(gzip.decompress(whole).replace(b"Red Shoe", b"Red Boot"))
    flipped = whole[:60] + bytes(byte ^ 255 for byte in whole[60:90]) + whole[90:]
    broken = [(content, "damaged") for content in (whole[:50], b"text", flipped)]
    for content, message in (*broken, (changed, "not those")):
        (folder / "products.jsonl.gz").write_bytes(content)
        with pytest.raises(DataError, match=message):
            read_catalogue(folder)
    for content, message in (("{}", "damaged"), ("[", "damaged"), (json.dumps({**store, "format": 9}), "format 9")):
        (folder / "store.json").write_text(content)
        with pytest.raises(DataError, match=message):
            read_catalogue(folder)


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": None},
        {"asin": 7},
        {"small_description": [3]},
        {"pricing": "12.50"},
        {"pricing": "$1.2.3"},
        {"query": None},
        {"customization_options": {"Size": [{"name": "9"}]}},
        {"customization_options": ["Size"]},
    ],
)
def test_a_wrong_schema_names_file_and_product(wrong, tmp_path):
    write_files(tmp_path, [ITEMS[0], {**item("B000000009"), **wrong}])
    with pytest.raises(DataError, match=r"items_shuffle_1000\.json: product 1 is not"):
        read_catalogue(tmp_path)


def test_a_missing_key_is_named(tmp_path):
    row = item("B000000009")
    del row["full_description"]
    write_files(tmp_path, [row])
    with pytest.raises(DataError, match="full_description"):
        read_catalogue(tmp_path)


def test_missing_and_empty(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_catalogue(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"no items_shuffle\*\.json"):
        read_catalogue(tmp_path)
    write_files(tmp_path, [])
    with pytest.raises(DataError, match="no products"):
        read_catalogue(tmp_path)
    write_files(tmp_path, ITEMS, [], HUMAN)
    with pytest.raises(DataError, match="no table"):
        read_catalogue(tmp_path)
    (tmp_path / "items_ins_v2_1000.json").write_text("{")
    with pytest.raises(DataError, match=r"items_ins_v2_1000\.json cannot be read"):
        read_catalogue(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(JSON, max_size=8), st.integers(1, 40), st.sampled_from([None, 1]))
def test_a_list_is_read_piece_by_piece(values, chunk, indent):
    text = json.dumps(values, indent=indent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", chunk)
        assert list(json_array(io.StringIO(text), Path("x"))) == values


@pytest.mark.parametrize("text", ["", "{}", "[1", "[1,", "[1,]", "[1 2]", '[{"a": 1}, {"b"', "[tru]"])
def test_a_damaged_list(text, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 3)
    with pytest.raises(DataError):
        list(json_array(io.StringIO(text), Path("x")))
