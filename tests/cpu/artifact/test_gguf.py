"""GGUF files: every weight bit for bit, and the tokenizer id for id, against the `gguf` package and transformers."""

import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from tokenizers import Tokenizer
from torch import Tensor
from typer.testing import CliRunner

from longlane.artifact import checkpoint
from longlane.artifact.checkpoint import gguf_header, load_weights, open_gguf
from longlane.artifact.convert import Options, convert
from longlane.artifact.formats import decode
from longlane.artifact.gguf import GgufModel
from longlane.artifact.gguf_file import GgufFile
from longlane.artifact.locate import find
from longlane.artifact.recipe import assemble
from longlane.artifact.resources import open_resources
from longlane.artifact.schema import RESOURCES
from longlane.artifact.sizes import Plain, weight_bytes
from longlane.cli import app
from longlane.errors import CheckpointError
from support.gguf_files import HEADS, HIDDEN, INTER, KV_HEADS, VOCAB, random_arrays, write_gguf
from support.random_checkpoint import byte_tokenizer


def halves(rows: Tensor, heads: int) -> Tensor:
    """Each head's rows from interleaved order (2i, 2i + 1 a RoPE pair) to two halves (i, i + dim / 2 a pair)."""
    out = torch.empty_like(rows)
    dim = len(rows) // heads
    for head in range(heads):
        for i in range(dim // 2):
            out[head * dim + i] = rows[head * dim + 2 * i]
            out[head * dim + dim // 2 + i] = rows[head * dim + 2 * i + 1]
    return out


MIXES = {
    "q4_1 with a q8_0 embedding": {
        "token_embd": Type.Q8_0,
        "norm": Type.F32,
        **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), Type.Q4_1),
    },
    "all kinds": {
        "token_embd": Type.F16,
        "attn_q": Type.Q4_1,
        "attn_k": Type.Q8_0,
        "attn_v": Type.BF16,
        "ffn_gate": Type.BF16,
        "ffn_up": Type.BF16,
        "ffn_down": Type.Q8_0,
        "output": Type.Q8_0,
    },
    "float32": {},
}


@pytest.mark.parametrize("types", MIXES.values(), ids=MIXES.keys())
def test_every_weight_is_carried_exactly(tmp_path: Path, types: dict[str, Type]) -> None:
    held = write_gguf(tmp_path / "m.gguf", random_arrays(tied=False), types)
    convert(tmp_path / "m.gguf", tmp_path / "m.ninfer", Options(), quiet=True)
    config, weights = load_weights(tmp_path / "m.ninfer")
    assert config["tie_word_embeddings"] is False
    expected = {
        "text/token_embedding": held["token_embd"],
        "text/final_norm": held["output_norm"],
        "text/output_head": held["output"],
    }
    for layer in range(2):
        own = {name.split(".")[2]: values for name, values in held.items() if name.startswith(f"blk.{layer}.")}
        query, key = halves(own["attn_q"], HEADS), halves(own["attn_k"], KV_HEADS)
        expected |= {
            f"text/layers/{layer}/{name}": values
            for name, values in {
                "input_norm": own["attn_norm"],
                "attention/query_key_value": torch.cat((query, key, own["attn_v"])),
                "attention/output": own["attn_output"],
                "post_attention_norm": own["ffn_norm"],
                "mlp/gate_up": torch.cat((own["ffn_gate"], own["ffn_up"])),
                "mlp/down": own["ffn_down"],
            }.items()
        }
    assert weights.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(decode(weights[name]), values), name


