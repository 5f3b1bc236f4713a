"""Corpus, questions and folders: what is accepted, what is refused, and the generated world."""

import gzip
import json

import pytest

from sdjax.envs.searchqa.config import SearchqaConfig
from sdjax.envs.searchqa.corpus import Corpus, Passage, read_corpus
from sdjax.envs.searchqa.generator import generate
from sdjax.envs.searchqa.questions import SOURCES, question_from
from sdjax.envs.searchqa.scoring import normalize
from sdjax.envs.searchqa.store import open_store, write_manifest
from sdjax.errors import DataError, SdjaxError

PASSAGES = [
    {"id": "0", "contents": '"Alder"\nAlder is a town on the Birn.'},
    {"id": "1", "contents": '"Birn"\nThe Birn is a river that ends in lake Cort.'},
]
QUESTIONS = [
    {
        "id": "q0",
        "data_source": "2wikimultihopqa",
        "question": "Into what does  the river of Alder flow?",
        "golden_answers": ["Cort", "the", "lake Cort"],
        "gold_ids": ["0", "1"],
        "gold_kind": "annotated",
        "split": "eval",
        "evidences": [["Alder", "river", "Birn"], ["Birn", "mouth", "Cort"]],
    },
    {"id": "q1", "data_source": "nq", "question": "what is alder", "golden_answers": ["town"], "split": "train"},
]


def lines(path, rows):
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")


def folder(path, passages=PASSAGES, questions=QUESTIONS):
    path.mkdir(exist_ok=True)
    lines(path / "corpus.jsonl", passages)
    lines(path / "questions.jsonl.gz", questions)
    return str(path)


def test_a_folder_is_read_plain_or_packed(tmp_path):
    store = open_store(folder(tmp_path), SearchqaConfig())
    assert store.splits == {"eval": ("q0",), "train": ("q1",)}
    question = store.question("q0")
    assert question.source == "2wiki" and question.question == "Into what does the river of Alder flow?"
    assert question.golden_answers == ("Cort", "lake Cort")  # an answer without a word is dropped
    assert question.decomposition == ("Alder | river | Birn", "Birn | mouth | Cort")
    passage = store.corpus.passage("1")
    assert passage.title == "Birn" and passage.text.startswith("The Birn")
    for call in (lambda: store.question("q9"), lambda: store.task_ids("test")):
        with pytest.raises(DataError, match="To fix"):
            call()


def test_title_and_text_make_contents(tmp_path):
    lines(tmp_path / "corpus.jsonl", [{"id": 7, "title": "Alder", "text": "A town."}])
    assert read_corpus(tmp_path / "corpus.jsonl").passage("7").contents == '"Alder"\nA town.'


def test_lists_are_splits_of_their_own(tmp_path):
    data = folder(tmp_path)
    listed = {key: QUESTIONS[0][key] for key in ("id", "data_source", "question")} | {"golden_answers": ["Cort"]}
    lines(tmp_path / "eval_1.jsonl", [listed])
    store = open_store(data, SearchqaConfig())
    assert store.task_ids("eval_1") == ("eval_1/q0",) and store.question("eval_1/q0").golden_answers == ("Cort",)
    (tmp_path / "corpus.jsonl").unlink()
    assert open_store(data, SearchqaConfig()).corpus is None


def changed(row, **keys):
    return {key: value for key, value in {**row, **keys}.items() if value is not None}


@pytest.mark.parametrize(
    ("passages", "message"),
    [
        ([*PASSAGES, PASSAGES[0]], "'0' occurs twice"),
        ([changed(PASSAGES[0], id=" ")], "line 1: 'id'"),
        ([changed(PASSAGES[0], id=None)], "line 1: 'id'"),
        ([PASSAGES[0], changed(PASSAGES[1], contents="\n")], "line 2: 'contents'"),
        ([changed(PASSAGES[0], contents=None)], "'title'"),
        (["[1]"], "line 1 is not a JSON object"),
        (['{"id": "0", "contents": "\\ud800"}'], "line 1 is not a JSON object"),
        ([PASSAGES[0], '{"id": "2", '], "line 2 is not a JSON object"),
        ([], "without passages"),
    ],
)
def test_a_bad_corpus_is_refused_with_its_line(tmp_path, passages, message):
    with pytest.raises(DataError, match=message):
        open_store(folder(tmp_path, passages), SearchqaConfig())


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        ([*QUESTIONS, QUESTIONS[1]], "two questions have the id 'q1'"),
        ([changed(QUESTIONS[0], golden_answers=["the", "!"])], "no golden answer has a word"),
        ([changed(QUESTIONS[0], golden_answers="Cort")], "'golden_answers'"),
        ([changed(QUESTIONS[0], golden_answers=None)], "'golden_answers'"),
        ([changed(QUESTIONS[0], question="  ")], "'question'"),
        ([changed(QUESTIONS[0], data_source="hotpot")], "did you mean 'hotpotqa'"),
        ([changed(QUESTIONS[0], gold_ids=["5"])], "no passage '5'"),
        ([changed(QUESTIONS[0], evidences=[["a", 1, "b"]])], "evidences"),
        ([changed(QUESTIONS[0], split="a:b")], "split"),
        (
            [
                QUESTIONS[0],
                changed(QUESTIONS[0], id="q2", split="train", question="Into what does the river of Alder flow"),
            ],
            "also evaluation questions",
        ),
    ],
)
def test_bad_questions_are_refused(tmp_path, questions, message):
    with pytest.raises(DataError, match=message):
        open_store(folder(tmp_path, questions=questions), SearchqaConfig())


