"""An encoder-decoder from the Llama's own blocks, beside the decoder-only model that does the same work.

The task is a small translation, from digits to words:

    407  ->  four hundred seven

The encoder-decoder, as in "Attention Is All You Need", reads the digits with one stack and writes with another. The
encoder is a `LlamaModel` whose tokens see each other in both directions. A decoder layer attends twice: to what has
been written, and to what the encoder has made of the digits (`CrossAttend`).

The decoder-only model, as every Llama is, reads and writes one sequence, "407=four hundred seven.", and learns the part
after the "=" only.

Both learn from 900 of the numbers below 1000, and are asked for the 100 others.

    python examples/encoder_decoder.py
"""

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamarium.attention import CausalAttend, CrossAttend
from llamarium.config import ModelConfig
from llamarium.model import LlamaForCausalLM
from llamarium.model.attention import LlamaAttention
from llamarium.model.llama import LlamaModel
from llamarium.model.mlp import LlamaMLP
from llamarium.model.norm import LlamaRMSNorm
from llamarium.model.rope import LlamaRotaryEmbedding, Rotary
from llamarium.train.optim import schedule

# --- the task ---------------------------------------------------------------------------------------------------------

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TENS = "- - twenty thirty forty fifty sixty seventy eighty ninety".split()

PAD, BEGIN, END = "_", "=", "."
ALPHABET = PAD + BEGIN + END + " 0123456789abcdefghijklmnopqrstuvwxyz"
LONGEST = len("seven hundred seventy seven")


def in_words(number: int) -> str:
    """Return a number below 1000 in English."""
    if number >= 100:
        rest = f" {in_words(number % 100)}" if number % 100 else ""
        return f"{ONES[number // 100]} hundred{rest}"
    if number >= 20:
        return TENS[number // 10] + (f" {ONES[number % 10]}" if number % 10 else "")
    return ONES[number]


def encode(texts: list[str]) -> Tensor:
    """Return ids (B, T), padded on the right to the longest text."""
    width = max(map(len, texts))
    return torch.tensor([[ALPHABET.index(c) for c in text.ljust(width, PAD)] for text in texts])


def decode(ids: Tensor) -> str:
    """Return the text of one row, up to its end."""
    return "".join(ALPHABET[i] for i in ids.tolist()).partition(END)[0]


# --- the encoder-decoder ----------------------------------------------------------------------------------------------

NO_ROTATION = Rotary(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))  # positions of two texts are not comparable


class DecoderLayer(nn.Module):
    """A Llama's layer with one attention more: look at what is written, look at the source, think."""

    def __init__(self, config: ModelConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_idx)
        self.cross_attn = LlamaAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.norms = nn.ModuleList(LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3))

    def forward(self, x_BTD: Tensor, rotary: Rotary, written: CausalAttend, source: CrossAttend) -> Tensor:
        """Return the stream after this layer, (B, T, D)."""
        x_BTD = x_BTD + self.self_attn(self.norms[0](x_BTD), rotary, written)
        x_BTD = x_BTD + self.cross_attn(self.norms[1](x_BTD), NO_ROTATION, source)
        return x_BTD + self.mlp(self.norms[2](x_BTD))


