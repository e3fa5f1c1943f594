"""The Qwen3.5 family: Gated DeltaNet and gated attention, dense or MoE, with an MTP head."""
