"""Replays: what a policy sees, what the command prints and what it refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from prefix_store.policy import POLICIES
from prefix_store.replay import BeladyPolicy, BlockTree, replay
from prefix_store.simulate import command
from prefix_store.traces import TracedRequest, TraceError, TraceFormat, mix_in_scan, read_trace


@st.composite
def request_streams(draw: st.DrawFn) -> list[TracedRequest]:
    """Requests over a random prefix tree: a block's id stands for the whole path to it."""
    children: dict[tuple[int, ...], int] = {}
    requests = []
    for second in range(draw(st.integers(1, 40))):
        path: tuple[int, ...] = ()
        for branch in draw(st.lists(st.integers(0, 2), min_size=1, max_size=6)):
            path = (*path, children.setdefault((*path, -1 - branch), len(children)))
        requests.append(TracedRequest(seconds=float(second), blocks=path))
    return requests


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=40, deadline=None)
@given(requests=request_streams(), cut=st.integers(0, 40), capacity=st.integers(1, 12))
def test_a_policy_does_not_peek(name: str, requests: list[TracedRequest], cut: int, capacity: int) -> None:
    whole = replay(requests, POLICIES[name](), capacity=capacity).hits
    assert list(whole[:cut]) == list(replay(requests[:cut], POLICIES[name](), capacity=capacity).hits)


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=40, deadline=None)
@given(requests=request_streams(), capacity=st.integers(1, 12))
def test_eviction_is_leaf_first_and_keeps_to_the_capacity(
    name: str, requests: list[TracedRequest], capacity: int
) -> None:
    tree = BlockTree(POLICIES[name]())
    parents = {
        block: above
        for one in requests
        for above, block in zip((None, *one.blocks), one.blocks, strict=False)
    }
    for request in requests:
        tree.use(request.blocks, request.seconds)
        tree.shrink(capacity, request.seconds)
        assert len(tree) <= capacity
        for block, above in parents.items():
            if block in tree and above is not None:
                assert above in tree, "a block outlived the one it follows"


@settings(max_examples=40, deadline=None)
@given(requests=request_streams(), capacity=st.integers(1, 12))
def test_without_a_limit_every_policy_is_alike(requests: list[TracedRequest], capacity: int) -> None:
    hits = {tuple(replay(requests, policy(), capacity=None).hits) for policy in POLICIES.values()}
    assert len(hits) == 1
    limit = replay(requests, BeladyPolicy(requests), capacity=None)
    assert tuple(limit.hits) in hits
    assert sum(replay(requests, POLICIES["lru"](), capacity=capacity).hits) <= sum(limit.hits)


def mooncake_file(folder: Path, *, compressed: bool = False) -> Path:
    rows = [
        {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]},
        {"timestamp": 500, "input_length": 1024, "output_length": 1, "hash_ids": [0, 2]},
        {"timestamp": 900, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path = folder / ("trace.jsonl.gz" if compressed else "trace.jsonl")
    path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
    return path


@pytest.mark.parametrize("compressed", [False, True])
def test_a_mooncake_trace_is_known_by_its_fields(tmp_path: Path, compressed: bool) -> None:
    trace = read_trace(mooncake_file(tmp_path, compressed=compressed))
    assert trace.format is TraceFormat.MOONCAKE
    assert trace.num_references == 6
    assert [request.seconds for request in trace.requests] == [0.0, 0.5, 0.9]


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[]",
        "{}",
        '{"timestamp": "soon", "input_length": 1, "output_length": 1, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ["one"]}',
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = mooncake_file(tmp_path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(TraceError, match="4"):
        read_trace(path)


def test_a_scan_shares_nothing_and_doubles_the_references(tmp_path: Path) -> None:
    trace = read_trace(mooncake_file(tmp_path))
    mixed, originals = mix_in_scan(trace, blocks_per_request=2, seed=3)
    assert mixed.num_references == 2 * trace.num_references
    assert sum(originals) == len(trace.requests)
    scans = [one.blocks for one, original in zip(mixed.requests, originals, strict=True) if not original]
    seen = [block for blocks in scans for block in blocks]
    assert len(seen) == len(set(seen))
    assert not set(seen) & {block for one in trace.requests for block in one.blocks}


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [*arguments])
    return result.exit_code, result.output


def test_the_command_prints_a_table_and_writes_json_and_a_plot(tmp_path: Path) -> None:
    figures, plot = tmp_path / "out.json", tmp_path / "out.png"
    status, output = run(
        "--trace", str(mooncake_file(tmp_path)), "--policy", "lru", "hazard", "belady",
        "--capacity", "2", "inf", "--json", str(figures), "--plot", str(plot),
    )  # fmt: skip
    assert status == 0, output
    assert "0.5000" in output, "three of six references are found without a limit"
    document = json.loads(figures.read_text())
    assert "hazard" in json.dumps(document)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments",
    [("--policy", "clairvoyant"), ("--capacity", "-3"), ("--capacity", "many"), ("--trace", "/nowhere")],
)
def test_what_cannot_be_simulated_is_refused_in_a_line(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    status, output = run("--trace", str(mooncake_file(tmp_path)), *arguments)
    assert status != 0
    assert "Traceback" not in output