def test_four_bits_stay_four_bits(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", random_arrays(), MIXES["q4_1 with a q8_0 embedding"])
    formats = {item.name: item.format for item in open_gguf(tmp_path / "m.gguf").items}
    assert formats["text/token_embedding"] == "q8_g32_fp16"
    assert {formats[f"text/layers/1/{name}"] for name in ("attention/query_key_value", "mlp/gate_up", "mlp/down")} == {
        "q4_1_g32_fp16"
    }
    assert "text/output_head" not in formats


@pytest.mark.parametrize("byte", [2, 1], ids=["code -128", "negative scale"])
def test_a_q8_0_outside_our_format_becomes_float32(tmp_path: Path, byte: int) -> None:
    arrays = random_arrays()
    data = gguf.quantize(arrays["token_embd"], Type.Q8_0)
    data[5, byte] |= 0x80
    if byte == 2:
        data[5, byte] = 0x80
    held = write_gguf(tmp_path / "m.gguf", arrays, {"token_embd": Type.Q8_0}, token_embd=data)
    item = open_gguf(tmp_path / "m.gguf").items[0]
    assert item.format == "fp32"
    assert torch.equal(assemble(item)[0], held["token_embd"])


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "another family": ({"family": "mamba"}, "architecture mamba .* converts llama"),
    "another tokenizer": ({"pre": "qwen2"}, "pre-tokenizer qwen2 .* reads smollm"),
    "scaled positions": ({"scaling": gguf.RopeScalingType.YARN}, "scaling yarn is not supported"),
    "heads that do not fit": ({"heads": 8}, r"attn_k.weight has shape \[32, 64\], its settings imply \[16, 64\]"),
    "no heads": ({"heads": 0}, "llama.attention.head_count is 0, not one positive number"),
    "an id outside the vocabulary": ({"eos": 5000}, "token 5000 is outside its vocabulary of 320"),
    "another type": ({"types": {"ffn_down": Type.Q4_0}}, "ffn_down.weight is of GGUF type Q4_0; .* Q4_1"),
}


@pytest.mark.parametrize(("changes", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_what_cannot_be_converted_says_what_can(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    changes = {"types": {}, **changes}
    write_gguf(tmp_path / "m.gguf", random_arrays(), **changes)
    with pytest.raises(CheckpointError, match=message) as error:
        open_gguf(tmp_path / "m.gguf")
    assert "m.gguf" in error.value.message
    assert "\n" not in error.value.message


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the encoders of `gguf`, which do not mind
@pytest.mark.parametrize("type", [Type.Q4_1, Type.Q8_0, Type.F16, Type.F32], ids=lambda type: type.name)
def test_values_that_are_not_finite_are_refused(tmp_path: Path, type: Type) -> None:
    arrays = random_arrays()
    arrays["blk.1.ffn_down"][3, 5] = np.inf
    write_gguf(tmp_path / "m.gguf", arrays, {"ffn_down": type})
    with pytest.raises(CheckpointError, match=r"tensor blk\.1\.ffn_down\.weight has values that are not finite"):
        convert(tmp_path / "m.gguf", tmp_path / "m.ninfer", Options(), quiet=True)
    assert not list(tmp_path.glob("*.ninfer*"))


def test_missing_extra_and_cut(tmp_path: Path) -> None:
    arrays = random_arrays()
    write_gguf(tmp_path / "extra.gguf", {**arrays, "rope_freqs": np.ones(8, np.float32)}, {})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        open_gguf(tmp_path / "extra.gguf")
    del arrays["blk.1.ffn_up"]
    write_gguf(tmp_path / "missing.gguf", arrays, {})
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight is missing"):
        open_gguf(tmp_path / "missing.gguf")
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "missing.gguf").read_bytes()[:20000])
    with pytest.raises(
        CheckpointError, match=r"token_embd\.weight, byte 6,880 of 20,000: there is no place for its 81920 bytes"
    ):
        open_gguf(tmp_path / "cut.gguf")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a model that is to be served is converted to."""
    monkeypatch.setenv("LONGLANE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_inspecting_counts_the_file_s_own_types_and_converts_nothing(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, random_arrays(), {"ffn_down": Type.Q4_1})
    result = CliRunner().invoke(app, ["inspect", str(path), "--json"])
    assert result.exit_code == 0, result.exception
    found = json.loads(result.output)
    assert {row["name"]: (row["tensors"], row["bytes"]) for row in found["formats"]} == {
        "F32": (18, 4 * sum(values.size for name, values in random_arrays().items() if "ffn_down" not in name)),
        "Q4_1": (2, 2 * HIDDEN * INTER * 20 // 32),
    }
    assert (found["tensors"], found["architecture"], found["problems"]) == (20, "llama", [])
    assert found["file_bytes"] == path.stat().st_size
    assert [*found["resources"]] == [
        RESOURCES[role] for role in RESOURCES if role in GgufModel(GgufFile(path)).resources
    ]
    assert not cache.exists()
    for flag in ("--objects", "--sha256"):
        refused = CliRunner().invoke(app, ["inspect", str(path), flag]).exception
        assert f"{path} is a GGUF file, and --objects and --sha256 are of an artifact" in str(refused)


def test_inspecting_says_why_a_file_cannot_be_converted(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "m.gguf"
    for changes, message in BROKEN.values():
        write_gguf(path, random_arrays(), **{"types": {}, **changes})
        result = CliRunner().invoke(app, ["inspect", str(path)])
        assert result.exit_code == 0, result.exception
        assert re.search(f"cannot run: .*{message}", result.output)
        assert "This build can run it." not in result.output
    assert not cache.exists()


@pytest.mark.parametrize("plain", [None, Plain(4, packed=True), Plain(8, packed=False)])
def test_planning_counts_what_converting_would_place_and_converts_nothing(
    tmp_path: Path, cache: Path, plain: Plain | None
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, random_arrays(tied=False), MIXES["all kinds"])
    made = CliRunner().invoke(app, ["plan", str(path), "--json"])
    assert made.exit_code == 0, made.exception
    assert not cache.exists()
    convert(path, tmp_path / "m.ninfer", Options(), quiet=True)
    config = open_resources(tmp_path / "m.ninfer").config
    sizes = [weight_bytes(config, file, ["text"], "auto", plain=plain) for file in (path, tmp_path / "m.ninfer")]
    assert sizes[0] == sizes[1]
    placed = next(pool for pool in json.loads(made.output)["pools"] if pool["name"] == "weights: text")
    assert placed["bytes"] == weight_bytes(config, path, ["text"], "auto")["text"]


def test_planning_reads_a_file_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opened = tmp_path / "m.gguf", []
    monkeypatch.setattr(checkpoint, "GgufModel", lambda file: opened.append(file.path) or GgufModel(file))
    for tied in (True, False):
        write_gguf(path, random_arrays(tied), {})
        opened.clear()
        made = CliRunner().invoke(app, ["plan", str(path), "--json"])
        assert made.exit_code == 0, made.exception
        assert opened == [path]
        config, entries = gguf_header(path)
        assert config["tie_word_embeddings"] is tied
        assert ("text/output_head" in {entry.name for entry in entries}) is not tied


@pytest.fixture(scope="module")
def demo() -> GgufModel:
    return GgufModel(GgufFile(find("demo")))


class FastReader(gguf.GGUFReader):  # type: ignore[misc]
    """The package's reader on a plain array: slicing one is three times as fast as slicing a `numpy.memmap`."""

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, mapped: Any) -> None:
        self._data = mapped.view(np.ndarray)


