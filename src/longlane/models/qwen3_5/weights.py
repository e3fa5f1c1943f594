"""Names and shapes of every tensor of the model, as artifacts store them."""

from longlane.models.qwen3_5.config import Qwen35Config

Shapes = dict[str, tuple[int, ...]]

# Components with a model of their own.
OTHERS = ("vision/", "dflash/", "dflash2/")


def required(config: Qwen35Config) -> Shapes:
    """The text model: everything but the output head of a tied one."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: Shapes = {"text/token_embedding": (vocab, hidden)}
    for layer, kind in enumerate(config.layer_types):
        mixer = _attention(config) if kind == "full_attention" else _gated_delta_net(config)
        shapes |= {f"text/layers/{layer}/{name}": shape for name, shape in (mixer | _feed_forward(config)).items()}
    shapes["text/final_norm"] = (hidden,)
    return shapes if config.tie_word_embeddings else shapes | {"text/output_head": (vocab, hidden)}


def mtp(config: Qwen35Config) -> Shapes:
    hidden = config.hidden_size
    fused = {"attention/query_key_gate_value": (2 * _query(config) + 2 * _kv(config), hidden)}
    rest = {name: shape for name, shape in _attention(config).items() if name not in _SPLIT}
    layer = fused | rest | _feed_forward(config)
    return {
        "mtp/input_projection": (hidden, 2 * hidden),
        "mtp/embedding_norm": (hidden,),
        "mtp/hidden_norm": (hidden,),
        "mtp/final_norm": (hidden,),
        **{f"mtp/layer/{name}": shape for name, shape in layer.items()},
    }


def draft_head(config: Qwen35Config, rows: int) -> Shapes:
    """The reduced output head of `rows` tokens that proposes drafts."""
    return {"text/draft_head": (rows, config.hidden_size), "text/draft_head_token_ids": (rows,)}


_SPLIT = ("attention/query_key", "attention/gate_value")


def _query(config: Qwen35Config) -> int:
    return config.num_attention_heads * config.head_dim


def _kv(config: Qwen35Config) -> int:
    return config.num_key_value_heads * config.head_dim


def _attention(config: Qwen35Config) -> Shapes:
    hidden, width = config.hidden_size, _query(config) + _kv(config)
    return {
        "attention/query_key": (width, hidden),
        "attention/gate_value": (width, hidden),
        "attention/query_norm": (config.head_dim,),
        "attention/key_norm": (config.head_dim,),
        "attention/output": (hidden, _query(config)),
    }


def _gated_delta_net(config: Qwen35Config) -> Shapes:
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    return {
        "gdn/a_log": (heads,),
        "gdn/dt_bias": (heads,),
        "gdn/convolution": (config.linear_conv_kernel_dim, config.channels),
        "gdn/a_projection": (heads, hidden),
        "gdn/b_projection": (heads, hidden),
        "gdn/query_key": (2 * config.key_width, hidden),
        "gdn/value_z": (2 * config.value_width, hidden),
        "gdn/norm": (config.linear_value_head_dim,),
        "gdn/output": (hidden, config.value_width),
    }


def _feed_forward(config: Qwen35Config) -> Shapes:
    hidden = config.hidden_size
    norms: Shapes = {"input_norm": (hidden,), "post_attention_norm": (hidden,)}
    if not config.num_experts:
        inter = config.intermediate_size
        return norms | {"mlp/gate_up": (2 * inter, hidden), "mlp/down": (hidden, inter)}
    experts, inter, shared = config.num_experts, config.moe_intermediate_size, config.shared_expert_intermediate_size
    return norms | {
        "mlp/router": (experts + 1, hidden),
        "mlp/experts/gate_up": (experts * 2 * inter, hidden),
        "mlp/experts/down": (experts * hidden, inter),
        "mlp/shared/gate_up": (2 * shared, hidden),
        "mlp/shared/down": (hidden, shared),
    }
