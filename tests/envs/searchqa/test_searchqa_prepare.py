"""From the published files to a folder: every format, the draw of 3,125, and exact words for what is missing."""

import csv
import gzip
import json

import pytest
from rich.console import Console

from sdjax.envs import EnvConfig
from sdjax.envs.searchqa import prepare as module
from sdjax.envs.searchqa.adapter import SearchqaBenchmark
from sdjax.envs.searchqa.config import SearchqaConfig
from sdjax.envs.searchqa.official import WHERE, read_official
from sdjax.envs.searchqa.prepare import prepare
from sdjax.envs.searchqa.questions import SOURCES
from sdjax.envs.searchqa.scoring import normalize
from sdjax.envs.searchqa.store import open_store
from sdjax.errors import DataError

N = 12  # questions of each made-up data set
CORPUS = [{"id": str(i), "contents": f'"Thing {i}"\nThing {i} is number {i}.'} for i in range(5)]


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def json_lines(path, rows):
    write(path, "".join(json.dumps(row) + "\n" for row in rows))


def official_files(folder, n=N):
    """One file of each data set in its published form."""
    json_lines(folder / "NQ-open.dev.jsonl", [{"question": f"nq {i}", "answer": [f"a{i}", "the"]} for i in range(n)])
    json_lines(folder / "NQ-open.train.jsonl", [{"question": f"nq train {i}", "answer": [f"a{i}"]} for i in range(n)])
    answers = [{"Value": f"t{i}", "Aliases": [f"t{i}", f"T {i}"], "NormalizedValue": "-"} for i in range(n)]
    trivia = [
        {"QuestionId": f"tc_{i}", "Question": f"trivia {i}", "Answer": answer} for i, answer in enumerate(answers)
    ]
    write(folder / "unfiltered-web-dev.json", {"Data": trivia, "Version": 1.0})
    with (folder / "popQA.tsv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["id", "prop", "question", "possible_answers"], delimiter="\t")
        table.writeheader()
        for i in range(n):
            table.writerow({"id": i, "prop": "x", "question": f"pop {i}", "possible_answers": json.dumps([f"p{i}"])})
    hotpot = [{"_id": f"h{i}", "question": f"hotpot {i}", "answer": "yes", "supporting_facts": []} for i in range(n)]
    write(folder / "hotpot_dev_distractor_v1.json", hotpot)
    triples = [["a", "b", "c"]]
    wiki = [{"_id": f"w{i}", "question": f"wiki {i}", "answer": f"w{i}", "evidences": triples} for i in range(n)]
    write(folder / "dev.json", wiki)
    steps = [{"id": 1, "question": "a >> b", "answer": "m", "paragraph_support_idx": 0}]
    musique = [
        {"id": f"2hop__{i}", "question": f"musique {i}", "answer": f"m{i}", "answer_aliases": [f"M-{i}"],
         "question_decomposition": steps, "answerable": True}
        for i in range(n)
    ]  # fmt: skip
    json_lines(folder / "musique_ans_v1.0_dev.jsonl", [*musique, {**musique[0], "id": "x", "answerable": False}])
    bamboogle = [{"Question": f"bamboogle {i}", "Answer": f"b{i}"} for i in range(5)]
    with (folder / "Bamboogle.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["Question", "Answer"])
        table.writeheader()
        table.writerows(bamboogle)


@pytest.fixture
def small_counts(monkeypatch):
    """As if the published files had as few questions as the made-up ones, and the list took four of each."""
    counts = {"eval": {source: (5 if source == "bamboogle" else N,) for source in SOURCES}, "train": {"nq": (1, N)}}
    monkeypatch.setattr(module, "COUNTS", counts)
    monkeypatch.setattr(module, "EACH", 8)


@pytest.fixture
def downloads(tmp_path):
    folder = tmp_path / "downloads"
    folder.mkdir()
    official_files(folder)
    return folder


@pytest.fixture
def console():
    return Console(quiet=True)


def test_every_published_form_is_read(downloads):
    found = {}
    for path in sorted(downloads.iterdir()):
        official = read_official(path)
        assert official.kind == "questions"
        found[official.split, official.rows[0]["data_source"]] = official.rows
    assert set(found) == {("eval", source) for source in SOURCES} | {("train", "nq")}
    assert found["eval", "nq"][1] == {
        "id": "nq_eval_1", "data_source": "nq", "question": "nq 1", "golden_answers": ["a1", "the"]
    }  # fmt: skip
    assert found["eval", "triviaqa"][0]["golden_answers"] == ["t0", "T 0"]
    assert found["eval", "popqa"][3]["golden_answers"] == ["p3"]
    assert found["eval", "2wiki"][0]["evidences"] == [["a", "b", "c"]]
    assert found["eval", "musique"][0]["golden_answers"] == ["m0", "M-0"] and len(found["eval", "musique"]) == N
    assert found["eval", "musique"][0]["decomposition"] == [{"question": "a >> b", "answer": "m"}]
    assert found["eval", "bamboogle"][4]["id"] == "bamboogle_test_4"


def test_the_form_of_the_hub_is_read(tmp_path):
    rows = [
        {"id": "test_0", "data_source": "2wikimultihopqa", "question": "q", "golden_answers": ["a"]},
        {"data_source": "nq", "question": "r", "reward_model": {"ground_truth": {"target": ["b"]}, "style": "rule"}},
    ]
    json_lines(tmp_path / "test.jsonl", rows)
    found = read_official(tmp_path / "test.jsonl").rows
    assert found[0]["id"] == "2wiki_test_0" and found[0]["data_source"] == "2wiki"
    assert found[1]["id"] == "nq_eval_1" and found[1]["golden_answers"] == ["b"]
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    import pyarrow

    keys = {key: None for row in rows for key in row}  # as in a table, each row has every column
    parquet.write_table(pyarrow.Table.from_pylist([{**keys, **row} for row in rows]), tmp_path / "test.parquet")
    assert read_official(tmp_path / "test.parquet").rows == found


def test_downloads_become_a_folder_that_plays(downloads, small_counts, tmp_path, console, run):
    json_lines(downloads / "wiki.jsonl", CORPUS)
    (downloads / "notes.json").write_text('{"by": "me"}')  # skipped: nobody named it
    leaked = json.loads((downloads / "NQ-open.train.jsonl").read_text().splitlines()[0])
    lines = (downloads / "NQ-open.train.jsonl").read_text().splitlines()[1:]
    first = json.loads((downloads / "NQ-open.dev.jsonl").read_text().splitlines()[0])["question"]
    every = [json.loads(line) for line in lines] + [{**leaked, "question": f"{first}?"}]
    json_lines(downloads / "NQ-open.train.jsonl", every)
    out = tmp_path / "out"
    prepare([str(downloads)], out, console)
    names = {path.name for path in out.iterdir()}
    assert names == {"questions.jsonl.gz", "eval_53.jsonl.gz", "corpus.jsonl.gz", "bm25.npz", "manifest.json"}
    store = open_store(str(out), SearchqaConfig())
    assert store.index == out / "bm25.npz" and len(store.corpus) == 5
    panel = [store.question(task) for task in store.task_ids("eval_53")]
    assert [sum(question.source == source for question in panel) for source in SOURCES] == [8] * 6 + [5]
    asked = {normalize(question.question) for question in panel}
    trained = {normalize(store.question(task).question) for task in store.task_ids("train")}
    assert len(trained) == N - (normalize(first) in asked) and not trained & asked
    content = {path.name: path.read_bytes() for path in out.iterdir() if path.suffix == ".gz"}
    prepare([str(path) for path in sorted(downloads.iterdir(), reverse=True) if path.stem != "notes"], out, console)
    assert content == {path.name: path.read_bytes() for path in out.iterdir() if path.suffix == ".gz"}
    benchmark = SearchqaBenchmark(EnvConfig(name="searchqa", data=str(out), turns=4))

    async def search():
        environment = benchmark.make()
        await environment.reset(store.task_ids("train")[0], 0)
        return await environment.step("<search>number 3</search>")

    assert run(search()).observation.text.startswith('<information>Doc 1: "Thing 3"')


def test_our_own_form_is_copied(tmp_path, console):
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    question = {"id": "a", "data_source": "nq", "question": "what", "golden_answers": ["x"], "gold_ids": ["0"],
                "gold_kind": "annotated", "split": "train"}  # fmt: skip
    json_lines(source / "questions.jsonl", [question])
    (source / "eval_2.jsonl.gz").write_bytes(
        gzip.compress(b"".join(json.dumps({**question, "id": i, "question": i}).encode() + b"\n" for i in "bc"))
    )
    json_lines(source / "corpus.jsonl", CORPUS)
    prepare([str(source)], out, console)
    store = open_store(str(out), SearchqaConfig())
    assert store.splits == {"train": ("a",), "eval_2": ("eval_2/b", "eval_2/c")}
    assert store.question("a").gold_ids == ("0",) and store.question("a").all_gold


def test_missing_data_sets_are_named_with_their_origin(downloads, small_counts, tmp_path, console):
    (downloads / "popQA.tsv").unlink()
    (downloads / "dev.json").unlink()
    with pytest.raises(DataError, match="lacks popqa, 2wiki") as caught:
        prepare([str(downloads)], tmp_path / "out", console)
    assert WHERE["popqa"] in str(caught.value) and WHERE["2wiki"] in str(caught.value)
    assert WHERE["nq"] not in str(caught.value) and "nq_hotpotqa_train" in str(caught.value)


def test_files_that_are_not_whole_are_refused(downloads, tmp_path, console):
    with pytest.raises(DataError, match=r"\d+ \w+ questions for eval; the published file has"):
        prepare([str(downloads)], tmp_path / "out", console)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", "[]"),
        ("a.json", "{"),
        ("a.json", '[{"question": "q"}]'),
        ("a.jsonl", '{"some": "thing"}\n'),
        ("a.jsonl", ""),
        ("a.tsv", "id\tquestion\n1\tq\n"),
        ("a.csv", "x,y\n1,2\n"),
        ("a.json", '[{"_id": "h", "question": "q", "answer": 3, "supporting_facts": []}]'),
        ("a.jsonl", '{"question": "q", "question_decomposition": []}\n'),
        ("a.jsonl", '{"data_source": "squad", "question": "q", "golden_answers": ["a"]}\n'),
    ],
)
def test_other_files_are_refused_by_name(tmp_path, name, content):
    write(tmp_path / name, content)
    with pytest.raises(DataError, match="To fix"):
        read_official(tmp_path / name)


def test_sources_that_cannot_be_had_are_one_clear_error(tmp_path, console, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for source in ("PeterJinGo/nq_hotpotqa_train", "/no/such/folder", str(tmp_path)):
        with pytest.raises(DataError, match="To fix"):
            prepare([source], tmp_path / "out", console)
    (tmp_path / "notes.json").write_text("{}")
    with pytest.raises(DataError, match="not a file of a known data set"):
        prepare([str(tmp_path / "notes.json")], tmp_path / "out", console)
    with pytest.raises(DataError, match="no questions"):
        prepare([], tmp_path / "out", console)
    assert not (tmp_path / "out").exists()
