"""Going on from a model: what a learning rate and a share of the old text cost and gain.

    python bench/going_on.py --threads 1

`letters` (78,208 parameters, which has read Shakespeare's plays) goes on with the manual of Python, reduced to the
characters that it knows, by `pretrain -m letters`. Measured are the losses on the held-out ends of both texts, before
and after; with `--replay` a part of the rows is Shakespeare's again, a mixture with weights.
"""

import tempfile
from pathlib import Path
from typing import Any

import common
import llamarium
from llamarium.datasets.sources import read_documents
from llamarium.model import LlamaForCausalLM
from llamarium.train.config import PretrainConfig
from llamarium.train.pretrain import prepare
from llamarium.train.step import measure

MODEL, OLD = "letters", "shakespeare"
FIXED: Any = {"model": MODEL, "context": 128, "device": "cpu", "precision": "float32", "validation": 0.1}


def write_manual(path: Path) -> str:
    """Write the manual with no other characters than the model's."""
    tokenizer = llamarium.load_tokenizer(MODEL)
    characters = {tokenizer.decode([i]) for i in range(tokenizer.vocab_size)}
    path.write_text("\n".join("".join(c for c in text if c in characters) for text in read_documents(None)))
    return str(path)


def losses(model: LlamaForCausalLM, new: str, folder: Path) -> dict[str, float]:
    """Return the loss on the end of each text, in nats a character."""
    loss_of = {}
    for name, data in (("new", new), ("old", OLD)):
        validation = prepare(PretrainConfig(data=data, **FIXED), folder / "data").validation
        assert validation is not None
        loss_of[name] = measure(model, validation, batch_rows=16, max_rows=200).loss
    return loss_of


def main() -> None:
    """Go on at each rate, and with each share of the old text."""
    parser = common.parser(__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-3, 1e-3, 3e-4, 1e-4, 3e-5])
    parser.add_argument("--replay", type=float, nargs="+", default=[0.0, 0.25])
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    table: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        new = write_manual(folder / "manual.txt")
        before = losses(llamarium.load(MODEL, device="cpu").model, new, folder)
        table.append({"rate": "before", "old share": "-", **{name: f"{loss:.3f}" for name, loss in before.items()}})
        for rate in options.rates:
            for share in options.replay:
                data: Any = {new: 1 - share, OLD: share} if share else new
                ending = llamarium.pretrain(
                    folder / f"{rate}-{share}", data=data, learning_rate=rate, steps=options.steps, batch_rows=8,
                    threads=options.threads, sample_every=0, eval_every=options.steps, save_every=options.steps,
                    **FIXED,
                )  # fmt: skip
                after = losses(llamarium.load(ending.checkpoint, device="cpu").model, new, folder)
                row = {"rate": f"{rate:g}", "old share": f"{share:g}"}
                table.append({**row, **{name: f"{loss:.3f}" for name, loss in after.items()}})
                print(table[-1], flush=True)
    common.report("going-on", options, table, {"losses": table})


if __name__ == "__main__":
    main()
