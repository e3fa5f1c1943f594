"""The tensors a checkpoint of the family must hold, by name and shape, and the check that it holds those and no others.

Names and shapes are those of the `qwen3_5` and `qwen3_5_moe` models of transformers, of the MTP head that released
checkpoints carry beside them, and of DFlash2 drafters.
"""

import logging
from pathlib import Path
from typing import Any

from longlane.artifact.huggingface import Checkpoint
from longlane.artifact.text_config import MOST, MOST_REPEATED, is_count
from longlane.errors import CheckpointError, counted

Shapes = dict[str, tuple[int, ...]]
HEAD = "lm_head.weight"
VISION_KEYS = (
    "depth",
    "hidden_size",
    "intermediate_size",
    "in_channels",
    "patch_size",
    "temporal_patch_size",
    "spatial_merge_size",
    "num_position_embeddings",
    "out_hidden_size",
)
DRAFTER_KEYS = (
    "hidden_size",
    "intermediate_size",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "vocab_size",
)
DFLASH_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank")
log = logging.getLogger(__name__)


def text_prefix(checkpoint: Checkpoint) -> str:
    nested = "model.language_model."
    return nested if any(name.startswith(nested) for name in checkpoint.tensors) else "model."


def has_stacked_experts(checkpoint: Checkpoint) -> bool:
    """Whether the experts of a layer are one tensor each of gate + up and down, as newer checkpoints have them."""
    return any(name.endswith("experts.gate_up_proj") for name in checkpoint.tensors)


