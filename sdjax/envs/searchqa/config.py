"""Configuration of Search-QA."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchqaConfig:
    """The ``env.searchqa`` part of a run's configuration.

    retriever: ``"bm25"`` over the corpus in this process, ``"dense"`` over stored embeddings, or ``"http"``, a running
    server. topk: passages of one search. rule: ``"verl_agent"`` or ``"search_r1"``, which differ in how passages are
    written and in what follows an invalid turn (see ``episode.py``). passage_characters: a longer passage is cut.
    cache: queries whose results are kept; 0 keeps none.

    url, payload, timeout_s, retries, connections: of ``http``. payload: ``"queries"`` (Search-R1's servers and ours)
    or ``"query"`` (verl-agent's). A try ends timeout_s after the server last said something, or after its answer
    should have been whole; between tries there are pauses of half a second, one second, and so on. The token of a
    server that wants one is the environment variable SDJAX_SEARCH_TOKEN.

    embeddings, encoder: of ``dense``; the .npy file that ``python -m sdjax.envs.searchqa.embed`` wrote, and
    ``"minilm"`` or the folder of a BERT-like model.

    generator_seed, generator_train, generator_eval: of the generated data; another seed is another world; questions for
    each source in the splits train and eval.
    """

    retriever: str = "bm25"
    topk: int = 3
    rule: str = "verl_agent"
    passage_characters: int = 1000
    cache: int = 10_000
    url: str = "http://127.0.0.1:8000/retrieve"
    payload: str = "queries"
    timeout_s: float = 10.0
    retries: int = 2
    connections: int = 16
    embeddings: str = ""
    encoder: str = "minilm"
    generator_seed: int = 0
    generator_train: int = 60
    generator_eval: int = 20
