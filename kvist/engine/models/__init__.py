"""Decoder models: transformers' own, whose attention reads and writes paged memory.

`config` says which architectures and what each layer asks of that memory, `transformer` is the model, and `weights`
fills it, or a rank's share of it, from safetensors.
"""