def text_shapes(config: dict[str, Any], prefix: str, stacked_experts: bool) -> Shapes:
    """The language model without MTP. `prefix` is "model." or "model.language_model."."""
    hidden = config["hidden_size"]
    shapes: Shapes = {f"{prefix}embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer, kind in enumerate(config["layer_types"]):
        mixer = _attention if kind == "full_attention" else _gated_deltanet
        shapes |= _layer(config, f"{prefix}layers.{layer}.", mixer(config), stacked_experts)
    shapes[f"{prefix}norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes[HEAD] = (config["vocab_size"], hidden)
    return shapes


def mtp_shapes(config: dict[str, Any], stacked_experts: bool) -> Shapes:
    hidden = config["hidden_size"]
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return {
        "mtp.fc.weight": (hidden, 2 * hidden),
        **{f"mtp.{name}.weight": (hidden,) for name in norms},
        **_layer(config, "mtp.layers.0.", _attention(config), stacked_experts),
    }


def vision_shapes(config: dict[str, Any], path: Path) -> Shapes:
    """`config` is the `vision_config` of the checkpoint in `path`."""
    for key in VISION_KEYS:
        most = MOST_REPEATED if key == "depth" else MOST
        if not is_count(size := config.get(key), most):
            raise CheckpointError(
                f"{path / 'config.json'}: {key} of vision_config is {size!r}, not a number from 1 to {most}; "
                "use the config.json this checkpoint was saved with"
            )
    hidden, inter, prefix = config["hidden_size"], config["intermediate_size"], "model.visual."
    merged = hidden * config["spatial_merge_size"] ** 2
    patch = (config["in_channels"], config["temporal_patch_size"], config["patch_size"], config["patch_size"])
    shapes: Shapes = {
        f"{prefix}patch_embed.proj.weight": (hidden, *patch),
        f"{prefix}patch_embed.proj.bias": (hidden,),
        f"{prefix}pos_embed.weight": (config["num_position_embeddings"], hidden),
    }
    linears = {
        "attn.qkv": (3 * hidden, hidden),
        "attn.proj": (hidden, hidden),
        "mlp.linear_fc1": (inter, hidden),
        "mlp.linear_fc2": (hidden, inter),
    }
    for block in range(config["depth"]):
        for name, shape in linears.items():
            shapes |= _biased(f"{prefix}blocks.{block}.{name}", shape)
        for name in ("norm1", "norm2"):
            shapes |= _biased(f"{prefix}blocks.{block}.{name}", (hidden,))
    shapes |= _biased(f"{prefix}merger.norm", (hidden,))
    shapes |= _biased(f"{prefix}merger.linear_fc1", (merged, merged))
    return shapes | _biased(f"{prefix}merger.linear_fc2", (config["out_hidden_size"], merged))


def dflash2_shapes(config: dict[str, Any], target: dict[str, Any], path: Path) -> Shapes:
    """`config` is the drafter's own `config.json` in `path`, `target` the text configuration it drafts for."""
    _check_drafter(config, target, path)
    hidden, inter, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    draft = config["dflash_config"]
    taps, rank = draft["conv_kernel_size"], draft["selector_rank"]
    shapes: Shapes = {
        "fc.weight": (hidden, hidden * len(draft["target_layer_ids"])),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "candidate_selector.hidden_projection.weight": (rank, hidden),
        "candidate_selector.predecessor_codebook": (config["vocab_size"], rank),
        "candidate_selector.successor_codebook": (config["vocab_size"], rank),
    }
    per_layer = {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
        "attention_conv.base_kernel": (2, taps, hidden),
        "attention_conv.kernel_projection.weight": (2 * taps * (hidden // draft["conv_group_size"]), hidden),
        **_dense_mlp(hidden, inter),
        **_block_norms(hidden),
    }
    for name in ("base_kernel", "kernel_projection.weight"):
        per_layer[f"mlp_conv.{name}"] = per_layer[f"attention_conv.{name}"]
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in per_layer.items()}
    return shapes


def _check_drafter(config: dict[str, Any], target: dict[str, Any], path: Path) -> None:
    draft = config.get("dflash_config")
    counts = [config.get(key) for key in DRAFTER_KEYS]
    if isinstance(draft, dict) and isinstance(draft.get("target_layer_ids"), list):
        counts += [len(draft["target_layer_ids"]), *(draft.get(key) for key in DFLASH_KEYS)]
    else:
        counts.append(None)
    if not (all(map(is_count, counts)) and is_count(config["num_hidden_layers"], MOST_REPEATED)):
        raise CheckpointError(f"{path / 'config.json'} is not that of a DFlash2 drafter; pass its directory, unchanged")
    for key in ("hidden_size", "vocab_size"):
        if config[key] != target[key]:
            raise CheckpointError(
                f"{path / 'config.json'}: {key} {config[key]} does not fit the target's {target[key]}; "
                "use the drafter that was trained for this model"
            )


def check(checkpoint: Checkpoint, expected: Shapes, tied: bool = False) -> None:
    """Every expected tensor is there in its shape and a readable dtype, and nothing else is.

    A `tied` checkpoint may carry its head a second time, if it is the same. Raises CheckpointError for the first
    tensor that is missing, misshapen, quantised or unexpected.
    """
    for name, shape in expected.items():
        info = checkpoint.require(name)
        if info.shape != shape:
            raise CheckpointError(
                f"{info.file}: tensor {name} has shape {list(info.shape)}, config.json implies {list(shape)}; "
                "use the config.json this checkpoint was saved with"
            )
    extra = sorted(checkpoint.tensors.keys() - expected.keys())
    if tied and HEAD in extra:
        _check_tied(checkpoint)
        extra.remove(HEAD)
    if extra:
        raise CheckpointError(
            f"{checkpoint.tensors[extra[0]].file}: {counted(len(extra), 'tensor')} that config.json does not account "
            f"for ({extra[0]}); use the config.json this checkpoint was saved with, or remove the tensors"
        )


def _check_tied(checkpoint: Checkpoint) -> None:
    head = checkpoint.require(HEAD)
    embedding = f"{text_prefix(checkpoint)}embed_tokens.weight"
    step = 4096
    if head.shape != checkpoint.tensors[embedding].shape or not all(
        checkpoint.rows(HEAD, begin, begin + step).equal(checkpoint.rows(embedding, begin, begin + step))
        for begin in range(0, head.shape[0], step)
    ):
        raise CheckpointError(
            f"{head.file}: {HEAD} differs from {embedding} although tie_word_embeddings is true; set it to false in "
            "config.json to use the head, or remove the tensor to use the embedding"
        )


def present(checkpoint: Checkpoint, component: str, prefix: str, setting: str, strict: bool) -> bool:
    """Whether a component that `setting` promises is there. Wholly absent is an error if `strict`, else a log line."""
    if any(name.startswith(prefix) for name in checkpoint.tensors):
        return True
    message = f"{checkpoint.path / 'config.json'} promises {component} ({setting}) but no {prefix}* tensor is there"
    if strict:
        raise CheckpointError(f"{message}; fetch the files that hold it, or take {setting} out of config.json")
    log.warning("%s; going on without", message)
    return False


def _layer(config: dict[str, Any], prefix: str, mixer: Shapes, stacked_experts: bool) -> Shapes:
    hidden = config["hidden_size"]
    sparse = "num_experts" in config
    mlp = _moe(config, stacked_experts) if sparse else _dense_mlp(hidden, config["intermediate_size"])
    return {f"{prefix}{name}": shape for name, shape in (mixer | mlp | _block_norms(hidden)).items()}


def _block_norms(hidden: int) -> Shapes:
    return {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}


def _attention(config: dict[str, Any]) -> Shapes:
    hidden, dim = config["hidden_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return {
        "self_attn.q_proj.weight": (2 * query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
    }


def _gated_deltanet(config: dict[str, Any]) -> Shapes:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value = heads * config["linear_value_head_dim"]
    return {
        "linear_attn.in_proj_qkv.weight": (2 * key + value, hidden),
        "linear_attn.in_proj_z.weight": (value, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (2 * key + value, 1, config["linear_conv_kernel_dim"]),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (config["linear_value_head_dim"],),
        "linear_attn.out_proj.weight": (hidden, value),
    }


def _dense_mlp(hidden: int, inter: int) -> Shapes:
    return {
        "mlp.gate_proj.weight": (inter, hidden),
        "mlp.up_proj.weight": (inter, hidden),
        "mlp.down_proj.weight": (hidden, inter),
    }


def _moe(config: dict[str, Any], stacked_experts: bool) -> Shapes:
    hidden, inter, experts = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    shapes: Shapes = {"mlp.gate.weight": (experts, hidden), "mlp.shared_expert_gate.weight": (1, hidden)}
    shared = _dense_mlp(hidden, config["shared_expert_intermediate_size"])
    shapes |= {name.replace("mlp.", "mlp.shared_expert."): shape for name, shape in shared.items()}
    if stacked_experts:
        shapes["mlp.experts.gate_up_proj"] = (experts, 2 * inter, hidden)
        shapes["mlp.experts.down_proj"] = (experts, hidden, inter)
        return shapes
    for expert in range(experts):
        own = _dense_mlp(hidden, inter)
        shapes |= {name.replace("mlp.", f"mlp.experts.{expert}."): shape for name, shape in own.items()}
    return shapes


def _biased(prefix: str, shape: tuple[int, ...]) -> Shapes:
    return {f"{prefix}.weight": shape, f"{prefix}.bias": shape[:1]}