@pytest.fixture(scope="module")
def read() -> FastReader:
    """What the package reads of the same file."""
    return FastReader(find("demo"))


def test_every_setting_and_tensor_is_read_as_the_package_reads_it(read: FastReader) -> None:
    file = GgufFile(find("demo"))
    settings = {key: field.contents() for key, field in read.fields.items() if not key.startswith("GGUF.")}
    assert file.settings == settings
    assert file.version == read.fields["GGUF.version"].contents()
    assert [*file.tensors] == [tensor.name for tensor in read.tensors]
    for tensor in read.tensors:
        ours = file.tensors[tensor.name]
        assert (ours.type, ours.shape) == (tensor.tensor_type, tuple(reversed(tensor.shape.tolist())))
        assert np.array_equal(ours.data, np.atleast_1d(tensor.data).view(np.uint8)), tensor.name


def test_demo_settings(demo: GgufModel) -> None:
    assert demo.config["architectures"] == ["LlamaForCausalLM"]
    sizes = [demo.config[key] for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim")]
    assert sizes == [576, 30, 3, 64]
    generation = json.loads(demo.resources["generation_config"])
    assert generation == {"eos_token_id": [2], "pad_token_id": 2, "temperature": 0.2, "top_p": 0.9}
    assert json.loads(demo.resources["tokenizer_config"])["eos_token"] == "<|im_end|>"
    assert b"<|im_start|>assistant" in demo.resources["chat_template"]


def test_demo_weights_are_those_of_the_file(demo: GgufModel, read: FastReader) -> None:
    items = {item.name: item for item in demo.items()}
    tensors = {tensor.name: tensor for tensor in read.tensors}

    def values(name: str) -> Tensor:
        tensor = tensors[name]
        return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())

    qkv, _ = assemble(items["text/layers/29/attention/query_key_value"])
    query, key = halves(values("blk.29.attn_q.weight"), 9), halves(values("blk.29.attn_k.weight"), 3)
    assert torch.equal(decode(qkv), torch.cat((query, key, values("blk.29.attn_v.weight"))))
    embedding, _ = assemble(items["text/token_embedding"])
    assert torch.equal(decode(embedding), values("token_embd.weight"))
    assert {item.format for item in items.values()} == {"q4_1_g32_fp16", "q8_g32_fp16", "fp32"}


