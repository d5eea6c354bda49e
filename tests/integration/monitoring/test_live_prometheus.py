"""A live Prometheus scrapes a gateway and a worker that serve real traffic: every question that the
dashboards and alerts ask has an answer.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.deployment import MODEL, Deployment, running_deployment
from tests.servers import running_prometheus

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
BOARDS = sorted((DEPLOY / "grafana/dashboards").glob("*.json"))
ALERTS = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
NUM_BLOCKS = 64
ROUNDS = 3
WITHIN_SECONDS = 60.0
VARIABLES = {"$__rate_interval": "1m", "$__range": "1m"}
COMPARED = re.compile(r"^(?P<side>.+?)\s*(==|!=|>=|<=|>|<)\s*-?[0-9.]+$", re.DOTALL)

VLLM_DASHBOARDS = (
    "vllm:cache_config_info",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prompt_tokens_total",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_inference_time_seconds_bucket",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:request_params_max_tokens_bucket",
    "vllm:request_params_n_bucket",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_success_total",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:time_per_output_token_seconds_sum",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_sum",
)
"""What the dashboards that vLLM publishes ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    deployment: Deployment
    prometheus: str

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The answer's series, those that have a number. Fails on a query that Prometheus refuses."""
        answer = httpx.get(f"{self.prometheus}/api/v1/query", params={"query": query}, timeout=10).json()
        assert answer["status"] == "success", (query, answer)
        return [one for one in answer["data"]["result"] if not math.isnan(float(one["value"][1]))]

    def exposition(self, url: str) -> dict[str, Metric]:
        text = httpx.get(f"{url}/metrics", timeout=10).text
        return {family.name: family for family in text_string_to_metric_families(text)}


def configuration(folder: Path, deployment: Deployment) -> Path:
    """The one that is shipped, but for where the targets are and how often."""
    shipped = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    shipped["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    shipped["rule_files"] = [str(DEPLOY / "prometheus" / name) for name in shipped["rule_files"]]
    targets = {"gateway": deployment.gateway_url, "worker": deployment.worker_url}
    for job in shipped["scrape_configs"]:
        job["static_configs"] = [{"targets": [targets[job["job_name"]].removeprefix("http://")]}]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(shipped))
    return path


def send_traffic(deployment: Deployment, keys: list[str], round_number: int) -> None:
    """Every kind of look-up and end that a client can bring about."""
    for key in keys:
        question = f"a system prompt that is shared by everybody who asks. Question {round_number % 2}"
        for _ in range(2):
            assert deployment.ask(key, question).status_code == 200
        assert deployment.ask(key, question, headers={"x-headstart-cache": "bypass"}).status_code == 200
        assert deployment.ask(key, question, stream=True, n=2).status_code == 200
        assert deployment.ask(key, "hello", model="nobody").status_code == 404
        assert deployment.post(key, b"{").status_code == 400
        deployment.hang_up(key, "on and on")
    for index in range(4):  # more than fits beside the rest: something has to go
        assert deployment.ask(keys[0], f"{round_number} {index} " + "very long " * 30).status_code == 200
    assert httpx.post(f"{deployment.worker_url}/v1/generate", content=b"{}").status_code == 400
    assert refused_by_worker(deployment).status_code == 400


def refused_by_worker(deployment: Deployment) -> httpx.Response:
    """What no gateway sends: more tokens than the worker takes."""
    body = {"request_id": "x", "scope": "aa", "token_ids": [1], "sampling": {"max_tokens": 1_000_000}}
    return httpx.post(f"{deployment.worker_url}/v1/generate", json=body)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    with running_deployment(
        folder,
        *("--kv-cache-blocks", str(NUM_BLOCKS)),
        environment={"HEADSTART_METRICS_MAX_TENANTS": "2"},
    ) as deployment:
        keys = [deployment.first_key, deployment.new_tenant("acme"), deployment.new_tenant("folded")]
        with running_prometheus(configuration(folder, deployment)) as prometheus:
            one = Watched(deployment=deployment, prometheus=prometheus)
            for round_number in range(ROUNDS):
                send_traffic(deployment, keys, round_number)
                wait_for_scrapes(one)
            yield one


def wait_for_scrapes(watched: Watched) -> None:
    """Until both targets were scraped twice since, and the rules were evaluated on that."""
    began = time.time()

    def are_new() -> bool:
        scraped = watched.ask("min(timestamp(up)) - 2")
        return bool(scraped) and float(scraped[0]["value"][1]) > began

    eventually(are_new)


