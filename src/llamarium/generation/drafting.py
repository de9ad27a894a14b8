"""Who guesses an answer's next tokens: prompt lookup, a draft model, or nobody. Never torch."""

from llamarium.engine.draft import DraftModel
from llamarium.engine.speculate import PromptLookup, Speculation, check_speculation, option_of
from llamarium.generation.options import AskedSpeculation
from llamarium.generation.text_model import TextModel
from llamarium.runtime.runner import Runner
from llamarium.tokenizer.compare import check_same_vocabulary


def drafting(model: TextModel, draft: TextModel) -> DraftModel:
    """Return a model as one that guesses for another.

    Raises:
        InputError: If their vocabularies differ, and where.
        TokenizerError: If one came without a tokenizer.
    """
    check_same_vocabulary(model, draft, "one cannot guess for the other")
    return DraftModel(draft.runner)


def speculation_of(model: TextModel, asked: AskedSpeculation) -> Speculation | None:
    """Return what guesses for a model, where a plain model is asked to.

    Raises:
        LlamariumError: As `drafting`.
    """
    return asked if asked is None or isinstance(asked, PromptLookup | DraftModel) else drafting(model, asked)


def speculation_of_any(model: TextModel, runner: Runner, asked: AskedSpeculation) -> Speculation | None:
    """Return what guesses for all requests to a model, whatever they ask of the sampler.

    Args:
        model: Whose tokens are guessed.
        runner: Executes it.
        asked: What is to guess.

    Raises:
        OptionError: If guesses could change the tokens.
        LlamariumError: As `drafting`.
    """
    if asked is not None:
        check_speculation(runner, option_of(asked), is_greedy=False)
    return speculation_of(model, asked)
