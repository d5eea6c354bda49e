"""What may stand in a log line."""

import asyncio
import gc
import io
import json
import logging

import pytest
import structlog

from billing.errors import DatabaseUnavailable
from gateway.logs import WITHHELD, configure_logs, sanitised_client_id


@pytest.fixture
def restored_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.parametrize("value", ["abc-123", "0190a:7f/x=", "A" * 128])
def test_a_harmless_id_is_kept(value):
    assert sanitised_client_id(value) == value


@pytest.mark.parametrize(
    "value", [None, "", "a b", 'x"}\n{"level":"error"', "a\r\nset-cookie: x", "é", "A" * 129, "\x1b[2J"]
)
def test_any_other_id_is_dropped(value):
    assert sanitised_client_id(value) is None


@pytest.mark.usefixtures("restored_logging")
def test_our_lines_and_a_librarys_are_one_json_object_each():
    stream = io.StringIO()
    configure_logs("info", stream)
    structlog.get_logger("gateway.test").info("request", status=200, text="a\nb")
    structlog.get_logger("gateway.test").debug("hidden")
    logging.getLogger("some.library").warning("odd %s", "thing")
    ours, theirs = map(json.loads, stream.getvalue().splitlines())
    assert (ours["event"], ours["status"], ours["text"], ours["level"]) == ("request", 200, "a\nb", "info")
    assert (theirs["event"], theirs["level"]) == ("odd thing", "warning")


@pytest.mark.usefixtures("restored_logging")
def test_an_error_is_logged_without_what_its_variables_hold():
    stream = io.StringIO()
    configure_logs("info", stream)
    prompt = "tell " + "nobody"
    try:
        raise DatabaseUnavailable(f"failed after {len(prompt)} characters")
    except DatabaseUnavailable:
        structlog.get_logger("gateway.test").exception("request_failed")
    line = stream.getvalue()
    assert "failed after 11 characters" in line
    assert prompt not in line


@pytest.mark.parametrize("log_format", ["json", "console"])
@pytest.mark.usefixtures("restored_logging")
def test_the_words_of_an_exception_that_is_not_ours_are_withheld_at_any_depth(log_format):
    stream = io.StringIO()
    configure_logs("info", stream, log_format=log_format)
    prompt = "tell " + "nobody"
    try:
        try:
            raise KeyError(prompt)
        except KeyError as error:
            error.add_note(prompt)
            raise DatabaseUnavailable("the database is away") from error
    except DatabaseUnavailable:
        structlog.get_logger("gateway.test").exception("ours")
        logging.getLogger("some.library").exception("theirs")
    text = stream.getvalue()
    assert prompt not in text
    assert text.count("the database is away") == text.count("KeyError") == 2
    assert text.count(WITHHELD) == 2
    assert "test_logs.py" in text


@pytest.mark.usefixtures("restored_logging")
async def test_a_lost_tasks_words_are_withheld():
    stream = io.StringIO()
    configure_logs("info", stream)
    prompt = "tell " + "nobody"

    async def fail() -> None:
        raise KeyError(prompt)

    task = asyncio.create_task(fail())
    await asyncio.wait([task])
    del task
    gc.collect()
    await asyncio.sleep(0)
    assert "Task exception was never retrieved" in stream.getvalue()
    assert prompt not in stream.getvalue()


@pytest.mark.usefixtures("restored_logging")
def test_lines_for_a_person_are_text():
    stream = io.StringIO()
    configure_logs("info", stream, log_format="console")
    structlog.get_logger("gateway.test").info("request", status=200)
    assert "request" in stream.getvalue()
    assert "status=200" in stream.getvalue()
    assert not stream.getvalue().startswith("{")
