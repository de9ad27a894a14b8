"""Inspections of a model, as methods: `llama.inspect`.

Each method runs a forward pass on the model's own runner and returns plain data. To analyze an existing trace, call the
underlying functions.
"""

import copy
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar, Unpack, get_args

from llamarium.errors import InputError, SamplingError, check_choice, show_value
from llamarium.extras import has_torch, need_torch
from llamarium.generation.text_model import compiled
from llamarium.inspect.inspected import Inspected, Prompt
from llamarium.inspect.interventions.variants import VariantName, variant_in_c, variant_of
from llamarium.inspect.lens import STREAMS, Half, Lens, lens
from llamarium.inspect.measures import after_error, comparison, probe_tasks
from llamarium.inspect.measures import head_kinds as head_kinds_of
from llamarium.inspect.measures import linear_probe as linear_probes
from llamarium.inspect.probes import attribution, heads, neurons
from llamarium.inspect.probes.cost import TokenCost, token_cost
from llamarium.inspect.probes.sampling import SamplerSteps, sampler_steps
from llamarium.inspect.tokens import check_token, tokens_of_word
from llamarium.inspect.trace import Trace, trace
from llamarium.keywords import shows_options
from llamarium.runtime.loaded_model import LoadedModel
from llamarium.sampling.keywords import SamplingKeywords
from llamarium.sampling.params import SamplingParams
from llamarium.tokenizer.compare import check_same_vocabulary

if TYPE_CHECKING:
    from llamarium.inspect.interventions.edits import Edit
    from llamarium.inspect.interventions.effect import Effect
    from llamarium.inspect.interventions.experiments import Experiment
    from llamarium.inspect.interventions.patching import PatchGrid, PatchPart
    from llamarium.inspect.probes.learning import Lesson, Optimizer
    from llamarium.model import LlamaForCausalLM

Word = str | int
"""A token: its id, or a word that is a single token; a leading space is tried first."""


LlamaT = TypeVar("LlamaT", bound=Inspected)


