"""What rounding the inputs of packed weights costs: KL divergence from float32, and greedy answers that change.

    python bench/input_bits.py [--model smollm2-135m] [--tokens 1024]

The text is the manual that comes with Python (`pydoc_data.topics`), each token decoded by itself by the C kernels. The
answers are to twenty questions, 40 tokens each, compared as text with those of float32 on the same weights. KLs are in
millionths of a nat for each token.
"""

import pydoc_data.topics
import warnings

import numpy as np
import torch

import common
import llamarium
from llamarium.inspect.forward import Memory, advance

QUESTIONS = (
    "What is the capital of France?", "Why is the sky blue?", "What is photosynthesis?",
    "Write a short poem about the sea.",
    "Who wrote Hamlet?", "What is the largest planet?", "Explain gravity to a child.", "What is 12 times 12?",
    "Name three fruits.", "What is the boiling point of water?", "Give me a recipe for pancakes.",
    "What is a transformer in machine learning?", "Translate 'good morning' into French.",
    "Who was the first person on the moon?", "What causes rain?", "List the days of the week.",
    "What is the speed of light?", "How do plants drink?", "What is an atom?", "Tell me a joke.",
)  # fmt: skip


def main() -> None:
    """Measure and report."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="with packed weights (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=1024, help="of the text (default %(default)s)")
    options = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    exact = llamarium.load(options.model, dtype="float32", device="cpu")
    ids = exact.tokenizer.encode("\n".join([*pydoc_data.topics.topics.values()][3:40]))[: options.tokens]
    with torch.no_grad():
        expected = exact.model(torch.tensor([ids]))[0].log_softmax(-1)
    answers = answers_of(exact)
    rows = []
    for bits in (8, 16):
        llama = llamarium.load(options.model, device="cpu", input_bits=bits)
        logprobs = logprobs_of(llama, ids)
        kl = (expected.exp() * (expected - logprobs)).sum(-1)
        num_same = sum(a == b for a, b in zip(answers, answers_of(llama), strict=True))
        top = (logprobs.argmax(-1) == expected.argmax(-1)).double().mean().item()
        row = {"bits": bits, "KL": 1e6 * kl.mean().item(), "99 % below": 1e6 * kl.quantile(0.99).item()}
        rows.append(row | {"same top-1": top, "same answers": f"{num_same} of {len(answers)}"})
    common.report(f"input-bits-{options.model}", options, rows, {"rows": rows})


def logprobs_of(llama: llamarium.Llama, ids: list[int]) -> torch.Tensor:
    """Return the log-probabilities after each token, float32, (len(ids), V)."""
    memory = Memory(llama.runner, len(ids))
    sequence, logits = memory.begin((), len(ids)), list[np.ndarray]()
    for token_id in ids:
        sequence.ids.append(token_id)
        logits.append(np.array(advance(llama.runner, memory.cache, [sequence])[0]))
    return torch.from_numpy(np.stack(logits)).float().log_softmax(-1)


def answers_of(llama: llamarium.Llama) -> list[str]:
    """Return the greedy answers."""
    dialogs = ([{"role": "user", "content": question}] for question in QUESTIONS)
    return [llama.chat(dialog, max_new_tokens=40, temperature=0).text for dialog in dialogs]


if __name__ == "__main__":
    main()
