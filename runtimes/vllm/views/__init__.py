"""HuggingFace's modules, acted out over vLLM's."""