class EncoderDecoder(nn.Module):
    """Two stacks; `config` is the shape of each."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.encoder = LlamaModel(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def read(self, source_BS: Tensor) -> CrossAttend:
        """Encode the source, and return what lets a decoder look at it."""
        is_text_BS = source_BS != ALPHABET.index(PAD)
        both_ways = CausalAttend(segments_BT=is_text_BS.long(), bidirectional=True)  # padding is a segment of its own
        hidden_BSD = self.encoder(source_BS, torch.arange(source_BS.shape[1])[None], both_ways)
        memory = [layer.cross_attn.project(hidden_BSD)[1:] for layer in self.layers]  # k and v, for each layer's own
        return CrossAttend(memory, is_text_BS)

    def write(self, target_BT: Tensor, source: CrossAttend) -> Tensor:
        """Return the logits of what follows each token of the target."""
        x_BTD = self.embed_tokens(target_BT)
        rotary = self.rotary_emb(torch.arange(target_BT.shape[1])[None], x_BTD.dtype)
        for layer in self.layers:
            x_BTD = layer(x_BTD, rotary, CausalAttend(), source)
        return self.head(self.norm(x_BTD))


# --- learning and asking ----------------------------------------------------------------------------------------------


def loss_with_encoder(model: EncoderDecoder, numbers: list[int]) -> Tensor:
    """Return the mean of -log P over the letters of the words."""
    target_BT = encode([BEGIN + in_words(n) + END for n in numbers])
    logits_BTV = model.write(target_BT[:, :-1], model.read(encode([str(n) for n in numbers])))
    return F.cross_entropy(logits_BTV.flatten(0, 1), target_BT[:, 1:].flatten(), ignore_index=ALPHABET.index(PAD))


def loss_of_one_sequence(model: LlamaForCausalLM, numbers: list[int]) -> Tensor:
    """Return the same for the model that sees one sequence."""
    ids_BT = encode([f"{n}{BEGIN}{in_words(n)}{END}" for n in numbers])
    labels_BT = ids_BT[:, 1:].clone()
    for row, number in enumerate(numbers):
        labels_BT[row, : len(str(number))] = ALPHABET.index(PAD)  # the digits and the "=" are given, not learned
    return F.cross_entropy(model(ids_BT[:, :-1]).flatten(0, 1), labels_BT.flatten(), ignore_index=ALPHABET.index(PAD))


@torch.no_grad()
def answer_with_encoder(model: EncoderDecoder, numbers: list[int]) -> list[str]:
    """Write the most probable letters, one after another."""
    source = model.read(encode([str(n) for n in numbers]))
    target_BT = encode([BEGIN] * len(numbers))
    for _ in range(LONGEST + 1):
        next_B1 = model.write(target_BT, source)[:, -1:].argmax(-1)
        target_BT = torch.cat((target_BT, next_B1), dim=1)
    return [decode(row) for row in target_BT[:, 1:]]


@torch.no_grad()
def answer_in_one_sequence(model: LlamaForCausalLM, numbers: list[int]) -> list[str]:
    """Do the same by continuing the sequence."""
    answers = {}
    for digits in {len(str(n)) for n in numbers}:  # prompts of one length need no padding
        chosen = [n for n in numbers if len(str(n)) == digits]
        ids_BT = encode([f"{n}{BEGIN}" for n in chosen])
        for _ in range(LONGEST + 1):
            ids_BT = torch.cat((ids_BT, model(ids_BT)[:, -1:].argmax(-1)), dim=1)
        answers |= {n: decode(row[digits + 1 :]) for n, row in zip(chosen, ids_BT, strict=True)}
    return [answers[n] for n in numbers]


def train(model: nn.Module, loss_of: Callable[..., Tensor], numbers: list[int], steps: int) -> None:
    """Learn from batches of 32 numbers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    fall = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: schedule(step, name="cosine", warmup_steps=20, num_steps=steps, final_ratio=0.05)
    )
    order = random.Random(0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, order.sample(numbers, 32)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        fall.step()


def main() -> None:
    """Train both, and print what they have learned."""
    parser = argparse.ArgumentParser(description="Translate digits to words with and without an encoder.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--hidden-size", type=int, default=64)
    args = parser.parse_args()

    numbers = random.Random(1).sample(range(1000), 1000)
    learned, asked = numbers[:900], numbers[900:]
    stack = ModelConfig(
        vocab_size=len(ALPHABET), hidden_size=args.hidden_size, intermediate_size=2 * args.hidden_size,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=args.hidden_size // 4,
        rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    models = (
        ("encoder-decoder", EncoderDecoder(stack), loss_with_encoder, answer_with_encoder),
        ("decoder-only", LlamaForCausalLM(replace(stack, num_hidden_layers=4)), loss_of_one_sequence,
         answer_in_one_sequence),
    )  # fmt: skip
    print(f"{'model':<16} {'parameters':>10} {'loss, learned':>14} {'loss, new':>10} {'exact':>6} {'seconds':>8}")
    for name, model, loss_of, answer in models:
        for parameter in model.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.05)
        begin = time.perf_counter()
        train(model, loss_of, learned, args.steps)
        seconds = time.perf_counter() - begin
        with torch.no_grad():
            losses = [float(loss_of(model, part)) for part in (learned, asked)]
        answers = answer(model, asked)
        exact = sum(found == in_words(n) for found, n in zip(answers, asked, strict=True)) / len(asked)
        size = sum(p.numel() for p in model.parameters())
        print(f"{name:<16} {size:>10,} {losses[0]:>14.4f} {losses[1]:>10.4f} {exact:>6.0%} {seconds:>8.1f}")
        print(f"    {asked[0]} -> {answers[0]}")


if __name__ == "__main__":
    main()
