"""What packing keys and values saves, and what it loses, on real prompts.

    python benchmarks/kv_codecs.py            about five minutes
    python benchmarks/kv_codecs.py --quick    four prompts, no file written

Twenty passages of 1,500 characters out of recorded agents' sessions (code, tool output, instructions), as
chat messages to the default model in float32. Its own greedy text of 32 tokens is what every codec goes on
from, token by token: how far are the next token's logits and distribution (Kullback-Leibler divergence, in
nats) from the model's own, and how often is the likeliest token another. All keys and values are packed,
those of the prompt too.
A decode step is that of one sequence on 1,600 tokens, in processor time of one thread, by turns.
Exits with 1 when a codec loses more than its limit.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from peers.engine import default_folder, load_packed, random_tokens
from peers.record import REPOSITORY, write_result
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from model_worker.capacity import capacity_of
from model_worker.kv_codecs import make_pool
from model_worker.kv_shape import CODECS, DTYPES, NumberFormat
from model_worker.models import LoadedModel
from model_worker.runner import ModelRunner, Part

TRACES = ("magagent-46e404f0f6d0", "miniswe-063925220f0d")
PROMPTS = 20
PROMPT_CHARACTERS = 1500
OUTPUT_TOKENS = 32
CONTEXT_TOKENS = 1600
MEMORY_BYTES = 2 * 2**30
CONVERSATION_TOKENS = 2000
BLOCK_SIZE = 16
STEP_TOKENS = 128
MAX_MEAN_KL = {"int8": 0.005, "int4": 0.1}

FORMATS: dict[str, NumberFormat | None] = {"float32": None, **CODECS}
console = Console(width=130)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A prompt, the blocks it lies in, and what goes on from it."""

    tokens: list[int]
    num_prompt: int
    table: list[int]


# ---- prompts


def passages(trace: str, count: int) -> Iterator[str]:
    """Of the longest prompt in a recording, evenly over its length: its turns repeat each other."""
    with gzip.open(REPOSITORY / "tests" / "traces" / f"{trace}.jsonl.gz", "rt") as lines:
        longest = max((json.loads(line)["input"] for line in lines), key=len)
    distance = (len(longest) - PROMPT_CHARACTERS) // (count - 1)
    return (longest[start : start + PROMPT_CHARACTERS] for start in range(0, count * distance, distance))


