"""Write web/src/engine/tokenizer/cutters.json, the page's pre-tokenizers.

    python tools/make_cutters.py

They are those of llamarium/tokenizer/backends/gguf_cutters.py; run it when that table changes.
"""

import json
from pathlib import Path

from llamarium.tokenizer.backends import gguf_cutters

FILE = Path(__file__).parents[1] / "web/src/engine/tokenizer/cutters.json"


def cutters_json() -> str:
    """Return the file's text."""
    cutters = [
        {
            "names": cutter.names.split(),
            "patterns": cutter.patterns,
            "whole_pieces": cutter.whole_pieces,
            "add_bos": cutter.add_bos,
        }
        for cutter in gguf_cutters.CUTTERS
    ]
    table = {"cutters": cutters, "others": sorted(gguf_cutters.OTHERS)}
    return json.dumps(table, ensure_ascii=False, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(cutters_json(), "utf-8")
