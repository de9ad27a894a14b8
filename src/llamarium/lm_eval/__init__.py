"""Models in EleutherAI's evaluation harness (`pip install 'llamarium[eval]'`).

The harness's own command finds the models of its own package only, so the way in is one of these:

    python -m llamarium.lm_eval --model llamarium --model_args model=smollm2-135m --tasks hellaswag

    from llamarium.lm_eval import LlamariumLM                                 # registers the name "llamarium"
    lm_eval.simple_evaluate(model="llamarium", model_args="model=smollm2-135m", tasks=["hellaswag"])
    lm_eval.simple_evaluate(model=LlamariumLM(llamarium.load("smollm2-135m")), tasks=["hellaswag"])

Nothing else of Llamarium imports this package.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamarium.lm_eval.adapter import LlamariumLM

__all__ = ["LlamariumLM"]


def __getattr__(name: str) -> Any:
    """Import the adapter, and with it the harness, when it is first used."""
    if name == "LlamariumLM":
        from llamarium.lm_eval.adapter import LlamariumLM

        return LlamariumLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
