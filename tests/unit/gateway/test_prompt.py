"""Messages to token ids, through a small tokenizer and templates written for the purpose."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from gateway.edge.canonical import Message
from gateway.edge.errors import InvalidRequest
from gateway.prompt import ChatTemplate, PromptFilesUnusable, PromptTooLong, load_encoder
from tests.unit.gateway.tiny_tokenizer import CHATML, decoded, prompt_files

USER = Message(role="user", text="hi")
WINDOW = 10_000


def now() -> datetime:
    return datetime(2026, 2, 3, 4, 5, tzinfo=UTC)


def render(template: str, *messages: Message, special_tokens: dict[str, str] | None = None) -> str:
    return ChatTemplate(template, special_tokens or {}, now).render(messages or (USER,))


def test_a_conversation_becomes_the_ids_of_its_rendered_text():
    encoder = load_encoder(prompt_files(), now=now)
    ids = encoder.encode([Message(role="system", text="Be brief."), USER], max_tokens=WINDOW)
    text = decoded(ids)
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text == expected
    assert 8 < len(ids) < 64, "neither the truncation nor the padding of the file is applied"


async def test_a_long_prompt_encoded_on_a_thread_is_the_same():
    encoder = load_encoder(prompt_files(), now=now)
    long = [Message(role="user", text="word " * 2_000)]
    with ThreadPoolExecutor(1) as executor:
        ids = await encoder.encode_off_loop(long, max_tokens=WINDOW * 10, executor=executor)
    assert ids == encoder.encode(long, max_tokens=WINDOW * 10)


async def test_other_work_goes_on_while_a_long_prompt_is_encoded():
    encoder = load_encoder(prompt_files(), now=now)
    long = [Message(role="user", text="word " * 100_000)]
    with ThreadPoolExecutor(1) as executor:
        encoding = asyncio.create_task(encoder.encode_off_loop(long, max_tokens=10**6, executor=executor))
        gaps = [0.0]
        began = last = time.perf_counter()
        while not encoding.done():
            await asyncio.sleep(0.001)
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()
    # With the interpreter held, one gap is all of the time.
    assert max(gaps) < 0.8 * (last - began)
    assert len(encoding.result()) > len(long[0].text)


def test_a_text_that_cannot_fit_is_refused_without_being_encoded():
    encoder = load_encoder(prompt_files(), now=now)
    with pytest.raises(PromptTooLong) as caught:
        encoder.encode([Message(role="user", text="x" * 1_000_000)], max_tokens=1000)
    assert 1000 < caught.value.at_least <= 1_000_000


def test_the_system_role_stands_in_for_developer_where_the_template_has_none():
    developer = Message(role="developer", text="x")
    assert render("{{ messages[0].role }}", developer) == "system"
    knows = "{% if messages[0].role == 'developer' %}D{% endif %}"
    assert render(knows, developer) == "D"


def test_a_name_reaches_the_template():
    assert render("{{ messages[0].name }}", Message(role="user", text="x", name="Ann")) == "Ann"
    assert render("{{ messages[0].name is defined }}") == "False"


def test_special_tokens_are_known_to_the_template_in_both_spellings():
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "pad_token": None}
    encoder = load_encoder(
        prompt_files("{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}", **config), now=now
    )
    text = decoded(encoder.encode([USER], max_tokens=WINDOW))
    assert text == "<s></s>False"


def test_the_extras_of_hugging_faces_templates_are_there():
    assert render("{{ {'a': 'é<&>'} | tojson }}") == '{"a": "é<&>"}'
    assert render("{{ strftime_now('%d %b %Y') }}") == "03 Feb 2026"
    assert render("{% for n in [1, 2, 3] %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}") == "1"
    assert render("{% generation %}kept{% endgeneration %}") == "kept"
    assert render("{{ dict(a=1)['a'] }}") == "1"
    assert render("{% set ns = namespace(n=0) %}{% set ns.n = 5 %}{{ ns.n }}") == "5"
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny", "blocks are trimmed and left-stripped"


def test_a_template_that_refuses_is_a_refusal_of_the_messages():
    with pytest.raises(InvalidRequest) as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"
    assert "roles must alternate" in caught.value.message


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ dict.__globals__.sys }}",
        "{% for i in range(99999999) %}{% endfor %}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[7].role }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_can_neither_leave_its_sandbox_nor_break_the_gateway(template):
    with pytest.raises(InvalidRequest):
        render(template)


def test_the_template_may_stand_in_the_tokenizers_configuration():
    for declared in (
        CHATML,
        [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}],
    ):
        stored = prompt_files(chat_template=declared)
        del stored["chat_template.jinja"]
        own_file = load_encoder(prompt_files(), now=now).encode([USER], max_tokens=WINDOW)
        assert load_encoder(stored, now=now).encode([USER], max_tokens=WINDOW) == own_file


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff"),
        ("tokenizer_config.json", b"["),
        ("tokenizer_config.json", b"[]"),
        ("chat_template.jinja", None),
        ("chat_template.jinja", b"{% if %}"),
    ],
)
def test_unusable_files_are_named(name, content):
    stored = prompt_files()
    if content is None:
        del stored[name]
    else:
        stored[name] = content
    with pytest.raises(PromptFilesUnusable) as caught:
        load_encoder(stored, now=now)
    assert name.split(".", maxsplit=1)[0].replace("_", " ") in str(caught.value).replace("_", " ")
