"""Adapters and their base in one worker: each gives its own text, and none finds another's blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from model_worker.adapters import adapters_of
from model_worker.engine import RequestRefused
from model_worker.models import LoadedModel, ModelUnavailable
from model_worker.settings import WorkerSettings
from model_worker.wiring import build_worker
from tests.engines import EngineDriver, prompt_of, running_engine
from tests.near_ties import count_near_ties, greedy_of, plain_twin
from tests.tiny_models import UNCACHED_FAMILIES, tiny, tiny_llama

# peft 0.21 asks transformers 5.24 by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

NAMES = (None, "poet", "lawyer")
"""The base and its adapters, which change different layers in different strengths."""
LAYERS = {"poet": ["q_proj", "v_proj"], "lawyer": ["k_proj", "down_proj"]}
MAX_TOKENS = 12


def save_adapter(folder: Path, base: LoadedModel, seed: int, **settings: object) -> Path:
    """A random adapter, strong enough that texts differ."""
    torch.manual_seed(seed)
    config = LoraConfig(**({"r": 4, "lora_alpha": 16, "init_lora_weights": False} | settings))  # type: ignore[arg-type]
    get_peft_model(base.network, config).save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(root / name, tiny_llama(root / "base"), seed, target_modules=layers)
        for seed, (name, layers) in enumerate(LAYERS.items())
    }


def serving(folders: dict[str, Path]) -> str:
    return ",".join(f"{name}={folder}" for name, folder in folders.items())


@pytest.fixture
def model(tmp_path: Path) -> LoadedModel:
    """A base of its own for each test: adapters are put on the network in place."""
    return tiny_llama(tmp_path)


@pytest.fixture
def driver(model: LoadedModel, folders: dict[str, Path]) -> Iterator[EngineDriver]:
    with running_engine(model, adapters=serving(folders), kv_cache_blocks=128) as one:
        yield one


@pytest.fixture(scope="module")
def twins(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str | None, LoadedModel]:
    """The base and each adapter as `peft` runs them, one network each."""
    found: dict[str | None, LoadedModel] = {}
    for name in NAMES:
        twin = plain_twin(tiny_llama(tmp_path_factory.mktemp("twin")))
        if name is not None:
            PeftModel.from_pretrained(twin.network, str(folders[name]))  # changes the network in place
        found[name] = twin
    return found


def test_each_adapter_gives_the_text_of_peft_beside_the_others(
    driver: EngineDriver, twins: dict[str | None, LoadedModel]
) -> None:
    asked = [(name, prompt_of(20 + seed, seed)) for seed in range(6) for name in NAMES]
    together = [
        driver.submit(prompt, adapter=name, max_tokens=MAX_TOKENS, ignore_eos=True) for name, prompt in asked
    ]
    texts: dict[str | None, list[list[int]]] = {name: [] for name in NAMES}
    parted = 0
    for (name, prompt), generation in zip(asked, together, strict=True):
        tokens = generation.wait().tokens
        expected = greedy_of(twins[name], prompt, MAX_TOKENS, eos_token_id=None)
        parted += count_near_ties(twins[name], prompt, tokens, expected)
        texts[name].append(tokens)
    assert parted <= 1
    assert texts[None] != texts["poet"] != texts["lawyer"] != texts[None], "no claim without a difference"


def test_an_adapter_finds_its_own_blocks_and_no_others(driver: EngineDriver) -> None:
    prompt = prompt_of(64)
    for name in NAMES:
        first = driver.generate(prompt, adapter=name)
        again = driver.generate(prompt, adapter=name)
        assert first.started.cached.total == 0, "what another model computed is not to be found"
        assert again.started.cached.total == 63
        assert again.tokens == first.tokens
        assert driver.generate(prompt, adapter=name, scope="bb").started.cached.total == 0


def test_prompts_of_two_adapters_do_not_follow_each_other(driver: EngineDriver) -> None:
    together = [driver.submit(prompt_of(100), adapter=name) for name in NAMES for _ in range(3)]
    cached = [generation.wait().started.cached.total for generation in together]
    assert cached.count(0) == len(NAMES), "each model has one leader"
    assert min(filter(None, cached)) >= 96, "and the others have its blocks"


def test_preemption_and_several_texts_change_nothing(
    model: LoadedModel, folders: dict[str, Path], twins: dict[str | None, LoadedModel]
) -> None:
    prompts = {name: prompt_of(60, seed) for seed, name in enumerate(NAMES)}
    with running_engine(model, adapters=serving(folders), kv_cache_blocks=14) as driver:
        together = {
            name: driver.submit(prompt, adapter=name, n=2, max_tokens=40, ignore_eos=True)
            for name, prompt in prompts.items()
        }
        parted = 0
        for name, generation in together.items():
            expected = greedy_of(twins[name], prompts[name], 40, eos_token_id=None)
            for tokens in generation.wait().choices:
                parted += count_near_ties(twins[name], prompts[name], tokens, expected)
        stats = driver.idle_stats()
    assert parted <= 1
    assert stats.preemptions > 0
    assert stats.blocks_held == 0


def test_a_model_that_is_served_uncached_has_adapters_too(tmp_path: Path) -> None:
    windowed = UNCACHED_FAMILIES["mistral, windowed"]
    folder = save_adapter(tmp_path / "poet", tiny(windowed, tmp_path), 0, target_modules=LAYERS["poet"])
    plain = tiny(windowed, tmp_path, attention=None)
    twin = tiny(windowed, tmp_path, attention=None)
    PeftModel.from_pretrained(twin.network, str(folder))
    prompt = prompt_of(60)
    with running_engine(tiny(windowed, tmp_path), adapters=f"poet={folder}") as driver:
        both = [driver.submit(prompt, adapter=name, max_tokens=MAX_TOKENS) for name in (None, "poet")]
        texts = [generation.wait().tokens for generation in both]
    assert texts[0] != texts[1]
    for network, text in zip((plain, twin), texts, strict=True):
        assert count_near_ties(network, prompt, text, greedy_of(network, prompt, MAX_TOKENS)) == 0


def test_an_adapter_that_is_not_there_is_refused(driver: EngineDriver) -> None:
    with pytest.raises(RequestRefused, match="adapter: this worker has none called 'painter'"):
        driver.submit(prompt_of(3), adapter="painter")


def test_the_card_names_each_model_with_its_weights(model: LoadedModel, folders: dict[str, Path]) -> None:
    settings = WorkerSettings(adapters=serving(folders), kv_cache_blocks=8)  # type: ignore[call-arg]
    card = build_worker(model, settings).card
    assert set(card.fingerprints) == {"tiny-llama", "poet", "lawyer"}
    assert len(set(card.fingerprints.values())) == len(NAMES)


def test_an_adapter_without_a_name_is_called_after_its_base_and_folder(folders: dict[str, Path]) -> None:
    (adapter,) = adapters_of(str(folders["poet"]), base="tiny-llama")
    assert adapter.name == "tiny-llama:poet"


def test_other_weights_under_the_same_name_have_another_fingerprint(
    folders: dict[str, Path], model: LoadedModel, tmp_path: Path
) -> None:
    changed = save_adapter(tmp_path / "other", model, 7, target_modules=LAYERS["poet"])
    (before,) = adapters_of(f"poet={folders['poet']}", base="tiny-llama")
    (after,) = adapters_of(f"poet={changed}", base="tiny-llama")
    assert before.fingerprint != after.fingerprint


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["norm"]}, "modules_to_save"),
        ({"bias": "all"}, "biases"),
        ({"init_lora_weights": "pissa"}, "pissa"),
    ],
)
def test_an_adapter_that_changes_its_base_is_refused(
    model: LoadedModel, tmp_path: Path, settings: dict[str, object], reason: str
) -> None:
    folder = save_adapter(tmp_path / "odd", tiny_llama(tmp_path), 0, target_modules=["q_proj"], **settings)
    with pytest.raises(ModelUnavailable, match=reason):
        build_worker(model, WorkerSettings(adapters=f"odd={folder}", kv_cache_blocks=8))  # type: ignore[call-arg]


def test_an_adapter_of_another_model_is_refused(model: LoadedModel, tmp_path: Path) -> None:
    other = tiny_llama(tmp_path, hidden_size=32, intermediate_size=64)
    folder = save_adapter(tmp_path / "foreign", other, 0, target_modules=["q_proj"])
    with pytest.raises(ModelUnavailable, match="does not fit"):
        build_worker(model, WorkerSettings(adapters=f"odd={folder}", kv_cache_blocks=8))  # type: ignore[call-arg]


@pytest.mark.parametrize("setting", ["poet=/nowhere", "{poet},{poet}", "tiny-llama={poet}"])
def test_a_setting_that_cannot_be_meant_is_refused(folders: dict[str, Path], setting: str) -> None:
    with pytest.raises(ModelUnavailable, match="adapter"):
        adapters_of(setting.format(**folders), base="tiny-llama")
