"""Messages to token ids, exactly as the model was trained to read them.

Knows chat templates (Jinja, sandboxed, with the extras that Hugging Face's
templates rely on) and tokenizers. Does not know HTTP, tenants or limits. A
prompt that is not short is encoded on a thread, off the event loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from datetime import datetime
from functools import partial
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from gateway.edge.canonical import Message
from gateway.edge.errors import InvalidRequest

INLINE_CHARACTERS: Final = 2_000
"""Up to here encoding takes well under a millisecond, less than the hop to a thread and back."""

_SPECIAL_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_END_MARK: Final = "\ufdd0"
"""A noncharacter: Unicode keeps it for a program's own use."""
_LOSSLESS_SPLITTERS: Final = frozenset({"ByteLevel", "Digits", "Split", "Punctuation"})
# What a template can meet in a conversation that it was not written for. The sandbox keeps it from
# anything worse.
_TEMPLATE_FAULTS: Final = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
)

WallClock = Callable[[], datetime]


class PromptTooLong(Exception):
    """The prompt surely has more tokens than allowed; `at_least` of them, found without encoding it."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"at least {at_least} tokens")
        self.at_least = at_least


class PromptFilesUnusable(Exception):
    """The worker's tokenizer files cannot be used. The message says which and why."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training. Here it
    renders its body.
    """

    tags = {"generation"}  # noqa: RUF012 — the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template and the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: WallClock) -> None:
        """Raises `PromptFilesUnusable` when the source is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        environment.globals["dict"] = _new_dict
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise PromptFilesUnusable(f"the chat template cannot be compiled: {error}") from error
        self._special_tokens = dict(special_tokens)
        # A template that knows the role names it; there is no other way to ask.
        self._knows_developer = "developer" in source

    def render(self, messages: Sequence[Message], *, continues_last: bool = False) -> str:
        """The prompt's text, up to where the assistant begins, or with `continues_last` to where its last
        message ends. Raises `InvalidRequest` when the template refuses.
        """
        conversation = [self._as_template_sees(message) for message in messages]
        if not continues_last:
            return self._render(conversation, add_generation_prompt=True)
        # No text of a client's ends with this, so what comes last in the prompt is ours.
        conversation[-1]["content"] += _END_MARK
        before, mark, _ = self._render(conversation, add_generation_prompt=False).rpartition(_END_MARK)
        if not mark:
            raise InvalidRequest(
                "The model's chat template does not let a message of the assistant be continued.",
                param="messages",
            )
        return before

    def _render(self, conversation: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=conversation,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequest(
                f"The model's chat template does not accept these messages: {error}", param="messages"
            ) from error

    def _as_template_sees(self, message: Message) -> dict[str, str]:
        role = "system" if message.role == "developer" and not self._knows_developer else message.role
        seen = {"role": role, "content": message.text}
        if message.name is not None:
            seen["name"] = message.name
        return seen


class PromptEncoder:
    """Template and tokenizer of one model. Immutable, and safe to use from several threads at once."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, *, longest_token: int | None = None
    ) -> None:
        """`longest_token` is the most characters that one token can stand for, or None when there
        is no such bound.
        """
        # Both may be switched on in a tokenizer's file; a prompt is neither cut nor filled up.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self._longest_token = longest_token

    def encode(
        self, messages: Sequence[Message], *, max_tokens: int, continues_last: bool = False
    ) -> list[int]:
        """Token ids of the rendered conversation, which may be more than `max_tokens` by a little.

        Raises `InvalidRequest`, or `PromptTooLong` for a text so long that encoding it would be a waste
        of seconds. The template writes the special tokens itself, so the tokenizer adds none.
        """
        text = self._template.render(messages, continues_last=continues_last)
        at_least = 0 if self._longest_token is None else len(text) // self._longest_token
        if at_least > max_tokens:
            raise PromptTooLong(at_least)
        if len(text) <= INLINE_CHARACTERS:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
            return ids
        # The batch call lets go of the interpreter while it works, the single one holds it: on a thread or
        # not, the event loop would stand still.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)

    async def encode_off_loop(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        executor: Executor,
        continues_last: bool = False,
    ) -> list[int]:
        """Like `encode`, without holding the event loop up for a long prompt."""
        encode = partial(self.encode, messages, max_tokens=max_tokens, continues_last=continues_last)
        if sum(len(message.text) + len(message.role) for message in messages) <= INLINE_CHARACTERS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(executor, encode)


def load_encoder(files: Mapping[str, bytes], *, now: WallClock) -> PromptEncoder:
    """From the files named in `protocol.TOKENIZER_FILES`. Raises `PromptFilesUnusable`."""
    config = _json_object(files, "tokenizer_config.json")
    template = ChatTemplate(_template_source(files, config), _special_tokens(config), now)
    content = files.get("tokenizer.json")
    if content is None:
        raise PromptFilesUnusable("the model has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except ValueError as error:
        raise PromptFilesUnusable(f"tokenizer.json cannot be read: {error}") from error
    longest = (
        _longest_token(tokenizer) if _keeps_every_character(_json_object(files, "tokenizer.json")) else None
    )
    return PromptEncoder(tokenizer, template, longest_token=longest)


def _longest_token(tokenizer: Tokenizer) -> int:
    """Byte-level vocabularies write a byte as one character, so no token covers more characters
    than it has.
    """
    return max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)


def _keeps_every_character(document: Mapping[str, Any]) -> bool:
    """Whether the tokenizer turns each character into some token: byte-level, with nothing dropped
    before it.
    """
    splitters = document.get("pre_tokenizer") or {}
    steps = splitters.get("pretokenizers", [splitters])
    kinds = {step.get("type") for step in steps}
    drops = any(step.get("behavior") == "Removed" for step in steps)
    return (
        document.get("normalizer") is None
        and not drops
        and "ByteLevel" in kinds
        and kinds <= _LOSSLESS_SPLITTERS
    )


def _json_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        document = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise PromptFilesUnusable(f"{name} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise PromptFilesUnusable(f"{name} is not a JSON object")
    return document


def _template_source(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str:
    """The file of its own wins, as in Hugging Face's loader; several named templates mean the default one."""
    own_file = files.get("chat_template.jinja")
    if own_file is not None:
        return own_file.decode("utf-8", "replace")
    declared = config.get("chat_template")
    if isinstance(declared, list):
        named = {entry.get("name"): entry.get("template") for entry in declared if isinstance(entry, dict)}
        declared = named.get("default")
    if not isinstance(declared, str):
        raise PromptFilesUnusable("the model has no chat template")
    return declared


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a prompt is not."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """A function in place of the class: templates come with models, and a class has attributes to
    climb along.
    """
    return dict(*args, **kwargs)
