"""The proposer that options ask for: prompt lookup, a draft model, or none. Never torch."""

from llamarium.engine.proposers.base import ProposerPolicy, check_exact
from llamarium.engine.proposers.draft import DraftModel
from llamarium.generation.options import AskedProposer
from llamarium.generation.text_model import TextModel
from llamarium.runtime.runner import Runner
from llamarium.tokenizer.compare import check_same_vocabulary


def drafting(model: TextModel, draft: TextModel) -> DraftModel:
    """Return a model as one that drafts for another.

    InputError if their vocabularies differ, and where; TokenizerError if one came without a tokenizer.
    """
    check_same_vocabulary(model, draft, "one cannot guess for the other")
    return DraftModel(draft.runner)


def proposer_of(model: TextModel, asked: AskedProposer, runner: Runner | None = None) -> ProposerPolicy | None:
    """Return what proposes tokens for a model; with a `runner` for requests with any sampling parameters.

    OptionError if drafts could change the tokens of a request to `runner`, errors as `drafting`.
    """
    policy = asked if asked is None or isinstance(asked, ProposerPolicy) else drafting(model, asked)
    if policy is not None and runner is not None:
        check_exact(runner, policy, is_greedy=False)
    return policy
