"""A byte-level tokenizer of 259 tokens and a ChatML template: the files that a worker would serve."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer_json() -> bytes:
    """One token per byte. Truncation, padding and a leading token are on in the file, as traps."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=64)
    return tokenizer.to_str().encode()


def prompt_files(template: str = CHATML, **config: object) -> dict[str, bytes]:
    return {
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "chat_template.jinja": template.encode(),
    }


def decoded(ids: list[int]) -> str:
    """The text of token ids, special tokens included."""
    text: str = Tokenizer.from_buffer(tokenizer_json()).decode(ids, skip_special_tokens=False)
    return text
