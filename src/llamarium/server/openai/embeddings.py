"""`POST /v1/embeddings`: embeddings of texts, pooled from hidden states of the engine's steps."""

import asyncio
import base64
import time
from collections.abc import Sequence
from typing import Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import Field

from llamarium.engine.pooling import Pooling
from llamarium.engine.request import check_prompt
from llamarium.errors import ContextLengthError
from llamarium.generation.embedding import Embedding
from llamarium.server.answering import recording, side_by_side, with_tokenizer
from llamarium.server.errors import ApiError
from llamarium.server.fields import Body, CacheSalt, ModelName, of_table
from llamarium.server.http.body import StrictRoute
from llamarium.server.http.stream import encode, while_listening
from llamarium.server.lifecycle.service import Service, chosen_model
from llamarium.server.metrics import Metrics
from llamarium.server.openai.completions import Prompt, encode_prompt, for_each, prompts_of
from llamarium.tokenizer.base import Tokenizer

router = APIRouter(route_class=StrictRoute)

MAX_INPUTS = 2048
"""Maximum number of texts per request, the same as OpenAI's."""


@of_table("embeddings")
class EmbeddingRequest(Body):
    """`POST /v1/embeddings`."""

    input: str | list[str] | list[int] | list[list[int]] = Field(description="text, token ids, or a list of either")
    model: ModelName = None
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="numbers as JSON, or as base64 of little-endian float32"
    )
    dimensions: int | None = Field(None, description="length of the vectors; only the model's hidden size is supported")
    # not OpenAI's
    pooling: Pooling | None = Field(None, description="mean over all tokens, or the last token's state")
    cache_salt: CacheSalt = None


@router.post("/v1/embeddings")
async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """Return the vectors of texts."""
    chosen = chosen_model(request, body.model)
    service: Service = request.app.state.service
    model, _ = service.require()
    if body.dimensions not in (None, width := model.config.hidden_size):
        reason = f"the model's vectors have {width} dimensions and cannot be shortened"
        raise ApiError(400, f"dimensions is {body.dimensions}; {reason}", param="dimensions")
    prompts = await _prompts(request, body)
    with service.admit(1):
        results = await while_listening(_embed(request, body, prompts, chosen.adapter), request.receive)
    if results is None:
        return Response(status_code=499)
    notes = {
        "prompt": sum(result.num_tokens for result in results),
        "cached": sum(result.num_cached for result in results),
    }
    request.scope["notes"].update(notes)
    content = await asyncio.to_thread(_written, results, chosen.name, body.encoding_format == "base64", notes["prompt"])
    return Response(content, media_type="application/json")


async def _prompts(request: Request, body: EmbeddingRequest) -> list[list[int]]:
    """Return the token ids of a request's texts; an invalid text is rejected by its path."""
    inputs = prompts_of(body.input, "input")
    if len(inputs) > MAX_INPUTS:
        raise ApiError(400, f"input has {len(inputs)} texts; the maximum is {MAX_INPUTS}", param="input")
    service: Service = request.app.state.service
    model, max_tokens = service.require()[0], service.max_tokens

    def encode_all(tokenizer: Tokenizer) -> list[list[int]]:
        def work(prompt: Prompt, path: str) -> list[int]:
            ids = encode_prompt(tokenizer, prompt, max_tokens)
            if len(ids) > max_tokens:
                raise ContextLengthError(
                    f"{path} is too long: it has {len(ids)} tokens; this model's maximum context length is "
                    f"{max_tokens} tokens: use a shorter text"
                )
            check_prompt(model.config, ids, path, room=0)
            return ids

        return for_each(inputs, "input", tokenizer, work)

    return await with_tokenizer(request, "input", encode_all)


async def _embed(
    request: Request, body: EmbeddingRequest, prompts: Sequence[list[int]], adapter: str | None
) -> list[Embedding]:
    """Return the embeddings of a request's texts.

    Only a quarter of the engine's batch is used at a time, so that other requests are served as well.
    """
    service: Service = request.app.state.service
    metrics: Metrics = request.app.state.metrics
    noted = metrics.of(adapter)
    _, engine = service.require()
    limit_s, began = service.settings.request_timeout_s, time.monotonic()
    places, results = iter(range(len(prompts))), dict[int, Embedding]()

    async def work() -> None:
        for place in places:  # shared by all workers
            left_s = None if limit_s is None else max(0.0, began + limit_s - time.monotonic())
            pooling, salt = body.pooling or "mean", body.cache_salt or ""
            future = engine.embed(prompts[place], pooling, timeout_s=left_s, adapter=adapter, salt=salt)
            results[place] = await asyncio.wrap_future(future)
            noted.finished("stop")

    with recording(noted, "input"):
        await side_by_side([work() for _ in range(min(len(prompts), max(1, service.settings.max_num_seqs // 4)))])
    noted.whole.observe(time.monotonic() - began)
    return [results[place] for place in range(len(prompts))]


def _written(results: Sequence[Embedding], model: str, as_base64: bool, num_tokens: int) -> bytes:
    """Return the response body; vectors are encoded one by one, so that other threads can run in between."""

    def entry(place: int, result: Embedding) -> str:
        vector = _base64(result) if as_base64 else result.vector.tolist()
        return encode({"object": "embedding", "index": place, "embedding": vector})

    entries = ",".join(entry(place, result) for place, result in enumerate(results))
    usage = encode({"prompt_tokens": num_tokens, "total_tokens": num_tokens})
    return f'{{"object":"list","data":[{entries}],"model":{encode(model)},"usage":{usage}}}'.encode()


def _base64(result: Embedding) -> str:
    """Return a vector as base64-encoded little-endian float32."""
    return base64.b64encode(result.vector.astype(np.dtype("<f4")).tobytes()).decode()
