"""What may stand in a log line."""

import io
import json
import logging

import pytest
import structlog

from gateway.logs import configure_logs, sanitised_client_id


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
        raise RuntimeError(f"failed after {len(prompt)} characters")
    except RuntimeError:
        structlog.get_logger("gateway.test").exception("request_failed")
    line = stream.getvalue()
    assert "failed after 11 characters" in line
    assert prompt not in line