def test_what_is_no_data_is_refused(tmp_path):
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(DataError, match="To fix"):
            open_store(str(path), SearchqaConfig())
    data = folder(tmp_path)
    lines(tmp_path / "corpus.jsonl.gz", PASSAGES)
    with pytest.raises(DataError, match="both"):
        open_store(data, SearchqaConfig())
    (tmp_path / "corpus.jsonl.gz").write_bytes(b"\x1f\x8bnot packed")
    (tmp_path / "corpus.jsonl").unlink()
    with pytest.raises(DataError, match=r"corpus\.jsonl\.gz"):
        open_store(data, SearchqaConfig())


def test_a_manifest_notices_every_change(tmp_path):
    data = folder(tmp_path)
    write_manifest(tmp_path)
    assert open_store(data, SearchqaConfig()).index is None
    lines(tmp_path / "corpus.jsonl", [PASSAGES[0], changed(PASSAGES[1], contents='"Birn"\nA river.')])
    with pytest.raises(DataError, match="the corpus of"):
        open_store(data, SearchqaConfig())
    lines(tmp_path / "corpus.jsonl", PASSAGES)
    lines(tmp_path / "questions.jsonl.gz", [changed(QUESTIONS[0], golden_answers=["Alder"]), QUESTIONS[1]])
    with pytest.raises(DataError, match="the splits of"):
        open_store(data, SearchqaConfig())
    (tmp_path / "bm25.npz").write_bytes(b"x")
    (tmp_path / "questions.jsonl.gz").unlink()
    lines(tmp_path / "questions.jsonl", QUESTIONS)
    with pytest.raises(DataError, match="the index of"):
        open_store(data, SearchqaConfig())
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match=r"manifest\.json"):
        open_store(data, SearchqaConfig())


def test_unknown_sources_are_named():
    with pytest.raises(DataError, match="unknown data_source 'squad'"):
        question_from(changed(QUESTIONS[0], data_source="squad"), "x")


def test_the_same_seed_makes_the_same_world(world):
    corpus, drawn = generate(0, 60, 20)
    assert corpus.sha256 == world.corpus.sha256 and [question for _, question in drawn] == list(
        world.questions.values()
    )
    other = generate(1, 60, 20)[0]
    assert other.sha256 != corpus.sha256
    assert not {passage.title for passage in other} & {passage.title for passage in corpus}


def test_all_sources_have_questions_and_no_fact_is_shared(world):
    counts = {split: dict.fromkeys(SOURCES, 0) for split in world.splits}
    for split, ids in world.splits.items():
        for task_id in ids:
            counts[split][world.question(task_id).source] += 1
    assert counts["eval"] == dict.fromkeys(SOURCES, 20)
    assert counts["train"] == {source: 0 if source == "bamboogle" else 60 for source in SOURCES}
    texts = [normalize(question.question) for question in world.questions.values()]
    train = {normalize(world.question(i).question) for i in world.task_ids("train")}
    assert not train & {normalize(world.question(i).question) for i in world.task_ids("eval")}
    assert len(texts) == 500


def test_answers_stand_in_the_gold_passages_only_as_needed(world):
    """The last fact of every question is in its gold passages, and no hop is spare: each gold passage is named by the
    question or by another gold passage."""
    for question in world.questions.values():
        gold = [world.corpus.passage(passage_id) for passage_id in question.gold_ids]
        texts = " ".join(passage.contents for passage in gold)
        for answer in question.golden_answers:
            assert answer in ("yes", "no") or normalize(answer) in normalize(texts)
        for passage in gold:
            others = question.question + " ".join(p.text for p in gold if p is not passage)
            inverse = question.source == "triviaqa"
            assert inverse or normalize(passage.title) in normalize(others)


def test_a_world_too_small_for_the_questions_says_so():
    with pytest.raises(DataError, match="generator_train"):
        generate(0, 100_000, 1)


def test_errors_are_one_family(tmp_path):
    with pytest.raises(SdjaxError):
        Corpus([Passage("a", "x"), Passage("a", "y")])
