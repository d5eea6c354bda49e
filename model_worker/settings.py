"""What an operator can set about a worker, from flags or `HEADSTART_*` variables.

Knows names, defaults and limits. Does not know what they do.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from model_worker.logs import LogFormat, LogLevel

DEFAULT_MODEL = "smollm2-135m-instruct"


class WorkerSettings(BaseSettings):
    """Run one model worker."""

    model_config = SettingsConfigDict(
        env_prefix="HEADSTART_",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_prog_name="headstart worker",
        extra="ignore",
    )

    model: str = Field(DEFAULT_MODEL, description="built-in name, local model folder or hub id")
    models: Path | None = Field(
        None, description="where converted models are kept; a cache folder if not set"
    )
    adapters: str = Field(
        "", description="LoRA adapters, name=folder, with commas between; without a name: model:folder"
    )
    worker_host: str = Field("127.0.0.1", description="address to listen on")
    worker_port: int = Field(8090, ge=0, le=65535, description="0 takes a free port")
    port_file: Path | None = Field(None, description="the chosen port is written here once listening")
    log_level: LogLevel = Field("info", description="less important lines are not written")
    log_format: LogFormat = Field("json", description="one JSON object a line, or text for a person")
    otlp_endpoint: str | None = Field(
        None,
        pattern="^(https?://.+)?$",
        description="collector for traces (OTLP/HTTP), such as http://collector:4318",
    )
    exit_with_parent: bool = Field(False, description="exit when standard input closes")

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto is float32 on CPU and bfloat16 on CUDA"
    )
    threads: int = Field(0, ge=0, description="CPU threads for the forward pass; 0 takes every core")

    block_size: int = Field(16, ge=1, le=256, description="tokens in a block")
    kv_dtype: Literal["auto", "int8", "int4"] = Field(
        "auto",
        description="numbers of cached keys and values: auto is the model's dtype, the others lose a little",
    )
    kv_cache_gib: float = Field(2.0, gt=0, description="memory for KV blocks, in GiB")
    kv_cache_blocks: int | None = Field(None, ge=1, description="number of KV blocks; overrides kv_cache_gib")
    block_seed: str = Field(
        "0", pattern="^[0-9a-f]{1,16}$", description="deployment secret that keys block names"
    )

    max_scope_share: float = Field(
        1.0, gt=0, le=1, description="most of the KV blocks that one scope may keep cached"
    )
    max_index_mib: float = Field(512.0, ge=1, description="memory for the index of cached blocks, in MiB")

    compute: Literal["fast", "exact"] = Field(
        "fast", description="exact: reuse, batches and chunks change no bit of keys, values and logits"
    )
    step_tokens: int = Field(512, ge=1, description="most tokens computed in one engine step")
    # Every text waits for the whole step: on two busy CPU cores 256 tokens of the default model took 1.3 s.
    decode_step_tokens: int = Field(128, ge=1, description="the same for a step in which something decodes")
    max_running: int = Field(64, ge=1, description="most sequences that generate at once")
    max_open: int = Field(
        1024, ge=1, description="most texts queued and running, `n` of a request; one more is refused"
    )
    max_body_bytes: int = Field(64 * 2**20, ge=1024, description="largest request body")
    drain_seconds: float = Field(5.0, ge=0, description="how long open requests may go on after a signal")
    check_when_idle: bool = Field(False, description="verify every cache invariant whenever idle")

    @property
    def models_folder(self) -> Path:
        """Shared by every deployment of this user: a conversion is a pure function of the package."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
        return (self.models or cache / "headstart" / "models").expanduser()
