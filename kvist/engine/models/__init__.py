"""Decoder models, each described by a `ModelConfig`: `checkpoint_config` has the list of supported architectures.

`families` reads Hugging Face's config.json of each family into it, `weights` fills the model from safetensors.
`transformer` is the model: a `decoder` made of `layers`, `moe` and `rope`. What sets most families apart is data, not
code; a family whose layers are more than the rest's has its decoder in a module of its name.
"""
