"""A request's prompt as token ids that fit the model, and how much room is left for an answer.

Knows the context window and what a client is told when it is too small. Does not know templates, tokenizers
or dialects.
"""

from __future__ import annotations

from concurrent.futures import Executor

from gateway.edge.canonical import CanonicalRequest
from gateway.edge.errors import ContextLengthExceeded, InvalidRequest
from gateway.prompt import PromptTooLong
from gateway.routing import Route


def check_limit(request: CanonicalRequest, window: int) -> None:
    """Refuses a limit that no prompt could satisfy, before the prompt is rendered."""
    limit = request.limit
    if limit is not None and not limit.is_upper_bound and limit.tokens > window:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {window} tokens, but '{limit.param}' asks for "
            f"{limit.tokens}.",
            param=limit.param,
        )


async def render(request: CanonicalRequest, route: Route, executor: Executor) -> list[int]:
    """Raises `InvalidRequest`, or `ContextLengthExceeded` for a prompt that leaves no room for an answer."""
    window = route.card.context_window_tokens
    try:
        token_ids = await route.encoder.encode_off_loop(
            request.messages,
            max_tokens=window,
            executor=executor,
            continues_last=request.continues_last,
        )
    except PromptTooLong as error:
        raise _prompt_too_long(f"at least {error.at_least}", window) from None
    if not token_ids:
        raise InvalidRequest("The messages render to an empty prompt.", param="messages")
    if len(token_ids) >= window:
        raise _prompt_too_long(str(len(token_ids)), window)
    return token_ids


def output_room(request: CanonicalRequest, *, prompt_tokens: int, window: int) -> int:
    """The most tokens that the answer may have. Raises `ContextLengthExceeded`."""
    left, limit = window - prompt_tokens, request.limit
    if limit is None:
        return left
    if limit.tokens > left and not limit.is_upper_bound:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {window} tokens. However, you requested "
            f"{prompt_tokens + limit.tokens} tokens ({prompt_tokens} in the messages, {limit.tokens} in the "
            "completion). Please reduce the length of the messages or completion.",
            param=limit.param,
        )
    return min(limit.tokens, left)


def _prompt_too_long(counted: str, window: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"This model's maximum context length is {window} tokens. However, your messages resulted in "
        f"{counted} tokens, which leaves no room for an answer. Please reduce the length of the messages.",
        param="messages",
        prompt_tokens=counted,
        window=window,
    )