def eventually(claim: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_SECONDS
    while not claim():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def panel_queries() -> Iterator[tuple[str, str]]:
    for path in BOARDS:
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                yield f"{board['uid']}, {panel['title']}, {target['refId']}", target["expr"]


def filled_in(query: str) -> str:
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    return re.sub(r"\$[a-z_]+", ".*", query)


def alert_sides() -> Iterator[tuple[str, str]]:
    """What each alert compares with a number; an alert of another form cannot be tried and is refused."""
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            if "record" in rule:
                yield rule["record"], rule["expr"]
                continue
            for comparison in re.split(r"\band\b|\bunless\b", rule["expr"]):
                found = COMPARED.match(comparison.strip())
                assert found, f"{rule['alert']}: not a comparison with a number: {comparison}"
                yield rule["alert"], found["side"]


def test_both_targets_are_scraped_and_every_rule_is_sound(watched: Watched) -> None:
    up = {one["metric"]["job"]: one["value"][1] for one in watched.ask("up")}
    assert up == {"gateway": "1", "worker": "1"}
    groups = httpx.get(f"{watched.prometheus}/api/v1/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == sum(len(group["rules"]) for group in ALERTS["groups"])
    assert {rule["name"] for rule in rules if rule["health"] != "ok"} == set()


def test_every_panel_shows_something(watched: Watched) -> None:
    queries = dict(panel_queries())
    assert len(queries) > 50
    empty = {title: query for title, query in queries.items() if not watched.ask(filled_in(query))}
    assert empty == {}


def test_every_variable_of_a_dashboard_has_values(watched: Watched) -> None:
    for path in BOARDS:
        for variable in json.loads(path.read_text())["templating"]["list"]:
            found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
            assert found
            answers = watched.ask(f"count by ({found[2]}) ({found[1]})")
            assert {one["metric"].get(found[2], "") for one in answers} - {""}, (path.name, variable["name"])


def test_every_alert_compares_what_exists(watched: Watched) -> None:
    empty = [(name, side) for name, side in alert_sides() if not watched.ask(side)]
    assert empty == []


@pytest.mark.parametrize("query", ["headstart_requets_total", 'headstart_requests_total{outcomes="failed"}'])
def test_a_misspelt_name_or_label_would_be_found(watched: Watched, query: str) -> None:
    assert watched.ask(query) == []


def test_dashboards_made_for_vllm_find_their_metrics(watched: Watched) -> None:
    missing = [name for name in VLLM_DASHBOARDS if not watched.ask(f'{name}{{engine="0"}}')]
    assert missing == []
    assert watched.ask(f'vllm:prefix_cache_hits_total{{model_name="{MODEL}"}} > 0')


def test_no_alert_fires_on_a_healthy_deployment(watched: Watched) -> None:
    firing = watched.ask('ALERTS{alertstate="firing"}')
    # Three small tenants, two of whom are told apart, do not last the hour that this one waits.
    assert [one["metric"]["alertname"] for one in firing] == []


def test_gateway_and_worker_count_the_same_tokens(watched: Watched) -> None:
    def total(query: str) -> float:
        return float(watched.ask(query)[0]["value"][1])

    assert total('sum(headstart_tokens_total{class="read"})') == total("sum(vllm:prefix_cache_hits_total)")


def documented() -> dict[str, dict[str, tuple[str, frozenset[str]]]]:
    """Type and labels of each metric, by name, in each section of docs/metrics.md."""
    sections: dict[str, dict[str, tuple[str, frozenset[str]]]] = {}
    for line in (ROOT / "docs/metrics.md").read_text().splitlines():
        if line.startswith("## "):
            section = sections.setdefault(line.removeprefix("## "), {})
        elif line.startswith(("| `headstart_", "| `vllm_")):
            name, kind, labels, meaning = (cell.strip() for cell in line.strip("|").split("|"))
            assert meaning
            section[name.strip("`")] = (kind, frozenset(re.findall(r"`(\w+)`", labels)))
    return sections


@pytest.mark.parametrize("section", ["Gateway", "Worker"])
def test_the_docs_list_what_is_exported_and_nothing_else(watched: Watched, section: str) -> None:
    url = watched.deployment.gateway_url if section == "Gateway" else watched.deployment.worker_url
    exported = {}
    for family in watched.exposition(url).values():
        if family.name.startswith("process_"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = frozenset(label for sample in family.samples for label in sample.labels) - {"le"}
        assert family.samples, f"{name} shows nothing"
        exported[name] = (family.type, labels)
    assert exported == documented()[section]