class Inspector(Generic[LlamaT]):
    """Inspections of the model `llama`.

    A prompt is text or token ids. A word is a token id, or text that is a single token. Negative layers and positions
    count from the last; None for `layers` or `positions` means all. `k` is the number of results. Every method raises
    `InputError` for an invalid argument and `ContextLengthError` for a prompt longer than the context.
    """

    def __init__(self, llama: LlamaT) -> None:
        self._llama = llama

    def lens(
        self,
        text: Prompt,
        word: Word | None = None,
        *,
        k: int = 5,
        layers: Collection[int] | None = None,
        positions: Sequence[int] | None = None,
        after: Half | None = None,
    ) -> Lens:
        """Apply the logit lens: predict the next token from the residual stream after each attention and each MLP.

        With `word`, its probability and rank are included. `after` restricts the lens to the stream after "attention"
        or after "mlp".
        """
        check_choice("after", after, (None, *get_args(Half)))
        llama, chosen_id = self._llama, None if word is None else self._token(word)
        names = ["resid_mid", "resid"] if after is None else [STREAMS[after]]
        traced = trace(llama.runner, llama.encode(text), names=names, layers=layers, positions=positions)
        return lens(llama.runner, traced, k, llama.optional_tokenizer, chosen_id=chosen_id)

    def heads(self, text: Prompt, layer: int, *, positions: Sequence[int] | None = None) -> heads.HeadsJoined:
        """Return what each attention head of a layer adds to the residual stream, through its columns of `o_proj`."""
        llama = self._llama
        traced = trace(llama.runner, llama.encode(text), names=heads.NAMES, layers=[layer], positions=positions)
        return heads.heads_joined(llama.runner, traced, layer)

    def head_kinds(
        self, prompt: Prompt | None = None, *, num_tokens: int = 32, seed: int = 0
    ) -> head_kinds_of.HeadKinds:
        """Measure each head's attention to the previous token, to the first token, and by induction.

        The default prompt is a sequence of `num_tokens` random tokens (from `seed`), repeated once. MemoryBudgetError
        if the attention weights of all heads take more than a gigabyte.
        """
        llama = self._llama
        if prompt is None:
            ids = [*llama.encode(""), *head_kinds_of.repeats(llama.config.vocab_size, num_tokens, seed)]
        else:
            ids = llama.encode(prompt)
        return head_kinds_of.head_kinds(trace(llama.runner, ids, names=head_kinds_of.NAMES))

    def attribution(
        self, text: Prompt, word: Word, *, against: Word | None = None, position: int = -1
    ) -> attribution.Attribution:
        """Attribute the logit of a word after a position to the components that add to the residual stream.

        With `against`, the difference between the two words' logits is attributed.
        """
        llama, target_id = self._llama, self._token(word)
        against_id = None if against is None else self._token(against)
        traced = trace(llama.runner, llama.encode(text), names=attribution.NAMES, positions=[position])
        return attribution.attribute(llama.runner, traced, target_id, position=position, against_id=against_id)

    def probe(
        self,
        examples: "probe_tasks.ProbeTask | Sequence[tuple[Prompt, str, str]]",
        *,
        ridge: float = 1.0,
        num_splits: int = 5,
        seed: int = 0,
    ) -> linear_probes.LinearProbe:
        """Measure how well a linear probe predicts a label from the residual stream, before and after each layer.

        Args:
            examples: Name of a bundled task, or examples (prompt, label, group). The stream of the last token is
                read. All examples of a group, such as one word's, are in the training or in the test half.
            ridge: Ridge penalty on the probe's weights, for standardized streams.
            num_splits: Number of different random splits of the groups into halves; all splits if there are fewer.
            seed: Seed of the splits.
        """
        llama = self._llama
        if isinstance(examples, str):
            chosen = probe_tasks.examples_of(examples, llama.tokenizer)
        else:
            chosen = [linear_probes.Example(llama.encode(text), label, group) for text, label, group in examples]
        return linear_probes.linear_probe(llama.runner, chosen, ridge=ridge, num_splits=num_splits, seed=seed)

    def surprise_after_error(
        self,
        texts: Sequence[Prompt] = after_error.TEXTS,
        *,
        kind: after_error.ErrorKind = "likely",
        num_tokens: int = 16,
        stride: int = 4,
        seed: int = 0,
    ) -> after_error.AfterError:
        """Measure how much a wrong token raises the surprise of the tokens after it, by distance, averaged over places.

        Args:
            texts: Texts; the default is a bundled set of English sentences.
            kind: The wrong token: "likely", the most likely other token, or "random".
            num_tokens: Largest distance that is measured; distances start at 1.
            stride: Distance between the replaced tokens; one is replaced at a time, beginning with the fifth.
            seed: Seed of the random tokens.
        """
        llama = self._llama
        return after_error.surprise_after_error(
            llama.runner, [llama.encode(text) for text in texts], kind=kind, num_tokens=num_tokens, stride=stride,
            seed=seed,
        )  # fmt: skip

    def neurons(self, text: Prompt, layer: int, *, position: int = -1, k: int = 10) -> neurons.Neurons:
        """Return the neurons of a layer with the largest activations at a position, with their values on all tokens."""
        llama = self._llama
        traced = trace(llama.runner, llama.encode(text), names=neurons.NAMES, layers=[layer])
        return neurons.top_neurons(llama.config, traced, layer, position=position, k=k)

    def learn(
        self,
        text: Prompt,
        *,
        optimizer: "Optimizer" = "SGD",
        learning_rate: float = 1e-2,
        k: int = 10,
        unpack: bool = False,
    ) -> "Lesson":
        """Take one training step on a copy of the model; return losses, gradients, and the predictions afterwards.

        Args:
            text: Text of at least two tokens.
            optimizer: Name of a torch optimizer, used with its defaults except the learning rate and no weight decay.
            learning_rate: Learning rate, above 0.
            k: Number of most likely next tokens to return.
            unpack: Dequantize the copy of a model with packed weights, which cannot be trained; merges adapters.

        Raises:
            InputError: For a text of one token, or a model with packed weights without `unpack`.
        """
        need_torch("a step of training")
        from llamarium.inspect.probes.learning import learn

        llama = self._llama
        return learn(
            llama.model, llama.encode(text), optimizer=optimizer, learning_rate=learning_rate, k=k,
            tokenizer=llama.optional_tokenizer, unpack=unpack,
        )  # fmt: skip

    @shows_options(SamplingParams, error=SamplingError)
    def sampler_steps(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        answer_ids: Sequence[int] = (),
        k: int = 10,
        **options: Unpack[SamplingKeywords],
    ) -> SamplerSteps:
        """Return the steps of the sampler that choose the next token, the same token as in `generate`.

        For prompt, options and errors see `generate`; without a seed a random one is used. `answer_ids` are the tokens
        generated so far. `k` candidates are kept after each step.
        """
        llama, params = self._llama, self._llama.sampling_params(params, **options)
        grammar, stops = compiled(llama, params), {*llama.stop_ids, *params.stop_token_ids}
        return sampler_steps(
            llama.runner,
            llama.encode(prompt),
            params,
            answer_ids=answer_ids,
            constraint=None if grammar is None else grammar.begin(stops),
            stops=stops,
            k=k,
            tokenizer=llama.optional_tokenizer,
        )

    def variant(self, name: VariantName, *, seed: int = 0) -> LlamaT:
        """Return a variant of the model, made in memory: quantized otherwise, or with another head.

        For names and errors see `interventions.variants.variant_of`; `seed` is for random rows.
        """

        def build() -> "LlamaForCausalLM":
            need_torch("the modules of a variant")
            return variant_of(self._llama.model, name, seed=seed)

        variant = copy.copy(self._llama)
        in_c = None if has_torch() else variant_in_c(variant.runner, name, seed=seed)
        variant.loaded = LoadedModel.of_modules(build()) if in_c is None else LoadedModel(in_c, build)
        variant.config = variant.loaded.config
        return variant

    def compare(self, text: Prompt, against: LlamaT, *, k: int = 5) -> comparison.Comparison:
        """Compare the forward pass with that of another model on the same text: residual streams and predictions.

        `against` is the reference model: a variant, an edited model, or another checkpoint of the same training run.
        InputError if shapes or vocabularies differ.
        """
        llama, ids = self._llama, self._llama.encode(text)
        if not isinstance(against, type(llama)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"against is {show_value(against)}; expected another Llama")
        if llama.optional_tokenizer is not against.optional_tokenizer:
            check_same_vocabulary(llama, against, "cannot be compared")
        pair = (trace(model.runner, ids, names=comparison.NAMES) for model in (llama, against))
        return comparison.compare_passes(*pair, k=k, tokenizer=llama.optional_tokenizer)

    def token_cost(self, prompt: Prompt) -> TokenCost:
        """Count the operations for the last token of a prompt, with and without the KV cache.

        For errors see `probes.cost.token_cost`.
        """
        return token_cost(self._llama.runner, self._llama.encode(prompt))

    @contextmanager
    def edited(self, *edits: "Edit", experiment: "Experiment | None" = None) -> Generator[LlamaT]:
        """Yield the model with edits applied, in PyTorch and float32, for use in one thread.

        Edits are those of `llamarium.inspect.interventions.edits`, applied in order; an experiment replaces the
        attention mask or the rotation. The original model is unaffected.
        """
        need_torch("an edit")
        from llamarium.inspect.interventions.edits import edited

        with edited(self._llama.model, edits, experiment) as model:
            copied = copy.copy(self._llama)
            copied.loaded = LoadedModel.of_modules(model)
            yield copied

    def effect(
        self, text: Prompt, *edits: "Edit", word: Word | None = None, position: int = -1, k: int = 10
    ) -> "Effect":
        """Compare the predictions after a position without and with edits, both in float32.

        Edits are applied in order. `word` is included whatever its rank. AnswerError if the logits with the edits are
        not finite.
        """
        need_torch("an edit")
        from llamarium.inspect.interventions.edits import effect_of

        llama, chosen_id = self._llama, None if word is None else self._token(word)
        ids, tokenizer = llama.encode(text), llama.optional_tokenizer
        return effect_of(
            llama.model, ids, edits, position=position, k=k, chosen_id=chosen_id, tokenizer=tokenizer,
            answering=llama.runner,
        )  # fmt: skip

    def trace_experiment(
        self,
        text: Prompt,
        experiment: "Experiment",
        *,
        names: Collection[str] | None = None,
        layers: Collection[int] | None = None,
        positions: Sequence[int] | None = None,
        budget_mb: float = 1024,
    ) -> Trace:
        """Trace a text with another attention mask or rotation; for the options see `Llama.trace`."""
        need_torch("an experiment")
        from llamarium.inspect.interventions.edits import edited
        from llamarium.inspect.interventions.experiments import trace_experiment

        ids = self._llama.encode(text)
        with edited(self._llama.model, experiment=experiment) as model:
            return trace_experiment(
                model, ids, experiment, names=names, layers=layers, positions=positions, budget_mb=budget_mb
            )

    def steer(
        self, toward: Prompt, away: Prompt, layer: int, *, scale: float = 1.0, positions: Iterable[int] | None = None
    ) -> "Edit":
        """Return an edit, for `edited`, that adds the difference of two prompts' residual streams after a layer.

        The streams are those of the prompts' last tokens. A negative `scale` steers in the opposite direction;
        `positions` are the tokens that it is added to.
        """
        need_torch("an edit")
        from llamarium.inspect.interventions.edits import steer

        llama = self._llama
        pair = llama.encode(toward), llama.encode(away)
        return steer(llama.model, *pair, layer, scale=scale, positions=positions)

    def patch_grid(
        self,
        base: Prompt,
        source: Prompt,
        word: Word,
        *,
        against: Word | None = None,
        part: "PatchPart" = "residual",
        layers: Collection[int] | None = None,
        positions: Sequence[int] | None = None,
    ) -> "PatchGrid":
        """Patch activations of the prompt `source` into the forward pass of `base`, for each layer and token.

        The result is the logit of `word` after the last token, minus that of `against`.

        Returns:
            The grid; `cells()` computes it and yields each cell.

        Raises:
            InputError: For prompts of different lengths.
            MemoryBudgetError: If their activations take more than a gigabyte.
        """
        need_torch("a patch")
        from llamarium.inspect.interventions.patching import PatchGrid

        llama, target_id = self._llama, self._token(word)
        return PatchGrid(
            llama.model,
            llama.encode(base),
            llama.encode(source),
            target_id,
            against_id=None if against is None else self._token(against),
            part=part,
            layers=layers,
            positions=positions,
            answering=llama.runner,
        )

    def _token(self, word: Word) -> int:
        """Return the token id of a word; InputError if it is not a single token."""
        if not isinstance(word, str | int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"the word is {type(word).__name__}; expected text, or a token id")
        if isinstance(word, int):
            return check_token(word, self._llama.config.vocab_size, "the token")
        return tokens_of_word(self._llama.tokenizer, word)[0]
