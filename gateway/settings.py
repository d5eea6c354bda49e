"""What an operator can change without touching code: `HEADSTART_*` in the environment.

Knows names, defaults and bounds. Does not open, create or connect to anything:
paths and URLs are handed to their owners by the wiring in `gateway.app`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from gateway.logs import LogFormat

Seconds = Annotated[float, Field(gt=0, le=86_400)]


class Settings(BaseSettings):
    """Every field is `HEADSTART_<NAME>`; an unset database is SQLite inside `home`."""

    model_config = SettingsConfigDict(env_prefix="HEADSTART_", extra="ignore", frozen=True)

    home: Path = Path("~/.headstart")
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8080
    database_url: str | None = None
    database_password_file: Path | None = None
    model: str | None = None
    worker_url: str | None = None
    secret: SecretStr | None = None
    secret_file: Path | None = None
    admin_key_file: Path | None = None
    receipt_key_file: Path | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: LogFormat = "json"
    otlp_endpoint: str | None = None

    metrics_max_tenants: Annotated[int, Field(ge=0, le=10_000)] = 100
    max_body_bytes: Annotated[int, Field(ge=1024)] = 8 * 1024 * 1024
    key_cache_seconds: Annotated[float, Field(ge=0, le=1)] = 1.0
    card_poll_seconds: Seconds = 1.0

    body_timeout_seconds: Seconds = 30.0
    connect_timeout_seconds: Seconds = 2.0
    first_event_timeout_seconds: Seconds = 300.0
    between_events_timeout_seconds: Seconds = 120.0
    client_stall_timeout_seconds: Seconds = 60.0
    drain_seconds: Annotated[float, Field(ge=0, le=3_600)] = 10.0
    worker_start_timeout_seconds: Seconds = 3_600.0

    @field_validator("home")
    @classmethod
    def _expand_home(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator(
        *("database_url", "model", "worker_url", "secret_file", "secret"),
        *("receipt_key_file", "otlp_endpoint", "database_password_file", "admin_key_file"),
        mode="before",
    )
    @classmethod
    def _empty_is_unset(cls, value: object) -> object:
        """Compose files pass `HEADSTART_MODEL=` for a variable nobody set."""
        return None if value == "" else value

    @field_validator("worker_url", "otlp_endpoint")
    @classmethod
    def _http_only(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        return value.rstrip("/") if value is not None else None

    @property
    def database(self) -> str:
        """SQLAlchemy URL of the ledger, without a password that is in a file of its own."""
        return self.database_url or f"sqlite:///{self.home / 'headstart.db'}"

    @property
    def journal_directory(self) -> Path:
        return self.home / "journal"

    @property
    def first_key_file(self) -> Path:
        return self.home / "first-key"
