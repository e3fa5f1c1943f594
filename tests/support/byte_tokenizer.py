"""A byte-level tokenizer small enough to write by hand: one token a byte, a few merges, a few control tokens."""

import json

from longlane.text.tokenizer import BYTE_OF_CHAR, Tokenizer

CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}
CONTROL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>"]
CONTROL_IDS = {text: 259 + i for i, text in enumerate(CONTROL)}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def definition() -> bytes:
    """Token b is byte b for b < 256, then `he`, `ll`, `hell`, then the control tokens from 259."""
    vocab = {CHAR_OF_BYTE[byte]: byte for byte in range(256)} | {"he": 256, "ll": 257, "hell": 258}
    spec = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": id,
                "content": text,
                "special": text.startswith("<|"),
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for text, id in CONTROL_IDS.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": [["h", "e"], ["l", "l"], ["he", "ll"]]},
    }
    return json.dumps(spec).encode()


def tokenizer() -> Tokenizer:
    return Tokenizer(definition(), {"eos_token": "<|im_end|>"})


def resources() -> dict[str, bytes]:
    """What an artifact would hold for this tokenizer."""
    return {
        "tokenizer": definition(),
        "tokenizer_config": json.dumps({"eos_token": "<|im_end|>"}).encode(),
        "chat_template": CHATML.encode(),
        "generation_config": json.dumps({"temperature": 0.6, "top_k": 20, "eos_token_id": 260}).encode(),
    }