TEXTS = [
    "The capital of France is Paris.",
    "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n",
    "  leading, trailing  \n\n\t tabs\t and\r\nlines   ",
    "Don't you think we'll see they're \"quoted\" (or [bracketed])?",
    "你好，世界。こんにちは 안녕하세요 مرحبا שלום Здравствуй",
    "emoji 🙂👩‍👩‍👧‍👦 and combining e\u0301 n\u0303",
    "def f(x):\n    return [y for y in x if y is not None]\n\n\nclass A(B):\n\tpass\n",
    "https://example.org/path?query=a&b=c#fragment",
    "x^2 + y_i != z; a<b>c && d||e ~`@#$%",
    "".join(map(chr, range(32, 127))),
    "\u00a0non-breaking\u2003em space\u200bzero width",
    "",
]
NUMBERS = ["In 1984, 3.14159 and 10,000 or 2^31", "a1b22c333", "room 101\n\n202   303", "½ ² ① Ⅷ ٣٤ 一二三"]


@pytest.fixture(scope="module")
def reference(demo: GgufModel) -> Tokenizer:
    """The tokenizer transformers makes of the same file. It leaves out the rule that splits digits."""
    from transformers import AutoTokenizer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", FastReader)  # for its speed
        loaded = AutoTokenizer.from_pretrained(str(demo.path.parent), gguf_file=demo.path.name)
    backend: Tokenizer = loaded.backend_tokenizer
    return backend


def test_demo_tokenizer_equals_that_of_transformers(demo: GgufModel, reference: Tokenizer) -> None:
    ours = Tokenizer.from_buffer(demo.resources["tokenizer"])
    lines = Path(__file__).read_text().splitlines()
    texts = TEXTS + ["".join(character for character in line if not is_numeric(character)) for line in lines]
    for text in texts:
        ids = ours.encode(text).ids
        assert ids == reference.encode(text).ids, text
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_demo_tokenizer_splits_every_digit(demo: GgufModel, reference: Tokenizer) -> None:
    """As the model was trained: its own tokenizer splits digits first, which `pre` = smollm stands for."""
    ours = Tokenizer.from_buffer(demo.resources["tokenizer"])
    for text in NUMBERS:
        ids = ours.encode(text).ids
        digits = [token for id in ids if (token := ours.decode([id])).strip().isnumeric()]
        assert all(len(token) == 1 for token in digits), text
        assert ids == [id for piece in split_numeric(text) for id in reference.encode(piece).ids], text


def split_numeric(text: str) -> list[str]:
    """Every numeric character alone, the runs between them whole."""
    runs: list[str] = []
    for character in text:
        joined = runs and not (is_numeric(character) or is_numeric(runs[-1][-1]))
        runs[-1:] = [runs[-1] + character] if joined else [*runs[-1:], character]
    return runs


def is_numeric(character: str) -> bool:
    return unicodedata.category(character).startswith("N")


def test_demo_resources_survive_conversion(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", random_arrays(), {})
    convert(tmp_path / "m.gguf", tmp_path / "m.ninfer", Options(), quiet=True)
    resources = open_resources(tmp_path / "m.ninfer")
    text = "Hi <|im_end|> 12"
    tokenizer = Tokenizer.from_buffer(resources.get("tokenizer") or b"")
    assert tokenizer.encode(text).ids == byte_tokenizer(VOCAB).encode(text).ids
    assert resources.get("chat_template") == b"{{ messages }}"
    assert resources.get("preprocessor_config") is None
    assert resources.config["architectures"] == ["LlamaForCausalLM"]
