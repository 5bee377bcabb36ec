"""What each runtime knows: how it loads a model, and which of its values are pieces."""