def chat_prompts(folder: Path, count: int) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [text for trace in TRACES for text in passages(trace, count // len(TRACES))]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]


def texts_of(token_lists: list[list[int]]) -> list[Text]:
    texts, first = [], 0
    for tokens in token_lists:
        last = first + -(-(len(tokens) + OUTPUT_TOKENS) // BLOCK_SIZE)
        texts.append(Text(tokens=[*tokens], num_prompt=len(tokens), table=list(range(first, last))))
        first = last
    return texts


# ---- what is lost


def runner_of(model: LoadedModel, codec: NumberFormat | None, num_blocks: int) -> ModelRunner:
    pool = make_pool(
        model.kv_shape,
        codec,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        dtype=model.dtype,
        device=model.device,
    )
    return ModelRunner(model, pool)


def next_logits(runner: ModelRunner, texts: list[Text]) -> Iterator[torch.Tensor]:
    """Logits `[texts, vocab]` after the prompts, and again each time every text has one more token."""
    prompts = [(text.tokens[: text.num_prompt], text.table) for text in texts]
    yield torch.cat([prefill(runner, tokens, table) for tokens, table in prompts])
    for offset in range(OUTPUT_TOKENS - 1):
        at = [text.num_prompt + offset for text in texts]
        parts = [part(text, start, start + 1) for text, start in zip(texts, at, strict=True)]
        yield runner.forward(parts)


def prefill(runner: ModelRunner, tokens: list[int], table: list[int]) -> torch.Tensor:
    """Logits `[1, vocab]` after all of `tokens`."""
    text = Text(tokens=tokens, num_prompt=len(tokens), table=table)
    for start in range(0, text.num_prompt, STEP_TOKENS):
        logits = runner.forward([part(text, start, min(text.num_prompt, start + STEP_TOKENS))])
    return logits


def part(text: Text, start: int, stop: int) -> Part:
    return Part(tokens=text.tokens, block_table=text.table, start=start, stop=stop, samples=True)


def own_logits(runner: ModelRunner, texts: list[Text]) -> torch.Tensor:
    """The model's own `[output tokens, texts, vocab]`; the texts get its greedy tokens."""
    found = []
    for logits in next_logits(runner, texts):
        found.append(logits)
        for text, token in zip(texts, logits.argmax(-1).tolist(), strict=True):
            text.tokens.append(token)
    return torch.stack(found)


def losses(own: torch.Tensor, found: torch.Tensor) -> dict[str, float]:
    difference = (found - own).abs()
    likely, others = own.log_softmax(-1), found.log_softmax(-1)
    divergence = (likely.exp() * (likely - others)).sum(-1)
    return {
        "mean_logit_error": float(difference.mean()),
        "max_logit_error": float(difference.max()),
        "mean_kl": float(divergence.mean()),
        "agreement": float((own.argmax(-1) == found.argmax(-1)).float().mean()),
    }


def compare(model: LoadedModel, texts: list[Text]) -> dict[str, dict[str, float]]:
    num_blocks = texts[-1].table[-1] + 1
    own = own_logits(runner_of(model, None, num_blocks), texts)
    return {
        name: losses(own, torch.stack([*next_logits(runner_of(model, codec, num_blocks), texts)]))
        for name, codec in FORMATS.items()
        if codec is not None
    }


# ---- what is saved, and what it takes


def decode_milliseconds(model: LoadedModel, rounds: int) -> dict[str, float]:
    """A decode step on `CONTEXT_TOKENS`."""
    tokens = random_tokens(0, CONTEXT_TOKENS + 1)
    table = list(range(CONTEXT_TOKENS // BLOCK_SIZE + 1))
    text = Text(tokens=tokens, num_prompt=CONTEXT_TOKENS, table=table)
    runners = {name: runner_of(model, codec, len(table)) for name, codec in FORMATS.items()}
    for runner in runners.values():
        prefill(runner, tokens[:CONTEXT_TOKENS], table)
    taken: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, runner in runners.items():
            begin = time.process_time()
            runner.forward([part(text, CONTEXT_TOKENS, CONTEXT_TOKENS + 1)])
            taken[name].append(1e3 * (time.process_time() - begin))
    return {name: statistics.median(each) for name, each in taken.items()}


def savings(model: LoadedModel) -> dict[str, dict[str, int]]:
    found = {}
    for numbers in (DTYPES["float32"], DTYPES["bfloat16"], *CODECS.values()):
        fits = capacity_of(
            model.kv_shape,
            numbers=numbers,
            memory_bytes=MEMORY_BYTES,
            context_tokens=CONVERSATION_TOKENS,
            block_size=BLOCK_SIZE,
        )
        found[numbers.name] = {
            "bytes_per_token": model.kv_shape.bytes_per_token(numbers),
            "conversations": fits.conversations,
        }
    return found


# ---- the report


def show(
    saved: dict[str, dict[str, int]], lost: dict[str, dict[str, float]], steps: dict[str, float], count: int
) -> list[str]:
    table = Table(
        title=f"Keys and values, {count} passages of real prompts x {OUTPUT_TOKENS} tokens, "
        f"conversations of {CONVERSATION_TOKENS:,} tokens in {MEMORY_BYTES / 2**30:.0f} GiB"
    )
    headings = ("kept as", "bytes per token", "conversations", "mean KL", "same token")
    for heading in (*headings, "logits off, mean", "max", "decode step"):
        table.add_column(heading, justify="left" if heading == headings[0] else "right")
    missed = []
    for name, saving in saved.items():
        loss = lost.get(name)
        told = ["–"] * 4
        if loss is not None:
            told = [
                f"{loss['mean_kl']:.5f}",
                f"{loss['agreement']:.1%}",
                f"{loss['mean_logit_error']:.3f}",
                f"{loss['max_logit_error']:.2f}",
            ]
            if loss["mean_kl"] > MAX_MEAN_KL[name]:
                missed.append(f"{name}: mean KL {loss['mean_kl']:.4f}, limit {MAX_MEAN_KL[name]}")
        step = f"{steps[name]:.1f} ms" if name in steps else "–"
        table.add_row(name, f"{saving['bytes_per_token']:,}", f"{saving['conversations']:,}", *told, step)
    console.print(table)
    for miss in missed:
        console.print(f"[red]missed[/red] {miss}")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    model = load_packed(default_folder())
    texts = texts_of(chat_prompts(model.folder, 4 if quick else PROMPTS))
    lost = compare(model, texts)
    steps = decode_milliseconds(model, 5 if quick else 15)
    saved = savings(model)
    missed = show(saved, lost, steps, len(texts))
    if not quick:
        write_result(
            "kv_codecs",
            {
                "versions": {"torch": torch.__version__},
                "prompts": len(texts),
                "prompt_tokens": sum(text.num_prompt for text in texts),
                "output_tokens": OUTPUT_TOKENS,
                "saved": saved,
                "lost": lost,
                "decode_step_ms": steps,
                "missed": missed,
            },
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
