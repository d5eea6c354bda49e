"""What is shipped for Prometheus and Grafana is sound, and says of each alert what to do."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.servers import prometheus_program

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
CASES = Path(__file__).parent / "alert_cases.yml"
BOARDS = sorted((DEPLOY / "grafana/dashboards").glob("*.json"))
GRID_COLUMNS = 24


def promtool(*arguments: object) -> str:
    """What it prints; fails when it finds fault."""
    done = subprocess.run(
        [prometheus_program("promtool"), *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def test_prometheus_takes_the_configuration_and_the_rules() -> None:
    promtool("check", "config", DEPLOY / "prometheus/prometheus.yml")
    promtool("check", "rules", DEPLOY / "prometheus/alerts.yml")


def test_every_alert_fires_when_it_should_and_not_otherwise() -> None:
    assert "SUCCESS" in promtool("test", "rules", CASES)


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    cases = [case for test in yaml.safe_load(CASES.read_text())["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == set(alerts())
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == set(alerts())


def test_every_alert_leads_to_a_heading_that_exists() -> None:
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs/operations.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for name, rule in alerts().items():
        path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (path, anchor in anchors) == ("docs/operations.md", True), name


@pytest.fixture(params=BOARDS, ids=lambda path: path.stem)
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(request.param.read_text())
    return loaded


def test_grafana_is_given_both_dashboards() -> None:
    assert [path.stem for path in BOARDS] == ["serving", "tenants"]
    assert len({json.loads(path.read_text())["uid"] for path in BOARDS}) == len(BOARDS)


def test_every_panel_asks_the_provisioned_data_source(board: dict[str, Any]) -> None:
    provisioned = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())
    [source] = provisioned["datasources"]
    asked = [panel["datasource"] for panel in board["panels"] if panel["type"] != "row"]
    asked += [target["datasource"] for panel in board["panels"] for target in panel.get("targets", [])]
    asked += [variable["datasource"] for variable in board["templating"]["list"]]
    assert {(one["type"], one["uid"]) for one in asked} == {(source["type"], source["uid"])}


def test_panels_have_ids_of_their_own_and_lie_beside_each_other(board: dict[str, Any]) -> None:
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= GRID_COLUMNS, panel["title"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_panel_says_what_it_shows_in_a_unit(board: dict[str, Any]) -> None:
    for panel in board["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        references = [target["refId"] for target in panel["targets"]]
        assert references
        assert len(set(references)) == len(references)


def test_queries_use_no_variable_that_is_not_there(board: dict[str, Any]) -> None:
    known = {variable["name"] for variable in board["templating"]["list"]}
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval", "__range"}
            assert used <= known, panel["title"]
