"""The methods of `Llama` that encode text and resolve sampling parameters. Torch-free."""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from llamarium.errors import InputError, SamplingError, show_value
from llamarium.generation.dialog import CHAT_MAX_TOKENS
from llamarium.generation.options import with_params
from llamarium.generation.text_model import TextModel
from llamarium.keywords import shows_options
from llamarium.sampling.keywords import SamplingKeywords
from llamarium.sampling.params import SamplingParams


class TextMethods(TextModel):
    """A mixin that encodes prompts and resolves options; the subclass provides the model."""

    generation_config: Mapping[str, Any]

    def encode(self, prompt: Any) -> list[int]:
        """Return a prompt's token ids: text is encoded, with BOS if the model has one; ids are returned unchanged.

        >>> smollm2.encode("Hello, world!")
        [19556, 28, 905, 17]
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Sequence):
            raise InputError(f"the prompt is {type(prompt).__name__}; expected text or a list of token ids")
        for token_id in prompt:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise InputError(f"the prompt contains {show_value(token_id)}; expected integer token ids")
        return list(prompt)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens.

        >>> smollm2.decode([19556, 28, 905, 17])
        'Hello, world!'
        """
        return self.tokenizer.decode(ids)

    @shows_options(SamplingParams, error=SamplingError)
    def sampling_params(
        self, params: SamplingParams | None = None, **options: Unpack[SamplingKeywords]
    ) -> SamplingParams:
        """Return complete sampling parameters, with a random seed unless one is given.

        `options` take precedence over `params`, and these over the model's `generation_config.json`. A SamplingError is
        raised for an unknown option, or a value outside its range or the vocabulary.

        >>> llama.sampling_params(temperature=0.5, seed=1).temperature
        0.5
        """
        options = with_params(params, options)
        return SamplingParams.from_options(options, self.generation_config, self.config.vocab_size)

    @shows_options(SamplingParams, error=SamplingError, max_tokens=CHAT_MAX_TOKENS)
    def chat_params(self, params: SamplingParams | None = None, **options: Unpack[SamplingKeywords]) -> SamplingParams:
        """Return `sampling_params` with the default `max_tokens` of dialogs.

        >>> smollm2.chat_params().max_tokens
        1024
        """
        options = with_params(params, options)
        if not options.keys() & {"max_tokens", "max_new_tokens"} and "max_new_tokens" not in self.generation_config:
            options["max_tokens"] = CHAT_MAX_TOKENS
        return self.sampling_params(**options)
