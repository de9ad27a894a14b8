"""The methods of a `Llama` that measure and inspect it, on its own runner. Torch-free."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Self

from llamarium.errors import InputError, show_value
from llamarium.inspect.inspected import Inspected, Prompt
from llamarium.keywords import shows_options
from llamarium.runtime.runner import CacheDtype

if TYPE_CHECKING:
    from llamarium.inspect.inspector import Inspector
    from llamarium.inspect.measures.divergence import Divergence
    from llamarium.inspect.measures.perplexity import Perplexity
    from llamarium.inspect.neighbors import Neighbors, Word
    from llamarium.inspect.next_tokens import NextStep
    from llamarium.inspect.score import Score
    from llamarium.inspect.trace import Trace


class Measured(Inspected):
    """Mixin with the measurements of a model."""

    def score(self, text: str) -> "Score":
        """Return log P(w_i | w_<i) for every token of `text`, their sum and the perplexity.

        >>> llama.score("Hello, world!").perplexity > 1
        True
        """
        from llamarium.inspect.score import score_text

        return score_text(self.runner, self.tokenizer, text)

    @shows_options()
    def perplexity(
        self,
        text: str,
        *,
        context: int | None = None,
        stride: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> "Perplexity":
        """Measure the perplexity of a text of any length, with a sliding window.

        >>> llama.perplexity("Hello, world! " * 50, context=64).num_tokens
        699

        Args:
            text: The text; BOS is added once if the vocabulary has one.
            context: Tokens per window; None means 2,048, or the model's whole context if that is shorter.
            stride: Tokens from one window to the next, up to `context`; None means half of it. Each token is scored
                once, with at least `context` - `stride` + 1 tokens before it if there are that many.
            progress: Called with (tokens done, total tokens).

        Raises:
            TokenizerError: If the text cannot be encoded.
            InputError: If the text has no token to score, or `context` or `stride` is out of range.
        """
        from llamarium.inspect.measures.perplexity import perplexity_of_text

        return perplexity_of_text(self.runner, self.tokenizer, text, context=context, stride=stride, progress=progress)

    @shows_options()
    def divergence(
        self,
        text: str,
        *,
        against: Self,
        context: int | None = None,
        stride: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> "Divergence":
        """Measure the KL divergence from another model's predictions: mean, percentile, and top-1 agreement.

        >>> packed = llamarium.load("shakespeare-char", quantize="Q8_0")
        >>> packed.divergence("To be, or not to be", against=llama).kl < 0.01
        True

        Args:
            text: As in `perplexity`.
            against: A model with the same vocabulary, such as the unquantized model in float32.
            context: As in `perplexity`.
            stride: As in `perplexity`.
            progress: As in `perplexity`.

        Raises:
            InputError: If the vocabularies differ, and as in `perplexity`.
        """
        from llamarium.inspect.measures.divergence import divergence_of_text
        from llamarium.tokenizer.compare import check_same_vocabulary

        if not isinstance(against, Measured):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"against is {show_value(against)}; expected another Llama")
        check_same_vocabulary(self, against, "cannot be compared")
        return divergence_of_text(
            self.runner, against.runner, self.tokenizer, text, context=context, stride=stride, progress=progress
        )

    def next_tokens(self, text: str, k: int = 10, steps: int = 1) -> "list[NextStep]":
        """Return the steps of greedy generation: the `k` most likely candidates and the chosen token, `steps` times.

        >>> len(llama.next_tokens("To be, or not to b", k=3)[0].candidates)
        3
        """
        from llamarium.inspect.next_tokens import follow_next_tokens

        return list(follow_next_tokens(self.runner, self.tokenizer, text, k=k, steps=steps, stop_ids=self.stop_ids))

    def neighbors(
        self, word: "Word", *, minus: "str | Sequence[Word]" = (), plus: "str | Sequence[Word]" = (), k: int = 10
    ) -> "Neighbors":
        """Rank embedding rows by cosine similarity to `word` - `minus` + `plus`.

        >>> len(llama.neighbors("a", k=3).neighbors)
        3
        """
        from llamarium.inspect.neighbors import neighbors

        return neighbors(self.runner, self.tokenizer, word, minus=minus, plus=plus, k=k)

    @shows_options()
    def trace(
        self,
        text: Prompt,
        *,
        names: Collection[str] | None = None,
        layers: Collection[int] | None = None,
        positions: Sequence[int] | None = None,
        budget_mb: float = 1024,
        kv_cache_dtype: CacheDtype = "auto",
    ) -> "Trace":
        """Return the named activations of one forward pass.

        >>> llama.trace("To be", names=["resid"], layers=[-1]).arrays["resid", 5].shape
        (5, 192)

        Args:
            text: Text, or token ids.
            names: Names from `llamarium.inspect.trace.ACTIVATIONS`; None for all.
            layers: Layers to keep; negative ones count from the last. None for all.
            positions: Token positions to keep; negative ones count from the last. None for all.
            budget_mb: Maximum size of the trace, in megabytes of 10^6 bytes.
            kv_cache_dtype: KV cache dtype.

        Raises:
            InputError: For invalid ids, names, layers or positions.
            ContextLengthError: If there are more ids than the context allows.
            MemoryBudgetError: If the trace would exceed the budget. Nothing is run then.
        """
        from llamarium.inspect.trace import trace

        ids = self.encode(text)
        return trace(
            self.runner, ids, names=names, layers=layers, positions=positions, budget_mb=budget_mb,
            kv_cache_dtype=kv_cache_dtype,
        )  # fmt: skip

    @shows_options()
    def trace_steps(
        self,
        prompt: Prompt,
        num_steps: int,
        *,
        names: Collection[str] | None = None,
        layers: Collection[int] | None = None,
        budget_mb: float = 1024,
    ) -> "Iterator[Trace]":
        """Return the named activations of each step of a greedy answer; options as in `trace`.

        >>> [trace.positions for trace in llama.trace_steps("To be", 2, names=["logits"])]
        [(5,), (6,)]
        """
        from llamarium.inspect.trace import trace_steps

        ids = self.encode(prompt)
        return trace_steps(self.runner, ids, num_steps, names=names, layers=layers, budget_mb=budget_mb)

    @property
    def inspect(self) -> "Inspector[Self]":
        """Analyses of a forward pass; see `llamarium.inspect.inspector.Inspector`.

        >>> len(llama.inspect.lens("To be", k=1).layers)  # after attention and after the MLP of each of six
        12
        """
        from llamarium.inspect.inspector import Inspector

        return Inspector(self)
