"""Decoder models, each described by a `ModelConfig`: `checkpoint_config` has the list of supported architectures.

It reads Hugging Face's config.json of each family, and `weights` fills the model, or a rank's share, from safetensors.
`transformer` is the model: a `decoder` made of `layers` and `moe`. What sets most families apart is data, not code; the
layers of later Gemmas are more than the rest's, and in `gemma`.
"""
