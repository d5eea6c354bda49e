"""What compose.yaml promises, read from the file. Needs no Docker."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings import Settings
from model_worker.settings import WorkerSettings
from tests.compose.stack import CHECKOUT

ONE_SHOTS = {"secrets", "migrate"}
DROPS_ROOT_BY_ITSELF = "postgres"
READS_FILES_OF_THE_OPERATOR = "secrets"

_file: dict[str, Any] = yaml.safe_load((CHECKOUT / "compose.yaml").read_text("utf-8"))
SERVICES: dict[str, dict[str, Any]] = _file["services"]


@pytest.fixture(params=sorted(SERVICES))
def service(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_every_service_is_confined(service: str) -> None:
    of = SERVICES[service]
    assert of["read_only"] is True
    assert of["cap_drop"] == ["ALL"]
    assert of["security_opt"] == ["no-new-privileges:true"]
    assert of["init"] is True


def test_nobody_is_root_for_longer_than_it_must(service: str) -> None:
    """Images of ours and of Grafana name a user; the others are given one."""
    gains = SERVICES[service].get("cap_add", [])
    if service == DROPS_ROOT_BY_ITSELF:
        assert set(gains) == {"CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID"}
    elif service == READS_FILES_OF_THE_OPERATOR:
        assert (gains, SERVICES[service]["network_mode"]) == (["DAC_OVERRIDE"], "none")
    else:
        assert gains == []
        assert not str(SERVICES[service].get("user", "")).startswith("0")


def test_what_stays_up_has_a_health_check_and_comes_back(service: str) -> None:
    of = SERVICES[service]
    if service in ONE_SHOTS:
        assert (of["healthcheck"], of["restart"]) == ({"disable": True}, "no")
        return
    assert of["restart"] == "unless-stopped"
    is_ours = "build" in of  # our images bring theirs
    assert is_ours or of["healthcheck"]["test"][0] in {"CMD", "CMD-SHELL"}


def test_whoever_waits_waits_for_health_or_for_the_end_of_a_one_shot(service: str) -> None:
    for awaited, how in SERVICES[service].get("depends_on", {}).items():
        expected = "service_completed_successfully" if awaited in ONE_SHOTS else "service_healthy"
        assert how == {"condition": expected}


def test_environments_hold_settings_that_exist_and_no_secret(service: str) -> None:
    fields = set(WorkerSettings.model_fields if service.startswith("worker") else Settings.model_fields)
    environment = SERVICES[service].get("environment", {})
    ours = {name for name in environment if name.startswith("HEADSTART_")}
    assert {name.removeprefix("HEADSTART_").lower() for name in ours} <= fields
    for name, value in environment.items():
        if re.search(r"PASSWORD|SECRET|KEY", name):
            assert name.endswith("_FILE")
            assert str(value).startswith("/run/secrets/")


def test_defaults_of_settings_are_their_own_defaults() -> None:
    """Who sets nothing gets in a container what he gets without one."""
    for name, fields in (("gateway", Settings.model_fields), ("worker", WorkerSettings.model_fields)):
        for variable, value in SERVICES[name]["environment"].items():
            given = re.fullmatch(r"\$\{HEADSTART_(\w+):-(.*)\}", str(value))
            if given:
                default = fields[given[1].lower()].default
                assert given[2] == ("" if default is None else str(default)), variable


def test_every_volume_and_network_is_declared_and_used() -> None:
    mounts = [mount for of in SERVICES.values() for mount in of.get("volumes", [])]
    sources = {mount["source"] if isinstance(mount, dict) else mount.split(":")[0] for mount in mounts}
    assert {one for one in sources if not one.startswith(".")} == set(_file["volumes"])
    used = {network for of in SERVICES.values() for network in of.get("networks", [])}
    assert used == set(_file["networks"])


def test_what_is_mounted_from_the_checkout_is_there(service: str) -> None:
    for mount in SERVICES[service].get("volumes", []):
        if isinstance(mount, str) and mount.startswith("./"):
            source, target = mount.split(":")[:2]
            assert (CHECKOUT / source).exists(), target
            assert mount.endswith(":ro")


def test_nothing_is_published_beyond_this_machine_unless_it_is_asked_for() -> None:
    published = {name: of["ports"] for name, of in SERVICES.items() if "ports" in of}
    assert set(published) == {"gateway", "prometheus", "grafana"}
    for ports in published.values():
        assert all(port.startswith(("127.0.0.1:", "${HEADSTART_BIND:-127.0.0.1}:")) for port in ports)


def test_the_ledger_can_be_reached_by_the_gateway_and_the_migration_alone() -> None:
    reaching = {name for name, of in SERVICES.items() if "ledger" in of.get("networks", [])}
    assert reaching == {"postgres", "migrate", "gateway"}
    assert _file["networks"]["ledger"] == {"internal": True}


def test_prometheus_scrapes_services_of_this_file() -> None:
    config = yaml.safe_load((CHECKOUT / "deploy/prometheus/prometheus.yml").read_text("utf-8"))
    targets = [t for job in config["scrape_configs"] for one in job["static_configs"] for t in one["targets"]]
    for target in targets:
        name = target.split(":")[0]
        assert set(SERVICES[name]["networks"]) & set(SERVICES["prometheus"]["networks"])


def test_every_secret_is_made_for_those_who_read_it() -> None:
    makes: dict[str, tuple[str, ...]] = runpy.run_path(str(CHECKOUT / "deploy/make-secrets"))["READERS"]
    told = (CHECKOUT / "deploy/secrets/.gitignore").read_text("utf-8")
    assert set(re.findall(r"^#   ([a-z-]+)  ", told, re.MULTILINE)) == set(makes)
    readers = {reader for one in makes.values() for reader in one}
    handed = {mount.split(":")[1] for mount in SERVICES["secrets"]["volumes"]}
    assert {f"/run/secrets-of/{reader}" for reader in readers} <= handed
    for name, of in SERVICES.items():
        sources = [mount.split(":") for mount in of.get("volumes", []) if isinstance(mount, str)]
        for source, target, *rest in sources:
            if target == "/run/secrets":
                reader = source.removesuffix("-secrets")
                used = set(re.findall(r"/run/secrets/([a-z-]+)", yaml.safe_dump(of)))
                assert used <= {secret for secret, whose in makes.items() if reader in whose}, name
                assert rest == ["ro"]


class TestSecrets:
    """`deploy/make-secrets`, in folders of a test's own."""

    @pytest.fixture
    def made(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        module = runpy.run_path(str(CHECKOUT / "deploy/make-secrets"))
        scope = module["main"].__globals__
        for reader in {reader for one in module["READERS"].values() for reader in one}:
            (tmp_path / "of" / reader).mkdir(parents=True)
        (tmp_path / "given").mkdir()
        monkeypatch.setitem(scope, "GIVEN", tmp_path / "given")
        monkeypatch.setitem(scope, "VOLUMES", tmp_path / "of")
        monkeypatch.setitem(scope, "FORMER_SECRET", tmp_path / "secrets.json")
        return module["main"]

    def everything(self, folder: Path) -> dict[str, str]:
        files = [path for path in (folder / "of").rglob("*") if path.is_file()]
        return {str(path.relative_to(folder / "of")): path.read_text() for path in files}

    def test_what_is_missing_is_made_once(self, made: Any, tmp_path: Path) -> None:
        assert made() == 0
        first = self.everything(tmp_path)
        assert first["postgres/postgres-password"] == first["gateway/postgres-password"]
        assert len(first["gateway/headstart-secret"]) >= 32
        assert len(set(first.values())) == len(first) - 1, "one password is at two readers"
        assert made() == 0
        assert self.everything(tmp_path) == first

    def test_what_the_operator_gives_comes_first(self, made: Any, tmp_path: Path) -> None:
        made()
        (tmp_path / "given/postgres-password").write_text("  p@ss: '\"$`\\ \n")
        assert made() == 0
        now = self.everything(tmp_path)
        assert now["postgres/postgres-password"] == now["gateway/postgres-password"] == "  p@ss: '\"$`\\ "

    def test_a_deployment_keeps_the_secret_that_it_began_with(self, made: Any, tmp_path: Path) -> None:
        (tmp_path / "secrets.json").write_text('{"version": 1, "deployment_secret": "%s"}' % ("ab" * 32))
        made()
        assert self.everything(tmp_path)["gateway/headstart-secret"] == "ab" * 32

    def test_an_empty_file_is_refused_and_named(
        self, made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "given/admin-key").write_text("\n")
        assert made() == 1
        assert "given/admin-key is empty" in capsys.readouterr().err
