"""One module a family of models: its config.json, whose fields `checkpoint_fields` has checked, to a `ModelConfig`."""
