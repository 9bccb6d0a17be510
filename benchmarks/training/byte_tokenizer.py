"""The byte-level tokenizer: token id = byte value, then eight special tokens."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, MASK, PAD, VOCAB = 256, 257, 258, 259, 264
SPECIALS = ["<|bos|>", "<|eos|>", "<|mask|>", "<|pad|>",
            "<|extra_0|>", "<|extra_1|>", "<|extra_2|>", "<|extra_3|>"]


CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n\n{% endfor %}"
"""The target continues text and knows no roles; the turns are its text."""


def byte_alphabet() -> list[str]:
    """The printable stand-in that byte-level tokenizers use for each byte value.

    Printable Latin-1 bytes stand for themselves; the others are numbered from U+0100 on in
    order of their value (GPT-2's convention, which `pre_tokenizers.ByteLevel` implements).
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(rest)) for byte in range(256)]


def save_tokenizer(path: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`; any text round-trips exactly."""
    path = Path(path)
    vocab = {symbol: byte for byte, symbol in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIALS])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|eos|>",
        "mask_token": "<|mask|>",
        "pad_token": "<|pad|>",
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
