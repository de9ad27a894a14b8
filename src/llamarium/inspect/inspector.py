"""Inspections of a model, as methods: `llama.inspect`.

Each method runs what it needs through the runner that answers requests, and returns plain data. With a trace at hand,
call the functions behind them.
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
from llamarium.sampling.params import GenerationOptions, SamplingParams
from llamarium.tokenizer.compare import check_same_vocabulary

if TYPE_CHECKING:
    from llamarium.inspect.interventions.edits import Edit
    from llamarium.inspect.interventions.effect import Effect
    from llamarium.inspect.interventions.experiments import Experiment
    from llamarium.inspect.interventions.patching import PatchGrid, PatchPart
    from llamarium.inspect.probes.learning import Lesson, Optimizer
    from llamarium.model import LlamaForCausalLM

Word = str | int
"""A token: its id, or a word that is a single token, looked up with a space before it first."""


LlamaT = TypeVar("LlamaT", bound=Inspected)


class Inspector(Generic[LlamaT]):
    """Inspections of passes of the model `llama`.

    A prompt is text, or token ids. A word is a token's id, or text that is a single token. Negative layers and
    positions count from the last; where `layers` or `positions` is None, all are meant. `k` is how many are returned.
    An invalid argument is an `InputError` in every method; a prompt longer than the context is a `ContextLengthError`.
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
        """Return what the model would predict from the stream after attention and after the MLP of each layer.

        The probability and the rank of `word` are reported at each place; `after` restricts it to one half of each
        layer.
        """
        check_choice("after", after, (None, *get_args(Half)))
        llama, chosen_id = self._llama, None if word is None else self._token(word)
        names = ["resid_mid", "resid"] if after is None else [STREAMS[after]]
        seen = trace(llama.runner, llama.encode(text), names=names, layers=layers, positions=positions)
        return lens(llama.runner, seen, k, llama.optional_tokenizer, chosen_id=chosen_id)

    def heads(self, text: Prompt, layer: int, *, positions: Sequence[int] | None = None) -> heads.HeadsJoined:
        """Return what each head of a layer adds to the stream of some tokens, through its columns of `o_proj`."""
        llama = self._llama
        seen = trace(llama.runner, llama.encode(text), names=heads.NAMES, layers=[layer], positions=positions)
        return heads.heads_joined(llama.runner, seen, layer)

    def head_kinds(
        self, prompt: Prompt | None = None, *, num_tokens: int = 32, seed: int = 0
    ) -> head_kinds_of.HeadKinds:
        """Return how much of each head's attention goes to the previous token, the first one, and by induction.

        Without a prompt it is a text of repeats: `num_tokens` random tokens, which `seed` chooses, and the same ones
        again. MemoryBudgetError if the patterns of all heads take more than a gigabyte.
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
        """Divide the logit of a word after a position among the additions to the stream.

        With `against` it is the difference of two logits: what favours the one word over the other.
        """
        llama, target_id = self._llama, self._token(word)
        against_id = None if against is None else self._token(against)
        seen = trace(llama.runner, llama.encode(text), names=attribution.NAMES, positions=[position])
        return attribution.attribute(llama.runner, seen, target_id, position=position, against_id=against_id)

    def probe(
        self,
        examples: "probe_tasks.ProbeTask | Sequence[tuple[Prompt, str, str]]",
        *,
        ridge: float = 1.0,
        num_splits: int = 5,
        seed: int = 0,
    ) -> linear_probes.LinearProbe:
        """Return how well a linear map reads a property from the stream of a token, before and after each layer.

        Args:
            examples: The name of a bundled task; or (prompt, label, group), where the last token's stream is read, and
                a group, such as the examples of one word, is fitted or tested on as a whole.
            ridge: The penalty on the map's length, for standardised streams.
            num_splits: Random halves of the groups that are tested on in turn, no two alike; all where there are fewer.
            seed: Chooses them.
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
        """Return how surprised the model is by a text behind a wrong token in it, by distance, in the mean.

        Args:
            texts: English sentences that are bundled, where left out.
            kind: Whether the wrong token is the likeliest one, or random.
            num_tokens: The distances: 1 to this one.
            stride: Every so many tokens of a text are replaced, one at a time, from the fifth on.
            seed: Chooses random tokens.
        """
        llama = self._llama
        return after_error.surprise_after_error(
            llama.runner, [llama.encode(text) for text in texts], kind=kind, num_tokens=num_tokens, stride=stride,
            seed=seed,
        )  # fmt: skip

    def neurons(self, text: Prompt, layer: int, *, position: int = -1, k: int = 10) -> neurons.Neurons:
        """Return the neurons of a layer that fire most for a token, with their values on every token of the text."""
        llama = self._llama
        seen = trace(llama.runner, llama.encode(text), names=neurons.NAMES, layers=[layer])
        return neurons.top_neurons(llama.config, seen, layer, position=position, k=k)

    def learn(
        self,
        text: Prompt,
        *,
        optimizer: "Optimizer" = "SGD",
        learning_rate: float = 1e-2,
        k: int = 10,
        unpack: bool = False,
    ) -> "Lesson":
        """Take one step of training on a text, on a copy: losses, gradient, and the predictions after it.

        Args:
            text: The text, of at least two tokens.
            optimizer: torch's, with its defaults but for the rate and no weight decay.
            learning_rate: Above 0.
            k: How many of the most probable next tokens are returned.
            unpack: Unpack the copy of a model with packed weights, which cannot learn as they are; adapters are merged.

        Raises:
            InputError: For a text of one token, or a model with packed weights and no `unpack`.
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
        **options: Unpack[GenerationOptions],
    ) -> SamplerSteps:
        """Follow step by step how the next token of an answer is chosen: the one that `generate` gives.

        Prompt, options and errors are those of `generate`; without a seed it is a fresh one. `answer_ids` are the
        tokens of the answer so far, and `k` candidates are kept after each step.
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
        """Return the same model with its weights stored otherwise, or with another head, made in memory.

        Names and errors are those of `interventions.variants.variant_of`; `seed` is of random rows.
        """

        def build() -> "LlamaForCausalLM":
            need_torch("the modules of a variant")
            return variant_of(self._llama.model, name, seed=seed)

        other = copy.copy(self._llama)
        in_c = None if has_torch() else variant_in_c(other.runner, name, seed=seed)
        other.loaded = LoadedModel.of_modules(build()) if in_c is None else LoadedModel(in_c, build)
        other.config = other.loaded.config
        return other

    def compare(self, text: Prompt, against: LlamaT, *, k: int = 5) -> comparison.Comparison:
        """Compare the pass of another model over the same text: streams layer by layer, and predictions.

        `against` is the reference: a variant of this one, an edited one, or a checkpoint of the same training run.
        InputError if shapes or vocabularies differ.
        """
        llama, ids = self._llama, self._llama.encode(text)
        if not isinstance(against, type(llama)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"against is {show_value(against)}; expected another Llama")
        if llama.optional_tokenizer is not against.optional_tokenizer:
            check_same_vocabulary(llama, against, "cannot be compared")
        pair = (trace(one.runner, ids, names=comparison.NAMES) for one in (llama, against))
        return comparison.compare_passes(*pair, k=k, tokenizer=llama.optional_tokenizer)

    def token_cost(self, prompt: Prompt) -> TokenCost:
        """Count what the last token of a prompt costs, with the KV cache and without it.

        Errors are those of `probes.cost.token_cost`.
        """
        return token_cost(self._llama.runner, self._llama.encode(prompt))

    @contextmanager
    def edited(self, *edits: "Edit", experiment: "Experiment | None" = None) -> Generator[LlamaT]:
        """Yield the same model with edits, for one thread: it generates and is traced by PyTorch, in float32.

        Edits are those of `llamarium.inspect.interventions.edits`, in order; an experiment is another mask or rotation.
        The model itself and its other users are unaffected.
        """
        need_torch("an edit")
        from llamarium.inspect.interventions.edits import edited

        with edited(self._llama.model, edits, experiment) as model:
            other = copy.copy(self._llama)
            other.loaded = LoadedModel.of_modules(model)
            yield other

    def effect(
        self, text: Prompt, *edits: "Edit", word: Word | None = None, position: int = -1, k: int = 10
    ) -> "Effect":
        """Compare the next token after a position without edits and with them, both in float32.

        The edits are applied in order; `word` is reported whatever its rank.
        AnswerError if the logits with the edits are not finite.
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
        """Trace a text with another mask or rotation; options as for `Llama.trace`."""
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
        """Return the edit that adds the difference of two prompts to the stream after a layer, for `edited`.

        The streams are those at the prompts' last tokens. A negative `scale` steers away; `positions` are where it is
        added.
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
        """Put activations of a second prompt, `source`, into the pass of the first, at each layer and token.

        What is measured is the logit of `word` after the last token, less that of `against`.

        Returns:
            The grid; `cells()` runs it, and yields each cell when it is done.

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
        """Return the id of a word's token; InputError if it is no single token."""
        if not isinstance(word, str | int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"the word is {type(word).__name__}; expected text, or a token id")
        if isinstance(word, int):
            return check_token(word, self._llama.config.vocab_size, "the token")
        return tokens_of_word(self._llama.tokenizer, word)[0]
