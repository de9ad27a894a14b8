"""From a text to ids, with every step."""

import functools
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request

from llamarium.errors import TokenizerError, UnsupportedTokenizerError
from llamarium.page.schema.text import TokensRequest, TokensView, TokenView
from llamarium.page.work import work_on
from llamarium.server.errors import ApiError
from llamarium.server.http.body import StrictRoute
from llamarium.server.lifecycle.service import Service
from llamarium.tokenizer.base import Tokenizer

if TYPE_CHECKING:
    from llamarium.api import Llama

router = APIRouter(prefix="/inspect", route_class=StrictRoute)


@router.post("/tokens")
async def tokens(request: Request, body: TokensRequest) -> TokensView:
    """Return a text's bytes, the pieces it is cut into, their merges in order, and the ids."""
    service: Service = request.app.state.service
    most = service.max_tokens

    def read(llama: "Llama", _: object) -> TokensView:
        tokenizer = llama.tokenizer if body.tokenizer == "model" else llama3_tokenizer()
        tokenizer.check_length(body.text, most)
        return _steps(tokenizer, body)

    return await work_on(request, "text", read)


def token_view(tokenizer: Tokenizer, token_id: int) -> TokenView:
    """Describe one token; also of an id that the vocabulary has a hole for."""
    special = tokenizer.special_tokens.values()
    try:
        data = tokenizer.token_bytes(token_id)
    except TokenizerError:
        return TokenView(id=token_id, text=f"<{token_id}>", bytes=(), is_special=False)
    text = tokenizer.token_text(token_id)
    return TokenView(id=token_id, text=text, bytes=tuple(data), is_special=token_id in special)


def _steps(tokenizer: Tokenizer, body: TokensRequest) -> TokensView:
    ids = tokenizer.encode(body.text, add_special_tokens=body.add_special_tokens)
    pieces, unexplained = list[Any](), None
    try:
        pieces = tokenizer.explain(body.text).to_dict()["pieces"]
    except UnsupportedTokenizerError as error:
        unexplained = str(error).removeprefix(f"{tokenizer.source}: ")
    return TokensView.model_validate(
        {
            "tokenizer": body.tokenizer,
            "vocab_size": tokenizer.vocab_size,
            "text": body.text,
            "utf8": list(body.text.encode()),
            "pieces": pieces,
            "tokens": [token_view(tokenizer, token_id) for token_id in ids],
            "unexplained": unexplained,
        }
    )


@functools.cache
def llama3_tokenizer() -> Tokenizer:
    """Return the built-in tokenizer of Llama 3, which is not fetched now: opening a page contacts no other host."""
    from llamarium.checkpoints.tokenizers import load_tokenizer
    from llamarium.hub.builtin import is_cached

    if not is_cached("llama3"):
        raise ApiError(
            404,
            "Llama 3's tokenizer is not on this machine; `llamarium download llama3` fetches it",
            code="tokenizer_not_here",
            param="tokenizer",
        )
    return load_tokenizer("llama3")
