"""Decoder models: one transformer for all families, described by a `ModelConfig`.

`checkpoint_config` reads Hugging Face's config.json into it, `transformer` is the model, made of `layers` and `rope`,
and `weights` fills it from safetensors. What sets a family apart is data, not code.
"""
