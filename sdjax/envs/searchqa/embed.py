"""Writes the embeddings of a corpus for ``retriever=dense``.

``python -m sdjax.envs.searchqa.embed --data PATH --out embeddings.npy [--encoder minilm]``
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from sdjax.envs.searchqa.config import SearchqaConfig
from sdjax.envs.searchqa.dense import write_embeddings
from sdjax.envs.searchqa.encoder import load_encoder
from sdjax.envs.searchqa.store import open_corpus
from sdjax.errors import SdjaxError

_REPORT_EVERY = 2000


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sdjax.envs.searchqa.embed", description=__doc__)
    parser.add_argument("--data", default="generated", help='folder with corpus.jsonl, or "generated"')
    parser.add_argument("--out", type=Path, required=True, help="the .npy file to write")
    parser.add_argument("--encoder", default="minilm", help='"minilm" or the folder of a BERT-like model')
    parsed = parser.parse_args(arguments)
    console = Console()
    try:
        corpus = open_corpus(parsed.data, SearchqaConfig())
        reported = 0
        for done in write_embeddings(parsed.out.with_suffix(".npy"), corpus, load_encoder(parsed.encoder)):
            if done - reported >= _REPORT_EVERY or done == len(corpus):
                console.print(f"{done} of {len(corpus)} passages")
                reported = done
    except SdjaxError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
